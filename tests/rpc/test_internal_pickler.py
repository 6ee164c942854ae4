"""The pickler that programs subclass and replace."""

import threading
from typing import Any

import pytest
import torch

from telegrad.rpc import internal
from telegrad.rpc.internal import PythonUDF, RPCExecMode, _build_rpc_profiling_key, _InternalRPCPickler


class Nested:
    """Value that pickles inside of its own pickling."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> Any:
        return internal.serialize([self.tensor, self.tensor + 1])

    def __setstate__(self, state: Any) -> None:
        self.tensor = sum(internal.deserialize(*state))


class Secret:
    def __init__(self, word: str) -> None:
        self.word = word


def rot(secret: Secret) -> tuple[Any, ...]:
    return Secret, (secret.word[::-1],)


def gone() -> None:
    pass


def test_tensors_are_separate_from_the_bytes() -> None:
    x = torch.ones(1000)
    data, tensors = internal.serialize(PythonUDF(torch.add, (x, {"y": x}), None))
    assert len(data) < 500
    assert [t is x for t in tensors] == [True]
    function, args, kwargs = internal.deserialize(data, tensors)
    assert function is torch.add
    assert args[0] is args[1]["y"] is x
    assert kwargs is None


def test_pickling_within_pickling() -> None:
    data, tensors = internal.serialize([torch.zeros(2), Nested(torch.ones(2)), torch.full((2,), 7.0)])
    first, nested, last = internal.deserialize(data, tensors)
    assert (first[0], nested.tensor[0], last[0]) == (0, 3, 7)


def test_error_keeps_no_state() -> None:
    with pytest.raises(TypeError):
        internal.serialize([torch.ones(1), threading.Lock()])
    data, tensors = internal.serialize(torch.ones(1))
    assert len(tensors) == 1
    assert torch.equal(internal.deserialize(data, tensors), torch.ones(1))


def test_scripted_module_is_sent_completely() -> None:
    module = torch.jit.script(torch.nn.Linear(2, 2))
    twin = internal.deserialize(*internal.serialize(module))
    assert torch.equal(twin(torch.ones(2)), module(torch.ones(2)))


def test_first_reducer_registered_stays() -> None:
    pickler = _InternalRPCPickler()
    pickler._register_reducer(Secret, rot)
    pickler._register_reducer(Secret, lambda secret: (Secret, ("other",)))
    assert pickler.deserialize(*pickler.serialize(Secret("abc"))).word == "cba"


def test_derived_pickler_overrides_reducers() -> None:
    class Doubling(_InternalRPCPickler):
        def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Any, ...]:
            return super()._tensor_reducer(tensor * 2)

    assert internal.deserialize(*Doubling().serialize([torch.ones(1)]))[0] == 2


def test_missing_function(monkeypatch: pytest.MonkeyPatch) -> None:
    data, tensors = internal.serialize(PythonUDF(gone, (), {}))
    monkeypatch.delattr(f"{__name__}.gone")
    error = internal.deserialize(data, tensors)
    assert isinstance(error, AttributeError)
    assert "Default RPC pickler does not serialize" in str(error)


def test_profiling_key() -> None:
    assert _build_rpc_profiling_key(RPCExecMode.REMOTE, "foo", "w0", "w1") == "rpc_remote#foo(w0 -> w1)"
