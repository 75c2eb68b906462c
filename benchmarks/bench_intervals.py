"""Bounds forty programs of JAX and optax over a box by `jaxdp.interval`, and compares with sampled
values.

    python -m benchmarks run intervals
    python -m benchmarks.evidence results/intervals.md

Every program is a function of six numbers, and every box reaches 1e-4 or 0.1 to both sides of one
point. "Width" is the largest width of a result, "sampled" the largest distance of two of 512 values
at points of the box. A sound bound cannot be narrower. The samples are computed in float64. The
second command writes the tables of the page."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxdp
from benchmarks import pages
from jaxdp.transforms import losses
from jaxdp.transforms.intervals import UnsupportedPrimitive

RADII, SAMPLES = (1e-4, 0.1), 512
POINT = np.array([0.3, -1.1, 2.0, 0.7, -0.2, 1.3], np.float32)
LABEL = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0], np.float32)
SHARES = np.array([0.05, 0.3, 0.1, 0.2, 0.15, 0.2], np.float32)
WEIGHTS = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
TIMES = np.linspace(0.5, 2.0, 7, dtype=np.float32)


def ctc(z: jax.Array) -> jax.Array:
    logits = jnp.outer(like(z, TIMES), z)[None]
    return optax.ctc_loss(logits, jnp.zeros((1, 7)), jnp.array([[1, 2, 4]]), jnp.zeros((1, 3)))


def like(z: jax.Array, values: np.ndarray) -> jax.Array:
    return jnp.asarray(values, z.dtype)


def layer(z: jax.Array) -> jax.Array:
    return jnp.tanh(like(z, WEIGHTS) @ z)


def attention(z: jax.Array) -> jax.Array:
    x = like(z, WEIGHTS) * z
    return jax.nn.softmax(x @ x.T / math.sqrt(6)) @ x


def ten_layers(z: jax.Array) -> jax.Array:
    return lax.scan(lambda h, _: (0.5 * layer(h), None), z, length=10)[0]


def normalised(z: jax.Array) -> jax.Array:
    return (z - z.mean()) * lax.rsqrt(z.var() + 1e-3)


def of(loss: Callable, *values: np.ndarray) -> Callable:
    """Returns a loss as a function of its first argument."""
    return lambda z: loss(z, *(like(z, value) for value in values))


def gradient(program: Callable) -> Callable:
    return jax.grad(lambda z: program(z).sum())


binary = of(optax.sigmoid_binary_cross_entropy, LABEL)
softmax = of(optax.softmax_cross_entropy, SHARES)
integer_labels = optax.softmax_cross_entropy_with_integer_labels
PROGRAMS = {
    # Losses of optax, as its documentation lists them.
    "optax.sigmoid_binary_cross_entropy": binary,
    "optax.softmax_cross_entropy": softmax,
    "optax.softmax_cross_entropy_with_integer_labels": lambda z: integer_labels(z, 2),
    "optax.sigmoid_focal_loss": of(optax.sigmoid_focal_loss, LABEL),
    "optax.kl_divergence": lambda z: optax.kl_divergence(jax.nn.log_softmax(z), like(z, SHARES)),
    "optax.ctc_loss": ctc,
    "optax.hinge_loss": lambda z: optax.hinge_loss(z, 2 * like(z, LABEL) - 1),
    "optax.huber_loss": of(optax.huber_loss, LABEL),
    "optax.l2_loss": of(optax.l2_loss, LABEL),
    "optax.log_cosh": of(optax.log_cosh, LABEL),
    "optax.cosine_distance": of(optax.cosine_distance, LABEL),
    "optax.ranking_softmax_loss": of(optax.losses.ranking_softmax_loss, LABEL),
    "optax.triplet_margin_loss": of(optax.losses.triplet_margin_loss, LABEL, SHARES),
    "optax.ntxent": lambda z: optax.ntxent(like(z, WEIGHTS[:4]) * z, jnp.array([0, 0, 1, 1])),
    # Their gradients, which training with bounds needs.
    "gradient of optax.sigmoid_binary_cross_entropy": gradient(binary),
    "gradient of optax.softmax_cross_entropy": gradient(softmax),
    "gradient of optax.ctc_loss": gradient(ctc),
    "gradient of jaxdp's sigmoid_cross_entropy": gradient(of(losses.sigmoid_cross_entropy, LABEL)),
    "gradient of jaxdp's softmax_cross_entropy": gradient(of(losses.softmax_cross_entropy, SHARES)),
    # Functions of JAX.
    "jax.nn.log_sigmoid": jax.nn.log_sigmoid,
    "jax.nn.softplus": jax.nn.softplus,
    "jax.nn.log_softmax": jax.nn.log_softmax,
    "jax.nn.softmax": jax.nn.softmax,
    "jax.nn.logsumexp": jax.nn.logsumexp,
    "jnp.logaddexp": lambda z: jnp.logaddexp(z, z[::-1]),
    "jax.nn.gelu": jax.nn.gelu,
    "jax.nn.silu": jax.nn.silu,
    "jax.nn.mish": jax.nn.mish,
    "jax.nn.elu": jax.nn.elu,
    "jnp.linalg.norm": jnp.linalg.norm,
    "jnp.std": jnp.std,
    "jnp.sort": jnp.sort,
    "jnp.argsort": jnp.argsort,
    "lax.sort by a key": lambda z: lax.sort((z, z[::-1]), num_keys=1)[1],
    "lax.top_k": lambda z: lax.top_k(z, 2),
    "jnp.fmod": lambda z: jnp.fmod(z, 0.75),
    "jnp.cumprod": jnp.cumprod,
    "lax.cumlogsumexp": lax.cumlogsumexp,
    # Parts of networks.
    "a dense layer with tanh": layer,
    "normalisation": normalised,
    "attention": attention,
    "a scan of ten layers": ten_layers,
    "max pooling": lambda z: lax.reduce_window(z, -jnp.inf, lax.max, (2,), (1,), "VALID"),
    # Programs that are refused.
    "jnp.fft.fft": lambda z: jnp.abs(jnp.fft.fft(z)),
    "jnp.linalg.cholesky": lambda z: jnp.linalg.cholesky(jnp.outer(z, z) + 9 * jnp.eye(6)),
    "lax.ragged_dot": lambda z: lax.ragged_dot(
        z[:, None], like(z, WEIGHTS[:2, None]), jnp.array([2, 4])
    ),
    "jnp.median": jnp.median,
    "gradient of jnp.sort": gradient(lambda z: jnp.sort(z) * like(z, SHARES)),
}


def flat(x) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(x)])


def widths(program: Callable, radius: float) -> dict:
    """Returns the widths of one program over one box, and whether all samples lie inside."""
    box = jaxdp.Interval(POINT - np.float32(radius), POINT + np.float32(radius))
    try:
        bounds = jax.jit(jaxdp.interval(program))(box)
    except UnsupportedPrimitive as error:
        return {"refused": str(error).split(" It arises")[0]}
    intervals = jax.tree.leaves(bounds, is_leaf=lambda x: isinstance(x, jaxdp.Interval))
    lower = flat([x.lower for x in intervals])
    upper = flat([x.upper for x in intervals])
    values = sampled(program, box)
    width = float(np.max(upper - lower))
    return {
        "width": width if math.isfinite(width) else None,
        "sampled": float(np.max(np.ptp(values, axis=0))),
        "sound": bool(np.all((values >= lower) & (values <= upper))),
    }


def sampled(program: Callable, box: jaxdp.Interval) -> np.ndarray:
    """Returns the values of a program at points of a box, in float64, a row for each point."""
    low = np.asarray(box.lower, np.float64)
    high = np.asarray(box.upper, np.float64)
    shares = np.random.default_rng(1).random((SAMPLES, POINT.size))
    corners = SAMPLES // 2  # a monotone program has its extremes there
    shares[:corners] = shares[:corners] > 0.5
    points = low + shares * (high - low)
    with jax.enable_x64(True):
        values = jax.device_get(jax.jit(jax.vmap(program))(points))
    columns = [np.asarray(x, np.float64).reshape(SAMPLES, -1) for x in jax.tree.leaves(values)]
    return np.concatenate(columns, 1)


def tables(report) -> dict:
    rows, refused = [], []
    for name, by_radius in report["programs"].items():
        results = [by_radius[str(radius)] for radius in RADII]
        if any("refused" in result for result in results):
            refused.append({"program": name} | results[0])
            continue
        row = {"program": name}
        for radius, result in zip(RADII, results, strict=True):
            width = result["width"]
            row[f"width, {radius:g}"] = "infinite" if width is None else f"{width:.2g}"
            row[f"sampled, {radius:g}"] = f"{result['sampled']:.2g}"
        sound = all(result["sound"] for result in results)
        rows.append(row | {"sound": "yes" if sound else "no"})
    return {"bounded": pages.padded(rows), "refused": pages.padded(refused)}


def measure(flags) -> dict:
    programs = {}
    for name, program in PROGRAMS.items():
        programs[name] = {str(radius): widths(program, radius) for radius in RADII}
        print(name, programs[name], flush=True)
    return {"optax": optax.__version__, "programs": programs}
