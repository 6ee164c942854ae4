"""Fixtures of workers that run only listed functions, or load no pickles.

Makes the helpers of `tests/failures` importable.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trust_helpers import EXPOSED, ran

from telegrad import rpc
from telegrad.testing import Cluster, cluster
from telegrad.worker.serving.exposure import exposed

sys.path.append(str(Path(__file__).parents[1] / "failures"))


@pytest.fixture
def listed() -> Iterator[Callable[..., None]]:
    """Expose names for one test."""
    added: list[tuple[str, str]] = []

    def add(*names: str) -> None:
        for name in names:
            module, path = name.split(":")
            added.append((module, path))
            rpc.expose(name)

    ran.clear()
    yield add
    for module, path in added:
        exposed.remove(module, path)
    assert not ran


@pytest.fixture
def group(listed: Callable[..., None]) -> Iterator[Any]:
    listed(*(f"trust_helpers:{name}" for name in EXPOSED))
    with cluster(2, rpc.Options(expose="listed")) as group:
        yield group


@pytest.fixture
def strict() -> Iterator[Cluster]:
    with cluster(2, rpc.Options(allow_pickle=False)) as group:
        yield group
