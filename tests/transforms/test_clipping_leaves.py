"""Which leaves `clipped_grad` trains, and in which dtypes it computes."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdp
from jaxdp.transforms import jaxprs, walker
from tests.transforms.small_net import (
    ENGINES,
    PARAMS,
    assert_close,
    batch_of,
    both_computations,
    clipped,
    draws,
    every_engine,
    loss,
    norm,
)

# --- Which leaves, which dtypes ---


@pytest.mark.slow
@every_engine
def test_trainable_leaves_by_path(engine: str, oracle: Any) -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2, name="head")(nn.tanh(nn.Dense(5, name="body")(x)))

    model, (x,) = Model(), draws(2, (5, 4))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    apply = lambda p, x: jnp.sum(jnp.square(model.apply({"params": p}, x)))  # noqa: E731
    head = lambda path, leaf: path.startswith("head/") and leaf.ndim > 1  # noqa: E731
    f = jaxdp.clipped_grad(apply, clip_norm=0.5, engine=engine, trainable=head)
    out = f(params, x)
    assert out.grads["body"] == {"kernel": None, "bias": None}
    assert out.grads["head"]["bias"] is None
    reference = oracle.micro_batches_of_one(apply, params, x, trainable=head)
    oracle.assert_same_sum(params, out.grads, reference.clipped_sum(0.5))
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)
    kept = f.trainable_params(params)
    assert jax.tree.structure(kept) == jax.tree.structure(out.grads)
    np.testing.assert_array_equal(kept["head"]["kernel"], params["head"]["kernel"])


@pytest.mark.slow
def test_paths_of_nnx_and_equinox() -> None:
    seen: list[str] = []
    graph, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    total = lambda p, x: jnp.sum(nnx.merge(graph, p)(x))  # noqa: E731
    f = jaxdp.clipped_grad(
        total, clip_norm=1.0, trainable=lambda path, leaf: seen.append(path) or "kernel" in path
    )
    out = f(state, np.ones((2, 2), np.float32))
    assert sorted(set(seen)) == ["bias/value", "kernel/value"]
    assert len(jax.tree.leaves(out.grads)) == 1
    module = eqx.nn.Sequential(
        [eqx.nn.Linear(2, 3, key=jax.random.key(0)), eqx.nn.Dropout(0.5, inference=True)]
    )
    f = jaxdp.clipped_grad(lambda m, x: jnp.sum(m(x)), clip_norm=1.0)
    grads = f(module, np.ones((2, 2), np.float32)).grads
    assert isinstance(grads, eqx.nn.Sequential)
    # the dropout rate is a setting, no parameter
    assert [g.shape for g in jax.tree.leaves(grads)] == [
        (3, 2),
        (3,),
    ]


@pytest.mark.slow
@every_engine
def test_scales_and_biases_of_every_broadcast_shape(engine: str, oracle: Any) -> None:
    shapes = {
        "scalar": (),
        "one": (1, 1, 1),
        "rows": (1, 3, 1),
        "columns": (1, 1, 4),
        "all": (1, 3, 4),
        "shared": (4,),
    }
    params = dict(zip(shapes, draws(4, *shapes.values()), strict=True))

    def loss(p: Any, x: Any) -> Any:
        y = p["scalar"] * x[None] + p["columns"]
        y = p["rows"] * jnp.sin(y + p["one"]) * p["all"]
        y = y * p["shared"].reshape(1, 1, 4) + p["shared"].reshape(1, 1, 4)
        return jnp.sum(jnp.sin(y)) + jnp.sum(p["scalar"] * y[..., :0]) + p["one"][0, 0, 0] * x[0, 0]

    (x,) = draws(5, (5, 3, 4))
    out = jaxdp.clipped_grad(loss, clip_norm=0.5, engine=engine)(params, x)
    reference = oracle.micro_batches_of_one(loss, params, x)
    oracle.assert_same_sum(params, out.grads, reference.clipped_sum(0.5))
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)


def test_no_sum_of_the_backward_pass_includes_an_axis_of_length_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such an axis is in the place of a model's batch. XLA on CPU takes ten times as long for a sum
    that has it."""

    def loss(p: Any, x: Any) -> Any:
        x = x[None]
        rows = (x @ p["weight"])[..., None]  # as the deviation that a LayerNorm divides by
        return jnp.square(x * (rows * p["scale"].reshape(1, 1, 4))).reshape(-1).sum()

    params = dict(zip(("weight", "scale"), draws(6, (4,), (4,)), strict=True))
    (x,) = draws(7, (5, 3, 4))

    def slow_sums() -> list[Any]:
        f = jaxdp.clipped_grad(loss, clip_norm=0.5, engine="bookkeeping")
        program = jax.make_jaxpr(lambda p: f(p, x).grads)(params).jaxpr
        sums = [eqn for eqn in jaxprs.every_equation(program) if eqn.primitive.name == "reduce_sum"]
        return [
            eqn
            for eqn in sums
            if eqn.invars[0].aval.shape == (5, 1, 3, 4) and 1 in eqn.params["axes"]
        ]

    assert not slow_sums()
    monkeypatch.setattr(walker, "_broadcast", jnp.broadcast_to)
    assert len(slow_sums()) == 2  # of the weight and of the data


@pytest.mark.slow
@both_computations
def test_leaves_that_are_not_floating_are_frozen(engine: str) -> None:
    params = {
        **PARAMS,
        "order": np.array([2, 1, 0, 3]),
        "flag": np.array(True),
        "name": "net",
        "rate": 0.5,
        "none": None,
    }

    def with_settings(p: Any, example: Any) -> Any:
        assert p["name"] == "net"
        return (
            p["rate"]
            * 2
            * loss(p, (example[0][:, p["order"]], jnp.where(p["flag"], example[1], 0)))
        )

    f = jaxdp.clipped_grad(with_settings, clip_norm=0.5, engine=engine)
    x, y = batch_of(5)
    out = f(params, (x, y))
    assert [out.grads[name] for name in ("order", "flag", "name", "rate", "none")] == [None] * 5
    expected = clipped(engine)(PARAMS, (x[:, :, [2, 1, 0, 3]], y)).grads
    assert_close({name: out.grads[name] for name in PARAMS}, expected)


@pytest.mark.slow
@both_computations
def test_complex_leaves_are_refused_or_frozen(engine: str) -> None:
    params = {**PARAMS, "spin": np.full(6, 1j, np.complex64)}
    rotated = lambda p, e: loss({**p, "b": (p["b"] * -p["spin"] * p["spin"]).real}, e)  # noqa: E731
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with pytest.raises(
            TypeError, match=r"(?s)complex leaf 'spin' of dtype complex64.*two leaves.*trainable="
        ):
            jaxdp.clipped_grad(rotated, clip_norm=0.5, engine=engine)(params, batch_of(5))
        f = jaxdp.clipped_grad(
            rotated, clip_norm=0.5, engine=engine, trainable=lambda path, leaf: path != "spin"
        )
        with pytest.raises(TypeError, match="complex leaf 'spin'"):
            jaxdp.clipped_grad(rotated, clip_norm=0.5).trainable_params(params)
        out = f(params, batch_of(5))
    assert out.grads["spin"] is None
    assert_close(
        {name: out.grads[name] for name in PARAMS}, clipped(engine)(PARAMS, batch_of(5)).grads
    )


def tied_embedding(table: Any, tokens: Any) -> Any:
    rows = table[tokens]
    logits = jnp.tanh(rows + rows[::-1]) @ table.T
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(tokens)), tokens])


def tied_layers(table: Any, tokens: Any) -> Any:
    h = table[jnp.sort(tokens)[:3]]
    for _ in range(3):
        h = jnp.tanh(h @ table[:4])
    return jnp.sum(h**2)


def tied_transpose(table: Any, tokens: Any) -> Any:
    x = jax.nn.one_hot(tokens, 4, dtype=table.dtype) * 2 - 1
    return jnp.sum(jnp.tanh(jnp.tanh(x @ table.T) @ table) ** 2)


TIED = (tied_embedding, tied_layers, tied_transpose)


# Each has one component, which "auto" treats as one of these methods does. float16 is summed as
# bfloat16 is.
TIED_CASES = [
    (tied, jnp.bfloat16, method) for tied in TIED for method in ("vmap", "factors", "keep", "drop")
]
TIED_CASES += [
    (tied_embedding, jnp.float16, method) for method in ("vmap", "factors", "keep", "drop")
]


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "kind", "method"), TIED_CASES)
def test_tied_weights_of_low_precision_contribute_at_most_the_clip_norm(
    tied: Any, kind: Any, method: str, oracle: Any
) -> None:
    """Checks that norms belong to the summed gradients, although XLA keeps digits of bfloat16 in
    some places only."""
    f = jaxdp.clipped_grad(tied, clip_norm=0.01, engine="vmap" if method == "vmap" else "auto")
    with oracle.forced(method), jax.numpy_dtype_promotion("standard"):
        step = jax.jit(f)
        for seed in range(8):
            (table,), rng = draws(seed, (20, 4)), np.random.default_rng(seed)
            tokens = rng.integers(0, 20, (1, 6), np.int32)
            out = step((table / 2).astype(kind), tokens)
            assert np.asarray(out.norms) > 0.01
            assert norm(out.grads) <= 0.01 * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cast", ["parameters", "compute", "computed"])
@pytest.mark.parametrize(
    ("engine", "method"), [*((engine, "auto") for engine in ENGINES), ("auto", "drop")]
)
def test_bfloat16_is_clipped_and_summed_in_float32(
    engine: str, cast: str, method: str, oracle: Any
) -> None:
    """Uses gradients that bfloat16 represents exactly. Then only norms, clipping and sums round."""
    x = draws(3, (300, 8))[0].astype(jnp.bfloat16)
    kind = jnp.float32 if cast == "compute" else jnp.bfloat16
    # a weight computed in bfloat16: its sum must not be rounded like that
    scale = 2 if cast == "computed" else 1
    linear = lambda w, e: jnp.sum(e @ (w.astype(jnp.bfloat16) * scale))  # noqa: E731
    f = jaxdp.clipped_grad(linear, clip_norm=2.0, engine=engine)
    with oracle.forced(method):
        out = f(np.zeros(8, kind), x)
    exact = scale * np.asarray(x, np.float64)
    norms = np.linalg.norm(exact, axis=1)
    assert out.grads.dtype == out.norms.dtype == jnp.float32
    np.testing.assert_allclose(out.norms, norms, rtol=1e-5)
    expected = (exact * np.minimum(1, 2 / norms)[:, None]).sum(0)
    np.testing.assert_allclose(out.grads, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_model_against_its_own_gradients_of_one_example() -> None:
    """Compares with jax.grad, which rounds every gradient to bfloat16 (2^-8), as only the vmap
    engine does."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    batch = tuple(a.astype(jnp.bfloat16) for a in batch_of(64))
    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    grads = jax.tree.map(lambda g: np.asarray(g, np.float64), grads)
    norms = np.sqrt(sum(np.square(g).reshape(64, -1).sum(1) for g in jax.tree.leaves(grads)))
    clip_norm = float(np.median(norms))
    expected = jax.tree.map(
        lambda g: np.einsum("b,b...->...", np.minimum(1, clip_norm / norms), g), grads
    )
    for engine in ENGINES:
        out = clipped(engine, clip_norm)(params, batch)
        assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(out.grads))
        assert out.losses.dtype == jnp.bfloat16
        rounding = 1e-5 if engine == "vmap" else 2.0**-7
        np.testing.assert_allclose(out.norms, norms, rtol=rounding)
        error = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, out.grads, expected)
        assert norm(error) <= rounding * norm(expected)


@pytest.mark.slow
@both_computations
def test_float64(engine: str, reference: Any) -> None:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(np.float64), (PARAMS, batch_of(5)))
        f = jaxdp.clipped_grad(loss, clip_norm=0.5, engine=engine, microbatch_size=2)
        out = f(*wide)
        assert all(
            g.dtype == np.float64 for g in jax.tree.leaves((out.grads, out.norms, out.losses))
        )
        expected = dict(zip(sorted(PARAMS), reference.clipped_sum(0.5), strict=True))
        assert_close(out.grads, expected, rtol=1e-6)
        assert f(wide[0], jax.tree.map(lambda a: a[:0], wide[1])).norms.dtype == np.float64
        # float32 leaves stay float32 beside float64 ones, and alone while x64 is on.
        narrow = clipped(engine)(PARAMS, batch_of(5))
        assert {g.dtype for g in jax.tree.leaves((narrow.grads, narrow.norms))} == {
            np.dtype(np.float32)
        }
        mixed_loss = lambda p, e: loss({**p, "w": p["w"].astype(np.float32)}, e)  # noqa: E731
        mixed = jaxdp.clipped_grad(mixed_loss, clip_norm=0.5, engine=engine)
        out = mixed({**PARAMS, "w": PARAMS["w"].astype(np.float64)}, batch_of(5))
        assert (out.grads["w"].dtype, out.grads["b"].dtype) == (np.float64, np.float32)
        assert_close(out.grads, expected)
