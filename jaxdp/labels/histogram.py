"""The frequencies of private labels as a prior, charged once."""

import os
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import Source, read_column
from jaxdp.labels.noisy import check_account, public_columns
from jaxdp.privacy import Account, LabelDpEvent
from jaxdp.release import Release, Till, stream
from jaxdp.transforms import noise
from jaxdp.transforms.responses import with_prior

_MOVED = 2  # how far a replaced label moves the counts in L1 norm


def release_label_prior(
    source: Source,
    *,
    account: Account,
    epsilon: float,
    num_classes: int = 0,
    workdir: str | os.PathLike[str] | None = None,
    seed: bytes | None = None,
) -> np.ndarray:
    """Pays for a noisy histogram of the labels, and returns it as a prior.

    A later `release_labels` of the same records costs its own epsilon on top.

    Args:
      source, account, num_classes, workdir, seed: As in `release_labels`.
      epsilon: The epsilon of the histogram. Counts get integer noise of about 1.4 * 2 / epsilon.

    Returns:
      Probabilities float64 [K] of the classes, all above 0.

    Raises:
      BudgetExceeded, TypeError, ValueError: As in `release_labels`. ValueError also for an epsilon
        below 2 / 2^18, whose noise is larger than what can be drawn.

    Formal guarantees:
      `LabelDpEvent(epsilon)`. A replaced label moves the counts by at most 2 in L1 norm, and each
      count gets discrete Laplace noise of scale 2 / epsilon, drawn by integers. The number of
      records is public. What follows is post-processing.
    """
    public = public_columns(source, num_classes, ())
    with_prior(None, num_classes=public.num_classes, epsilon=epsilon)  # for its errors
    scale_of_counts(epsilon)
    check_account(account)
    classes = public.num_classes

    def compute(secret: bytes) -> dict[str, Any]:
        counts = label_counts(read_column(source, "label"), classes)
        return {"counts": noisy_counts(stream(secret, "label prior"), counts, epsilon)}

    what = Release(
        label="label prior",
        charges=[(account, LabelDpEvent(float(epsilon)))],
        facts=lambda: [source.fingerprint, classes, float(epsilon)],
        compute=compute,
    )
    with Till(workdir, seed=seed) as till:
        counts = till.once(what)["counts"]
    positive = np.maximum(counts, 0.5)
    return positive / positive.sum()


def noisy_counts(key: jax.Array, counts: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns counts int64 [K] with discrete Laplace noise of scale 2 / epsilon."""
    like = jax.ShapeDtypeStruct(counts.shape, jnp.float32)
    drawn = noise.discrete_laplace(key, like, scale_of_counts(epsilon))
    return counts + np.asarray(drawn, np.int64)


def scale_of_counts(epsilon: float) -> float:
    """Returns the scale of the noise of a count, 2 / epsilon.

    Raises ValueError if no such noise can be drawn.
    """
    # The quotient of two floats could be a little too small.
    scale = Fraction(_MOVED) / Fraction(float(epsilon))
    if scale > Fraction(noise.LARGEST_DISCRETE_SCALE):
        least = _MOVED / noise.LARGEST_DISCRETE_SCALE
        raise ValueError(
            f"epsilon must be at least {least!r} for a prior, got {epsilon!r}: its noise is larger "
            "than what can be drawn. Use a larger epsilon."
        )
    return noise.upward(scale)


def label_counts(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns how often each class occurs, int64 [K]. A label that is no class does not count."""
    inside = labels[(labels >= 0) & (labels < num_classes)]
    return np.bincount(inside.astype(np.int64), minlength=num_classes)
