"""The rules of where weights meet data, one by one, against NumPy float64 and JAX's own
derivatives."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdp.transforms import convolutions as convolution_rule
from jaxdp.transforms import forms, rounding, sites

N = 3
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Each example is a program of its own. JAXDP_SLOW=1 draws a hundred. Otherwise a test has fifteen,
# with those that it names.
EXAMPLES = 100 if os.environ.get("JAXDP_SLOW") else 15
QUICK = hypothesis.settings(
    max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck)
)
squared_norms = jax.jit(sites.squared_norms)  # one program for all values of one shape


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def site_of(
    rule: Any,
    tap_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    loops: Any = (),
    sliced: Any = (),
) -> Any:
    assert rule.weight_shape == weight_shape
    tap = jax.ShapeDtypeStruct((*loops, *tap_shape), jnp.float32)
    return sites.Site(rule, frozenset({0}), None, tuple(loops), tuple(sliced), tap)


def check_rule(site: Any, record: Any, g: Any, truth: np.ndarray) -> None:
    """Compares every result of a rule about dV with the true dV of each example [B, ...]."""

    def contracted_alone(record: Any, g: Any) -> jax.Array:
        return site.contract(record, g, jnp.ones(len(g)))

    def everything(record: Any, g: Any) -> dict[str, Any]:
        # dV is formed in other ways on accelerators. All ways must be right.
        with forms.traced_for("rocm"):
            one_by_one = jax.vmap(
                lambda *pair: contracted_alone(*jax.tree.map(lambda x: x[None], pair))
            )(record, g)
            elsewhere = site.per_example(record, g)
        with forms.traced_for("cuda"), jax.default_matmul_precision("highest"):
            on_a_gpu = site.per_example(record, g)
            sum_on_a_gpu = contracted_alone(record, g)
            squares_on_a_gpu = sites.squared_norms([site.factors(record, g)])
        return {
            "on_a_gpu": on_a_gpu,
            "sum_on_a_gpu": sum_on_a_gpu,
            "squares_on_a_gpu": squares_on_a_gpu,
            "one_by_one": one_by_one,
            "elsewhere": elsewhere,
            "per_example": site.per_example(record, g),
            "sum": contracted_alone(record, g),
            "squares": sites.squared_norms([site.factors(record, g)]),
            "bound": site.without_cancellation(record, g),
        }

    compiled = jax.jit(everything, compiler_options=COMPILER_OPTIONS)
    got = jax.device_get(compiled(record, g))  # what follows compiles nothing
    bound, squares = (
        got.pop("bound"),
        np.square(truth.astype(np.float64)).reshape(len(truth), -1).sum(1),
    )
    # What counts as rounding: a millionth of what the gradient would be if nothing cancelled.
    np.testing.assert_array_less(np.sqrt(squares), bound * (1 + 1e-5) + 1e-30)
    alike = squares > 1e-2 * np.square(bound)  # the terms hardly cancel
    for form in ("squares", "squares_on_a_gpu"):
        reported = got.pop(form)
        assert np.all(reported * (1 + rounding.SLACK) ** 2 >= squares * (1 - 1e-5))
        assert np.all(reported <= squares * (1 + 1e-5) + 1e-4 * np.square(bound).max(initial=1e-30))
        # A GPU counts the rounding of cotangents in two parts, though none are made here.
        counted = 1e-5 if form == "squares" else 1e-3
        np.testing.assert_allclose(reported[alike], squares[alike], rtol=counted)
    for form in ("sum", "sum_on_a_gpu"):
        np.testing.assert_allclose(got.pop(form), truth.sum(0), rtol=1e-5, atol=1e-6 * bound.sum())
    for name, dv in got.items():
        np.testing.assert_allclose(
            dv, truth, rtol=1e-5, atol=1e-6 * bound.max(initial=1e-30), err_msg=name
        )


def equation(fn: Any, name: str, *args: Any) -> Any:
    """Finds the one equation of a primitive in the program of `fn`, calls included."""

    def search(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == name:
                yield eqn
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from search(inner)

    (found,) = search(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


@st.composite
def contractions(draw: Any) -> tuple[str, dict[str, int]]:
    """Draws an einsum of data "x" and weight "w", with batch, contracted and free axes in any
    number and order."""
    letters = {
        kind: [c for c in names if draw(st.booleans())]
        for kind, names in {"b": "ab", "c": "cd", "f": "fg", "t": "tu"}.items()
    }
    letters["c"] = letters["c"] or ["c"]
    data = draw(st.permutations(letters["b"] + letters["c"] + letters["t"]))
    weight = draw(st.permutations(letters["b"] + letters["c"] + letters["f"]))
    out = draw(st.permutations(letters["b"] + letters["t"] + letters["f"]))
    sides = ["".join(data), "".join(weight)]
    spec = ",".join(sides if draw(st.booleans()) else sides[::-1]) + "->" + "".join(out)
    return spec, {c: draw(st.integers(1, 4)) for c in "abcdfgtu"}


@pytest.mark.slow
@QUICK
@hypothesis.given(contractions())
def test_dot_rule_for_any_contraction(drawn: tuple[str, dict[str, int]]) -> None:
    spec, sizes = drawn
    left, right = spec.split("->")[0].split(",")
    data, weight = (
        (left, right) if not set(left) & set("fg") and not set(right) & set("tu") else (right, left)
    )
    weight_first = left == weight and left != right
    shape = lambda axes: tuple(sizes[c] for c in axes)  # noqa: E731
    w, xs = normal(0, *shape(weight)), normal(1, N, *shape(data))

    def fn(w: Any, x: Any) -> Any:
        # One dot_general, without the transposes that einsum puts around it.
        contracted = [c for c in data if c in weight and c not in spec.split("->")[1]]
        batch = [c for c in data if c in weight and c not in contracted]
        find = lambda axes, of: tuple(of.index(c) for c in axes)  # noqa: E731
        first, second = ((w, weight), (x, data)) if weight_first else ((x, data), (w, weight))
        dims = (
            (find(contracted, first[1]), find(contracted, second[1])),
            (find(batch, first[1]), find(batch, second[1])),
        )
        return lax.dot_general(first[0], second[0], dims)

    rule = sites.Dot.of(equation(fn, "dot_general", w, xs[0]), 0 if weight_first else 1)
    tap = jax.eval_shape(fn, w, xs[0]).shape
    gs = normal(2, N, *tap)
    site = site_of(rule, tap, w.shape)
    shared, of_data, of_weight = (
        [c for c in side if c in kind]
        for side, kind in ((data, "ab"), (data, "tu"), (weight, "fg"))
    )
    out = "".join(shared + (of_weight + of_data if weight_first else of_data + of_weight))
    truth = np.einsum(f"n{data},n{out}->n{weight}", xs, gs, dtype=np.float64)
    check_rule(site, xs, gs, truth)
    assert rule.rows * rule.cols * rule.groups == w.size


@st.composite
def convolutions(draw: Any) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    rank = draw(st.integers(1, 3))
    small = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    groups, channels, features = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
    )
    size, window = small(3, 5 if rank < 3 else 4), small(1, 3 if rank < 3 else 2)
    stride, kernel_dilation, data_dilation = small(1, 3), small(1, 2), small(1, 2)
    if draw(st.booleans()):
        padding: Any = draw(st.sampled_from(["SAME", "VALID"]))
        data_dilation = (1,) * rank
    else:
        padding = [(draw(st.integers(-1, 2)), draw(st.integers(-1, 2))) for _ in range(rank)]
    axes = "DHW"[:rank]
    layout = draw(st.sampled_from(["last", "first", "mixed"]))
    numbers = {
        "last": (f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        "first": (f"NC{axes}", f"OI{axes}", f"NC{axes}"),
        "mixed": (f"C{axes}N", f"I{axes}O", f"{axes}NC"),
    }[layout]
    x_shape = tuple(
        {"N": 2, "C": channels * groups, **dict(zip(axes, size, strict=True))}[c]
        for c in numbers[0]
    )
    w_shape = tuple(
        {"I": channels, "O": features * groups, **dict(zip(axes, window, strict=True))}[c]
        for c in numbers[1]
    )
    settings = {
        "window_strides": stride,
        "padding": padding,
        "lhs_dilation": data_dilation,
        "rhs_dilation": kernel_dilation,
        "dimension_numbers": numbers,
        "feature_group_count": groups,
    }
    out = jax.eval_shape(
        lambda x, w: lax.conv_general_dilated(x, w, **settings),
        *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (x_shape, w_shape)),
    )
    hypothesis.assume(out.size)
    return settings, x_shape, w_shape


def square_windows(
    side: int, stride: int, channels: int
) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    settings: dict[str, Any] = {
        "window_strides": (stride, stride),
        "padding": "SAME",
        "lhs_dilation": (1, 1),
    }
    settings |= {
        "rhs_dilation": (1, 2),
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "feature_group_count": 1,
    }
    return settings, (2, 6, 5, channels), (side, side, channels, 3)


def derivative(
    settings: dict[str, Any], w_shape: tuple[int, ...], xs: np.ndarray, gs: np.ndarray
) -> np.ndarray:
    """Computes the derivative [B, *w_shape] of each example's convolution, one place of the window
    after the other."""
    layouts, groups = settings["dimension_numbers"], settings["feature_group_count"]
    axes = layouts[0].translate({ord(c): None for c in "NC"})
    x, g = (
        np.asarray(v, np.float64).transpose(0, *(1 + layout.index(c) for c in "NC" + axes))
        for v, layout in ((xs, layouts[0]), (gs, layouts[2]))
    )
    window = [w_shape[layouts[1].index(c)] for c in axes]
    taken = []
    for axis, (size, stride, dilation) in enumerate(
        zip(window, settings["window_strides"], settings["rhs_dilation"], strict=True)
    ):
        x = np.moveaxis(x, 3 + axis, 0)
        spread = np.zeros((settings["lhs_dilation"][axis] * (len(x) - 1) + 1, *x.shape[1:]))
        spread[:: settings["lhs_dilation"][axis]] = x
        reach, positions = dilation * (size - 1) + 1, g.shape[3 + axis]
        if settings["padding"] == "SAME":
            low = max((positions - 1) * stride + reach - len(spread), 0) // 2
        else:
            low = 0 if settings["padding"] == "VALID" else settings["padding"][axis][0]
        wide = np.zeros((max(low, 0) + len(spread) + reach + positions * stride, *x.shape[1:]))
        wide[max(low, 0) : max(low, 0) + len(spread)] = spread
        x = np.moveaxis(wide[max(-low, 0) :], 0, 3 + axis)
        taken.append(
            [
                slice(k * dilation, k * dilation + stride * (positions - 1) + 1, stride)
                for k in range(size)
            ]
        )
    x, g = (v.reshape(*v.shape[:2], groups, -1, *v.shape[3:]) for v in (x, g))
    out = np.zeros((len(x), g.shape[2] * g.shape[3], x.shape[3], *window))
    for place in np.ndindex(*window):
        seen = x[(..., *(slices[k] for slices, k in zip(taken, place, strict=True)))]
        flat = (v.reshape(*v.shape[:4], -1) for v in (seen, g))
        out[(..., *place)] = np.einsum("bngit,bngot->bgoi", *flat).reshape(out.shape[:3])
    return out.transpose(0, *(1 + ("OI" + axes).index(c) for c in layouts[1]))


@pytest.mark.slow
def test_the_derivative_of_a_convolution_is_jaxs() -> None:
    """Groups, every kind of dilation, strides, a layout of its own, and padding of both signs."""
    settings: dict[str, Any] = {
        "window_strides": (2, 1),
        "padding": [(-1, 2), (1, 0)],
        "lhs_dilation": (2, 1),
    }
    settings |= {
        "rhs_dilation": (1, 2),
        "dimension_numbers": ("CHWN", "IHWO", "HWNC"),
        "feature_group_count": 3,
    }
    w, x = normal(0, 2, 3, 2, 6), normal(1, 6, 5, 4, 2)
    pull = lambda w, x, g: jax.vjp(lambda w: lax.conv_general_dilated(x, w, **settings), w)[1](g)[0]  # noqa: E731
    g = normal(
        2, *jax.eval_shape(lambda w, x: lax.conv_general_dilated(x, w, **settings), w, x).shape
    )
    known = jax.jit(pull, compiler_options=COMPILER_OPTIONS)(w, x, g)
    np.testing.assert_allclose(
        derivative(settings, w.shape, x[None], g[None])[0], known, rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@hypothesis.settings(QUICK, max_examples=EXAMPLES - 4)
@hypothesis.example(square_windows(7, 2, 2))  # patches of one dimension in a loop over the other
@hypothesis.example(square_windows(3, 1, 8))  # a loop over both
# patches of both dimensions, whose first one has whole strides
@hypothesis.example(square_windows(4, 2, 2))
@hypothesis.example(square_windows(2, 2, 3))  # no loop, because windows do not overlap
@hypothesis.given(convolutions())
def test_conv_rule_for_any_geometry(drawn: Any) -> None:
    settings, x_shape, w_shape = drawn
    fn = lambda w, x: lax.conv_general_dilated(x, w, **settings)  # noqa: E731
    w, xs = normal(0, *w_shape), normal(1, N, *x_shape)
    rule = sites.Conv.of(equation(fn, "conv_general_dilated", w, xs[0]))
    tap = jax.eval_shape(fn, w, xs[0]).shape
    gs = normal(2, N, *tap)
    check_rule(site_of(rule, tap, w.shape), xs, gs, derivative(settings, w.shape, xs, gs))
    assert rule.positions * rule.groups * rule.cols == np.prod(tap)
    assert rule.rows * rule.groups * rule.cols == w.size


def conv_site(
    features: int, size: int, dtype: Any = np.float32
) -> tuple[sites.Conv, Any, Any, np.ndarray]:
    """Returns a rule, the records and cotangents of `size` examples, and their gradients."""
    settings, x_shape, w_shape = square_windows(3, 1, 8)
    w_shape = (*w_shape[:3], features)
    fn = lambda w, x: lax.conv_general_dilated(x, w, **settings)  # noqa: E731
    w, xs = normal(0, *w_shape), normal(1, size, *x_shape)
    gs = normal(2, size, *jax.eval_shape(fn, w, xs[0]).shape)
    rule = sites.Conv.of(equation(fn, "conv_general_dilated", w, xs[0]))
    xs, gs = (np.asarray(x.astype(dtype)) for x in (xs, gs))
    return rule, xs, gs, derivative(settings, w_shape, xs, gs)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("features", "size", "lengths"), [(3, 7, {1, 2, 4, 7}), (40, 6, {1, 2, 3, 6}), (3, 1, {1})]
)
def test_gradients_of_kernels_by_parts_of_examples(
    monkeypatch: pytest.MonkeyPatch, features: int, size: int, lengths: set[int], dtype: Any
) -> None:
    """Parts may overlap, as those of 2 and 4 of 7 examples do. The products end with patches or
    with cotangents."""
    rule, xs, gs, truth = conv_site(features, size, dtype)
    found = set()
    of_one = xs.dtype.itemsize * rule.positions * rule.rows
    for most in range(1, size + 1):
        monkeypatch.setattr(convolution_rule, "_PART", most * of_one)
        cut = convolution_rule._parts(size, of_one)
        if cut in found:  # the same program
            continue
        found.add(cut)
        got = jax.jit(lambda *pair: rule.weight_grads(*pair))(xs[:, None], gs[:, None])
        np.testing.assert_allclose(got, truth, rtol=1e-5, atol=1e-4)
    assert {length for _, length in found} == lengths


def test_gradients_of_kernels_have_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, xs, gs, _ = conv_site(3, 5)
    xs, gs = xs[:, None], gs[:, None]
    monkeypatch.setattr(convolution_rule, "_PART", 2 * 4 * rule.positions * rule.rows)

    def derivatives(f: Any) -> Any:
        backward = jax.grad(lambda *pair: jnp.square(f(*pair)).sum(), argnums=(0, 1))(xs, gs)
        return backward, jax.jvp(f, (xs, gs), (jnp.cos(xs), jnp.cos(gs)))[1]

    found, expected = (
        jax.jit(lambda f=f: derivatives(f))()
        for f in (rule.weight_grads, jax.vmap(rule.weight_grad))
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-2), found, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["clip", "fill", "drop_negative"])
def test_lookup_rule(mode: str) -> None:
    table, gs = normal(0, 5, 2, 3), normal(1, N, 2, 2, 2, 3)
    index = np.array([[[0, 4], [4, 4]], [[9, -9], [1, 1]], [[2, 3], [-1, 5]]], np.int32)
    jax_mode = "fill" if mode == "drop_negative" else mode
    fn = lambda w, i: jnp.take(w, i, axis=0, mode=jax_mode)  # noqa: E731
    rule = sites.Lookup.of(equation(fn, "gather", table, index[0]))
    assert rule is not None
    # jnp.take wraps negative indices before the gather. The primitive itself may also receive them.
    given = (
        index
        if mode == "drop_negative" or mode == "clip"
        else np.where((index < 0) & (index >= -5), index + 5, index)
    )
    record = jax.vmap(lambda i: rule.record([None, i[..., None]]))(given)
    truth = np.zeros((N, *table.shape))
    for b, i, j in np.ndindex(N, 2, 2):
        row = np.clip(given[b, i, j], 0, 4) if mode == "clip" else given[b, i, j]
        if 0 <= row < 5:
            truth[b, row] += gs[b, i, j]
    check_rule(site_of(rule, (2, 2, 2, 3), table.shape), record, gs, truth)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("rows", [1, 7, 127, 128, 129, 255, 256, 300, 40_000])
@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int16", "uint32", "int32"])
def test_lookup_by_indices_of_any_integer_type(mode: str, rows: int, kind: str) -> None:
    bounds, near = np.iinfo(kind), [-rows - 1, -rows, -1, 0, 1, rows - 2, rows - 1, rows, rows + 1]
    held = [i for i in (*near, bounds.min, bounds.max) if bounds.min <= i <= bounds.max]
    index = np.resize(np.array(held, kind), 11)  # one shape
    modes = {"clip": lax.GatherScatterMode.CLIP, "fill": lax.GatherScatterMode.FILL_OR_DROP}
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    fn = lambda w, i: lax.gather(w, i[:, None], numbers, (1, 3), mode=modes[mode])  # noqa: E731
    rule = sites.Lookup.of(
        equation(fn, "gather", jax.ShapeDtypeStruct((rows, 3), jnp.float32), index)
    )
    assert rule is not None
    record = rule.record([None, jax.device_put(index[:, None])])
    whole = index.astype(np.int64)
    inside = (whole >= 0) & (whole < rows)
    np.testing.assert_array_equal(
        record, np.clip(whole, 0, rows - 1) if mode == "clip" else np.where(inside, whole, -1)
    )
    assert record.dtype == jnp.int32
    with jax.enable_x64(True):
        long = index.astype(np.uint64 if kind == "uint32" else np.int64)
        wide = rule.record([None, jax.device_put(long[:, None])])
    np.testing.assert_array_equal(wide, record)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
def test_settled_values_are_those_of_their_dtype(kind: Any) -> None:
    """Checks all 2**16 values. A backend may flush subnormal numbers of bfloat16."""
    every = np.arange(2**16, dtype=np.uint16).view(kind)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        every = every[np.isfinite(every)]
    settled = np.asarray(jax.jit(sites.settled)(every), np.float64)
    known = np.asarray(every, np.float64)
    np.testing.assert_allclose(
        settled, known, rtol=0, atol=2.0**-126 if kind == jnp.bfloat16 else 0
    )
    special = jax.jit(sites.settled)(np.asarray([np.inf, -np.inf, np.nan], kind))
    np.testing.assert_array_equal(
        np.asarray(special, np.float32), np.asarray([np.inf, -np.inf, np.nan], np.float32)
    )
    exponents = np.arange(-20, 0, dtype=np.float32).repeat(500)
    wide = normal(0, 10_000) * np.float32(2) ** exponents
    rounded = jax.jit(lambda x: sites.settled(x.astype(kind)).astype(jnp.float32))(wide)
    np.testing.assert_array_equal(rounded, np.asarray(wide.astype(kind), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sliced", [(False,), (True,), (True, False), (False, True), (True, True), (False, False)]
)
def test_loops_are_slices_or_repeats(sliced: tuple[bool, ...]) -> None:
    loops = (2, 3)[: len(sliced)]
    fn = lambda w, x: x @ w  # noqa: E731
    w, xs, gs = normal(0, 4, 5), normal(1, N, *loops, 2, 4), normal(2, N, *loops, 2, 5)
    rule = sites.Dot.of(equation(fn, "dot_general", w, xs[(0,) * (1 + len(loops))]), 1)
    site = site_of(rule, (2, 5), (4, 5), loops, sliced)
    kept = "".join(c for c, s in zip("kl", sliced, strict=False) if s)
    inputs = "kl"[: len(loops)]
    truth = np.einsum(
        f"b{inputs}tp,b{inputs}tq->b{kept}pq", xs.astype(np.float64), gs.astype(np.float64)
    )
    check_rule(site, xs, gs, truth)
    on_weight = site_of(sites.OnWeight(weight_shape=(4, 5), cols=20), (4, 5), (4, 5), loops, sliced)
    taps = normal(3, N, *loops, 4, 5)
    expected = taps.astype(np.float64).sum(tuple(1 + i for i, s in enumerate(sliced) if not s))
    check_rule(on_weight, (), taps, expected)
    assert (site.slices, site.repeats) == (
        np.prod([n for n, s in zip(loops, sliced, strict=True) if s]),
        np.prod([n for n, s in zip(loops, sliced, strict=True) if not s]),
    )


@pytest.mark.slow
def test_squared_norms_of_one_weight_at_several_sites() -> None:
    tokens = np.array([[0, 3, 3], [1, -1, 2]], np.int32)
    table_w, u, w = normal(0, 2, 1, 3, 4), normal(1, 2, 1, 5, 6), normal(2, 2, 1, 5, 4)
    pairs: list[Any] = [((sites.OneHot(tokens[:, None]),), table_w), ((u,), w)]
    one_hot = (tokens[..., None] == np.arange(6)).astype(np.float64)
    total = np.einsum("btp,btq->bpq", one_hot, table_w[:, 0]) + np.einsum(
        "btp,btq->bpq", u[:, 0], w[:, 0], dtype=np.float64
    )
    expected = np.square(total).sum((1, 2))
    np.testing.assert_allclose(squared_norms(pairs), expected, rtol=1e-5)
    np.testing.assert_allclose(squared_norms(pairs[::-1]), expected, rtol=1e-5)
    flipped = [((w,), u[0]) for u, w in pairs]
    np.testing.assert_allclose(squared_norms(flipped), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale_u", [1e-30, 1e-20, 1e-10, 1.0])
@pytest.mark.parametrize("scale_w", [1e-15, 1.0, 1e15, 1e17])
@pytest.mark.parametrize("length", [1, 4])
def test_no_gradient_hides_in_squares_that_underflow(
    scale_u: float, scale_w: float, length: int
) -> None:
    u, w = (
        normal(0, 8, 1, length, 30) * np.float32(scale_u),
        normal(1, 8, 1, length, 20) * np.float32(scale_w),
    )
    truth = np.sqrt(np.square(np.einsum("bstp,bstq->bspq", u, w, dtype=np.float64)).sum((1, 2, 3)))
    for pair in (((u,), w), ((w,), u)):
        norms = np.sqrt(np.asarray(squared_norms([pair]), np.float64))
        assert np.all(norms >= (1 - 1e-5) * truth - 1e-18)
        if scale_u > 1e-18:
            np.testing.assert_allclose(norms, truth, rtol=1e-5, atol=1e-18)


@pytest.mark.slow
@pytest.mark.parametrize("remainder", [0.0, 1e-4, 1e-2, 1e-1])
@pytest.mark.parametrize("length", [2, 16])
@pytest.mark.parametrize("rows", [8, 512])
def test_norms_are_not_understated_when_positions_cancel(
    remainder: float, length: int, rows: int
) -> None:
    rng = np.random.default_rng(0)
    sign = np.resize([1, -1], (length, 1))
    u = np.repeat(rng.normal(size=(32, 1, length // 2, rows)), 2, axis=2).astype(np.float32)
    w = (np.repeat(rng.normal(size=(32, 1, length // 2, 6)), 2, axis=2) * sign).astype(np.float32)
    w = (w + remainder * rng.normal(size=w.shape)).astype(np.float32)
    truth = np.sqrt(np.square(np.einsum("bstp,bstq->bspq", u, w, dtype=np.float64)).sum((1, 2, 3)))
    norms = np.sqrt(np.asarray(squared_norms([((u,), w)]), np.float64))
    bound = (
        np.linalg.norm(u.astype(np.float64), axis=-1)
        * np.linalg.norm(w.astype(np.float64), axis=-1)
    ).sum((1, 2))
    assert np.all(norms * (1 + rounding.SLACK) >= truth)
    # The squares are computed with this error at most, which their bound adds once more.
    spread = (rows + w.shape[-1] + length**2) * rounding.eps(np.float32) * bound**2
    error = rounding.of_sum(length, np.float32) * bound
    np.testing.assert_array_less(norms, np.sqrt(truth**2 + 2 * spread) + error)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2047, 4096, 50_257])
def test_norms_of_wide_factors_are_exact_to_1e_5(width: int) -> None:
    """Fails if inner products of 50,257 terms are one sum: their estimated rounding is 9e-5 of the
    norm."""
    u, w = normal(0, 2, 1, 4, 8), normal(1, 2, 1, 4, width)
    truth = np.sqrt(np.square(np.einsum("bstp,bstq->bspq", u, w, dtype=np.float64)).sum((1, 2, 3)))
    norms = np.sqrt(np.asarray(squared_norms([((u,), w)]), np.float64))
    np.testing.assert_allclose(norms, truth, rtol=1e-5)
    assert np.all(norms >= truth * (1 - 1e-6))


@pytest.mark.slow
def test_low_precision_is_accumulated_in_float32() -> None:
    fn = lambda w, x: x @ w  # noqa: E731
    w, xs, gs = (
        a.astype(jnp.bfloat16)
        for a in (normal(0, 4, 5), normal(1, N, 300, 4), normal(2, N, 300, 5))
    )
    rule = sites.Dot.of(equation(fn, "dot_general", w, xs[0]), 1)
    site = dataclasses.replace(
        site_of(rule, (300, 5), (4, 5)), tap=jax.ShapeDtypeStruct((300, 5), jnp.bfloat16)
    )
    truth = np.einsum("btp,btq->bpq", np.asarray(xs, np.float64), np.asarray(gs, np.float64))
    assert jax.eval_shape(site.contract, xs, gs, jnp.ones(N)).dtype == jnp.float32
    assert jax.eval_shape(site.per_example, xs, gs).dtype == jnp.float32
    check_rule(site, xs, gs, truth)
    check_rule(site, xs, gs.astype(jnp.float32), truth)  # as when cotangents were scaled in float32


def truncated(x: jax.Array, bits: int) -> jax.Array:
    """Returns what a matrix unit reads of an array: the leading bits of float32, and all of
    bfloat16."""
    ignored = 23 - bits
    words = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) >> ignored << ignored
    return lax.bitcast_convert_type(words, jnp.float32).astype(x.dtype)


@contextlib.contextmanager
def on(platform: str, capability: int = 9, units: int | None = None) -> Iterator[None]:
    """Traces for a platform. With `units`, all products of settled values read so many bits of a
    significand."""
    with pytest.MonkeyPatch.context() as patch, forms.traced_for(platform):
        patch.setattr(forms, "capability", lambda: capability)
        if units is not None:
            read = functools.partial(truncated, bits=units)
            product, grad = lax.dot_general, sites.Conv.weight_grad_by_primitive
            patch.setattr(
                lax,
                "dot_general",
                lambda x, y, *how, **more: product(read(x), read(y), *how, **more),
            )
            patch.setattr(
                sites.Conv,
                "weight_grad_by_primitive",
                lambda rule, *xs: grad(rule, *jax.tree.map(read, xs)),
            )
        yield


def contracted(kind: str, dtype: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns a site, and a record and a cotangent of `N` examples."""
    if kind == "dot":
        xs, w, gs = normal(1, N, 6, 5), normal(0, 5, 7), normal(2, N, 6, 7)
        rule: Any = sites.Dot.of(equation(jnp.matmul, "dot_general", xs[0], w), 1)
    else:
        xs, w, gs = normal(1, N, 1, 6, 6, 3), normal(0, 3, 3, 3, 4), normal(2, N, 1, 4, 4, 4)
        numbers = ("NHWC", "HWIO", "NHWC")
        apply = functools.partial(
            lax.conv_general_dilated,
            window_strides=(1, 1),
            padding="VALID",
            dimension_numbers=numbers,
        )
        rule = sites.Conv.of(equation(apply, "conv_general_dilated", xs[0], w))
    return site_of(rule, gs.shape[1:], w.shape), xs.astype(dtype), gs.astype(dtype)


def gradients(kind: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the gradient of each example of `contracted`, in float64."""
    if kind == "dot":
        return np.einsum("ntp,ntq->npq", x, y)
    places = itertools.product(range(3), range(3))
    found = [np.einsum("nhwp,nhwq->npq", x[:, 0, i : i + 4, j : j + 4], y[:, 0]) for i, j in places]
    return np.stack(found, 1).reshape(N, 3, 3, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "bits"), [("cuda", 10), ("tpu", 7)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["dot", "conv"])
def test_matrix_units_multiply_settled_values_without_rounding(
    kind: str, dtype: Any, platform: str, bits: int
) -> None:
    factors = np.linspace(0.1, 0.9, N, dtype=np.float32)

    def computed(settled: bool = True) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray]:
        with on(platform, units=bits), pytest.MonkeyPatch.context() as patch:
            if not settled:
                patch.setattr(sites, "settled_at", lambda rule, record, g: (record, g))
            site, xs, gs = contracted(kind, dtype)
            record, g = jax.jit(functools.partial(sites.settled_at, site.rule))(xs, gs)

            def results(record: Any, g: Any) -> dict[str, Any]:
                return {
                    "sum": site.contract(record, g, factors),
                    "per_example": site.per_example(record, g),
                    "squares": sites.squared_norms([site.factors(record, g)]),
                }

            found = jax.device_get(jax.jit(results)(record, g))
        x, y = (np.asarray(a, np.float64) for a in (record, g))
        truth = gradients(kind, x, y)
        rows = np.asarray(factors, np.float64).reshape(-1, *(1,) * (truth.ndim - 1))
        wanted = {"sum": (rows * truth).sum(0), "per_example": truth}
        wanted["squares"] = np.square(truth).reshape(N, -1).sum(1)
        return found, wanted, (rows * gradients(kind, abs(x), abs(y))).sum(0)

    found, wanted, terms = computed()
    # The parts of a factor times a cotangent have 22 bits in TF32, and 16 in bfloat16.
    lost = {"sum": terms * 2.0**-16} if bits == 7 or dtype == jnp.bfloat16 else {}
    for name, value in found.items():
        allowed = 2e-6 + 1e-5 * np.abs(wanted[name]) + lost.get(name, 0)
        assert np.all(np.abs(value - wanted[name]) <= allowed), name
    if dtype == jnp.float32:  # the units would have rounded what was not settled
        found, wanted, _ = computed(settled=False)
        for name, value in found.items():
            assert np.abs(value - wanted[name]).max() > 1e-4, name


@pytest.mark.parametrize(
    ("platform", "capability", "asked", "bits"),
    [
        ("cuda", 9, None, 10),
        ("cuda", 8, "tensorfloat32", 10),
        ("cuda", 9, "highest", None),
        ("cuda", 9, "float32", None),
        ("cuda", 7, None, None),
        ("rocm", 9, None, None),
        ("tpu", 9, None, 7),
        ("tpu", 9, "bfloat16", 7),
        ("tpu", 9, "highest", None),
        ("cpu", 9, None, None),
    ],
)
def test_what_is_multiplied_follows_the_platform_and_jaxs_settings(
    platform: str, capability: int, asked: str | None, bits: int | None
) -> None:
    with on(platform, capability), jax.default_matmul_precision(asked):
        assert sites.multiplied_bits() == bits
        site, xs, gs = contracted("dot", jnp.float32)
        record, g = jax.eval_shape(functools.partial(sites.settled_at, site.rule), xs, gs)
        program = str(jax.make_jaxpr(site.contract)(record, g, jnp.ones(N)))
    assert ("HIGHEST" in program) == (bits is None)
    assert ("reduce_precision" in program) == (bits is not None)


@pytest.mark.parametrize("positions", [512, 640, 521])
def test_gram_norms_of_long_sequences_by_blocks(positions: int) -> None:
    """A twin that counts the blocks beside the diagonal once has another norm. 521 is prime: one
    block."""
    u, w = normal(0, 2, 1, positions, 48), normal(1, 2, 1, positions, 64)
    index = np.random.default_rng(2).integers(-1, 48, (2, 1, positions))
    table = np.concatenate([np.eye(48), np.zeros((1, 48))])[index]
    squares = [
        np.square(np.einsum("bstp,bstq->bspq", x.astype(float), w)).sum((1, 2, 3))
        for x in (u, u + table)
    ]
    pairs: list[Any] = [((u,), w), ((sites.OneHot(index),), w)]
    for chosen, expected in zip((pairs[:1], pairs), squares, strict=True):
        np.testing.assert_allclose(squared_norms(chosen), expected, rtol=1e-5)
        if positions == 640:  # the most blocks that an accelerator has without a loop
            with forms.traced_for("rocm"):
                without_loop = jax.jit(lambda x: sites.squared_norms(x))(chosen)
            np.testing.assert_allclose(without_loop, expected, rtol=1e-5)
    assert sites.gram_rows(positions) == {512: 256, 640: 160, 521: 521}[positions]
