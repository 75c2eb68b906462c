"""Notices when an adapted model has collapsed, from public images and released parameters only."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ApplyFn = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class CollapseReport:
    """What a `CollapseMonitor` saw.

    The entropy is that of the mean predicted distribution, as a fraction of ln(num_classes): near 0 if all images get
    one class. The drift is the L2 distance of the parameters from the source's, over the source's norm; both over the
    leaves that changed.
    """

    agreement: float  # fraction of probe images that get the source model's class
    entropy: float
    drift: float
    collapsed: bool  # whether agreement or entropy is below its threshold, or not a number


class CollapseMonitor:
    """Compares adapted parameters with the source model's on a fixed set of probe images.

    Formal guarantees: a report is a function of the probe images, the source model and the parameters. With a public
    probe (or one whose release is paid for elsewhere) and released parameters it is post-processing: neither it nor a
    reset on it costs anything. A report on images of the private stream, or on unclean copies of them, is a release
    that no ledger sees.

    Args:
        apply_fn: `apply_fn(params, images) -> logits [N, C]`.
        params: of the source model.
        probe_images: public images [N, ...], few enough for one forward pass; best with every class among them.
        min_agreement, min_entropy: thresholds in [0, 1]; `monitor.source.entropy` is the source model's.
        every: how many batches `serve` lets pass between two looks.
        reset: whether `serve` goes back to the source model after a report of a collapse.

    Attributes:
        source: the report of the source model itself.

    Raises:
        ValueError: an argument is out of range, or the source model itself counts as collapsed on this probe.
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
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if not len(probe_images):
            raise ValueError("probe_images must hold at least one image")
        self.every, self.reset = every, reset
        self._thresholds = (min_agreement, min_entropy)
        self._apply_fn, self._params, self._images = apply_fn, params, jnp.asarray(probe_images)
        self._expected = jax.jit(apply_fn)(params, self._images).argmax(axis=-1)
        self.source = self(params)
        if self.source.collapsed:
            raise ValueError(
                f"the source model has entropy {self.source.entropy:.3g} on probe_images, below "
                f"min_entropy={min_entropy}: use a probe with more classes, or a lower threshold"
            )

    def __call__(self, params: Any) -> CollapseReport:
        """Looks at adapted parameters, like the source's in structure and shapes."""
        measured = _measure(self._apply_fn, params, self._params, self._images, self._expected)
        agreement, entropy, drift = (float(value) for value in measured)
        min_agreement, min_entropy = self._thresholds
        healthy = agreement >= min_agreement and entropy >= min_entropy  # NaN is not
        return CollapseReport(agreement, entropy, drift, not healthy)


@functools.partial(jax.jit, static_argnums=0)
def _measure(
    apply_fn: ApplyFn, params: Any, source: Any, images: jax.Array, expected: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    logits = apply_fn(params, images)
    p = jax.nn.softmax(logits.astype(jnp.float32)).mean(axis=0)
    entropy = jax.scipy.special.entr(p).sum() / jnp.log(logits.shape[-1])
    moved, norm = jnp.zeros(()), jnp.zeros(())
    for new, old in zip(jax.tree.leaves(params), jax.tree.leaves(source), strict=True):
        old = old.astype(jnp.float32)
        distance = jnp.square(new.astype(jnp.float32) - old).sum()
        moved += distance
        norm += jnp.where(distance > 0, jnp.square(old).sum(), 0)
    drift = jnp.where(moved > 0, jnp.sqrt(moved / norm), 0)
    return (logits.argmax(axis=-1) == expected).mean(), entropy, drift
