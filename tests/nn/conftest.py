"""Workers of the tests of modules."""

from collections.abc import Iterator

import pytest

from telegrad.testing import Cluster, assert_quiescent, cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Workers w0, which is the current one, to w2; shared by the module's tests."""
    with cluster(3) as group:
        yield group


@pytest.fixture
def clean(three: Cluster) -> Iterator[Cluster]:
    """`three`, checked for what this test leaves behind."""
    yield three
    for worker in three:
        assert_quiescent(worker)
