"""Accuracy: free on public or held-out data, paid for on private data."""

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import Source, pad_to_physical
from jaxdp.privacy import Account, GaussianDpEvent
from jaxdp.release import Release, Till, program, stream
from jaxdp.transforms import noise

Predict = Callable[[Any, jax.Array], jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def _correct(predict: Predict, params: Any, batch: Any, mask: jax.Array) -> jax.Array:
    inputs = batch["image"] if "image" in batch else batch["features"]
    return ((predict(params, inputs).argmax(-1) == batch["label"]) & mask).sum()


def count_correct(predict: Predict, params: Any, source: Source, *, batch_size: int = 500) -> int:
    """The number of examples whose largest logit is at their label; not private. Arguments and errors as `accuracy`."""
    if not len(source):
        raise ValueError(f"source {source.name!r} has no examples: there is no accuracy.")
    return sum(int(_correct(predict, params, *batch)) for batch in _batches(source, batch_size))


def _batches(source: Source, batch_size: int) -> Iterator[tuple[Any, jax.Array]]:
    for rows, mask in zip(*pad_to_physical(np.arange(len(source)), min(batch_size, len(source))), strict=True):
        yield jax.device_put((source.gather(rows), mask))


def accuracy(predict: Predict, params: Any, source: Source, *, batch_size: int = 500) -> float:
    """Fraction of examples whose largest logit is at their label.

    Nothing is charged: `source` must be public, or held out and never used for training or selection that is claimed
    to be private. For private data use `charged_accuracy`.

    Args:
      predict: `predict(params, inputs [B, ...]) -> logits [B, K]`.
      params: of `predict`.
      source: examples with an "image" or "features", and a "label".
      batch_size: examples per call.

    Raises:
      ValueError: source is empty.
    """
    return count_correct(predict, params, source, batch_size=batch_size) / len(source)


def noisy_fraction(key: jax.Array, count: int, total: int, noise_multiplier: float) -> jax.Array:
    """What `charged_accuracy` releases of a count: (count + noise) / total, clipped to [0, 1]; float32 []."""
    exact = jnp.float32(count)
    return jnp.clip((exact + noise.gaussian(key, exact, noise_multiplier)) / total, 0.0, 1.0)


def charged_accuracy(
    predict: Predict,
    params: Any,
    source: Source,
    *,
    account: Account,
    noise_multiplier: float,
    batch_size: int = 500,
    workdir: str | os.PathLike[str] | None = None,
    seed: bytes | None = None,
) -> float:
    """Accuracy on private data: a noisy count of correct answers over the public number of examples.

    Args:
      predict, params, source, batch_size: as in `accuracy`.
      account: `ledger.account(name)` of the data set that pays.
      noise_multiplier: standard deviation of the noise on the count (one example changes the count by at most 1).
      workdir: a folder of this release's own, which keeps the estimate: it is not made or paid for again. None keeps
        nothing.
      seed: 16 secret bytes, for tests; default OS entropy.

    Returns:
      The estimate, clipped to [0, 1]; its standard deviation is noise_multiplier / len(source).

    Raises:
      BudgetExceeded: before the data is read.
      ValueError: noise_multiplier is not positive and finite.

    Formal guarantees:
      GaussianDpEvent(noise_multiplier), charged before the count is computed; clipping is post-processing. The number
      of examples is taken to be public.
    """
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be positive and finite, got {noise_multiplier}; use accuracy() on public data."
        )

    def estimate(secret: bytes) -> dict[str, np.ndarray]:
        count = count_correct(predict, params, source, batch_size=batch_size)
        key = stream(secret, "accuracy")
        return {"accuracy": np.asarray(noisy_fraction(key, count, len(source), noise_multiplier))}

    what = Release(
        label="accuracy",
        charges=[(account, GaussianDpEvent(noise_multiplier))],
        facts=lambda: [params, source.fingerprint, noise_multiplier, batch_size],
        programs=lambda: [program(_correct, predict, params, *next(_batches(source, batch_size)))],
        compute=estimate,
    )
    with Till(workdir, seed=seed) as till:
        return float(till.once(what)["accuracy"])
