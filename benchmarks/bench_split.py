"""Times Split Adaptation: the scale search of a ViT-S frontend, and augmented copies made batch by
batch.

    python -m benchmarks run split --output .bench/split.json

Search: `search_scales` on the first block of a ViT-S/16 (9 sites), beside a loop that does the same
work as usual post-training quantisation of ViTs. The loop has a backward pass for every site and
tries one candidate after another in three rounds. With `--frontend`, also `search_scales` alone on
all 8 blocks of the frontend (65 sites). Copies: one pass in batches over the 65 copies of 500
images, made on demand. Beside it, a pass over the same copies from an array that holds them all
(fewer images if they do not fit), and the memory of both."""

import functools
import time
from collections.abc import Callable
from typing import Any

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
ROUNDS, BITS = 3, 8


def vit_s(cut: int) -> tuple[Backbone, Any, jax.Array, jax.Array]:
    """Returns an untrained ViT-S/16 and four images, one batch of the search."""
    model = create("vit_s16", num_classes=10)
    params = model.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3)))["params"]
    images = jax.random.uniform(jax.random.key(1), (4, 224, 224, 3))
    backbone = Backbone(model, Preprocessing(size=224, mean=(0.5,) * 3, std=(0.5,) * 3), cut)
    return backbone, params, images, jnp.arange(4)


# --- One candidate at a time --------------------------------------------------------------------


def fake(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(x / scale), -128, 127) * scale


def score_of(form: str) -> Callable:
    """Returns the error of a product of rounded operands, whose form is that of `einsum`."""

    @jax.jit
    def score(a, b, y, g, a_scale, b_scale):
        product = jnp.einsum(form, fake(a, a_scale), fake(b, b_scale))
        return jnp.mean((g * (product - y)) ** 2)

    return score


linear_score, product_score, mixture_score = map(
    score_of, ("nd,dk->nk", "nqd,nkd->nqk", "nqk,nkd->nqd")
)


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
            if context.method_name == "__call__" and isinstance(context.module, nn.Dense | Product):
                path = "/".join(context.module.path)
                seen[path] = (args, y)
                return y + tap if path == tapped else y
            return y

        with nn.intercept_methods(see):
            x = backbone.front(front, images)
        return jax.vmap(jaxdp.losses.softmax_cross_entropy)(
            backbone.back(back, x), labels
        ).sum(), seen

    gradient, seen = jax.grad(loss, has_aux=True)(tap)
    return seen, gradient


def loop(
    backbone: Backbone, params, images: jax.Array, labels: jax.Array
) -> dict[str, tuple[float, float]]:
    """Searches scales of the linear maps. For the two products of activations it does as many
    evaluations."""
    front, _ = backbone.divide(params)
    outputs, _ = observe(backbone, "", jnp.zeros(()), params, images, labels)
    scales_of = {}
    for path, (args, y) in outputs.items():
        _, g = observe(backbone, path, jnp.zeros_like(y), params, images, labels)
        g = g / jnp.max(jnp.abs(g))
        if len(args) == 1:
            w = front
            for name in path.split("/"):
                w = w[name]
            a, b = args[0].reshape(-1, args[0].shape[-1]), w["kernel"]
            score = linear_score
            y, g = a @ b, g.reshape(len(a), -1)
        else:
            a, b = args
            score = product_score if path.endswith("scores") else mixture_score
        tops = [jnp.max(jnp.abs(z)) / (2 ** (BITS - 1) - 0.5) for z in (a, b)]
        scales = list(tops)
        for _ in range(ROUNDS):
            for which in (1, 0):
                values = []
                for candidate in CANDIDATES:
                    scales[which] = candidate * tops[which]
                    values.append(float(score(a, b, y, g, *scales)))
                scales[which] = CANDIDATES[int(np.argmin(values))] * tops[which]
        scales_of[path] = (float(scales[0]), float(scales[1]))
    return scales_of


# --- Copies -------------------------------------------------------------------------------------


@jax.jit
def lazy_batch(copies: Copies, images: jax.Array, numbers: jax.Array) -> jax.Array:
    return copies.batch(images, numbers)


def passes(
    images: int, tokens: int, width: int, batch: int
) -> tuple[dict[str, Callable], float, float]:
    """Times one pass over all copies either way, with the megabytes of both."""
    x = jax.random.normal(jax.random.key(0), (images, tokens, width))
    options = {"copies": 64, "n_patches": (tokens - 1) // 4, "prefix_tokens": 1}
    copies = augment_then_noise(jax.random.key(1), x, laplace_scale=0.0, **options)
    rows, numbers = (np.asarray(column) for column in copies.index())
    shuffled = np.random.default_rng(0).permutation(len(rows))
    order = shuffled[: len(rows) // batch * batch].reshape(-1, batch)
    compiled = lazy_batch.lower(copies, rows[order[0]], numbers[order[0]]).compile()

    def lazily():
        return [lazy_batch(copies, rows[part], numbers[part]).sum() for part in order]

    calls = {"lazy": lazily}
    whole = x.nbytes * 65 / 1e6
    if whole < 4000:
        parts = np.split(np.arange(len(rows)), range(4096, len(rows), 4096))
        every = np.concatenate([lazy_batch(copies, rows[p], numbers[p]) for p in parts])
        calls["array"] = lambda: [jnp.asarray(every[part]).sum() for part in order]
    return calls, (x.nbytes + copies.neighbors.nbytes) / 1e6 + timing.allocated_mb(compiled), whole


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
    calls = {"search_scales": lambda: search_scales(*block), "loop": lambda: loop(*block)}
    wall, cpu = timing.interleaved(calls, rounds)
    return {
        "wall_seconds": {name: float(np.median(seconds)) for name, seconds in wall.items()},
        "wall_ratio": timing.median_ratio(wall["search_scales"], wall["loop"]),
        "cpu_ratio": timing.median_ratio(cpu["search_scales"], cpu["loop"]),
    }


def copies_row(images: int, tokens: int, width: int, rounds: int) -> dict:
    """Times one pass over augmented copies, made on demand and from an array."""
    calls, lazy_mb, whole_mb = passes(images, tokens, width, 64)
    wall, _ = timing.interleaved(calls, rounds)
    row = {
        "images": images,
        "tokens": tokens,
        "width": width,
        "lazy_mb": lazy_mb,
        "all_copies_mb": whole_mb,
    }
    batches = images * 65 // 64
    for name, seconds in wall.items():
        row[f"{name}_ms_per_batch"] = timing.median_ms(seconds) / batches
    if "array" in wall:
        row["ratio"] = timing.median_ratio(wall["lazy"], wall["array"])
    return row
