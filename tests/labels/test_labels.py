"""Noisy labels: paid once, equal again after a crash, and nothing else of the labels gets out."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy.stats import binomtest

import jaxdp
from jaxdp import privacy
from jaxdp.audit.labels import audit_labels
from jaxdp.data import from_arrays
from jaxdp.labels import (
    METHODS,
    event,
    release_label_prior,
    release_labels,
    release_labels_in_stages,
)
from jaxdp.labels.histogram import noisy_counts
from jaxdp.privacy import BudgetExceeded, LabelDpEvent, Ledger

_SEED = bytes(range(16))
_COUNT = 600


def _records(labels=None, **columns):
    truth = np.arange(_COUNT) % 3 if labels is None else labels
    features = np.eye(3, dtype=np.float32)[np.arange(_COUNT) % 3]
    return from_arrays(features=features, label=truth, num_classes=3, name="survey", **columns)


def _new_account():
    ledger = Ledger.in_memory()
    terms = {"unit": "respondent", "epsilon": 4.0, "delta": 0.0}
    ledger.register("survey", adjacency="replace_label", **terms)
    return ledger.account("survey")


@pytest.fixture
def account():
    return _new_account()


def _truth(records):
    return records.gather(np.arange(_COUNT))["label"]


def test_labels_are_noisy_by_the_epsilon_that_is_paid(account):
    records = _records()
    noisy = release_labels(records, account=account, epsilon=1.0, seed=_SEED)
    assert account.epsilon(delta=0.0) == pytest.approx(1.0)
    assert account.ledger.events("survey") == {None: LabelDpEvent(1.0)}
    keep = np.e / (np.e + 2)
    right = int((noisy.labels == _truth(records)).sum())
    assert binomtest(right, _COUNT, keep).pvalue > 1e-6
    for wrong in (0.25, 2.0):  # a wrong epsilon is rejected
        rate = np.exp(wrong) / (np.exp(wrong) + 2)
        assert binomtest(right, _COUNT, rate).pvalue < 1e-4
    batch = noisy.gather(np.array([5, 2]))
    np.testing.assert_array_equal(batch["label"], noisy.labels[[5, 2]])
    assert set(batch) == {"features", "label"} and batch["label"].dtype == np.int32
    assert len(noisy) == _COUNT and noisy.num_classes == 3


def test_what_a_release_will_cost_is_what_it_charges(account):
    records = _records()
    release_label_prior(records, account=account, epsilon=0.5)
    METHODS["labels"](records, account=account, epsilon=1.0)
    planned = privacy.epsilon(event(1.0, prior_epsilon=0.5), delta=0.0, adjacency="replace_label")
    assert account.epsilon(delta=0.0) == pytest.approx(planned)


def test_a_prior_makes_more_answers_right(account):
    records = _records()
    prior = np.full((_COUNT, 3), 0.05)
    prior[np.arange(_COUNT), np.arange(_COUNT) % 3] = 0.9
    plain, informed = [
        release_labels(records, account=account, epsilon=0.5, prior=p, seed=_SEED).labels
        for p in (None, prior)
    ]
    right = [np.mean(labels == _truth(records)) for labels in (plain, informed)]
    assert right[0] < 0.6 and right[1] == 1.0  # k* is 1: the labels were not read


def test_nothing_about_a_true_label_is_in_the_released_source(account):
    other = _truth(_records()).copy()
    other[0] = (other[0] + 1) % 3
    fields = {"fine": np.arange(_COUNT)}
    pair = [
        release_labels(_records(labels, **fields), account=account, epsilon=0.5, seed=_SEED)
        for labels in (None, other)
    ]
    relabelled = [dataclasses.replace(noisy, labels=pair[0].labels) for noisy in pair]
    assert relabelled[0].fingerprint == relabelled[1].fingerprint
    assert "fine" not in pair[0].gather(np.arange(2))


def test_the_prior_of_a_histogram_is_charged(account):
    truth = np.repeat([0, 1, 2], [400, 150, 50])
    prior = release_label_prior(_records(truth), account=account, epsilon=1.0, seed=_SEED)
    assert account.ledger.events("survey") == {None: LabelDpEvent(1.0)}
    np.testing.assert_allclose(prior, [400 / 600, 0.25, 50 / 600], atol=45 * 2 / 600)
    noisy = release_labels(_records(truth), account=account, epsilon=0.5, prior=prior)
    assert account.epsilon(delta=0.0) == pytest.approx(1.5)
    assert noisy.response.sizes.tolist() == [1]


def test_a_prior_is_noisy():
    """Noise of three counts is 0 in 1.5 % of all releases, and in 5e-8 of four.

    The bits of a release depend on the source of jaxdp too, so each commit draws others.
    """
    truth = np.repeat([0, 1, 2], [400, 150, 50])
    priors = []
    for number in range(4):
        seed = bytes([number]) * 16
        prior = release_label_prior(_records(truth), account=_new_account(), epsilon=1.0, seed=seed)
        priors.append(prior)
    exact = np.array([400, 150, 50]) / _COUNT
    assert not np.allclose(priors, np.tile(exact, (4, 1)), atol=1e-5)


def test_the_noise_of_a_histogram_has_the_scale_of_its_epsilon():
    zeros = np.zeros(20_000, np.int64)
    drawn = np.abs(noisy_counts(jax.random.key(0, impl="threefry2x32"), zeros, 0.5))

    def expected(scale):
        rate = np.exp(-1 / scale)
        return 2 * rate / (1 - rate**2)

    # The deviation of the mean is about 4 / sqrt(20,000), 0.03.
    assert abs(drawn.mean() - expected(4.0)) < 0.15
    for wrong in (0.7, 1.3, 0.5):  # a sensitivity of 1 in place of 2
        assert abs(drawn.mean() - expected(wrong * 4)) > 0.9


def _beliefs(noisy, records):
    """Returns a belief of 0.9 in the commonest noisy label of records with the same features."""
    before = noisy.gather(np.arange(len(noisy)))
    rows = records.gather(np.arange(len(records)))["features"]
    assert set(before) == {"features", "label"}
    counts = before["features"].T @ np.eye(3)[before["label"]]
    return rows @ (0.05 + 0.85 * np.eye(3)[counts.argmax(1)])


def test_stages_cost_one_epsilon_and_make_more_labels_right(account, tmp_path):
    records = _records()

    def staged(**options):
        given = {"workdir": tmp_path, "seed": _SEED, "stages": 3} | options
        return release_labels_in_stages(records, _beliefs, account=account, epsilon=1.0, **given)

    noisy = staged()
    assert account.epsilon(delta=0.0) == pytest.approx(1.0)
    assert len(account.ledger.events("survey")) == 3
    sizes = noisy.response.sizes
    assert np.sum(sizes == 3) >= _COUNT // 3 and np.sum(sizes == 1) > _COUNT // 4
    right = noisy.labels == _truth(records)
    assert right[sizes == 1].mean() > 0.9 > 0.7 > right[sizes == 3].mean()
    likelihood = noisy.corrected().gather(np.arange(_COUNT))["likelihood"]
    np.testing.assert_allclose(likelihood[sizes == 1], 1)
    again = staged()
    np.testing.assert_array_equal(again.labels, noisy.labels)
    assert account.epsilon(delta=0.0) == pytest.approx(1.0)
    # A part of another division may hold the same record, so the maximum would be too low.
    for other in ({"split_seed": 1}, {"stages": 2}):
        with pytest.raises(ValueError, match="another division"):
            staged(workdir=None, **other)


@pytest.mark.parametrize("with_parts", [True, False])
def test_another_ledger_pays_for_the_parts_that_a_workdir_keeps(account, tmp_path, with_parts):
    def staged(ledger):
        words = {"account": ledger.account("survey"), "epsilon": 1.0, "workdir": tmp_path}
        return release_labels_in_stages(_records(), _beliefs, **words)

    def registered(epsilon):
        ledger = Ledger.in_memory()
        terms = {"unit": "respondent", "epsilon": epsilon, "delta": 0.0}
        ledger.register("survey", adjacency="replace_label", **terms)
        return ledger

    kept = staged(account.ledger)
    if not with_parts:  # Earlier versions did not note the part.
        for path in tmp_path.rglob("charges.jsonl"):
            row = json.loads(path.read_text())
            del row["partition"]
            path.write_text(f"{json.dumps(row)}\n")
    np.testing.assert_array_equal(staged(account.ledger).labels, kept.labels)
    assert len(account.ledger.report()["datasets"][0]["spends"]) == 2
    other = registered(epsilon=1.0)
    np.testing.assert_array_equal(staged(other).labels, kept.labels)
    assert other.events("survey") == account.ledger.events("survey")
    assert other.epsilon("survey", delta=0.0) == pytest.approx(1.0)
    small = registered(epsilon=0.5)
    with pytest.raises(BudgetExceeded):
        staged(small)
    assert small.epsilon("survey", delta=0.0) == 0


def test_the_model_of_a_stage_sees_no_true_label(account):
    def read_labels(noisy, records):
        return np.eye(3)[records.gather(np.arange(len(records)))["label"]]

    with pytest.raises(KeyError, match="label"):
        release_labels_in_stages(_records(), read_labels, account=account, epsilon=1.0)


def test_a_corrected_loss_is_least_at_the_true_distribution():
    matrix = np.array([[0.7, 0.3], [0.1, 0.9]])  # P(noisy | true)
    truth = np.array([0.2, 0.8])
    noisy = truth @ matrix

    def loss(logit):
        logits = np.array([0.0, logit], np.float32)
        each = [
            jaxdp.losses.corrected_cross_entropy(logits, matrix[:, answer]) for answer in (0, 1)
        ]
        return float(noisy @ np.array(each))

    best = np.log(4.0)
    assert loss(best) < min(loss(best - 0.2), loss(best + 0.2))
    with pytest.raises(ValueError, match="likelihood"):
        jaxdp.losses.corrected_cross_entropy(np.zeros(3, np.float32), np.ones(2))


@pytest.mark.parametrize("pair", [(1, 1), (0, 3), (-1, 0)])
def test_an_audit_of_one_label_is_refused(pair):
    """Nothing tells a label from itself, so any mechanism would be consistent."""
    with pytest.raises(ValueError, match="pair must be two labels of the 3 classes, got"):
        audit_labels(release_labels, num_classes=3, epsilon=1.0, trials=400, pair=pair)
