"""Random programs: every engine gives what `jax.grad` of one example after the other gives in
float64.

A seed makes the source of a loss `loss(p, x, i)` of weights `p`, an array `x` and small integers
`i`. Weights pass through random functions before they meet data, and meet it in every way that the
generator supports. A failure prints the source. JAXDP_SLOW=1 runs 3,000 programs in place of 18
chosen ones, and JAXDP_SEED=n starts at program n."""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdp.transforms import factored_norms, sites, walker

SLOW = os.environ.get("JAXDP_SLOW") == "1"
PROGRAMS, CANDIDATES = (3_000, 3_000) if SLOW else (18, 2_000)
FIRST = int(os.environ.get("JAXDP_SEED", "0"))
BATCH = 4
INDEX_TYPES = ("uint8", "int8", "int16", "uint16", "int32", "uint32")


# --- Functions with custom derivatives, which the programs call ---


@jax.custom_jvp
def straight_through(w: Any) -> Any:
    return jnp.round(w * 4) / 4


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))


@jax.custom_vjp
def bent(x: Any) -> Any:
    """Has a custom derivative that is not linear in the cotangent."""
    return jnp.sin(x)


bent.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.tanh(g) * jnp.cos(x),))


@jax.custom_vjp
def dense(w: Any, x: Any) -> Any:
    return x @ w


dense.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda wx, g: (wx[1].T @ g, jnp.clip(g, -0.3, 0.3) @ wx[0].T)
)


def bits(w: Any) -> Any:
    """Returns an integer that depends on every bit of a weight, as a float without gradient."""
    whole = lax.bitcast_convert_type(w, {4: jnp.int32, 8: jnp.int64}[w.dtype.itemsize])
    return 0 * whole.astype(w.dtype)


def low(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


NAMES = {
    "jax": jax, "jnp": jnp, "lax": lax, "straight_through": straight_through, "bent": bent, "dense": dense,  # noqa: E501
    "bits": bits, "low": low,
}  # fmt: skip


# --- The generator ---

# Functions of a weight alone that keep its shape.
FUNCTIONS = (
    "jnp.tanh({w})",
    "({w} * 2 - 0.1)",
    "jnp.cumsum({w}, 0)",
    "jnp.flip({w}, 0)",
    "jnp.sort({w}, axis=-1)",
    "jnp.fft.ifft(jnp.fft.fft({w}) * 1j).imag",
    "jnp.fft.irfft(jnp.fft.rfft({w}), n={w}.shape[-1])",
    "jnp.abs(lax.complex({w}, {w} + 0.5))",
    "(lax.complex({w}, 0 * {w}) ** 2).real",
    "jnp.angle(jnp.exp(1j * {w}))",
    "straight_through({w})",
    "bent({w})",
    "(lax.stop_gradient({w}) * {w})",
    "jnp.where({w} > 0, {w}, 0.1 * {w})",
    "({w} / (0.5 + jnp.sqrt(jnp.sum({w} ** 2))))",
    "lax.scan(lambda c, r: (jnp.tanh(c + r), c * r + r), 0 * {w}[0], {w})[1]",
    "jax.checkpoint(lambda v: jnp.sin(v) * v)({w})",
    "lax.fori_loop(0, 2, lambda k, v: jnp.sin(v), {w})",
    "lax.cond(jnp.sum({w}) > 0, jnp.sin, jnp.tanh, {w})",
    "({w} ** 3 + {w})",
    "({w} + jnp.round({w}))",
    "({w} * {w}.astype(jnp.int32).astype({w}.dtype) + {w})",
    "({w} + bits({w}))",
    "jax.jit(jnp.sinh)({w})",
    "jnp.concatenate([{w}[1:], 2 * {w}[:1]])",
    "(lax.while_loop(lambda s: s[1] < 2, lambda s: (s[0] * 2, s[1] + 1), (lax.stop_gradient({w}), "
    "0))[0] * {w})",
    "low({w}).astype({w}.dtype)",
)


@dataclasses.dataclass
class Program:
    """A loss as source, with the shapes of its weights and of its example, and what the generator
    put into it."""

    seed: int
    parts: frozenset[str]
    shapes: dict[str, tuple[int, ...]]
    example: tuple[int, int]
    index_type: str
    source: str

    @property
    def loss(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {}
        exec(self.source, dict(NAMES), scope)
        return lambda p, e: scope["loss"](p, *e)

    @property
    def tolerance(self) -> float:
        return 0.05 if "low(" in self.source else 1e-3


class Writer:
    """Writes one program. `h` is its value so far, a real array [rows, columns]."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng([seed, 1])
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rows, self.columns = (int(n) for n in self.rng.integers(2, 6, 2))
        self.example = self.rows, self.columns
        self.index_type = self.pick(INDEX_TYPES)
        self.lines, self.named = ["h = x"], 0
        self.parts: set[str] = set()
        for name in self.rng.choice(OPERATIONS, self.rng.integers(1, 4)):
            self.parts.add(str(name))
            getattr(self, name)()
        if self.chance(0.2):
            self.lines.append(f"h = h + 0.1 * jnp.sum({self.weight((3,))} ** 2)")
        if not self.shapes:
            self.op_dense()

    def pick(self, options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def put(self, expression: str, rows: int | None = None, columns: int | None = None) -> None:
        self.lines.append(f"h = {expression}")
        self.rows = self.rows if rows is None else rows
        self.columns = self.columns if columns is None else columns

    def weight(self, shape: tuple[int, ...]) -> str:
        """Writes an expression of a new or used weight, possibly through functions of the
        weight."""
        same = [name for name, s in self.shapes.items() if s == shape]
        turned = [name for name, s in self.shapes.items() if len(s) == 2 and s[::-1] == shape]
        if turned and self.chance(0.3):
            w = f"p['{self.pick(turned)}'].T"
        elif same and self.chance(0.4):
            w = f"p['{self.pick(same)}']"
        else:
            name = f"w{len(self.shapes)}"
            self.shapes[name] = shape
            w = f"p['{name}']"
        while shape and self.chance(0.35):
            function = self.pick(FUNCTIONS)
            self.parts.add(function)
            if function.count("{w}") > 1 or self.chance(0.5):
                self.named += 1
                self.lines.append(f"v{self.named} = {function.format(w=w)}")
                w = f"v{self.named}"
            else:  # inside of a loop or branch, if that is where the weight is used
                w = function.format(w=w)
        return w

    def size(self, limit: int = 5) -> int:
        return int(self.rng.integers(1, limit))

    # Products

    def op_dense(self) -> None:
        k = self.size()
        expression = f"h @ {self.weight((self.columns, k))}"
        self.put(
            expression + f" + {self.weight((k,))}" if self.chance(0.5) else expression, columns=k
        )

    def op_from_the_left(self) -> None:
        k = self.size()
        self.put(f"{self.weight((k, self.rows))} @ h", rows=k)

    def op_heads(self) -> None:
        k = self.size(3)
        w = self.weight((self.columns, 2, k))
        self.put(f"jnp.einsum('td,dhk->thk', h, {w}).reshape({self.rows}, {2 * k})", columns=2 * k)

    def op_groups(self) -> None:
        k, doubled = self.size(3), "jnp.stack([h, jnp.sin(h)])"
        self.put(
            f"jnp.einsum('gtd,gdk->tk', {doubled}, {self.weight((2, self.columns, k))})", columns=k
        )

    def op_attention(self) -> None:
        q, k = (self.weight((self.columns, 2)) for _ in "qk")
        self.put(f"jax.nn.softmax((h @ {q}) @ (h @ {k}).T) @ h")

    def op_custom_dense(self) -> None:
        k = self.size()
        self.put(f"dense({self.weight((self.columns, k))}, h)", columns=k)

    def op_low_precision_dense(self) -> None:
        k = self.size()
        self.put(f"(low(h) @ low({self.weight((self.columns, k))})).astype(h.dtype)", columns=k)

    def op_convolution(self) -> None:
        width, groups = self.size(4), 2 if self.columns % 2 == 0 and self.chance(0.5) else 1
        k, stride, dilation = self.size(3) * groups, self.size(3), self.size(3)
        pads = int(self.rng.integers(0, 2)) + dilation * (width - 1), int(self.rng.integers(0, 3))
        rows = (self.rows + sum(pads) - dilation * (width - 1) - 1) // stride + 1
        w = self.weight((width, self.columns // groups, k))
        self.put(
            f"lax.conv_general_dilated(h[None], {w}, ({stride},), [{pads}], (1,), ({dilation},), "
            f"('NWC', 'WIO', 'NWC'), {groups})[0]", rows, k,
        )  # fmt: skip

    # Complex numbers

    def op_spectral_filter(self) -> None:
        shape = (self.rows // 2 + 1, self.columns)
        w = f"lax.complex({self.weight(shape)}, {self.weight(shape)})"
        self.put(f"jnp.fft.irfft(jnp.fft.rfft(h, axis=0) * {w}, n={self.rows}, axis=0)")

    def op_complex_dense(self) -> None:
        k = self.size()
        a, b = (self.weight((self.columns, k)) for _ in "ab")
        product = f"(h @ ({a} + 1j * {b}))"
        self.put(
            self.pick((f"jnp.abs({product} + 0.1)", f"{product}.imag", f"({product} ** 2).real")),
            columns=k,
        )

    def op_real_weight_in_complex_data(self) -> None:
        k = self.size()
        self.put(f"(jnp.fft.fft(h, axis=0) @ {self.weight((self.columns, k))}.astype(1j * h[0, "
                 "0])).imag".replace(
            "1j * h[0, 0]", "jnp.result_type(h, jnp.complex64)"), columns=k)  # fmt: skip

    def op_complex_state_space(self) -> None:
        a, b = self.weight((self.columns,)), self.weight((self.columns,))
        self.lines.append(f"a = jnp.exp(lax.complex(-jnp.abs({a}), {b}))")
        self.put("lax.scan(lambda s, u: (a * s + u, (a * s).real), 0 * a, h)[1]")

    # Scales and biases

    def op_scale(self) -> None:
        t, d = self.rows, self.columns
        shapes = [(), (d,), (1, d), (t, 1), (t, d), (1, 1)]
        self.put(f"h * {self.weight(self.pick(shapes))} + {self.weight(self.pick(shapes))}")

    def op_norm(self) -> None:
        self.lines.append(
            "h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 0.1)"
        )
        self.put(f"h * {self.weight((self.columns,))} + {self.weight((self.columns,))}")

    def op_two_sided(self) -> None:
        w = self.weight((self.columns,))
        forms = (
            "jnp.maximum(h, {w})", "h / (1.5 + jnp.abs({w}))", "jnp.where(h > {w}, h, {w})", "jnp.arctan2(h, {w} + 2)",  # noqa: E501
            "lax.clamp(jnp.broadcast_to(-jnp.abs({w}), h.shape), h, "
            "jnp.broadcast_to(jnp.abs({w}), h.shape))",
            "jnp.abs(h + 0.1) ** jnp.abs({w})", "jnp.logaddexp(h, {w})", "h + jnp.outer(h[:, 0], "
                                                                         "{w})",
        )  # fmt: skip
        self.put(self.pick(forms).format(w=w))

    # Lookups

    def indices(self, n: int) -> str:
        return self.pick(
            (
                f"i % {min(n, 100)}",
                "i",
                f"jnp.argsort(h[:, 0])[jnp.arange(4) % {self.rows}] % {n}",
                f"(i // 2) % {min(n, 100)}",
            )
        )

    def op_embedding(self) -> None:
        n, mode = self.pick((3, 7, 140, 300)), self.pick(("clip", "fill", "wrap"))
        mode = (
            "clip" if mode == "wrap" and n > 100 else mode
        )  # JAX itself computes a remainder in the index's dtype
        fill = ", fill_value=0" if mode == "fill" else ""
        w = self.weight((n, self.columns))
        self.put(f"jnp.take({w}, {self.indices(n)}, axis=0, mode='{mode}'{fill}) * h[:1]", rows=4)

    def op_gather_of_a_weight(self) -> None:
        w, t = self.weight((5, self.columns)), self.indices(5)
        forms = (
            "{w}.at[{t}].get(mode='fill', fill_value=0)", "{w}.at[{t}].get(mode='clip')",
            "{w}.at[{t}].get(mode='promise_in_bounds')", "{w}[:, 0][{t} % 5][:, None]",
            "lax.dynamic_slice({w}, (({t})[0].astype(jnp.int32), jnp.int32(0)), (4, {d}))",
            "jnp.take_along_axis({w}[:4], jnp.argsort(h[:1], axis=-1) % 4, 0)",
        )  # fmt: skip
        form = self.pick(forms)
        t = f"({self.pick(('i', 'i // 2'))} % 5)" if "promise" in form else f"({t})"
        self.put(
            "jnp.sin(" + form.format(w=w, t=t, d=self.columns) + ") + h[:1]",
            rows=1 if "along" in form else 4,
        )

    def op_gather_of_data(self) -> None:
        self.put(f"jnp.take(h, {self.indices(self.rows)}, axis=0, mode='clip')", rows=4)

    def op_scatter(self) -> None:
        n, how, mode = (
            self.pick((4, 6)),
            self.pick(("add", "mul", "set", "max")),
            self.pick(("drop", "clip")),
        )
        base = (
            self.weight((n, self.columns))
            if self.chance(0.6)
            else f"jnp.ones(({n}, {self.columns}), h.dtype)"
        )
        row = self.weight((1, self.columns)) if self.chance(0.5) else "h[:1]"
        where = f"jnp.arange(4) + {self.pick((0, 1))}" if how != "add" else f"({self.indices(n)})"
        self.put(
            f"({base}).at[{where}].{how}({row} * h[0, 0], mode='{mode}', "
            f"unique_indices={how == 'mul'})",
            rows=n,
        )

    # Loops, branches, calls

    def op_recurrence(self) -> None:
        k = self.size()
        a, b = self.weight((k, k)), self.weight((self.columns, k))
        body = f"lambda s, u: ((s := jnp.tanh(s @ {a} + u @ {b})), s)"
        body = f"jax.checkpoint({body})" if self.chance(0.4) else body
        self.put(
            f"lax.scan({body}, {self.weight((k,))}, h, reverse={self.chance(0.5)})[1]", columns=k
        )

    def op_stack(self) -> None:
        d = self.columns
        w, shared = self.weight((2, d, d)), self.weight((d, d))
        body = f"lambda s, w: (s + jnp.tanh(s @ w @ {shared}), w[0])"
        self.put(f"(lambda r: r[0] + r[1].sum(0))(lax.scan({body}, h, {w}))")

    def op_complex_stack(self) -> None:
        w = self.weight((2, self.columns))
        self.put(
            "lax.scan(lambda s, w: ((jnp.fft.fft(s) * lax.complex(w, 1 - w)).real, None), h, "
            f"{w})[0]"
        )

    def op_loop(self) -> None:
        w = self.weight((3, self.columns))
        self.put(f"lax.fori_loop(0, 3, lambda k, s: jnp.tanh(s * {w}[k]), h)")

    def op_map(self) -> None:
        w = self.weight((self.columns, 2))
        self.put(f"lax.map(lambda r: jnp.sin(r @ {w}), h)", columns=2)

    def op_branch(self) -> None:
        k = self.size()
        a, b = self.weight((self.columns, k)), self.weight((self.columns, k))
        if self.chance(0.5):
            self.put(
                f"lax.cond(h[0, 0] > 0, lambda h: h @ {a}, lambda h: jnp.sin(h @ {b}), h)",
                columns=k,
            )
        else:
            self.put(
                "lax.switch(i[0].astype(jnp.int32) % 2, [lambda w, v: h @ w, lambda w, v: h @ "
                f"v], {a}, {b})",
                columns=k,
            )

    def op_block(self) -> None:
        d = self.columns
        a, b = self.weight((d, d)), self.weight((d,))
        forms = (
            "jax.checkpoint(lambda w, b, h: jnp.tanh(h @ w + b))({a}, {b}, h)",
            "jax.jit(lambda w, b, h: jnp.tanh(h @ w + b))({a}, {b}, h)",
            "jax.vmap(lambda r: jnp.tanh(r @ {a} + {b}))(h)",
        )
        self.put(self.pick(forms).format(a=a, b=b))

    def op_stopped_loop(self) -> None:
        w = self.weight((self.columns, self.columns))
        body = f"lambda s: (jnp.tanh(s[0] @ lax.stop_gradient({w})), s[1] + 1)"
        loop = f"lax.while_loop(lambda s: s[1] < 3, {body}, (h, 0))"
        self.put(f"lax.stop_gradient({loop}[0]) + h @ {w}")

    # Data alone

    def op_bend(self) -> None:
        self.put(self.pick((
            "jax.nn.gelu(h)", "jax.nn.relu(h)", "bent(h)", "jnp.sort(h, axis=0)", "jnp.cumsum(h, 1)", "jnp.flip(h, 0)",  # noqa: E501
            "jax.nn.log_softmax(h)", "h / (1 + jnp.abs(h))", "h ** 3", "jnp.where(h > 0.1, h, "
                                                                       "jnp.exp(h))",
            "jnp.roll(h, 1, 0)", "low(h).astype(h.dtype)", "lax.associative_scan(jnp.add, h)", "jnp.real(1j * h * 1j)",  # noqa: E501
        )))  # fmt: skip

    def op_pool(self) -> None:
        reduce = self.pick(("-jnp.inf, lax.max", "0.0, lax.add"))
        self.put(f"lax.reduce_window(h, {reduce}, (2, 1), (1, 1), 'SAME')")

    def op_cut_and_join(self) -> None:
        w = self.weight((2, self.columns))
        self.put(f"jnp.concatenate([h[1:], {w}, lax.dynamic_slice_in_dim(h, "
                 "i[1].astype(jnp.int32), 1)])",
                 rows=self.rows + 2)  # fmt: skip

    def op_update(self) -> None:
        w = self.weight((1, self.columns))
        self.put(
            f"lax.dynamic_update_slice(h, {w} * h[:1], (i[2].astype(jnp.int32), jnp.int32(0)))"
        )

    def op_turn(self) -> None:
        self.put("h.T", self.columns, self.rows)

    def op_reduce(self) -> None:
        form = self.pick(
            (
                "h.mean(0, keepdims=True)",
                "jnp.sort(h, 0)[-1:]",
                "jax.nn.logsumexp(h, 0, keepdims=True)",
            )
        )
        self.put(f"jnp.concatenate([{form}, h.sum(0, keepdims=True) / 3])", rows=2)


OPERATIONS = [name for name in dir(Writer) if name.startswith("op_")]


def write(seed: int) -> Program:
    writer = Writer(seed)
    body = "\n".join(f"    {line}" for line in writer.lines)
    source = f"def loss(p, x, i):\n{body}\n    return jnp.sum(jnp.sin(h) + 0.3 * h ** 2) / 2\n"
    used = re.search(r"\bi\b", body)  # a program without indices compiles faster with wide ones
    index_type = writer.index_type if used else "int32"
    return Program(seed, frozenset(writer.parts), writer.shapes, writer.example, index_type, source)


# --- The comparison ---


@dataclasses.dataclass
class Setting:
    """What a program is run with: weights, batch, mask, whether the examples are groups of two."""

    params: dict[str, np.ndarray]
    batch: tuple[np.ndarray, np.ndarray]
    mask: np.ndarray
    group: bool


def setting_of(program: Program) -> Setting:
    rng = np.random.default_rng([program.seed, 2])
    group = program.seed % 7 == 3
    lead = (BATCH, 2) if group else (BATCH,)
    params = {
        name: (0.6 * rng.normal(size=shape)).astype(np.float32)
        for name, shape in program.shapes.items()
    }
    x = rng.normal(size=(*lead, *program.example)).astype(np.float32)
    bounds = np.iinfo(program.index_type)
    i = rng.integers(max(-3, bounds.min), 8, (*lead, 4))
    i = np.where(
        rng.random(i.shape) < 0.3,
        rng.integers(max(-400, bounds.min), min(400, bounds.max) + 1, i.shape),
        i,
    )
    if program.seed % 5 == 1:
        x[1, ..., 0, 0] = np.nan
    mask = rng.random(BATCH) < 0.8 if program.seed % 3 == 0 else np.ones(BATCH, bool)
    return Setting(params, (x, i.astype(program.index_type)), mask, group)


def differences(program: Program, methods: tuple[str, ...], oracle: Any) -> dict[str, str]:
    """Describes the error of each wrong method. The result is empty if all are right."""
    setting, loss = setting_of(program), program.loss
    mean = lambda p, e: jax.vmap(loss, (None, 0))(p, e).mean()  # noqa: E731
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        reference = oracle.micro_batches_of_one(
            mean if setting.group else loss, setting.params, setting.batch
        )
        finite = np.isfinite(reference.norms)
        keep = setting.mask & finite
        known = reference.norms[keep]
        clip_norm = float(np.median(known)) if known.size and np.median(known) > 0.05 else 1.0
        clean = [np.where(finite.reshape(-1, *(1,) * (g.ndim - 1)), g, 0) for g in reference.grads]
        expected = dataclasses.replace(
            reference, grads=clean, norms=np.where(finite, reference.norms, 0)
        )
        sums = expected.clipped_sum(clip_norm, keep)

        def run(*args: Any) -> Any:
            return oracle.every_method(
                loss, methods, *args, clip_norm=clip_norm, group=setting.group
            )

        options = oracle.compiler_options((setting.params, setting.batch))
        got = jax.jit(run, compiler_options=options)(setting.params, setting.batch, setting.mask)

    wrong, scale = {}, max(float(np.sqrt(sum(np.square(s).sum() for s in sums))), 0.01 * clip_norm)
    for method, out in got.items():
        grads = [np.asarray(out.grads[name], np.float64) for name in sorted(setting.params)]
        error = math.sqrt(sum(np.square(g - s).sum() for g, s in zip(grads, sums, strict=True)))
        norms = np.asarray(out.norms, np.float64)[keep]
        nonfinite = int(out.nonfinite), int((setting.mask & ~finite).sum())
        # Where terms cancel, norms are rounded up.
        known_norms = (norms >= known * (1 - program.tolerance) - 1e-6) & (
            norms <= known * (1 + program.tolerance) + 0.01
        )
        if not error <= program.tolerance * scale:
            wrong[method] = f"the sum is off by {error / scale:.2e}"
        elif not known_norms.all():
            wrong[method] = f"norms are {norms}, not {known}"
        elif nonfinite[0] != nonfinite[1]:
            wrong[method] = f"{nonfinite[0]} gradients are not finite, expected {nonfinite[1]}"
    return wrong


def methods_of(seed: int) -> tuple[str, ...]:
    return "auto", ("vmap", "bookkeeping", "factors", "keep", "drop")[seed % 5]


@functools.cache
def chosen() -> list[Program]:
    """Returns the programs to run: short ones that have, together, many parts under many
    methods."""
    candidates = [write(seed) for seed in range(FIRST, FIRST + CANDIDATES)]
    if len(candidates) == PROGRAMS:
        return candidates
    found: list[Program] = []
    missing = {
        p.seed: {(m, part) for m in ("any", *methods_of(p.seed)[1:]) for part in p.parts}
        for p in candidates
    }
    while len(found) < PROGRAMS:
        found.append(max(candidates, key=lambda p: len(missing[p.seed]) / (10 + len(p.parts))))
        have = set(missing[found[-1].seed])
        missing = {seed: pairs - have for seed, pairs in missing.items()}
    return found


@pytest.mark.slow
def test_chosen_programs_have_every_part_and_many_under_every_method() -> None:
    parts = [(methods_of(p.seed)[1], part) for p in chosen() for part in p.parts]
    assert {part for _, part in parts} == {*OPERATIONS, *FUNCTIONS}
    assert min(len({part for m, part in parts if m == method}) for method, _ in parts) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("block", range(PROGRAMS // 6))
def test_random_programs(block: int, oracle: Any) -> None:
    failures = []
    for program in chosen()[6 * block : 6 * block + 6]:
        try:
            wrong: Any = differences(program, methods_of(program.seed), oracle)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            failures.append(
                f"seed {program.seed}: {wrong}\n{program.source}\n{program.shapes} "
                f"{program.index_type}"
            )
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
def test_programs_with_small_indices_are_compiled_to_index_rightly(oracle: Any) -> None:
    table, index = np.ones((300, 1), np.float32), np.arange(200, 208, dtype=np.uint8)
    total = lambda table, index: jnp.take(table, index, axis=0, mode="fill").sum()  # noqa: E731

    def hits(options):
        return int(jax.jit(jax.grad(total), compiler_options=options)(table, index).sum())

    options = oracle.compiler_options((table, index))
    assert hits(options) == len(index)
    wide = oracle.compiler_options((table, index.astype(np.int32)))
    assert (hits(wide) == len(index)) == (options == wide)


# --- Broken twins: what the programs must catch ---


def wrapping_record(rule: Any, operands: Any) -> Any:
    """Replaces `sites.Lookup.record`, with the bounds in the dtype of the index."""
    index = operands[1][..., 0]
    last, nothing = (jnp.asarray(np.int64(n).astype(index.dtype)) for n in (rule.rows - 1, -1))
    if rule.clip:
        return jnp.clip(index, 0, last)
    return jnp.where((index >= 0) & (index <= last), index, nothing)


def apart(x: Any, y: Any, precision: Any = None, inner: Any = factored_norms.inner_products) -> Any:
    """Replaces `inner_products`, without the products of two different uses of a weight."""
    return inner(x, y, precision) if x is y else 0 * inner(x, y, precision)


TWINS: dict[str, tuple[Any, str, Any, Callable[[Program], bool]]] = {
    "complex values are constants": (walker, "is_complex", lambda v: False, lambda p: "lax.complex(p[" in p.source),  # noqa: E501
    "custom_vjp is linear": (walker, "has_custom_vjp", lambda eqn: False, lambda p: "s @ bent(p[" in p.source),  # noqa: E501
    "small indices wrap": (
        sites.Lookup, "record", wrapping_record,
        lambda p: "uint8" in p.index_type and "(300" in str(p.shapes) and "jnp.take(p['" in p.source,  # noqa: E501
    ),
    "uses of a weight are apart": (
        factored_norms, "inner_products", apart,
        lambda p: len(p.shapes) == 1 and "softmax((h @ p['w0']) @ (h @ p['w0'])" in p.source,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_rule_is_caught(twin: str, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, touches = TWINS[twin]
    monkeypatch.setattr(owner, name, broken)
    programs = filter(touches, map(write, range(5_000)))
    assert any(differences(p, ("factors",), oracle) for p in itertools.islice(programs, 6))
