"""Runs with patterns of participation: what they charge, refuse and repeat."""

import contextlib
import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from scipy import linalg

import jaxdp
from jaxdp import finetune, losses
from jaxdp.data import (
    BallsInBinsSampler,
    BMinSepSampler,
    CyclicPoissonSampler,
    by_group,
    from_arrays,
)
from jaxdp.privacy import GaussianDpEvent, Ledger, PoissonSampledDpEvent, participation
from jaxdp.privacy.events import MonteCarloDpEvent, composition, to_json
from jaxdp.release import Mark, notes

N, STEPS = 60, 8
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
SOURCE = from_arrays(features=X, label=(X[:, 0] > 0).astype(np.int32), num_classes=2)
START = {"w": jnp.zeros((3, 2))}
CYCLIC = CyclicPoissonSampler(N, 0.5, cycle_length=4)
BINS = BallsInBinsSampler(num_examples=N, bins=4, steps=STEPS, draws=2**12)
SEPARATED = BMinSepSampler(
    num_examples=N, sampling_probability=0.3, separation=4, steps=STEPS, draws=2**10
)
NOISE = jaxdp.correlated([1.0, 0.5, 0.25], steps=STEPS, participations=2, min_separation=4)
EVENT = GaussianDpEvent(1.0)


def loss(params, example):
    return losses.softmax_cross_entropy(example["features"] @ params["w"], example["label"])


def half(params, example):
    return 0.5 * loss(params, example)


def trainer(sampler, loss_fn=loss, **options):
    return finetune.dp_sgd(
        loss_fn,
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


SEED = bytes(range(16))


@functools.cache
def shared(pattern):
    """Returns the trainer of a pattern, with correlated noise or without."""
    if pattern == "bins":
        return trainer(BINS)
    sampler = CYCLIC if pattern == "correlated cyclic" else SEPARATED
    return trainer(sampler, noise=NOISE)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["bins", "correlated separated"])
def test_a_killed_run_repeats_bit_for_bit_and_is_charged_once(pattern, tmp_path, monkeypatch):
    whole = ledger()
    straight = fit(shared(pattern), whole, workdir=tmp_path / "a", seed=SEED)
    events = composition(whole.events("d")[None])
    [event] = events
    assert isinstance(event, MonteCarloDpEvent) and events[event] == 1
    # Another run would draw another event, and so another token and other noise.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "event.json").write_bytes((tmp_path / "a" / "event.json").read_bytes())
    # A run that is killed or goes on needs no simulation.
    monkeypatch.setattr(participation, "simulated", None)
    cut = ledger()
    arguments = {"workdir": tmp_path / "b", "seed": SEED}
    with pytest.raises(Killed):
        fit(shared(pattern), cut, callbacks=[kill], **arguments)
    assert composition(cut.events("d")[None]) == events
    saved = ocp.StandardCheckpointer().restore(tmp_path / "b" / "checkpoints" / "4" / "default")
    assert saved["pattern"].any() and saved["identity"].any()
    state = fit(shared(pattern), cut, **arguments)
    np.testing.assert_array_equal(state.params["w"], straight.params["w"])
    assert composition(cut.events("d")[None]) == events
    # The run has ended, so no checkpoint tells who took part.
    (checkpoint,) = (tmp_path / "b" / "checkpoints").iterdir()
    saved = ocp.StandardCheckpointer().restore(checkpoint / "default")
    assert not saved["pattern"].any() and not saved["identity"].any()
    assert pattern == "bins" or not saved["buffers"]["w"].any()


@contextlib.contextmanager
def interrupted(mark, reserve, **words):
    """Makes a mark, and is interrupted before the workdir notes it."""
    with reserve(mark, **words):
        pass
    raise KeyboardInterrupt
    yield


@pytest.mark.slow
def test_what_a_run_shares_is_not_drawn_or_released_twice(tmp_path, monkeypatch):
    book = ledger()
    chosen = shared("correlated cyclic")
    own, older = tmp_path / "own", tmp_path / "older"
    fit(chosen, book, workdir=own, steps=4)
    shutil.copytree(own, older)
    with monkeypatch.context() as patch:
        patch.setattr(Mark, "reserve", functools.partialmethod(interrupted, Mark.reserve))
        with pytest.raises(KeyboardInterrupt):
            fit(chosen, book, workdir=own)
    # The mark of an attempt that has no note is that of its repetition.
    assert [row["first_step"] for row in notes(own)] == [0]
    with pytest.raises(Killed):
        fit(chosen, book, workdir=own, callbacks=[kill])
    paid = book.events("d")[None]
    assert not (own / "event.json").exists()
    with pytest.raises(ValueError, match="this workdir is a copy of another one that went on"):
        fit(chosen, book, workdir=older)
    other_loss = functools.partial(trainer, CYCLIC, noise=NOISE, loss_fn=half)
    with pytest.raises(ValueError, match="step 4 was begun before with another program"):
        fit(other_loss(), book, workdir=own)
    with pytest.raises(ValueError, match="another sampler, clip norm"):
        fit(other_loss(noise_multiplier=3.0), book, workdir=own)
    state = fit(chosen, book, workdir=own)
    assert int(state.step) == STEPS and book.events("d")[None] == paid
    with pytest.raises(ValueError, match="steps must be at most 8, got 9"):
        fit(chosen, book, workdir=own, steps=STEPS + 1)


@pytest.mark.slow
def test_all_chunks_of_a_run_share_their_groups(monkeypatch):
    drawn = {}
    load = finetune.PrivateTrainer.load

    def noted(self, state, source, rows, *, step=None):
        drawn[step] = rows  # the first examples are read as of step 0 before it, for a check
        return load(self, state, source, rows, step=step)

    monkeypatch.setattr(finetune.PrivateTrainer, "load", noted)
    fit(shared("correlated cyclic"), ledger(), checkpoint_every=2)
    groups = {}
    for step, rows in drawn.items():
        for row in rows:
            groups.setdefault(row, set()).add(step % 4)
    assert len(drawn) == STEPS and len(groups) > N / 2
    assert all(len(of_row) == 1 for of_row in groups.values())


def test_another_run_needs_another_workdir(tmp_path):
    (tmp_path / "event.json").write_text(json.dumps({"event": to_json(EVENT), "facts": ""}))
    with pytest.raises(ValueError, match=r"workdir holds the run Gaussian\(1\), which has other"):
        fit(shared("bins"), ledger(), workdir=tmp_path)


BANDED = {"steps": STEPS, "participations": 2, "min_separation": 4}
REFUSED = [
    (CYCLIC, [1.0, 0.4, 0.3, 0.2, 0.1], r"strategy must have at most cycle_length=4 bands, got 5"),
    (SEPARATED, [1.0, 0.4, 0.3, 0.2, 0.1], r"strategy must have at most separation=4 bands"),
    (BINS, [1.0, -0.4], r"strategy must have no negative entry.*Use cyclic Poisson"),
    (dataclasses.replace(BINS, steps=4), [1.0, 0.5], "sampler has steps=4.*Give both the same"),
]


@pytest.mark.parametrize("sampler, strategy, message", REFUSED)
def test_noise_without_a_proof_for_the_pattern_is_refused(sampler, strategy, message):
    noise = jaxdp.correlated(strategy, **BANDED)
    with pytest.raises(ValueError, match=message):
        trainer(sampler, noise=noise)


def test_the_event_of_correlated_noise_has_its_strategy():
    column = np.array([1.0, 0.5, 0.25])
    (event,) = composition(shared("correlated cyclic").event(0, STEPS))
    expected = 2.0 / np.linalg.norm(column)
    assert event.sampling_probability == 0.5
    assert event.event.noise_multiplier == pytest.approx(expected, rel=1e-9)
    assert event.event.noise_multiplier < expected
    # The events of bins take the matrix: their claims are those of its rows.
    seed = {"seed": SEED}
    own = finetune.event(2.0, BINS, STEPS, NOISE, **seed)
    matrix = linalg.toeplitz(NOISE.column, np.zeros(STEPS))
    bins = {"bins": 4, "steps": STEPS, "draws": BINS.draws}
    assert own == jaxdp.privacy.balls_in_bins_event(2.0, strategy=matrix, **bins, **seed)
    independent = finetune.event(2.0, BINS, STEPS, **seed)
    costs = [jaxdp.privacy.epsilon(each, delta=1e-3) for each in (independent, own)]
    assert costs[1] > 1.2 * costs[0]


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
    assert chosen.event(0, 4) == chosen.event(0, STEPS)
    with pytest.raises(ValueError, match=r"first must be 0, got 4. All 8 steps"):
        chosen.event(4, STEPS)
    with pytest.raises(ValueError, match="steps must be at most 8, got 9"):
        chosen.event(0, STEPS + 1)
    book = ledger()
    with pytest.raises(ValueError, match="steps must be at most 8"):
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
