"""SAR (Niu et al. 2023, arXiv:2302.12400): reliable entropy minimisation, with recovery.

The minimisation is at a sharpness-aware point.

    S1 = {i: H_i < E0},  g1 = grad mean_{S1} H_i,  e = rho g1 / (||g1|| + 1e-12)  (their Eq. 2, 5)
    S2 = {i in S1: H_i(theta + e) < E0},
    descend along grad at theta + e of mean_{S2} H_i                              (their Eq. 6)
    average <- 0.9 average + 0.1 mean_{S2} H_i(theta + e),
    reset the model when the average is below 0.2

Two bugs of the public code are fixed here. There the line after a reset restores the average, and
the optimizer's momentum survives a reset.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxdp.tta.method import Average, Method, Sample, check_constants, moving_average


@dataclasses.dataclass(frozen=True, eq=False)
class SAR(Method):
    """Sharpness-aware and reliable entropy minimisation of the lower blocks.

    Attributes:
      num_classes: C.
      margin: E0 as a fraction of ln C.
      rho: The radius of the ascent step, in the norm of all adapted parameters together.
      reset_below: The average loss below which the model counts as collapsed and is reset.
    """

    num_classes: int
    margin: float = 0.4
    rho: float = 0.05
    reset_below: float = 0.2

    lower_blocks_only = True
    skips_empty = False  # an empty selection is a zero gradient, on which momentum still acts

    def __post_init__(self) -> None:
        check_constants(self.num_classes, margin=self.margin)
        if not 0 <= self.rho < math.inf:
            raise ValueError(f"rho must be finite and not negative, got {self.rho}.")

    def reliable(self, sample: Sample) -> jax.Array:
        """Keeps images with entropy H < E0."""
        return sample.uncertainty < self.margin * math.log(self.num_classes)

    @property
    def radius(self) -> float:  # type: ignore[override]
        """The ascent to theta + e with e = rho g / ||g|| before the gradient is taken."""
        return self.rho

    def start(self) -> Average:
        """Returns an empty moving average of the loss."""
        return jnp.zeros(()), jnp.zeros((), bool)

    def remember(self, memory: Average, samples: Sample, kept: jax.Array) -> Average:
        """Updates the moving average of the loss."""
        return moving_average(memory, samples.uncertainty, kept)

    def lost(self, memory: Average) -> jax.Array:
        """Resets when the moving average of the loss is below reset_below."""
        average, started = memory
        return started & (average < self.reset_below)
