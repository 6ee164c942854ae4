"""Fixtures for groups of two workers with a proxy between them."""

from collections.abc import Iterator

import pytest
from proxy_helpers import Proxy, proxied

from telegrad.rpc import Options
from telegrad.testing import Cluster


@pytest.fixture
def group(options: Options) -> Iterator[tuple[Cluster, Proxy]]:
    """Workers with the module's `options`, of which none is lost, and the proxy."""
    with proxied(options) as both:
        yield both
        for worker in (both[0][0], both[0][1]):
            assert worker._worker.members.lost == {}


@pytest.fixture
def w(group: tuple[Cluster, Proxy]) -> Cluster:
    return group[0]


@pytest.fixture
def proxy(group: tuple[Cluster, Proxy]) -> Proxy:
    return group[1]
