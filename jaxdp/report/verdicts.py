"""A guarantee in plain words: what an attacker's guess becomes, and how much protection that is."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxdp.privacy.report_text import OWNERS_PUBLIC, has_public_owners
from jaxdp.privacy.units import unit_words
from jaxdp.report.html import round_down, round_up

# A word holds while a coin toss becomes a guess that is right in at most this share of cases.
GRADES = {"strong": 0.75, "moderate": 0.9, "weak": 0.99, "practically none": 1.0}
# From this expected number of wholly exposed records on (delta times records), no better word is
# used.
EXPOSED = {0.1: "weak", 1.0: "practically none"}

# The difference between neighbouring data sets, and the question of an attacker, by adjacency.
_NEIGHBOURS = {
    "add_remove": ("adding or removing one {}", "whether a certain {} was in it"),
    "replace_one": ("replacing one {0} by another", "which of two possible {1} was in it"),
    "zero_out": ("blanking out one {}", "whether a certain {} was blank"),
    "replace_label": (
        "replacing the label of one {} by another (nothing else about a {} is protected)",
        "which of two possible labels a certain {} had",
    ),
}


def guess_rate(epsilon: float, delta: float = 0.0) -> float:
    """Returns the largest share of right guesses of an attacker.

    Before the release the attacker could only toss a coin.

    The guarantee is tight: some mechanism with this (epsilon, delta) permits it.

    Args:
        epsilon: At least 0. Infinity gives 1.
        delta: From 0 to 1.
    """
    inverse = math.exp(-epsilon)
    return (1 + delta * inverse) / (1 + inverse)


def grade(epsilon: float, delta: float = 0.0, records: int | None = None) -> str:
    """Returns how much protection a proven guarantee is, in a word.

    The words are "strong", "moderate", "weak" and "practically none".

    The guess of an attacker is right in at most 75, 90, 99 or 100 % of cases. With delta times
    `records` of 0.1 or more no word is better than "weak", and with 1 or more none is better than
    "practically none": a program that publishes a few whole records may have such a guarantee.

    Args:
        epsilon: At least 0.
        delta: From 0 to 1.
        records: The number of records, if it is known.
    """
    words = list(GRADES)
    rate = guess_rate(epsilon, delta)
    fitting = [word for word, most in GRADES.items() if rate <= most]
    grades = [fitting[0] if fitting else words[-1]]
    if records is not None:
        grades += [word for exposed, word in EXPOSED.items() if delta * records >= exposed]
    return max(grades, key=words.index)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What an account of a ledger says about its data set, in words and in rounded numbers.

    Epsilon, delta and rates are rounded up and what is left is rounded down, so that no risk is
    understated.

    Attributes:
        word: A word of `grade`, or "untouched" if nothing was released, or "no proof" if a release
            has none.
        protection: How much protection there is, in up to three words.
        meaning: What that means for an attacker's guess.
        epsilon, delta: The headline and its delta. The epsilon of a release without a proof is
            "infinite / empirical only".
        rate: The largest share of right guesses in percent.
        exposed: delta times the number of records, or "unknown".
        change: The difference between neighbouring data sets.
        budget, left: The budget and what is left of it, or "none".
        used: The share of the budget that is used, from 0 to 1.
    """

    word: str
    protection: str
    meaning: str
    epsilon: str
    delta: str
    rate: str
    exposed: str
    change: str
    budget: str
    left: str
    used: float

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        return f"{self.protection}: {self.meaning}"


def verdict(account: Mapping[str, Any]) -> Verdict:
    """Returns the verdict on one of the datasets of `Ledger.report`."""
    unit = account["unit"]
    delta = account["delta"]
    records = account["records"]
    budget = account["budget"]
    texts = _NEIGHBOURS[account["adjacency"]]
    change, question = (text.format(unit, unit_words(unit).many) for text in texts)
    if has_public_owners(account):
        change = f"{change} ({OWNERS_PUBLIC})"
    proven = account["proven_epsilon"]
    unproven = "inf" in account["headline"] or proven is None
    epsilon = math.inf if unproven else proven
    rate = _percent(guess_rate(epsilon, delta))
    if unproven:
        word, protection = "no proof", "No guarantee"
        meaning = "a release about it has no proof of privacy."
    elif not account["rows"]:
        word, protection = "untouched", "Untouched"
        meaning = "nothing was released about it."
    else:
        word = grade(epsilon, delta, records)
        protection = f"{word.capitalize()} protection"
        if word == "practically none":
            protection = "Practically no protection"
        meaning = (
            f"a coin toss over {question} becomes a guess that is right in up to {rate} % of cases."
        )
    return Verdict(
        word=word,
        protection=protection,
        meaning=meaning,
        epsilon="infinite / empirical only" if unproven else round_up(epsilon),
        delta=round_up(delta),
        rate=rate,
        exposed="unknown" if records is None else round_up(delta * records, 2),
        change=change,
        budget="none" if budget is None else f"{budget:g}",
        left=_left(budget, account["remaining"]),
        used=0.0 if not budget or not account["rows"] else min(epsilon / budget, 1.0),
    )


def _left(budget: float | None, remaining: float | None) -> str:
    if budget is None or remaining is None:
        return "none"
    return round_down(remaining) if remaining >= 0.001 else "0"


def _percent(rate: float) -> str:
    """Returns a share in percent, rounded up, with more digits where the rest is small."""
    digits = 1 if rate < 0.99 else 3
    return f"{math.ceil(round(100 * rate * 10**digits, 6)) / 10**digits:g}"
