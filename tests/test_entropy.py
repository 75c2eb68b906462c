"""Tests draw the same bytes in each run, in any order and on any worker."""

import pytest

from jaxdp.data import PoissonSampler
from jaxdp.transforms.noise import new_seed
from tests.conftest import entropy_of


def two() -> list[bytes]:
    return [new_seed(), PoissonSampler(10, 0.5).seed]


@pytest.fixture(scope="module")
def shared():
    return two()


def test_a_test_and_a_shared_fixture_have_streams_of_their_own(request, shared):
    """Broken twin: a stream that starts with the process or with the test that needs a fixture
    first."""
    here = two()
    with entropy_of(request.node.nodeid):
        assert two() == here
    with entropy_of("tests/test_entropy.py::shared[0]"):
        assert two() == shared
    assert len({*here, *shared, new_seed()}) == 5
