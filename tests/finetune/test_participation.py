"""Runs with patterns of participation: what they charge, refuse and repeat."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import finetune, losses
from jaxdp.data import (
    BallsInBinsSampler,
    BMinSepSampler,
    CyclicPoissonSampler,
    by_group,
    from_arrays,
)
from jaxdp.privacy import GaussianDpEvent, Ledger, PoissonSampledDpEvent
from jaxdp.privacy.events import MonteCarloDpEvent, composition

N, STEPS = 60, 8
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
SOURCE = from_arrays(features=X, label=(X[:, 0] > 0).astype(np.int32), num_classes=2)
START = {"w": jnp.zeros((3, 2))}
CYCLIC = CyclicPoissonSampler(N, 0.5, cycle_length=4)
BINS = BallsInBinsSampler(num_examples=N, bins=4, steps=STEPS, draws=2**12)
SEPARATED = BMinSepSampler(
    num_examples=N, sampling_probability=0.3, separation=3, steps=STEPS, draws=2**10
)


def loss(params, example):
    return losses.softmax_cross_entropy(example["features"] @ params["w"], example["label"])


def trainer(sampler, **options):
    return finetune.dp_sgd(
        loss,
        optax.sgd(0.5),
        sampler=sampler,
        clip_norm=1.0,
        physical_batch_size=N,
        **{"noise_multiplier": 2.0, **options},
    )


def ledger(**options):
    book = Ledger.in_memory()
    terms = {"adjacency": "add_remove", "unit": "example", "epsilon": 50.0, "delta": 1e-3}
    book.register("d", **{**terms, **options})
    return book


def fit(trainer, book, **options):
    options = {"steps": STEPS, "checkpoint_every": 4, "progress": False, **options}
    return finetune.fit(trainer, START, SOURCE, account=book.account("d"), **options)


class Killed(Exception):
    """What a callback raises."""


def kill(step, metrics, params):
    if step == 6:
        raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [BINS, SEPARATED], ids=["bins", "separated"])
def test_a_killed_run_repeats_bit_for_bit_and_is_charged_once(sampler, tmp_path):
    seed = bytes(range(16))
    whole = ledger()
    straight = fit(trainer(sampler), whole, workdir=tmp_path / "a", seed=seed)
    [event] = composition(whole.events("d")[None])
    assert isinstance(event, MonteCarloDpEvent)
    cut = ledger()
    with pytest.raises(Killed):
        fit(trainer(sampler), cut, workdir=tmp_path / "b", callbacks=[kill])
    paid = cut.events("d")[None]
    # A new process makes a new trainer, whose simulation would draw another event.
    state = fit(trainer(sampler), cut, workdir=tmp_path / "b")
    assert cut.events("d")[None] == paid and len(composition(paid)) == 1
    assert int(state.step) == int(straight.step) == STEPS
    # Seeds that are given repeat bits, those of the operating system do not.
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "event.json").write_bytes((tmp_path / "a" / "event.json").read_bytes())
    again = fit(trainer(sampler), ledger(), workdir=tmp_path / "c", seed=seed)
    np.testing.assert_array_equal(again.params["w"], straight.params["w"])
    assert not np.array_equal(state.params["w"], straight.params["w"])
    with pytest.raises(ValueError, match=r"workdir holds the run MonteCarlo.*not MonteCarlo"):
        fit(trainer(sampler, noise_multiplier=3.0), cut, workdir=tmp_path / "b")


@pytest.mark.slow
def test_cyclic_chunks_cost_what_the_run_costs():
    book = ledger()
    chosen = trainer(CYCLIC)
    fit(chosen, book)
    step = PoissonSampledDpEvent(0.5, GaussianDpEvent(2.0))
    assert composition(book.events("d")[None]) == {step: 2}
    assert composition(chosen.event(0, STEPS)) == {step: 2}
    with pytest.raises(ValueError, match="multiple of the sampler's cycle_length=4"):
        fit(chosen, book, checkpoint_every=6)


def test_a_part_of_a_run_or_a_longer_one_has_no_event():
    chosen = trainer(BINS)
    assert chosen.event(0, STEPS) == chosen.event(0, STEPS)
    for first, last in [(0, 4), (4, STEPS), (0, STEPS + 1)]:
        with pytest.raises(ValueError, match="first and last must be 0 and 8"):
            chosen.event(first, last)
    book = ledger()
    with pytest.raises(ValueError, match="steps must be 8"):
        fit(chosen, book, steps=STEPS + 1)
    assert book.epsilon("d", delta=1e-3) == 0


def test_a_relation_without_a_proof_is_refused_before_training():
    book = ledger(adjacency="replace_one")
    with pytest.raises(ValueError, match="no accounting rule covers"):
        fit(trainer(BINS), book)
    assert book.epsilon("d", delta=1e-3) == 0


def test_a_schedule_needs_poisson_sampling():
    with pytest.raises(ValueError, match="must be one number with BallsInBinsSampler"):
        trainer(BINS, noise_multiplier=lambda step: 2.0 + step)


@pytest.mark.slow
def test_noise_for_a_target_is_repeatable_and_fits():
    first, second = (
        trainer(BINS, noise_multiplier=None, epsilon=3.0, delta=1e-3, steps=STEPS) for _ in range(2)
    )
    noise = first.privatizer.noise_multiplier
    assert noise == second.privatizer.noise_multiplier
    book = ledger()
    assert 2.5 < book.account("d").would_cost(first.event(0, STEPS), delta=1e-3) <= 3.0
    assert first.event(0, STEPS) != second.event(0, STEPS)


def test_patients_take_part_in_patterns():
    patients = by_group(SOURCE, np.arange(N) // 3, max_records=3)
    sampler = BallsInBinsSampler(num_examples=len(patients), bins=4, steps=4)
    chosen = trainer(sampler, group=True, unit="patient")
    chosen.check(patients)
    state = chosen.init(START)
    drawn = [chosen.drawn(state._replace(step=jnp.int32(step))) for step in range(4)]
    assert sorted(np.concatenate(drawn).tolist()) == list(range(20))
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), state.params))
