"""The end of the warm-up and the end of a run: by a target, by a stable loss, and after a crash."""

import jax
import numpy as np
import optax
import pytest

from jaxdp import data
from jaxdp.pretrain import RunOptions, Stable, Target, dpadapter, fit
from jaxdp.pretrain.batches import Batches
from jaxdp.pretrain.progress import Progress
from jaxdp.report import read_metrics

SOURCE = data.bundled("blobs").take(np.arange(60))
EXAMPLES = SOURCE.gather(np.arange(60))
PARAMS = {"w": np.zeros((2, 4), np.float32), "b": np.zeros(4, np.float32)}
SIZES = {"perturbation_batch_size": 20, "update_batch_size": 6, "seed": bytes(16)}
LEFT_OUT = ("time", "seconds")


def progress(steps=100, warmup_steps=0, **options):
    plan = Batches(60, steps, 20, 6, False, warmup_steps, 1, bytes(16))
    return Progress(plan, RunOptions(evaluate=lambda state: {}, **options))


def stop(losses, **options):
    """Returns the number of steps of a run with these losses."""
    rule = progress(**options)
    for done, loss in enumerate(losses, start=1):
        rule.trained(done, loss)
        if rule.stopped:
            return done
    return None


@pytest.mark.parametrize(
    ("losses", "tolerance", "last"),
    [
        ([4.0, 4.0, 2.0, 2.0, 1.99, 1.99, 0.0, 0.0], 0.01, 6),  # fell by half a percent
        ([4.0, 4.0, 2.0, 2.0, 1.97, 1.97, 1.96, 1.96], 0.01, 8),
        ([4.0, 4.0, 2.0, 2.0, 1.99, 1.99, 1.98, 1.98], 0.0, None),  # any fall is enough
        ([1.0, 3.0, 2.5, 0.5, 1.0, 2.0], 0.0, None),  # windows fall, single steps do not
        ([2.0, 2.0, 3.0, 3.0], 0.01, 4),  # a rising loss does not fall
        ([-1.0, -1.0, -1.001, -1.001], 0.01, 4),
        ([float("nan")] * 8, 0.5, None),
    ],
)
def test_a_run_stops_after_the_first_window_that_does_not_fall(losses, tolerance, last):
    assert stop(losses, stop_when=Stable(2, tolerance)) == last


def test_losses_of_the_warm_up_do_not_count():
    losses = [1.0] * 12
    assert stop(losses, stop_when=Stable(3, 0.1)) == 6
    assert stop(losses, stop_when=Stable(3, 0.1), warmup_steps=4) == 10
    assert stop(losses, stop_when=Stable(3, 0.1), warmup_until=Target("accuracy", 0.5)) is None


def test_the_warm_up_ends_at_the_first_due_evaluation_that_reaches_the_target():
    until = {"warmup_until": Target("accuracy", 0.5), "evaluate_every": 5}
    for accuracies, least, ascents in (
        ({5: 0.4, 10: 0.5, 15: 0.9}, 0, 10),
        ({5: 0.9, 10: 0.2, 15: 0.6}, 7, 15),  # not before warmup_steps
        ({7: 0.9, 10: 0.2}, 0, None),  # 7 was the end of a shorter run
    ):
        rule = progress(warmup_steps=least, **until)
        assert rule.plan.batches(99)[0] is None
        for done, accuracy in accuracies.items():
            rule.evaluated(done, {"accuracy": accuracy})
        assert rule.first_ascent == ascents
        if ascents:
            assert rule.plan.batches(ascents - 1)[0] is None
            assert rule.plan.batches(ascents)[0] is not None


def mean_loss(params, batch):
    logits = batch["features"] @ params["w"] + params["b"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


TRAINER = dpadapter(mean_loss, optax.sgd(0.05), gamma=0.5)


def run(workdir, dies=None, steps=60):
    """Returns the rows of the run, in the workdir or of all its steps."""

    def fitted(state):
        """Returns the mean probability of the labels."""
        w, b = jax.device_get((state.params["w"], state.params["b"]))
        logits = EXAMPLES["features"] @ w + b
        logits -= logits.max(-1, keepdims=True)
        likely = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        return {"fitted": float(likely[np.arange(60), EXAMPLES["label"]].mean())}

    def note(step, row, params):
        if step == dies:
            raise KeyboardInterrupt
        seen.append({"step": step, **row})

    seen = []
    rules = {"warmup_until": Target("fitted", 0.4), "stop_when": Stable(4, 0.1)}
    often = {"evaluate": fitted, "evaluate_every": 3, "checkpoint_every": 10}
    options = {"steps": steps, "workdir": workdir, "progress": False, **rules, **often, **SIZES}
    fit(TRAINER, PARAMS, SOURCE, callbacks=[note], **options)
    if workdir is None:
        return seen
    rows = read_metrics(workdir / "metrics.jsonl")
    return [{name: row[name] for name in row if name not in LEFT_OUT} for row in rows]


@pytest.mark.slow
def test_an_interrupted_run_decides_as_a_whole_one(tmp_path):
    whole = run(None)
    for dies in (13, 22):  # in the warm-up, and in the window after which it stops
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, dies)
    assert run(tmp_path, steps=200) == whole
    assert run(tmp_path, dies=len(whole) + 1) == whole  # no step more
    first = ["ascent_gradient_norm" in row for row in whole].index(True)
    assert 13 < first < 22 < len(whole) < 60 and first % 3 == 0
    assert whole[first - 1]["fitted"] >= 0.4 > whole[first - 4]["fitted"]
    losses = np.array([row["loss"] for row in whole[first:]]).reshape(-1, 4).mean(1)
    falls = losses[:-1] - losses[1:] >= 0.1 * losses[:-1]
    assert falls.tolist() == [True] * (len(falls) - 1) + [False]
    assert "fitted" in whole[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_until": Target("accuracy", 0.5)}, r"warmup_until=.* needs `evaluate`"),
        ({"stop_when": Stable(0, 0.1)}, r"stop_when must have steps of at least 1 .*steps=0"),
        ({"stop_when": Stable(5, 1.0)}, r"a tolerance in \[0, 1\), got .*tolerance=1.0"),
        ({"stop_when": Stable(5, float("nan"))}, r"a tolerance in \[0, 1\)"),
    ],
)
def test_rules_that_cannot_be_are_refused_before_anything_is_done(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit(TRAINER, PARAMS, SOURCE, steps=4, workdir=tmp_path / "run", **arguments, **SIZES)
    assert not (tmp_path / "run").exists()


def test_a_target_that_evaluate_does_not_return_and_lost_rows_are_refused():
    rule = progress(warmup_until=Target("accuracy", 0.5))
    with pytest.raises(ValueError, match=r"evaluate must return 'accuracy', .* got \['loss'\]"):
        rule.evaluated(5, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"rows of the 2 finished steps, .* got 1 rows"):
        rule.replay([{"step": 1, "loss": 1.0}], 2)


@pytest.mark.slow
def test_another_rule_in_the_workdir_is_refused(tmp_path):
    options = {"steps": 2, "workdir": tmp_path, "progress": False, **SIZES}
    fit(TRAINER, PARAMS, SOURCE, stop_when=Stable(5, 0.1), **options)
    for other in ({}, {"stop_when": Stable(5, 0.2)}):
        with pytest.raises(ValueError, match=r"a run with another stop_when\."):
            fit(TRAINER, PARAMS, SOURCE, **other, **options)
    state = fit(TRAINER, PARAMS, SOURCE, stop_when=Stable(5, 0.1), **{**options, "steps": 3})
    assert int(jax.device_get(state.step)) == 3
