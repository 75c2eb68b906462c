"""The audits of a charged scaler: of rows, and of owners with several rows.

The canary lies at the end of every range, or far outside of it for the twin without a clip.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp.audit import Audit
from jaxdp.audit import scaler as auditing
from jaxdp.data import Examples, by_group, from_arrays
from jaxdp.finetune import scaler
from jaxdp.privacy import GaussianDpEvent
from jaxdp.release import claim

from . import case
from .case import Case, Run, held, patched, standard_twins

SIGMA = 1.0
DELTA = 1e-5
RANGES = {"0": (0.0, 120.0), "1": (10.0, 60.0)}
CLAIMED = claim(GaussianDpEvent(SIGMA), adjacency="add_remove", delta=DELTA)
MIDDLE = (60.0, 35.0)


def rows(*canaries: tuple[float, float]) -> Examples:
    """Returns rows in the middle of the ranges, behind canaries."""
    features = [*canaries, *[MIDDLE] * 10]
    return from_arrays(features=np.array(features, np.float32))


END = (120, 60)
ENDS = rows(END, (0, 10))
# The first owner has four rows at the end of the ranges, the others one.
_identifiers = [0, 0, 0, 0, *range(1, 11)]
OWNERS = by_group(rows(END, END, END, END), _identifiers, max_records=4)


def releases(
    source: Any = ENDS,
    *,
    sigma: float = SIGMA,
    canaries: tuple[int, ...] = (0,),
    patch: Callable[[], Any] = contextlib.nullcontext,
    **terms: Any,
) -> Run:
    """Returns the audit of releases under the honest claim, with something patched."""

    def seen(**options: Any) -> Audit:
        with patch():
            return auditing.audit_scaler(source, RANGES, **options)

    run = case.run_of(seen, rows=canaries, noise_multiplier=sigma, delta=DELTA, **terms)
    return held(run, CLAIMED)


def without_a_clip(features: np.ndarray, measured: scaler.Columns) -> np.ndarray:
    """Computes the vectors of cells that are not cut to their ranges."""
    cells = features[..., list(measured.columns)]
    u = (cells - measured.middle) / measured.half
    return np.stack([u, u**2 - 1 / 2, 0 * u], axis=-2)


def twice(*args: Any, whole: Callable[..., np.ndarray] = scaler.column_sums) -> np.ndarray:
    """Counts every row twice."""
    return 2 * whole(*args)


def of_every_record(source: Any, measured: scaler.Columns, step: float) -> np.ndarray:
    """Adds up the records of owners in place of their means."""
    batch = source.gather(np.arange(len(source)))
    vectors = scaler.contributions(batch.records["features"], measured)
    present = batch.present[:, :, None, None]
    return scaler.rounded(vectors * present, step).sum(axis=(0, 1))


def with_one_key(
    key: jax.Array, *args: Any, whole: Callable[..., jax.Array] = scaler.draw
) -> jax.Array:
    """Draws the noise of all releases from one key."""
    return whole(case.one_key(key), *args)


_UNCLIPPED = patched(scaler, "contributions", without_a_clip)
_TWICE = patched(auditing, "column_sums", twice)
_ONE_KEY = patched(auditing, "draw", with_one_key)
_EVERY_RECORD = patched(auditing, "column_sums", of_every_record)
TWINS = standard_twins(
    half_the_noise=releases(sigma=SIGMA / 2),
    no_clipping=releases(rows((600, 600)), patch=_UNCLIPPED),
    sensitivity_off_by_two=releases(patch=_TWICE),
    reused_key=releases(patch=_ONE_KEY),
    add_remove_for_replace_one=releases(canaries=(0, 1), adjacency="replace_one"),
)
OWNER_TWINS = standard_twins(
    half_the_noise=releases(OWNERS, sigma=SIGMA / 2),
    no_clipping="cells are cut by the same lines as those of rows",
    sensitivity_off_by_two=releases(OWNERS, patch=_TWICE),
    reused_key=releases(OWNERS, patch=_ONE_KEY),
    add_remove_for_replace_one="a replaced owner moves the sums as a replaced row does",
)
OWNER_TWINS["every record of an owner counts"] = releases(OWNERS, patch=_EVERY_RECORD)
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
