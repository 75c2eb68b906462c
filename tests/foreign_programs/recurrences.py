"""Programs with recurrences and loops."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.foreign_programs.entries import F32, Array, Program, arrays, energy, norm, program


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
