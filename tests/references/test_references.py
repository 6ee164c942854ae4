"""Attributes, errors and proxies of references, and their end."""

import contextlib
import copy
import logging
import pickle
import re
import weakref
from io import BytesIO

import pytest
import torch
from rref_helpers import TIMEOUT, Tracked, freed, greet, make, ping

from telegrad.errors import RRefError, RRefNotPicklable
from telegrad.rpc import RRef, WorkerInfo, api
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster, cluster

ID = r"GloballyUniqueId\(created_on=0, local_id=\d+\)"


def test_attributes_on_a_user(w: Cluster) -> None:
    rref = w[0].remote("w1", make, ("one",))
    rref.to_here()
    assert rref.owner() == WorkerInfo("w1", 1)
    assert rref.owner_name() == "w1"
    assert not rref.is_owner()
    assert rref.confirmed_by_owner()
    assert re.fullmatch(r"<RRef to a value on w1, id 0\.\d+, ready>", repr(rref))
    assert isinstance(rref, api.PyRRef)


def test_a_method_that_has_run_confirms_it(w: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds whether or not the confirmation of its creation has been processed."""
    monkeypatch.setattr(w[0]._worker.references, "confirmed", lambda rref: False)
    rref = w[0].remote("w1", make, ("one",))
    assert not rref.confirmed_by_owner()
    rref.rpc_sync().greet("me")
    assert rref.confirmed_by_owner()


def test_attributes_on_the_owner(w: Cluster) -> None:
    value = Tracked("two")
    rref = w[0].rref(value)
    assert rref.owner() == WorkerInfo("w0", 0)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert re.fullmatch(r"<RRef to Tracked on w0 \(this worker\), id 0\.\d+, ready>", repr(rref))


def test_remote_to_oneself_is_an_owner(w: Cluster) -> None:
    rref = w[0].remote("w0", make, ("self",))
    assert rref.is_owner()
    assert rref.local_value() is rref.to_here()
    assert rref.rpc_sync().greet("x") == "self greets x"
    end = freed("self")
    del rref
    assert end.wait(TIMEOUT)


def test_equality_is_identity(w: Cluster) -> None:
    rref = w[0].rref(1)
    (again,) = w[0].rpc_sync("w1", list, ((rref,),))
    assert rref == rref  # noqa: PLR0124
    assert again != rref


def test_local_value_on_a_user_names_the_owner(w: Cluster) -> None:
    rref = w[0].remote("w1", make, ("there",))
    expected = (
        rf"For UserRRef\(rref_id={ID}, fork_id={ID}\), can't call localValue\(\) on user WorkerInfo\(id=0, name=w0\)"
    )
    with pytest.raises(RRefError, match=rf"{expected}\. Call it on owner WorkerInfo\(id=1, name=w1\)"):
        rref.local_value()


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_no_copies_outside_of_calls(w: Cluster, owner: str) -> None:
    rref = w[0].remote(owner, make, ("uncopied",))
    for use in (
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda r: torch.save(r, BytesIO()),
        lambda r: pickle.dumps([r]),
    ):
        with pytest.raises(
            RRefNotPicklable, match="Can not pickle rref in python pickler, rref can only be pickled when"
        ):
            use(rref)
    assert greet(rref) == "uncopied greets you"


def pickle_argument(rref: RRef[object]) -> None:
    pickle.dumps(rref)


def test_no_copies_inside_of_handlers(w: Cluster) -> None:
    with pytest.raises(RRefNotPicklable, match="rref can only be pickled when using RPC"):
        w[0].rpc_sync("w1", pickle_argument, (w[0].rref(1),))


class Methods:
    number = 7

    def __init__(self) -> None:
        self.me = weakref.ref(self)
        self.of_instance = lambda x: [x]

    @property
    def broken(self) -> None:
        raise AttributeError("of the property")

    def plain(self, a: int, *, b: int = 0) -> int:
        return a + b

    def fails(self) -> None:
        raise ZeroDivisionError("of the method")

    def _private(self) -> str:
        return "hidden"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    def static(x: int) -> int:
        return -x

    @async_execution
    def later(self, x: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(x + 1)
        return future

    @staticmethod
    @async_execution
    def static_later(x: int) -> torch.futures.Future[int]:
        return Methods.later(None, x)  # type: ignore[arg-type]

    async def coroutine(self, x: int) -> int:
        return x * 3

    def __call__(self, x: int) -> str:
        return f"called with {x}"


@pytest.fixture(params=["w0", "w1"])
def methods(w: Cluster, request: pytest.FixtureRequest) -> RRef[Methods]:
    """Return a reference to a local or a remote value."""
    return w[0].remote(request.param, Methods)


@pytest.mark.parametrize("kind", ["rpc_sync", "rpc_async", "remote"])
def test_proxies(methods: RRef[Methods], kind: str) -> None:
    def call(name: str, *args: object, **kwargs: object) -> object:
        got = getattr(getattr(methods, kind)(timeout=TIMEOUT), name)(*args, **kwargs)
        return got if kind == "rpc_sync" else got.wait() if kind == "rpc_async" else got.to_here()

    assert call("plain", 1) == 1
    assert call("plain", 1, b=2) == 3
    assert call("_private") == "hidden"
    assert call("of_class") == "Methods"
    assert call("static", 4) == -4
    assert call("later", 4) == 5
    assert call("static_later", 5) == 6
    assert call("coroutine", 5) == 15
    assert call("__call__", 8) == "called with 8"
    with pytest.raises(ZeroDivisionError, match="of the method"):
        call("fails")
    if kind != "remote":  # which checks the type first, as torch does
        assert call("of_instance", 6) == [6]
    with pytest.raises(AttributeError, match="type object 'Methods' has no attribute 'nope'"):
        call("nope")
    with pytest.raises(AttributeError, match="'broken' is a property of Methods, not a method"):
        call("broken")
    with pytest.raises(TypeError, match=r"plain\(\) got an unexpected keyword argument 'c'"):
        call("plain", 1, c=2)


def test_unknown_method_of_remote_is_an_error_of_the_caller(methods: RRef[Methods]) -> None:
    """The caller raises once it knows that the value exists."""
    methods._get_future().wait()
    with pytest.raises(AttributeError, match="type object 'Methods' has no attribute 'nope'"):
        methods.remote().nope()


def test_a_reply_confirms_the_value(w: Cluster) -> None:
    """The confirmation of the creation may arrive after the reply of a method."""
    for use in ("plain", "nope"):
        for _ in range(20):
            rref = w[0].remote("w1", Methods)
            with contextlib.suppress(AttributeError):
                getattr(rref.rpc_sync(), use)(1)
            with pytest.raises(AttributeError):
                rref.remote().nope()


def test_type_is_asked_for_before_and_after_use(methods: RRef[Methods]) -> None:
    """In torch, the cached type breaks later proxies."""
    assert methods._get_type() is Methods
    assert methods.rpc_sync().plain(1) == 1
    assert methods.remote().plain(2).to_here() == 2
    assert methods._get_type(blocking=False).wait() is Methods


def test_scripted_module_needs_an_interface(w: Cluster) -> None:
    with pytest.raises(RuntimeError, match="must provide its ModuleInterface type hint"), w[0]:
        RRef(torch.jit.script(torch.nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="does not contain a ScriptModule"), w[0]:
        RRef(1, type_hint=int)


# ---- the end


def test_uses_after_shutdown_raise() -> None:
    with cluster(2) as w:
        theirs, mine = w[0].remote("w1", make, ("gone",)), w[0].rref(1)
        theirs.to_here()
        w.shutdown()
        uses = [theirs.to_here, lambda: theirs.rpc_sync().greet("x"), lambda: theirs.rpc_async().greet("x").wait()]
        uses += [
            lambda: theirs.remote().greet("x"),
            mine.to_here,
            mine.local_value,
            lambda: mine.rpc_sync().bit_length(),
        ]
        for use in uses:
            with pytest.raises(
                RRefError, match=r"released when its worker shut down. Cannot call to_here\(\) on it after"
            ):
                use()
        assert theirs.owner_name() == "w1"
        assert "given up at shutdown" in repr(theirs)
        assert freed("gone").wait(TIMEOUT)


def test_deleting_them_after_shutdown_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(2) as w:
        rrefs = [w[0].remote("w1", make, (f"late {i}",)) for i in range(3)]
        for rref in rrefs:
            rref.to_here()
        w.shutdown()
        rrefs.clear()
        del rref
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_graceful_shutdown_frees_values_though_handles_live() -> None:
    with cluster(2) as w:
        kept = w[0].remote("w1", make, ("held to the end",))
        kept.to_here()
        w.shutdown()
        assert freed("held to the end").wait(TIMEOUT)
        del kept


def test_leaks_are_reported_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_ignore_rref_leak", False)
    monkeypatch.setattr(api, "_delete_all_user_and_unforked_owner_rrefs", lambda *_: None)
    with cluster(2, check=False) as w:
        leaked = w[0].rref(Tracked("leaked"))
        kept = w[0].rpc_sync("w1", keep, (leaked,))
        with pytest.raises(RRefError, match=rf"Leaking RRef {re.escape(str(leaked.id))}, held by workers \[1\]"):
            w.shutdown()
        assert kept is None
        assert all(worker._worker.closed for worker in w)
    _kept.clear()


def test_no_leaks_are_reported_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_ignore_rref_leak", False)
    with cluster(2) as w:
        rref = w[0].rref(Tracked("not leaked"))
        assert w[0].rpc_sync("w1", keep, (rref,)) is None  # w1 gives it up when it shuts down
        w.shutdown()
        del rref
    _kept.clear()


_kept: list[object] = []


def keep(rref: RRef[object]) -> None:
    _kept.append(rref)


def test_ungraceful_shutdown_with_references(caplog: pytest.LogCaptureFixture) -> None:
    """The references of a leaving worker end with it."""
    with cluster(3, graceful=False) as w:
        mine = w[0].rref(Tracked("of w0"))
        w[0].rpc_sync("w1", keep, (mine,))
        theirs = w[0].remote("w1", make, ("of w1",))
        theirs.to_here()
        del mine
        assert w[0].rpc_sync("w2", ping) == "pong"
        w[1].shutdown(graceful=False)
        assert freed("of w0").wait(TIMEOUT), "its user is gone"
        with pytest.raises(RuntimeError, match="w1"):
            theirs.to_here()
        assert w[0].rpc_sync("w2", ping) == "pong"
    _kept.clear()
