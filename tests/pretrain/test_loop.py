"""`fit`: what every step sees, resumption after a crash, and what is refused."""

import functools
import itertools
import json
import os
import signal
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import data, pretrain
from jaxdp.pretrain import Batches, dpadapter, fit, sam
from jaxdp.report import read_metrics
from tests import forked

SEED = bytes(range(16))
SOURCE = data.bundled("blobs").take(np.arange(60))
PARAMS = {"w": np.zeros((2, 4), np.float32), "b": np.zeros(4, np.float32)}
SIZES = {"perturbation_batch_size": 20, "update_batch_size": 6, "seed": SEED, "progress": False}


def mean_loss(params, batch):
    logits = batch["features"] @ params["w"] + params["b"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@functools.cache  # Each compiles its own programs.
def trainer(**options):
    return dpadapter(mean_loss, optax.sgd(0.1, momentum=0.9), **options)


def jitter(key, example):
    return {**example, "features": example["features"] + 0.1 * jax.random.normal(key, (2,))}


class Recorder:
    """A trainer that notes the batches it is given."""

    def __init__(self, inner):
        self.inner, self.seen = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, state, first, second):
        self.seen.append(
            tuple(None if b is None else np.asarray(b["features"]) for b in (first, second))
        )
        return self.inner.step(state, first, second)


def rows_of(features):
    stored = SOURCE.gather(np.arange(len(SOURCE)))["features"]
    return [int(np.flatnonzero((stored == row).all(1))[0]) for row in features]


@pytest.mark.slow
def test_the_loop_is_the_steps_on_two_shuffles(tmp_path):
    recorder = Recorder(trainer())
    state = fit(recorder, PARAMS, SOURCE, steps=9, workdir=tmp_path, checkpoint_every=4, **SIZES)
    first, second = ([rows_of(pair[i]) for pair in recorder.seen] for i in (0, 1))
    assert [len(rows) for rows in first] == [20] * 9 and [len(rows) for rows in second] == [6] * 9
    for k in range(3):  # an epoch of B1 has three batches
        assert sorted(itertools.chain(*first[3 * k : 3 * k + 3])) == list(range(60))
    assert len(set(itertools.chain(*second))) == 54
    assert not set(second[0]) <= set(first[0])
    assert first[0] != first[3]
    expected = recorder.inner.init(PARAMS)
    for one, two in zip(first, second, strict=True):
        expected, row = recorder.inner.step(
            expected, SOURCE.gather(np.array(one)), SOURCE.gather(np.array(two))
        )
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows[-1]["loss"] == pytest.approx(float(row["loss"]), rel=1e-6)


@pytest.mark.slow
def test_a_shared_batch_is_augmented_once():
    recorder = Recorder(sam(mean_loss, optax.sgd(0.1)))
    sizes = {**SIZES, "perturbation_batch_size": 6}
    fit(recorder, PARAMS, SOURCE, steps=3, shared_batch=True, augment=jitter, **sizes)
    for first, second in recorder.seen:
        np.testing.assert_array_equal(first, second)
    drawn = Batches(60, 3, 6, 6, True, 0, 1, SEED).batches(0)[1]
    moved = recorder.seen[0][1] - SOURCE.gather(drawn)["features"]
    assert 0.03 < moved.std() < 0.3 and len(np.unique(moved)) == moved.size


@pytest.mark.slow
def test_augmentation_differs_between_batches_and_steps():
    recorder = Recorder(trainer())
    noise = {"augment": lambda key, example: {**example, "features": jax.random.normal(key, (2,))}}
    fit(recorder, PARAMS, SOURCE, steps=3, **noise, **SIZES)
    values = np.concatenate([part.ravel() for pair in recorder.seen for part in pair])
    assert len(np.unique(values)) == len(values)


@pytest.mark.slow
def test_warm_up_and_ascent_every_few_steps():
    recorder = Recorder(trainer())
    fit(recorder, PARAMS, SOURCE, steps=9, warmup_steps=3, ascent_every=2, **SIZES)
    assert [first is not None for first, _ in recorder.seen] == [s in (3, 5, 7) for s in range(9)]
    plain = fit(trainer(gamma=0.0), PARAMS, SOURCE, steps=9, **SIZES)
    warm = fit(trainer(), PARAMS, SOURCE, steps=9, warmup_steps=9, **SIZES)
    jax.tree.map(np.testing.assert_array_equal, plain.params, warm.params)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path):
    options = {"steps": 10, "augment": jitter, "checkpoint_every": 3, **SIZES}
    whole = fit(trainer(), PARAMS, SOURCE, workdir=tmp_path / "whole", **options)

    def interrupt(state):
        if int(state.step) == 6:
            raise KeyboardInterrupt
        return {"evaluated": 1.0}

    with pytest.raises(KeyboardInterrupt):
        fit(trainer(), PARAMS, SOURCE, workdir=tmp_path / "run", evaluate=interrupt, **options)
    traces = []

    def traced(params, batch):
        traces.append(len(batch["label"]))
        return mean_loss(params, batch)

    recorder = Recorder(dpadapter(traced, optax.sgd(0.1, momentum=0.9)))
    wrong = jax.tree.map(lambda x: x + 1, PARAMS)  # not read any more
    resumed = fit(recorder, wrong, SOURCE, workdir=tmp_path / "run", **options)
    assert len(recorder.seen) == 7
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert sorted(traces) == [6, 20]
    # An array that is bound to a device has other programs, which a resumed run would compile.
    assert not any(leaf.committed for leaf in jax.tree.leaves((whole, resumed)))
    without_time = [
        [
            {k: v for k, v in row.items() if k not in ("time", "seconds", "evaluated")}
            for row in read_metrics(path)
        ]
        for path in (tmp_path / "run" / "metrics.jsonl", tmp_path / "whole" / "metrics.jsonl")
    ]
    assert without_time[0] == without_time[1]
    again = fit(trainer(), PARAMS, SOURCE, workdir=tmp_path / "run", **options)
    jax.tree.map(np.testing.assert_array_equal, again, whole)


@pytest.mark.slow
def test_callbacks_and_evaluations_are_apart_from_checkpoints(tmp_path):
    seen = []

    def callback(step, row, params):
        assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == step
        seen.append((step, "evaluated" in row, params))

    how = {
        "evaluate": lambda state: {"evaluated": 1.0},
        "evaluate_every": 2,
        "callbacks": [callback],
    }
    state = fit(
        trainer(), PARAMS, SOURCE, steps=5, checkpoint_every=3, workdir=tmp_path, **how, **SIZES
    )
    assert [(step, evaluated) for step, evaluated, _ in seen] == [
        (1, 0),
        (2, 1),
        (3, 0),
        (4, 1),
        (5, 1),
    ]
    jax.tree.map(np.testing.assert_array_equal, seen[-1][2], state.params)
    assert not np.array_equal(seen[0][2]["w"], seen[1][2]["w"])


PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("test_loop", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.long_run(sys.argv[2], dies=15)
"""


def long_run(workdir, dies=None):
    def evaluate(state):
        if state.step == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    options = {**SIZES, "steps": 60, "checkpoint_every": 5, "augment": jitter, "evaluate": evaluate}
    # A trainer of its own, as in another process.
    return fit(trainer.__wrapped__(), PARAMS, SOURCE, workdir=workdir, **options)


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_end(tmp_path):
    process = forked.run(PROGRAM, __file__, tmp_path / "run", modules=forked.STAGES)
    assert process.returncode == -signal.SIGKILL, process.stderr
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert 5 <= read_metrics(metrics)[-1]["step"] < 60
    resumed, whole = long_run(tmp_path / "run"), long_run(None)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert [row["step"] for row in read_metrics(metrics)] == list(range(1, 61))


@pytest.mark.slow
def test_a_stateful_trainer_keeps_its_statistics(tmp_path):
    def with_count(params, stats, batch):
        return mean_loss(params, batch), {"passes": stats["passes"] + 1}

    made = dpadapter(with_count, optax.sgd(0.1), stateful=True)
    options = {
        "stats": {"passes": np.float32(0)},
        "workdir": tmp_path,
        "checkpoint_every": 2,
        **SIZES,
    }
    fit(made, PARAMS, SOURCE, steps=4, **options)
    assert float(fit(made, PARAMS, SOURCE, steps=6, **options).stats["passes"]) == 6


@pytest.mark.slow
def test_the_large_batch_over_several_devices():
    options = {"steps": 4, "augment": jitter, **SIZES}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    over = fit(trainer(microbatch_size=10, mesh=mesh), PARAMS, SOURCE, **options)
    alone = fit(trainer(), PARAMS, SOURCE, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), over, alone)
    assert len(over.params["w"].sharding.device_set) == 4


NOTHING, IN_SEVENS = SOURCE.take(np.zeros(0, int)), {"microbatch_size": 7}
DIVIDE = "microbatch_size must divide the"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": NOTHING}, r"source has no examples\. Give public examples"),
        ({"perturbation_batch_size": 0}, r"perturbation_batch_size must be in 1..60, .*, got 0"),
        ({"perturbation_batch_size": 61}, r"perturbation_batch_size must be in 1..60, .*, got 61"),
        ({"update_batch_size": 0}, r"update_batch_size must be in 1..60"),
        (
            {"shared_batch": True},
            r"must equal update_batch_size with shared_batch=True, got 20 and 6",
        ),
        ({"warmup_steps": 5}, r"warmup_steps must be in 0..4, the number of steps, got 5"),
        ({"steps": -1}, r"steps must be at least 0, got -1"),
        ({"ascent_every": 0}, r"ascent_every must be at least 1, got 0"),
        ({"checkpoint_every": 0}, r"checkpoint_every must be at least 1, got 0"),
        ({"evaluate_every": 0}, r"evaluate_every must be at least 1, got 0"),
        ({"seed": b"short"}, r"seed must be 16 bytes such as .* got b'short'"),
        ({"trainer": IN_SEVENS}, f"{DIVIDE} 20 examples of the perturbation batch, got 7"),
        ({"trainer": {"microbatch_size": 4}}, f"{DIVIDE} 6 examples of the update batch, got 4"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(tmp_path, arguments, message):
    given = {"trainer": {}, "source": SOURCE, "steps": 4, **SIZES, **arguments}
    with pytest.raises(ValueError, match=message):
        fit(trainer(**given.pop("trainer")), PARAMS, workdir=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_run_with_numbers_of_numpy_goes_on_with_numbers_of_python(tmp_path):
    numbers = {"warmup_steps": 1, "perturbation_batch_size": 20, "update_batch_size": 6}
    of_numpy = {name: np.int64(number) for name, number in numbers.items()}
    options = {"workdir": tmp_path, "seed": SEED, "progress": False}
    fit(trainer(gamma=np.float32(0.5)), PARAMS, SOURCE, steps=np.int64(2), **options, **of_numpy)
    state = fit(trainer(gamma=0.5), PARAMS, SOURCE, steps=3, **options, **numbers)
    assert state.step == 3


def test_another_run_in_the_workdir_is_refused(tmp_path):
    options = {"workdir": tmp_path, **SIZES}
    fit(trainer(), PARAMS, SOURCE, steps=4, **options)
    for other, changed, message in (
        (trainer(gamma=1.0), {}, "another gamma[.]"),
        (
            trainer(),
            {"update_batch_size": 7, "seed": bytes(16)},
            "another seed, update_batch_size[.]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fit(other, PARAMS, SOURCE, steps=4, **{**options, **changed})
    with pytest.raises(ValueError, match=r"another data[.]"):
        fit(trainer(), PARAMS, data.bundled("blobs").take(np.arange(1, 61)), steps=4, **options)
    with pytest.raises(ValueError, match="holds a run of 4 steps, more than steps=3"):
        fit(trainer(), PARAMS, SOURCE, steps=3, **options)
    assert json.loads((tmp_path / "run.json").read_text())["gamma"] == 2.0


@pytest.mark.slow
def test_no_step_at_all_is_the_start():
    state = fit(trainer(), PARAMS, SOURCE, steps=0, **SIZES)
    jax.tree.map(np.testing.assert_array_equal, state.params, jax.tree.map(jnp.asarray, PARAMS))


def test_a_batch_that_devices_cannot_share_is_refused_before_anything_is_done(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("data",))
    with pytest.raises(
        ValueError, match=r"perturbation_batch_size must have a multiple of 3 examples, .* got 20"
    ):
        fit(trainer(mesh=mesh), PARAMS, SOURCE, workdir=tmp_path / "run", steps=4, **SIZES)
    assert not (tmp_path / "run").exists()


def test_options_are_keywords_or_one_value(tmp_path):
    hints = typing.get_type_hints(pretrain.loop.RunKeywords)
    assert hints == typing.get_type_hints(pretrain.RunOptions)
    sizes = {name: value for name, value in SIZES.items() if name != "progress"}
    options = pretrain.RunOptions(workdir=tmp_path, warmup_steps=1, progress=False)
    fit(trainer(), PARAMS, SOURCE, steps=2, options=options, **sizes)
    other = tmp_path / "other"
    fit(trainer(), PARAMS, SOURCE, steps=2, options=options, workdir=other, warmup_steps=2, **sizes)
    ascents = [
        ["ascent_gradient_norm" in row for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (tmp_path, other)
    ]
    assert ascents == [[False, True], [False, False]]
    with pytest.raises(TypeError, match="warmup"):
        fit(trainer(), PARAMS, SOURCE, steps=2, warmup=2, **sizes)
