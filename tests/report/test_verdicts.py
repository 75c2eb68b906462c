"""Verdicts: words have thresholds, no number understates a risk, and they say what the ledger
says."""

import math

import pytest

from jaxdp.privacy import GaussianDpEvent, Ledger, PureDpEvent, unproven
from jaxdp.report import grade, guess_rate, verdict


@pytest.mark.parametrize(
    ("rate", "word"),
    [
        (0.5, "strong"),
        (0.74, "strong"),
        (0.76, "moderate"),
        (0.91, "weak"),
        (0.9995, "practically none"),
    ],
)
def test_words_follow_the_rate_of_right_guesses(rate, word):
    epsilon = math.log(rate / (1 - rate))
    assert guess_rate(epsilon) == pytest.approx(rate) and grade(epsilon) == word


def test_a_large_delta_takes_the_good_words_away():
    assert grade(0.1, 1e-5, 1000) == "strong"
    assert grade(0.1, 1e-5, 10_000) == "weak"  # 0.1 exposed records
    assert grade(0.1, 1e-5, 100_000) == "practically none"
    assert grade(math.inf) == "practically none" and guess_rate(math.inf, 1e-5) == 1.0


def account(*events, **terms):
    with Ledger(":memory:") as ledger:
        given = {
            "adjacency": "add_remove",
            "unit": "image",
            "epsilon": 10.0,
            "delta": 1e-5,
            "records": 860,
        } | terms
        ledger.register("data", **given)
        for event in events:
            with ledger.spend("data", event):
                pass
        return ledger.report()["datasets"][0]


def test_a_verdict_is_one_sentence_with_safe_numbers():
    entry = account(GaussianDpEvent(0.7))
    found = verdict(entry)
    assert found.word == "practically none"
    assert found.sentence.startswith(
        "Practically no protection: a coin toss over whether a certain image was in it"
    )
    assert (
        float(found.epsilon) >= entry["proven_epsilon"] and float(found.left) <= entry["remaining"]
    )
    assert len(found.epsilon) <= 5 and float(found.rate) >= 100 * guess_rate(
        entry["proven_epsilon"], 1e-5
    )
    assert found.exposed == "0.0086" and 0 < found.used < 1


def test_a_strong_verdict():
    found = verdict(account(PureDpEvent(1.0), delta=0.0))
    assert (found.word, found.rate, found.epsilon) == ("strong", "73.2", "1")


def test_nothing_and_no_proof_have_their_own_words():
    assert verdict(account()).word == "untouched"
    assert verdict(account()).used == 0.0
    found = verdict(account(unproven("noise"), allow_unproven=True, records=None))
    assert (found.word, found.epsilon, found.rate, found.exposed) == (
        "no proof",
        "infinite / empirical only",
        "100",
        "unknown",
    )
    assert found.used == 1.0
