"""Accuracy: exact on public data, noisy and paid for on private data."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import data, finetune
from jaxdp.finetune import evaluate
from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.transforms import noise

N = 137
RNG = np.random.default_rng(0)
# right for the classes 2 and 3, wrong for the others
ANGLES = np.pi / 4 + np.pi / 2 * np.array([1, 0, 2, 3])
PARAMS = jnp.asarray([np.cos(ANGLES), np.sin(ANGLES)], jnp.float32)
SOURCE = data.bundled("blobs").take(np.arange(N))


def predict(params, inputs):
    return inputs @ params


def correct():
    rows = SOURCE.gather(np.arange(N))
    logits = rows["features"].astype(np.float64) @ np.asarray(PARAMS, np.float64)
    return int((logits.argmax(-1) == rows["label"]).sum())


def ledger_of(**terms):
    ledger = Ledger.in_memory()
    ledger.register("blobs", adjacency="add_remove", unit="example", **terms)
    return ledger


class Watched:
    """A source that notes which rows are read."""

    fingerprint = SOURCE.fingerprint

    def __init__(self):
        self.read = []

    def __len__(self):
        return N

    def gather(self, rows):
        self.read.append(list(rows))
        return SOURCE.gather(rows)


@pytest.mark.parametrize("batch_size", [1, 10, N - 1, N, 10 * N])
def test_accuracy_equals_numpy_whatever_the_batch_size(batch_size):
    assert 0 < correct() < N
    assert finetune.accuracy(predict, PARAMS, SOURCE, batch_size=batch_size) == correct() / N


def test_accuracy_of_images():
    source = data.bundled("digits").take(np.arange(50))
    params = jnp.asarray(RNG.normal(size=(64, 10)), jnp.float32)
    rows = source.gather(np.arange(50))
    expected = (
        (rows["image"].reshape(50, 64) @ np.asarray(params)).argmax(-1) == rows["label"]
    ).mean()
    found = finetune.accuracy(lambda p, x: x.reshape(len(x), 64) @ p, params, source, batch_size=8)
    assert found == pytest.approx(expected)


def test_accuracy_of_nothing_is_an_error():
    empty = SOURCE.take(np.arange(0))
    with pytest.raises(ValueError, match="source 'blobs' has no examples"):
        finetune.accuracy(predict, PARAMS, empty)


def test_an_overspent_budget_reads_nothing():
    ledger = ledger_of(epsilon=0.5, delta=1e-5)
    source = Watched()
    with pytest.raises(BudgetExceeded):
        finetune.charged_accuracy(
            predict, PARAMS, source, account=ledger.account("blobs"), noise_multiplier=1.0
        )
    assert source.read == [[0, N - 1]]  # the check of the source
    assert ledger.events("blobs") == {}


def estimates(noise_multiplier, count=400):
    """Returns releases of one accuracy.

    They have no seed. A given one would derive their noise from the machine and the code too, and
    the wrong scale 1.3 is only 3 deviations beyond the limit. The entropy of a test is always the
    same.
    """
    account = ledger_of(delta=1e-5).account("blobs")
    how = {"account": account, "noise_multiplier": noise_multiplier}
    return np.array(
        [finetune.charged_accuracy(predict, PARAMS, SOURCE, **how) for _ in range(count)]
    )


@pytest.mark.slow
def test_noise_has_the_right_scale_and_wrong_scales_are_rejected():
    def accepted(sample):
        return abs((sample**2).mean() - 1) < 4.9 * math.sqrt(2 / len(sample)) and abs(
            sample.mean()
        ) < 4.9 / math.sqrt(len(sample))

    right = (estimates(4.0) * N - correct()) / 4.0
    assert accepted(right)
    assert not accepted(0.7 * right)
    assert not accepted(1.3 * right)


def test_the_last_digits_of_an_estimate_tell_no_count():
    """Noise in float32 told 13 % of the estimates of 0 answers of 1024 from those of 1 answer."""
    total, sigma = 1024, 1.0
    step = sigma * 2.0**-24 / total  # a right answer is a whole number of steps
    keys = jax.random.split(jax.random.key(7, impl="threefry2x32"), 4000)

    def off_the_grid(estimates):
        inside = estimates[(estimates > 0) & (estimates < 1)]
        assert len(inside) > 0.4 * len(keys)
        return np.mean(np.float64(inside) / step % 1 != 0)

    for count in (0, 1):
        assert off_the_grid(evaluate.noisy_fraction(keys, count, total, sigma)) == 0

    # A broken twin: only a count of 0 has steps this fine.
    def in_floats(key, count):
        exact = np.float32(count)
        return jnp.clip((exact + noise.gaussian(key, exact, sigma)) / total, 0, 1)

    fine = [off_the_grid(jax.vmap(in_floats, (0, None))(keys, count)) for count in (0, 1)]
    assert fine[0] > 0.1 and fine[1] == 0


@pytest.mark.parametrize("sigma", [2.0**-30, 1e-3, 0.7, 3.0, 1e4])
def test_a_right_answer_moves_the_noisy_count_by_at_most_its_sensitivity(sigma):
    """In units of the noise, 1 / sigma, and not much less where the noise is not tiny."""
    key, total = jax.random.key(0, impl="threefry2x32"), 2**24
    # Exact in float64: the clip to [0, 1] is far from both.
    low, high = (evaluate.noisy_fraction(key, count, total, sigma) for count in (2**20, 2**21))
    with pytest.MonkeyPatch.context() as silent:
        silent.setattr(evaluate, "_noise_of_count", lambda key: jnp.int32(2**24))
        deviation = evaluate.noisy_fraction(key, 0, total, sigma)
    moved = (high - low) / 2**20 / deviation
    assert moved <= (1 + 1e-9) / sigma and moved >= (1 - 2e-3) * min(1 / sigma, 2.0**13)


@pytest.mark.slow
def test_estimates_stay_in_the_unit_interval():
    sample = estimates(1e8, count=40)  # one in a million lies between the ends
    assert set(sample) == {0.0, 1.0}
