"""Losses, arguments and calls that `clipped_grad` refuses."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jaxdp
from jaxdp.transforms import jaxprs
from tests.transforms.small_net import (
    ENGINES,
    PARAMS,
    batch_of,
    both_computations,
    clipped,
    draws,
    dropout_loss,
    every_engine,
    loss,
    norm,
    shard_mapped,
)

# --- Losses that see other examples ---


@every_engine
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "mix",
    [lambda v: jax.lax.psum(v, "data"), lambda v: v + jax.lax.all_gather(v, "data").sum()],
    ids=["sum", "gather"],
)
def test_a_loss_that_mixes_the_examples_of_shards_is_refused(
    engine: str, check_vma: bool, mix: Any
) -> None:
    f = jaxdp.clipped_grad(lambda p, e: mix(jax.jit(loss)(p, e)), clip_norm=0.1, engine=engine)
    run = shard_mapped(lambda p, b, m: f(p, b, m).norms, outputs=True, check_vma=check_vma)
    with pytest.raises(
        ValueError, match=r"(?s)loss_fn calls \['(psum|all_gather).*jax.lax.psum on the clipped sum"
    ):
        run(PARAMS, batch_of(8), np.ones(8, bool))


@jax.custom_vjp
def mixed_backward(v: Any) -> Any:
    """Sums its gradient over the axis "batch" in the backward pass only."""
    return v


mixed_backward.defvjp(lambda v: (v, None), lambda _, g: (jax.lax.psum(g, "batch"),))

COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda v: jax.lax.psum(v, "batch"),
    "pmean": lambda v: jax.jit(lambda v: jax.lax.pmean(v, "batch"))(v),
    "pmax": lambda v: v * jax.lax.stop_gradient(jax.lax.pmax(v, "batch")),
    "all_gather": lambda v: jax.lax.all_gather(v, "batch").sum(),
    "ppermute": lambda v: jax.lax.ppermute(v, "batch", [(0, 1), (1, 0)]),
    "all_to_all": lambda v: jax.lax.all_to_all(jnp.stack([v, v]), "batch", 0, 0).sum(),
    "axis_index": lambda v: v * jax.lax.axis_index("batch").astype(v.dtype),
    "in a backward pass": mixed_backward,
}


@every_engine
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_along_an_axis_of_a_vmap_is_refused(engine: str, name: str) -> None:
    """Otherwise one example moves the clipped sums of all its neighbours."""
    mix = COLLECTIVES[name]
    f = jaxdp.clipped_grad(lambda w, x: mix(jnp.sum(w * x)), clip_norm=1.0, engine=engine)
    step = lambda x: f(np.ones(2, np.float32), x).grads  # noqa: E731
    with pytest.raises(
        ValueError, match=r"(?s)loss_fn calls \['.*'batch' of an enclosing jax.vmap"
    ):
        jax.vmap(step, axis_name="batch")(np.ones((2, 3, 2), np.float32))


@pytest.mark.slow
@both_computations
def test_axes_that_a_loss_has_for_itself_are_allowed(engine: str) -> None:
    """Axes of a vmap and of a shard_map inside of the loss, within a vmap of another name."""
    mesh = jax.make_mesh((1,), ("parts",), axis_types=(jax.sharding.AxisType.Auto,))
    parts = PartitionSpec("parts")
    summed = lambda x: jax.lax.psum(x.sum(), "parts")  # noqa: E731
    over_parts = jax.shard_map(summed, mesh=mesh, in_specs=parts, out_specs=PartitionSpec())

    def loss(w: Any, x: Any) -> Any:
        centred = jax.vmap(lambda v: v - jax.lax.pmean(v, "heads"), axis_name="heads")(w * x)
        return jnp.sum(jnp.square(centred)) + over_parts(w * x)

    f = jaxdp.clipped_grad(loss, clip_norm=1e3, engine=engine)
    plain = lambda w, x: jnp.sum(jnp.square(w * x - jnp.mean(w * x))) + jnp.sum(w * x)  # noqa: E731
    w, x = np.array([1.0, 2.0], np.float32), np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    found = jax.vmap(lambda x: f(w, x).grads, axis_name="batch")(x)
    total = lambda w, x: jax.vmap(plain, (None, 0))(w, x).sum()  # noqa: E731
    expected = jax.jit(jax.vmap(jax.grad(total), (None, 0)))(w, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@every_engine
def test_a_rule_for_batches_sees_no_other_example(engine: str) -> None:
    """The rule takes the mean of the batch away. The function of one example doubles it."""

    @jax.custom_batching.custom_vmap
    def double(x: Any) -> Any:
        return 2 * x

    @double.def_vmap
    def _(size: int, batched: Any, x: Any) -> tuple[Any, bool]:
        return x - x.mean(0, keepdims=True), True

    f = jaxdp.clipped_grad(lambda w, x: jnp.sum(w * double(x)), clip_norm=100.0, engine=engine)
    x = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    np.testing.assert_allclose(f(np.ones(2, np.float32), x).grads, 2 * x.sum(0), rtol=1e-6)


@every_engine
def test_python_that_takes_a_whole_batch_is_refused(engine: str) -> None:
    def loss(w: Any, x: Any, method: Any) -> Any:
        scale = jax.pure_callback(
            lambda v: v.sum(-1), jax.ShapeDtypeStruct((), np.float32), x, vmap_method=method
        )
        return scale * jnp.sum(w * x)

    def clip(method: str) -> Any:
        return jaxdp.clipped_grad(
            functools.partial(loss, method=method), clip_norm=100.0, engine=engine
        )

    w, x = np.ones(2, np.float32), np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    for method in ("expand_dims", "broadcast_all"):
        with pytest.raises(
            ValueError,
            match=r"loss_fn calls pure_callback with vmap_method=.*Use vmap_method='sequ",
        ):
            clip(method)(w, x)
    np.testing.assert_allclose(
        clip("sequential")(w, x).grads, (x.sum(1)[:, None] * x).sum(0), rtol=1e-6
    )


# --- What is refused ---


@functools.cache
def linen_batch_norm(train: bool) -> tuple[Callable[..., Any], Any]:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))

    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), np.ones((1, 4), np.float32))

    def loss(p: Any, x: Any) -> Any:
        given = {**variables, "params": p}
        out = (
            model.apply(given, x[None], mutable=["batch_stats"])[0]
            if train
            else model.apply(given, x[None])
        )
        return jnp.sum(jnp.square(out))

    return loss, variables["params"]


@functools.cache
def nnx_batch_norm(train: bool) -> tuple[Callable[..., Any], Any]:
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    model.set_attributes(use_running_average=not train)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda p, x: jnp.sum(jnp.square(nnx.merge(graph, p, rest, copy=True)(x[None]))), params


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("build", [linen_batch_norm, nnx_batch_norm])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_batch_norm_in_batch_mode_is_refused_and_frozen_allowed(
    engine: str, build: Any, wrap: Any
) -> None:
    (x,) = draws(2, (5, 4))
    loss, params = build(True)
    f = jaxdp.clipped_grad(wrap(loss), clip_norm=1.0, engine=engine)
    with jax.numpy_rank_promotion("allow"):
        with pytest.raises(
            ValueError,
            match=r"(?s)BatchNorm in batch mode.*whole batch.*GroupNorm.*use_running_average=True",
        ):
            f(params, x)
        loss, params = build(False)
        assert (
            norm(jaxdp.clipped_grad(wrap(loss), clip_norm=1.0, engine=engine)(params, x).grads) > 0
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": -1.0}, "clip_norm must be at least 0, got -1.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be at least 0, got nan"),
        ({"clip_norm": np.ones(5)}, r"clip_norm must be one number.*\(5,\)"),
        ({"clip_norm": 1.0, "engine": "ghost"}, "engine must be .* got 'ghost'"),
        ({"clip_norm": 1.0, "clip_rule": "flat"}, "clip_rule must be .* got 'flat'"),
        (
            {"clip_norm": 1.0, "microbatch_size": 0},
            "microbatch_size must be an integer of at least 1 or None, got 0",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxdp.clipped_grad(loss, **options)


def test_a_clip_norm_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"clip_norm must be a number.*NoneType None"):
        jaxdp.clipped_grad(loss, clip_norm=None)


def test_a_clipped_sum_is_no_array_and_shows_no_private_value() -> None:
    f = jaxdp.clipped_grad(lambda p, x: (p * x).sum(), clip_norm=1.0)
    out = f(np.ones(3, np.float32), np.full((2, 3), 77.0, np.float32))
    remedy = r"has no noise. Give its sum of gradients, `grads`, to the update of jaxdp.privatize"
    for call in (jnp.sum, np.asarray):
        with pytest.raises(TypeError, match=f"must be an array, got a ClippedSum.*{remedy}"):
            call(out)
    assert "77" not in repr(out)
    private = jaxdp.privatize(f, noise_multiplier=1.0, divisor=2.0)
    with pytest.raises(TypeError, match=r"updates must be the sum of gradients, got ClippedSum"):
        private.update(out, private.init(np.ones(3)))


def test_a_loss_of_another_signature_is_refused() -> None:
    x, y = batch_of(3)
    with pytest.raises(TypeError, match=r"(?s)mask must be boolean, got float32.*batch=\(x, y\)"):
        jaxdp.clipped_grad(lambda p, x, y: loss(p, (x, y)), clip_norm=1.0)(PARAMS, x, y)
    for engine in ENGINES:
        with pytest.raises(
            TypeError,
            match=r"(?s)must take \(params, example\).*\(p, x, y\).*loss_fn\(params, \(x, y\)\)",
        ):
            jaxdp.clipped_grad(lambda p, x, y: loss(p, (x, y)), clip_norm=1.0, engine=engine)(
                PARAMS, (x, y)
            )
        with pytest.raises(
            TypeError, match=r"(?s)must take \(params, example\).*'key'.*Pass key= in every call"
        ):
            jaxdp.clipped_grad(dropout_loss, clip_norm=1.0, engine=engine, has_aux=True)(
                PARAMS, (x, y)
            )
        with pytest.raises(TypeError, match=r"must take \(params, example, \*, key\)"):
            jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)(
                PARAMS, (x, y), key=jax.random.key(0)
            )


def test_parameters_that_are_python_numbers_are_named() -> None:
    f = jaxdp.clipped_grad(lambda p, x: p["w"] * jnp.sum(x), clip_norm=1.0)
    with pytest.raises(ValueError, match=r"(?s)no trainable leaf.*\{'w': 'float'\}.*jnp.asarray"):
        f({"w": 1.0}, np.ones((3, 2), np.float32))


@pytest.mark.parametrize("engine", ["auto", "bookkeeping"])
def test_mutable_arrays_are_refused(engine: str) -> None:
    def with_reference(p: Any, example: Any) -> Any:
        kept = jax.new_ref(jnp.zeros((4, 6)))
        kept[...] = p["w"]
        return loss({**p, "w": kept[...]}, example)

    with pytest.raises(NotImplementedError, match=r"(?s)mutable array.*engine='vmap'"):
        jaxdp.clipped_grad(with_reference, clip_norm=1.0, engine=engine)(PARAMS, batch_of(3))


def test_a_clip_norm_is_required() -> None:
    with pytest.raises(TypeError, match="clip_norm"):
        jaxdp.clipped_grad(loss)


@every_engine
def test_bad_calls(engine: str) -> None:
    f, (x, y) = clipped(engine), batch_of(5)
    with pytest.raises(
        ValueError, match=r"leading axis \[B\] of the same size.*\(5, 3, 4\).*\(4, 3, 3\)"
    ):
        f(PARAMS, (x, y[:4]))
    with pytest.raises(ValueError, match=r"leading axis \[B\]"):
        f(PARAMS, (x, np.float32(1)))
    with pytest.raises(ValueError, match=r"leading axis \[B\]"):
        f(PARAMS, ())
    with pytest.raises(ValueError, match=r"two leading axes \[B, G\]"):
        clipped(engine, 0.3, group=True)(PARAMS, (x, y[:, :2]))
    with pytest.raises(TypeError, match=r"mask must be boolean, got float32.*astype\(bool\)"):
        f(PARAMS, (x, y), np.ones(5, np.float32))
    with pytest.raises(ValueError, match=r"mask must have shape \(5,\), got \(4,\)"):
        f(PARAMS, (x, y), np.ones(4, bool))
    with pytest.raises(ValueError, match=r"mask must have shape \(5,\), got \(5, 3\)"):
        f(PARAMS, (x, y), np.ones((5, 3), bool))
    with pytest.raises(TypeError, match=r"typed key such as jax.random.key"):
        f(PARAMS, (x, y), key=jax.random.PRNGKey(0))
    with pytest.raises(TypeError, match=r"typed key such as jax.random.key"):
        f(PARAMS, (x, y), key=0)
    with pytest.raises(TypeError, match="positional"):
        f(PARAMS, (x, y), None, jax.random.key(0))
    with pytest.raises(ValueError, match=r"no trainable leaf of floating dtype.*order"):
        f({"order": np.arange(3)}, (x, y))


@every_engine
@pytest.mark.parametrize(
    "bad",
    [
        lambda p, e: (e[0] @ p["w"]).sum(0),
        lambda p, e: (loss(p, e), None),
        lambda p, e: jnp.argmax(e[0] @ p["w"]),
    ],
    ids=["vector", "tuple", "integer"],
)
def test_loss_that_is_no_scalar(engine: str, bad: Any) -> None:
    with pytest.raises(ValueError, match="floating scalar for ONE example"):
        jaxdp.clipped_grad(bad, clip_norm=1.0, engine=engine)(PARAMS, batch_of(5))


@pytest.mark.slow
def test_loss_with_has_aux_returns_a_pair() -> None:
    with pytest.raises(ValueError, match="floating scalar and aux"):
        jaxdp.clipped_grad(lambda p, e: loss(p, e), clip_norm=1.0, has_aux=True)(
            PARAMS, batch_of(5)
        )


@pytest.mark.slow
def test_the_program_grows_in_proportion_to_the_depth() -> None:
    """Checks that what one layer computes of its weight is not computed for each of the others
    too."""

    def equations(depth: int) -> int:
        def deep(weights: Any, x: Any) -> Any:
            return functools.reduce(lambda h, w: jnp.tanh(h @ jnp.tanh(w)), weights, x).sum()

        shapes = (
            [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * depth,
            jax.ShapeDtypeStruct((3, 4), jnp.float32),
        )
        program = jax.make_jaxpr(jaxdp.clipped_grad(deep, clip_norm=1.0))(*shapes)
        return sum(1 for _ in jaxprs.every_equation(program.jaxpr))

    few, more, many = map(equations, (2, 4, 6))
    assert many - more == more - few
