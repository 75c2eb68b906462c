"""Microbatches, keys, auxiliary output and groups of `clipped_grad`, and per-example gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from tests.transforms.small_net import (
    PARAMS,
    assert_close,
    batch_of,
    both_computations,
    clipped,
    dropout_loss,
    every_engine,
    loss,
    norm,
)

# --- Microbatches, keys, aux, groups ---


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_microbatches_change_nothing(engine: str, chunk: int) -> None:
    x, y = batch_of(5)
    x[1] = np.nan
    mask = np.arange(5) != 3
    whole = clipped(engine)(PARAMS, (x, y), mask)
    chunked = clipped(engine, microbatch_size=chunk)(PARAMS, (x, y), mask)
    assert_close(chunked.grads, whole.grads)
    np.testing.assert_allclose(chunked.norms, whole.norms, rtol=1e-6)
    np.testing.assert_allclose(chunked.losses, whole.losses, rtol=1e-6)
    assert chunked.nonfinite == whole.nonfinite == 1


@pytest.mark.slow
@both_computations
def test_each_example_has_its_own_key(engine: str) -> None:
    key = jax.random.key(7)
    f = jaxdp.clipped_grad(dropout_loss, clip_norm=0.5, engine=engine, has_aux=True)
    x, y = batch_of(5)
    out = f(PARAMS, (x, y), key=key)
    kept = np.stack(
        [
            np.asarray(jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (3, 4)))
            for i in range(5)
        ]
    )
    np.testing.assert_array_equal(out.aux["kept"], kept)
    assert len(set(np.asarray(out.aux["bits"]).tolist())) == 5
    by_hand = clipped(engine)(PARAMS, (np.where(kept, 2 * x, 0), y))
    assert_close(out.grads, by_hand.grads)
    # Padding at the end, a mask, and microbatches leave the keys of the others alone.
    padded = tuple(
        np.concatenate([a, np.full((2, *a.shape[1:]), np.nan, np.float32)]) for a in (x, y)
    )
    longer = f(PARAMS, padded, np.arange(7) < 5, key=key)
    np.testing.assert_array_equal(longer.aux["kept"][:5], kept)
    assert_close(longer.grads, out.grads)
    chunked = jaxdp.clipped_grad(
        dropout_loss, clip_norm=0.5, engine=engine, has_aux=True, microbatch_size=2
    )
    again = chunked(PARAMS, (x, y), key=key)
    np.testing.assert_array_equal(again.aux["kept"], kept)
    assert_close(again.grads, out.grads)


def aux_loss(p: Any, example: Any) -> Any:
    x, y = example
    logits = jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]
    return loss(p, example), {
        "logits": logits,
        "label": (jnp.argmax(y), None),
        "weights": p["b"],
        "count": 3,
    }


@pytest.mark.slow
@both_computations
def test_aux_is_stacked(engine: str) -> None:
    x, y = batch_of(5)
    for chunk in (None, 2):
        f = jaxdp.clipped_grad(
            aux_loss, clip_norm=0.5, engine=engine, has_aux=True, microbatch_size=chunk
        )
        out = f(PARAMS, (x, y))
        np.testing.assert_allclose(
            out.aux["logits"],
            np.tanh(x @ PARAMS["w"] + PARAMS["b"]) @ PARAMS["v"],
            rtol=1e-4,
            atol=1e-5,
        )
        np.testing.assert_array_equal(out.aux["label"][0], y.reshape(5, -1).argmax(1))
        np.testing.assert_array_equal(out.aux["weights"], np.broadcast_to(PARAMS["b"], (5, 1, 6)))
        np.testing.assert_array_equal(out.aux["count"], np.full(5, 3))
        assert_close(out.grads, clipped(engine)(PARAMS, (x, y)).grads)
    empty = f(PARAMS, batch_of(0))
    assert empty.aux["logits"].shape == (0, 3, 3)


def groups(size: int, members: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(a.reshape(size, members, *a.shape[1:]) for a in batch_of(size * members))


@pytest.mark.slow
@both_computations
def test_groups_clip_the_gradient_of_their_mean(engine: str, oracle: Any) -> None:
    batch = groups(4, 3)
    mean_loss = lambda p, g: jnp.mean(jnp.stack([loss(p, (g[0][i], g[1][i])) for i in range(3)]))  # noqa: E731
    reference = oracle.micro_batches_of_one(mean_loss, PARAMS, batch)
    f = clipped(engine, 0.3, group=True)
    out = f(PARAMS, batch)
    oracle.assert_same_sum(PARAMS, out.grads, reference.clipped_sum(0.3))
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)
    np.testing.assert_allclose(out.losses, reference.losses, rtol=1e-5)
    mask = np.array([True, False, True, True])
    oracle.assert_same_sum(PARAMS, f(PARAMS, batch, mask).grads, reference.clipped_sum(0.3, mask))


@pytest.mark.slow
@both_computations
def test_groups_of_different_sizes(engine: str, oracle: Any) -> None:
    x, y = groups(4, 3)
    mask = np.array(
        [[True, True, True], [False, True, False], [False, False, False], [True, False, True]]
    )

    def mean_loss(p: Any, group: Any) -> Any:
        x, y, present = group
        losses = jnp.stack([loss(p, (x[i], y[i])) for i in range(3)])
        return jnp.sum(jnp.where(present, losses, 0)) / jnp.maximum(present.sum(), 1).astype(
            losses.dtype
        )

    reference = oracle.micro_batches_of_one(mean_loss, PARAMS, (x, y, mask))
    x[~mask], y[~mask] = np.nan, np.inf  # padding within a group may hold anything
    for chunk in (None, 3):
        out = clipped(engine, 0.3, group=True, microbatch_size=chunk)(PARAMS, (x, y), mask)
        oracle.assert_same_sum(PARAMS, out.grads, reference.clipped_sum(0.3))
        np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5, atol=1e-15)
        assert out.nonfinite == 0


@pytest.mark.slow
def test_each_member_of_a_group_has_its_own_key() -> None:
    key = jax.random.key(3)
    f = jaxdp.clipped_grad(dropout_loss, clip_norm=0.5, has_aux=True, group=True)
    bits = np.asarray(f(PARAMS, groups(2, 3), key=key).aux["bits"])
    expected = [
        [jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, i), j)) for j in range(3)]
        for i in range(2)
    ]
    np.testing.assert_array_equal(bits, np.array(expected))


# --- The gradients themselves ---


def clipped_and_summed(grads: Any, clip_norm: float) -> Any:
    """Computes the clipped sum of gradients [B, ...] in float64."""
    leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]
    norms = np.sqrt(sum(np.square(g).reshape(len(g), -1).sum(1) for g in leaves))
    factors = clip_norm / np.maximum(norms, clip_norm)
    return jax.tree.unflatten(
        jax.tree.structure(grads), [np.einsum("b,b...->...", factors, g) for g in leaves]
    )


@every_engine
def test_per_example_gradients(engine: str, reference: Any) -> None:
    out = clipped(engine).per_example(PARAMS, batch_of(5))
    for grads, expected, leaf in zip(
        jax.tree.leaves(out.grads), reference.grads, jax.tree.leaves(PARAMS), strict=True
    ):
        assert (grads.shape, grads.dtype) == ((5, *leaf.shape), jnp.float32)
        np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-6)
    assert (out.nonfinite.dtype, int(out.nonfinite)) == (jnp.int32, 0)
    assert max(reference.norms) > 0.5  # not clipped


def test_per_example_gradients_of_masked_and_bad_examples_are_zero() -> None:
    x, y = batch_of(6)
    x[1], y[2], y[3], y[4, 0, 0] = np.nan, np.inf, 1e30, -np.inf
    out = clipped("auto").per_example(PARAMS, (x, y), np.arange(6) != 2)
    good = np.isin(np.arange(6), [0, 5])
    expected = clipped("auto").per_example(PARAMS, batch_of(6))
    for grads, whole in zip(
        jax.tree.leaves(out.grads), jax.tree.leaves(expected.grads), strict=True
    ):
        np.testing.assert_array_equal(grads, np.asarray(whole) * good.reshape(-1, 1, 1))
    assert out.nonfinite == 3
    nobody = clipped("auto").per_example(PARAMS, batch_of(0))
    assert jax.tree.map(jnp.shape, nobody.grads) == {
        name: (0, *leaf.shape) for name, leaf in PARAMS.items()
    }
    assert (nobody.nonfinite, {g.dtype for g in jax.tree.leaves(nobody.grads)}) == (
        0,
        {jnp.dtype(jnp.float32)},
    )


@pytest.mark.slow
def test_per_example_gradients_sum_up_to_the_clipped_sum() -> None:
    """Combines keys, frozen leaves, low precision, groups of different sizes, and auxiliary
    output."""
    key = jax.random.key(5)
    mask = np.array(
        [[True, True, True], [False, True, False], [False, False, False], [True, False, True]]
    )
    params = {**PARAMS, "v": jnp.asarray(PARAMS["v"], jnp.bfloat16)}

    def mixed(p: Any, example: Any, *, key: Any) -> Any:
        return dropout_loss({**p, "v": p["v"].astype(jnp.float32)}, example, key=key)

    for group, batch, present in (
        (True, groups(4, 3), mask),
        (False, batch_of(5), np.arange(5) != 1),
    ):
        f = jaxdp.clipped_grad(
            mixed,
            clip_norm=0.3,
            has_aux=True,
            group=group,
            engine="vmap",
            trainable=lambda path, leaf: path != "b",
        )
        out = f.per_example(params, batch, present, key=key)
        assert out.grads["b"] is None
        assert {g.dtype for g in jax.tree.leaves(out.grads)} == {jnp.dtype(jnp.float32)}
        summed = f(params, batch, present, key=key)
        assert_close(clipped_and_summed(out.grads, 0.3), summed.grads, rtol=1e-4)
        assert norm(summed.grads) > 0.1


def test_per_example_gradients_check_what_a_call_checks() -> None:
    x, y = batch_of(3)
    f = clipped("auto")
    with pytest.raises(ValueError, match="a leading axis"):
        f.per_example(PARAMS, (x, y[:2]))
    with pytest.raises(TypeError, match="mask must be boolean"):
        f.per_example(PARAMS, (x, y), np.ones(3))
    with pytest.raises(ValueError, match="no trainable leaf"):
        clipped("auto", trainable=lambda path, leaf: False).per_example(PARAMS, (x, y))
