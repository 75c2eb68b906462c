"""Detection of a collapsed model from public images and released parameters only."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.labels import check_logits, judge, predicted
from jaxdp.data.storage import on_device

ApplyFn = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class CollapseReport:
    """The measurements of a `CollapseMonitor`.

    The entropy of the mean predicted distribution is a fraction of ln(num_classes). It is near 0 if
    all images get one class. The drift is the L2 distance of the parameters from the source's,
    divided by the source's norm. Distance and norm cover the leaves that changed.
    """

    # Fraction of probe images that get the source model's class, with finite logits.
    agreement: float
    entropy: float
    drift: float
    collapsed: bool  # whether agreement or entropy is below its threshold or not a number
    not_finite: int = 0  # the number of probe images with a NaN or infinite logit


class CollapseMonitor:
    """A comparison of adapted parameters with the source model's on a fixed set of probe images.

    Args:
        apply_fn: `apply_fn(params, images) -> logits [N, C]`, floating point, C >= 2.
        params: The parameters of the source model.
        probe_images: Public images [N, ...], few enough for one forward pass. They should contain
            every class.
        min_agreement, min_entropy: Thresholds in [0, 1]. `monitor.source.entropy` is the source
            model's entropy.
        every: The number of batches between two reports of `serve`.
        reset: Whether `serve` resets to the source model after a report of a collapse.

    Attributes:
        source: The report of the source model.

    Raises:
        TypeError: The logits are not floating point.
        ValueError: An argument is out of range, the logits have another shape or are not finite for
            the source model, or the source model counts as collapsed on this probe.

    Formal guarantees:
        A report is a function of the probe images, the source model and the parameters. With a
        public probe (or one whose release is paid for elsewhere) and released parameters, reports
        and resets are post-processing. A report on images of the private stream, or on altered
        copies of them, is a release outside of any ledger.
    """

    def __init__(
        self,
        apply_fn: ApplyFn,
        params: Any,
        probe_images: np.ndarray | jax.Array,
        *,
        min_agreement: float = 0.25,
        min_entropy: float = 0.5,
        every: int = 1,
        reset: bool = False,
    ):
        for name, value in (("min_agreement", min_agreement), ("min_entropy", min_entropy)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}.")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}.")
        if not len(probe_images):
            raise ValueError("probe_images must hold at least one image.")
        self.every = every
        self.reset = reset
        self._min_agreement = min_agreement
        self._min_entropy = min_entropy
        self._apply_fn = apply_fn
        self._params = jax.tree.map(on_device, params)
        self._images = on_device(probe_images)
        logits = jax.jit(apply_fn)(params, self._images)
        name = "apply_fn(params, probe_images)"
        check_logits(logits, name=name, count=len(self._images), least=2)
        self._expected = predicted(logits)
        self.source = self(params)
        if self.source.not_finite:
            raise ValueError(
                f"the source model has NaN or infinite logits for {self.source.not_finite} of "
                f"{len(self._images)} probe_images. Check its parameters and the images."
            )
        if self.source.collapsed:
            raise ValueError(
                f"the source model has entropy {self.source.entropy:.3g} on probe_images, below "
                f"min_entropy={min_entropy}. Use a probe with more classes, or a lower threshold."
            )

    def __call__(self, params: Any) -> CollapseReport:
        """Returns the report of adapted parameters with the source's structure and shapes."""
        measured = _measure(self._apply_fn, params, self._params, self._images, self._expected)
        agreement, entropy, drift, not_finite = map(float, measured)
        # False for NaN.
        healthy = agreement >= self._min_agreement and entropy >= self._min_entropy
        return CollapseReport(
            agreement=agreement,
            entropy=entropy,
            drift=drift,
            collapsed=not healthy,
            not_finite=int(not_finite),
        )


@functools.partial(jax.jit, static_argnums=0)
def _measure(
    apply_fn: ApplyFn, params: Any, source: Any, images: jax.Array, expected: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    logits = apply_fn(params, images)
    judged = judge(logits, expected)
    p = jax.nn.softmax(logits.astype(jnp.float32)).mean(axis=0)
    entropy = jax.scipy.special.entr(p).sum() / jnp.log(logits.shape[-1])  # 1 is uniform
    moved = jnp.zeros(())
    norm = jnp.zeros(())
    for new, old in zip(jax.tree.leaves(params), jax.tree.leaves(source), strict=True):
        old = old.astype(jnp.float32)
        distance = jnp.square(new.astype(jnp.float32) - old).sum()
        moved += distance
        # Leaves that did not move stay out, since frozen ones would hide the drift of the others.
        norm += jnp.where(distance > 0, jnp.square(old).sum(), 0)
    drift = jnp.where(moved > 0, jnp.sqrt(moved / norm), 0)
    return judged.correct.mean(), entropy, drift, (~judged.finite).sum()
