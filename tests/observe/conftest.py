"""Three workers in this process, and both of torch's profilers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy

from telegrad.testing import Cluster, cluster, eventually
from telegrad.worker.calls import interceptors, tracing
from telegrad.worker.serving import handlers


@pytest.fixture(scope="module", autouse=True)
def three() -> Iterator[Cluster]:
    """Workers w0, which is the current one, w1 and w2."""
    with cluster(3) as group:
        yield group


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    """Check that no profiler is active after a test, and calls use the fast path."""
    yield
    eventually(lambda: not tracing.observer.on)
    assert not tracing.observer.serving
    assert not interceptors.active
    assert not tracing.observer._spans


@pytest.fixture(params=["kineto", "legacy"])
def profile(request: pytest.FixtureRequest) -> Any:
    """A class of profilers."""
    return torch.profiler.profile if request.param == "kineto" else profiler_legacy.profile


@pytest.fixture
def slow_requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with every request in which Python has a part."""
    seen: list[Any] = []
    slow = handlers.SlowRequest

    def counted(*request: Any) -> Any:
        seen.append(request)
        return slow(*request)

    monkeypatch.setattr(handlers, "SlowRequest", counted)
    return seen
