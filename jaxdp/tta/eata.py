"""EATA (Niu et al. 2022, arXiv:2204.02610): two filters and a Fisher anchor.

It adapts on reliable and non-redundant samples.

    S1 = {i: H_i < E0},  S2 = {i in S1: |cos(m, p_i)| < d}                  (their Eq. 3-5)
    loss = 1/|S2| sum_{S2} exp(E0 - H_i) H_i
           + alpha sum_k F_k (theta_k - theta_0,k)^2                        (their Eq. 2, 8)
    m <- 0.9 m + 0.1 mean_{S2} p_i                                          (their Eq. 6)
"""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxdp.data.storage import on_device
from jaxdp.files import check_choice
from jaxdp.transforms.clipping import paths_of
from jaxdp.tta.finite import all_finite, without_bad_rows
from jaxdp.tta.method import (
    Average,
    Method,
    Sample,
    check_constants,
    check_logits,
    moving_average,
)
from jaxdp.tta.select import Adapted, adapting, merge, trainable_part

Gradients = Literal["batch", "example"]


@dataclasses.dataclass(frozen=True, eq=False)
class EATA(Method):
    """Entropy minimisation with a reliability filter, a diversity filter and a Fisher anchor.

    Attributes:
      num_classes: C.
      margin: E0 as a fraction of ln C.
      diversity: d. The papers use 0.05 for 1000 classes and 0.4 for 10.
      fisher: The importance F of each adapted parameter, from `fisher`. None leaves the anchor out
          (ETA).
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
            raise ValueError(
                f"diversity must be positive, got {self.diversity}. Values above 1 switch the "
                "filter off."
            )
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
        known = [path for path, _ in paths_of(self.fisher)]
        adapted = [path for path, _ in paths_of(displacement)]
        if known != adapted:
            raise ValueError(
                "fisher holds other parameters than the adapter adapts. Give both the same "
                "`adapted`."
            )
        return jax.tree.map(
            lambda f, d: 2 * self.fisher_strength * f * d, self.fisher, displacement
        )

    def overrides(self, hook: str) -> bool:
        """Returns whether this method has its own `hook`.

        Without Fisher information it has no pull.
        """
        if hook == "pull" and self.fisher is None:
            return False
        return super().overrides(hook)

    def start(self) -> Average:
        """Returns an empty moving average m of predictions."""
        return jnp.zeros(self.num_classes), jnp.zeros((), bool)

    def novel(self, memory: Average, sample: Sample) -> jax.Array:
        """Keeps images with diversity |cos(m, p)| < d."""
        mean, started = memory
        p = jax.nn.softmax(sample.logits.astype(jnp.float32))
        product = jnp.vdot(mean, p)
        norms = jnp.linalg.norm(mean) * jnp.linalg.norm(p)
        cosine = product / jnp.maximum(norms, 1e-8)  # the bound of PyTorch's `cosine_similarity`
        return ~started | (jnp.abs(cosine) < self.diversity)

    def remember(self, memory: Average, samples: Sample, kept: jax.Array) -> Average:
        """Updates the moving average m of the kept predictions."""
        predictions = jax.nn.softmax(samples.logits.astype(jnp.float32))
        return moving_average(memory, predictions, kept)


def fisher(
    apply_fn: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    batches: Iterable[jax.typing.ArrayLike],
    adapted: Adapted | None = None,
    *,
    gradients: Gradients = "batch",
) -> Any:
    """Computes the importance of each adapted parameter (Niu et al. 2022, Eq. 9).

    It is the importance for the predictions of the source model.

    Args:
      apply_fn: `apply_fn(params, images [B, ...]) -> logits [B, C]`.
      params: The source parameters.
      batches: Image batches [B, ...] of PUBLIC source data, disjoint from any protected stream.
        Every later model depends on them, and no ledger pays for that.
      adapted: The rule of the parameters that adapt, as in `Adapter`.
      gradients: "batch" squares the gradient of a batch's mean cross entropy to its predicted
        labels, like the public code. This is roughly 1/B of the Fisher information, and their alpha
        = 2000 (at B = 64) belongs to it. "example" averages the squared gradients of single
        examples, the diagonal of the Fisher information.

    Returns:
      A pytree like params: float32 importances at adapted leaves, None elsewhere. Images whose
      prediction or gradient is not finite are left out, and a warning says how many. With "batch",
      a gradient that is not finite although all predictions are leaves its batch out.

    Raises:
      ValueError: batches is empty or has no image with a finite prediction, `gradients` is unknown,
        apply_fn returns one logit, or no parameter adapts.
    """
    check_choice("gradients", gradients, Gradients)
    arrays = map(on_device, batches)
    first = list(itertools.islice(arrays, 1))
    if not first:
        raise ValueError("batches is empty. Give at least one batch of public source images.")
    paths = adapting(apply_fn, params, adapted, first[0])
    square = _squared_batch if gradients == "batch" else _squared_examples
    squares = []
    presence = []
    for images in itertools.chain(first, arrays):
        batch_squares, present = _squared(square, apply_fn, paths, params, images)
        squares.append(batch_squares)
        presence.append(present)
    presence = jax.device_get(presence)
    used = sum(int(present.sum()) for present in presence)
    total = sum(len(present) for present in presence)
    if not used:
        raise ValueError(
            "batches has no image with a finite prediction and gradient. Check the images and the "
            "model."
        )
    if used < total:
        warnings.warn(
            f"{total - used} of {total} images have no finite prediction or gradient, so fisher "
            "leaves them out. Check batches for NaN.",
            stacklevel=2,
        )
    # A batch of which nothing is used has no mean.
    batches_used = sum(bool(present.any()) for present in presence)
    return _mean_of_batches(squares, batches_used)


@jax.jit
def _mean_of_batches(squares: list[Any], count: int) -> Any:
    return jax.tree.map(lambda *each: sum(each) / count, *squares)


def _mean_loss(
    apply_fn: Callable[[Any, jax.Array], jax.Array],
    moving: Any,
    params: Any,
    images: jax.Array,
    present: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross entropy to the predicted labels, and which losses are finite."""
    logits = apply_fn(merge(moving, params), images).astype(jnp.float32)
    check_logits(logits)
    losses = -jax.nn.log_softmax(logits).max(-1)  # the predicted label is the most probable one
    mean = jnp.where(present, losses, 0).sum() / jnp.maximum(present.sum(), 1)
    return mean, jnp.isfinite(losses)


# Source models of one network share a program.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _squared(
    square: Callable[..., tuple[Any, jax.Array]],
    apply_fn: Callable[[Any, jax.Array], jax.Array],
    paths: frozenset[str],
    params: Any,
    images: jax.Array,
) -> tuple[Any, jax.Array]:
    """Returns what `square` returns for the parameters at `paths`."""
    gradient = jax.grad(functools.partial(_mean_loss, apply_fn), has_aux=True)
    return square(gradient, trainable_part(params, paths), params, images)


def _squared_batch(
    gradient: Callable[..., Any], moving: Any, params: Any, images: jax.Array
) -> tuple[Any, jax.Array]:
    """Returns the squared gradient of a batch's mean loss, and which images are in it [B]."""

    def of_rows(images: jax.Array, present: jax.Array) -> Any:
        return gradient(moving, params, images, present)

    _, mean_gradient, present = without_bad_rows(of_rows, images, jnp.ones(len(images), bool))
    present &= all_finite(mean_gradient)
    squares = jax.tree.map(lambda g: jnp.where(present.any(), jnp.square(g), 0), mean_gradient)
    return squares, present


def _squared_examples(
    gradient: Callable[..., Any], moving: Any, params: Any, images: jax.Array
) -> tuple[Any, jax.Array]:
    """Returns the mean of the squared gradients of images, and which images are in it [B]."""
    batches_of_one = (images[:, None], jnp.ones((len(images), 1), bool))
    by_image = jax.vmap(gradient, in_axes=(None, None, 0, 0))
    gradients, finite = by_image(moving, params, *batches_of_one)
    present = finite[:, 0] & jax.vmap(all_finite)(gradients)
    return jax.tree.map(lambda g: _mean_square(g, present), gradients), present


def _mean_square(g: jax.Array, present: jax.Array) -> jax.Array:
    """Returns the mean of squares over the examples that are present."""
    weights = present.reshape(-1, *[1] * (g.ndim - 1))
    return jnp.where(weights, jnp.square(g), 0).sum(0) / jnp.maximum(present.sum(), 1)
