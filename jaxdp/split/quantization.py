"""Uniform symmetric quantisation of a frontend, with scales that a task loss chooses (section
3.3.1, Eq. 6 to 9).

A *site* is a place where the frontend multiplies: a linear map, the patch embedding, or one of the
two products of attention. Both operands of a site are quantised, except the images under the patch
embedding. Biases, LayerNorm, softmax, GELU and the residual stream stay in floating point.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.models.vit import Product
from jaxdp.split.backbone import Backbone, Params
from jaxdp.split.checks import at_least, check_labels, one_of
from jaxdp.transforms import losses
from jaxdp.transforms.lengths import in_units

# softmax - onehot is rounded to 6e-8. Below this, gradients of logits are round-off. The same bound
# holds for a site's gradients relative to the largest ones.
_NO_GRADIENT = 1e-6
_LOGITS = "logits"
_OUTPUT = "output"
_VECTOR_BITS = 8


def quantize(x: jax.Array, scale: float | jax.Array, bits: int = 8) -> jax.Array:
    """Rounds to int8 in units of `scale`, half to even: clamp(round(x / scale), -2^(k-1), 2^(k-1) -
    1) (Eq. 6).

    x is floating point of any shape. The scale is positive and broadcasts against x.

    Raises:
      ValueError: bits k is outside [2, 8].
    """
    _check_bits(bits)
    return _codes(x, scale, bits).astype(jnp.int8)


def dequantize(q: jax.Array, scale: float | jax.Array) -> jax.Array:
    """Returns q * scale in float32 (Eq. 9)."""
    return q.astype(jnp.float32) * scale


class Scales(NamedTuple):
    """The scales of a quantised frontend. Keys are paths of sites such as
    "block_0/attention/query".

    Attributes:
      first: Scale of the activation operand, or of the first of two: [], or [heads] in attention.
      second: Scale of the weight: [], or [channels] in the patch embedding. In attention, of the
          second activation:
        [heads].
      output: Scale of the representation at the cut, [].
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

    For every site it minimises the mean of (g (yhat - y))^2 (Eq. 8). Here y is the site's output in
    full precision, yhat the output of the quantised operands, and g the gradient of the
    cross-entropy with respect to y. Zero taps on all outputs give every g in one backward pass.
    Every site sees inputs in full precision. Candidates are fixed fractions of max|x| / (2^(k-1) -
    1/2). The search alternates between the operands, the weight first, until a turn of both changes
    nothing. The first minimum wins.

    Args:
      backbone, params: The whole model, with a head for `labels`.
      images: float32 [n, S, S, C] in [0, 1]. The paper uses 32.
      labels: int [n] in [0, num_classes).
      bits: Bits of weights and activations, in [2, 8].
      metric: "hessian" is Eq. 8. "mse" sets g to one.
      fractions: The lowest fraction, an upper bound (not reached), and their number.
      rounds: The largest number of turns of both operands.
      batch_size: Images per backward pass.

    Returns:
      Positive scales: one per site and operand, per head in attention, per channel in the patch
          embedding.

    Raises:
      ValueError: The gradients of a site are numerically zero, so that Eq. 8 cannot distinguish
        candidates. Or labels do not match the images or their range, there are no images, or a
        setting is out of range.
    """
    _check_bits(bits)
    one_of(("hessian", "mse"), metric=metric)
    low, high, count = fractions
    if not (0 < low < high and count >= 1):
        raise ValueError(
            "fractions must be (low, high, count) with 0 < low < high and count >= 1, got "
            f"{fractions}."
        )
    at_least(1, rounds=rounds, batch_size=batch_size)
    check_labels(labels, len(images), backbone.num_classes)
    candidates = low + (high - low) / count * np.arange(count, dtype=np.float32)

    batches = [slice(i, i + batch_size) for i in range(0, len(images), batch_size)]
    observed = [observe(backbone, params, images[rows], labels[rows]) for rows in batches]
    sites, largest = _joined(observed)
    weights, specs, found = flatten_dict(params, sep="/"), describe_frontend(backbone).sites, {}
    if metric == "hessian":
        _check_gradients({path: float(value) for path, value in largest.items()})
    del sites[_LOGITS]
    for path, (operands, g) in sites.items():
        g = g if metric == "hessian" else jnp.ones_like(g)
        if path == _OUTPUT:
            output = _search_output(bits, *operands, g, candidates)
        else:
            pair = operands if len(operands) == 2 else (*operands, weights[f"{path}/kernel"])
            found[path] = _search(specs[path], bits, rounds, pair, g, candidates)
    return Scales({k: v[0] for k, v in found.items()}, {k: v[1] for k, v in found.items()}, output)


@dataclasses.dataclass(frozen=True)
class QuantizedFrontend:
    """The frontend that the server ships: integers and their scales only.

    Attributes:
      codes: int8 codes of every parameter of the frontend, by path.
      units: The scale of each parameter: [], or [channels] in the patch embedding.
      scales: The scales of the sites. The forward pass uses the scales of activations.
      bits: Bits of kernels and activations. Biases, LayerNorm, tokens and positions always have 8.
    """

    codes: Mapping[str, jax.Array]
    units: Mapping[str, jax.Array]
    scales: Scales
    bits: int

    @property
    def params(self) -> dict[str, Any]:
        """The dequantised parameters of the frontend, as `Backbone.front` takes them."""
        return unflatten_dict(_dequantized(self.codes, self.units), sep="/")


@jax.jit
def _dequantized(
    codes: Mapping[str, jax.Array], units: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    return {path: dequantize(q, _per_output(units[path], q)) for path, q in codes.items()}


jax.tree_util.register_dataclass(
    QuantizedFrontend, data_fields=["codes", "units", "scales"], meta_fields=["bits"]
)


@functools.partial(jax.jit, static_argnames="bits")
def quantize_frontend(front: Params, scales: Scales, *, bits: int = 8) -> QuantizedFrontend:
    """Quantises all parameters of a frontend (`Backbone.divide`) with scales of `search_scales` for
    the same bits.
    """
    _check_bits(bits)
    codes, units = {}, {}
    for path, leaf in flatten_dict(front, sep="/").items():
        site = path.removesuffix("/kernel")
        searched = site in scales.second
        # Without a searched scale the largest entry is a code, so LayerNorm scales of one stay one.
        units[path] = (
            scales.second[site]
            if searched
            else _unit(jnp.max(jnp.abs(leaf)), 2 ** (_VECTOR_BITS - 1) - 1)
        )
        codes[path] = quantize(
            leaf, _per_output(units[path], leaf), bits if searched else _VECTOR_BITS
        )
    return QuantizedFrontend(codes, units, scales, bits)


def quantized_front(
    backbone: Backbone,
    frontend: QuantizedFrontend,
    images: jax.Array,
    *,
    params: Params | None = None,
) -> jax.Array:
    """Computes dequantised representations float32 [B, T, D] of a frontend whose products have
    quantised operands.

    Args:
      backbone, frontend: The model and its cut, and the frontend's weights and scales.
      images: float32 [B, S, S, C] in [0, 1].
      params: The client's noisy parameters, which replace the dequantised ones. They stay in
        floating point: rounding them to codes again would erase most of the noise.
    """
    scales, bits = frontend.scales, frontend.bits
    specs = describe_frontend(
        backbone
    ).sites  # outside the interceptor, which would intercept its calls as well

    def operands_quantised(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        path = _path(context)
        if path not in scales.first or specs[path].kind == "embed":
            return next_fun(*args, **kwargs)
        # A linear map has one argument, and its weight is already quantised.
        both = zip(args, (scales.first[path], scales.second[path]), strict=False)
        return next_fun(
            *(_round(x, _spread(scale, specs[path], x), bits) for x, scale in both), **kwargs
        )

    with nn.intercept_methods(operands_quantised):
        representations = backbone.front(frontend.params if params is None else params, images)
    return _round(representations, scales.output, bits)


# --- Sites --------------------------------------------------------------------------------------

# The operands that are activations, and the gradient with respect to the output.
_Observed = tuple[tuple[jax.Array, ...], jax.Array]


class Site(NamedTuple):
    """The kind of product at a site. In attention also its equation and number of heads."""

    kind: Literal["dense", "embed", "product"]
    equation: str = ""
    heads: int = 1


class Description(NamedTuple):
    """The shape [T, D] of a representation, and by path the frontend's parameter shapes and its
    sites in order.
    """

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
        representation, variables = jax.eval_shape(
            run
        )  # a new function, since a cached trace makes no calls to note
    shapes = {path: leaf.shape for path, leaf in flatten_dict(variables["params"], sep="/").items()}
    return Description(representation.shape[1:], shapes, sites)


def _path(context: Any) -> str:
    """Returns the path of the site of a call, or "" if the call is at no site."""
    if context.method_name != "__call__" or not isinstance(
        context.module, nn.Dense | nn.Conv | Product
    ):
        return ""
    return "/".join(context.module.path)


@functools.partial(jax.jit, static_argnums=0)
def observe(
    backbone: Backbone, params: Params, images: jax.Array, labels: jax.Array
) -> dict[str, _Observed]:
    """Runs the model once forward and once backward. Returns operands and gradients by site."""
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

    # A trace with scalar taps finds the shapes of the real taps.
    jax.eval_shape(lambda: loss({path: jnp.zeros(()) for path in paths})[0])
    gradients, seen = jax.grad(loss, has_aux=True)(
        {path: jnp.zeros(y.shape, y.dtype) for path, y in shapes.items()}
    )
    return {path: (seen[path], gradients[path]) for path in seen}


@jax.jit
def _joined(
    observed: Sequence[dict[str, _Observed]],
) -> tuple[dict[str, _Observed], dict[str, jax.Array]]:
    """Returns what all batches observed, and the largest |gradient|, by site."""
    sites: dict[str, _Observed] = jax.tree.map(lambda *parts: jnp.concatenate(parts), *observed)
    return sites, {path: jnp.max(jnp.abs(g)) for path, (_, g) in sites.items()}


def _check_gradients(largest: Mapping[str, float]) -> None:
    """Raises ValueError if the largest gradient of a site is only round-off."""
    of_sites = {path: value for path, value in largest.items() if path != _LOGITS}
    if not largest[_LOGITS] > _NO_GRADIENT:
        site = "the logits"
    else:
        found = (
            path
            for path, value in of_sites.items()
            if not value > _NO_GRADIENT * max(of_sites.values())
        )
        site = next(found, "")
    if site:
        raise ValueError(
            f"the gradients of the loss with respect to {site} are numerically zero, so they "
            "select no scale. Check that the head in params is trained for these labels and the "
            "loss is not zero, or take metric='mse'."
        )


# --- Search -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _search(
    site: Site,
    bits: int,
    rounds: int,
    operands: tuple[jax.Array, jax.Array],
    g: jax.Array,
    candidates: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the scales of both operands of a site (Eq. 8)."""
    (a, b), g = operands, _in_units(g)
    if site.kind == "embed":
        a, b = _patches(a, b), b.reshape(-1, b.shape[-1])
    g = g.reshape(*a.shape[:-1], b.shape[-1]) if site.kind != "product" else g
    y = _multiply(site, a, b)
    largest = (_grouped(jnp.max, jnp.abs(x), site, per_channel=x is b) for x in (a, b))
    bases = tuple(_unit(x, _highest(bits)) for x in largest)

    def best(which: int, other: jax.Array) -> jax.Array:
        """Returns the best fraction of the largest scale for one operand, given the other one
        quantised.
        """
        x = (a, b)[which]

        def score(candidate: jax.Array) -> jax.Array:
            rounded = _round(x, _spread(candidate * bases[which], site, x), bits)
            yhat = (
                _multiply(site, rounded, other) if which == 0 else _multiply(site, other, rounded)
            )
            return _grouped(jnp.mean, (g * (yhat - y)) ** 2, site)  # Eq. 8

        scores = jax.lax.map(score, candidates)
        # A head or channel without gradients keeps the scale that clamps nothing.
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
    """Returns the scale of the representation, which has no operands."""
    base, g = _unit(jnp.max(jnp.abs(y)), _highest(bits)), _in_units(g)
    scores = jax.lax.map(lambda c: jnp.mean((g * (_round(y, c * base, bits) - y)) ** 2), candidates)
    return candidates[jnp.argmin(scores)] * base


def _in_units(g: jax.Array) -> jax.Array:
    """Divides by the largest |g|. Squares of small gradients would underflow. The minimum stays the
    same.
    """
    g, _ = in_units(g)
    return g / jnp.max(jnp.abs(g))


def _multiply(site: Site, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(site.equation, a, b) if site.kind == "product" else a @ b


def _patches(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Reshapes images [B, H, W, C] to patches [B, T, p p C] of a kernel [p, p, C, D] with stride
    p.
    """
    batch, height, width, channels = images.shape
    p, q = kernel.shape[:2]
    x = images.reshape(batch, height // p, p, width // q, q, channels).swapaxes(2, 3)
    return x.reshape(batch, -1, p * q * channels)


def _per_output(scale: jax.Array, kernel: jax.Array) -> jax.Array:
    """Reshapes a scale of the tensor, or scales of its last axis, to broadcast against it."""
    return scale if scale.ndim == 0 else scale.reshape((1,) * (kernel.ndim - 1) + scale.shape)


def _grouped(
    reduce: Callable[..., jax.Array], x: jax.Array, site: Site, *, per_channel: bool = True
) -> jax.Array:
    """Reduces over the entries that share a scale: of a head, of a channel of the embedding, or
    all.
    """
    if site.kind == "product":
        return reduce(x.reshape(-1, site.heads, x.shape[1] * x.shape[2]), axis=(0, 2))
    return (
        reduce(x, axis=tuple(range(x.ndim - 1)))
        if site.kind == "embed" and per_channel
        else reduce(x)
    )


def _unit(largest: jax.Array, highest: float) -> jax.Array:
    """Returns the scale under which `largest` is `highest` units. For 0 any scale fits, and the
    function returns 1.
    """
    return jnp.where(largest > 0, largest / highest, 1.0)


def _spread(scale: jax.Array, site: Site, x: jax.Array) -> jax.Array:
    """Returns the scale of every entry of x, for broadcasting."""
    if site.kind == "product":
        return jnp.tile(scale, len(x) // site.heads)[:, None, None]
    return _per_output(scale, x)


def _round(x: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Quantises and dequantises in float32."""
    return _codes(x, scale, bits) * scale


def _codes(x: jax.Array, scale: float | jax.Array, bits: int) -> jax.Array:
    return jnp.clip(jnp.round(x / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _highest(bits: int) -> float:
    """Returns the largest code plus half a unit."""
    return 2 ** (bits - 1) - 0.5


def _check_bits(bits: int) -> None:
    if not (isinstance(bits, int) and 2 <= bits <= 8):
        raise ValueError(f"bits must be an integer in [2, 8], got {bits!r}.")
