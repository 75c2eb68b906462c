"""Audits of recalibration: how much they find, and by which candidates.

`tests/launch/test_audit.py` has broken twins of every method.

Runs have fixed seeds. Over the choice of a seed, a healthy source fails with probability below
0.001, the confidence of the bounds; that broken ones are caught and that much is found fails with
probability of about 0.01."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.audit import recalibration as canaries
from jaxdp.recalibration import AccT, HistogramBinning, NllT, Party

SEED, CLASSES = bytes(range(16)), 3
RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(size=(5, CLASSES)).astype(np.float32), RNG.integers(0, CLASSES, 5)


def audit(method, *, epsilon=1.0, trials=400, **options):
    options = {"confidence": 0.999, "seed": SEED, **options}
    return canaries.audit_source(method, LOGITS, LABELS, epsilon=epsilon, trials=trials, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "adjacency"),
    [(HistogramBinning(bins=2), "add_remove"), (AccT(iterations=1), "replace_one")],
)
def test_private_answers_pass_and_much_of_epsilon_is_found(method, adjacency):
    found = audit(method, epsilon=2.0, adjacency=adjacency, trials=1000)
    assert found.upper == 2.0 and found.delta == 0.0 and found.trials == 2000
    assert 0.3 * found.upper < found.lower <= found.upper


@pytest.mark.slow
def test_a_source_of_one_record_that_may_be_null():
    none = np.zeros((0, CLASSES), np.float32), np.zeros(0, np.int32)
    found = canaries.audit_source(
        HistogramBinning(bins=2),
        *none,
        epsilon=2.0,
        trials=300,
        adjacency="zero_out",
        confidence=0.999,
        seed=SEED,
    )
    assert 0.25 < found.lower / 2.0 <= 1


@pytest.mark.slow
def test_candidates_are_tried_and_the_one_that_shows_most_is_taken():
    undecided = np.zeros((2, CLASSES), np.float32), np.array([0, 1])
    terms = {"epsilon": 8.0, "trials": 100, "adjacency": "replace_one"}
    with pytest.raises(ValueError, match="candidates must hold a record that changes the answers"):
        audit(NllT(bound=10.0, iterations=1), candidates=undecided, **terms)
    sure = np.vstack([undecided[0], [[0, 50, 0]]]).astype(np.float32), np.array([0, 1, 0])
    assert audit(NllT(bound=10.0, iterations=1), candidates=sure, **terms).lower > 1.0


@pytest.mark.slow
def test_conversations_of_one_call_are_those_of_single_calls_each_with_noise_of_its_own():
    """The claim is of one conversation; a call makes many."""
    terms = {"epsilon": 2.0, "adjacency": "add_remove"}
    calibrator, sources = canaries._Transcript(AccT(iterations=1), 1.0), [Party(LOGITS, LABELS)]
    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.vmap(lambda key: canaries.converse(calibrator, sources, key, **terms))(keys)
    np.testing.assert_array_equal(
        together, [canaries.converse(calibrator, sources, key, **terms) for key in keys]
    )
    assert len(np.unique(together)) == together.size


def test_the_calibrator_asks_at_the_temperature_and_keeps_every_answer():
    calibrator = canaries._Transcript(AccT(iterations=2), 0.7)
    state = calibrator.init(0.0)
    for k in range(calibrator.rounds):
        assert calibrator.question(k, state) == np.float32(0.7)
        state = calibrator.update(k, state, jnp.full(2, float(k)))
    np.testing.assert_array_equal(calibrator.finish(state), [0, 0, 1, 1, 2, 2])
    assert np.isnan(calibrator.confidence(calibrator.finish(state), jnp.zeros((4, 3)))).all()
    assert calibrator.sensitivity(0, "replace_one", 3) == AccT().sensitivity(0, "replace_one", 3)


@pytest.mark.parametrize(
    "labels, adjacency", [([-1, -1], "add_remove"), ([0], "replace_one"), ([0, 0], "replace_one")]
)
def test_candidates_that_change_no_answer_are_refused(labels, adjacency):
    """With equal or invalid candidates, the audit would find any mechanism consistent."""
    candidates = (np.zeros((len(labels), CLASSES), np.float32), labels)
    with pytest.raises(ValueError, match="candidates must hold a record that changes the answers"):
        audit(AccT(iterations=1), candidates=candidates, adjacency=adjacency)


def test_arguments_are_checked_before_anything_runs():
    with pytest.raises(
        ValueError, match="adjacency must be 'add_remove', 'zero_out' or 'replace_one', got 'user'"
    ):
        audit(AccT(), adjacency="user")
    with pytest.raises(ValueError, match="epsilon must be > 0"):
        audit(AccT(), epsilon=0.0)
    with pytest.raises(ValueError, match="trials must be at least 2, got 1"):
        audit(HistogramBinning(bins=2), trials=1)
