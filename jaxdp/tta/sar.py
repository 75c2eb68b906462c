"""SAR (Niu et al. 2023, arXiv:2302.12400): reliable entropy minimisation at a sharpness-aware point, with recovery.

    S1 = {i: H_i < E0},  g1 = grad mean_{S1} H_i,  e = rho g1 / (||g1|| + 1e-12)               (their Eq. 2, 5)
    S2 = {i in S1: H_i(theta + e) < E0},  descend along grad at theta + e of mean_{S2} H_i     (their Eq. 6)
    average <- 0.9 average + 0.1 mean_{S2} H_i(theta + e);  reset the model when it is below 0.2

Two bugs of the public code are mended here: a reset clears the average (there the next line restores it) and the
optimizer's momentum (there it survives).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.tta.method import Method, Sample, check_classes, check_fraction


@dataclasses.dataclass(frozen=True, eq=False)
class SAR(Method):
    """Sharpness-aware, reliable entropy minimisation of the lower blocks.

    Attributes:
      num_classes: C.
      margin: E0 as a fraction of ln C.
      rho: radius of the ascent step, in the norm of all adapted parameters together.
      reset_below: average loss below which the model counts as collapsed and is reset.
    """

    num_classes: int
    margin: float = 0.4
    rho: float = 0.05
    reset_below: float = 0.2

    lower_blocks_only = True
    skips_empty = False  # an empty selection is a zero gradient, on which momentum still acts

    def __post_init__(self) -> None:
        check_classes(self.num_classes)
        check_fraction("margin", self.margin)
        if not 0 <= self.rho < math.inf:
            raise ValueError(f"rho must be finite and not negative, got {self.rho}.")

    def reliable(self, sample: Sample) -> jax.Array:
        """entropy filter H < E0"""
        return sample.uncertainty < self.margin * math.log(self.num_classes)

    @property
    def radius(self) -> float:  # type: ignore[override]
        """ascent to theta + e, e = rho g / ||g||, before the gradient is taken"""
        return self.rho

    def start(self) -> tuple[jax.Array, jax.Array]:
        """moving average of the loss"""
        return jnp.zeros(()), jnp.zeros((), bool)

    def remember(self, memory: tuple[jax.Array, jax.Array], samples: Sample, kept: jax.Array) -> Any:
        """moving average of the loss"""
        average, started = memory
        count = kept.sum()
        loss = jnp.where(kept, samples.uncertainty, 0).sum() / jnp.maximum(count, 1)
        updated = jnp.where(started, 0.9 * average + 0.1 * loss, loss)
        return jnp.where(count > 0, updated, average), started | (count > 0)

    def lost(self, memory: tuple[jax.Array, jax.Array]) -> jax.Array:
        """reset when the moving average of the loss falls below reset_below"""
        average, started = memory
        return started & (average < self.reset_below)
