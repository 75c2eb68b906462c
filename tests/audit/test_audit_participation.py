"""The audits of patterns accept the samplers, and catch twins."""

import pytest

from launch.audits.participation import CASES

SEED = bytes(range(16))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.mechanism for case in CASES])
def test_the_pattern_is_consistent_and_its_twins_are_caught(case):
    assert case.honest(SEED).verdict == "consistent"
    for twin in ("half the noise", "a record takes part too often"):
        assert case.broken(twin, SEED).verdict == "VIOLATED", twin
    cheap = case.broken("an account of rarer participation", SEED)
    assert cheap.verdict == "VIOLATED"
