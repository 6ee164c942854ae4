"""Messages over the limits of the receiver: failed calls, and ended sessions."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from telegrad.autograd import backward, context, get_gradients
from telegrad.errors import MessageTooLarge, RemoteError, WorkerLost
from telegrad.rpc import Options, RRef
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster, eventually
from telegrad.wire import Tag

TENSORS = 1 << 20  # max_message_bytes
HEADER = 1 << 17  # max_header_bytes
ELEMENTS = TENSORS // 4


@pytest.fixture(scope="module", params=["shm", "unix", "tcp", "self"])
def group(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, str]]:
    """Start workers w0 and w1; return them and the name of the one that w0 calls."""
    transports = ("shm",) if request.param == "self" else (request.param,)
    options = Options(max_message_bytes=TENSORS, max_header_bytes=HEADER, transports=transports)
    with cluster(2, options) as workers:
        yield workers, "w0" if request.param == "self" else "w1"


@pytest.fixture
def to(group: tuple[Cluster, str], caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """Return the worker to call; keep a reference and a call to it during the test."""
    workers, name = group
    gate = Gate()
    call = rpc.rpc_async(name, gate.enter, ("undisturbed",))
    gate.wait_for()
    held = rpc.remote(name, list, ((1, 2),))
    assert held.to_here() == [1, 2]
    yield name
    assert held.to_here() == [1, 2]
    gate.open()
    assert call.wait() == "undisturbed"
    assert not [record for record in caplog.records if "is lost" in record.getMessage()]
    del held, call
    for worker in workers:
        assert_quiescent(worker)


def ones(elements: int) -> Tensor:
    return torch.ones(elements)


def text(size: int) -> str:
    return "x" * size


def raise_large(size: int) -> NoReturn:
    raise ValueError("x" * size)


def first(values: list[Any]) -> Any:
    return values[0]


def keep_alive(_: Any) -> int:
    return 3


def with_reference(size: int) -> list[Any]:
    return [RRef(3), torch.ones(size)]


TENSORS_TOO_LARGE = (
    rf"a message with \d+ bytes of tensors .* max_message_bytes of worker w\d allows \({TENSORS} bytes\)"
)
HEADER_TOO_LARGE = rf"a message of \d+ bytes .* max_header_bytes of worker w\d allows \({HEADER} bytes\)"

REQUESTS = [
    (torch.sum, lambda: (ones(ELEMENTS + 1),), TENSORS_TOO_LARGE),
    (keep_alive, lambda: ([ones(ELEMENTS // 2), ones(ELEMENTS // 2 + 1)],), TENSORS_TOO_LARGE),
    (len, lambda: (text(HEADER),), HEADER_TOO_LARGE),
    (keep_alive, lambda: ({1, 2, text(HEADER)},), HEADER_TOO_LARGE),  # pickled
    (keep_alive, lambda: ([object, ones(ELEMENTS + 1)],), TENSORS_TOO_LARGE),
]


@pytest.mark.parametrize(
    ("function", "arguments", "why"), REQUESTS, ids=["tensor", "tensors", "text", "pickled", "with a class"]
)
def test_arguments(to: str, function: Callable[..., Any], arguments: Callable[[], Any], why: str) -> None:
    with pytest.raises(MessageTooLarge, match=rf"{function.__name__} on {to}: {why}") as caught:
        rpc.rpc_sync(to, function, arguments())
    assert not isinstance(caught.value, RemoteError), "it has not been sent"
    for call in (rpc.rpc_async(to, function, arguments()), *rpc.multicast([to], function, arguments())):
        with pytest.raises(MessageTooLarge, match=why):
            call.wait()
    with pytest.raises(MessageTooLarge, match=why):
        rpc.remote(to, function, arguments()).to_here()
    values = rpc.remote(to, list)
    with pytest.raises(MessageTooLarge, match=rf"append on {to}: {why}"):
        values.rpc_sync().append(*arguments())
    with pytest.raises(MessageTooLarge, match=why):
        values.remote().append(*arguments()).to_here()
    assert values.to_here() == []


def test_the_largest_arguments(to: str) -> None:
    assert rpc.rpc_sync(to, torch.sum, (ones(ELEMENTS),)) == ELEMENTS
    assert rpc.remote(to, torch.sum, (ones(ELEMENTS),)).to_here() == ELEMENTS
    assert rpc.rpc_sync(to, ones, (ELEMENTS,)).numel() == ELEMENTS


@pytest.mark.parametrize(
    ("function", "size", "why"),
    [(ones, ELEMENTS + 1, TENSORS_TOO_LARGE), (text, HEADER + 1, HEADER_TOO_LARGE)],
    ids=["tensor", "text"],
)
def test_result(to: str, function: Callable[[int], Any], size: int, why: str) -> None:
    says = f"the result of {function.__name__} on {to}: {why}"
    with pytest.raises(MessageTooLarge, match=says):
        rpc.rpc_sync(to, function, (size,))
    with pytest.raises(MessageTooLarge, match=says):
        rpc.rpc_async(to, function, (size,)).wait()
    made = rpc.remote(to, function, (size,))
    if to == "w1":
        with pytest.raises(MessageTooLarge, match=f"the result of to_here on {to}: {why}"):
            made.to_here()
        assert len(made.rpc_sync().__getitem__(slice(3))) == 3


def test_exception(to: str) -> None:
    """The error replaces the handler's and names its class."""
    for call in (rpc.rpc_sync, lambda *a: rpc.rpc_async(*a).wait()):
        with pytest.raises(MessageTooLarge, match=rf"ValueError was raised on worker {to}, .* allows {HEADER}") as e:
            call(to, raise_large, (HEADER,))
        assert isinstance(e.value, RemoteError)
    if to == "w1":
        with pytest.raises(MessageTooLarge, match="ValueError was raised"):
            rpc.remote(to, raise_large, (HEADER,)).to_here()
    with pytest.raises(ValueError, match="xxx"):
        rpc.rpc_sync(to, raise_large, (3,))


def test_references_in_messages_that_are_not_sent(to: str) -> None:
    """Their tickets are still sent, or rolled back: `to` checks for leaks."""
    mine, theirs = RRef(1), rpc.remote(to, keep_alive, (1,))
    for reference in (mine, theirs):
        arguments = ([reference, ones(ELEMENTS + 1)],)
        with pytest.raises(MessageTooLarge, match=f"first on {to}: {TENSORS_TOO_LARGE}"):
            rpc.rpc_sync(to, first, arguments)
        with pytest.raises(MessageTooLarge, match=TENSORS_TOO_LARGE):
            rpc.rpc_async(to, first, arguments).wait()
        with pytest.raises(MessageTooLarge, match=TENSORS_TOO_LARGE):
            rpc.remote(to, first, arguments).to_here()
        for call in rpc.multicast(["w0", "w1"], first, arguments):
            with pytest.raises(MessageTooLarge, match=TENSORS_TOO_LARGE):
                call.wait()
        assert rpc.rpc_sync(to, first, ([reference, 1],)).to_here() in (1, 3)
    with pytest.raises(MessageTooLarge, match="the result of with_reference"):
        rpc.rpc_sync(to, with_reference, (ELEMENTS + 1,))


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor.sum()


def repeated(x: Tensor, times: int) -> Tensor:
    return x.repeat(times)


def test_autograd_continues(to: str) -> None:
    """After too large requests and results, the context works and ends normally."""
    x = torch.ones(3, requires_grad=True)
    with context() as ident:
        with pytest.raises(MessageTooLarge):
            rpc.rpc_sync(to, scaled, (x, ones(ELEMENTS + 1)))
        with pytest.raises(MessageTooLarge):
            rpc.rpc_sync(to, repeated, (x, ELEMENTS))
        backward(ident, [rpc.rpc_sync(to, scaled, (x, ones(2))).sum()])
        assert get_gradients(ident)[x].tolist() == [2, 2, 2]


def doubled(x: Tensor) -> Tensor:
    return x * 2


def squared(x: Tensor) -> Tensor:
    return (x * x).sum()


@pytest.mark.parametrize("function", [doubled, squared], ids=["request", "reply"])
def test_gradients(to: str, function: Callable[[Tensor], Tensor]) -> None:
    """Two tensors are sent separately, and their gradients in one message."""
    if to == "w0":
        return  # these gradients are not sent
    half = ELEMENTS // 2 + 1
    x, y = torch.ones(half, requires_grad=True), torch.ones(half, requires_grad=True)
    with context() as ident:
        there = [rpc.rpc_sync(to, function, (t,)) for t in (x, y)]
        loss = squared(there[0]) + squared(there[1])
        with pytest.raises(MessageTooLarge, match=f"gradients .*{TENSORS_TOO_LARGE}"):
            backward(ident, [loss])
    with context() as ident:
        backward(ident, [squared(rpc.rpc_sync(to, function, (x,)))])
        assert get_gradients(ident)[x].numel() == half


@pytest.mark.parametrize("size", [0, (1 << 16) - 1])
def test_limits_have_a_minimum(size: int) -> None:
    for name in ("max_header_bytes", "max_message_bytes"):
        with pytest.raises(ValueError, match=f"option {name} has to be 65536 or more"):
            Options(**{name: size})


# ---- objects of a one-way message

MOST_OBJECTS = 65536  # the least value of the option


def test_a_message_that_cannot_be_read_ends_its_session(caplog: pytest.LogCaptureFixture) -> None:
    """No reply can refuse it."""
    with cluster(2, Options(max_objects=MOST_OBJECTS), check=False) as group:
        assert group.on_each(lambda rank: rpc.rpc_sync(f"w{1 - rank}", abs, (-1,))) == [1, 1]
        value = group[1].remote("w0", max, (1, 2))
        group[0]._worker.send_oneway(1, Tag.REFERENCES, list(range(MOST_OBJECTS + 1)))
        why = "worker w0 is lost to w1: it sent a message that this worker cannot read: max_objects"
        eventually(lambda: why in caplog.text and 1 in group[0]._worker.members.lost)
        assert "internal error" not in caplog.text
        with pytest.raises(WorkerLost):
            value.to_here()
        assert group.on_each(lambda rank: rpc.rpc_sync(f"w{1 - rank}", abs, (-1,))) == [1, 1]
