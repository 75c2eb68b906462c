"""Lower bounds on epsilon from the scores of canaries, with the ceiling of the audit."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Required, TypedDict, TypeVar

import dp_accounting
import numpy as np
from scipy import stats

from jaxdp.files import check_choice, check_delta
from jaxdp.files.text import down, up

Claim = Literal["approximate", "gaussian"]
Verdict = Literal["VIOLATED", "consistent", "cannot tell"]
Output = TypeVar("Output")

# One run guesses this fraction of the canaries from both ends of the ranks, or half of it from the
# upper end.
_FRACTIONS = (1, 1 / 4, 1 / 16)
_TESTS = 2 * len(_FRACTIONS)
# In many runs every fifth score of a kind serves to choose the threshold of the Gaussian claim.
_CHOOSING = 5
# The test of one run needs a positive delta. (epsilon, 0)-DP is (epsilon, delta)-DP for every
# delta.
_SMALLEST_DELTA = 1e-300


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        lower: The lower bound, >= 0. epsilon >= lower with probability `confidence` over the runs.
        upper: The ledger's upper bound, `math.inf` if there is none.
        ceiling: The largest possible `lower` of this audit, reached by scores that tell every
            canary.
        delta: The delta of both bounds.
        confidence: In (0.5, 1).
        method: The method of the lower bound.
        trials: The number of scores: runs with and without the canary, or canaries of one run.
    """

    lower: float
    upper: float
    ceiling: float
    delta: float
    confidence: float
    method: str
    trials: int

    @property
    def violated(self) -> bool:
        """Whether the mechanism leaks more than the ledger says: lower > upper."""
        return self.lower > self.upper

    @property
    def verdict(self) -> Verdict:
        """The conclusion from the bounds.

        "VIOLATED": lower > upper. The proof, code or accounting is wrong, up to a chance of 1 -
        confidence. "consistent": The audit found no more than is claimed, and could have. Another
        canary or score may find more. "cannot tell": The ceiling does not exceed the claim. More
        trials or a smaller claim give the audit power.
        """
        if self.violated:
            return "VIOLATED"
        return "consistent" if self.ceiling > self.upper else "cannot tell"

    def describe(self) -> str:
        """Returns the verdict and the bounds in one line."""
        return (
            f"{self.verdict}: epsilon >= {down(self.lower, 4)} with confidence {self.confidence:g} "
            f"({self.method}, {self.trials} trials, ceiling {self.ceiling:.4g}), epsilon <= "
            f"{up(self.upper, 4)} by the ledger, at delta {self.delta:g}"
        )


def multi_run(
    scores_with: Any,
    scores_without: Any,
    *,
    upper: float,
    delta: float,
    confidence: float = 0.95,
    claim: Claim = "approximate",
) -> Audit:
    """Audits a mechanism by many runs with a canary and many without it.

    The `Audit` has n + m trials.

    Args:
        scores_with: Real [n], the scores of independent runs on data with the canary. They should
            be higher.
        scores_without: Real [m], the scores on the neighbouring data without it. Scores may be
            infinite, if a broken mechanism returns such outputs.
        upper: The ledger's epsilon of one run at `delta`, >= 0.
        delta: In [0, 1). 0 is pure DP.
        confidence: In (0.5, 1).
        claim: "approximate" tests that one run is (epsilon, delta)-DP, for any mechanism.
            "gaussian" tests that it is mu-GDP with the mu of that epsilon and delta > 0, a stronger
            claim that is easier to refute. Use it only for releases charged as Gaussians, such as
            noise on full batches and test-time adaptation.

    Formal guarantees:
        If the claim is true for epsilon, lower <= epsilon with probability at least `confidence`. A
        half of the scores of either kind (a fifth for the Gaussian claim) chooses the threshold.
        The others count its errors, which are binomial. Clopper and Pearson's upper bounds of the
        two error rates hold together, each with significance (1 - confidence) / 2. From them
        (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, Theorem 2.1; Jagielski, Ullman, Oprea 2020,
        arXiv:2006.07709)

            epsilon >= log((1 - FNR - delta) / FPR),   epsilon >= log((1 - FPR - delta) / FNR),

        or for Gaussian mechanisms (Dong, Roth, Su 2022, arXiv:1905.02383, Equation 6; Nasr et al.
        2023, arXiv:2302.07956) mu >= Phi^-1(1 - FPR) - Phi^-1(FNR).

    Raises:
        ValueError: An argument is out of range, a score is NaN, or there are fewer than two scores
            of a kind.
    """
    terms = Terms(delta, confidence, claim)
    terms.check(upper)
    scores = _ranks(scores_with=scores_with, scores_without=scores_without)
    return _audit(_multi_lower, "multi-run", scores, upper, terms)


def one_run(
    scores_in: Any,
    scores_out: Any,
    *,
    upper: float,
    delta: float,
    confidence: float = 0.95,
    claim: Claim = "approximate",
) -> Audit:
    """Audits a mechanism by one run with many canaries, each in or out by a fair coin.

    The `Audit` has n + m trials.

    Args:
        scores_in: Real [n], the scores of the canaries that were in. They should be higher. Scores
            are functions of the outputs of the run and do not depend on the coins.
        scores_out: Real [m], the scores of the canaries that were out.
        upper, delta, confidence, claim: As in `multi_run`, for the whole run and one record added
            or removed.

    Formal guarantees:
        If the claim is true for epsilon, lower <= epsilon with probability at least `confidence`,
        for canaries that influence each other in any way (Steinke, Nasr, Jagielski 2023,
        arXiv:2305.08846, Theorem 5.2; for the Gaussian claim Mahloujifar, Melis, Chaudhuri 2024,
        arXiv:2410.22235). Guesses follow the rank of the scores: the highest are guessed to be in
        and, in half of the tests, the lowest to be out. The number of guesses is not learnt from
        the coins. Six tests are made, each with a sixth of 1 - confidence (union bound).

    Raises:
        ValueError: As in `multi_run`.
    """
    terms = Terms(delta, confidence, claim)
    terms.check(upper)
    scores = _ranks(scores_in=scores_in, scores_out=scores_out)
    return _audit(_one_lower, "one run", scores, upper, terms)


def audit_mechanism(
    run_with: Callable[[int], Output],
    run_without: Callable[[int], Output],
    score: Callable[[Output], Any],
    *,
    trials: int,
    upper: float,
    delta: float,
    confidence: float = 0.95,
    claim: Claim = "approximate",
) -> Audit:
    """Runs a mechanism with and without a canary in turns and audits it by `multi_run`.

    Args:
        run_with: `run_with(i) -> output` of run i on data with the canary, with fresh noise.
        run_without: The same on the neighbouring data.
        score: `score(output) -> scalar`, fixed beforehand.
        trials: The number of runs of either kind, >= 2.
        upper, delta, confidence, claim: As in `multi_run`.

    Raises:
        ValueError: As in `multi_run`. Bad arguments raise before anything runs.
    """
    Terms(delta, confidence, claim).check(upper)
    whole = isinstance(trials, int | np.integer) and not isinstance(trials, bool)
    if not whole or trials < 2:
        raise ValueError(f"trials must be an integer >= 2, got {trials!r}.")
    present = []
    absent = []
    for i in range(trials):
        present.append(float(score(run_with(i))))
        absent.append(float(score(run_without(i))))
    return multi_run(present, absent, upper=upper, delta=delta, confidence=confidence, claim=claim)


class BoundTerms(TypedDict, total=False):
    """The terms of a lower bound. `Terms` has them as fields."""

    delta: Required[float]
    confidence: float
    claim: Claim


@dataclasses.dataclass(frozen=True)
class Terms:
    """The terms of a lower bound, as in `multi_run`."""

    delta: float
    confidence: float = 0.95
    claim: Claim = "approximate"

    def check(self, upper: float) -> None:
        """Raises ValueError if a term, or the ledger's epsilon, is out of range."""
        if not upper >= 0:
            raise ValueError(
                f"upper must be an epsilon >= 0, got {upper!r}. Use math.inf if nothing is proven."
            )
        check_delta(self.delta)
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence must be in (0.5, 1), got {self.confidence!r}.")
        check_choice("claim", self.claim, Claim)
        if self.claim == "gaussian" and self.delta == 0:
            raise ValueError(
                "claim='gaussian' needs delta > 0: no Gaussian mechanism is pure. Use "
                "claim='approximate'."
            )


# `bound(present, absent, terms)` is a lower bound from the ranks of the scores of both kinds.
Bound = Callable[[np.ndarray, np.ndarray, Terms], float]


def _audit(
    bound: Bound,
    name: str,
    scores: Sequence[np.ndarray],
    upper: float,
    terms: Terms,
) -> Audit:
    present, absent = scores
    ceiling = _ceiling(bound, len(present), len(absent), terms)
    return Audit(
        lower=min(bound(present, absent, terms), ceiling),
        upper=float(upper),
        ceiling=ceiling,
        delta=terms.delta,
        confidence=terms.confidence,
        method=f"{name}, Gaussian" if terms.claim == "gaussian" else name,
        trials=len(present) + len(absent),
    )


@functools.lru_cache(maxsize=64)
def _ceiling(
    bound: Bound,
    present: int,
    absent: int,
    terms: Terms,
) -> float:
    """Returns the bound for scores that separate the two kinds."""
    order = np.arange(1.0, present + absent + 1)
    return bound(order[absent:], order[:absent], terms)


def _multi_lower(present: np.ndarray, absent: np.ndarray, terms: Terms) -> float:
    if terms.claim == "gaussian":
        return _gaussian_lower(present, absent, terms)
    # jax_privacy pulls in JAX, which bounds do not need.
    from jax_privacy import auditing

    epsilon = auditing.CanaryScoreAuditor(present, absent).epsilon_clopper_pearson(
        1 - terms.confidence,
        terms.delta,
        one_sided=False,
        # The other strategy, Bonferroni, chooses thresholds by the same scores that it judges.
        threshold_strategy=auditing.Split(seed=0),
    )
    return float(epsilon)


class _Guesses(NamedTuple):
    """Guesses about canaries: how sure each is, and whether it is right.

    `share` of the canaries are guessed at most.
    """

    certainty: np.ndarray
    right: np.ndarray
    share: float


def _one_lower(inside: np.ndarray, outside: np.ndarray, terms: Terms) -> float:
    rank = np.concatenate([inside, outside])
    present = np.arange(len(rank)) < len(inside)
    centred = rank - (len(rank) + 1) / 2
    from_both_ends = _Guesses(np.abs(centred), (centred > 0) == present, 1.0)
    from_upper_end = _Guesses(rank, present, 0.5)
    lower = 0.0
    for guesses in (from_both_ends, from_upper_end):
        for fraction in _FRACTIONS:
            count = math.ceil(guesses.share * fraction * len(rank))
            threshold = np.sort(guesses.certainty)[-count]
            is_guessed = guesses.certainty >= threshold
            right = is_guessed & guesses.right
            epsilon = _of_guesses(int(is_guessed.sum()), int(right.sum()), len(rank), terms)
            lower = max(lower, epsilon)
    return lower


# Audits of as many canaries share most counts, and a bound of the Gaussian claim takes 10 ms.
@functools.lru_cache(maxsize=1024)
def _of_guesses(count: int, right: int, canaries: int, terms: Terms) -> float:
    """Returns the bound of one of the tests of one run, in which so many guesses are right."""
    from jax_privacy import auditing

    # A threshold counts only by these three numbers. Two artificial canaries, which are never
    # guessed, keep both lists filled.
    wrong = count - right
    certainly_right = np.full(canaries - wrong + 1, -np.inf)
    certainly_right[:right] = 1.0
    certainly_wrong = np.full(wrong + 1, -np.inf)
    certainly_wrong[:wrong] = 1.0
    auditor = auditing.CanaryScoreAuditor(certainly_right, certainly_wrong)
    lower_bound = auditor.epsilon_one_run
    if terms.claim == "gaussian":
        lower_bound = auditor.epsilon_one_run_fdp
    epsilon = lower_bound(
        (1 - terms.confidence) / _TESTS,
        max(terms.delta, _SMALLEST_DELTA),
        threshold_strategy=auditing.Explicit(1.0),
    )
    return float(epsilon)


def _gaussian_lower(present: np.ndarray, absent: np.ndarray, terms: Terms) -> float:
    """Returns the epsilon of the largest mu that the errors of one threshold refute.

    jax_privacy's `epsilon_from_gdp` also reads upper bounds of the error rates as lower ones. It is
    far above 0 for scores without information (its pull request 270).
    """
    # The threshold is the score half way between the kinds by rank, which is nearly the best for
    # Gaussians.
    choosing_present = present[::_CHOOSING]
    choosing = np.concatenate([choosing_present, absent[::_CHOOSING]])
    order = stats.rankdata(choosing)
    of_present, of_absent = np.split(order, [len(choosing_present)])
    middle = np.mean([np.median(of_present), np.median(of_absent)])
    threshold = choosing[order >= middle].min()
    missed = np.delete(present, np.s_[::_CHOOSING]) < threshold
    false_alarms = np.delete(absent, np.s_[::_CHOOSING]) >= threshold
    fnr = _largest_rate(int(missed.sum()), len(missed), terms.confidence)
    fpr = _largest_rate(int(false_alarms.sum()), len(false_alarms), terms.confidence)
    mu = stats.norm.isf(fpr) - stats.norm.ppf(fnr)
    if mu <= 0:
        return 0.0
    with np.errstate(divide="ignore"):  # a tiny mu has a delta whose logarithm underflows
        return dp_accounting.get_epsilon_gaussian(1 / mu, terms.delta)


@functools.lru_cache(maxsize=1024)
def _largest_rate(errors: int, trials: int, confidence: float) -> float:
    """Returns Clopper and Pearson's upper bound of a rate of errors.

    The interval leaves (1 - confidence) / 2 on either side.
    """
    test = stats.binomtest(errors, trials)
    return float(test.proportion_ci(confidence).high)


def _ranks(**scores: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ranks of both kinds of scores among all.

    Only the order counts, also of infinite scores.
    """
    arrays = {name: np.asarray(values, np.float64) for name, values in scores.items()}
    for name, array in arrays.items():
        if array.ndim != 1 or len(array) < 2:
            raise ValueError(f"{name} must be at least two scores [n], got shape {array.shape}.")
        if np.isnan(array).any():
            raise ValueError(
                f"{name} must not hold NaN, which is neither high nor low. Define the score for "
                "every output."
            )
    first, second = arrays.values()
    rank = stats.rankdata(np.concatenate([first, second]))
    return rank[: len(first)], rank[len(first) :]
