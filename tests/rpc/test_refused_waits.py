"""A call that an event loop refuses has no effect and can be repeated."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from telegrad import rpc
from telegrad.testing import Cluster, Local, cluster

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("error")]

TIMEOUT = 10.0
Operation = Callable[[str], object]


def gather(value: str) -> object:
    return rpc.all_gather(value, timeout=TIMEOUT)


def meet(_: str) -> object:
    rpc.barrier(timeout=TIMEOUT)
    return None


def broadcast(value: str) -> object:
    return rpc.broadcast(value, "w0", timeout=TIMEOUT)


async def repeat(operation: Operation) -> tuple[str, object]:
    """Try an operation on the event loop, then repeat it in a thread."""
    with pytest.raises(RuntimeError, match=r"would block the event loop of worker 'w\d'; use `await") as caught:
        operation("refused")
    return str(caught.value), await asyncio.to_thread(operation, "repeated")


@pytest.mark.parametrize("at", ["w0", "w1"])
@pytest.mark.parametrize("operation", [gather, meet, broadcast])
def test_a_refused_group_operation_can_be_repeated(at: str, operation: Operation) -> None:
    other = "w1" if at == "w0" else "w0"
    values = {at: "repeated", other: "ordinary"}
    expected = {gather: values, meet: None, broadcast: values["w0"]}[operation]
    with cluster(2, check=True):  # ends with a graceful shutdown
        ordinary = rpc.rpc_async(other, operation, ("ordinary",))
        text, result = rpc.rpc_sync(at, repeat, (operation,))
        assert text.startswith(f"a group operation would block the event loop of worker '{at}'")
        assert result == ordinary.wait() == expected


async def gather_of_torch() -> None:
    rpc.api._all_gather(1)


@pytest.mark.parametrize("at", ["w0", "w1"])
def test_the_shutdown_knows_nothing_of_a_refused_group_operation(at: str) -> None:
    with cluster(2, check=True), pytest.raises(RuntimeError, match="a group operation would block"):
        rpc.rpc_sync(at, gather_of_torch)


async def meet_alone() -> None:
    rpc.barrier([rpc.get_worker_info()])


def test_an_operation_of_one_worker_does_not_wait(two: Cluster) -> None:
    rpc.rpc_sync("w1", meet_alone)


# ---- calls


def note(log: Local[list[int]], number: int = 0) -> None:
    log.value.append(number)


async def call_with_retry(log: Local[list[int]]) -> None:
    rpc.rpc_sync("w0", note, (log,), retry=rpc.Retry())


async def map_some(log: Local[list[int]], items: Local[Iterator[int]]) -> None:
    list(rpc.map("w0", lambda number: note(log, number), items.value))


@pytest.mark.usefixtures("clean")
def test_a_refused_call_with_a_retry_is_not_sent() -> None:
    log: Local[list[int]] = Local([])
    with pytest.raises(RuntimeError, match=r"rpc_sync or to_here\(\) would block .* use `await rpc_async"):
        rpc.rpc_sync("w1", call_with_retry, (log,))
    assert log.value == []


@pytest.mark.usefixtures("clean")
def test_a_refused_map_takes_no_item() -> None:
    log: Local[list[int]] = Local([])
    items = iter([1, 2])
    with pytest.raises(RuntimeError, match=r"next\(\) of rpc.map would block"):
        rpc.rpc_sync("w1", map_some, (log, Local(items)))
    assert log.value == []
    assert list(items) == [1, 2]


# ---- services


async def find() -> object:
    return rpc.get_service("refused waits")


async def find_in_thread() -> object:
    return await asyncio.to_thread(rpc.get_service, "refused waits")


@pytest.mark.usefixtures("two")
def test_a_service_of_another_worker_is_found_in_a_thread() -> None:
    rpc.register_service("refused waits", 5)
    with pytest.raises(RuntimeError, match=r"get_service would block .*; use `await asyncio.to_thread"):
        rpc.rpc_sync("w1", find)
    assert rpc.rpc_sync("w1", find_in_thread).to_here() == 5


# ---- the end


async def find_loop(found: Local[list[asyncio.AbstractEventLoop]]) -> None:
    found.value.append(asyncio.get_running_loop())


async def shut_down(worker: rpc.Worker) -> None:
    worker.shutdown()


def test_a_refused_shutdown_closes_nothing() -> None:
    """A coroutine that the program itself has brought is of no request."""
    with cluster(2, check=True) as group:
        found: Local[list[asyncio.AbstractEventLoop]] = Local([])
        rpc.rpc_sync("w1", find_loop, (found,))
        with pytest.raises(RuntimeError, match=r"shutdown\(\) would block the event loop of worker 'w1'"):
            asyncio.run_coroutine_threadsafe(shut_down(group[1]), found.value[0]).result(TIMEOUT)
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
