"""Programs with scales, products and computed weights."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.foreign_programs.entries import Array, Program, energy, norm, program


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
