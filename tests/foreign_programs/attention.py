"""Programs with attention and with experts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.foreign_programs.entries import Array, Program, energy, program


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
