"""Programs as other libraries and papers write them, to count what clipping adds to their
gradients.

`PROGRAMS` maps a name to a function that makes a `Program`. The numbers of a program are sizes:
small ones to run, and large ones to count."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a program: normal numbers, or integers below `high`."""

    shape: tuple[int, ...]
    high: int | None = None

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, F32 if self.high is None else jnp.int32)

    def draw(self, rng: np.random.Generator, lead: tuple[int, ...] = ()) -> np.ndarray:
        if self.high is not None:
            return rng.integers(0, self.high, (*lead, *self.shape), np.int32)
        fan_in = math.prod(self.shape[:-1]) if len(self.shape) > 1 and not lead else 1
        return rng.normal(size=(*lead, *self.shape)) / math.sqrt(max(1, min(fan_in, 16)))


@dataclasses.dataclass(frozen=True)
class Program:
    """The loss of one example, with its weights and its example.

    `plain` is an equal loss that JAX can differentiate for a batch, where it cannot differentiate
    `loss`."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    example: Any
    plain: Callable[[Any, Any], jax.Array] | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program with its sizes and its budgets: operations and bytes of the clipped gradient over
    the plain one."""

    build: Callable[..., Program]
    small: tuple[int, ...]
    large: tuple[int, ...]
    flops: float
    bytes: float
    batch: int


PROGRAMS: dict[str, Entry] = {}


def program(
    small: tuple[int, ...], large: tuple[int, ...], *, flops: float, bytes: float, batch: int = 32
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Registers a function of sizes that makes a program."""

    def register(build: Callable[..., Program]) -> Callable[..., Program]:
        PROGRAMS[build.__name__] = Entry(build, small, large, flops, bytes, batch)
        return build

    return register


def energy(x: Any) -> Any:
    """Returns a scalar that no symmetry of a layer makes constant."""
    return jnp.mean(jnp.sin(x) + x.dtype.type(0.3) * jnp.square(x))


def arrays(shapes: Any) -> Any:
    """Returns the arrays of a tree of shapes."""
    return jax.tree.map(lambda x: Array(tuple(x.shape)), shapes)


def norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + x.dtype.type(0.1))


# --- Tables ---


@program((5, 4), (20_000, 64), flops=1.2, bytes=1.4)
def dlrm_stacked_tables(rows: int, width: int) -> Program:
    """Looks up one row in each of four stacked tables (DLRM)."""

    def loss(p: Any, e: Any) -> Any:
        ids, dense = e
        found = p["tables"][jnp.arange(4), ids]
        features = jnp.concatenate([found, jnp.tanh(dense @ p["bottom"])[None]])
        return energy(
            jnp.concatenate([(features @ features.T).ravel(), features.ravel()]) @ p["top"]
        )

    params = {
        "tables": Array((4, rows, width)),
        "bottom": Array((13, width)),
        "top": Array((25 + 5 * width, width)),
    }
    return Program(loss, params, (Array((4,), rows), Array((13,))))


@program((5, 4), (20_000, 64), flops=1.2, bytes=1.6)
def dlrm_tables_by_vmap(rows: int, width: int) -> Program:
    """Looks up one row in each of four stacked tables by `vmap`, which makes a gather with batching
    dimensions."""

    def loss(p: Any, ids: Any) -> Any:
        return energy(jax.vmap(lambda t, i: t[i])(p["tables"], ids).ravel() @ p["top"])

    return Program(
        loss,
        {"tables": Array((4, rows, width)), "top": Array((4 * width, width))},
        Array((4,), rows),
    )


@program((7, 4, 6), (50_000, 64, 40), flops=1.4, bytes=1.7)
def embedding_bag_by_segments(rows: int, width: int, length: int) -> Program:
    """Sums looked-up rows by segments (EmbeddingBag with offsets)."""

    def loss(p: Any, e: Any) -> Any:
        ids, bags = e
        return energy(jnp.tanh(jax.ops.segment_sum(p["table"][ids], bags, num_segments=4)) @ p["w"])

    return Program(
        loss,
        {"table": Array((rows, width)), "w": Array((width, width))},
        (Array((length,), rows), Array((length,), 4)),
    )


@program((7, 4, 6), (50_000, 64, 40), flops=1.7, bytes=2.0)
def embedding_bag_by_mean(rows: int, width: int, length: int) -> Program:
    """Averages looked-up rows with weights (EmbeddingBag)."""

    def loss(p: Any, e: Any) -> Any:
        ids, weights = e
        return energy(jnp.tanh((p["table"][ids] * weights[:, None]).mean(0)) @ p["w"])

    return Program(
        loss,
        {"table": Array((rows, width)), "w": Array((width, width))},
        (Array((length,), rows), Array((length,))),
    )


@program((7, 4, 5), (50_000, 512, 64), flops=1.2, bytes=1.4, batch=8)
def tied_embeddings(rows: int, width: int, length: int) -> Program:
    """Uses one table for tokens and logits."""

    def loss(p: Any, tokens: Any) -> Any:
        x = jnp.tanh(p["table"][tokens] @ p["w"])
        scores = jax.nn.log_softmax(x @ p["table"].T)
        return -jnp.take_along_axis(scores, jnp.roll(tokens, -1)[:, None], 1).mean()

    return Program(
        loss, {"table": Array((rows, width)), "w": Array((width, width))}, Array((length,), rows)
    )


@program((7, 4, 5), (5_000, 64, 64), flops=1.2, bytes=2.7)
def one_hot_embedding(rows: int, width: int, length: int) -> Program:
    """Looks up by a product with one-hot rows."""

    def loss(p: Any, tokens: Any) -> Any:
        return energy(
            jnp.tanh(jax.nn.one_hot(tokens, rows, dtype=p["table"].dtype) @ p["table"]) @ p["w"]
        )

    return Program(
        loss, {"table": Array((rows, width)), "w": Array((width, width))}, Array((length,), rows)
    )


@program((4, 3, 2), (32, 1024, 16), flops=1.3, bytes=1.9)
def codebooks_by_take_along_axis(books: int, codes: int, width: int) -> Program:
    """Looks up one code in each codebook (product quantisation)."""

    def loss(p: Any, e: Any) -> Any:
        found = jnp.take_along_axis(p["codes"], e[:, None, None], axis=1)[:, 0]
        return energy(jnp.tanh(found.ravel()) @ p["w"])

    return Program(
        loss,
        {"codes": Array((books, codes, width)), "w": Array((books * width, width))},
        Array((books,), codes),
    )


@program((6, 4), (512, 256), flops=1.2, bytes=2.2)
def sliced_positions(length: int, width: int) -> Program:
    """Adds the first positions of a table, and a run of a table from where an example says."""

    def loss(p: Any, e: Any) -> Any:
        x, start = e
        shifted = lax.dynamic_slice_in_dim(p["shifted"], start, length // 2)
        return energy(jnp.tanh(x + p["positions"][: length // 2] + shifted) @ p["w"])

    shape = Array((length, width))
    return Program(
        loss,
        {"positions": shape, "shifted": shape, "w": Array((width, width))},
        (Array((length // 2, width)), Array((), length // 2)),
    )


@program((6, 4), (1_000, 256), flops=1.2, bytes=1.3)
def class_embedding(classes: int, width: int) -> Program:
    """Looks up one row by a scalar, which JAX writes as a slice (conditional generators)."""

    def loss(p: Any, e: Any) -> Any:
        label, x = e
        return energy(jnp.tanh(x + p["table"][label]) @ p["w"])

    return Program(
        loss,
        {"table": Array((classes, width)), "w": Array((width, width))},
        (Array((), classes), Array((width,))),
    )


# --- Recurrences and loops ---


@program((3, 2, 4), (6, 64, 256), flops=1.2, bytes=3.8)
def layers_by_index(depth: int, length: int, width: int) -> Program:
    """Indexes a stack of layers in `fori_loop`."""

    def loss(p: Any, x: Any) -> Any:
        return energy(
            lax.fori_loop(0, depth, lambda i, x: x + jnp.tanh(norm(x) @ p["w"][i] + p["b"][i]), x)
        )

    return Program(
        loss,
        {"w": Array((depth, width, width)), "b": Array((depth, width))},
        Array((length, width)),
    )


@program((5, 3, 4), (128, 64, 256), flops=1.2, bytes=1.1)
def equinox_gru(length: int, width: int, hidden: int) -> Program:
    """Runs Equinox's GRU cell over a sequence."""
    import equinox as eqx

    cell = eqx.filter_eval_shape(
        lambda key: eqx.nn.GRUCell(width, hidden, key=key), jax.random.key(0)
    )
    params, static = eqx.partition(cell, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss(p: Any, x: Any) -> Any:
        cell = eqx.combine(p["cell"], static)
        state, _ = lax.scan(lambda h, row: (cell(row, h), None), jnp.zeros(hidden, x.dtype), x)
        return energy(state @ p["out"])

    return Program(
        loss, {"cell": arrays(params), "out": Array((hidden, 10))}, Array((length, width))
    )


@program((5, 3, 4), (128, 64, 256), flops=1.2, bytes=1.1)
def haiku_lstm(length: int, width: int, hidden: int) -> Program:
    """Unrolls Haiku's LSTM over a sequence."""
    import haiku as hk

    def net(x: Any) -> Any:
        core = hk.LSTM(hidden)
        zero = jnp.zeros(hidden, x.dtype)
        outputs, _ = hk.dynamic_unroll(core, x, hk.LSTMState(zero, zero))
        return outputs

    model = hk.without_apply_rng(hk.transform(net))
    params = jax.eval_shape(
        model.init, jax.random.key(0), jax.ShapeDtypeStruct((length, width), F32)
    )
    return Program(lambda p, x: energy(model.apply(p, x)), arrays(params), Array((length, width)))


@program((3, 2, 4), (6, 64, 256), flops=1.3, bytes=1.7)
def linen_scan_over_layers(depth: int, length: int, width: int) -> Program:
    """Scans over a stack of Linen blocks."""
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.Dense(2 * width)(nn.LayerNorm()(x))
            return x + nn.Dense(width)(jax.nn.gelu(y)), None

    stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth)()
    params = jax.eval_shape(
        stack.init, jax.random.key(0), jax.ShapeDtypeStruct((length, width), F32), None
    )
    return Program(
        lambda p, x: energy(stack.apply(p, x, None)[0]), arrays(params), Array((length, width))
    )


@program((6, 4), (256, 256), flops=1.2, bytes=1.1)
def rows_by_map(length: int, width: int) -> Program:
    """Applies a layer to one row after the other by `lax.map`."""

    def loss(p: Any, x: Any) -> Any:
        return energy(lax.map(lambda row: jnp.tanh(row @ p["a"] + p["b"]) @ p["c"], x))

    return Program(
        loss,
        {"a": Array((width, width)), "b": Array((width,)), "c": Array((width, 10))},
        Array((length, width)),
    )


@program((3, 2), (32, 512), flops=1.2, bytes=1.9)
def linear_recurrence_by_associative_scan(length: int, width: int) -> Program:
    """Runs a linear recurrence with gates in parallel (LRU, Mamba)."""

    def loss(p: Any, x: Any) -> Any:
        gates = jax.nn.sigmoid(x @ p["gate"] + p["bias"])
        join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        states = lax.associative_scan(join, (gates, x @ p["in"]))[1]
        return energy(states * p["skip"])

    square, row = Array((width, width)), Array((width,))
    return Program(
        loss, {"gate": square, "bias": row, "in": square, "skip": row}, Array((length, width))
    )


@program((6, 3, 2), (1024, 64, 16), flops=1.9, bytes=4.1)
def s4d_by_fft(length: int, width: int, states: int) -> Program:
    """Convolves with the kernel of a diagonal state space by Fourier transforms (S4D)."""

    def loss(p: Any, x: Any) -> Any:
        rate = lax.complex(-jnp.exp(p["decay"]), p["frequency"])
        times = jnp.arange(length).astype(x.dtype)
        powers = jnp.exp(rate[..., None] * lax.complex(times, jnp.zeros_like(times)))
        kernel = jnp.einsum("hn,hnl->lh", lax.complex(p["re"], p["im"]), powers).real
        spectrum = jnp.fft.rfft(x, 2 * length, axis=0) * jnp.fft.rfft(kernel, 2 * length, axis=0)
        y = jnp.fft.irfft(spectrum, 2 * length, axis=0)[:length] + x * p["skip"]
        return energy(jax.nn.gelu(y) @ p["out"])

    diagonal = {name: Array((width, states)) for name in ("decay", "frequency", "re", "im")}
    return Program(
        loss,
        {**diagonal, "skip": Array((width,)), "out": Array((width, width))},
        Array((length, width)),
    )


@program((3, 4), (24, 256), flops=1.2, bytes=1.1)
def equilibrium_by_iteration(steps: int, width: int) -> Program:
    """Applies one layer a fixed number of times (a deep equilibrium, unrolled)."""

    def loss(p: Any, x: Any) -> Any:
        inject = x @ p["in"]
        return energy(
            lax.fori_loop(
                0, steps, lambda i, z: jnp.tanh(z @ p["w"] + inject), jnp.zeros_like(inject)
            )
        )

    return Program(loss, {"in": Array((width, width)), "w": Array((width, width))}, Array((width,)))


@program((4, 3), (64, 256), flops=1.3, bytes=1.7)
def rematerialised_blocks(length: int, width: int) -> Program:
    """Recomputes blocks in the backward pass."""

    def loss(p: Any, x: Any) -> Any:
        block = jax.checkpoint(lambda w, x: x + jnp.tanh(norm(x) @ w["a"]) @ w["b"])
        return energy(block(p[1], block(p[0], x)))

    layer = {"a": Array((width, 2 * width)), "b": Array((2 * width, width))}
    return Program(loss, [layer, layer], Array((length, width)))


# --- Experts and attention ---


def _experts(experts: int, width: int) -> dict[str, Array]:
    return {
        "route": Array((width, experts)),
        "up": Array((experts, width, 2 * width)),
        "down": Array((experts, 2 * width, width)),
    }


@program((4, 3, 3), (64, 8, 128), flops=1.2, bytes=2.1)
def experts_by_dense_dispatch(length: int, experts: int, width: int) -> Program:
    """Sends tokens to their two best experts by products with masks (Switch, GShard)."""

    def loss(p: Any, x: Any) -> Any:
        weights, best = lax.top_k(jax.nn.softmax(x @ p["route"]), 2)
        combine = (jax.nn.one_hot(best, experts, dtype=x.dtype) * weights[..., None]).sum(1)
        hidden = jax.nn.gelu(
            jnp.einsum("te,td,edf->etf", (combine > 0).astype(x.dtype), x, p["up"])
        )
        return energy(jnp.einsum("te,etf,efd->td", combine, hidden, p["down"]))

    return Program(loss, _experts(experts, width), Array((length, width)))


@program((4, 2, 3), (64, 8, 128), flops=1.2, bytes=1.6)
def experts_by_gathered_tokens(length: int, experts: int, width: int) -> Program:
    """Gathers the tokens of each expert up to a capacity, and scatters what it returns."""

    def loss(p: Any, x: Any) -> Any:
        scores, tokens = lax.top_k(jax.nn.softmax(x @ p["route"]).T, length // experts)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", x[tokens], p["up"]))
        found = jnp.einsum("ecf,efd->ecd", hidden, p["down"]) * scores[..., None]
        return energy(jnp.zeros_like(x).at[tokens].add(found))

    return Program(loss, _experts(experts, width), Array((length, width)))


@program((4, 3, 3), (16, 8, 64), flops=2.3, bytes=2.0)
def experts_by_gathered_weights(length: int, experts: int, width: int) -> Program:
    """Gathers the weights of the best expert of each token."""

    def loss(p: Any, x: Any) -> Any:
        probability = jax.nn.softmax(x @ p["route"])
        best = jnp.argmax(probability, -1)
        y = jnp.einsum("td,tdf->tf", x, p["experts"][best])
        return energy(y * probability.max(-1, keepdims=True))

    return Program(
        loss,
        {"route": Array((width, experts)), "experts": Array((experts, width, width))},
        Array((length, width)),
    )


@program((5, 3, 3), (64, 8, 128), flops=1.2, bytes=2.5)
def experts_by_ragged_dot(length: int, experts: int, width: int) -> Program:
    """Sorts tokens by expert and applies each expert to its run of tokens."""

    def model(p: Any, x: Any, product: Any) -> Any:
        best = jnp.argmax(x @ p["route"], -1)
        order = jnp.argsort(best)
        sizes = jnp.bincount(best, length=experts).astype(jnp.int32)
        hidden = jax.nn.gelu(product(x[order], p["up"], sizes))
        return energy(product(hidden, p["down"], sizes) + x[order] @ p["skip"])

    def masked(x: Any, w: Any, sizes: Any) -> Any:
        ends = jnp.cumsum(sizes)
        row = jnp.arange(length)[:, None]
        inside = ((row >= ends - sizes) & (row < ends)).astype(x.dtype)
        return jnp.einsum("etd,edf->tf", inside.T[..., None] * x, w)

    params = {
        "route": Array((width, experts)),
        "up": Array((experts, width, 2 * width)),
        "down": Array((experts, 2 * width, width)),
        "skip": Array((width, width)),
    }
    return Program(
        lambda p, x: model(p, x, lax.ragged_dot),
        params,
        Array((length, width)),
        plain=lambda p, x: model(p, x, masked),
    )


@program((4, 2, 3), (128, 4, 64), flops=1.2, bytes=1.7)
def attention_by_einsum(length: int, heads: int, width: int) -> Program:
    """Computes attention of several heads."""

    def loss(p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("td,dhk->htk", x, p[name]) for name in "qkv")
        mixed = jax.nn.softmax(jnp.einsum("htk,hsk->hts", q, k)) @ v
        return energy(x + jnp.einsum("htk,hkd->td", mixed, p["out"]))

    size = Array((heads * width, heads, width))
    return Program(
        loss,
        {"q": size, "k": size, "v": size, "out": Array((heads, width, heads * width))},
        Array((length, heads * width)),
    )


@program((4, 2, 3), (64, 4, 64), flops=1.2, bytes=2.3)
def relative_position_bias(length: int, heads: int, width: int) -> Program:
    """Adds a bias per head and distance to attention (Swin, T5)."""

    def loss(p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("td,dhk->htk", x, p[name]) for name in "qkv")
        distance = jnp.arange(length)[:, None] - jnp.arange(length) + length - 1
        bias = p["bias"][distance].transpose(2, 0, 1)
        return energy(jax.nn.softmax(jnp.einsum("htk,hsk->hts", q, k) + bias) @ v)

    size = Array((heads * width, heads, width))
    params = {"q": size, "k": size, "v": size, "bias": Array((2 * length - 1, heads))}
    return Program(loss, params, Array((length, heads * width)))


# --- Convolutions ---


def convolve(x: Any, w: Any, **options: Any) -> Any:
    rank = x.ndim - 1
    axes = "DHW"[-rank:]
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    options = {"window_strides": (1,) * rank, "padding": "SAME", **options}
    return lax.conv_general_dilated(x[None], w, dimension_numbers=numbers, **options)[0]


@program((5, 2), (32, 32), flops=1.2, bytes=3.3)
def separable_convolutions(size: int, width: int) -> Program:
    """Applies depthwise and pointwise convolutions (MobileNet, ConvNeXt)."""

    def loss(p: Any, x: Any) -> Any:
        y = jnp.tanh(convolve(x, p["depth"], feature_group_count=width))
        return energy(convolve(y, p["point"]))

    return Program(
        loss,
        {"depth": Array((3, 3, 1, width)), "point": Array((1, 1, width, 4 * width))},
        Array((size, size, width)),
    )


@program((6, 4), (32, 64), flops=1.2, bytes=9.6)
def grouped_and_dilated_convolutions(size: int, width: int) -> Program:
    """Applies a convolution of two groups and a dilated one."""

    def loss(p: Any, x: Any) -> Any:
        y = jnp.tanh(convolve(x, p["grouped"], feature_group_count=2, window_strides=(2, 2)))
        return energy(convolve(y, p["dilated"], rhs_dilation=(2, 2)))

    return Program(
        loss,
        {"grouped": Array((3, 3, width // 2, width)), "dilated": Array((3, 3, width, width))},
        Array((size, size, width)),
    )


@program((3, 2), (16, 64), flops=1.2, bytes=10.4)
def transposed_convolution(size: int, width: int) -> Program:
    """Doubles the resolution by a transposed convolution (U-Net)."""

    def loss(p: Any, x: Any) -> Any:
        up = lax.conv_transpose(
            x[None], p["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )[0]
        return energy(convolve(jnp.tanh(up), p["out"]))

    return Program(
        loss,
        {"up": Array((3, 3, width, width)), "out": Array((3, 3, width, width))},
        Array((size, size, width)),
    )


@program((8, 2), (512, 64), flops=1.2, bytes=2.6)
def causal_convolutions_of_sound(length: int, width: int) -> Program:
    """Applies dilated causal convolutions of one dimension with gates (WaveNet)."""

    def loss(p: Any, x: Any) -> Any:
        for i, layer in enumerate(p):
            pad = {"padding": [(2**i, 0)], "rhs_dilation": (2**i,)}
            x = x + jnp.tanh(convolve(x, layer["a"], **pad)) * jax.nn.sigmoid(
                convolve(x, layer["b"], **pad)
            )
        return energy(x)

    layer = {"a": Array((2, width, width)), "b": Array((2, width, width))}
    return Program(loss, [layer, layer], Array((length, width)))


@program((3, 2), (16, 16), flops=1.2, bytes=24.5)
def convolutions_of_volumes(size: int, width: int) -> Program:
    """Applies convolutions of three dimensions."""

    def loss(p: Any, x: Any) -> Any:
        y = jnp.tanh(convolve(x, p["a"]))
        return energy(convolve(y, p["b"], window_strides=(2, 2, 2)))

    kernel = Array((3, 3, 3, width, width))
    return Program(loss, {"a": kernel, "b": kernel}, Array((size, size, size, width)))


@program((5, 3), (16, 64), flops=1.2, bytes=12.9)
def standardised_convolution(size: int, width: int) -> Program:
    """Standardises the kernel before it meets data (BiT)."""

    def loss(p: Any, x: Any) -> Any:
        flat = p["kernel"].reshape(-1, width)
        kernel = norm(flat.T).T.reshape(p["kernel"].shape) * p["gain"]
        return energy(convolve(jnp.tanh(x), kernel))

    return Program(
        loss,
        {"kernel": Array((3, 3, width, width)), "gain": Array((width,))},
        Array((size, size, width)),
    )


# --- Scales, products and computed weights ---


@program((4, 4), (128, 256), flops=1.2, bytes=1.5)
def normalisation_scales(length: int, width: int) -> Program:
    """Scales after LayerNorm, RMSNorm and GroupNorm, with PReLU."""

    def loss(p: Any, x: Any) -> Any:
        x = norm(x) * p["layer"] + p["bias"]
        x = jnp.where(x > 0, x, p["slope"] * x) @ p["w"]
        x = (
            x
            * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + x.dtype.type(0.1))
            * (1 + p["rms"])
        )
        return energy(norm(x.reshape(length, 2, -1)).reshape(x.shape) * p["group"])

    row = Array((width,))
    names = ("layer", "bias", "slope", "rms", "group")
    return Program(
        loss, dict.fromkeys(names, row) | {"w": Array((width, width))}, Array((length, width))
    )


@program((5, 3), (784, 256), flops=1.2, bytes=1.3)
def tied_autoencoder(width: int, hidden: int) -> Program:
    """Decodes with the transposed weight of the encoder."""

    def loss(p: Any, x: Any) -> Any:
        return energy(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T - x)

    return Program(loss, {"w": Array((width, hidden)), "b": Array((hidden,))}, Array((width,)))


@program((4, 5, 3), (64, 64, 32), flops=1.2, bytes=1.3)
def bilinear_layer(left: int, right: int, out: int) -> Program:
    """Joins two features by a three-way weight."""

    def loss(p: Any, e: Any) -> Any:
        return energy(jnp.einsum("i,ijk,j->k", e[0], p["w"], e[1]))

    return Program(loss, {"w": Array((left, right, out))}, (Array((left,)), Array((right,))))


@program((3, 6, 2), (64, 512, 16), flops=1.4, bytes=6.3)
def low_rank_product(length: int, width: int, rank: int) -> Program:
    """Multiplies the two factors of an update, and adds them to a frozen weight (LoRA, merged)."""
    frozen = np.random.default_rng(0).normal(size=(width, width)).astype(np.float32) / math.sqrt(
        width
    )

    def loss(p: Any, x: Any) -> Any:
        return energy(jnp.tanh(x @ (jnp.asarray(frozen, x.dtype) + p["a"] @ p["b"])))

    return Program(
        loss, {"a": Array((width, rank)), "b": Array((rank, width))}, Array((length, width))
    )


@program((3, 6, 2), (64, 512, 16), flops=1.2, bytes=1.3)
def lora(length: int, width: int, rank: int) -> Program:
    """Adds a low-rank branch to frozen weights (LoRA)."""
    frozen = np.random.default_rng(0).normal(size=(width, width)).astype(np.float32) / math.sqrt(
        width
    )

    def loss(p: Any, x: Any) -> Any:
        for layer in p:
            x = jnp.tanh(x @ jnp.asarray(frozen, x.dtype) + x @ layer["a"] @ layer["b"])
        return energy(x)

    layer = {"a": Array((width, rank)), "b": Array((rank, width))}
    return Program(loss, [layer, layer], Array((length, width)))


@program((4, 3, 2), (64, 64, 32), flops=1.2, bytes=1.3)
def hypernetwork(inputs: int, hidden: int, code: int) -> Program:
    """Makes the weights of a layer from features of the example."""

    def loss(p: Any, e: Any) -> Any:
        x, z = e
        w = (jnp.tanh(z) @ p["make"]).reshape(inputs, hidden)
        return energy(jnp.tanh(x @ w) @ p["out"])

    params = {"make": Array((code, inputs * hidden)), "out": Array((hidden, 10))}
    return Program(loss, params, (Array((inputs,)), Array((code,))))


@program((4, 3), (512, 512), flops=1.2, bytes=14.6)
def spectral_norm_as_a_constant(width: int, out: int) -> Program:
    """Divides a weight by an estimate of its largest singular value that has no gradient."""

    def loss(p: Any, x: Any) -> Any:
        w = lax.stop_gradient(p["w"])
        v = w.T @ jnp.ones(width, x.dtype)
        scale = jnp.linalg.norm(w @ v) / jnp.linalg.norm(v)
        return energy(jnp.tanh(x @ (p["w"] / scale)))

    return Program(loss, {"w": Array((width, out))}, Array((16, width)))


@program((4, 3), (64, 256), flops=1.2, bytes=3.6)
def custom_activation(length: int, width: int) -> Program:
    """Uses an activation with its own backward pass between products."""

    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.tanh(x)

    clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))
    loss = lambda p, x: energy(clipped(x @ p["a"]) @ p["b"])  # noqa: E731
    return Program(
        loss, {"a": Array((width, width)), "b": Array((width, width))}, Array((length, width))
    )


@program((3, 4), (8, 256), flops=1.2, bytes=1.5)
def contrastive_views(views: int, width: int) -> Program:
    """Encodes the views of an example by `vmap` and compares them."""

    def loss(p: Any, x: Any) -> Any:
        codes = jax.vmap(lambda row: norm(jnp.tanh(row @ p["a"]) @ p["b"]))(x)
        return -jnp.diagonal(jax.nn.log_softmax(codes @ codes[::-1].T)).mean()

    return Program(
        loss, {"a": Array((width, width)), "b": Array((width, width))}, Array((views, width))
    )


@program((4, 4), (128, 256), flops=1.2, bytes=3.5)
def bfloat16_layers(length: int, width: int) -> Program:
    """Computes in bfloat16 with weights in float32."""

    def loss(p: Any, x: Any) -> Any:
        low = jnp.bfloat16
        y = jnp.tanh(x.astype(low) @ p["a"].astype(low) + p["c"].astype(low)) @ p["b"].astype(low)
        return energy(y.astype(x.dtype))

    square = Array((width, width))
    return Program(loss, {"a": square, "b": square, "c": Array((width,))}, Array((length, width)))


# --- Counts ---


def abstract(tree: Any, lead: tuple[int, ...] = ()) -> Any:
    """Returns the shapes of a tree of `Array`, with leading axes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.abstract.dtype), tree)


def drawn(tree: Any, seed: int, lead: tuple[int, ...] = ()) -> Any:
    """Draws a tree of `Array`, with leading axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x.draw(rng, lead), tree)
