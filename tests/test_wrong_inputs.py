"""A wrong argument is refused in one sentence that names it and its value, and nothing is spent."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import data, finetune, pretrain
from jaxdp.privacy import GaussianDpEvent, calibrate_noise
from jaxdp.recalibration import NllT
from jaxdp.split import PrivateRelease
from jaxdp.tta import EATA

FEATURES = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
LABELS = np.arange(64) % 2
SOURCE = data.from_arrays(features=FEATURES, label=LABELS, num_classes=2)
SAMPLER = data.PoissonSampler(64, 0.25)
PARAMS = {"w": jnp.zeros(4)}
TARGET = {"epsilon": 3.0, "delta": 1e-5, "steps": 3}
UPLOAD = {"clip_norm": 1.0, "noise_multiplier": 1.0, "label_epsilon": 1.0, "num_classes": 3}


def loss(params, example):
    return (example["features"] @ params["w"] - example["label"]) ** 2


def batch_loss(params, batch):
    return jax.vmap(loss, (None, 0))(params, batch).mean()


GRADIENT = jaxdp.clipped_grad(loss, clip_norm=1.0)
BATCH = SOURCE.gather(np.arange(8))


def trainer(optimizer=None, **options):
    options = {"noise_multiplier": 1.0, "clip_norm": 1.0, "sampler": SAMPLER, **options}
    return finetune.dp_sgd(loss, optimizer or optax.sgd(0.1), **options)


def scheduled(schedule):
    options = {"noise_multiplier": 1.0, "clip_norm": 1.0, "sampler": SAMPLER}
    return finetune.adp_alloc(loss, optax.sgd(0.1), schedule=schedule, **options)


def to_target(**changes):
    return trainer(**{"noise_multiplier": None, **TARGET, **changes})


def clipped(**options):
    return jaxdp.clipped_grad(**{"loss_fn": loss, "clip_norm": 1.0, **options})


def labelled(label, num_classes=2):
    return data.from_arrays(features=FEATURES, label=label, num_classes=num_classes)


def of_mask(mask):
    return GRADIENT(PARAMS, BATCH, mask=mask)


# Functions with the arguments that are right.
adam = functools.partial(finetune.dp_adam_bc, learning_rate=0.1, noise_std=0.1)
sampled = functools.partial(data.PoissonSampler, 9)
calibrated = functools.partial(calibrate_noise, GaussianDpEvent, delta=1e-5)
epsilon = functools.partial(jaxdp.privacy.epsilon, GaussianDpEvent(1.0))
sam = functools.partial(pretrain.sam, batch_loss, optax.sgd(0.1))
split_norm = jaxdp.split_clip_norm
TWO_NOISES = {"noise_multiplier": 1.0, "steps": None, "delta": None}
# What is called, how, and the message.
ARGUMENTS = [
    (to_target, {"steps": 0}, "steps must be an integer of at least 1, got 0."),
    (to_target, {"epsilon": "3"}, "epsilon must be a number, got '3'."),
    (to_target, {"delta": "1e-5"}, "delta must be a number, got '1e-5'."),
    (trainer, {"noise_multiplier": "1"}, "noise_multiplier must be a real number, got str."),
    (trainer, {"clip_norm": "1"}, "clip_norm must be a number, .* got str '1'."),
    (trainer, {"physical_batch_size": 2.5}, "physical_batch_size must be an int, .* 2.5."),
    (trainer, {"augment": 3}, r"augment must be a function, augment\(key, example\).* got int 3."),
    (scheduled, {"schedule": 0.9}, "schedule must be a function, .* got float 0.9."),
    (trainer, {"augmult": 2.5}, "augmult must be an int, got float 2.5."),
    (trainer, {"ema_decay": "0.9"}, "ema_decay must be a number, got '0.9'."),
    (trainer, {"trainable": "w"}, r"trainable must be a function, .* got str 'w'."),
    (trainer, {"optimizer": 0.1}, "optimizer must be .* such as optax.sgd.0.1., got 0.1."),
    (trainer, {"optimizer": optax.sgd}, "optimizer must be .*, got sgd."),
    (trainer, {"sampler": 16}, r"sampler must be a jaxdp.data.PoissonSampler.*, got 16."),
    (to_target, TWO_NOISES, "noise_multiplier must be left out, or epsilon, got 1.0."),
    (adam, {"learning_rate": "0.1"}, "learning_rate must be a number, got '0.1'."),
    (adam, {"noise_std": "0.1"}, "noise_std must be a number, got '0.1'."),
    (split_norm, {"params": 1.0, "total": PARAMS}, "total must be a real number, got dict."),
    (clipped, {"loss_fn": 3.0}, "loss_fn must be a function, .* got float 3.0."),
    (clipped, {"microbatch_size": 2.5}, "microbatch_size must be an integer .*, got 2.5."),
    (of_mask, {"mask": [True] * 8}, "mask must be a boolean array, got list. Convert it .*"),
    (labelled, {"label": ["a", "b"] * 32}, "label must be integers, got dtype <U1. Number .*"),
    (labelled, {"label": LABELS, "num_classes": "2"}, "num_classes must be an int, got str '2'."),
    (labelled, {"label": LABELS, "num_classes": 2.5}, "num_classes must be an int, .* 2.5."),
    (sampled, {"sampling_probability": ".2"}, "sampling_probability must be a number, got '.2'."),
    (calibrated, {"epsilon": None}, "epsilon must be a number, got None."),
    (epsilon, {"delta": [1e-5]}, r"delta must be a number, got \[1e-05\]."),
    (sam, {"microbatch_size": 2.5}, "microbatch_size must be an int, got float 2.5."),
    (PrivateRelease, UPLOAD | {"clip_norm": {"a": 1}}, "clip_norm must be .*, got {'a': 1}."),
    (PrivateRelease, UPLOAD | {"noise_multiplier": "1"}, "noise_multiplier must be .*, got '1'."),
    (PrivateRelease, UPLOAD | {"label_epsilon": None}, "label_epsilon must be .*, got None."),
    (NllT, {"bound": "10"}, "bound must be a number, got '10'."),
    (EATA, {"num_classes": "10"}, "num_classes must be a number, got '10'."),
    (EATA, {"num_classes": 10, "margin": "0.4"}, "margin must be a number, got '0.4'."),
    (jaxdp.models.create, {"name": "mlp", "num_classes": 2.5}, "num_classes must be an int, .*"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), ARGUMENTS)
def test_a_wrong_argument_is_refused(function, arguments, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**arguments)
    assert re.fullmatch(message, str(caught.value))


def evaluate(params):
    """Returns what is no number."""
    return {"accuracy": "good"}


ALONE = "optimizer must work with the noisy gradient alone"
PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
FOURTH = optax.chain(optax.apply_every(4), optax.sgd(0.1))
# What `fit` is given, and the message.
RUNS = [
    ({"account": "d"}, "account must be an account of a ledger in process 0, got str. Use .*"),
    ({"steps": 2.5}, "steps must be an int, got float 2.5."),
    ({"steps": "2"}, "steps must be an int, got str '2'."),
    ({"checkpoint_every": 2.5}, "checkpoint_every must be an int, got float 2.5."),
    ({"evaluate": 0.5}, "evaluate must be a function, .* got float 0.5."),
    ({"evaluate_every": 0}, "evaluate_every must be at least 1, got 0."),
    ({"callbacks": print}, r"callbacks must be a list of functions, .* callbacks=\[callback\]."),
    ({"callbacks": [3]}, "callbacks must be a function, .*, got int 3."),
    ({"trainer": trainer(optax.lbfgs())}, f"{ALONE}.*'value'.*"),
    ({"trainer": trainer(optax.polyak_sgd())}, f"{ALONE}.*'value'.*"),
    ({"trainer": trainer(PLATEAU)}, f"{ALONE}, .* Choose another optimizer, .*"),
    (
        {"trainer": trainer(FOURTH)},
        "optimizer must not be optax.MultiSteps or optax.apply_every: .*",
    ),
]


@pytest.fixture(scope="module")
def account():
    """An account that no wrong call may charge."""
    with jaxdp.Ledger.in_memory() as ledger:
        ledger.register("d", adjacency="add_remove", unit="example", epsilon=8.0, delta=1e-5)
        yield ledger.account("d")


@pytest.mark.parametrize(("arguments", "message"), RUNS)
def test_a_wrong_run_is_refused_and_spends_nothing(account, arguments, message):
    call = {"trainer": trainer(), "params": PARAMS, "source": SOURCE, "steps": 2}
    call |= {"account": account, "progress": False} | arguments
    with pytest.raises((TypeError, ValueError)) as caught:
        finetune.fit(**call)
    assert re.fullmatch(message, str(caught.value))
    assert account.ledger.epsilon("d") == 0


def test_a_ledger_is_no_account(account):
    with pytest.raises(TypeError, match=r"got Ledger. Use ledger.account\(name\)"):
        finetune.fit(trainer(), PARAMS, SOURCE, steps=2, account=account.ledger)
    with pytest.raises(TypeError, match="epsilon must be a number or None, got '3'"):
        account.ledger.register("e", adjacency="add_remove", unit="x", epsilon="3", delta=1e-5)
    assert account.ledger.epsilon("d") == 0


@pytest.fixture(scope="module")
def private_sum():
    """A `ClippedSum`."""
    return GRADIENT(PARAMS, BATCH)


def test_a_private_sum_reaches_no_parameters(private_sum):
    remedy = r"ClippedSum', private and without noise. Give its sum of gradients, `grads`"
    for optimizer in (optax.adam(0.1), optax.sgd(0.1, momentum=0.9)):
        with pytest.raises(ValueError, match=remedy):
            optimizer.update(private_sum, optimizer.init(PARAMS), PARAMS)
    sgd = optax.sgd(0.1)
    updates, _ = sgd.update(private_sum, sgd.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=remedy):
        optax.apply_updates(PARAMS, updates)
    assert str(private_sum.norms[0]) not in repr(updates)


def test_accumulated_sums_of_one_batch_have_the_noise_of_one_batch():
    """The mean of two sums, which is the default of optax, has the noise of two."""
    halves = [GRADIENT(PARAMS, SOURCE.gather(rows)).grads for rows in np.split(np.arange(16), 2)]
    whole = jax.tree.map(jnp.add, *halves)
    private = jaxdp.privatize(GRADIENT, noise_multiplier=1.0, divisor=16, key=jax.random.key(1))
    noisy = private.update(whole, private.init(PARAMS))[0]["w"]

    def stepped(**options):
        optimizer = optax.MultiSteps(private, 2, **options)
        state = optimizer.init(PARAMS)
        for half in halves:
            updates, state = optimizer.update(half, state, PARAMS)
        return updates["w"]

    np.testing.assert_allclose(stepped(use_grad_mean=False), noisy, rtol=1e-5)
    signal = whole["w"] / 16
    np.testing.assert_allclose(2 * stepped() - signal, 2 * (noisy - signal), rtol=1e-4)
