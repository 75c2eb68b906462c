"""Accuracy on public or held-out data at no cost, and on private data as a charged release."""

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import Source, check_source, pad_to_physical
from jaxdp.data.protocol import inputs_of
from jaxdp.privacy import Account, GaussianDpEvent
from jaxdp.release import Release, Till, program, stream
from jaxdp.report import progress_bar
from jaxdp.transforms import noise

Predict = Callable[[Any, jax.Array], jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def _correct(predict: Predict, params: Any, batch: Any, mask: jax.Array) -> jax.Array:
    return ((predict(params, inputs_of(batch)).argmax(-1) == batch["label"]) & mask).sum()


def count_correct(predict: Predict, params: Any, source: Source, *, batch_size: int = 500) -> int:
    """Counts the examples whose largest logit is at their label, without privacy. Arguments are as in `accuracy`."""
    check_source(source, "label")
    if not len(source):
        raise ValueError(f"source {getattr(source, 'name', '')!r} has no examples. Accuracy needs at least one.")
    return _count(predict, params, source, batch_size)


def _count(predict: Predict, params: Any, source: Source, batch_size: int) -> int:
    batches, total = _batches(source, batch_size), -(-len(source) // min(batch_size, len(source)))
    bar = progress_bar(batches, label="accuracy", unit="batch", total=total)
    return sum(int(_correct(predict, params, *batch)) for batch in bar)


def _batches(source: Source, batch_size: int) -> Iterator[tuple[Any, jax.Array]]:
    for rows, mask in zip(*pad_to_physical(np.arange(len(source)), min(batch_size, len(source))), strict=True):
        yield jax.device_put((source.gather(rows), mask))


def accuracy(predict: Predict, params: Any, source: Source, *, batch_size: int = 500) -> float:
    """Returns the fraction of examples whose largest logit is at their label.

    Nothing is charged. `source` must be public or held out. Held-out data must not take part in training or selection
    that claims to be private. For private data use `charged_accuracy`.

    Args:
      predict: `predict(params, inputs [B, ...]) -> logits [B, K]`. The inputs are the column "image", or else
        "features", or else the dict of all columns but "label".
      params: The parameters for `predict`.
      source: Examples with a column "label" of integers [].
      batch_size: The number of examples per call.

    Raises:
      TypeError, ValueError: source is empty, or not as `jaxdp.data.check_source(source, "label")` demands.
    """
    return count_correct(predict, params, source, batch_size=batch_size) / len(source)


def noisy_fraction(key: jax.Array, count: int, total: int, noise_multiplier: float) -> jax.Array:
    """Returns the release of `charged_accuracy`: (count + noise) / total, clipped to [0, 1], float32 []."""
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
    """Estimates the accuracy on private data by a noisy count of correct answers over the public number of examples.

    Args:
      predict, params, source, batch_size: As in `accuracy`.
      account: The account that is charged, `ledger.account(name)` of the data set.
      noise_multiplier: The standard deviation of the noise on the count. One example changes the count by at most 1.
      workdir: A folder for this release only. It keeps the estimate, so a repeated call is free. None keeps nothing.
      seed: 16 secret bytes for tests. The default is OS entropy.

    Returns:
      The estimate, clipped to [0, 1]. Before clipping its standard deviation is noise_multiplier / len(source).

    Raises:
      BudgetExceeded: The account cannot pay. Only the first and last examples are read, for a check.
      TypeError, ValueError: noise_multiplier is not positive and finite or is noise that float32 loses, or source is
        not as in `accuracy`.

    Formal guarantees:
      GaussianDpEvent(noise_multiplier), charged before the count is computed. Clipping is post-processing. The number
      of examples is taken to be public.
    """
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be positive and finite, got {noise_multiplier}. Use accuracy() on public data."
        )
    noise.check_product("noise_multiplier", noise_multiplier, 1.0)

    check_source(source, "label")

    def estimate(secret: bytes) -> dict[str, np.ndarray]:
        count = _count(predict, params, source, batch_size)
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
