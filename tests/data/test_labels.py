"""Every consumer of (logits, labels) through one table of shapes, dtypes and unusual numbers.

The table is `launch.audits.inputs`, from which the audit of a charged accuracy draws too. Its
broken twin `broadcasting_count` is caught here and there."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import finetune, pretrain, tta
from jaxdp.data import from_arrays, take
from jaxdp.data.labels import check_range, judge, narrow, predicted
from jaxdp.finetune import evaluate
from jaxdp.models.training import fit_public
from jaxdp.privacy import Ledger
from jaxdp.recalibration import metrics
from jaxdp.recalibration.protocol import Party, Records
from jaxdp.split import baselines
from jaxdp.tta.serving import serve
from jaxdp.tta.streams import Batch
from launch import models
from launch.audits import inputs

N, K = inputs.PLAIN_LOGITS.shape
LABELS, LOGITS, VALUES = inputs.LABELS, inputs.LOGITS, inputs.VALUES
PLAIN = VALUES["plain"]
REFUSED = (TypeError, ValueError)


@functools.cache
def model(name):
    """Returns a model of batches whose logits are the features, in a form. Consumers compile it
    once."""
    return lambda params, features: LOGITS[name].make(features)


IDENTITY = model("float32 [B, K]")


class Owned:
    """A source of a user's own class. It keeps labels that `from_arrays` refuses, such as those of
    33 bits."""

    fingerprint = "of a test"

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["label"])

    def gather(self, indices):
        return {name: column[indices] for name, column in self.columns.items()}


def source(logits, labels):
    columns = {"features": np.asarray(logits), "label": labels}
    wide = (
        getattr(labels, "dtype", None) in (np.int64, np.uint64)
        and np.ptp(labels.astype(float)) > 2**31
    )
    return Owned(**columns) if wide else from_arrays(**columns)


# --- Consumers: `count(predict, logits, labels)` returns the number of right answers, or raises -


def of_judge(predict, logits, labels):
    return int(judge(np.asarray(predict(None, logits)), np.asarray(labels)).correct.sum())


def of_compiled_judge(predict, logits, labels):
    return int(
        jax.jit(judge)(
            predict(None, jnp.asarray(logits)), jnp.asarray(narrow_if_wide(labels))
        ).correct.sum()
    )


def narrow_if_wide(labels):
    """Narrows what JAX without x64 cannot hold, as consumers do on the host."""
    return narrow(labels) if np.asarray(labels).dtype.itemsize == 8 else labels


def of_accuracy(predict, logits, labels):
    return round(finetune.accuracy(predict, None, source(logits, labels)) * N)


def of_charged_count(predict, logits, labels):
    return evaluate.count_correct(predict, None, source(logits, labels))


def of_robust_accuracy(predict, logits, labels):
    params = {"zero": jnp.zeros(())}  # without noise, parameters change nothing
    found = pretrain.robust_accuracy(predict, params, source(logits, labels), std=0.0, draws=1)
    return round(float(found[0]) * N)


class Adapted:
    def __init__(self, predict):
        self.predict = predict

    def logits(self, images, *, batch_size):
        return self.predict(None, jnp.asarray(images))


def of_split_accuracy(predict, logits, labels):
    return round(baselines.accuracy(Adapted(predict), logits, labels) * N)


class Server:
    """An adapter that does not adapt."""

    accumulate, method = 1, object()

    def __init__(self, predict):
        self.predict = predict

    def init(self):
        return State(0, {}, jax.random.key(0))

    def step(self, state, images, key=None, mask=None):
        return state._replace(step=state.step + 1), self.predict(None, images)


class State(NamedTuple):
    step: int
    params: dict
    key: jax.Array


def of_serving(predict, logits, labels):
    names = {"domains": ("d",) * N, "positions": np.arange(N), "units": tuple(range(N))}
    batch = Batch(images=logits, labels=labels, mask=np.ones(N, bool), reset=False, **names)
    return int(serve(Server(predict), [batch], account=None).correct.sum())


def of_records(predict, logits, labels):
    party = Party(predict(None, logits), labels)
    return int(Records(jnp.asarray(party.logits), jnp.asarray(party.labels)).correct.sum())


def of_study(predict, logits, labels):
    return int(models.judged(np.asarray(predict(None, logits)), labels).sum())


# Public data with a label out of range is a mistake of its owner. A mechanism, and what serves a
# stream, may not tell.
OF_OWNERS = {
    "accuracy": of_accuracy,
    "robust accuracy": of_robust_accuracy,
    "split accuracy": of_split_accuracy,
}
COUNTING = {
    "judge": of_judge,
    "compiled judge": of_compiled_judge,
    "charged count": of_charged_count,
    "serving": of_serving,
    "records": of_records,
    "studies": of_study,
}
CONSUMERS = OF_OWNERS | COUNTING
# They do not count answers, but need the same shapes.
METRICS = {
    "nll": metrics.nll,
    "brier": metrics.brier,
    "classwise ece": metrics.classwise_ece,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSUMERS)
def test_a_consumer_accepts_the_forms_that_fit_and_refuses_the_others(name):
    consume = CONSUMERS[name]
    for form in LABELS.values():
        labels = form.make(inputs.PLAIN_LABELS)
        if form.fits:
            assert consume(IDENTITY, inputs.PLAIN_LOGITS, labels) == inputs.RIGHT.sum()
        else:
            with pytest.raises(REFUSED):
                consume(IDENTITY, inputs.PLAIN_LOGITS, labels)
    for form_name, form in LOGITS.items():
        if form.fits:
            assert (
                consume(model(form_name), inputs.PLAIN_LOGITS, inputs.PLAIN_LABELS)
                == inputs.RIGHT.sum()
            )
        else:
            with pytest.raises(REFUSED):
                consume(model(form_name), inputs.PLAIN_LOGITS, inputs.PLAIN_LABELS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*NaN or infinite, and count as wrong")
@pytest.mark.parametrize("name", CONSUMERS)
def test_a_consumer_counts_unusual_numbers_as_wrong_or_refuses_the_labels_of_its_owner(name):
    consume = CONSUMERS[name]
    for values in VALUES.values():
        if name in OF_OWNERS and not values.labelled.all():
            with pytest.raises(ValueError, match="label"):
                consume(IDENTITY, values.logits, values.labels)
        else:
            assert consume(IDENTITY, values.logits, values.labels) == values.correct.sum()


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_judgement_tells_what_is_wrong(values):
    found = judge(values.logits, values.labels)
    for mine, right in zip(found, (values.correct, values.finite, values.labelled), strict=True):
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_refuses_other_forms(name):
    for form in LABELS.values():
        if not form.fits:
            with pytest.raises(REFUSED):
                METRICS[name]((inputs.PLAIN_LOGITS + 1) / 2, form.make(inputs.PLAIN_LABELS))
    for form in LOGITS.values():
        if not form.fits:
            with pytest.raises(REFUSED):
                METRICS[name](form.make(inputs.PLAIN_LOGITS), inputs.PLAIN_LABELS)


def test_one_logit_answers_by_its_sign_and_metrics_refuse_it():
    logits, labels = np.array([[2.0], [-1.0], [0.0], [np.nan]], np.float32), np.array([1, 0, 0, 0])
    np.testing.assert_array_equal(predicted(logits), [1, 0, 0, -1])
    np.testing.assert_array_equal(judge(logits, labels).correct, [True, True, True, False])
    assert not judge(logits, np.array([2, -1, 0, 0])).labelled[:2].any()
    for metric in METRICS.values():
        with pytest.raises(ValueError, match="K >= 2"):
            metric(logits, labels)


def test_a_model_that_returns_no_array_is_refused():
    for returned in ((PLAIN.logits,), [[1.0, 2.0]], {"logits": PLAIN.logits}):
        with pytest.raises(TypeError, match=r"predict\(params, inputs\) must be an array, got"):
            finetune.accuracy(
                lambda params, x, returned=returned: returned,
                None,
                source(PLAIN.logits, PLAIN.labels),
            )


def test_labels_that_int32_cannot_hold_become_no_class():
    wide = np.array([3, 2**32 + 3, -(2**40), 2**31 - 1], np.int64)
    np.testing.assert_array_equal(narrow(wide), [3, -1, -1, -1])
    np.testing.assert_array_equal(narrow(np.array([2**64 - 1, 7], np.uint64)), [-1, 7])


def test_errors_show_no_number_of_records_and_no_label():
    errors = []
    for call in (
        lambda: judge(np.zeros((77, 3), np.float32), np.zeros((77, 1), int)),
        lambda: judge(np.zeros((77, 3), np.float32), np.zeros(78, int)),
        lambda: judge(np.zeros((77, 1, 3), np.float32), np.zeros(77, int)),
        lambda: check_range(np.array([0, 78]), 3),
    ):
        with pytest.raises(ValueError, match=r"must be") as error:
            call()
        errors.append(str(error.value))
    assert not any("77" in text or "78" in text for text in errors)


# --- The charged count --------------------------------------------------------------------------


def neighbours():
    """Yields pairs of (logits, labels) that differ by one added record, or in one record."""
    for values in VALUES.values():
        for row in range(N):
            yield PLAIN, (np.delete(PLAIN.logits, row, 0), np.delete(PLAIN.labels, row))
            logits, labels = PLAIN.logits.copy(), PLAIN.labels.astype(values.labels.dtype)
            logits[row], labels[row] = values.logits[row], values.labels[row]
            yield PLAIN, (logits, labels)


def test_one_example_moves_the_count_by_at_most_1_in_every_form():
    """The twin of version 0.1 moves by more, because it accepts labels [n, 1]."""
    moved, twin = [], []
    for (logits, labels, *_), (other_logits, other_labels) in neighbours():
        for form in LABELS.values():
            if form.fits:
                pair = (logits, form.make(labels)), (other_logits, form.make(other_labels))
                moved.append(abs(np.subtract(*(int(judge(*one).correct.sum()) for one in pair))))
        pair = (logits, labels[:, None]), (other_logits, other_labels[:, None])
        twin.append(abs(np.subtract(*(inputs.broadcasting_count(*one) for one in pair))))
    assert max(moved) == 1 and max(twin) > 1


@pytest.mark.slow
def test_an_example_does_not_move_the_count_through_a_model_that_mixes_its_batch():
    """Half the mean of the batch is taken off. With the last example it turns five wrong answers
    into right ones."""

    def mixing(params, features):
        return features - features.mean(axis=0, keepdims=True) / 2

    data = source([[0.0, 1.0, 0.0]] * 5 + [[0.0, 99.0, 0.0]], np.zeros(N, int))
    less = take(data, np.arange(5))
    assert [evaluate.count_correct(mixing, None, part) for part in (data, less)] == [0, 0]
    # Public data are judged as a batch.
    assert [finetune.tally(mixing, None, part).correct for part in (data, less)] == [5, 0]


def paying():
    ledger = Ledger.in_memory()
    ledger.register("data", adjacency="add_remove", unit="example", delta=1e-5)
    return ledger


@pytest.mark.parametrize(
    ("predict", "labels", "params"),
    [
        (IDENTITY, inputs.PLAIN_LABELS[:, None], None),
        (IDENTITY, inputs.PLAIN_LABELS.astype(float), None),
        (model("float32 [B, 1, K]"), inputs.PLAIN_LABELS, None),
        (model("classes int32 [B]"), inputs.PLAIN_LABELS, None),
        (IDENTITY, inputs.PLAIN_LABELS, {"w": np.array([1.0, np.nan])}),
    ],
)
def test_what_cannot_be_counted_is_refused_before_anything_is_spent(predict, labels, params):
    ledger = paying()
    with pytest.raises(REFUSED):
        finetune.charged_accuracy(
            predict,
            params,
            source(PLAIN.logits, labels),
            account=ledger.account("data"),
            noise_multiplier=1.0,
        )
    assert ledger.events("data") == {}


@pytest.mark.slow
def test_values_of_records_raise_nothing_in_a_charged_accuracy():
    ledger = paying()
    for values in VALUES.values():
        private = source(values.logits, values.labels)
        found = finetune.charged_accuracy(
            IDENTITY,
            None,
            private,
            account=ledger.account("data"),
            noise_multiplier=1e-3,
            seed=bytes(16),
        )
        assert found == pytest.approx(values.correct.mean(), abs=2e-3)


# --- Counted apart ------------------------------------------------------------------------------


def test_a_dead_model_is_wrong_everywhere_and_says_so():
    dead = lambda params, features: features * jnp.nan  # noqa: E731
    data = source(PLAIN.logits, np.zeros(N, int))
    assert finetune.tally(dead, None, data) == (0, N, N)
    with pytest.warns(
        UserWarning, match=f"{N} of {N} answers have a logit that is NaN or infinite"
    ):
        assert finetune.accuracy(dead, None, data) == 0.0


def test_a_stream_counts_logits_that_are_not_finite_apart():
    values = VALUES["all NaN, label 0"]
    names = {"domains": ("d",) * N, "positions": np.arange(N), "units": tuple(range(N))}
    batch = Batch(
        images=values.logits, labels=values.labels, mask=np.ones(N, bool), reset=False, **names
    )
    served = serve(Server(IDENTITY), [batch, batch], account=None)
    assert served.not_finite.tolist() == [1, 1] and served.correct.tolist() == [3, 3]


def test_a_monitor_counts_images_with_logits_that_are_not_finite():
    monitor = tta.CollapseMonitor(
        lambda params, x: x * params["w"], {"w": jnp.ones(())}, PLAIN.logits
    )
    report = monitor({"w": jnp.float32(jnp.nan)})
    assert (report.agreement, report.not_finite, report.collapsed) == (0.0, N, True)
    with pytest.raises(
        ValueError, match="source model has NaN or infinite logits for 6 of 6 probe_images"
    ):
        tta.CollapseMonitor(lambda params, x: x * jnp.nan, {"w": jnp.ones(())}, PLAIN.logits)
    with pytest.raises(ValueError, match="K >= 2"):
        tta.CollapseMonitor(lambda params, x: x[:, :1], {"w": jnp.ones(())}, PLAIN.logits)


# --- Parameters that are not finite -------------------------------------------------------------


def broken_params(value):
    return {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.array([0.0, value])}}


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_public_training_from_broken_parameters_names_the_leaf(value):
    with pytest.raises(ValueError, match="params has NaN or infinite values in 'dense/bias'"):
        fit_public(
            lambda params, example: params["dense"]["bias"].sum(),
            broken_params(value),
            {"x": np.zeros((4, 3), np.float32)},
            optax.sgd(0.1),
            steps=1,
            batch_size=2,
            seed=bytes(16),
        )
