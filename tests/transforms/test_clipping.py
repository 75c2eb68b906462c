"""What `clipped_grad` promises besides the gradient of a model: its arguments, its edge cases and
its guarantee."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxdp
from jaxdp.transforms import clipping, jaxprs, opaque, rounding, walker

ENGINES = ("vmap", "bookkeeping", "auto")
every_engine = pytest.mark.parametrize("engine", ENGINES)
# "bookkeeping" computes the clipped sum of `loss` exactly as "auto" does, which the next test
# checks.
both_computations = pytest.mark.parametrize("engine", ["vmap", "auto"])


def draws(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [
        np.random.default_rng([seed, i]).normal(size=s).astype(np.float32)
        for i, s in enumerate(shapes)
    ]


PARAMS = dict(zip(("w", "b", "v"), draws(0, (4, 6), (1, 6), (6, 3)), strict=True))


def loss(p: Any, example: Any) -> Any:
    """Evaluates a small net on a sequence of three rows."""
    x, y = example
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y))


def batch_of(size: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x, y = draws(seed, (size, 3, 4), (size, 3, 3))
    return x, y


@functools.cache
def clipped(engine: str, clip_norm: float = 0.5, **options: Any) -> Any:
    """Returns one function per set of options, so that tests share its compilation."""
    return jaxdp.clipped_grad(loss, clip_norm=clip_norm, engine=engine, **options)


@pytest.fixture(scope="module")
def reference(oracle: Any) -> Any:
    """Returns the reference of `batch_of(5)`."""
    return oracle.micro_batches_of_one(loss, PARAMS, batch_of(5))


def norm(tree: Any) -> float:
    return float(
        np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(tree)))
    )


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a: Any, b: Any, rtol: float = 1e-5) -> None:
    atol = rtol / 10 * max((float(np.abs(x).max(initial=0)) for x in jax.tree.leaves(b)), default=0)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


# --- Clipping ---


@pytest.mark.slow
def test_bookkeeping_treats_the_small_net_as_auto_does(oracle: Any) -> None:
    for size in (1, 5, 64):
        made = []
        for engine in ("bookkeeping", "auto"):
            with oracle.forced("auto") as components:
                f = jaxdp.clipped_grad(loss, clip_norm=0.5, engine=engine)
                program = jax.make_jaxpr(lambda p, b, f=f: f(p, b).grads)(PARAMS, batch_of(size))
            made.append(str(program))
            assert len(components) == 3
        assert made[0] == made[1]


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("clip_norm", [0.0, 0.01, 0.5, 100.0, float("inf")])
def test_clip_norm(engine: str, clip_norm: float, reference: Any, oracle: Any) -> None:
    out = clipped(engine, clip_norm)(PARAMS, batch_of(5))
    oracle.assert_same_sum(PARAMS, out.grads, reference.clipped_sum(clip_norm))
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)
    np.testing.assert_allclose(out.losses, reference.losses, rtol=1e-5)
    assert out.aux is None
    assert (out.nonfinite.dtype, int(out.nonfinite)) == (jnp.int32, 0)
    if clip_norm == 0:
        assert norm(out.grads) == 0


@pytest.mark.slow
@both_computations
def test_traced_clip_norm(engine: str, reference: Any, oracle: Any) -> None:
    chex.clear_trace_counter()
    f = lambda c: jaxdp.clipped_grad(loss, clip_norm=c, engine=engine)(PARAMS, batch_of(5)).grads  # noqa: E731
    step = jax.jit(chex.assert_max_traces(f, n=1))
    for clip_norm in (0.01, 0.5, float("inf")):
        oracle.assert_same_sum(PARAMS, step(clip_norm), reference.clipped_sum(clip_norm))
    for nothing in (0.0, -1.0, float("nan"), float("-inf"), 1e-13):
        assert norm(step(nothing)) == 0


@pytest.mark.slow
@both_computations
def test_automatic_clip_rule_makes_examples_count_alike(
    engine: str, reference: Any, oracle: Any
) -> None:
    out = clipped(engine, 2.0, clip_rule="automatic")(PARAMS, batch_of(5))
    factors = 2.0 / (reference.norms + 0.01)
    oracle.assert_same_sum(
        PARAMS, out.grads, [np.einsum("b,b...->...", factors, g) for g in reference.grads]
    )
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Smooth:
    """Written outside of the package: C ||g|| / (||g|| + gamma) as norm, with a bound that is not
    C."""

    gamma: float = 0.3
    share: float = 0.5

    def factor(self, norms: Any, clip_norm: Any) -> Any:
        return self.share * clip_norm / (norms + self.gamma)

    def bound(self, clip_norm: Any) -> Any:
        return self.share * clip_norm


class Broken(Smooth):
    """Its factors are twice of what its bound allows."""

    def bound(self, clip_norm: Any) -> Any:
        return super().bound(clip_norm) / 2


class Wild(Smooth):
    """Its factors are negative, infinite or NaN."""

    def factor(self, norms: Any, clip_norm: Any) -> Any:
        return jnp.where(
            norms > 3, -clip_norm, clip_norm * 0 / jnp.where(norms > 1, 0, 1) + 1 / (0 * norms)
        )


class Unhashable(Smooth):
    __hash__ = None  # type: ignore[assignment]


class Scalar(Smooth):
    """One factor for all examples."""

    def factor(self, norms: Any, clip_norm: Any) -> Any:
        return clip_norm


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_clip_rule_from_outside(
    engine: str, chunk: int | None, reference: Any, oracle: Any
) -> None:
    f = clipped(engine, 2.0, clip_rule=Smooth(), microbatch_size=chunk)
    out = f(PARAMS, batch_of(5))
    factors = 1.0 / (reference.norms + 0.3)
    oracle.assert_same_sum(
        PARAMS, out.grads, [np.einsum("b,b...->...", factors, g) for g in reference.grads]
    )
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)
    assert (f.sensitivity(), f.sensitivity("replace_one")) == (1.0, 2.0)
    assert jaxdp.privatize(f, noise_multiplier=1.0, divisor=1.0).clip_norm == 1.0


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_a_clip_rule_from_outside_sees_no_bad_example(engine: str, poison: float) -> None:
    x, y = batch_of(5)
    bad = np.array([False, True, False, False, True])
    x[1, 2, 0], y[4] = np.nan, poison
    for clip_norm in (2.0, 0.0, float("inf")):
        f = clipped(engine, clip_norm, clip_rule=Smooth())
        out = f(PARAMS, (x, y))
        assert out.nonfinite == 2
        if clip_norm < np.inf:
            assert_close(out.grads, f(PARAMS, batch_of(5), ~bad).grads, rtol=1e-6)
            assert norm(out.grads) <= 3 * f.sensitivity()
    for nothing in (0.0, -1.0, float("nan"), 1e-13):
        assert norm(smoothly_clipped(engine, nothing, (x, y)).grads) == 0


@functools.partial(jax.jit, static_argnums=0)
def smoothly_clipped(engine: Any, clip_norm: Any, batch: Any) -> Any:
    return jaxdp.clipped_grad(loss, clip_norm=clip_norm, engine=engine, clip_rule=Smooth())(
        PARAMS, batch
    )


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("rule", [Broken(), Wild(), Smooth(gamma=0.0)])
def test_no_clip_rule_exceeds_its_bound(engine: str, rule: Any) -> None:
    """Shows that a mistake in a rule costs accuracy and not privacy."""
    scaled = lambda p, e: e[2] * loss(p, e[:2])  # noqa: E731
    f = jaxdp.clipped_grad(scaled, clip_norm=2.0, engine=engine, clip_rule=rule)
    for i in range(5):
        out = f(PARAMS, (*batch_of(5), np.ones(5, np.float32)), np.arange(5) == i)
        assert norm(out.grads) <= f.sensitivity() * (1 + 1e-5)
    zero = f(PARAMS, (*batch_of(5), np.zeros(5, np.float32)), np.ones(5, bool))
    assert norm(zero.grads) <= 1e-3


@pytest.mark.slow
def test_clip_rules_are_checked() -> None:
    for rule in (*clipping.CLIP_RULES, Smooth(), Smooth(gamma=1e-6), *clipping.CLIP_RULES.values()):
        clipping.check_clip_rule(rule)
    with pytest.raises(
        ValueError,
        match=r"Broken\(gamma=0.3.*gradient of norm .* bound at clip_norm=.*bound / norm",
    ):
        clipping.check_clip_rule(Broken())
    with pytest.raises(ValueError, match="A factor must lie between 0"):
        clipping.check_clip_rule(Wild())
    for check in (
        clipping.check_clip_rule,
        lambda rule: clipped("auto", clip_rule=rule)(PARAMS, batch_of(5)),
    ):
        with pytest.raises(AssertionError, match="one factor per norm"):
            check(Scalar())


@pytest.mark.slow
def test_a_clip_rule_of_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(clipping.CLIP_RULES, "smooth", Smooth())
    named = jaxdp.clipped_grad(loss, clip_norm=2.0, clip_rule="smooth")
    assert_equal(
        named(PARAMS, batch_of(5)).grads,
        clipped("auto", 2.0, clip_rule=Smooth())(PARAMS, batch_of(5)).grads,
    )


@pytest.mark.parametrize("rule", [None, 0.5, Smooth, Unhashable(), object(), lambda norms: norms])
def test_what_is_no_clip_rule_is_refused(rule: Any) -> None:
    message = r"clip_rule must be one of \['automatic', 'global'\], or .*factor\(norms, clip_norm\).* of type"
    with pytest.raises(TypeError, match=message):
        jaxdp.clipped_grad(loss, clip_norm=1.0, clip_rule=rule)


def test_sensitivity() -> None:
    f = clipped("auto", 0.5)
    assert (f.sensitivity(), f.sensitivity("add_remove"), f.sensitivity("zero_out")) == (
        0.5,
        0.5,
        0.5,
    )
    assert f.sensitivity("replace_one") == 1.0
    with pytest.raises(ValueError, match="adjacency must be one of"):
        f.sensitivity("substitute")


@pytest.mark.slow
@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("method", ["vmap", "factors", "keep", "drop"])
def test_one_example_moves_the_sum_by_at_most_clip_norm(
    method: str, data: Any, oracle: Any
) -> None:
    """Draws gradients sum_t u_t w_t^T of any scale, whose terms may cancel, in mixed batches."""
    size, length = 3, 6
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    u, w = rng.normal(size=(size, length, 5)), rng.normal(size=(size, length, 4))
    for i in range(size):
        cancel = data.draw(st.sampled_from([1.0, 1.0, 1e-2, 1e-4, 0.0]))
        u[i] = np.repeat(u[i, ::2], 2, axis=0) if cancel < 1 else u[i]
        w[i] = (
            np.repeat(w[i, ::2], 2, axis=0) * np.resize([1, -1], (length, 1)) + cancel * w[i]
            if cancel < 1
            else w[i]
        )
        u[i] *= 10.0 ** data.draw(st.integers(-20, 15))
        w[i] *= 10.0 ** data.draw(st.integers(-20, 15))
    batch = u.astype(np.float32), w.astype(np.float32)
    f = product_loss_function(method)
    weight = np.zeros((5, 4), np.float32)
    with oracle.forced(method):
        whole = np.asarray(f(weight, batch, np.ones(size, bool)).grads, np.float64)
        for i in range(size):
            others = np.asarray(f(weight, batch, np.arange(size) != i).grads, np.float64)
            assert np.linalg.norm(whole - others) <= (1 + rounding.SLACK) * (1 + 1e-5)
            alone = np.asarray(f(weight, batch, np.arange(size) == i).grads, np.float64)
            assert np.linalg.norm(alone) <= (1 + rounding.SLACK) * (1 + 1e-5)


@functools.cache
def product_loss_function(method: str) -> Any:
    """Returns a loss whose gradient is u^T w for every weight."""
    engine = "vmap" if method == "vmap" else "auto"
    return jaxdp.clipped_grad(lambda p, e: jnp.sum((e[0] @ p) * e[1]), clip_norm=1.0, engine=engine)


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("rows", [1, 7])
def test_a_tiny_input_cannot_hide_a_huge_error(engine: str, rows: int) -> None:
    """Uses an |x|^2 that underflows and a gradient -2 y x of 4 times the bound."""
    f = jaxdp.clipped_grad(
        lambda w, e: jnp.sum(jnp.square(e[0] @ w - e[1])), clip_norm=1.0, engine=engine
    )
    x = np.full((1, rows, 3072), 1e-20, np.float32)
    out = f(np.zeros(3072, np.float32), (x, np.full((1, rows), 4e18 / rows, np.float32)))
    assert norm(out.grads) <= 1 + 1e-5
    assert out.norms[0] >= 4 or out.nonfinite == 1


@pytest.mark.slow
@both_computations
def test_gradients_of_norm_zero(engine: str) -> None:
    x, y = batch_of(5)
    f = jaxdp.clipped_grad(lambda p, e: 0 * loss(p, e), clip_norm=1.0, engine=engine)
    out = f(PARAMS, (x, y))
    assert norm(out.grads) == 0
    np.testing.assert_allclose(out.norms, 0, atol=1e-15)
    assert out.nonfinite == 0


# --- Masks and bad examples ---


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("padding", [0.0, np.nan, np.inf, 1e38])
def test_masked_examples_contribute_nothing_whatever_they_hold(
    engine: str, padding: float, reference: Any, oracle: Any
) -> None:
    x, y = batch_of(5)
    mask = np.array([True, False, True, True, False])
    x[~mask], y[~mask] = padding, padding
    out = clipped(engine)(PARAMS, (x, y), mask)
    oracle.assert_same_sum(PARAMS, out.grads, reference.clipped_sum(0.5, mask))
    np.testing.assert_allclose(out.norms, reference.norms * mask, rtol=1e-5)
    np.testing.assert_allclose(out.losses, reference.losses * mask, rtol=1e-5)
    assert out.nonfinite == 0


@every_engine
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_examples_without_a_finite_gradient_are_left_out_and_counted(
    engine: str, poison: float
) -> None:
    x, y = batch_of(5)
    bad = np.array([False, True, False, False, True])
    poisoned = x.copy(), y.copy()
    poisoned[0][1, 2, 0], poisoned[1][4] = np.nan, poison
    out = clipped(engine)(PARAMS, poisoned)
    without = clipped(engine)(PARAMS, (x, y), ~bad)
    assert_close(out.grads, without.grads, rtol=1e-6)
    assert out.nonfinite == 2
    assert not np.isfinite(np.asarray(out.norms)[bad]).any()
    np.testing.assert_array_equal(np.asarray(out.norms)[~bad], np.asarray(without.norms)[~bad])


@pytest.mark.slow
@every_engine
def test_a_clipped_sum_has_derivatives(engine: str) -> None:
    """Compares with the derivative of the definition, in both modes, where one row is masked."""
    batch, mask = batch_of(5), np.arange(5) != 2
    direction = jax.tree.map(jnp.cos, PARAMS)

    def defined(p: Any) -> Any:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(p, batch)
        squares = sum(jnp.square(g).sum((1, 2)) for g in jax.tree.leaves(grads))
        factors = jnp.where(mask, jnp.minimum(1, 0.5 / jnp.sqrt(squares)), 0)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)

    def computed(p: Any) -> Any:
        return clipped(engine)(p, batch, mask).grads

    def derivatives(f: Any) -> Any:
        backward = jax.grad(lambda p: sum(jnp.square(g).sum() for g in jax.tree.leaves(f(p))))(
            PARAMS
        )
        return backward, jax.jvp(f, (PARAMS,), (direction,))[1]

    found, expected = (jax.jit(lambda f=f: derivatives(f))() for f in (computed, defined))
    assert_close(found, expected, rtol=1e-4)


@pytest.mark.slow
@every_engine
def test_derivatives_are_those_of_the_examples_that_contribute(engine: str) -> None:
    """A NaN row, and a row of gradient zero. Without any example that contributes, the derivative
    is zero."""
    x, y = batch_of(5)
    poisoned = x.copy()
    poisoned[1] = np.nan
    mask = np.arange(5) != 1

    def gradients(batch: Any, mask: Any) -> Any:
        def total(p: Any, y: Any) -> Any:
            grads = clipped(engine)(p, (batch, y), mask).grads
            return sum(jnp.square(g).sum() for g in jax.tree.leaves(grads))

        return jax.grad(total, argnums=(0, 1))(PARAMS, y)

    run = jax.jit(gradients)
    expected = run(x, mask)
    assert norm(expected) > 0
    assert_close(run(poisoned, np.ones(5, bool)), expected, rtol=1e-6)
    assert norm(run(np.full_like(x, np.nan), np.ones(5, bool))) == 0
    f = jaxdp.clipped_grad(lambda w, e: jnp.maximum(0, 1 - e @ w), clip_norm=0.5, engine=engine)
    rows = np.array([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]], np.float32)  # the last loss is zero
    slope = jax.grad(lambda w: jnp.square(f(w, rows).grads).sum())(jnp.array([0.1, 0.3]))
    assert np.isfinite(slope).all()


@every_engine
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_counts_although_its_gradient_is(
    engine: str, value: float
) -> None:
    loss = lambda w, e: jnp.sum(w * e[0]) + e[1]  # noqa: E731
    f = jaxdp.clipped_grad(loss, clip_norm=10.0, engine=engine)
    rows = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    batch = rows, np.array([0.0, value], np.float32)
    out = f(np.zeros(2, np.float32), batch)
    np.testing.assert_allclose(out.grads, rows[0], rtol=1e-6)
    assert out.nonfinite == 1
    formed = f.per_example(np.zeros(2, np.float32), batch)
    np.testing.assert_allclose(formed.grads, rows * [[1], [0]], rtol=1e-6)
    assert formed.nonfinite == 1


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("name", ["next_token", "softmax_cross_entropy", "hinge"])
def test_a_label_that_does_not_exist_contributes_zero(engine: str, name: str) -> None:
    """A lookup outside of the vocabulary has a gradient of zero, so the loss of such a text has a
    finite gradient."""
    tokens = name == "next_token"
    function = getattr(jaxdp.losses, name)
    good, bad = ([1, 2], [1, 4]) if tokens else (1, 4)

    def loss(p: Any, e: Any) -> Any:
        logits = e[0] @ p
        return function(logits if tokens else logits[0], e[1])

    x, p = np.ones((2, 2, 3), np.float32), np.eye(3, 4, dtype=np.float32)
    f = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)
    out = f(p, (x, np.array([good, bad], np.int8)))
    assert out.nonfinite == 1
    assert_close(out.grads, f(p, (x[:1], np.array([good], np.int8))).grads, rtol=1e-6)


def no_positions(p: Any, e: Any) -> Any:
    return jnp.sum(e[0] @ p["w"]) + jnp.sum(e[1] @ p["w"]) + jnp.sum(e[0] @ p["b"])


def small_image(p: Any, e: Any) -> Any:
    return jnp.sum(jax.lax.conv(e[None], p["k"], (1, 1), "VALID")) + jnp.sum(p["k"] * jnp.sum(e))


def no_turns(p: Any, e: Any) -> Any:
    return jax.lax.scan(lambda total, x: (total + jnp.sum(x @ p["w"]), None), 0.0, e)[0]


EMPTY = {
    "dot": (no_positions, {"w": (3, 2), "b": (3, 0)}, [(0, 3), (2, 3)]),
    "convolution": (small_image, {"k": (4, 2, 3, 3)}, (2, 2, 2)),
    "scan": (no_turns, {"w": (3, 2)}, (0, 2, 3)),
    "rows": (lambda p, e: jnp.sum(e @ p["w"]), {"w": (0, 2)}, (2, 0)),
}


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("case", EMPTY)
def test_layers_without_positions(engine: str, case: str) -> None:
    loss, shapes, example = EMPTY[case]
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(lambda shape: np.ones(shape, np.float32), shapes, is_leaf=is_shape)
    batch = jax.tree.map(lambda shape: np.ones((2, *shape), np.float32), example, is_leaf=is_shape)
    f = jaxdp.clipped_grad(loss, clip_norm=100.0, engine=engine)
    expected = jax.tree.map(lambda g: g.sum(0), jax.vmap(jax.grad(loss), (None, 0))(params, batch))
    assert_close(f(params, batch).grads, expected, rtol=1e-6)
    assert [leaf.path for leaf in f.plan(params, batch)] == sorted(shapes, key=str)


def test_a_convolutional_net_takes_the_memory_of_a_plain_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA would pad records and take memory for gradients of all layers at once, if it knew their
    zeros early."""

    def loss(kernels: list[Any], x: Any) -> Any:
        x = x[None]
        for kernel in kernels:
            x = jnp.tanh(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        return jnp.square(x).sum()

    kernels, batch = (
        [np.ones((16, 16, 3, 3), np.float32)] * 6,
        np.ones((32, 16, 16, 16), np.float32),
    )

    def memory(gradient: Any) -> int:
        return int(
            jax.jit(gradient).lower(kernels, batch).compile().memory_analysis().temp_size_in_bytes
        )

    def clipped() -> int:
        f = jaxdp.clipped_grad(loss, clip_norm=1.0)
        return memory(lambda kernels, batch: f(kernels, batch).grads)

    plain = memory(
        jax.grad(lambda kernels, batch: jax.vmap(functools.partial(loss, kernels))(batch).sum())
    )
    assert clipped() < 1.3 * plain
    monkeypatch.setattr(opaque, "zero", lambda _: jnp.uint32(0))
    assert clipped() > 1.5 * plain


@every_engine
def test_masked_and_non_finite_is_not_counted(engine: str) -> None:
    x, y = batch_of(5)
    x[2], y[3] = np.nan, np.nan
    out = clipped(engine)(PARAMS, (x, y), np.arange(5) != 2)
    assert out.nonfinite == 1


@every_engine
def test_no_examples(engine: str) -> None:
    for chunk in (None, 2):
        f = clipped(engine, has_aux=False, microbatch_size=chunk)
        out = f(PARAMS, batch_of(0))
        assert norm(out.grads) == 0
        assert jax.tree.map(jnp.shape, out.grads) == jax.tree.map(jnp.shape, PARAMS)
        assert out.norms.shape == out.losses.shape == (0,)
        assert (out.norms.dtype, out.losses.dtype, int(out.nonfinite)) == (
            jnp.float32,
            jnp.float32,
            0,
        )
    nothing = clipped(engine)(PARAMS, batch_of(5), np.zeros(5, bool))
    assert norm(nothing.grads) == 0
    assert not np.any(nothing.norms)
    assert not np.any(nothing.losses)


@pytest.mark.slow
@both_computations
def test_one_example(engine: str, reference: Any, oracle: Any) -> None:
    x, y = batch_of(5)
    out = clipped(engine)(PARAMS, (x[3:4], y[3:4]))
    oracle.assert_same_sum(PARAMS, out.grads, reference.clipped_sum(0.5, np.arange(5) == 3))


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


def dropout_loss(p: Any, example: Any, *, key: Any) -> Any:
    x, y = example
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return loss(p, (jnp.where(keep, 2 * x, 0), y)), {"kept": keep, "bits": jax.random.bits(key)}


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


# --- Which leaves, which dtypes ---


@pytest.mark.slow
@every_engine
def test_trainable_leaves_by_path(engine: str, oracle: Any) -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2, name="head")(nn.tanh(nn.Dense(5, name="body")(x)))

    model, (x,) = Model(), draws(2, (5, 4))
    params = model.init(jax.random.key(0), x)["params"]
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
    assert [g.shape for g in jax.tree.leaves(grads)] == [
        (3, 2),
        (3,),
    ]  # the dropout rate is a setting, no parameter


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
        step = jax.jit(lambda p, t: (f(p, t).grads, f(p, t).norms))
        for seed in range(8):
            (table,), rng = draws(seed, (20, 4)), np.random.default_rng(seed)
            grads, norms = step(jnp.asarray(table / 2, kind), rng.integers(0, 20, (1, 6), np.int32))
            assert norms[0] > 0.01
            assert norm(grads) <= 0.01 * (1 + 1e-5)


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("cast", ["parameters", "compute", "computed"])
@pytest.mark.parametrize("method", ["auto", "drop"])
def test_bfloat16_is_clipped_and_summed_in_float32(
    engine: str, cast: str, method: str, oracle: Any
) -> None:
    """Uses gradients that bfloat16 represents exactly. Then only norms, clipping and sums round."""
    x = draws(3, (300, 8))[0].astype(jnp.bfloat16)
    kind = jnp.float32 if cast == "compute" else jnp.bfloat16
    scale = (
        2 if cast == "computed" else 1
    )  # a weight computed in bfloat16: its sum must not be rounded like that
    linear = lambda w, e: jnp.sum(e @ (w.astype(jnp.bfloat16) * scale))  # noqa: E731
    f = jaxdp.clipped_grad(linear, clip_norm=2.0, engine=engine)
    with oracle.forced(method):
        out = f(jnp.zeros(8, kind), x)
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
    step = jax.jit(
        lambda p, b, m, c: jaxdp.clipped_grad(counted, clip_norm=c, engine=engine)(p, b, m).grads
    )
    step(PARAMS, batch_of(5), mask, 0.5)
    count = len(traces)
    step(PARAMS, batch_of(5, seed=9), ~mask, 0.7)
    assert len(traces) == count


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


def shard_mapped(
    step: Callable[..., Any], *, outputs: Any, check_vma: bool = True, shape: tuple[int, ...] = (8,)
) -> Any:
    """Compiles `step(params, batch, mask)` of one shard's examples for the eight devices."""
    if len(jax.devices()) < 8:
        pytest.skip("fewer than eight devices")
    names = ("data", "more")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    rows = PartitionSpec(names)
    outputs = jax.tree.map(lambda over: rows if over else PartitionSpec(), outputs)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows),
        out_specs=outputs,
        check_vma=check_vma,
    )
    return jax.jit(mapped, compiler_options={"xla_llvm_disable_expensive_passes": True})


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
                jax.tree.map(lambda a, b: np.asarray(a) - b, total, other[method])
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
        total, jax.tree.map(lambda *gs: sum(gs[1:], gs[0]), *(s.grads for s in singles)), rtol=1e-4
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
    expected = jax.vmap(jax.grad(lambda w, x: jax.vmap(plain, (None, 0))(w, x).sum()), (None, 0))(
        w, x
    )
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
            "microbatch_size must be at least 1 or None, got 0",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxdp.clipped_grad(loss, **options)


def test_a_clip_norm_per_layer_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"(?s)clip_norm must be one number.*dict \{'w': 1.0\}.*once per part"
    ):
        jaxdp.clipped_grad(loss, clip_norm={"w": 1.0})
    with pytest.raises(TypeError, match=r"clip_norm must be one number.*NoneType None"):
        jaxdp.clipped_grad(loss, clip_norm=None)


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
