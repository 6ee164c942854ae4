"""Methods of remote modules, told from values without a request to the owner."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from module_helpers import pass_back
from torch import nn

from telegrad import rpc
from telegrad.errors import NotExposed, TelegradError
from telegrad.nn import RemoteModule, owner
from telegrad.nn.method_names import class_made_by, method_names
from telegrad.options import Options
from telegrad.rpc import RRef
from telegrad.testing import cluster
from telegrad.worker.serving.exposure import exposed

pytestmark = pytest.mark.usefixtures("clean")


class Mixin:
    def mixed(self, x: int) -> int:
        return x + 100


class Model(nn.Module, Mixin):
    """Module with methods of several kinds, and with values of their names."""

    hidden = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = Inner()
        self.size = 3
        self.act = torch.tanh

    def enc(self, x: int) -> int:
        return x + 1

    async def later(self, x: int) -> int:
        return x + 2

    def gen(self, count: int) -> Iterator[int]:
        yield from range(count)

    async def agen(self, count: int) -> AsyncIterator[int]:
        for i in range(count):
            yield i

    @staticmethod
    def static(x: int) -> int:
        return x + 3

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    partial = functools.partialmethod(enc, 9)

    @property
    def doubled(self) -> int:
        return 2 * self.size


class Inner(nn.Module):
    def enc(self, x: int) -> int:
        return x + 50


class NoLongerHidden(Model):
    enc = 7  # type: ignore[assignment]


class Computed(nn.Module):
    def __getattribute__(self, name: str) -> Any:
        return 4 if name == "enc" else super().__getattribute__(name)

    def enc(self) -> int:
        return 5


def factory() -> nn.Module:
    return Model()


def calls_of(use: Callable[[], object]) -> list[str]:
    """Return the names of the calls that a function makes."""
    names: list[str] = []

    def note(call: Any, proceed: Any) -> Any:
        names.append(call.name)
        return proceed(call)

    with rpc.intercept(client=note):
        use()
    return names


async def use_methods(module: RemoteModule) -> list[Any]:
    return [
        await module.enc.call(1),
        await module.enc.rpc_async(2),
        await module.later.call(3),
        await module.enc.remote(4),
        [item async for item in module.gen.stream(3)],
        [item async for item in module.agen.stream(2)],
        await module.mixed.call(5),
    ]


USED = [2, 3, 5, 5, [0, 1, 2], [0, 1], 105]

MADE: dict[str, Callable[[], RemoteModule]] = {
    "by its class": lambda: RemoteModule("w1", Model),
    "by a partial": lambda: RemoteModule("w1", functools.partial(Model)),
    "on this worker": lambda: RemoteModule("w0", Model),
    "from a reference": lambda: RemoteModule.init_from_module_rref("w1", rpc.remote("w1", Model)),
    "from a value": lambda: RemoteModule.init_from_module_rref("cpu", RRef(Model())),
    "by a factory, after a use": lambda: used(RemoteModule("w1", factory)),
    "as a submodule": lambda: RemoteModule("w1", nn.ModuleList, ([Model()],)).get_submodule("0"),
}


def used(module: RemoteModule) -> RemoteModule:
    assert module.enc(1) == 2
    return module


@pytest.mark.parametrize("made", MADE)
def test_methods_in_a_handler(made: str) -> None:
    module = MADE[made]()
    assert rpc.rpc_sync("w2", use_methods, (module,)) == USED
    back = rpc.rpc_sync("w2", pass_back, (module,))
    assert rpc.rpc_sync("w2", use_methods, (back,)) == USED
    del back


@pytest.mark.parametrize("made", MADE)
def test_methods_need_no_request(made: str) -> None:
    module = MADE[made]()
    assert calls_of(lambda: asyncio.run(use_methods(module)))[:2] == ["enc", "enc"]
    assert calls_of(lambda: [module.enc(1), list(module.gen.stream(2))]) == ["enc", "gen"]
    assert calls_of(lambda: [module.static, module.of_class, module.partial, hasattr(module, "enc")]) == []
    assert [module.static(1), module.of_class(), module.partial()] == [4, "Model", 10]


def test_a_factory_needs_one_request() -> None:
    module = RemoteModule("w1", factory)
    assert calls_of(lambda: [module.enc(1), module.enc(2), module.gen]) == ["read_member", "enc", "enc"]
    other = RemoteModule("w1", factory)
    assert calls_of(lambda: [other.size, other.enc(2)]) == ["read_member", "enc"]
    assert other.size == 3


def set_member(module: RRef[Any], name: str, value: Any) -> None:
    setattr(module.local_value(), name, value)


def tripled(x: int) -> int:
    return 3 * x


@pytest.mark.parametrize("maker", [Model, factory])
def test_values_are_read_from_the_owner(maker: Any) -> None:
    module = RemoteModule("w1", maker)
    assert [module.size, module.doubled, module.hidden] == [3, 6, None]
    assert torch.equal(module.act(torch.ones(2)), torch.ones(2).tanh())
    with pytest.raises(AttributeError, match="neither 'RemoteModule' nor the remote 'Model' has an attribute 'fresh'"):
        module.fresh  # noqa: B018
    with pytest.raises(AttributeError, match="'layer' is a submodule of the remote module"):
        module.layer  # noqa: B018
    for name, value in (("size", 4), ("fresh", 5), ("hidden", 6)):
        rpc.rpc_sync("w1", set_member, (module.module_rref, name, value))
        assert getattr(module, name) == value
    assert module.doubled == 8
    rpc.rpc_sync("w1", set_member, (module.module_rref, "fresh", tripled))
    assert module.fresh(2) == 6


@pytest.mark.parametrize("maker", [Model, factory])
def test_a_method_that_the_module_replaces(maker: Any) -> None:
    module = RemoteModule("w1", maker)
    assert module.enc(2) == 3
    rpc.rpc_sync("w1", set_member, (module.module_rref, "enc", tripled))
    assert module.enc(2) == 6
    rpc.rpc_sync("w1", set_member, (module.module_rref, "enc", 8))
    with pytest.raises(TypeError, match=r"'enc' of Model is not a method but of type int.*get_attr\('enc'\)"):
        module.enc(2)
    assert module.module_rref.get_attr("enc") == 8


def replaced() -> nn.Module:
    model = Model()
    model.enc = 8  # type: ignore[assignment,method-assign]
    return model


def test_a_method_that_was_replaced_before_the_first_use() -> None:
    module = RemoteModule("w1", replaced)
    assert module.gen
    assert module.enc == 8


def test_classes_decide_only_what_they_know() -> None:
    assert RemoteModule("w1", NoLongerHidden).enc == 7
    assert RemoteModule("w1", Computed).enc == 4
    assert "enc" in method_names(Model)
    assert not {"enc", "hidden", "act", "size", "doubled", "forward", "to"} & set(method_names(NoLongerHidden))
    assert "mixed" in method_names(NoLongerHidden)
    assert class_made_by(functools.partial(functools.partial(Model))) is Model
    assert class_made_by(factory) is None
    assert class_made_by(type("Other", (Model,), {"__new__": lambda cls: Model()})) is None
    assert class_made_by(type("Meta", (type,), {"__call__": lambda cls: Model()})("Made", (Model,), {})) is None


async def read_in_a_handler(module: RemoteModule, name: str) -> object:
    return getattr(module, name)


@pytest.mark.parametrize("name", ["size", "doubled", "nothing"])
def test_values_cannot_be_read_in_a_handler(name: str) -> None:
    module = RemoteModule("w1", Model)
    with pytest.raises(
        TelegradError, match=rf"reading '{name}' of a remote module.*would block the event loop of .*w2"
    ):
        rpc.rpc_sync("w2", read_in_a_handler, (module, name))
    made = RemoteModule("w1", factory)
    with pytest.raises(TelegradError, match=r"would block .*`await module.module_rref.call\(\).enc\(\.\.\.\)`"):
        rpc.rpc_sync("w2", read_in_a_handler, (made, "enc"))


def test_a_failed_creation_raises_in_the_call() -> None:
    module = RemoteModule("w1", Model, (1, 2, 3))
    with pytest.raises(TypeError, match="positional argument"):
        module.enc(1)


@pytest.fixture
def listed() -> Iterator[None]:
    paths = [(__name__, "factory"), (__name__, "Model.enc")]
    for path in paths:
        exposed.add(*path)
    yield
    for path in paths:
        exposed.remove(*path)


@pytest.mark.usefixtures("listed")
def test_a_worker_with_a_list_names_only_what_it_exposes() -> None:
    with cluster(2, Options(expose="listed")):
        made = RemoteModule("w1", factory)
        assert made.enc(1) == 2
        answer = rpc.rpc_sync("w1", owner.read_member, (made.module_rref, "enc", True))
        assert answer == (owner.AttributeInfo.METHOD, None, ("enc",))
        for name in ("gen", "size"):
            with pytest.raises(NotExposed):
                getattr(made, name)
        with pytest.raises(NotExposed):
            RemoteModule("w1", Model).enc(1)


HELPERS = ("_sync", "_async", "_change", "_make", "_place", "_adopt", "_remote_methods")


class Private(nn.Module):
    """Module with methods that have common names of helpers."""


for _name in HELPERS:
    setattr(Private, _name, lambda self, name=_name: name)


@pytest.mark.parametrize("name", HELPERS)
def test_methods_with_names_of_helpers(name: str) -> None:
    with cluster(2) as group, group[0]:
        module = RemoteModule("w1/cpu", Private)
        again = RemoteModule.init_from_module_rref("w1", module.module_rref)
        assert getattr(module, name)() == getattr(again, name)() == name
        del module, again
