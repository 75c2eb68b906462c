"""Uniform symmetric quantisation of a frontend, with scales that a task loss chooses (section 3.3.1, Eq. 6 to 9).

A *site* is where the frontend multiplies: a linear map, the patch embedding, or one of the two products of attention.
Both operands of a site are quantised, except the images under the patch embedding. Everything else stays in floating
point: biases, LayerNorm, softmax, GELU and the residual stream.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.models.vit import Product
from jaxdp.split.backbone import Backbone, Params
from jaxdp.split.checks import at_least, check_labels, one_of
from jaxdp.transforms import losses

# softmax - onehot is rounded to 6e-8: logits' gradients below this, or a site's beside the largest one, are round-off.
_NO_GRADIENT = 1e-6
_LOGITS = "logits"
_OUTPUT = "output"
_VECTOR_BITS = 8


def quantize(x: jax.Array, scale: float | jax.Array, bits: int = 8) -> jax.Array:
    """Rounds to int8 in units of `scale`, half to even: clamp(round(x / scale), -2^(k-1), 2^(k-1) - 1) (Eq. 6).

    The scale is positive and broadcasts against x, floating point of any shape.

    Raises:
      ValueError: bits k outside [2, 8].
    """
    _check_bits(bits)
    return _codes(x, scale, bits).astype(jnp.int8)


def dequantize(q: jax.Array, scale: float | jax.Array) -> jax.Array:
    """Returns q * scale in float32 (Eq. 9)."""
    return q.astype(jnp.float32) * scale


class Scales(NamedTuple):
    """How to quantise a frontend; the keys are paths of sites such as "block_0/attention/query".

    Attributes:
      first: of the operand that is an activation; of the first of two. [] or, in attention, [heads].
      second: of the weight, [] or (patch embedding) [channels]; of the second activation, [heads].
      output: of the representation at the cut, [].
    """

    first: Mapping[str, jax.Array]
    second: Mapping[str, jax.Array]
    output: jax.Array


def search_scales(
    backbone: Backbone,
    params: Params,
    images: jax.Array,
    labels: jax.Array,
    *,
    bits: int = 8,
    metric: Literal["hessian", "mse"] = "hessian",
    fractions: tuple[float, float, int] = (0.01, 1.2, 100),
    rounds: int = 3,
    batch_size: int = 4,
) -> Scales:
    """Chooses the scales of all sites of a frontend on labelled PUBLIC images.

    For every site it minimises the mean of (g (yhat - y))^2 (Eq. 8): y is the site's output in full precision, yhat
    that of the quantised operands, g the gradient of the cross-entropy with respect to y. Zero taps on all outputs give
    every g in one backward pass. Every site sees inputs in full precision. Candidates are fixed fractions of
    max|x| / (2^(k-1) - 1/2). The operands take turns, the weight first, until a turn of both changes nothing. The first
    minimum wins.

    Args:
      backbone, params: the whole model, with a head for `labels`.
      images: float32 [n, S, S, C] in [0, 1]; 32 in the paper.
      labels: int [n] in [0, num_classes).
      bits: of weights and activations, in [2, 8].
      metric: "hessian" is Eq. 8; "mse" sets g to one.
      fractions: lowest, upper bound (not reached) and how many.
      rounds: at most so many turns of both operands.
      batch_size: images per backward pass.

    Returns:
      The scales, each positive; one per site and operand, per head in attention, per channel in the patch embedding.

    Raises:
      ValueError: the gradients of a site are numerically zero, so that Eq. 8 cannot tell candidates apart; labels of
        another number than images or outside their range, no images, bits outside [2, 8], an unknown metric, fractions
        that are not positive, no rounds or batches without images.
    """
    _check_bits(bits)
    one_of(("hessian", "mse"), metric=metric)
    low, high, count = fractions
    if not (0 < low < high and count >= 1):
        raise ValueError(f"fractions must be (low, high, count) with 0 < low < high and count >= 1, got {fractions}")
    at_least(1, rounds=rounds, batch_size=batch_size)
    check_labels(labels, len(images), backbone.num_classes)
    candidates = low + (high - low) / count * jnp.arange(count, dtype=jnp.float32)

    batches = [slice(i, i + batch_size) for i in range(0, len(images), batch_size)]
    observed = [_observe(backbone, params, images[rows], labels[rows]) for rows in batches]
    sites: dict[str, _Observed] = jax.tree.map(lambda *parts: jnp.concatenate(parts), *observed)
    weights, specs, found = flatten_dict(params, sep="/"), describe_frontend(backbone).sites, {}
    _, of_logits = sites.pop(_LOGITS)
    if metric == "hessian":
        _check_gradients({path: float(jnp.max(jnp.abs(g))) for path, (_, g) in sites.items()}, of_logits)
    for path, (operands, g) in sites.items():
        # The largest |g| as unit: squares of small gradients would underflow, and the minimum does not move.
        g = g / jnp.max(jnp.abs(g)) if metric == "hessian" else jnp.ones_like(g)
        if path == _OUTPUT:
            output = _search_output(bits, *operands, g, candidates)
        else:
            pair = operands if len(operands) == 2 else (*operands, weights[f"{path}/kernel"])
            found[path] = _search(specs[path], bits, rounds, pair, g, candidates)
    return Scales({k: v[0] for k, v in found.items()}, {k: v[1] for k, v in found.items()}, output)


@dataclasses.dataclass(frozen=True)
class QuantizedFrontend:
    """What the server ships: nothing but integers, and the scales they are in.

    Attributes:
      codes: int8 for every parameter of the frontend, by path.
      units: the scale of each, [] or (patch embedding) [channels].
      scales: of the sites; those of activations are used in the forward pass.
      bits: of kernels and activations. Biases, LayerNorm, tokens and positions have 8: no search weighs them.
    """

    codes: Mapping[str, jax.Array]
    units: Mapping[str, jax.Array]
    scales: Scales
    bits: int

    @property
    def params(self) -> dict[str, Any]:
        """The dequantised parameters of the frontend, as `Backbone.front` takes them."""
        floats = {path: dequantize(q, _per_output(self.units[path], q)) for path, q in self.codes.items()}
        return unflatten_dict(floats, sep="/")


jax.tree_util.register_dataclass(QuantizedFrontend, data_fields=["codes", "units", "scales"], meta_fields=["bits"])


def quantize_frontend(front: Params, scales: Scales, *, bits: int = 8) -> QuantizedFrontend:
    """Quantises all parameters of a frontend (`Backbone.divide`) with scales of `search_scales` for the same bits."""
    _check_bits(bits)
    codes, units = {}, {}
    for path, leaf in flatten_dict(front, sep="/").items():
        site = path.removesuffix("/kernel")
        searched = site in scales.second
        # Where none was searched, the largest entry is a code: a LayerNorm's scales of one stay one.
        units[path] = scales.second[site] if searched else _unit(jnp.max(jnp.abs(leaf)), 2 ** (_VECTOR_BITS - 1) - 1)
        codes[path] = quantize(leaf, _per_output(units[path], leaf), bits if searched else _VECTOR_BITS)
    return QuantizedFrontend(codes, units, scales, bits)


def quantized_front(
    backbone: Backbone, frontend: QuantizedFrontend, images: jax.Array, *, params: Params | None = None
) -> jax.Array:
    """Representations of a quantised frontend, all of whose products have quantised operands.

    Args:
      backbone, frontend: the model and where it is cut, its weights and scales.
      images: float32 [B, S, S, C] in [0, 1].
      params: the client's noisy parameters in place of the dequantised ones. They stay in floating point: rounding
        them to codes again would erase most of the noise.

    Returns:
      float32 [B, T, D], dequantised.
    """
    scales, bits = frontend.scales, frontend.bits
    specs = describe_frontend(backbone).sites  # here, not below, where the calls that it makes would come to it again

    def operands_quantised(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        path = _path(context)
        if path not in scales.first or specs[path].kind == "embed":
            return next_fun(*args, **kwargs)
        # A linear map has one argument: its weight is quantised already.
        both = zip(args, (scales.first[path], scales.second[path]), strict=False)
        return next_fun(*(_round(x, _spread(scale, specs[path], x), bits) for x, scale in both), **kwargs)

    with nn.intercept_methods(operands_quantised):
        representations = backbone.front(frontend.params if params is None else params, images)
    return _round(representations, scales.output, bits)


# --- Sites ------------------------------------------------------------------------------------------------------

# Operands that are activations, and the gradient with respect to the output.
_Observed = tuple[tuple[jax.Array, ...], jax.Array]


class Site(NamedTuple):
    """What kind of product a site is; in attention, its equation and number of heads."""

    kind: Literal["dense", "embed", "product"]
    equation: str = ""
    heads: int = 1


class Description(NamedTuple):
    """The shape [T, D] of a representation, the shapes of a frontend's parameters, its sites in order; by path."""

    tokens: tuple[int, int]
    shapes: Mapping[str, tuple[int, ...]]
    sites: Mapping[str, Site]


@functools.lru_cache
def describe_frontend(backbone: Backbone) -> Description:
    """Traces the frontend of a backbone once."""
    sites: dict[str, Site] = {}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        path, module = _path(context), context.module
        if isinstance(module, Product):
            sites[path] = Site("product", module.equation, module.num_heads)
        elif path:
            sites[path] = Site("embed" if isinstance(module, nn.Conv) else "dense")
        return next_fun(*args, **kwargs)

    def run() -> Any:
        images = jnp.zeros(backbone.images.shape)
        return backbone.model.init_with_output(jax.random.key(0), images, 0, backbone.cut)

    with nn.intercept_methods(note):
        representation, variables = jax.eval_shape(run)  # a new function: with a cached trace, no call would pass here
    shapes = {path: leaf.shape for path, leaf in flatten_dict(variables["params"], sep="/").items()}
    return Description(representation.shape[1:], shapes, sites)


def _path(context: Any) -> str:
    """The site that a call belongs to; "" for none."""
    if context.method_name != "__call__" or not isinstance(context.module, nn.Dense | nn.Conv | Product):
        return ""
    return "/".join(context.module.path)


@functools.partial(jax.jit, static_argnums=0)
def _observe(backbone: Backbone, params: Params, images: jax.Array, labels: jax.Array) -> dict[str, _Observed]:
    """Runs the model once forward and once backward."""
    front, back = backbone.divide(params)
    paths = (*describe_frontend(backbone).sites, _OUTPUT, _LOGITS)
    shapes: dict[str, jax.ShapeDtypeStruct] = {}

    def loss(taps: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, tuple[jax.Array, ...]]]:
        seen: dict[str, tuple[jax.Array, ...]] = {}

        def tapped(path: str, operands: tuple[jax.Array, ...], y: jax.Array) -> jax.Array:
            seen[path], shapes[path] = operands, jax.ShapeDtypeStruct(y.shape, y.dtype)
            return y + taps[path]

        def tap(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            path = _path(context)
            y = next_fun(*args, **kwargs)
            return tapped(path, args, y) if path in taps else y

        with nn.intercept_methods(tap):
            representations = backbone.front(front, images)
        logits = backbone.back(back, tapped(_OUTPUT, (representations,), representations))
        logits = tapped(_LOGITS, (), logits)
        return jax.vmap(losses.softmax_cross_entropy)(logits, labels).sum(), seen

    # Scalar taps show the shapes of the real ones.
    jax.eval_shape(lambda: loss({path: jnp.zeros(()) for path in paths})[0])
    gradients, seen = jax.grad(loss, has_aux=True)({path: jnp.zeros(y.shape, y.dtype) for path, y in shapes.items()})
    return {path: (seen[path], gradients[path]) for path in seen}


def _check_gradients(largest: Mapping[str, float], of_logits: jax.Array) -> None:
    """ValueError if a site's gradients are round-off, given the largest of each."""
    if not float(jnp.max(jnp.abs(of_logits))) > _NO_GRADIENT:
        site = "the logits"
    else:
        found = (path for path, value in largest.items() if not value > _NO_GRADIENT * max(largest.values()))
        site = next(found, "")
    if site:
        raise ValueError(
            f"the gradients of the loss with respect to {site} are numerically zero: any scale would do. Check "
            "that the head in params is trained for these labels and the loss not zero, or take metric='mse'"
        )


# --- Search -----------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _search(
    site: Site, bits: int, rounds: int, operands: tuple[jax.Array, jax.Array], g: jax.Array, candidates: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The scales of both operands of a site (Eq. 8)."""
    a, b = operands
    if site.kind == "embed":
        a, b = _patches(a, b), b.reshape(-1, b.shape[-1])
    g = g.reshape(*a.shape[:-1], b.shape[-1]) if site.kind != "product" else g
    y = _multiply(site, a, b)
    largest = (_grouped(jnp.max, jnp.abs(x), site, per_channel=x is b) for x in (a, b))
    bases = tuple(_unit(x, _highest(bits)) for x in largest)

    def best(which: int, other: jax.Array) -> jax.Array:
        """The fraction of the largest scale that is best for one operand, the other one being quantised."""
        x = (a, b)[which]

        def score(candidate: jax.Array) -> jax.Array:
            rounded = _round(x, _spread(candidate * bases[which], site, x), bits)
            yhat = _multiply(site, rounded, other) if which == 0 else _multiply(site, other, rounded)
            return _grouped(jnp.mean, (g * (yhat - y)) ** 2, site)  # Eq. 8

        scores = jax.lax.map(score, candidates)
        # A head or channel that no gradient reaches keeps the scale under which nothing is clamped.
        indifferent = jnp.max(scores, axis=0) == jnp.min(scores, axis=0)
        return jnp.where(indifferent, 1.0, candidates[jnp.argmin(scores, axis=0)])

    def turn(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first, _, count, _ = state
        left = a if site.kind == "embed" else _round(a, _spread(first * bases[0], site, a), bits)
        second = best(1, left)
        if site.kind == "embed":
            return first, second, count + 1, jnp.array(False)
        new = best(0, _round(b, _spread(second * bases[1], site, b), bits))
        return new, second, count + 1, jnp.any(new != first)

    start = (*(jnp.ones_like(base) for base in bases), jnp.array(0), jnp.array(True))
    first, second, *_ = jax.lax.while_loop(lambda s: (s[2] < rounds) & s[3], turn, start)
    return first * bases[0], second * bases[1]


@functools.partial(jax.jit, static_argnums=0)
def _search_output(bits: int, y: jax.Array, g: jax.Array, candidates: jax.Array) -> jax.Array:
    """The scale of the representation, which has no operands."""
    base = _unit(jnp.max(jnp.abs(y)), _highest(bits))
    scores = jax.lax.map(lambda c: jnp.mean((g * (_round(y, c * base, bits) - y)) ** 2), candidates)
    return candidates[jnp.argmin(scores)] * base


def _multiply(site: Site, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(site.equation, a, b) if site.kind == "product" else a @ b


def _patches(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Images [B, H, W, C] as patches [B, T, p p C] under a kernel [p, p, C, D] whose stride is p."""
    batch, height, width, channels = images.shape
    p, q = kernel.shape[:2]
    x = images.reshape(batch, height // p, p, width // q, q, channels).swapaxes(2, 3)
    return x.reshape(batch, -1, p * q * channels)


def _per_output(scale: jax.Array, kernel: jax.Array) -> jax.Array:
    """A scale of the tensor, or scales of its last axis, to be broadcast against it."""
    return scale if scale.ndim == 0 else scale.reshape((1,) * (kernel.ndim - 1) + scale.shape)


def _grouped(reduce: Callable[..., jax.Array], x: jax.Array, site: Site, *, per_channel: bool = True) -> jax.Array:
    """Reduces over the entries whose scales are chosen together: of a head, a channel of the embedding, or all."""
    if site.kind == "product":
        return reduce(x.reshape(-1, site.heads, x.shape[1] * x.shape[2]), axis=(0, 2))
    return reduce(x, axis=tuple(range(x.ndim - 1))) if site.kind == "embed" and per_channel else reduce(x)


def _unit(largest: jax.Array, highest: float) -> jax.Array:
    """The scale under which `largest` is `highest` units; 1 for 0, where any scale would do."""
    return jnp.where(largest > 0, largest / highest, 1.0)


def _spread(scale: jax.Array, site: Site, x: jax.Array) -> jax.Array:
    """The scale of every entry of x, to be broadcast."""
    if site.kind == "product":
        return jnp.tile(scale, len(x) // site.heads)[:, None, None]
    return _per_output(scale, x)


def _round(x: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Quantises and dequantises, in float32."""
    return _codes(x, scale, bits) * scale


def _codes(x: jax.Array, scale: float | jax.Array, bits: int) -> jax.Array:
    return jnp.clip(jnp.round(x / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _highest(bits: int) -> float:
    """Half a unit above the largest code."""
    return 2 ** (bits - 1) - 0.5


def _check_bits(bits: int) -> None:
    if not (isinstance(bits, int) and 2 <= bits <= 8):
        raise ValueError(f"bits must be an integer in [2, 8], got {bits!r}")
