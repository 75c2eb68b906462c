"""Private adaptation to a stream with correlated noise beside independent noise, at equal epsilon.

    python -m benchmarks run correlated_streams --update

A small ViT is trained on clean digits, and adapts to digits under a shift by private Tent. Every
image comes once, so a stream is one epoch, and its noise is one period of correlated noise. Privacy
is for one image, replace-one. All cells have one learning rate, the best of several for Tent with
clipped gradients and no noise, which favours no noise."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import correlated, pages, problems, timing
from jaxdp import data, finetune, models, tta
from jaxdp.transforms import losses

EPSILONS = (1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
RATES = (0.03, 0.1, 0.3)
BATCH = 16
CLIP = 0.3
NOISES = ("independent", "banded", "blt")
FLAGS = {"runs": (4, "of each noise, epsilon and rate")}


def faded(images: np.ndarray) -> np.ndarray:
    """Returns images of less contrast with noise."""
    noise = np.random.default_rng(1).normal(size=images.shape)
    return np.clip(0.6 * images + 0.15 + 0.08 * noise, 0, 1).astype(np.float32)


def everything(source: data.Examples) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and labels of a source."""
    batch = source.gather(np.arange(len(source)))
    return batch["image"], batch["label"]


class Task:
    """The source model, and the images of the stream."""

    def __init__(self):
        public, private = data.bundled("digits").split((0.6, 0.4), seed=0)
        sizes = {"patch_size": 2, "width": 32, "depth": 2, "num_heads": 4, "mlp_width": 64}
        self._model = models.create("vit_tiny", num_classes=10, **sizes)
        self.params = self._trained(*everything(public))
        images, labels = everything(private)
        shifted = faded(images)
        self.stream = data.from_arrays(image=shifted, label=labels, num_classes=10)
        guesses = self.apply_fn(self.params, shifted).argmax(axis=1)
        self.before = float(np.mean(guesses == labels))

    def apply_fn(self, params, images: jax.Array) -> jax.Array:
        """Returns the logits of images in [0, 1]."""
        normalised = (images - 0.3) / 0.4
        return self._model.apply({"params": params}, normalised)

    def _trained(self, images: np.ndarray, labels: np.ndarray):
        """Returns the parameters after 400 steps of Adam."""
        optimizer = optax.adam(3e-3)
        initial = jax.jit(self._model.init)(jax.random.key(0), images[:1])
        params = initial["params"]
        images, labels = jnp.asarray(images), jnp.asarray(labels)

        def mean_loss(params, rows):
            logits = self.apply_fn(params, images[rows])
            each = jax.vmap(losses.softmax_cross_entropy)(logits, labels[rows])
            return each.mean()

        @jax.jit
        def step(params, state, rows):
            return problems.updated(optimizer, jax.grad(mean_loss)(params, rows), state, params)

        state = optimizer.init(params)
        rng = np.random.default_rng(0)
        for _ in range(400):
            rows = rng.integers(len(images), size=64)
            params, state = step(params, state, jnp.asarray(rows))
        return params


@functools.cache
def noise_of(name: str, updates: int):
    """Returns the correlated noise of a period, or None for independent noise."""
    if name == "independent":
        return None
    return finetune.optimal_noise(None, steps=updates, strategy=name)


def row_of(task: Task, rate: float, runs: int, name: str, epsilon: float) -> dict:
    """Returns the row of a cell: accuracies over the stream [runs]."""
    updates = len(task.stream) // BATCH
    noise = noise_of(name, updates)
    make_event = jaxdp.privacy.GaussianDpEvent if noise is None else noise.event
    target = {"epsilon": epsilon, "delta": DELTA, "adjacency": "replace_one"}
    sigma = jaxdp.privacy.calibrate_noise(make_event, **target)
    method = tta.private(tta.Tent(), clip_norm=CLIP, noise_multiplier=sigma, noise=noise)
    return {
        "noise": name,
        "epsilon": epsilon,
        "updates": updates,
        "rate": rate,
        "accuracies": accuracies_of(task, method, rate, runs),
        "buffers": noise.buffers if noise else 0,
        "error": problems.noise_error(sigma, noise, updates),
    }


def account_of(method) -> tta.StreamAccount | None:
    """Returns a fresh account for the releases of a method, None where it releases nothing."""
    if not isinstance(method, tta.Private):
        return None
    ledger = jaxdp.Ledger.in_memory()
    ledger.register("stream", adjacency="replace_one", unit="image", delta=DELTA)
    return tta.StreamAccount(ledger.account("stream"), event=method.event)


def accuracies_of(task: Task, method, rate: float, runs: int) -> list[float]:
    """Returns the accuracies of predictions before each update, over streams of several orders."""
    adapter = tta.Adapter(task.apply_fn, task.params, method, optax.sgd(rate))
    accuracies = []
    for seed in range(runs):
        stream = tta.Stream({"faded": task.stream}, batch_size=BATCH, seed=seed)
        served = tta.serve(adapter, stream, account=account_of(method))
        accuracies.append(served.accuracy["faded"])
    return accuracies


def tables(report) -> dict:
    """Returns the accuracy of each noise by epsilon."""
    buffers = {"buffers": "{buffers}"}
    rows = report["rows"]
    return {"drift": pages.by_epsilon(rows, "noise", "noise", correlated.cell, buffers)}


def measure(flags) -> dict:
    task = Task()
    method = tta.clipped(tta.Tent(), CLIP)
    without = {rate: accuracies_of(task, method, rate, flags.runs) for rate in RATES}
    means = {rate: np.mean(accuracies) for rate, accuracies in without.items()}
    rate = max(means, key=means.__getitem__)
    print(json.dumps({"before": task.before, "without": without}), flush=True)
    run = functools.partial(row_of, task, rate, flags.runs)
    rows = timing.swept(run, NOISES, EPSILONS)
    return {"before": task.before, "without noise": without[rate], "rows": rows}
