"""EATA (Niu et al. 2022, arXiv:2204.02610): adaptation on reliable and non-redundant samples with a Fisher anchor.

S1 = {i: H_i < E0},  S2 = {i in S1: |cos(m, p_i)| < d}                                     filters (their Eq. 3-5)
loss = 1/|S2| sum_{S2} exp(E0 - H_i) H_i  +  alpha sum_k F_k (theta_k - theta_0,k)^2       (their Eq. 2, 8)
m <- 0.9 m + 0.1 mean_{S2} p_i                                                             moving average (Eq. 6)
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxdp.transforms.clipping import paths_of
from jaxdp.tta.method import Average, Method, Sample, check_constants, check_name, moving_average
from jaxdp.tta.select import Adapted, merge, selected, trainable_part

Gradients = Literal["batch", "example"]


@dataclasses.dataclass(frozen=True, eq=False)
class EATA(Method):
    """Entropy minimisation with a reliability filter, a diversity filter and a Fisher anchor.

    Attributes:
      num_classes: C.
      margin: E0 as a fraction of ln C.
      diversity: d. The papers use 0.05 for 1000 classes and 0.4 for 10.
      fisher: The importance F of each adapted parameter, from `fisher`. None leaves the anchor out (ETA).
      fisher_strength: alpha. The right value depends on the estimate of F, see `fisher`.
    """

    num_classes: int
    margin: float = 0.4
    diversity: float = 0.05
    fisher: Any = None
    fisher_strength: float = 2000.0

    def __post_init__(self) -> None:
        check_constants(self.num_classes, margin=self.margin)
        if not self.diversity > 0:
            raise ValueError(f"diversity must be positive, got {self.diversity}. Values above 1 switch the filter off.")
        if not self.fisher_strength >= 0:
            raise ValueError(f"fisher_strength must not be negative, got {self.fisher_strength}.")

    @property
    def _threshold(self) -> float:
        return self.margin * math.log(self.num_classes)

    def weight(self, sample: Sample) -> jax.Array:
        """Weighs images by exp(E0 - H)."""
        return jnp.exp(self._threshold - sample.uncertainty)

    def reliable(self, sample: Sample) -> jax.Array:
        """Keeps images with entropy H < E0."""
        return sample.uncertainty < self._threshold

    def pull(self, displacement: Any) -> Any:
        """Adds the Fisher anchor 2 alpha F (theta - theta_0)."""
        if self.fisher is None:
            return None
        if [path for path, _ in paths_of(self.fisher)] != [path for path, _ in paths_of(displacement)]:
            raise ValueError("fisher holds other parameters than the adapter adapts. Give both the same `adapted`.")
        return jax.tree.map(lambda f, d: 2 * self.fisher_strength * f * d, self.fisher, displacement)

    def overrides(self, hook: str) -> bool:
        """Returns whether this method has its own `hook`. Without Fisher information it has no pull."""
        return super().overrides(hook) and not (hook == "pull" and self.fisher is None)

    def start(self) -> Average:
        """Returns an empty moving average m of predictions."""
        return jnp.zeros(self.num_classes), jnp.zeros((), bool)

    def novel(self, memory: Average, sample: Sample) -> jax.Array:
        """Keeps images with diversity |cos(m, p)| < d."""
        mean, started = memory
        p = jax.nn.softmax(sample.logits.astype(jnp.float32))
        cosine = jnp.vdot(mean, p) / jnp.maximum(jnp.linalg.norm(mean) * jnp.linalg.norm(p), 1e-8)
        return ~started | (jnp.abs(cosine) < self.diversity)

    def remember(self, memory: Average, samples: Sample, kept: jax.Array) -> Average:
        """Updates the moving average m of the kept predictions."""
        return moving_average(memory, jax.nn.softmax(samples.logits.astype(jnp.float32)), kept)


def fisher(
    apply_fn: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    batches: Iterable[jax.typing.ArrayLike],
    adapted: Adapted | None = None,
    *,
    gradients: Gradients = "batch",
) -> Any:
    """Computes the importance of each adapted parameter for the source model's predictions (Niu et al. 2022, Eq. 9).

    Args:
      apply_fn: `apply_fn(params, images [B, ...]) -> logits [B, C]`.
      params: The source parameters.
      batches: Image batches [B, ...] of PUBLIC source data, disjoint from any protected stream. Every later model
        depends on them, and no ledger pays for that.
      adapted: The rule of the parameters that adapt, as in `Adapter`.
      gradients: "batch" squares the gradient of a batch's mean cross entropy to its predicted labels, like the public
        code. This is roughly 1/B of the Fisher information, and their alpha = 2000 (at B = 64) belongs to it.
        "example" averages the squared gradients of single examples, the diagonal of the Fisher information.

    Returns:
      A pytree like params: float32 importances at adapted leaves, None elsewhere.

    Raises:
      ValueError: batches is empty or `gradients` is unknown.
    """
    check_name("gradients", gradients, Gradients)
    paths = selected(params, adapted)

    def loss(moving: Any, params: Any, images: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(apply_fn(merge(moving, params), images).astype(jnp.float32))
        return -jnp.mean(log_p.max(-1))  # the predicted label is the most probable one

    @jax.jit
    def squared(params: Any, images: jax.Array) -> Any:
        moving = trainable_part(params, paths)
        if gradients == "batch":
            return jax.tree.map(jnp.square, jax.grad(loss)(moving, params, images))
        one = jax.vmap(jax.grad(loss), in_axes=(None, None, 0))(moving, params, images[:, None])
        return jax.tree.map(lambda g: jnp.square(g).mean(0), one)

    squares = [squared(params, jnp.asarray(images)) for images in batches]
    if not squares:
        raise ValueError("batches is empty. Give at least one batch of public source images.")
    return jax.tree.map(lambda *each: sum(each) / len(each), *squares)
