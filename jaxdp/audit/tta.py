"""Canaries for a stream: what private test-time adaptation tells about one image of a batch.

    batch, images = public_images[:64], public_images[64:96]
    print(canaries.audit_stream(adapter, batch, images, trials=500, delta=1e-5).describe())

A trial is one update from the source model, with an image in the first row of its batch or with its neighbour there.
Which two images, is found by trying them all: those whose updates are farthest apart.
"""

import itertools
from collections.abc import Callable
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
    """Audits the update of a private adapter by many steps with a canary in the batch and as many without it.

    All steps belong to one stream, as long as 2 `trials` updates and with a reset before each, in which no image
    comes twice: the ledger charges one visit.

    Args:
      adapter: of a private method. What is seen is by how far its parameters move, so that plain SGD shows most.
      batch: images [B, ...], B >= 1; the canary takes the place of the first.
      candidates: images [N, ...] that may be the canary, N >= 1, for "replace_one" N >= 2.
      trials: updates of either kind, at least 2.
      delta: of both bounds, in (0, 1) for the Gaussian claim.
      adjacency: "replace_one", the canary's neighbour is another candidate, or "zero_out", it is padding.
      confidence: in (0.5, 1).
      claim: what is tested, see `jaxdp.audit.multi_run`.
      seed: 16 secret bytes of the noise; drawn from the operating system unless given for tests.

    Returns:
      The `Audit`, for an image that is in one batch, with the ledger's epsilon of the stream.

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
    event = adapter.method.event

    def charge(account: Account) -> None:
        stream_account = StreamAccount(account, event=event)
        for number, part in itertools.product(range(2 * trials), range(adapter.accumulate)):
            with stream_account.spend([(number, part, row) for row in range(len(batch))], release=number):
                pass

    upper = claimed(charge, adjacency=adjacency, delta=delta)
    seed = new_seed() if seed is None else seed
    # Under one noise the difference of two updates has none.
    same = stream(seed, "choice")
    moved_by = [
        [(_updates(adapter, batch, same)(image), image) for image in images] for images in (candidates, neighbours)
    ]
    pairs = itertools.product(*moved_by)
    (one, canary), (other, neighbour) = max(pairs, key=lambda pair: np.linalg.norm(pair[0][0] - pair[1][0]))

    update = _updates(adapter, batch, stream(seed, "audit"))
    return bounds.audit_mechanism(
        lambda _: update(canary),
        lambda _: update(neighbour),
        lambda moved: moved @ (one - other),
        trials=trials,
        upper=upper,
        delta=delta,
        confidence=confidence,
        claim=claim,
    )


def _updates(adapter: Adapter, batch: np.ndarray, key: jax.Array) -> Callable[[Any], np.ndarray]:
    """`update(image) -> float64 [P]`: by how far the next update of a stream moves the source model's parameters.

    The image takes the place of the first one of the update's first batch; None leaves that place empty.
    """
    state = adapter.init(key)
    start = _moving(adapter, adapter.params)

    def update(image: Any) -> np.ndarray:
        nonlocal state
        state = adapter.reset(state)
        images, mask = batch.copy(), np.ones(len(batch), bool)
        mask[0] = image is not None
        images[0] = images[0] if image is None else image
        for _ in range(adapter.accumulate):
            state, _ = adapter.step(state, jnp.asarray(images), mask=jnp.asarray(mask))
            images, mask = batch, np.ones(len(batch), bool)
        return _moving(adapter, state.params) - start

    return update


def _moving(adapter: Adapter, params: Any) -> np.ndarray:
    leaves = jax.tree.leaves(trainable_part(params, frozenset(adapter.adapted_paths)))
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.device_get(leaves)])
