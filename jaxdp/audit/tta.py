"""Audits of private test-time adaptation: one image in the batch of an update.

    batch, images = public_images[:64], public_images[64:96]
    print(audit_stream(adapter, batch, images, trials=500, delta=1e-5).describe())

A trial is one update from the source model, with an image or its neighbour in the first row of its
batch. With correlated noise it is a period: such an update, and the updates of empty batches after
it. All pairs of images are tried without noise. The pair whose updates are farthest apart is the
canary and its neighbour.
"""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import Exact, StreamTerms, Trials
from jaxdp.files import shows_keywords
from jaxdp.privacy import Account
from jaxdp.privacy.accounting import Adjacency
from jaxdp.tta.accounts import StreamAccount
from jaxdp.tta.adapter import Adapter
from jaxdp.tta.private import Private
from jaxdp.tta.select import trainable_part

# The number of images in one compiled call. Second views differ between trials and multiply the
# work.
_IMAGES = 1024
# Of the mean variance and of what the canary moves. Noise of less variance hides nothing.
_LEAST_VARIANCE = 1e-8


@shows_keywords(StreamTerms, vars(Trials))
def audit_stream(
    adapter: Adapter,
    batch: Any,
    candidates: Any,
    *,
    adjacency: Adjacency = "replace_one",
    **terms: Unpack[StreamTerms],
) -> bounds.Audit:
    """Audits the update of a private adapter by many updates with and without a canary.

    Args:
      adapter: An adapter of a private method. The attack sees its parameters after the update, or
          after every update of a period of correlated noise. Plain SGD shows most.
      batch: Images [B, ...], B >= 1. The canary replaces the first.
      candidates: Images [N, ...] that may be the canary, N >= 1, for "replace_one" N >= 2.
      adjacency: "replace_one", or "zero_out", where the canary's neighbour is padding.
      terms: trials, delta, confidence, claim (by default "gaussian") and seed, as in
          `jaxdp.audit.trials.Trials`.

    Returns:
      The `Audit` of 2 `trials` updates, with the ledger's epsilon of an image that is in one of
      them.

    Formal guarantees:
      As `jaxdp.audit.multi_run`. Every update starts from the source model with its own key, so
      that scores are independent. The score is the product of the update with the difference of the
      two updates without noise. For plain SGD it is the likelihood ratio of the Gaussian noise. For
      correlated noise the covariance of separate trials weighs it. It is fixed before the noise of
      the trials is drawn. The keys are of the kind "threefry2x32",
      which are independent under `jax.vmap`. Adapters draw "chacha12" keys.

    Raises:
      TypeError: The adapter's method is not private.
      ValueError: An argument is out of range, or no candidate changes the update.
    """
    if not isinstance(adapter.method, Private):
        raise TypeError(
            f"adapter must have a private method, got {type(adapter.method).__name__}. Use "
            "tta.private()."
        )
    batch = np.asarray(batch)
    candidates = np.asarray(candidates)
    _check_images(batch, candidates)
    event = adapter.method.event

    def charge(account: Account) -> None:
        stream_account = StreamAccount(account, event=event)
        for number in range(adapter.accumulate):
            records = [(number, row) for row in range(len(batch))]
            with stream_account.spend(records, release=0):
                pass

    runs = Trials(charge=charge, adjacency=adjacency, **terms)
    runs.check_candidates("candidates must hold", len(candidates), "images")
    size = min(runs.trials, max(1, _IMAGES // len(batch)))

    def after(image: Any, keys: jax.Array) -> np.ndarray:
        """Returns the adapted parameters under each of `size` keys, float64 [size, P]."""
        images, mask = _first(batch, image)
        results = jax.vmap(functools.partial(_after, adapter, batch, images, mask))(keys)
        return np.asarray(results, np.float64)

    def ends(image: Any, purpose: str, count: int) -> np.ndarray:
        """Returns the adapted parameters after `count` updates, float64 [count, P]."""
        keys = runs.keys(purpose, count)
        params = []
        for start in range(0, count, size):
            # Calls of one size compile the update once, so the last one repeats some runs.
            rows = np.arange(start, start + size) % count
            params.append(after(image, keys[rows]))
        return np.concatenate(params)[:count]

    # All results have the same noise, so their differences have none. Equal keys in the number of
    # the trials share the compiled update, which takes longer to compile than to run.
    same_keys = runs.keys("choice", 1)[np.zeros(size, int)]

    def same_noise(image: Any) -> Exact:
        return Exact(image, after(image, same_keys)[0])

    def distance(one: Exact, other: Exact) -> float:
        return float(np.linalg.norm(one.result - other.result))

    results = [same_noise(image) for image in candidates]
    empty = same_noise(None)  # padding
    refusal = (
        "candidates must hold an image that changes the update. These change nothing, or the same."
    )
    canary, neighbour = runs.farthest(results, [empty], distance, refusal)
    direction = canary.result - neighbour.result
    if adapter.method.updates > 1:
        draws = ends(neighbour.data, "what the noise is like", runs.trials)
        direction = _weighed(direction, draws)

    def scores(image: Any, purpose: str) -> np.ndarray:
        params = ends(image, purpose, runs.trials)
        return (params - neighbour.result) @ direction

    return runs.judge(scores, canary.data, neighbour.data)


def _check_images(batch: np.ndarray, candidates: np.ndarray) -> None:
    """Raises ValueError unless both hold images of one shape, and the batch at least one."""
    if not len(batch) or batch.shape[1:] != candidates.shape[1:]:
        raise ValueError(
            f"batch and candidates must be images of one shape, got {batch.shape} and "
            f"{candidates.shape}."
        )


def _weighed(direction: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Returns the direction [P] of the likelihood ratio of noise like that of draws [n, P]."""
    covariance = np.cov(draws, rowvar=False)
    values = len(covariance)
    # A twin with one key has no variance at all.
    scale = np.trace(covariance) / values + np.square(direction).max()
    covariance += _LEAST_VARIANCE * scale * np.eye(values)
    return np.linalg.solve(covariance, direction)


def _first(batch: np.ndarray, image: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the batch with an image in the first place, and its mask. None leaves it empty."""
    images = batch.copy()
    mask = np.ones(len(batch), bool)
    if image is None:
        mask[0] = False
    else:
        images[0] = image
    return images, mask


def _after(
    adapter: Adapter,
    batch: np.ndarray,
    images: Any,
    mask: Any,
    key: jax.Array,
) -> jax.Array:
    """Returns the adapted parameters [P] after one update from the source model.

    The images and their mask are the update's first batch. For a period of correlated noise the
    parameters after all its updates follow each other.
    """
    state = adapter.init(key)
    for _ in range(adapter.accumulate):
        state, _ = adapter.step(state, jnp.asarray(images), mask=jnp.asarray(mask))
        images = batch
        mask = np.ones(len(batch), bool)

    paths = frozenset(adapter.adapted_paths)

    def adapted(params: Any) -> jax.Array:
        part = trainable_part(params, paths)
        leaves = jax.tree.leaves(part)
        return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])

    assert isinstance(adapter.method, Private)
    nobody = jnp.zeros(len(batch), bool)
    after = [adapted(state.params)]

    for _ in range(adapter.method.updates - 1):
        for _ in range(adapter.accumulate):
            state, _ = adapter.step(state, jnp.asarray(batch), mask=nobody)
        after.append(adapted(state.params))
    return jnp.concatenate(after)
