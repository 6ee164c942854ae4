"""Creation of references: the request is sent before the creator counts them."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rref_helpers import TIMEOUT, fail, freed, make, ping, started

from telegrad import rpc
from telegrad.errors import NotInitialized, RpcTimeout, UnknownWorker, WorkerLost
from telegrad.rref import RRef, create
from telegrad.rref.creation import PendingCreation
from telegrad.testing import Cluster, assert_quiescent, cluster, eventually
from telegrad.worker.default_worker import set_default_worker
from telegrad.worker.unread_failures import Failure


def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def make_here(x: Any) -> Any:
    """Create a reference inside a request."""
    return rpc.remote("w0", echo, (x,)).to_here()


class Odd:
    """Value that only pickle can encode."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


class WithoutHash:
    """Callable that cannot be looked up."""

    def __call__(self) -> None:
        raise NotImplementedError

    def __hash__(self) -> int:
        raise LookupError("no hash")


@pytest.fixture(scope="module")
def group() -> Iterator[Cluster]:
    with cluster(2, current=None) as group:
        yield group


@pytest.fixture
def w0(group: Cluster) -> Iterator[Any]:
    worker = group[0]._worker
    set_default_worker(worker)
    try:
        worker.rpc_sync("w1", echo)  # its name is known
        yield worker
    finally:
        set_default_worker(None)
    for one in group:
        assert_quiescent(one)


@pytest.fixture
def slow(w0: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the requests that Python encodes."""
    encoded: list[Any] = []
    encode = w0.messages.encode

    def note(*args: Any, **named: Any) -> Any:
        if len(args) > 2:  # else a reply, or a message of the reference protocol
            encoded.append(args)
        return encode(*args, **named)

    monkeypatch.setattr(w0.messages, "encode", note)
    return encoded


@pytest.fixture
def only_native(slow: list[Any]) -> Iterator[None]:
    """Fail the test if Python has encoded a request."""
    yield
    assert not slow


@pytest.mark.usefixtures("w0", "only_native")
@pytest.mark.parametrize("to", ["w1", 1, rpc.WorkerInfo("w1", 1)])
def test_values(to: Any) -> None:
    rref = rpc.remote(to, echo, (1, "a"), {"b": None})
    assert rref.owner_name() == "w1"
    assert rref.to_here() == rref.to_here() == ((1, "a"), {"b": None})
    assert rref.confirmed_by_owner()
    assert rpc.remote(to, echo).to_here() == ((), {})
    assert rpc.remote(to, echo, [torch.ones(3)]).to_here()[0][0].sum() == 3


@pytest.mark.usefixtures("w0", "only_native")
def test_values_are_freed() -> None:
    rpc.rpc_sync("w1", make, ("known",))
    rref = rpc.remote("w1", make, ("direct",))
    assert rref.to_here() == ("direct",)
    del rref
    assert freed("direct").wait(TIMEOUT)


@pytest.mark.usefixtures("only_native")
def test_many_released_at_once(w0: Any, group: Cluster) -> None:
    for number in range(500):
        rpc.remote("w1", echo, (number,))
    assert rpc.rpc_sync("w1", ping) == "pong"
    eventually(lambda: w0.references.pending_creations == 0)
    eventually(lambda: group[1]._worker.references.stats().owners == 0)


@pytest.mark.usefixtures("w0")
def test_failures() -> None:
    for _ in range(2):
        rref = rpc.remote("w1", fail, ("direct",))
        with pytest.raises(LookupError, match="direct"):
            rref.to_here()


@pytest.mark.usefixtures("w0")
def test_creations_that_python_encodes(slow: list[Any]) -> None:
    def encoded_for(make_rref: Any) -> tuple[Any, int]:
        before = len(slow)
        return make_rref().to_here(), len(slow) - before

    assert encoded_for(lambda: rpc.remote("w0", echo, (1,))) == (((1,), {}), 0)
    assert encoded_for(lambda: rpc.remote("w1", echo, (2,), timeout=30)) == (((2,), {}), 0)
    assert encoded_for(lambda: rpc.remote("w1", echo, (Odd(),))) == (((Odd(),), {}), 1)
    assert encoded_for(lambda: rpc.remote("w1", lambda: 3)) == (3, 1)
    with torch.no_grad():
        assert encoded_for(lambda: rpc.remote("w1", torch.is_grad_enabled)) == (False, 1)
    assert rpc.rpc_sync("w1", make_here, (4,)) == ((4,), {})
    with pytest.raises(UnknownWorker):
        rpc.remote("w7", echo)
    with pytest.raises(TypeError):
        rpc.remote("w1", 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [rpc.constants.UNSET_RPC_TIMEOUT, 30], ids=["default timeout", "with a timeout"])
@pytest.mark.parametrize("to", ["w1", "w0"], ids=["there", "here"])
def test_callables_that_cannot_be_hashed(w0: Any, to: str, timeout: float) -> None:
    """No request is sent, and no count is left for which a shutdown would wait."""
    with pytest.raises(LookupError, match="no hash"):
        rpc.remote(to, WithoutHash(), timeout=timeout)
    assert w0.references.pending_creations == 0


@pytest.mark.usefixtures("w0", "only_native")
def test_in_an_event_loop() -> None:
    async def main() -> Any:
        return rpc.remote("w1", echo, (1,))

    assert asyncio.run(main()).to_here() == ((1,), {})


# ---- calls that end before their reference is counted


def ended_early(worker: Any, function: Any, *args: Any) -> tuple[PendingCreation, int]:
    """Return a completed creation that is not counted yet, and its local id."""
    creation, local_id = PendingCreation(worker, (1, function, 0)), worker.references.new_id()
    worker.rpc_sync("w1", echo)
    worker.calls.names.find(function)
    worker.calls.client.create(1, function, args, {}, 0, local_id, creation)
    eventually(lambda: creation.early_result is not None)
    assert not creation.done()
    assert worker.references.pending_creations == 0
    return creation, local_id


def test_success(w0: Any, group: Cluster) -> None:
    creation, local_id = ended_early(w0, echo, 1)
    handle = create._register(RRef, w0, 1, local_id, creation)
    assert creation.done()
    assert handle.confirmed_by_owner()
    assert handle.to_here() == ((1,), {})
    assert handle._get_future().wait() is None
    assert w0.references.pending_creations == 0
    del handle
    eventually(lambda: group[1]._worker.references.stats().owners == 0)


def test_an_exception_kept_at_the_owner(w0: Any) -> None:
    creation, local_id = ended_early(w0, fail, "early")
    handle = create._register(RRef, w0, 1, local_id, creation)
    assert creation.failure is not None
    with pytest.raises(LookupError, match="early"):
        handle.to_here()
    assert w0.references.pending_creations == 0


@pytest.mark.parametrize("error", [RpcTimeout(1.0, "echo", "waiting"), WorkerLost("w1", "gone")], ids=["time", "loss"])
def test_failure(w0: Any, error: Any) -> None:
    creation = PendingCreation(w0, (1, echo, 0))
    creation.finish(error)
    assert creation.failure is None
    handle = create._register(RRef, w0, 1, w0.references.new_id(), creation)
    assert creation.done()
    assert creation.failure is not None
    assert w0.references.pending_creations == 0
    with pytest.raises(type(error)):
        handle._get_future().wait()
    w0.references.create_failed(handle.id, error, may_exist=False)  # as the loss of the owner says


@pytest.mark.usefixtures("quiet")
def test_a_use_while_the_failure_arrives_counts(w0: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    creation, local_id = PendingCreation(w0, (1, echo, 0)), w0.references.new_id()
    handle = create._register(RRef, w0, 1, local_id, creation)

    def failure(*args: Any) -> Failure:
        made = Failure(*args)
        handle._mark_used()
        return made

    monkeypatch.setattr("telegrad.rref.creation.Failure", failure)
    error = RpcTimeout(1.0, "echo", "waiting")
    creation.finish(error)
    assert creation.failure is not None
    assert creation.failure.read
    w0.references.create_failed(handle.id, error, may_exist=False)


# ---- interruptions while the request is sent


class Interrupted:
    """Client in which a signal handler raises once the call is sent."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def create(self, *args: Any) -> None:
        self.client.create(*args)
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


class Unhashable:
    """Callable that raises SystemExit or KeyboardInterrupt when hashed."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __call__(self) -> None:
        raise NotImplementedError

    def __hash__(self) -> int:
        raise self.kind("while hashing")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_exit_before_the_request_is_sent_counts_nothing(w0: Any, kind: type[BaseException]) -> None:
    with pytest.raises(kind, match="while hashing"):
        rpc.remote("w1", Unhashable(kind))
    assert w0.references.pending_creations == 0


def test_a_signal_leaks_nothing(w0: Any, group: Cluster) -> None:
    client, owner = w0.calls.client, group[1]._worker.references
    rpc.rpc_sync("w1", make, ("known",))
    w0.calls.client = Interrupted(client)
    try:
        with pytest.raises(KeyboardInterrupt):
            rpc.remote("w1", make, ("interrupted",))
    finally:
        w0.calls.client = client
    assert started("interrupted").wait(TIMEOUT)
    assert freed("interrupted").wait(TIMEOUT)
    eventually(lambda: w0.references.pending_creations == 0 and owner.stats().owners == 0)


@pytest.mark.parametrize("what", ["a call", "a creation"])
def test_a_signal_while_an_earlier_creation_completes(w0: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may process one completion while it makes the next request."""
    process, armed = PendingCreation.on_completion, threading.Event()

    def interrupted(creation: PendingCreation, completion: Any) -> None:
        process(creation, completion)
        if armed.is_set() and threading.current_thread() is threading.main_thread():
            armed.clear()  # one signal
            raise KeyboardInterrupt

    def make_requests() -> None:
        for _ in range(10_000):
            armed.clear()
            rpc.remote("w1", echo)
            rpc.rpc_sync("w1", echo)  # the creation's reply arrives first, and is left for later
            armed.set()
            rpc.rpc_sync("w1", echo) if what == "a call" else rpc.remote("w1", echo)
        armed.clear()

    monkeypatch.setattr(PendingCreation, "on_completion", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_requests()
    assert rpc.rpc_sync("w1", echo) == ((), {})
    eventually(lambda: w0.references.pending_creations == 0)


class Alarm(BaseException):
    """Exception that the signal handler raises."""


def test_signals_lose_no_creation(w0: Any) -> None:
    """The signals arrive at any moment of a loop that makes references and calls."""

    def on_signal(*_: object) -> None:
        raise Alarm

    def send_soon(number: int) -> None:
        for _ in range(number % 40):
            time.sleep(0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def use_until_interrupted(sender: threading.Thread) -> None:
        sender.start()
        while True:
            rpc.remote("w1", echo)
            rpc.rpc_sync("w1", echo)
            rpc.rpc_sync("w1", echo)

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        for number in range(400):
            sender = threading.Thread(target=send_soon, args=(number,))
            with pytest.raises(Alarm):
                use_until_interrupted(sender)
            sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    eventually(lambda: w0.references.pending_creations == 0)


def test_after_the_workers_end() -> None:
    with cluster(2, current=None) as group:
        worker: Any = group[0]._worker
        worker.rpc_sync("w1", echo)
    for owner in range(2):
        with pytest.raises(NotInitialized):
            create.create(RRef, worker, owner, echo, (), {}, 0)
    assert worker.references.pending_creations == 0
