"""A group of workers in this process."""

import gc
from collections.abc import Iterator

import pytest

from telegrad.testing import Cluster, cluster


@pytest.fixture(autouse=True)
def no_cycles() -> Iterator[None]:
    """Values go with their last reference, not with the next run of the cycle collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    """Three workers, shared by the tests of a module; calls of `telegrad.rpc` go through the first."""
    with cluster(3) as workers:
        yield workers
