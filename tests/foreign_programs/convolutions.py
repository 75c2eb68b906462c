"""Programs with convolutions."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.foreign_programs.entries import Array, Program, energy, norm, program


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
