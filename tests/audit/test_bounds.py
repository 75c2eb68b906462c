"""Audits by score: bounds hold as often as they say and are not trivial; arguments; no JAX on
import.

Coverage is tested by repetition: over the choice of a seed, bounds that hold with their confidence
fail a test with probability below 1e-4, and the same test rejects a truth that is a fifth smaller.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from jaxdp import audit
from jaxdp.privacy import GaussianDpEvent, epsilon

DELTA = 0.05


def gaussian(rng, mu, n):
    return rng.normal(size=n) + mu, rng.normal(size=n)


def laplace(rng, scale_epsilon, n):
    return rng.laplace(size=n) / scale_epsilon + 1, rng.laplace(size=n) / scale_epsilon


def response(rng, epsilon_, n):
    """Randomised response: what is released of each coin."""
    keep = 1 / (1 + math.exp(-epsilon_))
    return rng.random(n) < keep, rng.random(n) > keep


def tossed(rng, draw, strength, n):
    """Scores of canaries of which a random number are in."""
    n_in = rng.binomial(2 * n, 0.5)
    return draw(rng, strength, n_in)[0], draw(rng, strength, 2 * n - n_in)[1]


def true_epsilon(mu, delta):
    return epsilon(GaussianDpEvent(1 / mu), delta=delta) if mu else 0.0


def exceeds(bounds, truth, confidence):
    """Whether bounds exceed the truth more often than 1 - confidence, by a binomial test."""
    return stats.binom.sf(np.sum(np.array(bounds) > truth) - 1, len(bounds), 1 - confidence) < 1e-4


# --- Many runs ------------------------------------------------------------------------------------

MULTI = [
    pytest.param(gaussian, 0.0, {"delta": DELTA}, 0.0, id="nothing to find"),
    pytest.param(
        gaussian, 0.0, {"delta": 1e-5, "claim": "gaussian"}, 0.0, id="nothing to find, gaussian"
    ),
    pytest.param(
        gaussian, 1.0, {"delta": DELTA}, true_epsilon(1.0, DELTA), id="gaussian mechanism"
    ),
    pytest.param(
        gaussian,
        1.0,
        {"delta": 1e-5, "claim": "gaussian"},
        true_epsilon(1.0, 1e-5),
        id="gaussian claim",
    ),
    pytest.param(laplace, 1.0, {"delta": 0.0}, 1.0, id="laplace"),
    pytest.param(response, 1.0, {"delta": 0.0}, 1.0, id="randomised response"),
]


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.95, 0.6])
@pytest.mark.parametrize(("draw", "strength", "terms", "truth"), MULTI)
def test_bounds_of_many_runs_hold_with_their_confidence(draw, strength, terms, truth, confidence):
    rng = np.random.default_rng(0)
    bounds = [
        audit.multi_run(
            *draw(rng, strength, 200), upper=math.inf, confidence=confidence, **terms
        ).lower
        for _ in range(100)
    ]
    assert not exceeds(bounds, truth, confidence)


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "strength", "terms", "truth"), MULTI[2:])
def test_bounds_of_many_runs_find_much_of_epsilon(draw, strength, terms, truth):
    rng = np.random.default_rng(1)
    few = audit.multi_run(*draw(rng, strength, 500), upper=math.inf, **terms)
    assert 0.4 * truth < few.lower and few.trials == 1000
    # So many find so much that the test above would notice a truth that is a fifth smaller.
    bounds = [
        audit.multi_run(*draw(rng, strength, 20_000), upper=math.inf, **terms).lower
        for _ in range(10)
    ]
    assert exceeds(bounds, 0.8 * truth, 0.95) and not exceeds(bounds, truth, 0.95)


def test_more_confidence_and_fewer_runs_find_less():
    scores = gaussian(np.random.default_rng(2), 1.5, 1000)
    terms = {"upper": math.inf, "delta": DELTA}
    bounds = [audit.multi_run(*scores, confidence=c, **terms).lower for c in (0.6, 0.95, 0.999)]
    assert bounds[0] > bounds[1] > bounds[2] > 0
    assert audit.multi_run(scores[0][:100], scores[1][:100], **terms).lower < bounds[1]


@pytest.mark.slow
@pytest.mark.parametrize("run", [audit.multi_run, audit.one_run])
@pytest.mark.parametrize("claim", ["approximate", "gaussian"])
def test_only_the_order_of_scores_counts(run, claim):
    scores = gaussian(np.random.default_rng(3), 2.0, 20)
    terms = {"upper": 1.0, "delta": 0.001, "claim": claim}
    assert run(*map(np.exp, scores), **terms) == run(*scores, **terms)
    # A mechanism without noise: scores that never overlap.
    assert run(np.full(40, np.inf), np.full(40, -np.inf), **terms).violated


# --- One run --------------------------------------------------------------------------------------

ONE = [
    pytest.param(gaussian, 0.0, {"delta": 1e-5}, 0.0, 0.95, id="nothing to find"),
    pytest.param(
        gaussian, 1.0, {"delta": 1e-5}, true_epsilon(1.0, 1e-5), 0.95, id="gaussian mechanism"
    ),
    pytest.param(response, 1.0, {"delta": 0.0}, 1.0, 0.95, id="randomised response"),
    pytest.param(
        response, 1.0, {"delta": 0.0}, 1.0, 0.6, id="randomised response, less confidence"
    ),
    # Its statistic takes long to compute.
    pytest.param(
        gaussian,
        1.0,
        {"delta": 0.1, "claim": "gaussian"},
        true_epsilon(1.0, 0.1),
        0.6,
        id="gaussian claim",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "strength", "terms", "truth", "confidence"), ONE)
def test_bounds_of_one_run_hold_with_their_confidence(draw, strength, terms, truth, confidence):
    rng = np.random.default_rng(4)
    repetitions, pairs = (25, 25) if "claim" in terms else (100, 50)
    bounds = [
        audit.one_run(
            *tossed(rng, draw, strength, pairs), upper=math.inf, confidence=confidence, **terms
        ).lower
        for _ in range(repetitions)
    ]
    assert not exceeds(bounds, truth, confidence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "strength", "terms", "truth", "part"),
    [
        (response, 1.0, {"delta": 0.0}, 1.0, 0.8),
        (gaussian, 1.0, {"delta": 1e-5}, true_epsilon(1.0, 1e-5), 0.3),
        (gaussian, 1.0, {"delta": 1e-5, "claim": "gaussian"}, true_epsilon(1.0, 1e-5), 0.4),
    ],
)
def test_bounds_of_one_run_find_some_of_epsilon(draw, strength, terms, truth, part):
    found = audit.one_run(
        *tossed(np.random.default_rng(5), draw, strength, 1000), upper=math.inf, **terms
    )
    assert part * truth < found.lower < truth and found.trials == 2000


def test_canaries_that_are_all_told_by_one_secret_do_not_deceive_one_run():
    """One coin of the mechanism's own decides whether ALL guesses are right: (0, 1e-3)-DP, and no
    bound says more."""
    rng = np.random.default_rng(6)
    bounds = []
    for _ in range(200):
        coins, honest = rng.random(100) < 0.5, rng.random() < 1e-3
        scores = coins + 0.0 if honest else rng.random(100)
        bounds.append(audit.one_run(scores[coins], scores[~coins], upper=0.0, delta=1e-3).lower)
    assert not exceeds(bounds, 0.0, 0.95)


# --- Mechanisms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "violated"), [(1.0, False), (0.5, True)])
def test_audit_of_a_mechanism(scale, violated):
    rng = np.random.default_rng(7)
    runs = []

    def run(name, value):
        return lambda i: (runs.append((name, i)), value + scale * rng.laplace(size=1))[1]

    found = audit.audit_mechanism(
        run("with", 1),
        run("without", 0),
        lambda output: output[0],
        trials=1500,
        upper=1.0,
        delta=0.0,
    )
    assert found.violated == violated and found.lower > 0.5
    assert found.trials == 3000 and found.upper == 1.0
    assert runs == list(
        itertools.chain.from_iterable((("with", i), ("without", i)) for i in range(1500))
    )


def test_a_finding_says_what_it_is():
    found = audit.Audit(
        lower=1.23456,
        upper=2.5,
        ceiling=6.0,
        delta=1e-5,
        confidence=0.95,
        method="one run",
        trials=100,
    )
    assert not found.violated and found.verdict == "consistent"
    assert found.describe() == (
        "consistent: epsilon >= 1.234 with confidence 0.95 (one run, 100 trials, ceiling 6), "
        "epsilon <= 2.5 by the ledger, at delta 1e-05"
    )
    broken = dataclasses.replace(found, upper=1.0)
    assert broken.violated and broken.describe().startswith("VIOLATED: epsilon >= 1.234")
    assert not dataclasses.replace(found, upper=found.lower).violated
    for blind in (
        dataclasses.replace(found, ceiling=2.5),
        dataclasses.replace(found, upper=math.inf),
    ):
        assert not blind.violated and blind.describe().startswith("cannot tell: ")


@pytest.mark.slow
@pytest.mark.parametrize("run", [audit.multi_run, audit.one_run])
@pytest.mark.parametrize("claim", ["approximate", "gaussian"])
def test_the_ceiling_is_what_scores_without_any_error_reach(run, claim):
    rng = np.random.default_rng(11)
    terms = {"upper": 1.0, "delta": 1e-5, "claim": claim}
    perfect = run(np.full(40, 1.0), np.full(30, 0.0), **terms)
    assert perfect.lower == perfect.ceiling > 1
    for strength in (0.0, 2.0, 10.0):
        found = run(gaussian(rng, strength, 40)[0], rng.normal(size=30), **terms)
        assert found.ceiling == perfect.ceiling and found.lower <= found.ceiling
    more = run(np.full(80, 1.0), np.full(60, 0.0), **terms)
    assert more.ceiling > perfect.ceiling  # more trials, more power


def test_methods_are_named():
    scores = gaussian(np.random.default_rng(8), 1.0, 10)
    terms = {"upper": 1.0, "delta": 0.1}
    for run, name in ((audit.multi_run, "multi-run"), (audit.one_run, "one run")):
        assert run(*scores, **terms).method == name
        assert run(*scores, claim="gaussian", **terms).method == f"{name}, Gaussian"


# --- Arguments ------------------------------------------------------------------------------------

SCORES = np.arange(4.0)


@pytest.mark.parametrize("run", [audit.multi_run, audit.one_run])
@pytest.mark.parametrize(
    ("terms", "match"),
    [
        ({"upper": -1.0}, "upper must be an epsilon >= 0, got -1.0"),
        ({"upper": math.nan}, "upper must be an epsilon >= 0"),
        ({"delta": 1.0}, r"delta must be in \[0, 1\), got 1.0"),
        ({"delta": -0.1}, r"delta must be in \[0, 1\), got -0.1"),
        ({"confidence": 0.5}, r"confidence must be in \(0.5, 1\), got 0.5"),
        ({"confidence": 1.0}, r"confidence must be in \(0.5, 1\), got 1.0"),
        ({"claim": "renyi"}, "claim must be 'approximate' or 'gaussian', got 'renyi'"),
        ({"claim": "gaussian", "delta": 0.0}, "claim='gaussian' needs delta > 0"),
    ],
)
def test_terms_are_checked(run, terms, match):
    with pytest.raises(ValueError, match=match):
        run(SCORES, SCORES, **{"upper": 1.0, "delta": 0.1, **terms})
    with pytest.raises(ValueError, match=match):  # before anything runs
        never = pytest.fail
        audit.audit_mechanism(
            never, never, never, trials=2, **{"upper": 1.0, "delta": 0.1, **terms}
        )


@pytest.mark.parametrize(
    ("run", "names"), [(audit.multi_run, ("with", "without")), (audit.one_run, ("in", "out"))]
)
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (np.array([1.0, np.nan]), "must not hold NaN"),
        (np.zeros((2, 2)), r"must be at least two scores \[n\], got shape \(2, 2\)"),
        (np.zeros(1), r"must be at least two scores \[n\], got shape \(1,\)"),
        ([], r"must be at least two scores \[n\], got shape \(0,\)"),
    ],
)
def test_scores_are_checked(run, names, bad, match):
    with pytest.raises(ValueError, match=f"scores_{names[0]} {match}"):
        run(bad, SCORES, upper=1.0, delta=0.1)
    with pytest.raises(ValueError, match=f"scores_{names[1]} {match}"):
        run(SCORES, bad, upper=1.0, delta=0.1)


@pytest.mark.parametrize("trials", [1, 2.0, True])
def test_trials_are_checked(trials):
    with pytest.raises(ValueError, match=f"trials must be an integer >= 2, got {trials}"):
        audit.audit_mechanism(
            pytest.fail, pytest.fail, pytest.fail, trials=trials, upper=1.0, delta=0.1
        )


@pytest.mark.slow
def test_accounting_needs_no_jax(run_in_subprocess):
    code = (
        "import sys, jaxdp.audit, jaxdp.privacy; "
        "print({'jax', 'jax_privacy', 'flax', 'tensorflow'} & {*sys.modules})"
    )
    assert run_in_subprocess(code).stdout == "set()\n"
