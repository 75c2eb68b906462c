"""Audits of private test-time adaptation: what an update tells about one image of its batch.

    batch, images = public_images[:64], public_images[64:96]
    print(audit_stream(adapter, batch, images, trials=500, delta=1e-5).describe())

A trial is one update from the source model, with an image in the first row of its batch or with its neighbour there.
All pairs of images are tried without noise. The pair whose updates are farthest apart is the canary and its neighbour.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import bounds
from jaxdp.privacy import Account
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim as claimed
from jaxdp.release import new_seed, stream
from jaxdp.tta.accounts import StreamAccount
from jaxdp.tta.adapter import Adapter
from jaxdp.tta.private import Private
from jaxdp.tta.select import trainable_part

# Images in the batches of one compiled call, where second views differ between trials and multiply the work.
_IMAGES = 1024


def audit_stream(
    adapter: Adapter,
    batch: Any,
    candidates: Any,
    *,
    trials: int,
    delta: float,
    adjacency: Adjacency = "replace_one",
    confidence: float = 0.95,
    claim: bounds.Claim = "gaussian",
    seed: bytes | None = None,
) -> bounds.Audit:
    """Audits the update of a private adapter by many updates with a canary in the batch and as many without it.

    Args:
      adapter: of a private method. Its parameters after the update are seen, so that plain SGD shows most.
      batch: images [B, ...], B >= 1; the canary takes the place of the first.
      candidates: images [N, ...] that may be the canary, N >= 1, for "replace_one" N >= 2.
      trials: updates of either kind, at least 2.
      delta: of both bounds, in (0, 1) for the Gaussian claim.
      adjacency: "replace_one", the canary's neighbour is another candidate, or "zero_out", it is padding.
      confidence: in (0.5, 1).
      claim: what is tested, see `jaxdp.audit.multi_run`.
      seed: 16 secret bytes of the noise; drawn from the operating system unless given for tests.

    Returns:
      The `Audit` of 2 `trials` updates, with the ledger's epsilon of an image that is in one of them.

    Formal guarantees:
      As `jaxdp.audit.multi_run`. Every update starts from the source model with a key of its own, so that scores are
      independent. The score is the product of the update with the difference of the two updates without noise, for
      plain SGD the likelihood ratio of the Gaussian noise. It is fixed before the noise of the trials is drawn. The
      keys are of the kind "threefry2x32", which are independent under `jax.vmap`; an adapter draws keys of the kind
      "rbg" otherwise.

    Raises:
      TypeError: the adapter's method is not private.
      ValueError: an argument is out of range.
    """
    if not isinstance(adapter.method, Private):
        raise TypeError(f"adapter must have a private method, got {type(adapter.method).__name__}; use tta.private().")
    batch, candidates = np.asarray(batch), np.asarray(candidates)
    if not len(batch) or batch.shape[1:] != candidates.shape[1:]:
        raise ValueError(f"batch and candidates must be images of one shape, got {batch.shape} and {candidates.shape}.")
    neighbours = list(candidates) if adjacency == "replace_one" else [None]  # None is padding
    if len(candidates) < (least := 2 if adjacency == "replace_one" else 1):
        raise ValueError(f"candidates must hold at least {least} images under {adjacency!r}, got {len(candidates)}.")
    if trials < 2:
        raise ValueError(f"trials must be at least 2, got {trials}.")
    event = adapter.method.event

    def charge(account: Account) -> None:
        stream_account = StreamAccount(account, event=event)
        for part in range(adapter.accumulate):
            with stream_account.spend([(part, row) for row in range(len(batch))], release=0):
                pass

    upper = claimed(charge, adjacency=adjacency, delta=delta)
    bounds.check(upper, delta, confidence, claim)
    seed = new_seed() if seed is None else seed
    size = min(trials, _IMAGES // len(batch) + 1)

    def ends(image: Any, purpose: str, count: int) -> np.ndarray:
        """Adapted parameters after `count` updates, float64 [count, P]."""
        keys = jax.random.split(stream(seed, purpose, impl="threefry2x32"), count)
        # Every part has the same size, for which the update is compiled once.
        parts = [keys[np.arange(i, i + size) % count] for i in range(0, count, size)]
        updates = jax.vmap(lambda key: _end(adapter, batch, image, key))
        return np.concatenate([np.asarray(updates(part), np.float64) for part in parts])[:count]

    # Under one noise the difference of two updates has none.
    tried = [[(ends(image, "choice", 1)[0], image) for image in images] for images in (candidates, neighbours)]
    pairs = itertools.product(*tried)
    (one, canary), (other, neighbour) = max(pairs, key=lambda pair: np.linalg.norm(pair[0][0] - pair[1][0]))

    def scores(image: Any, purpose: str) -> np.ndarray:
        return (ends(image, purpose, trials) - other) @ (one - other)

    return bounds.multi_run(
        scores(canary, "with the canary"),
        scores(neighbour, "without the canary"),
        upper=upper,
        delta=delta,
        confidence=confidence,
        claim=claim,
    )


def _end(adapter: Adapter, batch: np.ndarray, image: Any, key: jax.Array) -> jax.Array:
    """The adapted parameters after one update from the source model, [P].

    The image takes the place of the first one of the update's first batch; None leaves that place empty.
    """
    images, mask = batch.copy(), np.ones(len(batch), bool)
    mask[0] = image is not None
    images[0] = images[0] if image is None else image
    state = adapter.init(key)
    for _ in range(adapter.accumulate):
        state, _ = adapter.step(state, jnp.asarray(images), mask=jnp.asarray(mask))
        images, mask = batch, np.ones(len(batch), bool)
    leaves = jax.tree.leaves(trainable_part(state.params, frozenset(adapter.adapted_paths)))
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])
