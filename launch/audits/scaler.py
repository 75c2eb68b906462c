"""The audits of a charged scaler: of rows, and of owners with several rows.

The canary lies at the end of every range, or far outside of it for the twin without a clip.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxdp.audit import Audit
from jaxdp.audit import scaler as auditing
from jaxdp.data import Examples, by_group, from_arrays
from jaxdp.finetune import scaler
from jaxdp.privacy import GaussianDpEvent
from jaxdp.release import claim

from . import case
from .case import Case, Run, under

SIGMA = 1.0
DELTA = 1e-5
RANGES = {"0": (0.0, 120.0), "1": (10.0, 60.0)}
CLAIMED = claim(GaussianDpEvent(SIGMA), adjacency="add_remove", delta=DELTA)
MIDDLE = (60.0, 35.0)


def rows(*canaries: tuple[float, float]) -> Examples:
    """Returns rows in the middle of the ranges, behind canaries."""
    return from_arrays(features=np.array([*canaries, *[MIDDLE] * 10], np.float32))


ENDS = rows((120, 60), (0, 10))
# The first owner has four rows at the end of the ranges, the others one.
OWNERS = by_group(
    rows((120, 60), (120, 60), (120, 60), (120, 60)),
    np.maximum(np.arange(14) - 3, 0),
    max_records=4,
)


def releases(
    source: Any = ENDS,
    *,
    sigma: float = SIGMA,
    canaries: tuple[int, ...] = (0,),
    patch: Callable[[], Any] = contextlib.nullcontext,
    **terms: Any,
) -> Run:
    """Returns the audit of releases under the honest claim, with something patched."""

    def run(trials: int, seed: bytes) -> Audit:
        fixed: dict[str, Any] = {"delta": DELTA, "confidence": case.CONFIDENCE, "seed": seed}
        fixed |= {"rows": canaries, "noise_multiplier": sigma, "trials": trials}
        with patch():
            audit = auditing.audit_scaler(source, RANGES, **fixed, **terms)
        return under(audit, CLAIMED)

    return run


def without_a_clip(features: np.ndarray, measured: scaler.Columns) -> np.ndarray:
    """Computes the vectors of cells that are not cut to their ranges."""
    middle, half = (measured.low + measured.high) / 2, (measured.high - measured.low) / 2
    u = (features[..., list(measured.columns)] - middle) / half
    return np.stack([u, u**2 - 1 / 2, 0 * u], axis=-2)


def twice(*args: Any, whole: Callable[..., np.ndarray] = scaler.column_sums) -> np.ndarray:
    """Counts every row twice."""
    return 2 * whole(*args)


def of_every_record(source: Any, measured: scaler.Columns) -> np.ndarray:
    """Adds up the records of owners in place of their means."""
    batch = source.gather(np.arange(len(source)))
    vectors = scaler.contributions(batch.records["features"], measured)
    return (vectors * batch.present[:, :, None, None]).sum(axis=(0, 1))


def with_one_key(
    key: jax.Array, *args: Any, whole: Callable[..., jax.Array] = scaler.draw
) -> jax.Array:
    """Draws the noise of all releases from one key."""
    return whole(jax.random.key(0, impl="threefry2x32"), *args)


def patched(owner: Any, name: str, broken: Callable[..., Any]) -> Callable[[], Any]:
    """Returns what puts a broken function in the place of one."""
    return lambda: mock.patch.object(owner, name, broken)


TWINS: Mapping[str, Run | str] = {
    case.HALF_THE_NOISE: releases(sigma=SIGMA / 2),
    case.NO_CLIPPING: releases(
        rows((600, 600)), patch=patched(scaler, "contributions", without_a_clip)
    ),
    case.SENSITIVITY_OFF_BY_TWO: releases(patch=patched(auditing, "column_sums", twice)),
    case.REUSED_KEY: releases(patch=patched(auditing, "draw", with_one_key)),
    case.ADD_REMOVE_FOR_REPLACE_ONE: releases(canaries=(0, 1), adjacency="replace_one"),
}
OWNER_TWINS: Mapping[str, Run | str] = {
    case.HALF_THE_NOISE: releases(OWNERS, sigma=SIGMA / 2),
    case.NO_CLIPPING: "cells are cut by the same lines as those of rows",
    case.SENSITIVITY_OFF_BY_TWO: releases(OWNERS, patch=patched(auditing, "column_sums", twice)),
    case.REUSED_KEY: releases(OWNERS, patch=patched(auditing, "draw", with_one_key)),
    case.ADD_REMOVE_FOR_REPLACE_ONE: "a replaced owner moves the sums as a replaced row does",
    "every record of an owner counts": releases(
        OWNERS, patch=patched(auditing, "column_sums", of_every_record)
    ),
}
_PROOF = "`jaxdp.finetune.scaler`, a vector of norm C for each row or owner; Balle and Wang 2018"

CASES = (
    Case(
        "charged scaler",
        f"means and deviations of two columns: a Gaussian of multiplier {SIGMA:g}, add/remove",
        _PROOF,
        releases(),
        TWINS,
    ),
    Case(
        "charged scaler, owners",
        f"the same for owners with several rows: a Gaussian of multiplier {SIGMA:g}, add/remove",
        _PROOF,
        releases(OWNERS),
        OWNER_TWINS,
    ),
)
