"""What a choice of the learning rate costs on the bundled digits: by looking at private accuracy,
by paying for every run, and by a private search.

    python -m benchmarks run tuning --update

A linear model of the pixels is trained by DP-SGD with eight learning rates. All strategies have the
same private and test digits. The seed of run k of a strategy is the hash of both names, so that
a repetition has the same numbers on the same version."""

import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import pages, problems, timing
from jaxdp import finetune
from jaxdp.privacy import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    Ledger,
    SelfComposedDpEvent,
    calibrate_noise,
    epsilon,
)
from jaxdp.release import stream
from launch import results

RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
EPSILONS = (1.0, 2.0, 4.0)
DELTA, STEPS, BATCH, SCORE_NOISE = 1e-5, 40, 128, 25.0
SEARCHES = {
    "search, geometric": finetune.RandomRuns(8.0),
    "search, Poisson": finetune.RandomRuns(8.0, math.inf),
}
STRATEGIES = ("look", "pay for all", *SEARCHES, "one drawn rate")
FLAGS = {"runs": (4, "of each strategy and epsilon")}
PARAMS = {"w": jnp.zeros((64, 10))}


@functools.cache
def digits() -> tuple:
    """Returns the private and the test digits."""
    _, private, test = jaxdp.data.bundled("digits").split((0.05, 0.65, 0.3), seed=0)
    return private, test


def predict(params, images: jax.Array) -> jax.Array:
    return images.reshape(len(images), -1) @ params["w"]


def loss(params, example) -> jax.Array:
    logits = predict(params, example["image"][None])[0]
    return jaxdp.losses.softmax_cross_entropy(logits, example["label"])


def sampler() -> jaxdp.data.PoissonSampler:
    count = len(digits()[0])
    return jaxdp.data.PoissonSampler(count, BATCH / count)


def training(noise: float) -> DpEvent:
    return finetune.event(noise, sampler(), STEPS)


def scored(noise: float) -> DpEvent:
    return ComposedDpEvent([training(noise), GaussianDpEvent(SCORE_NOISE)])


def all_scored(noise: float) -> DpEvent:
    return SelfComposedDpEvent(scored(noise), len(RATES))


def events() -> dict:
    """Returns the event of each strategy as a function of the noise. "look" is what is claimed."""
    search = lambda runs: lambda noise: runs.event(scored(noise))  # noqa: E731
    searches = {name: search(runs) for name, runs in SEARCHES.items()}
    return {"look": training, "pay for all": all_scored, "one drawn rate": training, **searches}


@functools.cache
def trainers(strategy: str, target: float) -> dict:
    """Returns a trainer for each rate, whose noise gives the strategy the target epsilon."""
    noise = calibrate_noise(events()[strategy], epsilon=target, delta=DELTA)
    trainer = finetune.dp_sgd(
        loss,
        optax.inject_hyperparams(optax.sgd)(learning_rate=1.0),
        sampler=sampler(),
        clip_norm=1.0,
        noise_multiplier=noise,
    )
    return {
        f"{rate:g}": finetune.with_hyperparams(trainer, {"learning_rate": rate}) for rate in RATES
    }


def seed_of(*words) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()[:16]


def trained(trainer, seed: bytes):
    """Returns the parameters after all steps, which no ledger counts."""
    key = stream(seed, "gradient noise")
    return problems.trained(trainer, PARAMS, digits()[0], STEPS, key=key).params


def noisy_accuracy(params, seed: bytes) -> float:
    score = finetune.ChargedScore(predict=predict, source=digits()[0], noise_multiplier=SCORE_NOISE)
    return score.of(params, seed)


@functools.cache
def models_of(strategy: str, target: float, number: int) -> dict:
    """Returns a model of each rate."""
    models = {}
    for name, trainer in trainers(strategy, target).items():
        models[name] = trained(trainer, seed_of(strategy, target, number, name))
    return models


def best_of_all(strategy: str, target: float, number: int) -> tuple:
    """Returns the best rate by private accuracy, exact or noisy, and its model."""
    models = models_of(strategy, target, number)
    scores = {}
    for name, params in models.items():
        if strategy == "look":
            scores[name] = finetune.accuracy(predict, params, digits()[0])
        else:
            seed = seed_of(strategy, target, number, name, "score")
            scores[name] = noisy_accuracy(params, seed)
    best = max(scores, key=scores.__getitem__)
    return best, models[best]


def searched(strategy: str, target: float, number: int) -> tuple:
    ledger = Ledger.in_memory()
    terms = {"epsilon": target, "delta": DELTA}
    ledger.register("digits", adjacency="add_remove", unit="example", **terms)
    best = jaxdp.tune(
        trainers(strategy, target),
        ledger.account("digits"),
        PARAMS,
        digits()[0],
        steps=STEPS,
        runs=SEARCHES[strategy],
        score=finetune.ChargedScore(
            predict=predict, source=digits()[0], noise_multiplier=SCORE_NOISE
        ),
        seed=seed_of(strategy, target, number),
    )
    return str(best.name), best.params


def repeated(strategy: str, target: float, number: int) -> tuple[str, float]:
    """Returns the rate that a strategy releases, and its accuracy on test digits."""
    test = digits()[1]
    if strategy == "one drawn rate":  # the mean over what may be drawn
        models = models_of("look", target, number).values()
        accuracies = [finetune.accuracy(predict, params, test) for params in models]
        return "any", float(np.mean(accuracies))
    find = searched if strategy in SEARCHES else best_of_all
    name, params = find(strategy, target, number)
    return name, finetune.accuracy(predict, params, test)


def row_of(runs: int, target: float, strategy: str) -> dict:
    rates, accuracies = zip(*(repeated(strategy, target, k) for k in range(runs)), strict=True)
    some_trainer = next(iter(trainers(strategy, target).values()))
    noise = some_trainer.privatizer.event.noise_multiplier
    return {
        "strategy": strategy,
        "epsilon": target,
        "noise_multiplier": noise,
        "rates": rates,
        "accuracies": accuracies,
        # Of the trainings whose best was taken. An exact look at private records has none.
        "all_trainings": epsilon(SelfComposedDpEvent(training(noise), len(RATES)), delta=DELTA),
        "one_training": epsilon(training(noise), delta=DELTA),
    }


def measure(flags) -> dict:
    run = functools.partial(row_of, flags.runs)
    return {"rows": timing.swept(run, EPSILONS, STRATEGIES), "runs": flags.runs}


def tables(report) -> dict:

    def noise(row):
        return f"{row['noise_multiplier']:.2f}"

    rows = report["rows"]
    costs = {
        "claimed": "{epsilon:g}",
        "its eight trainings": "{all_trainings:.2f}",
        "with exact looks": "infinite",
    }
    return {
        "accuracies": pages.by_epsilon(rows, "strategy", "strategy", pages.accuracy),
        "costs": pages.lines(results.select(rows, strategy="look"), costs),
        "noise": pages.by_epsilon(rows, "strategy", "strategy", noise),
    }
