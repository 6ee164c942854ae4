"""Functions of Telegrad under an allow-list, and what they run for programs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from trust_helpers import Net, double, ran, refused, use_library

from telegrad import autograd, rpc
from telegrad.nn import Pipeline, RemoteModule, owner
from telegrad.nn.pipeline import requests
from telegrad.optim import owner as on_owner
from telegrad.serialize.function_names import resolve
from telegrad.worker.serving import own_functions
from telegrad.worker.serving.exposure import AllowList, ExposedNames


def secret(*_: object, **__: object) -> str:
    ran.append("secret")
    return "secret"


class Secret:
    def method(self) -> None:
        ran.append("Secret.method")


@pytest.mark.parametrize("name", own_functions.OWN_FUNCTIONS)
def test_own_functions_exist_and_have_a_reason(name: str) -> None:
    module, path = name.split(":")
    found = resolve(f"G{module}\0{path}".encode())
    assert callable(found)
    assert len(own_functions.OWN_FUNCTIONS[name]) > 10
    if module.startswith("torch.optim."):
        assert issubclass(found, torch.optim.Optimizer)
    else:
        assert module.startswith("telegrad.") or found is type


def test_methods_of_modules_are_those_of_torch() -> None:
    for name in own_functions.METHODS_OF_MODULES:
        assert callable(getattr(nn.Module, name))
    assert not own_functions.METHODS_OF_MODULES & {"apply", "compile", "register_module", "__call__", "forward"}


class Overriding(nn.Module):
    """Module with methods of the names that Telegrad calls, which are not exposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(1, 1))
        self.half = secret
        self.register_module("none", None)

    def train(self, command: object = None) -> Any:
        return secret()

    @property
    def secret(self) -> nn.Module:
        ran.append("property")
        return nn.Identity()


def test_methods_of_the_program_are_not_those_of_torch(group: Any) -> None:
    with group[1]:
        rpc.register_service("overriding", Overriding())
    value = rpc.get_service("overriding")
    refused(lambda: rpc.rpc_sync("w1", owner.change, (value, "train", ("command",), {})))
    refused(lambda: rpc.rpc_sync("w1", owner.change, (value, "half", (), {})))
    for target in ("secret", "none", "layer.secret", "layer.0.weight", "layer.__class__"):
        with pytest.raises(AttributeError, match=f"has no submodule `{target.rpartition('.')[2]}`"):
            rpc.rpc_sync("w1", owner.submodule_of, (value, target))
    assert rpc.rpc_sync("w1", owner.submodule_of, (value, "layer.0"))[0]._get_type() is nn.Linear
    assert rpc.rpc_sync("w1", owner.change, (value, "double", (), {})) == "cpu"
    assert not ran


def test_the_library_works_with_a_list(group: Any) -> None:
    use_library(group)
    with group[1]:
        rpc.register_service("number", 3)
    assert rpc.get_service("number")._get_type() is int


def test_the_functions_that_the_library_runs_are_checked(group: Any) -> None:
    remote = RemoteModule("w1/cpu", Net)
    refused(lambda: remote.apply(secret))
    refused(lambda: remote.hook())
    refused(lambda: remote._private())
    refused(lambda: Pipeline([remote], loss_fn=nn.functional.mse_loss, micro_batches=1))
    refused(lambda: Pipeline([remote], loss_fn=nn.MSELoss(), micro_batches=1))
    with group[1]:
        rpc.register_service("secret", Secret.__new__(Secret))
    value = rpc.get_service("secret")
    for name, args in (("change", ("method", (), {})), ("state_of", (True,)), ("parameters_of", (True,))):
        refused(lambda name=name, args=args: rpc.rpc_sync("w1", getattr(owner, name), (value, *args)))  # type: ignore[misc]
    refused(lambda: rpc.rpc_sync("w1", owner.forward_on_device, (value, "cpu", True, (), {})))
    config = (0, 1, "1f1b", "cpu")
    refused(lambda: rpc.rpc_sync("w1", requests.make_stage, (value, config, None)))
    for function, args in ((on_owner.step_of, (None,)), (requests.drop_step, (1,))):
        with pytest.raises(TypeError, match="refers to a"):
            rpc.rpc_sync("w1", function, (*value.id, *args))


def spread(*_: object) -> Any:
    ran.append("spread")
    return [torch.ones(1)]


def halves(gradients: Any) -> Any:
    return [gradient / 2 for gradient in gradients]


def test_functions_of_communication_hooks_are_checked(group: Any, listed: Callable[..., None]) -> None:
    x = torch.ones(1, requires_grad=True)

    def pass_with(function: Any) -> Any:
        hook = autograd.register_comm_hook(None, lambda _, bucket: (function, (bucket.gradients,)))
        with hook, autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("w1", double, (x,))])
            return autograd.get_gradients(context_id)[x]

    refused(lambda: pass_with(spread))
    refused(lambda: pass_with(lambda gradients: ran.append("lambda") or gradients))
    listed(f"{__name__}:halves")
    assert pass_with(halves).item() == 1


def test_a_function_by_value_that_an_own_function_gets() -> None:
    policy = AllowList("w1", ExposedNames())
    for function in (lambda: 1, Secret, secret, functools.partial(secret), Secret.method, [].append):
        refused(lambda function=function: policy.callee_of(function))  # type: ignore[misc]
