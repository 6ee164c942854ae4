"""Three workers in this process, and both of torch's profilers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy

from telegrad.testing import Cluster, cluster, eventually
from telegrad.worker import profiling
from telegrad.worker.handlers import Handlers
from telegrad.worker.scope import autocast_is_on


@pytest.fixture(scope="module", autouse=True)
def three() -> Iterator[Cluster]:
    """Workers w0, which is the current one, w1 and w2."""
    with cluster(3) as group:
        yield group


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    """After a test nobody profiles, and calls are as cheap as before."""
    yield
    eventually(lambda: not profiling.observer.on)
    assert not profiling.observer.serving
    assert profiling.unusual is autocast_is_on
    assert not profiling.observer._spans


@pytest.fixture(params=["kineto", "legacy"])
def profile(request: pytest.FixtureRequest) -> Any:
    """A class of profilers."""
    return torch.profiler.profile if request.param == "kineto" else profiler_legacy.profile


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every request that Python handles, because it is not a plain one."""
    seen: list[Any] = []
    handle = Handlers._handle

    def counted(self: Handlers, *request: Any) -> None:
        seen.append(request)
        handle(self, *request)

    monkeypatch.setattr(Handlers, "_handle", counted)
    return seen
