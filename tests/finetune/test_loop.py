"""`fit`: runs that are killed, changed or refused never release what the ledger has not charged."""

import collections
import copy
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import resource
import stat
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import dp_event

from jaxdp import data, finetune
from jaxdp.files import DiskFull
from jaxdp.privacy import BudgetExceeded, Ledger, epsilon
from jaxdp.privacy.events import composition
from jaxdp.report import read_metrics
from tests import forked
from tests.compilations import text_of
from tests.finetune import killed_runs

PROGRAM = """
import json, pathlib, sys
from tests.finetune import killed_runs
killed_runs.main(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))
"""
STEPS, CHUNK = killed_runs.STEPS, killed_runs.CHUNK
STEP = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.0))


def released(folder):
    return [json.loads(line) for line in (folder / "released.jsonl").read_text().splitlines()]


def charged(folder):
    """Return how often the ledger charged a step: {event: times}."""
    with Ledger(folder / "ledger.sqlite") as ledger:
        return composition(ledger.events("digits")[None])


def metrics(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("time", "seconds")} for row in rows]


def final(folder):
    with np.load(folder / "final.npz") as arrays:
        return [(x.dtype, x.shape, x.tobytes()) for x in arrays.values()]


def assert_noise_is_never_reused(records):
    """Noise that fell on two gradients would reveal their difference."""
    sums = collections.defaultdict(set)
    for record in records:
        sums[record["noise"], record["step"]].add(record["sum"])
    assert all(len(different) == 1 for different in sums.values())


# --- Killed -------------------------------------------------------------------------------------

CHOSEN = [
    # how it dies, then what the ledger has charged and how many different steps were released by
    # then
    ({"at": "checkpoint", "time": 1}, 0, 0),  # before the secret seed is in its place
    ({"at": "reserved", "time": 1}, 3, 0),
    ({"at": "step", "time": 3}, 3, 2),
    # the first chunk is kept, of the second only the metrics are
    (
        {"at": "kept", "time": 2},
        6,
        6,
    ),
    # The metrics of repeated steps have been dropped. The second chunk's checkpoint is written but
    # not in its place. run.json and the metrics were renamed before it.
    ({"at": "checkpoint", "time": 3}, 6, 6),
    # It is in its place, but not committed in the ledger; the newest charge is confirmed first.
    ({"at": "saved", "time": 2}, 6, 6),
    ({"at": "step", "time": 4}, 12, 9),
]


# The same with correlated noise, which is paid at the first step: killed before the update of a
# step, and between the checkpoint of a chunk and the end of its release.
CORRELATED = {
    "correlated, whole": [],
    "correlated, killed": [{"at": "step", "time": 5}, {"at": "kept", "time": 1}],
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folders of one run twice: whole, and killed at chosen instants. `tests/faults` kills at every
    operation."""
    folder = tmp_path_factory.mktemp("killed")
    scenarios = {"whole": [], "chosen": [kill for kill, _, _ in CHOSEN]}
    given = [{"name": name, "kills": kills} for name, kills in scenarios.items()]
    for name, kills in CORRELATED.items():
        given.append({"name": name, "kills": kills, "options": {"correlated": True}})
    given = json.dumps(given)
    files = [folder / "stdout", folder / "stderr"]
    process = forked.start(
        PROGRAM, folder, given, modules=("jaxdp.finetune", "orbax.checkpoint"), files=files
    )
    assert process.wait(300) == 0, files[1].read_text()
    return {name: folder / name for name in [*scenarios, *CORRELATED]}


@pytest.mark.slow
def test_a_killed_run_with_correlated_noise_repeats_its_rows_and_pays_once(killed):
    whole, other = killed["correlated, whole"], killed["correlated, killed"]
    assert final(other) == final(whole)
    (event,) = charged(whole)
    # A record is eligible in three steps. Every chunk has the same groups.
    assert charged(other) == charged(whole) == {event: 3}
    assert isinstance(event, dp_event.PoissonSampledDpEvent)
    records = released(other)
    assert len(records) > STEPS
    # One sum, one row of noise and one result per step, over both runs and all repetitions.
    everything = [*records, *released(whole)]
    assert len({tuple(record.values()) for record in everything}) == STEPS
    attempts = json.loads((other / "attempts.json").read_text())
    assert [attempt["charged"] for attempt in attempts] == [3] * len(attempts)
    assert not any(attempt["finished"] for attempt in attempts[:-1])


@pytest.mark.slow
def test_a_killed_run_ends_like_one_that_was_not(killed):
    whole, other = killed["whole"], killed["chosen"]
    attempts = json.loads((other / "attempts.json").read_text())
    assert not any(attempt["finished"] for attempt in attempts[:-1])
    assert final(other) == final(whole)
    assert metrics(other) == metrics(whole)
    assert [row["step"] for row in metrics(other)] == list(range(1, STEPS + 1))
    assert charged(other) == charged(whole) == {STEP: STEPS}


@pytest.mark.slow
def test_runs_died_where_they_were_to_die(killed):
    attempts = json.loads((killed["chosen"] / "attempts.json").read_text())
    expected = [(charged, released) for _, charged, released in CHOSEN] + [(STEPS, STEPS)]
    assert [(attempt["charged"], attempt["released"]) for attempt in attempts] == expected
    kept = [attempt["checkpoints"] for attempt in attempts]
    assert kept[:4] == [[], [], [], ["3"]]
    assert any("tmp" in name for name in kept[4])
    assert "6" not in kept[4]
    assert "6" in kept[5]


@pytest.mark.slow
def test_repeated_steps_release_the_same_again(killed):
    records = [record for name in ("whole", "chosen") for record in released(killed[name])]
    assert len(records) > 2 * STEPS
    assert len({record["step"] for record in records}) == STEPS
    # One sum, one noise and one result per step, over all runs and repetitions: they share their
    # seed.
    assert len({tuple(record.values()) for record in records}) == STEPS
    assert len({record["noise"] for record in records}) == STEPS // CHUNK
    assert_noise_is_never_reused(records)


# --- Changed between crash and resume -----------------------------------------------------------


@pytest.fixture(scope="module")
def source():
    return data.bundled("digits").take(np.arange(150))


class Crash(Exception):
    pass


def crashing(monkeypatch, at):
    """Make the `at`-th step of the process raise after the gradient was released."""
    left = [at]
    step = finetune.PrivateTrainer.step

    def wrapped(*args, **kwargs):
        result = step(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            raise Crash
        return result

    monkeypatch.setattr(finetune.PrivateTrainer, "step", wrapped)


def forget_seed(folder):
    (folder / "secret_seed").unlink()


# What is changed, and after how many steps the run crashed. Chunks are of three steps.
# tests/test_stages.py has other data and other first parameters.
CHANGES = {
    "nothing": (5, {}, None),
    "the order of the examples": (
        5,
        {"source": lambda source: source.take(np.arange(150)[::-1])},
        None,
    ),
    "clip norm": (5, {"clip_norm": 0.500001}, None),
    "seed": (5, {"seed": bytes(16)}, forget_seed),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_a_crash_draws_fresh_noise_and_pays_again(
    tmp_path, monkeypatch, source, change
):
    crash, arguments, touch = CHANGES[change]
    kept = crash // CHUNK * CHUNK
    with monkeypatch.context() as patch:
        crashing(patch, at=crash)
        with pytest.raises(Crash):
            killed_runs.run(tmp_path, source, steps=6)
    assert charged(tmp_path) == {STEP: kept + CHUNK}
    before = released(tmp_path)
    assert [record["step"] for record in before] == list(range(crash))

    arguments = dict(arguments)
    changed = arguments.pop("source", lambda source: source)(source)
    if touch:
        touch(tmp_path)
    killed_runs.run(tmp_path, changed, steps=6, **arguments)
    after = released(tmp_path)[len(before) :]
    assert [record["step"] for record in after] == list(range(kept, 6))
    assert_noise_is_never_reused([*before, *after])
    if change == "nothing":
        assert after[: crash - kept] == before[kept:]
        assert charged(tmp_path) == {STEP: 6}
    else:
        assert not {record["noise"] for record in before} & {record["noise"] for record in after}
        assert not {record["sum"] for record in before} & {record["sum"] for record in after}
        assert charged(tmp_path) == {STEP: 9}
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_constant_in_the_loss_is_part_of_the_program():
    """JAX may hand a function's constants to its program as arguments; they must count
    nevertheless."""
    source = data.bundled("blobs")

    def text(constant, size):
        def loss(params, example):
            return ((params["w"] * constant).sum() - example["features"].sum()) ** 2

        sampler = data.PoissonSampler(len(source), 0.1)
        trainer = finetune.dp_sgd(
            loss,
            optax.sgd(0.1),
            sampler=sampler,
            clip_norm=1.0,
            noise_multiplier=0.0,
            physical_batch_size=4,
        )
        return text_of(trainer, trainer.init({"w": jnp.zeros(size)}), source)

    for size in (3, 10_000):
        for array in (np.asarray, jnp.asarray):
            base = np.arange(size, dtype=np.float32)
            moved = base.copy()
            moved[size // 2] = np.nextafter(moved[size // 2], np.inf, dtype=np.float32)
            assert text(array(base), size) == text(array(base), size)
            assert text(array(base), size) != text(array(moved), size)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["sampling package", "nothing"])
def test_another_sampling_package_after_a_crash_draws_fresh_noise(tmp_path, monkeypatch, change):
    trainer, ledger = shared_trainer(), blobs_ledger(delta=1e-5)

    def crash(params):
        raise Crash

    with pytest.raises(Crash):
        fit(trainer, ledger, workdir=tmp_path, steps=2, evaluate=crash)
    if change == "sampling package":
        version = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{version(name)}.1")
    fit(trainer, ledger, workdir=tmp_path, steps=2)
    assert paid_steps(ledger) == (2 if change == "nothing" else 4)


# --- Small runs ---------------------------------------------------------------------------------

BLOBS = data.bundled("blobs").take(np.arange(60))


def blobs_trainer(noise_multiplier=1.0, **kwargs):
    def loss(params, example):
        return ((example["features"] @ params["w"] - example["label"]) ** 2).sum()

    return finetune.dp_sgd(
        kwargs.pop("loss_fn", loss),
        kwargs.pop("optimizer", optax.sgd(0.01)),
        sampler=data.PoissonSampler(len(BLOBS), 0.2),
        clip_norm=1.0,
        noise_multiplier=noise_multiplier,
        physical_batch_size=8,
        engine="vmap",
        **kwargs,
    )


@functools.cache
def shared_trainer():
    """The trainer of all tests that leave it as it is, or change a copy. So it is compiled once."""
    return blobs_trainer()


@functools.cache
def averaging_trainer():
    return blobs_trainer(ema_decay=0.5)


def blobs_ledger(**terms):
    ledger = Ledger.in_memory()
    ledger.register("blobs", adjacency="add_remove", unit="example", **terms)
    return ledger


def paid_steps(ledger):
    return sum(composition(ledger.events("blobs")[None]).values())


def fit(trainer, ledger, *, source=BLOBS, params=None, **kwargs):
    defaults = {"steps": 4, "checkpoint_every": 2, "progress": False}
    params = {"w": jnp.zeros(2)} if params is None else params
    account = ledger.account(kwargs.pop("dataset", "blobs"))
    return finetune.fit(trainer, params, source, account=account, **{**defaults, **kwargs})


@pytest.mark.slow
def test_a_run_that_does_not_fit_spends_nothing(tmp_path):
    trainer = copy.copy(shared_trainer())
    budget = epsilon(trainer.event(0, 5), delta=1e-5)
    ledger = blobs_ledger(epsilon=budget, delta=1e-5)
    steps = []
    object.__setattr__(trainer, "update_in_place", Counted(trainer.update_in_place, steps))
    with pytest.raises(BudgetExceeded) as error:
        fit(trainer, ledger, steps=10, workdir=tmp_path)
    assert error.value.would_spend == pytest.approx(epsilon(trainer.event(0, 10), delta=1e-5))
    assert not steps and ledger.events("blobs") == {} and metrics(tmp_path) == []
    fit(trainer, ledger, workdir=tmp_path)
    # What is done stays, and the rest is asked for as a whole again.
    with pytest.raises(BudgetExceeded):
        fit(trainer, ledger, steps=6, workdir=tmp_path)
    assert len(steps) == 4
    state = fit(trainer, ledger, steps=5, workdir=tmp_path)
    assert int(state.step) == 5 and paid_steps(ledger) == 5


@pytest.mark.slow
def test_nobody_takes_the_room_of_a_run_that_has_begun(tmp_path):
    trainer = shared_trainer()
    ledger = blobs_ledger(epsilon=epsilon(trainer.event(0, 4), delta=1e-5), delta=1e-5)
    refused = []

    def evaluate(params):
        with pytest.raises(BudgetExceeded) as error:
            ledger.spend("blobs", trainer.event(0, 1))
        refused.append(error)
        return {}

    fit(trainer, ledger, workdir=tmp_path, evaluate=evaluate, checkpoint_every=1)
    assert len(refused) == 4
    assert paid_steps(ledger) == 4


@pytest.mark.slow
def test_an_interrupted_chunk_needs_no_room(tmp_path):
    """It is paid for: with the whole budget reserved, the run still comes to its end."""
    trainer = shared_trainer()
    ledger = blobs_ledger(epsilon=epsilon(trainer.event(0, 4), delta=1e-5), delta=1e-5)
    for place in (1, 2):

        def evaluate(params, left=[place]):  # noqa: B006
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return {}

        with pytest.raises(Crash):
            fit(trainer, ledger, workdir=tmp_path, evaluate=evaluate)
    assert int(fit(trainer, ledger, workdir=tmp_path).step) == 4
    assert paid_steps(ledger) == 4


class Counted:
    def __init__(self, function, calls):
        self._function, self._calls, self.lower = function, calls, function.lower

    def __call__(self, *args):
        self._calls.append(1)
        return self._function(*args)


def test_what_would_fail_after_the_first_chunk_fails_before(tmp_path):
    trainer, ledger = copy.copy(shared_trainer()), blobs_ledger()
    steps = []
    object.__setattr__(trainer, "update_in_place", Counted(trainer.update_in_place, steps))
    longer = data.bundled("blobs").take(np.arange(61))
    for wrong, message in (
        ({"delta": None}, "delta is needed"),
        ({"dataset": "other"}, "'other' is not registered"),
        ({"source": longer}, "source has 61 examples, but the sampler draws from 60"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"steps": -1}, "steps must be at least 0"),
        ({"seed": b"abc"}, "seed must be 16 bytes, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(trainer, ledger, **{"delta": 1e-5, **wrong})
    assert not steps
    assert ledger.events("blobs") == {}
    fit(trainer, ledger, delta=1e-5)
    assert len(steps) == 4


def test_without_noise_a_budget_refuses_before_anything_runs():
    trainer, ledger = blobs_trainer(noise_multiplier=0.0), blobs_ledger(epsilon=10.0, delta=1e-5)
    with pytest.raises(BudgetExceeded):
        fit(trainer, ledger)
    assert ledger.events("blobs") == {}


@pytest.mark.slow
def test_steps_and_chunk_sizes_may_change_on_resume(tmp_path):
    trainer, ledger = blobs_trainer(optimizer=optax.adam(0.01)), blobs_ledger(delta=1e-5)
    first = fit(trainer, ledger, workdir=tmp_path, steps=np.int64(3), checkpoint_every=100)
    again = fit(trainer, ledger, workdir=tmp_path, steps=3)
    assert np.array_equal(np.asarray(first.params["w"]), np.asarray(again.params["w"]))
    with pytest.raises(ValueError, match="a run of 3 steps, more than steps=2"):
        fit(trainer, ledger, workdir=tmp_path, steps=2)
    state = fit(trainer, ledger, workdir=tmp_path, steps=8, checkpoint_every=2)
    assert int(state.step) == 8
    assert paid_steps(ledger) == 8
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 9))
    assert [row["step"] for row in metrics(tmp_path) if "epsilon" in row] == [3, 5, 7, 8]
    assert int(fit(trainer, blobs_ledger(delta=1e-5), steps=0).step) == 0


def test_chunks_of_any_size_are_one_run_of_independent_noise():
    """Chunks draw from streams of their own: equal steps of equal chunks must not share noise or
    batches."""
    trainer, ledger, seen = copy.copy(shared_trainer()), blobs_ledger(delta=1e-5), []

    class Keys:
        def __init__(self, update):
            self._update, self.lower = update, update.lower

        def __call__(self, large, rest, sums):
            seen.append(
                (
                    jax.random.key_data(rest.noise.key).tobytes(),
                    jax.random.key_data(rest.key).tobytes(),
                )
            )
            return self._update(large, rest, sums)

    object.__setattr__(trainer, "update_in_place", Keys(trainer.update_in_place))
    drawn = []
    batch = data.PoissonSampler.batch

    def recorded(self, step):
        drawn.append((self.seed, step))
        return batch(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.PoissonSampler, "batch", recorded)
        for _ in range(2):
            fit(trainer, ledger, steps=4)
    for stream in zip(*seen, strict=True):
        assert len(set(stream)) == 4  # two runs of two chunks
    assert len(set(drawn)) == 8
    assert len({seed for seed, _ in drawn}) == 4
    assert trainer.sampler.seed not in {seed for seed, _ in drawn}


def test_the_secret_seed_is_secret_and_is_deleted(tmp_path):
    """Whoever has the seed and the notes can derive the noise: it may live only while a chunk is
    unfinished."""
    trainer, ledger, seeds = shared_trainer(), blobs_ledger(delta=1e-5), []
    path = tmp_path / "secret_seed"

    def evaluate(params):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        seeds.append(path.read_text())
        if len(seeds) == 2:
            raise Crash
        return {}

    with pytest.raises(Crash):
        fit(trainer, ledger, workdir=tmp_path, evaluate=evaluate)
    assert len(set(seeds)) == 2 and all(len(bytes.fromhex(seed)) == 16 for seed in seeds)
    assert path.read_text() == seeds[1]  # of the chunk that was interrupted
    with pytest.raises(ValueError, match="seed differs from the one of the unfinished release"):
        fit(trainer, ledger, workdir=tmp_path, seed=bytes(16))
    fit(trainer, ledger, workdir=tmp_path, evaluate=evaluate)
    assert seeds[2] == seeds[1]
    kept = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert kept and path not in kept
    for seed in seeds:
        assert not any(
            seed.encode() in p.read_bytes() or bytes.fromhex(seed) in p.read_bytes() for p in kept
        )


def test_no_seed_outlives_a_run_that_was_given_one(tmp_path):
    fit(shared_trainer(), blobs_ledger(delta=1e-5), workdir=tmp_path, seed=bytes(16))
    assert not list(tmp_path.rglob("secret_seed"))


def test_one_workdir_has_one_process(tmp_path):
    trainer, ledger = shared_trainer(), blobs_ledger(delta=1e-5)
    messages = []

    def evaluate(params):
        with pytest.raises(ValueError, match="another process is running in") as error:
            fit(trainer, ledger, workdir=tmp_path)
        messages.append(str(error.value))
        return {}

    fit(trainer, ledger, workdir=tmp_path, steps=1, evaluate=evaluate)
    assert len(messages) == 1
    assert paid_steps(ledger) == 1
    fit(trainer, ledger, workdir=tmp_path, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("place", ["evaluate", "save"])
def test_interrupts_and_full_disks_cost_nothing_twice(tmp_path, monkeypatch, error, place):
    """Control-C, or no space for a checkpoint: the chunk counts as spent, and repeating it is
    free."""
    trainer, ledger = shared_trainer(), blobs_ledger(delta=1e-5)
    expected = fit(trainer, blobs_ledger(delta=1e-5), workdir=tmp_path / "whole", seed=bytes(16))
    arguments = {"workdir": tmp_path / "run", "seed": bytes(16)}

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        if place == "save":
            import orbax.checkpoint as ocp

            patch.setattr(ocp.CheckpointManager, "save", fail)
        with pytest.raises(BaseException) as raised:
            fit(trainer, ledger, evaluate=fail if place == "evaluate" else None, **arguments)
        assert isinstance(raised.value, type(error) if isinstance(error, OSError) else error)
    assert paid_steps(ledger) == 2
    (entry,) = ledger.report()["datasets"][0]["open"]
    assert entry["status"] == "failed"
    state = fit(trainer, ledger, **arguments)
    assert np.array_equal(np.asarray(state.params["w"]), np.asarray(expected.params["w"]))
    assert paid_steps(ledger) == 4
    assert ledger.report()["datasets"][0]["open"] == []
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_a_checkpoint_that_orbax_has_no_room_for(tmp_path):
    trainer, ledger = shared_trainer(), blobs_ledger(delta=1e-5)
    workdir = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step, metrics, params):
        if step == 4:
            # No file grows. The row of the step is written already.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))

    arguments = {"workdir": workdir, "seed": bytes(16)}
    words = f"{workdir}/checkpoints/4 cannot be written: .*bytes free .*was paid is not paid again"
    try:
        with pytest.raises(DiskFull, match=words):
            fit(trainer, ledger, callbacks=[fill], **arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    paid = paid_steps(ledger)
    assert paid == 4
    state = fit(trainer, ledger, steps=4, **arguments)
    assert paid_steps(ledger) == paid
    expected = fit(trainer, blobs_ledger(delta=1e-5), steps=4, seed=bytes(16))
    assert np.array_equal(np.asarray(state.params["w"]), np.asarray(expected.params["w"]))


@pytest.mark.slow
def test_resume_with_frozen_parameters_moving_average_and_bfloat16(tmp_path):
    def loss(params, example):
        hidden = jnp.tanh(example["features"] @ params["backbone"])
        return ((hidden @ params["head"].astype(jnp.float32) - example["label"]) ** 2).sum()

    trainer = finetune.dp_sgd(
        loss,
        optax.inject_hyperparams(optax.sgd)(
            learning_rate=lambda step: 0.01 / (1 + step), momentum=0.9
        ),
        sampler=data.PoissonSampler(len(BLOBS), 0.2),
        clip_norm=1.0,
        noise_multiplier=1.0,
        physical_batch_size=8,
        ema_decay=0.9,
        trainable=lambda path, leaf: path == "head",
        engine="vmap",
    )
    params = {"backbone": np.ones((2, 3)), "head": jnp.ones(3, jnp.bfloat16), "count": np.int32(3)}
    states = []
    for name, stops in (("whole", [6]), ("resumed", [2, 4, 6])):
        ledger = blobs_ledger(delta=1e-5)
        for stop in stops:
            state = fit(
                trainer, ledger, params=params, workdir=tmp_path / name, steps=stop, seed=bytes(16)
            )
        states.append(state._replace(noise=None, key=None))
        assert paid_steps(ledger) == 6
    whole, resumed = map(jax.tree.leaves, states)
    for one, other in zip(whole, resumed, strict=True):
        assert one.dtype == other.dtype
        assert one.weak_type == other.weak_type
        assert np.array_equal(np.asarray(one), np.asarray(other))


def test_an_optimizer_may_hold_a_typed_key(tmp_path):
    noisy = optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.01))
    results = []
    for name, stops in (("whole", [2]), ("resumed", [1, 2])):
        ledger = blobs_ledger(delta=1e-5)
        for stop in stops:
            trainer = blobs_trainer(optimizer=noisy)
            words = {"workdir": tmp_path / name, "steps": stop, "seed": bytes(16)}
            state = fit(trainer, ledger, checkpoint_every=1, **words)
        results.append(np.asarray(state.params["w"]))
    assert np.array_equal(*results)


def test_parameters_without_entries_are_kept_and_paid_once(tmp_path):
    def loss(params, example):
        return (example["features"] @ params["head"] - example["label"]) ** 2 + params["none"].sum()

    trainer = finetune.dp_sgd(
        loss,
        optax.sgd(0.01, momentum=0.9),
        sampler=data.PoissonSampler(len(BLOBS), 0.2),
        clip_norm=1.0,
        noise_multiplier=1.0,
        physical_batch_size=8,
        ema_decay=0.9,
    )
    params = {"head": jnp.ones(2), "none": jnp.zeros((0, 3)), "lacks": None}
    ledger = blobs_ledger(delta=1e-5)
    for stop in (2, 4):
        state = fit(trainer, ledger, params=params, workdir=tmp_path, steps=stop)
    assert paid_steps(ledger) == 4
    assert state.params["none"].shape == state.ema["none"].shape == (0, 3)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)


@pytest.mark.filterwarnings("ignore:.*(hold NaN|has a NaN)")
def test_nan_in_the_data_does_not_stop_training():
    features = BLOBS.gather(np.arange(60))["features"].copy()
    features[::7] = np.nan
    source = data.from_arrays(
        features=features, label=BLOBS.gather(np.arange(60))["label"], num_classes=4
    )
    trainer, ledger = shared_trainer(), blobs_ledger(delta=1e-5)
    state = fit(trainer, ledger, source=source, allow_nonfinite=True)
    assert np.isfinite(np.asarray(state.params["w"])).all()


@pytest.mark.slow
def test_metrics_of_a_run(tmp_path):
    trainer, ledger = averaging_trainer(), blobs_ledger(delta=1e-5)
    seen = []

    def evaluate(params):
        seen.append(params)
        return {"accuracy": 0.25}

    state = fit(trainer, ledger, workdir=tmp_path, steps=3, evaluate=evaluate)
    rows = metrics(tmp_path)
    assert [set(row) - {"step", "released_gradient_norm"} for row in rows] == [
        set(),
        {"epsilon", "accuracy"},
        {"epsilon", "accuracy"},
    ]
    assert rows[1]["epsilon"] == pytest.approx(epsilon(trainer.event(0, 2), delta=1e-5))
    assert rows[2]["epsilon"] == ledger.epsilon("blobs")
    assert all(row["released_gradient_norm"] > 0 for row in rows)
    assert np.array_equal(np.asarray(seen[-1]["w"]), np.asarray(state.ema["w"]))
    assert not np.array_equal(np.asarray(state.ema["w"]), np.asarray(state.params["w"]))


@pytest.mark.slow
def test_resuming_with_another_ledger_charges_it_in_full(tmp_path):
    source = data.bundled("digits").take(np.arange(150))
    trainer = copy.copy(killed_runs.trainer_of(150))
    params = {"head": np.ones((64, 10), np.float32) / 8}
    object.__setattr__(trainer, "update_in_place", trainer.update_in_place._update)
    totals = []
    for path, steps in (
        ("first", CHUNK),
        ("first", 2 * CHUNK),
        ("second", 2 * CHUNK),
        ("second", 3 * CHUNK),
    ):
        with Ledger(tmp_path / path) as ledger:
            ledger.register("digits", adjacency="add_remove", unit="example", delta=1e-5)
            arguments = {
                "steps": steps,
                "account": ledger.account("digits"),
                "workdir": tmp_path / "run",
            }
            finetune.fit(
                trainer, params, source, checkpoint_every=CHUNK, progress=False, **arguments
            )
            totals.append(composition(ledger.events("digits")[None]))
        with (tmp_path / "run" / "charges.jsonl").open("a") as file:
            file.write('{"step": 3, "tok')  # torn by a crash: nothing was computed after it
    assert totals == [{STEP: n * CHUNK} for n in (1, 2, 2, 3)]


def test_another_ledger_is_charged_for_what_a_run_paid_under_other_names(tmp_path):
    first, second = Ledger.in_memory(), Ledger.in_memory()
    for ledger in (first, second):
        for name in ("old", "new"):
            ledger.register(name, adjacency="add_remove", unit="example", delta=1e-5)
    trainer = shared_trainer()
    words = {"workdir": tmp_path, "checkpoint_every": 1}
    for ledger, name, steps in ((first, "old", 1), (first, "new", 2), (second, "new", 2)):
        fit(trainer, ledger, dataset=name, steps=steps, **words)
    assert first.epsilon("new") == second.epsilon("new") == epsilon(trainer.event(0, 2), delta=1e-5)


@pytest.mark.slow
def test_evaluations_are_apart_from_checkpoints(tmp_path):
    def evaluate(params):
        return {"accuracy": 0.25}

    settings = {"steps": 7, "checkpoint_every": 4, "evaluate": evaluate}
    for every, steps in ((None, [4, 7]), (3, [3, 6, 7]), (5, [5, 7])):
        folder = tmp_path / str(every)
        fit(
            shared_trainer(),
            blobs_ledger(delta=1e-5),
            workdir=folder,
            evaluate_every=every,
            **settings,
        )
        assert [row["step"] for row in metrics(folder) if "accuracy" in row] == steps
        assert [row["step"] for row in metrics(folder) if "epsilon" in row] == [4, 7]
    with pytest.raises(ValueError, match="evaluate_every must be at least 1, got 0"):
        fit(shared_trainer(), blobs_ledger(delta=1e-5), evaluate_every=0)


@pytest.mark.slow
def test_an_evaluation_on_private_data_pays_between_two_checkpoints(tmp_path):
    trainer, ledger = shared_trainer(), blobs_ledger(delta=1e-5)
    noise = dp_event.GaussianDpEvent(20.0)

    def evaluate(params):
        how = {"account": ledger.account("blobs"), "noise_multiplier": 20.0}
        return {
            "accuracy": finetune.charged_accuracy(
                lambda p, x: x @ jnp.stack([p["w"]] * 4, 1), params, BLOBS, **how
            )
        }

    fit(
        trainer,
        ledger,
        workdir=tmp_path,
        steps=4,
        checkpoint_every=4,
        evaluate=evaluate,
        evaluate_every=2,
    )
    charged = composition(ledger.events("blobs")[None])
    assert charged[noise] == 2 and sum(charged.values()) == 6
    assert [row["step"] for row in metrics(tmp_path) if "accuracy" in row] == [2, 4]


@pytest.mark.slow
def test_callbacks_see_every_step_once_its_row_is_written(tmp_path):
    trainer, ledger, seen = averaging_trainer(), blobs_ledger(delta=1e-5), []

    def callback(step, row, params):
        # the row is on disk when its step ends
        assert metrics(tmp_path)[-1] == {
            "step": step,
            **row,
        }
        seen.append((step, np.asarray(params["w"])))

    state = fit(trainer, ledger, workdir=tmp_path, steps=3, callbacks=[callback])
    assert [step for step, _ in seen] == [1, 2, 3]
    assert np.array_equal(seen[-1][1], np.asarray(state.ema["w"]))
    times = read_metrics(tmp_path / "metrics.jsonl")
    assert all(
        a["time"] < b["time"] and a["seconds"] < b["seconds"] for a, b in itertools.pairwise(times)
    )


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 4])
def test_a_callback_that_raises_loses_nothing_that_was_paid(tmp_path, at):
    trainer, ledger, seen = shared_trainer(), blobs_ledger(delta=1e-5), []

    def callback(step, row, params):
        seen.append((step, row["released_gradient_norm"]))
        if step == at and len(seen) == at:
            raise Crash

    with pytest.raises(Crash):
        fit(trainer, ledger, workdir=tmp_path, steps=6, callbacks=[callback])
    fit(trainer, ledger, workdir=tmp_path, steps=6, callbacks=[callback])
    assert paid_steps(ledger) == 6
    assert [step for step, _ in seen] == [*range(1, at + 1), *range(3, 7)]
    assert seen[2] == seen[at]  # the repeated step has the same noise
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 7))


def test_a_step_of_fit_moves_no_array_by_accident(tmp_path):
    class Careless(finetune.PrivateTrainer):
        def total(self, state, parts):
            return super().total(
                state, [(batch, np.ones(8, bool), part) for batch, _, part in parts]
            )

    trainer = shared_trainer()
    fields = {f.name: getattr(trainer, f.name) for f in dataclasses.fields(trainer) if f.init}
    fit(trainer, blobs_ledger(delta=1e-5), steps=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        fit(Careless(**fields), blobs_ledger(delta=1e-5), steps=1)


def test_fit_leaves_the_parameters_that_it_was_given():
    # An integer leaf and a frozen leaf are equal before and after, and in params and ema. No buffer
    # is donated twice.
    def loss(params, example):
        return (
            (example["features"] * params["scale"]) @ params["w"] * params["frozen"]
            - example["label"]
        ) ** 2

    params = {"w": jnp.ones(2), "frozen": jnp.ones(()), "scale": jnp.arange(2), "same": jnp.ones(2)}
    trainer = blobs_trainer(
        loss_fn=loss, ema_decay=0.9, trainable=lambda path, leaf: path in ("w", "same")
    )
    state = fit(trainer, blobs_ledger(delta=1e-5), params=params, steps=4)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    np.testing.assert_array_equal(state.ema["scale"], params["scale"])


def test_options_are_keywords_or_one_value(tmp_path):
    hints = typing.get_type_hints(finetune.loop.RunKeywords)
    assert hints == typing.get_type_hints(finetune.RunOptions)
    options = finetune.RunOptions(workdir=tmp_path, checkpoint_every=3, progress=False)
    with blobs_ledger(delta=1e-5) as ledger:
        run = functools.partial(
            finetune.fit,
            shared_trainer(),
            {"w": jnp.zeros(2)},
            BLOBS,
            steps=2,
            account=ledger.account("blobs"),
            options=options,
        )
        run()
        run(workdir=tmp_path / "other", checkpoint_every=1)
        with pytest.raises(TypeError, match="checkpoint_evry"):
            run(checkpoint_evry=2)
    assert ["epsilon" in row for row in metrics(tmp_path)] == [False, True]
    assert ["epsilon" in row for row in metrics(tmp_path / "other")] == [True, True]
