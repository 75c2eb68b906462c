"""Every clip of the project on one table of designed rows, from the smallest float32 to NaN.

`python -m tests.ranges` prints what breaks a bound, as JSON, under the flags of XLA that the
environment has. A clip is a function that maps rows [n, 2] to what each row contributes, [n, m],
with the bound of its norm."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import data, finetune, split, tta
from jaxdp.prediction.sums import Grid
from jaxdp.recalibration import METHODS as RECALIBRATIONS
from jaxdp.recalibration.protocol import Records, summands
from jaxdp.split.noisy_upload import PrivateRelease, Projection
from jaxdp.transforms import noise
from jaxdp.transforms.clip_rules import CLIP_RULES, clip_factors

SMALL = (1e-45, 1e-38, 2.0**-126, 1e-30, 1e-19, 1e-12)
LARGE = (1.8e19, 1e25, 2.0**126, 1e38, 3.4028235e38)
VALUES = (0.0, *SMALL, 1.0, -1.0, *LARGE, -1e38, np.inf, -np.inf, np.nan)
ROWS = np.array(list(itertools.product(VALUES, VALUES)), np.float32)
FINITE = np.isfinite(ROWS).all(1)
ROUNDING = 2e-5  # what the docstrings of the engines allow

Clip = Callable[[], tuple[np.ndarray, float]]
CLIPS: dict[str, Clip] = {}


def excess(contributions: np.ndarray, bound: float, order: int = 2) -> list[str]:
    """Returns the rows that contribute more than the bound, or anything although they are not
    finite."""
    found = np.asarray(contributions, np.float64).reshape(len(ROWS), -1)
    norms = np.linalg.norm(found, ord=order, axis=1)
    wrong = ~(norms <= bound * (1 + ROUNDING)) | (~FINITE & ~(norms == 0))
    return [
        f"{row.tolist()}: {norm:g}" for row, norm in zip(ROWS[wrong], norms[wrong], strict=True)
    ]


# --- The engines --------------------------------------------------------------------------------


def loss(params, row):
    """A loss whose gradients are products of a tiny and a huge number, at one and at several
    positions."""
    once = jnp.vdot(params["once"] @ row, row[::-1])
    tokens = jnp.stack([row, row[::-1], row])
    several = jnp.sum((tokens @ params["several"]) * tokens[::-1])
    return once + several + params["bias"] @ row


PARAMS = {"once": jnp.zeros((2, 2)), "several": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}


def flat(tree):
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


def one_by_one(contribution):
    """Returns what each row contributes, by one compiled program."""
    compiled = jax.jit(contribution)
    return np.stack([np.asarray(compiled(row), np.float64) for row in ROWS])


def engine(name, rule, clip_norm):
    clipped = jaxdp.clipped_grad(loss, clip_norm=clip_norm, engine=name, clip_rule=rule)
    return one_by_one(lambda row: flat(clipped(PARAMS, row[None]).grads)), clip_norm


CLIPS["engine vmap"] = functools.partial(engine, "vmap", "global", 1e-8)
CLIPS["engine bookkeeping"] = functools.partial(engine, "bookkeeping", "global", 1.0)
CLIPS["engine auto"] = functools.partial(engine, "auto", "automatic", 1e8)


# --- The methods of training and adaptation -----------------------------------------------------


def batch_loss(params, example):
    return loss(params, example["features"])


def query(make, carried, **settings):
    """Returns the contribution of a row to the sum of a method, and its sensitivity."""
    sampler = data.PoissonSampler(len(ROWS), 0.5)
    terms = {"clip_norm": 1.0, "noise_multiplier": 1.0, "physical_batch_size": 1, **settings}
    sums = make(batch_loss, optax.sgd(1.0), sampler=sampler, **terms).query

    def contribution(row):
        batch = {"features": row[None], "label": jnp.zeros(1, jnp.int32)}
        return flat(sums.sums(PARAMS, carried, batch, jnp.ones(1, bool), None).total)

    return one_by_one(contribution), sums.sensitivity("add_remove")


def gep():
    """The sum of GEP in the subspace of the first entry of each leaf and of all others together."""
    anchors = {"features": np.eye(2, dtype=np.float32), "label": np.zeros(2, np.int32)}
    sizes = [leaf.size for leaf in jax.tree.leaves(PARAMS)]
    first = [np.eye(1, size).ravel() for size in sizes]
    columns = np.stack([np.concatenate(first), np.concatenate([1 - x for x in first])], axis=1)
    columns = (columns / np.linalg.norm(columns, axis=0)).astype(np.float32)
    basis = [jnp.asarray(part) for part in np.split(columns, np.cumsum(sizes)[:-1])]
    return query(
        finetune.gep, basis, residual_clip_norm=0.7, anchors=anchors, basis_size=2, groups=1
    )


def adp_clip():
    """The sum of AdpClip. A row that is not finite adds its count only: it is above the clip
    norm."""
    contributions, bound = query(finetune.adp_clip, jnp.float32(1), count_noise=2.0)
    assert (np.linalg.norm(contributions[~FINITE], axis=1) < 0.26).all()
    return np.where(FINITE[:, None], contributions, 0), bound


def private_tent():
    """The step of private Tent on batches of one row, with a learning rate of 1 and no noise."""

    def apply_fn(params, images):
        return images * params["norm"]["scale"][None] + params["norm"]["bias"][None]

    params = {"norm": {"scale": jnp.ones(2), "bias": jnp.zeros(2)}}
    form = tta.private(tta.Tent(), clip_norm=0.25, noise_multiplier=0.0)
    adapter = tta.Adapter(apply_fn, params, form, optax.sgd(1.0), adapted=lambda path, leaf: True)
    state = adapter.init(noise.stream(bytes(16), "test"))
    found = []
    for row in ROWS:
        after, _ = adapter.step(state, row[None])
        found.append(
            np.asarray(flat(after.params), np.float64) - np.asarray(flat(params), np.float64)
        )
    return np.stack(found), 0.25


CLIPS["GEP"] = gep
CLIPS["AdpClip"] = adp_clip
CLIPS["private Tent"] = private_tent


# --- Clips of vectors and numbers ---------------------------------------------------------------


def rule(name, clip_norm):
    """A rule that sees the norm of a row of one number."""
    norms = np.abs(ROWS[:, 0])
    factors = np.asarray(
        clip_factors(CLIP_RULES[name], jnp.asarray(norms), clip_norm, clip_norm), np.float64
    )
    products = np.float64(np.where(np.isfinite(norms), norms, 1)) * factors
    return np.where(FINITE, products, np.where(np.isfinite(norms), 0, factors)), clip_norm


def upload(clip_norm):
    """The whole release of Split Adaptation, without noise, onto all directions."""
    release = PrivateRelease(
        clip_norm=clip_norm, noise_multiplier=0.0, label_epsilon=1.0, num_classes=2
    )
    projection = Projection(np.zeros((1, 2), np.float32), np.eye(2, dtype=np.float32))
    labels = np.zeros(len(ROWS), np.int64)
    key = noise.stream(bytes(16), "test")
    return release.release(
        key, ROWS[:, None], labels=labels, projection=projection
    ).features, clip_norm


def asked(name):
    """The first question of a recalibration method, over its sensitivity in the sum of absolute
    values."""
    method = RECALIBRATIONS[name]()
    records = Records(ROWS, np.zeros(len(ROWS), np.int32))
    added = jax.jit(summands, static_argnums=(0, 1))(method, 0, records, np.float32(1.5))
    return added, method.sensitivity(0, "add_remove", 2)


def grid():
    """The integers of AGT's exact sums, over the charge of a record. A NaN may be anything in the
    range."""
    exact = Grid.of(jnp.float32, 1.0, 1)
    integers = jax.jit(lambda values: exact.bits(values) - exact.bias())(ROWS[:, 0])
    found = np.asarray(integers, np.float64)
    return found * FINITE, exact.charge


for _name, _clip_norm in itertools.product(CLIP_RULES, (1e-8, 1.0, 1e30)):
    CLIPS[f"rule {_name}, {_clip_norm:g}"] = functools.partial(rule, _name, _clip_norm)
for _clip_norm in (1e-30, 1.0, 1e30):
    CLIPS[f"upload, {_clip_norm:g}"] = functools.partial(upload, _clip_norm)
    CLIPS[f"representation, {_clip_norm:g}"] = lambda c=_clip_norm: (
        split.clip_representation(ROWS, c),
        c,
    )
for _name in ("acc_t", "nll_t"):
    CLIPS[f"question {_name}"] = functools.partial(asked, _name)
CLIPS["exact sums"] = grid


# --- Broken twins -------------------------------------------------------------------------------


@jax.jit
def by_the_largest(x):
    """The clip that XLA breaks: above 2**126 the reciprocal of the largest entry is flushed to
    zero."""
    x = jnp.where(jnp.isfinite(x).all(1, keepdims=True), x, 0)
    largest = jnp.maximum(jnp.abs(x).max(1, keepdims=True), 1e-30)
    unit = x / largest
    norm = jnp.sqrt(jnp.square(unit).sum(1, keepdims=True))
    return jnp.where(norm * largest > 1, unit / jnp.maximum(norm, 0.5), x)


@jax.jit
def by_plain_squares(x):
    """The clip whose squares overflow."""
    norm = jnp.linalg.norm(x, axis=1, keepdims=True)
    return x * jnp.minimum(1, 1 / jnp.maximum(norm, 1e-12))


TWINS: dict[str, Clip] = {
    "division by the largest entry": lambda: (by_the_largest(ROWS), 1.0),
    "squares of all entries": lambda: (by_plain_squares(ROWS), 1.0),
}


# --- Noise --------------------------------------------------------------------------------------

# A law, a statistic of its draws that is 1 for scale 1 and proportional to the scale, its deviation
# times the root of the number of draws, and that number. A right statistic is 5 deviations away
# with probability below 1e-6.
LAWS = {
    "gaussian": (noise.gaussian, np.std, 0.71, 2**13),
    "laplace": (noise.laplace, lambda x: np.abs(x).mean(), 1.0, 2**10),
    "cauchy": (noise.cauchy, lambda x: np.median(np.abs(x)), 1.58, 2**10),
}


def wrong_noise(factor: float = 1.0) -> Iterator[str]:
    """Yields the laws whose draws, times a factor, do not have their scale, at both ends of the
    range of scales."""
    for name, (draw, statistic, deviation, draws) in LAWS.items():
        like = jax.ShapeDtypeStruct((draws,), jnp.float32)
        for scale in (2.0**-100, 1.0, 2.0**100):
            drawn = np.asarray(draw(noise.stream(bytes(16), name), like, scale), np.float64)
            found = factor * statistic(drawn / scale)
            if not abs(found - 1) < 5 * deviation / draws**0.5:
                yield f"{name} of scale {scale:g}: {found:g}"


def broken() -> dict[str, list[str]]:
    """Returns what each clip breaks."""
    return {name: excess(*clip()) for name, clip in {**CLIPS, **TWINS}.items()}


if __name__ == "__main__":
    print(json.dumps({"clips": broken(), "noise": list(wrong_noise())}))
