"""Remote calls of every kind of callable."""

import functools
import math
import operator
import threading
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.testing import Gate

pytestmark = [
    pytest.mark.usefixtures("clean", "quiet"),
    pytest.mark.filterwarnings("error", "ignore:`torch.jit:DeprecationWarning"),
]


def where(*args: Any, **kwargs: Any) -> Any:
    return rpc.get_worker_info().name, args, kwargs


class Account:
    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def add(self, amount: int) -> tuple[str, int]:
        return rpc.get_worker_info().name, self.balance + amount

    def __call__(self, amount: int) -> tuple[str, int]:
        return self.add(amount)

    @classmethod
    def opened(cls, balance: int) -> tuple[str, str, int]:
        return rpc.get_worker_info().name, cls.__name__, balance

    @staticmethod
    def bank(name: str) -> tuple[str, str]:
        return rpc.get_worker_info().name, name

    def _private(self) -> int:
        return self.balance

    class Nested:
        @staticmethod
        def deep() -> str:
            return rpc.get_worker_info().name


class Savings(Account):
    pass


def call(how: str, function: Any, args: Any = None, kwargs: Any = None) -> Any:
    if how == "sync":
        return rpc.rpc_sync("w1", function, args, kwargs)
    if how == "async":
        return rpc.rpc_async("w1", function, args, kwargs).wait()
    return rpc.remote("w1", function, args, kwargs).to_here()


ways = pytest.mark.parametrize("how", ["sync", "async", "remote"])


@ways
def test_functions_methods_and_classes(how: str) -> None:
    assert call(how, where, (1,), {"x": 2}) == ("w1", (1,), {"x": 2})
    assert call(how, Account(3).add, (4,)) == ("w1", 7)
    assert call(how, Account(3), (4,)) == ("w1", 7)
    assert call(how, Account.opened, (5,)) == ("w1", "Account", 5)
    assert call(how, Savings.opened, (5,)) == ("w1", "Savings", 5)
    assert call(how, Account(3).opened, (5,)) == ("w1", "Account", 5)
    assert call(how, Account.bank, ("b",)) == ("w1", "b")
    assert call(how, Account(1).bank, ("b",)) == ("w1", "b")
    assert call(how, Account(8)._private) == 8
    assert call(how, Account.add, (Account(1), 1)) == ("w1", 2)
    assert call(how, Account.Nested.deep) == "w1"
    made = call(how, Account, (9,))
    assert type(made) is Account
    assert made.balance == 9


@ways
def test_lambdas_closures_and_partials(how: str) -> None:
    base = 10

    def closure(x: int) -> tuple[str, int]:
        return rpc.get_worker_info().name, base + x

    class Local:
        def method(self) -> str:
            return rpc.get_worker_info().name

    assert call(how, lambda x: x * base, (4,)) == 40
    assert call(how, closure, (1,)) == ("w1", 11)
    assert call(how, Local().method) == "w1"
    assert call(how, functools.partial(where, 1, k=2), (3,)) == ("w1", (1, 3), {"k": 2})
    assert call(how, functools.partial(closure, 5)) == ("w1", 15)
    assert call(how, operator.itemgetter(1), ([7, 8],)) == 8
    assert call(how, operator.methodcaller("upper"), ("a",)) == "A"


@ways
@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (max, (1, 2), 2),
        (math.hypot, (3, 4), 5.0),
        (len, ([1, 2],), 2),
        (int, ("12",), 12),
        (dict, ([("a", 1)],), {"a": 1}),
        (type, (1,), int),
        ([3, 1].count, (3,), 1),
        ("a-b".split, ("-",), ["a", "b"]),
        (str.upper, ("a",), "A"),
        (dict.fromkeys, ("ab",), {"a": None, "b": None}),
        (operator.add, (1, 2), 3),
    ],
)
def test_builtins(how: str, function: Any, args: tuple[Any, ...], expected: Any) -> None:
    assert call(how, function, args) == expected


@ways
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.add, (torch.ones(2, 2), 1)),
        (torch.mm, (torch.eye(2), torch.ones(2, 2))),
        (torch.relu, (torch.tensor([-1.0, 1.0]),)),
        (torch.nn.functional.gelu, (torch.ones(2),)),
        (torch.nn.functional.softmax, (torch.ones(2), 0)),
        (torch.Tensor.add, (torch.ones(2), 1)),
        (torch.Tensor.__mul__, (torch.ones(2), 3)),
        (torch.zeros, (2, 3)),
        (torch.linalg.norm, (torch.ones(4),)),
        (torch.ops.aten.mul, (torch.ones(2), 3)),
        (torch.ops.aten.mul.Tensor, (torch.ones(2), torch.ones(2))),
        (torch.ops.aten.relu.default, (torch.ones(2),)),
        (torch.ones(2).add, (1,)),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_torch_operators(how: str, function: Any, args: tuple[Any, ...]) -> None:
    got = call(how, function, args)
    assert torch.equal(got, function(*args))


@torch.jit.script
def scripted(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = x + 1
    return x


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * 2


@ways
def test_scripted_functions_and_modules(how: str) -> None:
    assert torch.equal(call(how, scripted, (torch.zeros(2), 3)), torch.full((2,), 3.0))
    assert torch.equal(call(how, scripted, (torch.zeros(2),), {"times": 1}), torch.ones(2))
    module = torch.jit.script(Scripted())
    assert torch.equal(call(how, module, (torch.ones(2),)), torch.full((2,), 3.0))
    traced = torch.jit.trace(torch.nn.ReLU(), torch.ones(2))
    assert torch.equal(call(how, traced, (-torch.ones(2),)), torch.zeros(2))


gate = Gate()


@torch.jit.ignore
def enter_script() -> None:
    gate.entered.release()


@torch.jit.script
def long_script(x: torch.Tensor) -> torch.Tensor:
    enter_script()
    for _ in range(100_000_000):
        if float(x[0]) > 0:
            break
    return x


def test_scripts_run_without_the_gil() -> None:
    """The script spins until this thread, which needs the GIL, changes its tensor."""
    watched = torch.zeros(1)
    held[0] = watched
    future = rpc.rpc_async("w1", run_on_held, timeout=20)
    gate.wait_for()
    watched[0] = 1  # could not happen if the script held the GIL
    assert torch.equal(future.wait(), watched)


held: list[Any] = [None]


def run_on_held() -> Any:
    return long_script(held[0])


def test_calls_from_inside_a_script_raise_a_clear_error() -> None:
    def call_from_script(x: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync("w1", torch.add, (x, x))

    with pytest.raises(RuntimeError, match="out of Telegrad's scope"):
        torch.jit.script(call_from_script)


def test_modules_as_functions_and_arguments() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    x = torch.ones(1, 2)
    assert torch.equal(rpc.rpc_sync("w1", module, (x,)), module(x))
    back = rpc.rpc_sync("w1", echo, (module,))
    assert torch.equal(back(x), module(x))
    assert [type(p) for p in back.parameters()] == [torch.nn.Parameter] * 2


def echo(x: Any) -> Any:
    return x


@pytest.mark.parametrize("start", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
@pytest.mark.parametrize("nothing", [None, 3, "torch.add", []])
def test_values_that_are_not_callable_raise(start: Any, nothing: Any) -> None:
    with pytest.raises(TypeError, match="function should be callable"):
        start("w1", nothing)


def test_a_function_replaced_in_its_module_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: Any, **__: Any) -> str:
        return "other"

    original = where
    assert rpc.rpc_sync("w1", where)[0] == "w1"
    other.__qualname__ = other.__name__ = "where"
    other.__module__ = __name__
    monkeypatch.setitem(globals(), "where", other)
    assert rpc.rpc_sync("w1", where) == "other"
    # The function without a name is still sent, by value.
    assert rpc.rpc_sync("w1", original) == ("w1", (), {})
    monkeypatch.undo()
    assert rpc.rpc_sync("w1", where) == ("w1", (), {})


def test_a_mock_in_a_module_is_called_by_the_callee(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched function found through its module runs on the callee, as with pickle."""
    monkeypatch.setattr(Account, "bank", staticmethod(lambda name: ("patched", name)))
    assert rpc.rpc_sync("w1", Account.bank, ("b",)) == ("patched", "b")


def test_errors_name_the_unpicklable_part() -> None:
    lock = threading.Lock()
    with pytest.raises((RuntimeError, TypeError), match="lock"):
        rpc.rpc_sync("w1", lambda: lock)
    with pytest.raises((RuntimeError, TypeError), match="lock"):
        rpc.rpc_async("w1", where, (lock,))
    with pytest.raises((RuntimeError, TypeError), match="lock"):
        rpc.remote("w1", where, (lock,))


def one_meaning() -> str:
    return "one"


def another_meaning() -> str:
    return "another"


def test_a_name_gets_another_meaning_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    first = one_meaning
    assert rpc.rpc_sync("w1", first) == "one"
    monkeypatch.setitem(globals(), "one_meaning", another_meaning)
    assert rpc.rpc_sync("w1", first) == "one"
