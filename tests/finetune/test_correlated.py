"""A run with correlated noise is one release: it pays at its start, and again where it forks."""

import contextlib
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import dp_event

import jaxdp
from jaxdp import data, finetune
from jaxdp.audit.finetune import audit_sampling, audit_step
from jaxdp.audit.whole_runs import audit_whole_run
from jaxdp.finetune import loop
from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.privacy.events import composition
from jaxdp.release import Mark, mark_again, notes, stream

BLOBS = data.bundled("blobs").take(np.arange(60))
SAMPLER = data.FixedOrderSampler(60, 20)
STEPS = 2 * SAMPLER.steps_per_epoch
PARAMS = {"w": jnp.zeros(2)}
WHOLE = dp_event.GaussianDpEvent(1.0)


def noise_of(steps=STEPS, **pattern):
    pattern = {"participations": 2, "min_separation": 3, **pattern}
    return jaxdp.correlated([1.0, 0.5, 0.25], steps=steps, **pattern)


def loss(params, example):
    return ((example["features"] @ params["w"] - example["label"]) ** 2).sum()


def trainer_of(make=finetune.dp_sgd, loss_fn=loss, **options):
    noise = options.get("noise", noise_of())
    multiplier = noise.sensitivity if noise else 1.0
    defaults = {
        "sampler": SAMPLER,
        "clip_norm": 1.0,
        "noise": noise,
        "noise_multiplier": multiplier,
        "engine": "vmap",
        "physical_batch_size": 20,
    }
    return make(loss_fn, optax.sgd(0.01), **defaults | options)


@functools.cache
def shared_trainer():
    return trainer_of()


def fit(trainer, ledger, name="blobs", **arguments):
    arguments = {"source": BLOBS, "steps": STEPS, "checkpoint_every": 2, **arguments}
    source = arguments.pop("source")
    account = ledger.account(name)
    return finetune.fit(trainer, PARAMS, source, account=account, progress=False, **arguments)


def ledger_of(epsilon=None):
    ledger = Ledger.in_memory()
    terms = {"adjacency": "add_remove", "unit": "example", "delta": 1e-6}
    ledger.register("blobs", epsilon=epsilon, **terms)
    return ledger


def charged(ledger, name="blobs"):
    return composition(ledger.events(name).get(None, dp_event.NoOpDpEvent()))


# --- Events -------------------------------------------------------------------------------------


def test_the_whole_run_is_one_event():
    trainer = shared_trainer()
    assert trainer.event(0, 0) == dp_event.NoOpDpEvent()
    for last in (1, STEPS):
        assert trainer.event(0, last) == WHOLE
    with pytest.raises(ValueError, match=r"first must be 0, got 1. All 6 steps"):
        trainer.event(1, STEPS)
    with pytest.raises(ValueError, match="steps must be at most 6, got 7"):
        trainer.event(0, STEPS + 1)


def test_a_target_is_met():
    trainer = trainer_of(noise_multiplier=None, epsilon=2.0, delta=1e-6)
    spent = jaxdp.privacy.epsilon(trainer.event(0, STEPS), delta=1e-6)
    assert 1.999 < spent <= 2.0
    with pytest.raises(ValueError, match="steps must be 6, as in correlated"):
        trainer_of(noise_multiplier=None, epsilon=2.0, delta=1e-6, steps=5)


POISSON = data.PoissonSampler(60, 0.3)
REFUSED = [
    ({"sampler": POISSON}, "sampler must bound how often"),
    ({"noise": noise_of(participations=1)}, "Give it participations=2, min_separation=3"),
    ({"noise": noise_of(min_separation=4)}, "again after 3 steps"),
    ({"noise": None}, "no event of a single step"),
    ({"noise": None, "make": finetune.adp_clip}, "noise"),
]


@pytest.mark.parametrize("options, text", REFUSED)
def test_a_sampler_that_does_not_fit_the_noise_is_refused(options, text):
    if options.get("make") is finetune.adp_clip:
        with pytest.raises(ValueError, match="no event of a single step"):
            finetune.adp_clip(
                loss, optax.sgd(0.1), sampler=SAMPLER, clip_norm=1.0, noise_multiplier=1.0
            )
        return
    with pytest.raises(ValueError, match=text):
        trainer_of(**options)


def test_audits_of_single_steps_refuse_correlated_noise():
    terms = {"trials": 2, "delta": 1e-5}
    for audit in (
        lambda: audit_step(shared_trainer(), PARAMS, BLOBS, **terms),
        lambda: audit_sampling(shared_trainer(), trials=2),
    ):
        with pytest.raises(ValueError, match="trainer must have independent noise"):
            audit()
    with pytest.raises(ValueError, match="trainer must have noise="):
        audit_whole_run(trainer_of(noise=None, sampler=POISSON), PARAMS, BLOBS, **terms)


@pytest.mark.parametrize("row, feature", [(0, 0.0), (60, 1.0)])
def test_an_audit_of_a_canary_that_changes_no_sum_is_refused(row, feature):
    """Without a gradient, or in no batch, the canary would find any mechanism consistent."""
    source = data.from_arrays(
        features=np.full((61, 2), feature, np.float32), label=np.ones(61, np.int32)
    )
    with pytest.raises(ValueError, match="row must be an example that changes a sum, got"):
        audit_whole_run(shared_trainer(), PARAMS, source, row=row, trials=40, delta=0.1)


# --- Runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A ledger and the workdir of a run that stopped after two of its six steps."""
    ledger, folder = ledger_of(), tmp_path_factory.mktemp("correlated")
    state = fit(shared_trainer(), ledger, workdir=folder, steps=2)
    return ledger, folder, state


@pytest.mark.slow
def test_a_run_pays_for_all_its_steps_at_its_start_and_goes_on_for_free(stopped, tmp_path):
    ledger, folder, state = stopped
    assert charged(ledger) == {WHOLE: 1}
    assert any(np.any(x) for x in jax.tree.leaves(state.buffers))
    with pytest.raises(ValueError, match="Its steps are one release"):
        fit(shared_trainer(), ledger, workdir=folder, source=BLOBS.take(np.arange(60)[::-1]))
    other_order = trainer_of(sampler=data.FixedOrderSampler(60, 20, seed=b"1" * 16))
    with pytest.raises(ValueError, match="Its steps are one release"):
        fit(other_order, ledger, workdir=folder)
    fit(shared_trainer(), ledger, workdir=folder)
    assert charged(ledger) == {WHOLE: 1}
    assert [row["first_step"] for row in notes(folder)] == [0, 2, 4]
    # The run has ended, so no checkpoint holds earlier noise.
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == str(STEPS)
    assert not (folder / "secret_seed").exists()


class Crash(Exception):
    pass


def crash_at(step):
    def callback(at, metrics, params):
        if at == step:
            raise Crash

    return callback


@pytest.mark.slow
@pytest.mark.parametrize("change", ["nothing", "program"])
def test_an_interrupted_chunk_pays_for_a_whole_run_only_if_it_differs(tmp_path, change):
    ledger = ledger_of()
    with pytest.raises(Crash):
        fit(
            shared_trainer(),
            ledger,
            workdir=tmp_path,
            seed=bytes(16),
            callbacks=[crash_at(3)],
        )
    trainer = shared_trainer()
    if change == "program":
        trainer = trainer_of(loss_fn=lambda params, example: 0.5 * loss(params, example))
    for _ in range(2):  # also after the repetition was interrupted
        with pytest.raises(Crash):
            fit(trainer, ledger, workdir=tmp_path, seed=bytes(16), callbacks=[crash_at(4)])
    state = fit(trainer, ledger, workdir=tmp_path, seed=bytes(16))
    if change == "nothing":
        assert charged(ledger) == {WHOLE: 1}
        whole = fit(shared_trainer(), ledger_of(), seed=bytes(16))
        np.testing.assert_array_equal(state.params["w"], whole.params["w"])
        np.testing.assert_array_equal(state.buffers["w"], whole.buffers["w"])
    else:
        assert charged(ledger) == {WHOLE: 2}


def stopped_and_copied(folder):
    """Returns a ledger, and two equal workdirs of a run that crashed in its second chunk."""
    ledger, own, other = ledger_of(), folder / "own", folder / "copy"
    with pytest.raises(Crash):
        fit(shared_trainer(), ledger, workdir=own, callbacks=[crash_at(3)])
    shutil.copytree(own, other)
    return ledger, own, other


@pytest.mark.slow
def test_a_copy_of_a_workdir_that_went_on_pays_for_a_whole_run(tmp_path):
    ledger, own, other = stopped_and_copied(tmp_path)
    first = fit(shared_trainer(), ledger, workdir=own)
    assert charged(ledger) == {WHOLE: 1}
    # The copy repeats the bits of the chunk that was begun, and then goes on with fresh ones.
    with pytest.raises(Crash):
        fit(shared_trainer(), ledger, workdir=other, callbacks=[crash_at(5)])
    assert charged(ledger) == {WHOLE: 2}
    # An attempt that has paid is repeated for free.
    second = fit(shared_trainer(), ledger, workdir=other)
    assert charged(ledger) == {WHOLE: 2}
    assert np.any(first.params["w"] != second.params["w"])
    # A mark costs nothing, and is a row of the history with its steps.
    labels = [row["label"] for row in ledger.history("blobs") if row["event"] == "NoOp()"]
    assert [label.split(", attempt")[0] for label in labels] == [
        "training, steps 2..3",
        "training, steps 4..5",
    ]


@pytest.mark.slow
def test_a_copy_is_noticed_under_another_account(tmp_path):
    ledger, own, other = stopped_and_copied(tmp_path)
    fit(shared_trainer(), ledger, workdir=own)
    ledger.register("renamed", adjacency="add_remove", unit="example", delta=1e-6)
    fit(shared_trainer(), ledger, workdir=other, name="renamed")
    # One for the steps that it has taken, under the new name, and one for those after them.
    assert charged(ledger, "renamed") == {WHOLE: 2}


@pytest.mark.slow
def test_a_copy_is_not_noticed_without_marks(tmp_path, monkeypatch):
    reserve = functools.partial(contextlib.nullcontext, [])
    monkeypatch.setattr(Mark, "reserve", lambda *mark, **words: reserve())
    monkeypatch.setattr(loop, "mark_again", lambda rows, account: None)
    ledger, own, other = stopped_and_copied(tmp_path)
    for workdir in (own, other):
        fit(shared_trainer(), ledger, workdir=workdir)
    assert charged(ledger) == {WHOLE: 1}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [slice(0), slice(1)])
def test_a_run_that_lost_notes_pays_again_once(tmp_path, lost):
    ledger = ledger_of()
    fit(shared_trainer(), ledger, workdir=tmp_path, steps=4)
    path = tmp_path / "charges.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # A copy whose notes are older than its checkpoints has some of them.
    path.write_text("".join(lines[lost]))
    fit(shared_trainer(), ledger, workdir=tmp_path, checkpoint_every=1)
    assert charged(ledger) == {WHOLE: 2}


def mark_of(ledger, rows, first):
    return Mark(ledger.account("blobs"), rows, first)


def test_one_of_two_attempts_makes_the_mark():
    ledger = ledger_of(epsilon=jaxdp.privacy.epsilon(WHOLE, delta=1e-6))
    paid = {"first_step": 0, "next_step": 2, "token": "0", "charges": [["blobs", "..."]]}
    with ledger.spend("blobs", WHOLE, token="0"):
        pass
    mark = mark_of(ledger, [paid], 2)
    assert not mark.is_lost and not mark.is_begun()
    # Both looked before one of them made it. A repetition of that one is free.
    for _ in range(2):
        with mark.reserve(label="steps", token="a" * 64) as charges:
            assert charges == []
    with pytest.raises(ValueError, match="another process began just now"):
        mark.reserve(label="steps", token="b" * 64).__enter__()
    assert mark.is_begun() and mark.is_foreign("b" * 64) and not mark.is_foreign("a" * 64)
    assert mark_of(ledger, [], 2).is_lost and mark_of(ledger, [paid], 4).is_lost
    # A ledger that lost the mark gets it back from the notes of the attempt.
    restored = ledger_of()
    noted = {"first_step": 2, "next_step": 4, "token": "a" * 64, "charges": []}
    mark_again([paid, noted], restored.account("blobs"))
    again = mark_of(restored, [paid], 2)
    assert again.is_foreign("b" * 64) and not again.is_foreign("a" * 64)
    assert not charged(restored)


@pytest.mark.slow
def test_a_run_that_does_not_fit_spends_nothing():
    ledger = ledger_of(epsilon=1.0)
    with pytest.raises(BudgetExceeded):
        fit(shared_trainer(), ledger)
    assert not charged(ledger)


@pytest.mark.slow
def test_devices_that_share_the_buffers_release_what_one_does():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    trainer = trainer_of(
        mesh=mesh, param_sharding=lambda path, leaf: jax.sharding.PartitionSpec("data")
    )
    states = []
    for own in (shared_trainer(), trainer):
        state = own.init(PARAMS)
        noise = state.noise._replace(key=stream(bytes(16), "gradient noise"))
        state = own.placed(state._replace(noise=noise))
        for _ in range(3):
            state, _ = own.step(state, BLOBS)
        states.append(state)
    one, two = states
    spec = two.buffers["w"].sharding.spec
    assert spec == jax.sharding.PartitionSpec(None, "data")
    np.testing.assert_allclose(two.params["w"], one.params["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(two.buffers["w"], one.buffers["w"], rtol=1e-5, atol=1e-5)


# --- Rounds -------------------------------------------------------------------------------------


def rounds_of(ledger, folder, average, **arguments):
    """Returns the parameters after three rounds of two steps, which a server turns around."""
    params = PARAMS
    for k in range(3):
        terms = {"workdir": folder, "steps": 2 * k + 2, "round_start": 2 * k, **arguments}
        state = finetune.fit(
            shared_trainer(),
            params,
            BLOBS,
            account=ledger.account("blobs"),
            progress=False,
            **terms,
        )
        params = average(state.params)
    return state.params


@pytest.mark.slow
def test_rounds_of_one_run_share_its_noise_and_pay_once(tmp_path):
    seed = bytes(range(16))
    plain = ledger_of()
    whole = fit(shared_trainer(), plain, workdir=tmp_path / "whole", seed=seed)
    ledger = ledger_of()
    # A server that returns what it got changes nothing, so the rows of noise went on.
    moved = rounds_of(ledger, tmp_path / "same", lambda params: params, seed=seed)
    np.testing.assert_array_equal(moved["w"], whole.params["w"])
    assert charged(ledger) == charged(plain) == {WHOLE: 1}
    # Silos whose average moves the parameters, in rounds that end with other bits.
    averaging = ledger_of()
    far = rounds_of(averaging, tmp_path / "mean", lambda params: {"w": params["w"] + 1.0})
    assert np.linalg.norm(far["w"] - moved["w"]) > 0.5
    assert charged(averaging) == {WHOLE: 1}
    # A round that is done returns what it released, whatever is sent again.
    last = {"workdir": tmp_path / "mean", "round_start": 4}
    again = fit(shared_trainer(), averaging, **last)
    np.testing.assert_array_equal(again.params["w"], far["w"])
    with pytest.raises(ValueError, match="earlier rounds first"):
        fit(shared_trainer(), ledger_of(), workdir=tmp_path / "new", round_start=4)


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])
def test_a_round_that_is_asked_again_with_other_parameters_pays_again(tmp_path, is_same):
    ledger = ledger_of()

    def stop(step, row, params):
        raise KeyboardInterrupt

    fit(shared_trainer(), ledger, workdir=tmp_path, steps=2)
    terms = {"workdir": tmp_path, "steps": 4, "round_start": 2}
    with pytest.raises(KeyboardInterrupt):
        fit(shared_trainer(), ledger, callbacks=[stop], **terms)
    sent = PARAMS if is_same else {"w": jnp.ones(2)}
    account = ledger.account("blobs")
    finetune.fit(shared_trainer(), sent, BLOBS, account=account, progress=False, **terms)
    assert sum(charged(ledger).values()) == (1 if is_same else 2)
