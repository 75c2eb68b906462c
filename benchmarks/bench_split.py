"""Times Split Adaptation: the scale search of a ViT-S frontend, and augmented copies made batch by
batch.

    python -m benchmarks run split

Search: `search_scales` on the first block of a ViT-S/16 (9 sites), beside a loop that does the same
work as usual post-training quantisation of ViTs. The loop has a backward pass for every site and
tries one candidate after another in three rounds. With `--frontend`, also `search_scales` alone on
all 8 blocks of the frontend (65 sites). Copies: one pass in batches over the 65 copies of 500
images, made on demand. Beside it, a pass over the same copies from an array that holds them all
(fewer images if they do not fit), and the memory of both."""

import functools
import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from benchmarks import timing
from jaxdp.models import Preprocessing, create
from jaxdp.models.vit import Product
from jaxdp.split import Backbone, Copies, augment_then_noise, search_scales

CANDIDATES = 0.01 + 1.19 / 100 * np.arange(100, dtype=np.float32)
ROUNDS = 3
BITS = 8
COPIES = 65  # of an image, with the image itself
BATCH = 64


class Problem(NamedTuple):
    """An untrained ViT-S/16 and four images, one batch of the search."""

    backbone: Backbone
    params: Any
    images: jax.Array
    labels: jax.Array


def vit_s(cut: int) -> Problem:
    """Returns the problem with a frontend of `cut` blocks."""
    model = create("vit_s16", num_classes=10)
    initial = model.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    images = jax.random.uniform(jax.random.key(1), (4, 224, 224, 3))
    preprocessing = Preprocessing(size=224, mean=(0.5,) * 3, std=(0.5,) * 3)
    backbone = Backbone(model, preprocessing, cut)
    return Problem(backbone, initial["params"], images, jnp.arange(4))


# --- One candidate at a time --------------------------------------------------------------------


def fake(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x, rounded to eight bits of a scale."""
    integers = jnp.round(x / scale)
    return jnp.clip(integers, -128, 127) * scale


def score_of(form: str) -> Callable:
    """Returns the error of a product of rounded operands, whose form is that of `einsum`."""

    @jax.jit
    def score(a, b, y, g, a_scale, b_scale):
        product = jnp.einsum(form, fake(a, a_scale), fake(b, b_scale))
        error = g * (product - y)
        return jnp.mean(error**2)

    return score


SCORES = {
    "linear": score_of("nd,dk->nk"),
    "scores": score_of("nqd,nkd->nqk"),
    "mixture": score_of("nqk,nkd->nqd"),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def observe(
    backbone: Backbone,
    tapped: str,
    tap: jax.Array,
    params,
    images: jax.Array,
    labels: jax.Array,
) -> tuple[dict, jax.Array]:
    """Returns operands and outputs of all sites, and the gradient with respect to the output of
    one."""
    front, back = backbone.divide(params)

    def loss(tap):
        seen = {}

        def see(next_fun, args, kwargs, context):
            y = next_fun(*args, **kwargs)
            is_site = isinstance(context.module, nn.Dense | Product)
            if context.method_name != "__call__" or not is_site:
                return y
            path = "/".join(context.module.path)
            seen[path] = (args, y)
            return y + tap if path == tapped else y

        with nn.intercept_methods(see):
            x = backbone.front(front, images)
        logits = backbone.back(back, x)
        losses = jax.vmap(jaxdp.losses.softmax_cross_entropy)(logits, labels)
        return losses.sum(), seen

    gradient, seen = jax.grad(loss, has_aux=True)(tap)
    return seen, gradient


class Site(NamedTuple):
    """A product of two operands, its result y, the weights g of its errors, and its score."""

    a: jax.Array
    b: jax.Array
    y: jax.Array
    g: jax.Array
    score: Callable

    def at(self, scales) -> float:
        """Returns the error with scales of both operands."""
        return float(self.score(self.a, self.b, self.y, self.g, *scales))


def site_of(path: str, operands: tuple, y: jax.Array, g: jax.Array, front) -> Site:
    """Returns the site of a path, a linear map or a product of activations."""
    if len(operands) == 2:
        kind = "scores" if path.endswith("scores") else "mixture"
        return Site(*operands, y, g, SCORES[kind])
    layer = functools.reduce(operator.getitem, path.split("/"), front)
    kernel = layer["kernel"]
    (inputs,) = operands
    rows = inputs.reshape(-1, inputs.shape[-1])
    return Site(rows, kernel, rows @ kernel, g.reshape(len(rows), -1), SCORES["linear"])


def searched(site: Site) -> tuple[float, float]:
    """Returns the scales of both operands, each searched in turn by one candidate after another."""
    levels = 2 ** (BITS - 1) - 0.5
    tops = [jnp.max(jnp.abs(operand)) / levels for operand in (site.a, site.b)]
    scales = list(tops)
    for _ in range(ROUNDS):
        for which in (1, 0):
            errors = []
            for candidate in CANDIDATES:
                scales[which] = candidate * tops[which]
                errors.append(site.at(scales))
            best = int(np.argmin(errors))
            scales[which] = CANDIDATES[best] * tops[which]
    first, second = scales
    return float(first), float(second)


def loop(problem: Problem) -> dict[str, tuple[float, float]]:
    """Searches scales of the linear maps. For the two products of activations it does as many
    evaluations."""
    backbone, *arguments = problem
    front, _ = backbone.divide(problem.params)
    outputs, _ = observe(backbone, "", jnp.zeros(()), *arguments)
    scales = {}
    for path, (operands, y) in outputs.items():
        _, gradient = observe(backbone, path, jnp.zeros_like(y), *arguments)
        g = gradient / jnp.max(jnp.abs(gradient))
        scales[path] = searched(site_of(path, operands, y, g, front))
    return scales


# --- Copies -------------------------------------------------------------------------------------


@jax.jit
def lazy_batch(copies: Copies, images: jax.Array, numbers: jax.Array) -> jax.Array:
    return copies.batch(images, numbers)


def copies_row(images: int, tokens: int, width: int, rounds: int) -> dict:
    """Times one pass over augmented copies, made on demand and, if they fit, from an array."""
    x = jax.random.normal(jax.random.key(0), (images, tokens, width))
    patches = (tokens - 1) // 4
    options = {"copies": COPIES - 1, "n_patches": patches, "prefix_tokens": 1}
    copies = augment_then_noise(jax.random.key(1), x, laplace_scale=0.0, **options)
    rows, numbers = map(np.asarray, copies.index())
    shuffled = np.random.default_rng(0).permutation(len(rows))
    batches = len(rows) // BATCH
    order = shuffled[: batches * BATCH].reshape(batches, BATCH)

    def batch(part):
        return lazy_batch(copies, rows[part], numbers[part])

    first = order[0]
    program = lazy_batch.lower(copies, rows[first], numbers[first]).compile()
    held_mb = (x.nbytes + copies.neighbors.nbytes) / 1e6
    calls = {"lazy": lambda: [batch(part).sum() for part in order]}
    array_mb = x.nbytes * COPIES / 1e6
    if array_mb < 4000:
        parts = np.split(np.arange(len(rows)), range(4096, len(rows), 4096))
        every = np.concatenate([batch(part) for part in parts])
        calls["array"] = lambda: [jnp.asarray(every[part]).sum() for part in order]
    wall, _ = timing.interleaved(calls, rounds)
    row = {
        "images": images,
        "tokens": tokens,
        "width": width,
        "lazy_mb": held_mb + timing.allocated_mb(program),
        "all_copies_mb": array_mb,
    }
    for name, seconds in wall.items():
        row[f"{name}_ms_per_batch"] = timing.median_ms(seconds) / batches
    if "array" in wall:
        row["ratio"] = timing.median_ratio(wall["lazy"], wall["array"])
    return row


FLAGS = {"rounds": 3, "frontend": (False, "search all 8 blocks as well: minutes")}


def measure(flags) -> dict:
    search = search_row(flags.rounds)
    print(f"search, 1 block: {search}")
    if flags.frontend:
        start = time.perf_counter()
        jax.block_until_ready(search_scales(*vit_s(8)))
        search["frontend_seconds"] = time.perf_counter() - start
        print(f"search, 8 blocks with compilation: {search['frontend_seconds']:.0f} s")
    copies = [copies_row(500, 65, 96, flags.rounds), copies_row(500, 197, 384, flags.rounds)]
    print(*copies, sep="\n")
    return {"rounds": flags.rounds, "search": search, "copies": copies}


def search_row(rounds: int) -> dict:
    """Times the scale search of one block against the usual loop."""
    block = vit_s(1)
    calls = {"search_scales": lambda: search_scales(*block), "loop": lambda: loop(block)}
    wall, cpu = timing.interleaved(calls, rounds)
    return {
        "wall_seconds": {name: float(np.median(seconds)) for name, seconds in wall.items()},
        "wall_ratio": timing.median_ratio(wall["search_scales"], wall["loop"]),
        "cpu_ratio": timing.median_ratio(cpu["search_scales"], cpu["loop"]),
    }
