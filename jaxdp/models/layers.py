"""Layers that the model families share. Each layer acts on every example separately."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

Norm = Literal["group", "frozen_batch"] | None


def gelu(x: jax.Array) -> jax.Array:
    """Computes the exact GELU, x Phi(x) (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return nn.gelu(x, approximate=False)


class GivenShapes(nn.Module):
    """A module that reads its parameters without a trace of their initializers.

    Flax evaluates the shape of an initializer wherever it reads a parameter, which takes half of
    the time to trace a ViT. Here the shape that the initializer is called with is compared.
    """

    @nn.nowrap
    def param(
        self,
        name: str,
        init_fn: Any,
        *init_args: Any,
        **options: Any,
    ) -> Any:
        """Returns a parameter as `flax.linen.Module.param`, for an initializer of (key, shape).

        Raises:
          flax.errors.ScopeParamShapeError: The parameter has another shape.
        """
        if not self.has_variable("params", name):
            return super().param(name, init_fn, *init_args, **options)
        value = flax.core.meta.unbox(self.get_variable("params", name))
        shape = tuple(init_args[0])
        if jnp.shape(value) != shape:
            path = "/" + "/".join(self.path)
            raise flax.errors.ScopeParamShapeError(name, path, jnp.shape(value), shape)
        return value


class Dense(GivenShapes, nn.Dense):
    """`flax.linen.Dense`, which is traced sooner."""


class Conv(GivenShapes, nn.Conv):
    """`flax.linen.Conv`, which is traced sooner."""


class LayerNorm(GivenShapes, nn.LayerNorm):
    """`flax.linen.LayerNorm`, which is traced sooner."""


class RMSNorm(GivenShapes, nn.RMSNorm):
    """`flax.linen.RMSNorm`, which is traced sooner."""


class Embed(GivenShapes, nn.Embed):
    """`flax.linen.Embed`, which is traced sooner."""


class FrozenBatchNorm(GivenShapes):
    """Batch normalisation with fixed statistics: scale * (x - mean) / sqrt(var + epsilon) + bias.

    Mean and variance are constants in the collection "batch_stats", zeros and ones until a public
    pre-trained model fills them. Scale and bias are trainable. Batch statistics mix the examples of
    a batch, so that clipping one example's gradient does not bound its influence.

    Attributes:
      epsilon: The number added to the variance.
      dtype: The computation dtype. None takes the dtype of the input.
    """

    epsilon: float = 1e-5
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., C] to [..., C]."""
        shape = (x.shape[-1],)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape)
        var = self.variable("batch_stats", "var", jnp.ones, shape)
        scale = self.param("scale", nn.initializers.ones, shape)
        bias = self.param("bias", nn.initializers.zeros, shape)
        dtype = self.dtype or x.dtype
        # With all axes of x, since the tests forbid that JAX promotes ranks.
        broadcast = (1,) * (x.ndim - 1) + shape
        inverse = jax.lax.rsqrt(var.value + self.epsilon).reshape(broadcast)
        centred = x.astype(jnp.float32) - mean.value.reshape(broadcast)
        standardised = centred * inverse
        y = standardised * scale.reshape(broadcast) + bias.reshape(broadcast)
        return y.astype(dtype)


class GroupNorm(GivenShapes):
    """Group normalisation (Wu and He 2018, arXiv:1803.08494), with Flax's parameters and values.

    Sums over pixels come first and sums over the channels of a group second. So whole rows of
    channels are added, and nothing of the size of x is reshaped. On CPU this takes a third of the
    time.

    Attributes:
      num_groups: The number of groups, which divides the number of channels.
      epsilon: The number added to the variance.
      dtype: The dtype of the output. None takes the dtype of the input. Sums are float32.
    """

    num_groups: int
    epsilon: float = 1e-6
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, ..., C] to [B, ..., C]."""
        channels = x.shape[-1]
        pixels = tuple(range(1, x.ndim - 1))
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        wide = x.astype(jnp.float32)
        size = math.prod(x.shape[1:]) // self.num_groups

        def group_mean(y: jax.Array) -> jax.Array:  # [B, 1, ..., C]
            of_channels = y.sum(pixels).reshape(len(x), self.num_groups, -1)
            means = of_channels.sum(-1, keepdims=True) / size
            means = jnp.broadcast_to(means, of_channels.shape)
            return means.reshape(len(x), *(1 for _ in pixels), channels)

        mean = group_mean(wide)
        # The difference of two means may round below 0.
        var = jnp.maximum(group_mean(jnp.square(wide)) - jnp.square(mean), 0)
        row = (1,) * (x.ndim - 1) + (channels,)
        factor = jax.lax.rsqrt(var + self.epsilon) * scale.reshape(row)
        y = (wide - mean) * factor + bias.reshape(row)
        return y.astype(self.dtype or x.dtype)


def max_pool(
    x: jax.Array,
    size: int,
    stride: int,
    *,
    padding: int = 0,
    ceil: bool = False,
) -> jax.Array:
    """Returns the maxima of the windows of [B, H, W, C].

    They are computed as maxima of slices, whose gradient is quick on CPU: the gradient of
    `reduce_window` takes 60 of the 100 ms of a small CNN.

    Args:
      x: Any numbers.
      size, stride: The side of the square windows and their distance.
      padding: The pixels around the image that never are a maximum.
      ceil: Whether a last window reaches over the edge, so that no pixel is left out.
    """
    for axis in (1, 2):  # maxima of rows, then of columns
        extent = x.shape[axis]
        count = (extent + 2 * padding - size + (stride - 1) * ceil) // stride + 1
        span = (count - 1) * stride + 1
        edges = [(0, 0)] * x.ndim
        edges[axis] = (padding, max(0, span + size - 1 - extent - padding))
        x = jnp.pad(x, edges, constant_values=-jnp.inf)  # never a maximum
        slices = (jax.lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size))
        x = functools.reduce(jnp.maximum, slices)
    return x


def normalise_channels(
    norm: Norm,
    groups: int,
    dtype: Any,
    name: str,
    x: jax.Array,
    *,
    epsilon: float = 1e-5,
) -> jax.Array:
    """Normalises x [B, ..., C] inside a compact module. "group" is GroupNorm, None the identity.

    Raises:
      ValueError: The norm is another one, or `groups` does not divide C.
    """
    if norm is None:
        return x
    if norm == "frozen_batch":
        return FrozenBatchNorm(epsilon=epsilon, dtype=dtype, name=name)(x)
    if norm == "group":
        if x.shape[-1] % groups:
            raise ValueError(
                f"groups must divide the number of channels {x.shape[-1]}, got groups={groups}."
            )
        return GroupNorm(groups, epsilon=epsilon, dtype=dtype, name=name)(x)
    raise ValueError(
        f"norm must be 'group', 'frozen_batch' or None, got {norm!r}. Batch statistics mix the "
        "examples of a batch, which breaks private training."
    )


def normalised_conv(
    model: Any,
    name: str,
    width: int,
    size: int,
    stride: int,
    x: jax.Array,
    *,
    epsilon: float = 1e-5,
    **options: Any,
) -> jax.Array:
    """Applies a convolution and its normalisation inside a compact module.

    They have the names `name` and `name`_norm.

    Args:
      model: The module, with the attributes norm, groups and dtype.
      name, width, size, stride: Of the convolution.
      x: [B, H, W, C].
      epsilon: As in `normalise_channels`.
      options: More arguments of `Conv`. The padding is size // 2 by default.
    """
    conv = Conv(
        width,
        (size, size),
        strides=(stride, stride),
        use_bias=model.norm is None,
        dtype=model.dtype,
        kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
        name=name,
        **{"padding": size // 2, **options},
    )
    return normalise_channels(
        model.norm, model.groups, model.dtype, f"{name}_norm", conv(x), epsilon=epsilon
    )


class WSConv(GivenShapes):
    """Convolution whose kernel is standardised per output channel, with a learned gain.

    kernel' = (w - mean) * gain / sqrt(max(var * fan_in, 1e-4)), output = conv(x, kernel') + bias.
    Mean and population variance are over the fan_in = height * width * input channels weights of an
    output channel. This is the weight standardisation of Qiao et al. 2019 as scaled in Brock et al.
    2021 and used by De et al. 2022 (arXiv:2204.13650).

    Attributes:
      features: The number of output channels.
      kernel_size: (height, width).
      strides: (vertical, horizontal).
      padding: "SAME", or the number of pixels added on every side.
      dtype: The computation dtype of the convolution. The kernel is standardised in float32.
    """

    features: int
    kernel_size: Sequence[int]
    strides: Sequence[int] = (1, 1)
    padding: str | int = "SAME"
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H', W', features]."""
        padding: Any = self.padding
        if not isinstance(padding, str):
            padding = [(self.padding, self.padding)] * 2
        shape = (*self.kernel_size, x.shape[-1], self.features)
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        kernel = self.param("kernel", init, shape)
        gain = self.param("gain", nn.initializers.ones, (self.features,))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        fan_in = shape[0] * shape[1] * shape[2]
        centred = kernel - jnp.mean(kernel, axis=(0, 1, 2), keepdims=True)
        var = jnp.mean(jnp.square(centred), axis=(0, 1, 2), keepdims=True)
        scale = gain.reshape(1, 1, 1, -1) * jax.lax.rsqrt(jnp.maximum(var * fan_in, 1e-4))
        kernel = centred * scale
        dtype = self.dtype or x.dtype
        y = jax.lax.conv_general_dilated(
            x.astype(dtype),
            kernel.astype(dtype),
            window_strides=tuple(self.strides),
            padding=padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y + bias.astype(dtype).reshape(1, 1, 1, -1)
