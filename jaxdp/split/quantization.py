"""Uniform symmetric quantisation of a frontend, with scales by a task loss (Eq. 6 to 9).

A *site* is a place where the frontend multiplies: a linear map, the patch embedding, or one of the
two products of attention. Both operands of a site are quantised, except the images under the patch
embedding. Biases, LayerNorm, softmax, GELU and the residual stream stay in floating point.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.files import check_choice, shows_keywords
from jaxdp.models.vit import Product
from jaxdp.split.backbone import Backbone, Params
from jaxdp.split.checks import at_least, check_labels
from jaxdp.transforms import losses
from jaxdp.transforms.exact_scaling import in_units

# softmax - onehot is rounded to 6e-8. Below this, gradients of logits are round-off. The same bound
# holds for a site's gradients relative to the largest ones.
_NO_GRADIENT = 1e-6
_LOGITS = "logits"
_OUTPUT = "output"
_VECTOR_BITS = 8


def quantize(x: jax.Array, scale: float | jax.Array, bits: int = 8) -> jax.Array:
    """Rounds to int8 in units of `scale`, half to even (Eq. 6).

    The result is clamp(round(x / scale), -2^(k-1), 2^(k-1) - 1).

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
    """The scales of a quantised frontend.

    Keys are paths of sites such as "block_0/attention/query".

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSearch:
    """The options of `search_scales`.

    Attributes:
      bits: Bits of weights and activations, in [2, 8].
      metric: "hessian" is Eq. 8. "mse" sets the gradient in it to one.
      fractions: The lowest fraction, an upper bound (not reached), and their number.
      rounds: The largest number of turns of both operands.
      batch_size: Images per backward pass.

    Raises:
      ValueError: An option is out of range.
    """

    bits: int = 8
    metric: Literal["hessian", "mse"] = "hessian"
    fractions: tuple[float, float, int] = (0.01, 1.2, 100)
    rounds: int = 3
    batch_size: int = 4

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        check_choice("metric", self.metric, ("hessian", "mse"))
        low, high, count = self.fractions
        if not (0 < low < high and count >= 1):
            raise ValueError(
                "fractions must be (low, high, count) with 0 < low < high and count >= 1, got "
                f"{self.fractions}."
            )
        at_least(1, rounds=self.rounds, batch_size=self.batch_size)

    @property
    def candidates(self) -> np.ndarray:
        """The fractions, float32 [count]."""
        low, high, count = self.fractions
        step = (high - low) / count
        return low + step * np.arange(count, dtype=np.float32)

    def weights(self, gradient: jax.Array) -> jax.Array:
        """Returns the weights of the errors of a site's output."""
        if self.metric == "hessian":
            return gradient
        return jnp.ones_like(gradient)


class ScaleKeywords(TypedDict, total=False):
    """The fields of `ScaleSearch` as keywords, for editors and type checkers."""

    bits: int
    metric: Literal["hessian", "mse"]
    fractions: tuple[float, float, int]
    rounds: int
    batch_size: int


@shows_keywords(ScaleKeywords, vars(ScaleSearch))
def search_scales(
    backbone: Backbone,
    params: Params,
    images: jax.Array,
    labels: jax.Array,
    **options: Unpack[ScaleKeywords],
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
      options: The attributes of `ScaleSearch`.

    Returns:
      Positive scales: one per site and operand, per head in attention, per channel in the patch
          embedding.

    Raises:
      ValueError: The gradients of a site are numerically zero, so that Eq. 8 cannot distinguish
        candidates. Or labels do not match the images or their range, there are no images, or a
        setting is out of range.
    """
    search = ScaleSearch(**options)
    check_labels(labels, len(images), backbone.num_classes)
    observed = []
    for start in range(0, len(images), search.batch_size):
        rows = slice(start, start + search.batch_size)
        observed.append(observe(backbone, params, images[rows], labels[rows]))
    observations, largest = _joined(observed)
    if search.metric == "hessian":
        # The public code of this metric takes the KL divergence to the model itself. Its gradient
        # is zero, so rounding errors choose its scales.
        _check_gradients({path: float(value) for path, value in largest.items()})
    weights = flatten_dict(params, sep="/")
    candidates = search.candidates
    first = {}
    second = {}
    # Every site sees inputs in full precision, so the order of the sites does not matter.
    for path, site in describe_frontend(backbone).sites.items():
        operands, g = observations[path]
        if site.kind != "product":  # the other operand is a weight
            operands = (*operands, weights[f"{path}/kernel"])
        g = search.weights(g)
        scales = _search(site, search.bits, search.rounds, operands, g, candidates)
        first[path] = scales[0]
        second[path] = scales[1]
    (representations,), g = observations[_OUTPUT]
    g = search.weights(g)
    output = _search_output(search.bits, representations, g, candidates)
    return Scales(first, second, output)


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
    scales = {path: _per_output(units[path], q) for path, q in codes.items()}
    return {path: dequantize(q, scales[path]) for path, q in codes.items()}


jax.tree_util.register_dataclass(
    QuantizedFrontend, data_fields=["codes", "units", "scales"], meta_fields=["bits"]
)


@functools.partial(jax.jit, static_argnames="bits")
def quantize_frontend(front: Params, scales: Scales, *, bits: int = 8) -> QuantizedFrontend:
    """Quantises all parameters of a frontend with scales of `search_scales` for the same bits."""
    _check_bits(bits)
    codes = {}
    units = {}
    for path, leaf in flatten_dict(front, sep="/").items():
        site = path.removesuffix("/kernel")
        if site in scales.second:
            leaf_bits = bits
            units[path] = scales.second[site]
        else:
            # The paper leaves these in floating point. The package would then hold original
            # weights. The largest entry is a code, so LayerNorm scales of one stay one.
            leaf_bits = _VECTOR_BITS
            largest_code = 2 ** (_VECTOR_BITS - 1) - 1
            units[path] = _unit(jnp.max(jnp.abs(leaf)), largest_code)
        codes[path] = quantize(leaf, _per_output(units[path], leaf), leaf_bits)
    return QuantizedFrontend(codes, units, scales, bits)


def quantized_front(
    backbone: Backbone,
    frontend: QuantizedFrontend,
    images: jax.Array,
    *,
    params: Params | None = None,
) -> jax.Array:
    """Computes dequantised representations float32 [B, T, D] by products of quantised operands.

    Args:
      backbone, frontend: The model and its cut, and the frontend's weights and scales.
      images: float32 [B, S, S, C] in [0, 1].
      params: The client's noisy parameters, which replace the dequantised ones. They stay in
        floating point: rounding them to codes again would erase most of the noise.
    """
    scales = frontend.scales
    bits = frontend.bits
    if params is None:
        params = frontend.params
    # Outside the interceptor, which would intercept its calls as well.
    sites = describe_frontend(backbone).sites

    def operands_quantised(
        next_fun: Any,
        args: Any,
        kwargs: Any,
        context: Any,
    ) -> Any:
        path = _path(context)
        if path not in scales.first or sites[path].kind == "embed":
            return next_fun(*args, **kwargs)
        # A linear map has one argument, and its weight is already quantised.
        scales_of_operands = (scales.first[path], scales.second[path])
        rounded = []
        for x, scale in zip(args, scales_of_operands, strict=False):
            spread = _spread(scale, sites[path], x)
            rounded.append(_round(x, spread, bits))
        return next_fun(*rounded, **kwargs)

    with nn.intercept_methods(operands_quantised):
        representations = backbone.front(params, images)
    return _round(representations, scales.output, bits)


# --- Sites --------------------------------------------------------------------------------------


_Operands = tuple[jax.Array, ...]


class Observation(NamedTuple):
    """The operands at a site that are activations, and the gradient with respect to its output."""

    operands: _Operands
    gradient: jax.Array


class Site(NamedTuple):
    """The kind of product at a site. In attention also its equation and number of heads."""

    kind: Literal["dense", "embed", "product"]
    equation: str = ""
    heads: int = 1


class Description(NamedTuple):
    """The shape of a representation, and by path the parameter shapes and sites of a frontend.

    `tokens` is [T, D]. The sites are in the order in which they run.
    """

    tokens: tuple[int, int]
    shapes: Mapping[str, tuple[int, ...]]
    sites: Mapping[str, Site]


@functools.lru_cache
def describe_frontend(backbone: Backbone) -> Description:
    """Traces the frontend of a backbone once."""
    sites: dict[str, Site] = {}

    def note(
        next_fun: Any,
        args: Any,
        kwargs: Any,
        context: Any,
    ) -> Any:
        path = _path(context)
        module = context.module
        if isinstance(module, Product):
            sites[path] = Site("product", module.equation, module.num_heads)
        elif path:
            is_embedding = isinstance(module, nn.Conv)
            sites[path] = Site("embed" if is_embedding else "dense")
        return next_fun(*args, **kwargs)

    def run() -> Any:
        images = jnp.zeros(backbone.images.shape)
        return backbone.model.init_with_output(jax.random.key(0), images, 0, backbone.cut)

    with nn.intercept_methods(note):
        # `run` is a new function in each call. A cached trace would make no calls to `note`.
        representation, variables = jax.eval_shape(run)
    params = flatten_dict(variables["params"], sep="/")
    shapes = {path: leaf.shape for path, leaf in params.items()}
    return Description(representation.shape[1:], shapes, sites)


def _path(context: Any) -> str:
    """Returns the path of the site of a call, or "" if the call is at no site."""
    multiplies = isinstance(context.module, nn.Dense | nn.Conv | Product)
    if context.method_name != "__call__" or not multiplies:
        return ""
    return "/".join(context.module.path)


@functools.partial(jax.jit, static_argnums=0)
def observe(
    backbone: Backbone,
    params: Params,
    images: jax.Array,
    labels: jax.Array,
) -> dict[str, Observation]:
    """Runs the model once forward and once backward, and returns what is at its sites.

    The representation and the logits count as sites here.
    """
    front, back = backbone.divide(params)
    paths = (*describe_frontend(backbone).sites, _OUTPUT, _LOGITS)
    shapes: dict[str, jax.ShapeDtypeStruct] = {}

    def loss(taps: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, _Operands]]:
        operands_of: dict[str, _Operands] = {}

        def tapped(path: str, operands: _Operands, y: jax.Array) -> jax.Array:
            operands_of[path] = operands
            shapes[path] = jax.ShapeDtypeStruct(y.shape, y.dtype)
            # The tap is 0. The gradient by it is the gradient by y.
            return y + taps[path]

        def tap(
            next_fun: Any,
            args: Any,
            kwargs: Any,
            context: Any,
        ) -> Any:
            path = _path(context)
            y = next_fun(*args, **kwargs)
            if path not in taps:
                return y
            return tapped(path, args, y)

        with nn.intercept_methods(tap):
            representations = backbone.front(front, images)
        cut = tapped(_OUTPUT, (representations,), representations)
        logits = backbone.back(back, cut)
        logits = tapped(_LOGITS, (), logits)
        cross_entropy = jax.vmap(losses.softmax_cross_entropy)(logits, labels)
        return cross_entropy.sum(), operands_of

    # A trace with scalar taps finds the shapes of the real taps.
    scalars = {path: jnp.zeros(()) for path in paths}
    jax.eval_shape(lambda: loss(scalars)[0])
    taps = {path: jnp.zeros(y.shape, y.dtype) for path, y in shapes.items()}
    gradients, operands_of = jax.grad(loss, has_aux=True)(taps)
    return {path: Observation(x, gradients[path]) for path, x in operands_of.items()}


@jax.jit
def _joined(
    observed: Sequence[dict[str, Observation]],
) -> tuple[dict[str, Observation], dict[str, jax.Array]]:
    """Returns what all batches observed, and the largest |gradient|, by site."""
    sites: dict[str, Observation] = jax.tree.map(lambda *x: jnp.concatenate(x), *observed)
    sizes = {path: jnp.abs(site.gradient) for path, site in sites.items()}
    return sites, {path: jnp.max(size) for path, size in sizes.items()}


def _check_gradients(largest: Mapping[str, float]) -> None:
    """Raises ValueError if the largest gradient of a site is only round-off."""
    of_sites = {path: value for path, value in largest.items() if path != _LOGITS}
    least = _NO_GRADIENT * max(of_sites.values())
    # A comparison with NaN is false, so a NaN counts as round-off.
    roundoff = [path for path, value in of_sites.items() if not value > least]
    if not largest[_LOGITS] > _NO_GRADIENT:
        roundoff = ["the logits"]
    if roundoff:
        raise ValueError(
            f"the gradients of the loss with respect to {roundoff[0]} are numerically zero, so "
            "they select no scale. Check that the head in params is trained for these labels and "
            "the loss is not zero, or take metric='mse'."
        )


# --- Search -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _search(
    site: Site,
    bits: int,
    rounds: int,
    operands: tuple[jax.Array, ...],
    g: jax.Array,
    candidates: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the scales of both operands of a site (Eq. 8)."""
    a, b = operands
    g = _in_units(g)
    if site.kind == "embed":
        a = _patches(a, b)
        b = b.reshape(-1, b.shape[-1])
    if site.kind != "product":
        g = g.reshape(*a.shape[:-1], b.shape[-1])
    y = _multiply(site, a, b)
    # The scales under which the largest entries are just not clamped.
    largest_a = _grouped(jnp.max, jnp.abs(a), site, per_channel=False)
    largest_b = _grouped(jnp.max, jnp.abs(b), site)
    base_a = _unit(largest_a, _highest(bits))
    base_b = _unit(largest_b, _highest(bits))

    def rounded(x: jax.Array, scale: jax.Array) -> jax.Array:
        return _round(x, _spread(scale, site, x), bits)

    def best(output: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns the best of the candidates, where `output` returns the site's output for one."""

        def score(candidate: jax.Array) -> jax.Array:
            return _grouped(jnp.mean, (g * (output(candidate) - y)) ** 2, site)  # Eq. 8

        scores = jax.lax.map(score, candidates)
        # A head or channel without gradients keeps the scale that clamps nothing.
        indifferent = jnp.max(scores, axis=0) == jnp.min(scores, axis=0)
        return jnp.where(indifferent, 1.0, candidates[jnp.argmin(scores, axis=0)])

    def turn(state: _Turn) -> _Turn:
        images = site.kind == "embed"  # which are not quantised
        left = a if images else rounded(a, state.first * base_a)
        second = best(lambda c: _multiply(site, left, rounded(b, c * base_b)))
        if images:
            return _Turn(state.first, second, state.turns + 1, jnp.array(False))
        right = rounded(b, second * base_b)
        first = best(lambda c: _multiply(site, rounded(a, c * base_a), right))
        return _Turn(first, second, state.turns + 1, jnp.any(first != state.first))

    def goes_on(state: _Turn) -> jax.Array:
        return (state.turns < rounds) & state.changed

    start = _Turn(
        first=jnp.ones_like(base_a),
        second=jnp.ones_like(base_b),
        turns=jnp.array(0),
        changed=jnp.array(True),
    )
    end = jax.lax.while_loop(goes_on, turn, start)
    return end.first * base_a, end.second * base_b


class _Turn(NamedTuple):
    """The fractions of both operands after some turns, and whether the last one changed any."""

    first: jax.Array
    second: jax.Array
    turns: jax.Array
    changed: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def _search_output(
    bits: int,
    y: jax.Array,
    g: jax.Array,
    candidates: jax.Array,
) -> jax.Array:
    """Returns the scale of the representation, which has no operands."""
    base = _unit(jnp.max(jnp.abs(y)), _highest(bits))
    g = _in_units(g)

    def score(candidate: jax.Array) -> jax.Array:
        error = _round(y, candidate * base, bits) - y
        return jnp.mean((g * error) ** 2)

    scores = jax.lax.map(score, candidates)
    return candidates[jnp.argmin(scores)] * base


def _in_units(g: jax.Array) -> jax.Array:
    """Divides by the largest |g|.

    Squares of small gradients would underflow. The minimum stays the same.
    """
    g, _ = in_units(g)
    return g / jnp.max(jnp.abs(g))


def _multiply(site: Site, a: jax.Array, b: jax.Array) -> jax.Array:
    if site.kind == "product":
        return jnp.einsum(site.equation, a, b)
    return a @ b


def _patches(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Reshapes images [B, H, W, C] to patches [B, T, p p C] of a kernel [p, p, C, D]."""
    batch, height, width, channels = images.shape
    p, q, *_ = kernel.shape
    grid = images.reshape(batch, height // p, p, width // q, q, channels)
    return grid.swapaxes(2, 3).reshape(batch, -1, p * q * channels)


def _per_output(scale: jax.Array, kernel: jax.Array) -> jax.Array:
    """Reshapes a scale of the tensor, or scales of its last axis, to broadcast against it."""
    if scale.ndim == 0:
        return scale
    return scale.reshape((1,) * (kernel.ndim - 1) + scale.shape)


def _grouped(
    reduce: Callable[..., jax.Array],
    x: jax.Array,
    site: Site,
    *,
    per_channel: bool = True,
) -> jax.Array:
    """Reduces over the entries that share a scale.

    They are those of a head, of a channel of the embedding, or all.
    """
    if site.kind == "product":
        _, rows, columns = x.shape
        by_head = x.reshape(-1, site.heads, rows * columns)
        return reduce(by_head, axis=(0, 2))
    if site.kind == "embed" and per_channel:
        return reduce(x, axis=tuple(range(x.ndim - 1)))
    return reduce(x)


def _unit(largest: jax.Array, highest: float) -> jax.Array:
    """Returns the scale under which `largest` is `highest` units.

    For 0 any scale fits, and the function returns 1.
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
    half = 2 ** (bits - 1)
    return jnp.clip(jnp.round(x / scale), -half, half - 1)


def _highest(bits: int) -> float:
    """Returns the largest code plus half a unit."""
    return 2 ** (bits - 1) - 0.5


def _check_bits(bits: int) -> None:
    if not (isinstance(bits, int) and 2 <= bits <= 8):
        raise ValueError(f"bits must be an integer in [2, 8], got {bits!r}.")
