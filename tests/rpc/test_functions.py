import pickle
from typing import Any

import torch

from telegrad.rpc.functions import async_execution


@async_execution
def plain(x: Any) -> Any:
    "Its own text."
    return x


class Methods:
    @async_execution
    def bound(self, x: Any) -> Any:
        return (type(self), x)

    @staticmethod
    @async_execution
    def static_outside(x: Any) -> Any:
        return x

    @async_execution
    @staticmethod
    def static_inside(x: Any) -> Any:
        return x

    @classmethod
    @async_execution
    def class_outside(cls, x: Any) -> Any:
        return (cls, x)

    @async_execution
    @classmethod
    def class_inside(cls, x: Any) -> Any:
        return (cls, x)


def test_the_mark_is_found_through_every_kind_of_method() -> None:
    for holder in (Methods, Methods()):
        for name in ("bound", "static_outside", "static_inside", "class_outside", "class_inside"):
            assert hasattr(getattr(holder, name), "_wrapped_async_rpc_function"), name
    assert hasattr(plain, "_wrapped_async_rpc_function")


def test_marked_functions_still_run_locally() -> None:
    assert plain(1) == 1
    assert plain.__doc__ == "Its own text."
    assert pickle.loads(pickle.dumps(plain)) is plain
    thing = Methods()
    assert thing.bound(1) == thing.class_outside(1) == thing.class_inside(1) == Methods.class_inside(1) == (Methods, 1)
    assert thing.static_outside(1) == thing.static_inside(1) == Methods.static_inside(1) == 1


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@async_execution
@torch.jit.script
def scripted(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(double, x)


def test_over_a_scripted_function() -> None:
    assert isinstance(scripted._wrapped_async_rpc_function, torch.jit.ScriptFunction)
    assert torch.equal(scripted(torch.ones(1)).wait(), torch.full((1,), 2.0))
    assert pickle.loads(pickle.dumps(scripted)) is scripted
