"""Times the operations of our models in several exact forms, beside Flax and PyTorch.

    python -m benchmarks run ops --rounds 15 --update

"forward" is the operation, and "backward" the operation with the gradients of its weights and
inputs. "ours" is the form in `jaxdp.models`. All forms of an operation are compiled first and timed
in turn. "cpu" is processor time of all threads. The rows of PyTorch need torch and opacus. It runs
on one thread, because its threads wait in loops, which counts as processor time."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from jaxdp import models
from jaxdp.memory import keep_freed_memory
from jaxdp.models import vit

Call = Callable[[], Any]
_GELU = functools.partial(nn.gelu, approximate=False)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation in several forms.

    Attributes:
      shape: The shape of the input, float32, or int32 below `tokens`.
      forms: Modules or functions of the input by name, for JAX. All have the same value.
      torch: Makes the module or function for PyTorch. Images have their channels first there.
      only: "input" or "weight" for this gradient alone.
    """

    shape: tuple[int, ...]
    forms: dict
    torch: Callable
    tokens: int = 0
    only: str = ""


class MLP(nn.Module):
    """The MLP of a transformer block, over [B, T, D] or over flattened tokens."""

    flatten: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.reshape(-1, x.shape[-1]) if self.flatten else x
        return nn.Dense(x.shape[-1])(_GELU(nn.Dense(4 * x.shape[-1])(y))).reshape(x.shape)


class Textbook(nn.Module):
    """Normalises each group of channels by the mean squared difference from its mean."""

    groups: int
    axes: tuple[int, ...]  # that are normalised, after channels are split into groups

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        y = x.reshape(*x.shape[:-1], self.groups, -1)
        deviation = jnp.sqrt(y.var(self.axes, keepdims=True) + 1e-6)
        y = (y - y.mean(self.axes, keepdims=True)) / deviation
        return y.reshape(x.shape) * scale + bias


def windows(x: jax.Array, size: int, stride: int, padding: int = 0) -> jax.Array:
    edges = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    x = jnp.pad(x, edges, constant_values=-jnp.inf)
    end = x.shape[1] - size + 1
    corners = []
    for i, j in itertools.product(range(size), repeat=2):
        corners.append(x[:, i : i + end : stride, j : j + end : stride])
    return functools.reduce(jnp.maximum, corners)


def pools(size: int, stride: int, padding: int = 0) -> dict:
    flax = functools.partial(
        nn.max_pool,
        window_shape=(size, size),
        strides=(stride, stride),
        padding=((padding, padding),) * 2,
    )
    given = {"size": size, "stride": stride, "padding": padding}
    ours, slices = (functools.partial(pool, **given) for pool in (models.max_pool, windows))
    return {"ours": ours, "Flax": flax, "slices in both directions": slices}


def torch_mlp():
    from torch import nn as tnn

    return tnn.Sequential(tnn.Linear(192, 768), tnn.GELU(), tnn.Linear(768, 192))


def torch_attention():
    from benchmarks import torch_steps

    return torch_steps.Attention(192, 3, causal=False)


def torch_layer(name: str, *args, **options) -> Callable:
    def make():
        import torch

        return getattr(torch.nn, name)(*args, **options)

    return make


def operations() -> dict[str, Operation]:
    tokens, images, small, large = (
        (32, 64, 192),
        (64, 32, 32, 16),
        (256, 13, 13, 16),
        (16, 56, 56, 64),
    )
    mlp = {"ours and Flax": MLP(False), "flattened tokens": MLP(True)}
    attention = {"ours": vit.Attention(3), "Flax": nn.MultiHeadDotProductAttention(3)}
    layer_norm = {"ours and Flax": nn.LayerNorm(), "textbook": Textbook(1, (3,))}
    group_norm = {
        "ours": models.GroupNorm(8),
        "Flax": nn.GroupNorm(8),
        "textbook": Textbook(8, (1, 2, 4)),
    }
    embedding = {"ours and Flax": nn.Embed(4096, 256)}
    torch_embedding = torch_layer("Embedding", 4096, 256)
    conv = {"ours and Flax": nn.Conv(16, (3, 3), padding=1, use_bias=False)}
    torch_conv = torch_layer("Conv2d", 16, 16, 3, padding=1, bias=False)
    of = Operation
    return {
        "MLP 192-768-192 with GELU, [32, 64, 192]": of(tokens, mlp, torch_mlp),
        "attention, 3 heads, [32, 64, 192]": of(tokens, attention, torch_attention),
        "LayerNorm, [32, 64, 192]": of(tokens, layer_norm, torch_layer("LayerNorm", 192, eps=1e-6)),
        "GroupNorm, 8 groups, [64, 32, 32, 16]": of(
            images, group_norm, torch_layer("GroupNorm", 8, 16)
        ),
        "max-pool 2x2/1, [256, 13, 13, 16]": of(small, pools(2, 1), torch_layer("MaxPool2d", 2, 1)),
        "max-pool 3x3/2, [16, 56, 56, 64]": of(
            large, pools(3, 2, 1), torch_layer("MaxPool2d", 3, 2, 1)
        ),
        "embedding 4096 x 256, [16, 128]": of((16, 128), embedding, torch_embedding, tokens=4096),
        "convolution 3x3, [64, 32, 32, 16]": of(images, conv, torch_conv),
        "its input gradient": of(images, conv, torch_conv, only="input"),
        "its weight gradient": of(images, conv, torch_conv, only="weight"),
    }


def inputs_of(operation: Operation) -> np.ndarray:
    generator = np.random.default_rng(0)
    if operation.tokens:
        return generator.integers(operation.tokens, size=operation.shape, dtype=np.int32)
    return generator.standard_normal(operation.shape, np.float32)


def jax_calls(operation: Operation, form) -> tuple[dict[str, Call], Any]:
    """Returns the compiled calls of a form, and its output."""
    x = jnp.asarray(inputs_of(operation))
    params = {}
    apply = lambda params, x: form(x)  # noqa: E731
    if isinstance(form, nn.Module):
        params, apply = form.init(jax.random.key(0), x), form.apply
    out = apply(params, x)
    cotangent = jnp.ones_like(out)

    def backward(params, x, only=""):
        if operation.tokens or only == "weight":
            return jax.vjp(lambda p: apply(p, x), params)[1](cotangent)
        if only == "input":
            return jax.vjp(lambda x: apply(params, x), x)[1](cotangent)
        return jax.vjp(apply, params, x)[1](cotangent)

    def value_and_grads(params, x):
        return apply(params, x), backward(params, x)

    if operation.only:
        functions = {"backward": functools.partial(backward, only=operation.only)}
    else:
        functions = {"forward": apply, "backward": value_and_grads}
    return {name: timing.compiled(f, params, x) for name, f in functions.items()}, out


def torch_calls(operation: Operation) -> dict[str, Call]:
    import torch

    torch.set_num_threads(1)
    module, x = operation.torch(), torch.from_numpy(inputs_of(operation))
    x = x.long() if operation.tokens else x
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    weights = list(module.parameters())
    leaves = [] if operation.only == "input" else list(weights)
    if operation.only != "weight" and not operation.tokens:
        leaves.append(x)
    for leaf in (*weights, x):
        if leaf.is_floating_point():
            leaf.requires_grad_(any(leaf is used for used in leaves))
    cotangent = torch.ones_like(module(x))

    def forward():
        with torch.no_grad():
            module(x)

    def value_and_grads():
        torch.autograd.grad(module(x), leaves, cotangent)

    def gradients():
        torch.autograd.grad(out, leaves, cotangent, retain_graph=True)

    if operation.only:
        out = module(x)
        return {"backward": gradients}
    return {"forward": forward, "backward": value_and_grads}


def measured(operation: Operation, rounds: int, torch: bool) -> list[dict]:
    """Returns a row for every form."""
    calls, outputs = {}, []
    for name, form in operation.forms.items():
        calls[name], out = jax_calls(operation, form)
        outputs.append(out)
        if not isinstance(form, nn.MultiHeadDotProductAttention):  # which has other parameters
            np.testing.assert_allclose(out, outputs[0], rtol=1e-4, atol=1e-4)
    if torch:
        calls["PyTorch"] = torch_calls(operation)
    flat = {(name, kind): call for name, kinds in calls.items() for kind, call in kinds.items()}
    wall, cpu = timing.interleaved(flat, rounds)
    rows = {name: {"form": name} for name in calls}
    for name, kind in flat:
        rows[name][f"{kind}_ms"] = timing.median_ms(wall[name, kind])
        rows[name][f"{kind}_cpu_ms"] = timing.median_ms(cpu[name, kind])
    return list(rows.values())


FLAGS = {"rounds": 15}


def measure(flags) -> dict:
    torch = not timing.missing("torch", "opacus")
    keep_freed_memory()
    every = operations()
    rows = timing.each(every, lambda name: measured(every[name], flags.rounds, torch))
    return {"rounds": flags.rounds, "peers": torch, "operations": rows}
