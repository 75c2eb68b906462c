"""Random-round DP-SGD: the law of R, and what a run of R rounds is and costs."""

import math

import numpy as np
import optax
import pytest

from jaxdp import finetune
from jaxdp.data import PoissonSampler, bundled
from jaxdp.privacy import (
    GaussianDpEvent,
    Ledger,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    epsilon,
)

SEEDS = [k.to_bytes(16, "little") for k in range(4000)]
DELTA = 1e-5


def chi_square(rounds, most):
    """Returns the chi-square statistic of uniform rounds in 1..most, and its 99.99 % quantile."""
    counts = np.bincount(rounds, minlength=most + 1)
    if counts[0] or len(counts) > most + 1:
        return math.inf, 0.0
    expected = len(rounds) / most
    z, free = 3.719, most - 1  # Wilson and Hilferty's approximation
    quantile = free * (1 - 2 / (9 * free) + z * math.sqrt(2 / (9 * free))) ** 3
    return float(np.sum((counts[1:] - expected) ** 2) / expected), quantile


def test_r_is_uniform_from_one_to_most_and_fixed_by_its_seed():
    rounds = [finetune.random_round(20, seed=seed) for seed in SEEDS]
    statistic, quantile = chi_square(rounds, 20)
    assert statistic < quantile
    assert rounds[:9] == [finetune.random_round(20, seed=seed) for seed in SEEDS[:9]]
    assert finetune.random_round(1, seed=SEEDS[0]) == 1
    assert finetune.random_round(2**63, seed=SEEDS[0]) > 2**32
    for wrong in (
        [r - 1 for r in rounds],
        [max(r, 2) for r in rounds],
        [r // 2 + 1 for r in rounds],
    ):
        statistic, quantile = chi_square(wrong, 20)
        assert statistic > quantile


@pytest.mark.parametrize(
    ("most", "seed", "message"),
    [
        (0, bytes(16), r"most must be an integer in 1\.\.2\^63, got 0"),
        (2**63 + 1, bytes(16), r"most must be an integer in 1\.\.2\^63"),
        (5, b"short", r"seed must be 16 bytes such as .* got b'short'"),
    ],
)
def test_arguments_out_of_range_are_refused(most, seed, message):
    with pytest.raises(ValueError, match=message):
        finetune.random_round(most, seed=seed)


def loss(params, example):
    logits = example["features"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


@pytest.mark.slow
def test_the_ledger_charges_r_rounds_of_one_example_and_no_more():
    source = bundled("blobs").take(np.arange(40))
    steps = finetune.random_round(40**2, seed=SEEDS[3]) % 50 + 1
    trainer = finetune.dp_sgd(
        loss,
        optax.sgd(0.01),
        sampler=PoissonSampler(40, 1 / 40),
        clip_norm=1.0,
        epsilon=4.0,
        delta=DELTA,
        steps=steps,
    )
    ledger = Ledger.in_memory()
    ledger.register("blobs", adjacency="add_remove", unit="example", epsilon=4.0, delta=DELTA)
    start = {"w": np.zeros((2, 4), np.float32)}
    account = ledger.account("blobs")
    finetune.fit(trainer, start, source, steps=steps, account=account, progress=False)
    noise = trainer.privatizer.event_at(0).noise_multiplier
    rounds = SelfComposedDpEvent(PoissonSampledDpEvent(1 / 40, GaussianDpEvent(noise)), steps)
    spent = ledger.epsilon("blobs", delta=DELTA)
    assert spent == pytest.approx(epsilon(rounds, delta=DELTA), rel=1e-9)
    assert 3.9 < spent <= 4.0


@pytest.mark.parametrize(("target", "holds"), [(1.0, True), (0.05, False)])
def test_equation_9_as_printed_holds_for_large_epsilon_only(target, holds):
    """With 1 / epsilon^2 it always holds, with about ten times the noise that is needed."""
    n = 1000

    def spent(noise):
        rounds = SelfComposedDpEvent(PoissonSampledDpEvent(1 / n, GaussianDpEvent(noise)), n**2)
        return epsilon(rounds, delta=DELTA, method="rdp")

    printed = 2 * math.sqrt(math.log(3 * n / DELTA) * math.log(2 / DELTA))
    assert (spent(printed) <= target) == holds
    assert spent(printed / target) <= target / 5
