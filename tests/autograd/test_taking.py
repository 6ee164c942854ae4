"""How nodes know for which call of the engine they run: the leaf that tells is made once, and used again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from simulation import Group
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from telegrad.autograd import taking


@pytest.fixture(autouse=True)
def spare(monkeypatch: pytest.MonkeyPatch) -> list[taking.Call]:
    calls: list[taking.Call] = []
    monkeypatch.setattr(taking, "_spare", calls)
    return calls


def test_a_value_that_a_call_is_not_to_come_by_gives_it_nothing() -> None:
    group, x = Group(2, 0), torch.rand(3, requires_grad=True)
    (there,) = group.transfer(0, 1, [x])
    with taking.taking([]) as call:
        with pytest.raises(RuntimeError, match="goes on at another worker"):
            torch.autograd.backward([call.leaf, there.sum()], [call.gradient, None])
        assert not call.found


def test_a_leaf_is_used_again_but_by_one_at_a_time(spare: list[taking.Call]) -> None:
    with taking.taking([]) as call:
        torch.autograd.backward([call.leaf], [call.gradient])
        assert list(taking._under_way.values()) == [{}]
    assert not taking._under_way
    assert call.leaf.grad is None
    with taking.taking([]) as again, taking.taking([]) as other:
        assert again is call
        assert other is not call
    assert len(spare) == 2


class _OfAnotherClass(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.as_subclass(torch.nn.Parameter) if type(made) is Tensor else made


class _Elsewhere(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.zeros else {})})


@pytest.mark.parametrize("mode", [_OfAnotherClass, _Elsewhere])
def test_what_a_mode_of_the_program_has_made_is_not_used_again(
    mode: Callable[[], AbstractContextManager[Any]], spare: list[taking.Call]
) -> None:
    with mode(), taking.taking([]) as call:
        assert type(call.leaf) is not Tensor or call.leaf.device.type == "meta"
    assert spare == []


def test_nor_what_a_transform_has_made(spare: list[taking.Call]) -> None:
    def make(x: Tensor) -> Tensor:
        with taking.taking([]):
            return x * 2

    assert torch.func.grad(make)(torch.ones(())) == 2
    assert spare == []


def test_it_is_a_plain_tensor_wherever_it_is_made(spare: list[taking.Call]) -> None:
    with torch.inference_mode(), torch.no_grad(), torch.device("meta"), taking.taking([]):
        pass
    (call,) = spare
    assert not call.leaf.is_inference()
    assert call.leaf.requires_grad
    assert call.leaf.device.type == "cpu"
