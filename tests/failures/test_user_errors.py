"""Errors of programs: each raises a clear error and affects nothing else."""

import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from telegrad import rpc
from telegrad.errors import NotInitialized, SerializationError, TelegradError, UnknownWorker
from telegrad.rpc import Options, Worker, WorkerInfo
from telegrad.testing import Cluster, Gate, cluster

NOT_INITIALIZED = r"RPC has not been initialized, or has shut down. Call telegrad.rpc.init_rpc first."
FAR = 30.0  # s; a test that takes as long has failed


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(3, current=None) as workers:
        yield workers


@pytest.fixture(autouse=True)
def other_calls_continue(w: Cluster) -> Iterator[None]:
    """Keep a call between two other workers in flight during each test."""
    gate = Gate()
    call = w[2].rpc_async("w1", gate.enter, ("undisturbed", FAR))
    gate.wait_for()
    yield
    gate.open()
    assert call.wait() == "undisturbed"


# ---- names


@pytest.mark.parametrize("kind", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize(
    ("to", "error", "text"),
    [
        ("w9", UnknownWorker, r"name:w0,rank:0 could not find destination name w9\. .*workers are: w0, w1, w2"),
        (9, UnknownWorker, r"name:w0,rank:0 could not find destination id 9"),
        (-1, UnknownWorker, r"could not find destination id -1"),
        (WorkerInfo("w9", 9), UnknownWorker, r"could not find destination id 9"),
        ("", UnknownWorker, r"could not find destination name"),
        (1.5, ValueError, r"Cannot get WorkerInfo from name 1.5"),
        (None, ValueError, r"Cannot get WorkerInfo from name None"),
        (["w1"], ValueError, r"Cannot get WorkerInfo from name"),
    ],
    ids=str,
)
def test_unknown_worker(w: Cluster, kind: str, to: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        getattr(w[0], kind)(to, abs, (-1,))
    if to is not None:  # which would be this worker
        with pytest.raises(error, match=text):
            w[0].get_worker_info(to)


# ---- values that cannot be sent


class Stubborn:
    def __reduce__(self) -> Any:
        raise OSError("will not be pickled")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((threading.Lock(),), r"cannot pickle '_thread.lock' object \(at args\[0\], of type _thread.lock\)"),
        ((1, {"deep": [threading.Lock()]}), r"at args\[1\]\['deep'\]\[0\], of type _thread.lock"),
        ((types.SimpleNamespace(inner=threading.Lock()),), r"at args\[0\]\.inner"),
    ],
    ids=["plain", "nested", "attribute"],
)
@pytest.mark.parametrize("kind", ["rpc_sync", "rpc_async", "remote"])
def test_argument_that_cannot_be_pickled(w: Cluster, kind: str, args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(SerializationError, match=text) as raised:
        getattr(w[0], kind)("w1", print, args)
    assert isinstance(raised.value, TypeError)
    with pytest.raises(
        SerializationError, match=text.replace(r"args\[0\]", r"kwargs\['x'\]").replace(r"args\[1\]", r"kwargs\['x'\]")
    ):
        getattr(w[0], kind)("w1", dict, None, {"x": args[-1]})
    assert w[0].rpc_sync("w1", abs, (-1,)) == 1


def test_argument_with_a_failing_method(w: Cluster) -> None:
    with pytest.raises(OSError, match="will not be pickled"):
        w[0].rpc_sync("w1", print, (Stubborn(),))
    assert w[0].rpc_sync("w1", abs, (-1,)) == 1


def locked() -> dict[str, Any]:
    return {"lock": threading.Lock()}


def generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "text"),
    [(locked, r"at result\['lock'\], of type _thread.lock"), (generator, "cannot pickle 'generator' object")],
)
def test_result_that_cannot_be_pickled(
    w: Cluster, function: Callable[[], Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "telegrad.remote")
    with pytest.raises(SerializationError, match=text) as raised:
        w[0].rpc_sync("w1", function)
    assert isinstance(raised.value, TypeError)
    assert raised.value.worker == "w1"  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=text):
        w[0].rpc_async("w1", function).wait()
    assert w[0].rpc_sync("w1", abs, (-1,)) == 1
    assert "cannot pickle" in caplog.text, "the callee logs it too"


class _NotDecoded:
    def __reduce__(self) -> tuple[Any, ...]:
        return _fail_to_decode, ()


def _fail_to_decode() -> None:
    raise KeyError("no such table")


@pytest.mark.parametrize("kind", ["sync", "async", "to_here"])
def test_result_that_cannot_be_decoded(w: Cluster, kind: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "sync": lambda: w[0].rpc_sync("w1", _NotDecoded),
        "async": lambda: w[0].rpc_async("w1", _NotDecoded).wait(),
        "to_here": lambda: w[0].remote("w1", _NotDecoded).to_here(),
    }
    with pytest.raises(KeyError, match="no such table") as raised:
        calls[kind]()
    called = "to_here" if kind == "to_here" else "_NotDecoded"
    assert raised.value.__notes__ == [f"raised here, when the result of {called} on w1 was decoded"]


def test_exception_with_an_unpicklable_attribute(w: Cluster) -> None:
    with pytest.raises(ValueError, match=r"holds a lock\nIts attributes \(lock\) were not sent: they .*cannot pickle"):
        w[0].rpc_sync("w1", _raise_with_lock)
    assert w[0].rpc_sync("w1", abs, (-1,)) == 1


def _raise_with_lock() -> None:
    error = ValueError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def test_function_that_the_other_side_cannot_import(w: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, Options(num_worker_threads=1), current=None) as pair:
        module = types.ModuleType("only_at_the_caller")
        exec("def f(): return 1\nclass C:\n  def m(self): return 2\n", module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        gate = Gate()
        busy = pair[0].rpc_async("w1", gate.enter)
        gate.wait_for()
        calls = [pair[0].rpc_async("w1", module.f), pair[0].rpc_async("w1", print, (module.f,))]
        made = pair[0].remote("w1", module.f)
        monkeypatch.delitem(sys.modules, module.__name__)
        gate.open()
        busy.wait()
        for call in (*(call.wait for call in calls), made.to_here):
            with pytest.raises(
                (ImportError, AttributeError), match=r"only_at_the_caller[^$]*Ensure that UDFs are defined on both"
            ):
                call()
        assert pair[0].rpc_sync("w1", abs, (-1,)) == 1
        del made


def test_values_that_are_not_callable_raise(w: Cluster) -> None:
    for kind in ("rpc_sync", "rpc_async", "remote"):
        with pytest.raises(TypeError, match="function should be callable"):
            getattr(w[0], kind)("w1", 5)


# ---- joining


def together(*joins: Callable[[], Worker]) -> list[Worker | BaseException]:
    """Join concurrently; return the workers or errors."""
    with ThreadPoolExecutor(len(joins)) as threads:
        begun = [threads.submit(join) for join in joins]
        return [future.exception(FAR) or future.result() for future in begun]


def texts(results: list[Worker | BaseException]) -> list[str]:
    for result in results:
        if isinstance(result, Worker):
            result.shutdown(graceful=False)
    return ["" if isinstance(result, Worker) else str(result) for result in results]


@pytest.fixture
def store() -> Any:
    return HashStore()


PATIENT = Options(rpc_timeout=FAR)


def test_wrong_world_size_fails_all_at_once(store: Any) -> None:
    first, second = texts(
        together(
            lambda: Worker("a", 0, 2, PATIENT, store=store),
            lambda: Worker("b", 1, 3, PATIENT, store=store),
        )
    )
    assert "world_size=2" in first + second
    assert "world_size=3" in first + second
    assert "failed to join" in first or "failed to join" in second


@pytest.mark.parametrize("first", [(1, 3), (0, 2)])
def test_the_first_rank_does_not_wait_for_ranks_that_failed(store: Any, first: tuple[int, int]) -> None:
    """Rank 1 does not wait for rank 2 either if rank 0 has failed."""
    second = (0, 2) if first == (1, 3) else (1, 3)

    def late() -> Worker:
        store.wait([f"member/{first[0]}"])
        return Worker("late", *second, PATIENT, store=store)

    began = time.monotonic()
    told, failed = texts(together(lambda: Worker("early", *first, PATIENT, store=store), late))
    assert f"rank {second[0]} failed to join" in told
    assert f"world_size={first[1]}" in failed
    assert time.monotonic() - began < 15


def test_a_missing_worker_is_named(store: Any) -> None:
    with pytest.raises(TelegradError, match=r"worker a \(rank 0\) waited 0.2 s .* rank 1 of 2 did not join"):
        Worker("a", 0, 2, Options(rpc_timeout=0.2), store=store)


def test_two_workers_of_one_name(store: Any) -> None:
    results = texts(together(*[lambda rank=rank: Worker("twin", rank, 2, PATIENT, store=store) for rank in range(2)]))  # type: ignore[misc]
    assert all("RPC worker name twin is not unique. Workers 0 and 1 share the same name" in text for text in results)


def test_rank_taken_twice(store: Any) -> None:
    """The first worker is not affected: it waits for the missing one."""
    results = together(
        lambda: Worker("a", 0, 2, PATIENT, store=store),
        lambda: _late(
            store, lambda: Worker("b", 0, 2, PATIENT, store=store), lambda: Worker("c", 1, 2, PATIENT, store=store)
        ),
    )
    assert isinstance(results[0], Worker)
    assert [info.name for info in results[0].get_worker_infos()] == ["a", "c"]
    assert texts(results)[1] == "" or pytest.fail(str(results[1]))


def _late(store: Any, wrong: Callable[[], Worker], right: Callable[[], Worker]) -> Worker:
    store.wait(["rank/0"])
    with pytest.raises(TelegradError, match="rank 0 is taken by worker a, which joins it: its process is alive"):
        wrong()
    return right()


@pytest.mark.parametrize(
    ("rank", "world_size", "error", "text"),
    [
        (2, 2, ValueError, r"worker a has rank 2, but ranks go from 0 to 1"),
        (-1, 2, ValueError, "rank parameter missing"),
        (40_000, 50_000, TypeError, "16 bits"),
        (None, 2, TypeError, "the rank of worker a has to be a whole number, not None; it may be left out"),
        (0, "2", TypeError, "the world_size of worker a has to be a whole number, not '2'"),
    ],
)
def test_invalid_rank(store: Any, rank: Any, world_size: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Worker("a", rank, world_size, PATIENT, store=store)
    with Worker("a", 0, 1, PATIENT, store=store) as alone:
        assert alone.rpc_sync("a", abs, (-1,)) == 1
        alone.shutdown()


@pytest.mark.parametrize("join", [rpc.init_rpc, Worker])
@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [("a", 5, "worker a has rank 5, but ranks go from 0 to 1"), ("a b", 1, "Worker name must match")],
)
def test_an_invalid_name_or_rank_is_refused_before_the_store_is_there(
    join: Any, name: str, rank: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        pytest.fail("waits for the store")

    monkeypatch.setattr("telegrad.group.stores.meet", unreachable)
    options = Options(init_method="tcp://127.0.0.1:1")
    with pytest.raises((ValueError, RuntimeError), match=text):
        join(name, rank=rank, world_size=2, **{"options" if join is Worker else "rpc_backend_options": options})


@pytest.mark.parametrize("name", ["", "a b", "x" * 128, "é", "a/b", None])
def test_invalid_name(store: Any, name: Any) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"Worker name must match|has to be a string"):
        Worker(name, 0, 1, PATIENT, store=store)


def test_static_and_dynamic_do_not_mix(store: Any) -> None:
    alone = Worker("dynamic", 0, None, PATIENT, store=store)
    with pytest.raises(TelegradError, match="mixes statically and dynamically initialized members"):
        Worker("static", 1, 2, PATIENT, store=store)
    assert alone.rpc_sync("dynamic", abs, (-1,)) == 1
    alone.shutdown()


def test_a_dynamic_worker_joins_during_a_static_rendezvous(store: Any) -> None:
    results = together(
        lambda: Worker("a", 0, 2, PATIENT, store=store),
        lambda: _dynamic_then_right(store),
    )
    assert texts(results) == ["", ""]


def _dynamic_then_right(store: Any) -> Worker:
    store.wait(["rank/0"])
    with pytest.raises(TelegradError, match="mixes statically and dynamically initialized members"):
        Worker("d", -1, None, PATIENT, store=store)
    return Worker("b", 1, 2, PATIENT, store=store)


@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [("a", 1, "name a is not unique"), ("b", 0, "Rank 0 is taken twice: by workers a and b")],
)
def test_name_or_rank_taken_in_a_dynamic_group(store: Any, name: str, rank: int, text: str) -> None:
    first = Worker("a", 0, None, PATIENT, store=store)
    with pytest.raises(RuntimeError, match=text):
        Worker(name, rank, None, PATIENT, store=store)
    second = Worker("b", -1, None, PATIENT, store=store)
    assert (second.info.id, first.rpc_sync("b", abs, (-1,))) == (1, 1)
    second.shutdown()
    first.shutdown()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"num_worker_threads": 0}, "num_worker_threads must be positive, got 0"),
        ({"rpc_timeout": -1.0}, "RPC Timeout must be non-negative"),
        ({"transports": ("pigeon",)}, "transports has to name some of shm, unix, tcp, not 'pigeon'"),
        ({"handshake_timeout": -1}, "handshake_timeout has to be a number of s, more than 0, not -1"),
        ({"spin_us": "long"}, "spin_us has to be a number of us, 0 or more, not 'long'"),
        ({"bind": "256.1.1.1"}, r"cannot resolve tcp:256\.1\.1\.1"),
        ({"bind": "192.0.2.1"}, r"cannot listen on tcp:192\.0\.2\.1"),
        ({"advertise": "no.such.host.invalid"}, r"advertise names no\.such\.host\.invalid, which cannot be resolved"),
        ({"secret_file": "/no/such/file"}, r"secret cannot be read \(option secret_file.*/no/such/file"),
    ],
    ids=str,
)
def test_invalid_option(store: Any, wrong: dict[str, Any], text: str) -> None:
    options = Options(rpc_timeout=FAR, transports=("unix", "tcp"))
    for name, value in wrong.items():
        setattr(options, name, value)
    with pytest.raises((ValueError, RuntimeError, TypeError, OSError)) as raised:
        Worker("a", 0, 1, options, store=store)
    assert re.search(text, str(raised.value))


# ---- before, after and twice


@pytest.fixture
def file_store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


USES: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("w0", abs, (-1,)),
    "rpc_async": lambda: rpc.rpc_async("w0", abs, (-1,)),
    "remote": lambda: rpc.remote("w0", abs, (-1,)),
    "get_worker_info": lambda: rpc.get_worker_info("w0"),
    "shutdown": lambda: rpc.shutdown(),
}
USES_OF_AGENT: dict[str, Callable[[], Any]] = {
    "RRef": lambda: rpc.RRef(1),
    "get_rpc_timeout": lambda: rpc.get_rpc_timeout(),
    "_get_current_rpc_agent": lambda: rpc.api._get_current_rpc_agent(),
}


def assert_nothing_works() -> None:
    for use in USES.values():
        with pytest.raises(NotInitialized, match=NOT_INITIALIZED):
            use()
    for use in USES_OF_AGENT.values():
        with pytest.raises(NotInitialized, match="Current RPC agent is not set! Did you initialize the RPC framework"):
            use()


def test_before_and_after_and_twice(file_store: str) -> None:
    assert_nothing_works()
    for round in range(3):
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=Options(init_method=file_store))
        with pytest.raises(TelegradError, match="RPC is already initialized"):
            rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=Options(init_method=file_store))
        assert rpc.rpc_sync("w0", abs, (-round,)) == round
        rpc.shutdown()
        assert_nothing_works()


def test_worker_object_after_its_shutdown() -> None:
    worker = Worker("alone", 0, 1, store=HashStore())
    worker.shutdown()
    worker.shutdown()  # any number of times
    worker.shutdown(graceful=False)
    for use in (worker.rpc_sync, worker.rpc_async, worker.remote):
        with pytest.raises(NotInitialized, match=r"has shut down\. Call telegrad\.rpc\.init_rpc"):
            use("alone", abs, (-1,))
    with pytest.raises(NotInitialized):
        worker.rref(1)


def test_failed_init_leaks_nothing(file_store: str) -> None:
    with pytest.raises(TelegradError, match="did not join"):
        rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=Options(init_method=file_store, rpc_timeout=0.2))
    assert_nothing_works()


def test_the_shutdown_of_init_rpc_names_that_of_a_worker() -> None:
    with cluster(1) as w:
        with w[0], pytest.raises(NotInitialized, match=r"Call the method shutdown\(\) of the telegrad.rpc.Worker w0\."):
            rpc.shutdown()
        with pytest.raises(NotInitialized, match="Call the method shutdown"):
            w[0].rpc_sync("w0", rpc.shutdown)
        assert not w[0]._worker.closed
