"""Bounds forty programs of JAX and optax over a box by `jaxdp.interval`, and compares with sampled
values.

    python -m benchmarks run intervals
    python -m benchmarks.evidence results/intervals.md

Every program is a function of six numbers, and every box reaches 1e-4 or 0.1 to both sides of one
point. "Width" is the largest width of a result, "sampled" the largest distance of two of 512 values
at points of the box. A sound bound cannot be narrower. The samples are computed in float64. The
second command writes the tables of the page."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxdp
from jaxdp.transforms import losses
from jaxdp.transforms.intervals import UnsupportedPrimitive

RADII = (1e-4, 0.1)
SAMPLES = 512
POINT = np.array([0.3, -1.1, 2.0, 0.7, -0.2, 1.3], np.float32)
LABEL = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0], np.float32)
SHARES = np.array([0.05, 0.3, 0.1, 0.2, 0.15, 0.2], np.float32)
WEIGHTS = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
TIMES = np.linspace(0.5, 2.0, 7, dtype=np.float32)
PROGRAMS = {}


def program(name: str) -> Callable:
    """Registers a function of six numbers as a program with this name."""

    def register(function):
        PROGRAMS[name] = function
        return function

    return register


def like(z: jax.Array, values: np.ndarray) -> jax.Array:
    return jnp.asarray(values, z.dtype)


def of(loss: Callable, *values: np.ndarray) -> Callable:
    """Returns a loss as a function of its first argument."""

    def loss_of(z):
        others = [like(z, value) for value in values]
        return loss(z, *others)

    return loss_of


def gradient(function: Callable) -> Callable:
    """Returns the gradient of the sum of a function's results."""

    def total(z):
        return function(z).sum()

    return jax.grad(total)


# Losses of optax, as its documentation lists them.
binary = of(optax.sigmoid_binary_cross_entropy, LABEL)
softmax = of(optax.softmax_cross_entropy, SHARES)
PROGRAMS["optax.sigmoid_binary_cross_entropy"] = binary
PROGRAMS["optax.softmax_cross_entropy"] = softmax


@program("optax.softmax_cross_entropy_with_integer_labels")
def integer_labels(z):
    return optax.softmax_cross_entropy_with_integer_labels(z, 2)


PROGRAMS["optax.sigmoid_focal_loss"] = of(optax.sigmoid_focal_loss, LABEL)


@program("optax.kl_divergence")
def kl_divergence(z):
    return optax.kl_divergence(jax.nn.log_softmax(z), like(z, SHARES))


@program("optax.ctc_loss")
def ctc(z):
    logits = jnp.outer(like(z, TIMES), z)
    labels = jnp.array([[1, 2, 4]])
    no_padding = jnp.zeros((1, 7))
    return optax.ctc_loss(logits[None], no_padding, labels, jnp.zeros((1, 3)))


@program("optax.hinge_loss")
def hinge(z):
    signs = 2 * like(z, LABEL) - 1
    return optax.hinge_loss(z, signs)


for _name in ("huber_loss", "l2_loss", "log_cosh", "cosine_distance"):
    PROGRAMS[f"optax.{_name}"] = of(getattr(optax, _name), LABEL)
PROGRAMS["optax.ranking_softmax_loss"] = of(optax.losses.ranking_softmax_loss, LABEL)
PROGRAMS["optax.triplet_margin_loss"] = of(optax.losses.triplet_margin_loss, LABEL, SHARES)


@program("optax.ntxent")
def ntxent(z):
    embeddings = like(z, WEIGHTS[:4]) * z
    return optax.ntxent(embeddings, jnp.array([0, 0, 1, 1]))


# Their gradients, which training with bounds needs.
OURS = {
    "sigmoid_cross_entropy": of(losses.sigmoid_cross_entropy, LABEL),
    "softmax_cross_entropy": of(losses.softmax_cross_entropy, SHARES),
}
PROGRAMS["gradient of optax.sigmoid_binary_cross_entropy"] = gradient(binary)
PROGRAMS["gradient of optax.softmax_cross_entropy"] = gradient(softmax)
PROGRAMS["gradient of optax.ctc_loss"] = gradient(ctc)
for _name, _loss in OURS.items():
    PROGRAMS[f"gradient of jaxdp's {_name}"] = gradient(_loss)

# Functions of JAX.
for _name in ("log_sigmoid", "softplus", "log_softmax", "softmax", "logsumexp"):
    PROGRAMS[f"jax.nn.{_name}"] = getattr(jax.nn, _name)


@program("jnp.logaddexp")
def logaddexp(z):
    return jnp.logaddexp(z, z[::-1])


for _name in ("gelu", "silu", "mish", "elu"):
    PROGRAMS[f"jax.nn.{_name}"] = getattr(jax.nn, _name)
PROGRAMS["jnp.linalg.norm"] = jnp.linalg.norm
for _name in ("std", "sort", "argsort"):
    PROGRAMS[f"jnp.{_name}"] = getattr(jnp, _name)


@program("lax.sort by a key")
def sort_by_key(z):
    _, values = lax.sort((z, z[::-1]), num_keys=1)
    return values


@program("lax.top_k")
def top_k(z):
    return lax.top_k(z, 2)


@program("jnp.fmod")
def fmod(z):
    return jnp.fmod(z, 0.75)


PROGRAMS["jnp.cumprod"] = jnp.cumprod
PROGRAMS["lax.cumlogsumexp"] = lax.cumlogsumexp

# Parts of networks.


@program("a dense layer with tanh")
def layer(z):
    return jnp.tanh(like(z, WEIGHTS) @ z)


@program("normalisation")
def normalised(z):
    return (z - z.mean()) * lax.rsqrt(z.var() + 1e-3)


@program("attention")
def attention(z):
    x = like(z, WEIGHTS) * z
    scores = x @ x.T / math.sqrt(6)
    return jax.nn.softmax(scores) @ x


@program("a scan of ten layers")
def ten_layers(z):
    def one_layer(h, _):
        return 0.5 * layer(h), None

    last, _ = lax.scan(one_layer, z, length=10)
    return last


@program("max pooling")
def max_pooling(z):
    return lax.reduce_window(z, -jnp.inf, lax.max, (2,), (1,), "VALID")


# Programs that are refused.


@program("jnp.fft.fft")
def fourier(z):
    return jnp.abs(jnp.fft.fft(z))


@program("jnp.linalg.cholesky")
def cholesky(z):
    positive = jnp.outer(z, z) + 9 * jnp.eye(6)
    return jnp.linalg.cholesky(positive)


@program("lax.ragged_dot")
def ragged_dot(z):
    groups = like(z, WEIGHTS[:2, None])
    return lax.ragged_dot(z[:, None], groups, jnp.array([2, 4]))


PROGRAMS["jnp.median"] = jnp.median


@program("gradient of jnp.sort")
@gradient
def weighted_sort(z):
    return jnp.sort(z) * like(z, SHARES)


def is_interval(x) -> bool:
    return isinstance(x, jaxdp.Interval)


def flat(arrays: Iterable) -> np.ndarray:
    """Returns all numbers of some arrays, in float64."""
    return np.concatenate([np.ravel(np.float64(array)) for array in arrays])


def widths(function: Callable, radius: float) -> dict:
    """Returns the widths of one program over one box, and whether all samples lie inside."""
    reach = np.float32(radius)
    box = jaxdp.Interval(POINT - reach, POINT + reach)
    try:
        bounds = jax.jit(jaxdp.interval(function))(box)
    except UnsupportedPrimitive as error:
        refused, *_ = str(error).split(" It arises")
        return {"refused": refused}
    intervals = jax.tree.leaves(bounds, is_leaf=is_interval)
    lower = flat(x.lower for x in intervals)
    upper = flat(x.upper for x in intervals)
    values = sampled(function, box)
    inside = (lower <= values) & (values <= upper)
    width = float(np.max(upper - lower))
    return {
        "width": width if math.isfinite(width) else None,
        "sampled": float(np.max(np.ptp(values, axis=0))),
        "sound": bool(np.all(inside)),
    }


def sampled(function: Callable, box: jaxdp.Interval) -> np.ndarray:
    """Returns the values of a program at points of a box, in float64, a row for each point."""
    low = np.asarray(box.lower, np.float64)
    high = np.asarray(box.upper, np.float64)
    shares = np.random.default_rng(1).random((SAMPLES, POINT.size))
    corners = SAMPLES // 2  # a monotone program has its extremes there
    shares[:corners] = shares[:corners] > 0.5
    points = low + shares * (high - low)
    with jax.enable_x64(True):
        values = jax.jit(jax.vmap(function))(points)
        arrays = jax.device_get(jax.tree.leaves(values))
    columns = [np.float64(array).reshape(SAMPLES, -1) for array in arrays]
    return np.concatenate(columns, axis=1)


def tables(report) -> dict:
    """Returns the programs that have bounds, and those that are refused."""
    bounded, refused = [], []
    for name, by_radius in report["programs"].items():
        found = [by_radius[str(radius)] for radius in RADII]
        if any("refused" in result for result in found):
            refused.append({"program": name} | found[0])
        else:
            bounded.append(_bounded_line(name, found))
    return {"bounded": bounded, "refused": refused}


def _bounded_line(name: str, found: list[dict]) -> dict[str, str]:
    """Returns the line of a program, from its results for each radius."""
    line = {"program": name}
    for radius, result in zip(RADII, found, strict=True):
        width = result["width"]
        line[f"width, {radius:g}"] = "infinite" if width is None else f"{width:.2g}"
        line[f"sampled, {radius:g}"] = f"{result['sampled']:.2g}"
    sound = all(result["sound"] for result in found)
    line["sound"] = "yes" if sound else "no"
    return line


def measure(flags) -> dict:
    programs = {}
    for name, function in PROGRAMS.items():
        programs[name] = {str(radius): widths(function, radius) for radius in RADII}
        print(name, programs[name], flush=True)
    return {"optax": optax.__version__, "programs": programs}
