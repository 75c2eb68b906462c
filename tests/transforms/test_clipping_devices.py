"""How `clipped_grad` compiles, and its results on several devices."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxdp
from jaxdp.transforms import shards
from tests.transforms.small_net import (
    ENGINES,
    PARAMS,
    Smooth,
    assert_close,
    assert_equal,
    batch_of,
    both_computations,
    clipped,
    draws,
    dropout_loss,
    loss,
    norm,
    shard_mapped,
)

# --- Compilation and devices ---


@pytest.mark.slow
@both_computations
def test_second_call_does_not_recompile(engine: str) -> None:
    traces: list[None] = []

    def counted(p: Any, example: Any) -> Any:
        traces.append(None)
        return loss(p, example)

    f = jaxdp.clipped_grad(counted, clip_norm=0.5, engine=engine, microbatch_size=2)
    mask = np.arange(5) < 4
    first = f(PARAMS, batch_of(5), mask)
    count = len(traces)
    assert count > 0
    assert_equal(f(PARAMS, batch_of(5), mask), first)
    f(jax.tree.map(lambda p: 2 * p, PARAMS), batch_of(5, seed=8), ~mask)
    assert len(traces) == count
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(p: Any, b: Any, m: Any, c: Any) -> Any:
        return jaxdp.clipped_grad(loss, clip_norm=c, engine=engine)(p, b, m).grads

    step(PARAMS, batch_of(5), mask, 0.5)
    step(PARAMS, batch_of(5, seed=9), ~mask, 0.7)


@pytest.mark.slow
@both_computations
def test_an_equal_clip_rule_does_not_recompile(engine: str) -> None:
    chex.clear_trace_counter()

    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=1)
    def step(rule: Any, p: Any, b: Any) -> Any:
        return jaxdp.clipped_grad(loss, clip_norm=2.0, engine=engine, clip_rule=rule)(p, b).grads

    for seed in (1, 2, 3):
        step(Smooth(), PARAMS, batch_of(5, seed))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step(Smooth(gamma=0.4), PARAMS, batch_of(5))


@pytest.mark.slow
@both_computations
def test_no_transfers_in_a_compiled_step(engine: str) -> None:
    f = clipped(engine, 0.5, has_aux=False, microbatch_size=2)
    step = jax.jit(lambda p, b, m: (f(p, b, m), f(p, b)))
    arguments = jax.device_put((PARAMS, batch_of(5), np.arange(5) < 4))
    with jax.transfer_guard("disallow"):
        out, _ = jax.block_until_ready(step(*arguments))
    assert out.nonfinite == 0


@pytest.mark.slow
@both_computations
def test_batch_sharded_over_eight_devices(engine: str) -> None:
    if len(jax.devices()) < 8:
        pytest.skip("fewer than eight devices")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_row, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    batch, mask = batch_of(16), np.arange(16) % 3 > 0
    f = clipped(engine)
    sharded = f(
        jax.device_put(PARAMS, everywhere),
        jax.device_put(batch, by_row),
        jax.device_put(mask, by_row),
    )
    single = f(PARAMS, batch, mask)
    assert len(sharded.norms.sharding.device_set) == 8
    assert_close(jax.tree.map(np.asarray, sharded), jax.tree.map(np.asarray, single))


def test_weights_that_are_not_told_to_vary_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX adds up the gradients of weights that all devices share before the clipping."""
    monkeypatch.setattr(shards, "vary", lambda x, axes: x)

    def step(p: Any, batch: Any, mask: Any) -> Any:
        f = jaxdp.clipped_grad(loss, clip_norm=1.0, engine="vmap")
        return jax.lax.psum(f(p, batch, mask).grads, "data")

    with pytest.raises(ValueError, match=r"loss_fn calls .*psum.* on the axis 'data'"):
        shard_mapped(step, outputs=False)(PARAMS, batch_of(8), np.ones(8, bool))


def net(p: Any, example: Any) -> Any:
    """Weights that are tied, looked up, convolved, looped over, computed, and of no consequence."""
    x, tokens = example
    h = p["table"][tokens] + x
    h = jax.lax.conv_general_dilated(
        h[None], p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0]
    h = jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"] @ p["w"].T), None), h, None, length=2)[0]
    return jnp.mean(jnp.square(jnp.tanh(h @ jnp.sinh(p["w"]) + p["b"]) @ p["v"])) + 0.1 * jnp.sum(
        jnp.square(p["b"])
    )


NET_SHAPES = {
    "table": (7, 4),
    "kernel": (3, 4, 4),
    "w": (4, 6),
    "b": (1, 6),
    "v": (6, 3),
    "unused": (2,),
}
NET = dict(zip(NET_SHAPES, draws(6, *NET_SHAPES.values()), strict=True))
NET_BATCH = (
    3 * draws(7, (16, 3, 4))[0],
    np.random.default_rng(7).integers(0, 7, (16, 3)).astype(np.int32),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check_vma", "methods"),
    [(True, ("vmap", "auto", "bookkeeping", "factors", "keep", "drop")), (False, ("vmap", "auto"))],
)
def test_a_shard_clips_its_own_examples(
    check_vma: bool, methods: tuple[str, ...], oracle: Any
) -> None:
    """Checks that the psum over shards equals the result of one example at a time, and its
    sensitivity."""

    def step(p: Any, batch: Any, mask: Any) -> Any:
        every = oracle.every_method(net, methods, p, batch, mask, clip_norm=0.5)
        totals = {method: jax.lax.psum(out.grads, "data") for method, out in every.items()}
        return totals, *(
            {method: getattr(out, name) for method, out in every.items()}
            for name in ("norms", "losses")
        )

    run = shard_mapped(step, outputs=(False, True, True), check_vma=check_vma)
    mask = np.arange(16) % 5 != 2
    reference = oracle.micro_batches_of_one(net, NET, NET_BATCH)
    totals, norms, losses = run(NET, NET_BATCH, mask)
    others = [run(NET, NET_BATCH, mask & (np.arange(16) != i))[0] for i in (0, 9)]
    assert max(reference.norms[mask]) > 5
    for method, total in totals.items():
        oracle.assert_same_sum(NET, total, reference.clipped_sum(0.5, mask), rtol=1e-4, err=method)
        np.testing.assert_allclose(norms[method], reference.norms * mask, rtol=1e-4, err_msg=method)
        np.testing.assert_allclose(
            losses[method], reference.losses * mask, rtol=1e-4, err_msg=method
        )
        for other in others:
            assert norm(
                jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), total, other[method])
            ) <= 0.5 * (1 + 1e-4)


@pytest.mark.slow
@both_computations
def test_shards_with_keys_groups_microbatches_and_two_mesh_axes(engine: str) -> None:
    key, (x, y) = jax.random.key(2), batch_of(32)
    f = jaxdp.clipped_grad(
        dropout_loss,
        clip_norm=0.1,
        engine=engine,
        has_aux=True,
        group=True,
        microbatch_size=1,
        clip_rule="automatic",
    )
    grouped = x.reshape(16, 2, 3, 4), y.reshape(16, 2, 3, 3)

    def step(p: Any, batch: Any, mask: Any) -> Any:
        own = jax.random.fold_in(key, jax.lax.axis_index(("data", "more")))
        out = f(p, batch, mask, key=own)
        empty = f(p, jax.tree.map(lambda a: a[:0], batch), mask[:0], key=own)
        formed = f.per_example(p, batch, mask, key=own).grads["w"]
        return jax.lax.psum((out.grads, empty.grads), ("data", "more")), out.norms, formed

    mask = np.arange(16) % 3 > 0
    run = shard_mapped(step, outputs=(False, True, True), shape=(4, 2))
    (total, nothing), norms, formed = run(PARAMS, grouped, mask)
    singles = [
        f(PARAMS, (grouped[0][own], grouped[1][own]), mask[own], key=jax.random.fold_in(key, k))
        for k, own in enumerate(np.split(np.arange(16), 8))
    ]
    assert_close(
        total, jax.tree.map(lambda *gs: np.sum(gs, axis=0), *(s.grads for s in singles)), rtol=1e-4
    )
    np.testing.assert_allclose(norms, np.concatenate([s.norms for s in singles]), rtol=1e-4)
    assert formed.shape == (16, 4, 6)
    assert norm(nothing) == 0


@pytest.mark.slow
@both_computations
def test_a_loss_that_closes_over_values_of_its_shard(engine: str) -> None:
    x, y = batch_of(8)

    def step(p: Any, batch: Any, mask: Any) -> Any:
        scale = 1 + jax.lax.axis_index("data").astype(jnp.float32)
        f = jaxdp.clipped_grad(lambda p, e: scale * loss(p, e), clip_norm=0.1, engine=engine)
        same = f(p, (x[:2], y[:2])).grads  # all shards have the same examples
        return jax.lax.psum(same, "data")

    total = shard_mapped(step, outputs=False)(PARAMS, (x, y), np.ones(8, bool))
    f = jaxdp.clipped_grad(lambda p, e: e[2] * loss(p, e[:2]), clip_norm=0.1, engine=engine)
    parts = [f(PARAMS, (x[:2], y[:2], np.full(2, 1 + k, np.float32))).grads for k in range(8)]
    assert_close(total, jax.tree.map(lambda *gs: sum(gs[1:], gs[0]), *parts), rtol=1e-4)


def test_bookkeeping_holds_no_gradient_per_example() -> None:
    """Uses 64 examples of a 256 x 256 weight, 16 MiB. The engine needs about as much memory as the
    sum."""
    linear = lambda w, x: jnp.sum(jnp.square(x @ w[0])) + jnp.sum(x @ w[1])  # noqa: E731
    shapes = (
        [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2,
        jax.ShapeDtypeStruct((64, 256), jnp.float32),
    )
    needed = {}
    for engine in ENGINES:
        f = jaxdp.clipped_grad(linear, clip_norm=1.0, engine=engine)
        memory = jax.jit(lambda w, x, f=f: f(w, x).grads).lower(*shapes).compile().memory_analysis()
        needed[engine] = memory.temp_size_in_bytes
    assert needed["vmap"] >= 16 * 2**20
    assert max(needed["bookkeeping"], needed["auto"]) <= 2 * 2**20
