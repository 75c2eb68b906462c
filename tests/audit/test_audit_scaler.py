"""Audits of a charged scaler. `tests/launch/test_audit.py` runs its cases and broken twins.

Runs have fixed seeds. Over the choice of a seed, a healthy release fails with probability below
0.001, the confidence of the bounds."""

import numpy as np
import pytest

from jaxdp.audit import scaler
from jaxdp.data import from_arrays

FEATURES = np.array([[120, 60], [60, 35], [60, 35], [0, 10]], np.float32)
SOURCE = from_arrays(features=FEATURES)
RANGES = {"0": (0, 120), "1": (10, 60)}
TERMS = {"noise_multiplier": 1.0, "trials": 400, "delta": 1e-5, "confidence": 0.999}
TERMS["seed"] = bytes(range(16))


@pytest.mark.slow
def test_the_farthest_row_is_the_canary():
    """A row in the middle of its ranges shows less than one at their ends."""
    ends = scaler.audit_scaler(SOURCE, RANGES, rows=[0, 1], **TERMS)
    middle = scaler.audit_scaler(SOURCE, RANGES, rows=[1, 2], **TERMS)
    assert ends.verdict == middle.verdict == "consistent"
    assert middle.lower < ends.lower <= ends.upper and ends.trials == 800


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": []}, "rows must name at least 1 rows under 'add_remove', got 0"),
        ({"rows": [0], "adjacency": "replace_one"}, "at least 2 rows under 'replace_one'"),
        ({"rows": [1, 2], "adjacency": "replace_one"}, "rows must name a row that moves the sums"),
        ({"trials": 1}, "trials must be at least 2"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        scaler.audit_scaler(SOURCE, RANGES, **(TERMS | options))
