"""The option ``expose="listed"``: what calls may name, and every way around it."""

import functools
import importlib
import operator
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trust_helpers import Net, call_in_every_form, double, ran, refused

from telegrad import rpc
from telegrad.compat.rpc import invoke
from telegrad.errors import NotExposed
from telegrad.nn import RemoteModule, owner
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import internal
from telegrad.rpc.chunks import run_chunk
from telegrad.streams import serving
from telegrad.testing import cluster
from telegrad.worker.calls.interception import CallForm
from telegrad.worker.calls.interceptors import InterceptedCall, Proceed
from telegrad.worker.serving.exposure import exposed
from telegrad.worker.serving.once import run_once

HELPERS = "trust_helpers"


def secret(*_: object, **__: object) -> str:
    ran.append("secret")
    return "secret"


def secret_items(n: int) -> Iterator[int]:
    ran.append("secret_items")
    yield from range(n)


@rpc.functions.async_execution
def secret_async(_: object = None) -> "torch.futures.Future[int]":
    ran.append("secret_async")
    done: torch.futures.Future[int] = torch.futures.Future()
    done.set_result(1)
    return done


@torch.jit.script  # type: ignore[untyped-decorator]
def secret_script(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Secret:
    def __init__(self) -> None:
        ran.append("Secret")

    def method(self) -> None:
        ran.append("Secret.method")


class Derived(Net):
    def scores(self, n: int) -> Iterator[int]:
        ran.append("Derived.scores")
        yield n


def hidden(name: str) -> Any:
    """Return an object that only this module's globals have."""
    return globals()[name]


partial_secret = functools.partial(secret, 1)
alias = os.getpid


# ---- what is exposed runs


def test_exposed_functions_run_in_every_form_of_call(group: Any) -> None:
    call_in_every_form()


def test_methods_of_an_exposed_class_run(group: Any) -> None:
    net = rpc.remote("w1", Net)
    x = torch.ones(1, 2)
    assert net.rpc_sync().forward(x).shape == (1, 1)
    assert net.rpc_async().forward(x).wait().shape == (1, 1)
    assert net.remote().forward(x).to_here().shape == (1, 1)
    assert list(net.stream().scores(3)) == [0, 1, 2]
    assert net.get_attr("size") == 2
    assert rpc.remote("w1", double, (torch.ones(2),)).backward is not None


def test_a_decorated_class_and_function(listed: Callable[..., None]) -> None:
    assert rpc.expose(double) is double
    assert rpc.expose(Net) is Net
    listed(f"{HELPERS}:double", f"{HELPERS}:Net", f"{HELPERS}:Net.*")  # removed at the end
    with cluster(2, rpc.Options(expose="listed")):
        assert rpc.rpc_sync("w1", double, (1,)) == 2
        assert rpc.remote("w1", Net).rpc_sync().forward(torch.ones(1, 2)).shape == (1, 1)


def test_a_class_by_the_name_of_a_module_that_has_imported_it(listed: Callable[..., None]) -> None:
    listed("torch.nn:Linear")
    with cluster(2, rpc.Options(expose="listed")):
        assert RemoteModule("w1", nn.Linear, (2, 1))(torch.ones(1, 2)).shape == (1, 1)
        refused(lambda: RemoteModule("w1", nn.Bilinear, (2, 2, 1))(torch.ones(1, 2), torch.ones(1, 2)))


def test_builtins_and_operators_by_their_names(listed: Callable[..., None]) -> None:
    rpc.expose(torch.add)
    listed("torch:add", "builtins:max", "builtins:dict.fromkeys")
    with cluster(2, rpc.Options(expose="listed")):
        assert rpc.rpc_sync("w1", torch.add, (torch.ones(1), 1)).item() == 2
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
        assert rpc.rpc_sync("w1", dict.fromkeys, ((1,),)) == {1: None}
        refused(lambda: rpc.rpc_sync("w1", torch.sub, (torch.ones(1), 1)))
        refused(lambda: rpc.rpc_sync("w1", min, (1, 2)))


def test_patterns(listed: Callable[..., None]) -> None:
    listed(f"{HELPERS}:dou*", f"{HELPERS}:N?t.sc[n-p]res", "_operator:a*")
    with cluster(2, rpc.Options(expose="listed")) as group:
        assert rpc.rpc_sync("w1", double, (1,)) == 2
        with group[1]:
            net = rpc.RRef(Net())
        copy = group[0].rpc_sync("w1", operator.add, (1, 2))
        assert copy == 3
        with group[1]:
            assert list(net.stream().scores(2)) == [0, 1]
        refused(lambda: rpc.rpc_sync("w1", operator.sub, (1, 2)))
        refused(lambda: rpc.rpc_sync("w1", Net))


def test_everything_is_exposed_by_default() -> None:
    with cluster(2):
        assert rpc.rpc_sync("w1", eval, ("1 + 1",)) == 2
        assert rpc.rpc_sync("w1", lambda: 3) == 3


# ---- what is not exposed is refused, in every form


FORMS: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("w1", secret),
    "rpc_async": lambda: rpc.rpc_async("w1", secret).wait(),
    "call": lambda: rpc.rpc_sync("w1", secret, timeout=10),
    "remote": lambda: rpc.remote("w1", secret).to_here(),
    "remote of a class": lambda: rpc.remote("w1", Secret).to_here(),
    "async_execution": lambda: rpc.rpc_sync("w1", secret_async),
    "multicast": lambda: rpc.multicast(["w1"], secret)[0].wait(),
    "retry": lambda: rpc.rpc_sync("w1", secret, retry=rpc.Retry()),
    "stream": lambda: list(rpc.stream("w1", secret_items, (3,))),
    "map": lambda: list(rpc.map("w1", secret, range(3))),
    "map of an async function": lambda: list(rpc.map("w1", secret_async, range(3))),
    "partial": lambda: rpc.rpc_sync("w1", functools.partial(secret)),
    "partial of an exposed function": lambda: rpc.rpc_sync("w1", functools.partial(double, 1)),
    "lambda": lambda: rpc.rpc_sync("w1", lambda: ran.append("lambda")),
    "lambda in a map": lambda: list(rpc.map("w1", lambda _: ran.append("lambda"), range(3))),
    "lambda in a stream": lambda: list(rpc.stream("w1", lambda: iter([ran.append("lambda")]))),
    "lambda with retry": lambda: rpc.rpc_sync("w1", lambda: ran.append("lambda"), retry=rpc.Retry()),
    "method of an object that is sent": lambda: rpc.rpc_sync("w1", [1].append, (2,)),
    "scripted function": lambda: rpc.rpc_sync("w1", secret_script, (torch.ones(1),)),
    "eval": lambda: rpc.rpc_sync("w1", eval, ("1",)),
    "getattr": lambda: rpc.rpc_sync("w1", getattr, (1, "real")),
    "os.system": lambda: rpc.rpc_sync("w1", os.system, ("true",)),
    "Popen": lambda: rpc.remote("w1", subprocess.Popen, (["true"],)).to_here(),
    "operator.attrgetter": lambda: rpc.rpc_sync("w1", operator.attrgetter, ("a",)),
    "import": lambda: rpc.rpc_sync("w1", importlib.import_module, ("os",)),
    "type with three arguments": lambda: rpc.rpc_sync("w1", type, ("X", (), {})),
    "remote module": lambda: RemoteModule("w1", nn.Linear, (1, 1)).module_rref.to_here(),
    "optimizer": lambda: DistributedOptimizer(Secret, [rpc.remote("w1", double, (1,))]),
    "pickled call": lambda: invoke._invoke_rpc_python_udf(
        rpc.get_worker_info("w1"), *internal.serialize(internal.PythonUDF(double, (1,), {})), 10.0, False
    ).wait(),
    "operator by name": lambda: invoke._invoke_rpc_builtin(
        rpc.get_worker_info("w1"), "aten::add", 10.0, torch.ones(1), 1
    ).wait(),
    "scripted function by name": lambda: invoke._invoke_rpc_torchscript(
        "w1", secret_script.qualified_name, (torch.ones(1),), {}, 10.0, False
    ).wait(),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_functions_are_refused(form: str, group: Any) -> None:
    with pytest.raises((NotExposed, TypeError)) as caught:
        FORMS[form]()
    assert isinstance(caught.value, NotExposed) or form == "type with three arguments"


class Callback:
    """Registered type, whose objects a request may have as its function."""

    def __call__(self) -> None:
        ran.append("Callback")


def test_a_function_that_is_plain_data_is_refused(listed: Callable[..., None]) -> None:
    with cluster(2, rpc.Options(expose="listed", allow_pickle=False)) as group:
        for worker in group:
            with worker:
                rpc.register_type(Callback, lambda _: (), lambda _: Callback())
        refused(lambda: rpc.rpc_sync("w1", Callback()))


def test_the_error_says_how_to_expose(group: Any) -> None:
    assert f'rpc.expose("{__name__}:secret")' in refused(lambda: rpc.rpc_sync("w1", secret))
    by_value = refused(lambda: rpc.rpc_sync("w1", lambda: None))
    assert "sent by value" in by_value
    assert "call a function of a module that calls it, and expose that one" in by_value
    net = rpc.remote("w1", Net)
    assert f'"{HELPERS}:Net.apply"' in refused(lambda: net.rpc_sync().apply())


@pytest.mark.parametrize(
    "name",
    [
        "_private",
        "__class__",
        "__init__",
        "__setattr__",
        "__getattribute__",
        "__reduce_ex__",
        "layer",  # an attribute of the object
        "hook",
        "apply",  # inherited
        "register_forward_hook",
        "load_state_dict",
    ],
)
def test_other_methods_are_refused(name: str, group: Any) -> None:
    net = rpc.remote("w1", Net)
    net.rpc_sync().forward(torch.ones(1, 2))  # the value exists
    client = group[0]._worker.calls.client
    refused(lambda: client.call(1, name, (), {}, 0, net, False))
    refused(lambda: client.start(1, name, (), {}, 0, net, False).wait())
    refused(lambda: net._create(name, (), {}, 0).to_here())
    refused(lambda: client.start(1, serving.open_method, (0, 1, name, (), {}), {}, 0, net, False).wait())
    refused(lambda: net.get_attr(name))


def test_an_overridden_or_inherited_method_is_exposed_by_its_own_class(group: Any, listed: Callable[..., None]) -> None:
    with group[1]:
        net, service = rpc.RRef(Derived()), "nets"
        rpc.register_service(service, net)
    theirs = rpc.get_service(service)
    assert theirs.rpc_sync().forward(torch.ones(1, 2)).shape == (1, 1)  # Net defines and exposes it
    refused(lambda: list(theirs.stream().scores(1)))
    refused(lambda: theirs.rpc_sync().__call__(torch.ones(1, 2)))  # Derived is not exposed
    listed(f"{__name__}:Derived.extra_repr")  # a name without wildcards exposes what is inherited
    assert theirs.rpc_sync().extra_repr() == ""


def test_dotted_paths_to_attributes_are_checked_at_each_step(group: Any) -> None:
    net = rpc.remote("w1", Net)
    for path in ("forward.__globals__", "forward.__func__", "__class__.__mro__", "size.real", "layer.weight"):
        refused(lambda path=path: net.get_attr(path))  # type: ignore[misc]


# ---- names that only an attacker sends


def raw_call(group: Any, text: bytes, *args: object) -> object:
    """Call a name that no function of the caller has."""
    calls = group[0]._worker.calls
    form = CallForm(1, double, args, {}, 0, 0, None, "", (4711, text), None, False, None, False)
    return calls.client.call_request(calls.encode(form))


class Canary:
    """Object whose pickle runs a function."""

    def __reduce__(self) -> Any:
        return secret, ()


ATTACKS = [
    b"Gos\0system",
    b"Gbuiltins\0eval",
    b"Gbuiltins\0type.__subclasses__",
    f"G{HELPERS}\0double.__globals__.get".encode(),
    f"G{HELPERS}\0double.__call__".encode(),
    f"G{HELPERS}\0Net.forward.__globals__.get".encode(),
    f"G{HELPERS}\0Net.__init__".encode(),
    f"G{HELPERS}\0Net.__class__".encode(),
    f"G{HELPERS}\0Net.apply".encode(),  # inherited
    f"G{__name__}\0os.system".encode(),  # a module that this one has imported
    f"G{HELPERS}\0nn.Linear".encode(),
    f"G{HELPERS}\0context".encode(),  # a function that this one has imported
    f"G{__name__}\0alias".encode(),
    f"G{__name__}\0partial_secret".encode(),
    f"G{__name__}\0ran.append".encode(),
    f"G{HELPERS}:double\0double".encode(),
    f"G.{HELPERS}\0double".encode(),
    f"G{HELPERS}\0".encode(),
    b"G",
    b"P" + pickle.dumps(Canary()),
    b"Gtelegrad.worker.calls.callables\0find_function",
    b"Gtelegrad.compat.rpc.invoke\0run_pickled",
    b"Gtelegrad.optim.owner\0create_part",
    b"Gtorch\0ops.aten.add",
    b"Gtorch\0load",
]


@pytest.mark.parametrize("text", ATTACKS, ids=repr)
def test_names_of_an_attacker_are_refused_even_with_wide_patterns(
    text: bytes, group: Any, listed: Callable[..., None]
) -> None:
    listed(*(f"{module}:{pattern}" for module in (__name__, HELPERS) for pattern in ("*", "*.*")))
    for module in ("secret", "secret_items", "secret_async", "hidden"):
        assert exposed.has_pattern((__name__, module))
    refused(lambda: raw_call(group, text, Canary()))


def test_nothing_is_imported_or_unpickled_for_a_refused_call(group: Any, tmp_path: Path) -> None:
    (tmp_path / "canary_of_the_list.py").write_text("def f(*_): return 1\n")
    sys.path.insert(0, str(tmp_path))
    try:
        for _ in range(2):
            refused(lambda: raw_call(group, b"Gcanary_of_the_list\0f", Canary()))
            refused(lambda: raw_call(group, b"Mcanary", Canary()))
            refused(lambda: rpc.rpc_sync("w1", lambda _: None, (Canary(),)))
            refused(lambda: list(rpc.map("w1", resolve_later, [1])))
        assert "canary_of_the_list" not in sys.modules
        for carrier, args in (
            (serving.open_function, (0, 1, b"Gcanary_of_the_list\0f", (), {})),
            (run_chunk, (b"Gcanary_of_the_list\0f", [1], 0)),
            (run_once, ((1, 1), 1.0, b"Gcanary_of_the_list\0f", (), {})),
            (owner.make_module, (b"Gcanary_of_the_list\0f", (), {}, "cpu")),
        ):
            refused(lambda carrier=carrier, args=args: rpc.rpc_sync("w1", carrier, args))  # type: ignore[misc]
        assert "canary_of_the_list" not in sys.modules
    finally:
        sys.path.remove(str(tmp_path))


def resolve_later(_: object) -> None:
    ran.append("resolve_later")


def test_interceptors_of_the_callee_do_not_open_a_way_around(group: Any, tmp_path: Path) -> None:
    seen: list[str] = []

    def watch(call: InterceptedCall, proceed: Proceed) -> object:
        seen.append(call.name)
        return proceed(call)

    (tmp_path / "canary_of_interceptors.py").write_text("def f(*_): return 1\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with group[1]:
            registration = rpc.intercept(server=watch)
        with registration:
            assert rpc.rpc_sync("w1", double, (1,)) == 2
            assert list(rpc.map("w1", double, [1])) == [2]
            refused(lambda: rpc.rpc_sync("w1", secret))
            refused(lambda: rpc.rpc_sync("w1", run_chunk, (b"Gcanary_of_interceptors\0f", [1], 0)))
        assert seen == ["double", "double"]
        assert "canary_of_interceptors" not in sys.modules
    finally:
        sys.path.remove(str(tmp_path))


def test_a_pickler_of_the_program_does_not_carry_functions_past_the_list(group: Any) -> None:
    with rpc.api._use_rpc_pickler(internal._internal_rpc_pickler):
        refused(lambda: rpc.rpc_sync("w1", double, (1,)))


def test_a_pattern_follows_a_name_that_gets_another_object(group: Any, listed: Callable[..., None]) -> None:
    module = types.ModuleType("changing_list")
    exec("def f(): return 1", module.__dict__)
    sys.modules["changing_list"] = module
    try:
        listed("changing_list:*")
        assert raw_call(group, b"Gchanging_list\0f") == 1
        module.f = secret  # type: ignore[attr-defined]
        refused(lambda: raw_call(group, b"Gchanging_list\0f"))
    finally:
        del sys.modules["changing_list"]
