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


class Task:
    """The source model, and the images of the stream."""

    def __init__(self):
        public, private = data.bundled("digits").split((0.6, 0.4), seed=0)
        sizes = {"patch_size": 2, "width": 32, "depth": 2, "num_heads": 4, "mlp_width": 64}
        model = models.create("vit_tiny", num_classes=10, **sizes)

        def apply_fn(params, images):
            return model.apply({"params": params}, (images - 0.3) / 0.4)

        self.apply_fn = apply_fn
        batch = public.gather(np.arange(len(public)))
        self.params = self._trained(model, batch["image"], batch["label"])
        batch = private.gather(np.arange(len(private)))
        image = faded(batch["image"])
        self.stream = data.from_arrays(image=image, label=batch["label"], num_classes=10)
        guesses = self.apply_fn(self.params, image).argmax(axis=1)
        self.before = float((guesses == batch["label"]).mean())

    def _trained(self, model, images: np.ndarray, labels: np.ndarray):
        optimizer = optax.adam(3e-3)
        params = jax.jit(model.init)(jax.random.key(0), images[:1])["params"]

        def mean_loss(params, rows):
            logits = self.apply_fn(params, images[rows])
            return jax.vmap(losses.softmax_cross_entropy)(logits, labels[rows]).mean()

        @jax.jit
        def step(params, state, rows):
            gradient = jax.grad(mean_loss)(params, rows)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state

        images, labels = jnp.asarray(images), jnp.asarray(labels)
        state = optimizer.init(params)
        rng = np.random.default_rng(0)
        for _ in range(400):
            params, state = step(params, state, jnp.asarray(rng.integers(len(images), size=64)))
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
    row = {"noise": name, "epsilon": epsilon, "updates": updates, "rate": rate}
    row["accuracies"] = accuracies_of(task, method, rate, runs)
    row["buffers"] = noise.buffers if noise else 0
    return row | {"error": problems.noise_error(sigma, noise, updates)}


def accuracies_of(task: Task, method, rate: float, runs: int) -> list[float]:
    """Returns the accuracies of predictions before each update, over streams of several orders."""
    adapter = tta.Adapter(task.apply_fn, task.params, method, optax.sgd(rate))
    accuracies = []
    for seed in range(runs):
        account = None
        if isinstance(method, tta.Private):
            ledger = jaxdp.Ledger.in_memory()
            ledger.register("stream", adjacency="replace_one", unit="image", delta=DELTA)
            account = tta.StreamAccount(ledger.account("stream"), event=method.event)
        stream = tta.Stream({"faded": task.stream}, batch_size=BATCH, seed=seed)
        served = tta.serve(adapter, stream, account=account)
        accuracies.append(served.accuracy["faded"])
    return accuracies


def tables(report) -> dict:
    more = {"buffers": "{buffers}"}
    return {"drift": pages.by_epsilon(report["rows"], "noise", "noise", correlated.cell, more)}


def measure(flags) -> dict:
    task = Task()
    method = tta.clipped(tta.Tent(), CLIP)
    without = {rate: accuracies_of(task, method, rate, flags.runs) for rate in RATES}
    rate = max(without, key=lambda rate: float(np.mean(without[rate])))
    print(json.dumps({"before": task.before, "without": without}), flush=True)
    run = functools.partial(row_of, task, rate, flags.runs)
    rows = timing.swept(run, NOISES, EPSILONS)
    return {"before": task.before, "without noise": without[rate], "rows": rows}
