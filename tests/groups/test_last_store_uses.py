"""A worker that leaves, and whose store fails meanwhile."""

import http.client
import logging
from typing import Any

import pytest
import torch.distributed as dist

from telegrad.group import rendezvous
from telegrad.group.store_waits import StoreUnresponsive

LIMIT = 5.0  # s


class Failing:
    """Group store whose operations fail."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def fail(self, *_: object) -> Any:
        raise self.error

    set = get = fail


USES = {
    "mark_ended": lambda store: rendezvous.mark_ended(store, rendezvous.Group("token", b"", True), 2, LIMIT),
    "mark_abandoned": lambda store: rendezvous.mark_abandoned(store, LIMIT),
    "is_abandoned": lambda store: rendezvous.is_abandoned(store, LIMIT),
}
uses = pytest.mark.parametrize("use", USES.values(), ids=USES)


@uses
@pytest.mark.parametrize(
    "error",
    [
        dist.DistStoreError("timeout"),
        dist.DistNetworkError("gone"),
        StoreUnresponsive("silent"),
        RuntimeError("of a file store"),
        ConnectionResetError("of a store of the program"),
        TimeoutError("likewise"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.usefixtures("quiet")
def test_an_error_of_the_store_is_ignored(use: Any, error: BaseException) -> None:
    assert not use(Failing(error))


@uses
@pytest.mark.parametrize(
    "error",
    [KeyError("kvs"), ValueError("malformed"), http.client.BadStatusLine("?"), NotImplementedError("set")],
    ids=lambda error: type(error).__name__,
)
def test_any_other_error_is_logged(use: Any, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "telegrad"):
        assert not use(Failing(error))
    assert [record.exc_info is not None and record.exc_info[1] for record in caplog.records] == [error]
    assert "its last use of the store failed" in caplog.text
