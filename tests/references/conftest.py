"""A group of workers in this process."""

import gc
from collections.abc import Iterator

import pytest

from telegrad.testing import Cluster, cluster


@pytest.fixture(autouse=True)
def no_cycles() -> Iterator[None]:
    """Disable the cycle collector: values are freed with their last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    """Start three workers for the tests of a module; the first is the current one."""
    with cluster(3) as workers:
        yield workers
