"""RRTop-k and RRWithPrior: exact probabilities, the best k, and hardly anything to compare."""

import fractions
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import chisquare

from jaxdp.transforms import responses
from jaxdp.transforms.responses import Response, best_sizes, with_prior

_PRIOR = np.array([0.05, 0.5, 0.1, 0.35])


def _counts(size, classes, epsilon):
    """Returns how many of 2**64 numbers give each answer, integers [label][answer].

    It finds the ends of all runs by bisection, since the places of answers are monotone in a label
    that is in the first place.
    """
    order = np.arange(classes, dtype=np.int32)[None]
    response = Response(order, np.array([size], np.int32), epsilon)

    def answer(number, label):
        numbers = np.array([number], np.uint64)
        return int(response.answer(numbers, np.array([label]))[0])

    table = []
    for label in range(classes):
        counts = [0] * classes
        start = 0
        while start < 2**64:
            value = answer(start, label)
            low, high = start, 2**64
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if answer(middle, label) == value else (low, middle)
            counts[value] += high - start
            start = high
        table.append(counts)
    return table


@pytest.mark.parametrize(("size", "classes"), [(1, 3), (2, 2), (2, 4), (3, 4), (4, 4)])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0])
def test_the_counts_of_answers_are_exactly_private_and_as_the_paper_says(size, classes, epsilon):
    table = _counts(size, classes, epsilon)
    assert all(sum(row) == 2**64 for row in table)
    below = fractions.Fraction(math.exp(epsilon)) * (1 - fractions.Fraction(1, 2**52))
    for answer in range(size):
        column = [row[answer] for row in table]
        assert max(column) <= below * min(column)
    assert all(row[size:] == [0] * (classes - size) for row in table)
    top = math.exp(epsilon) / (math.exp(epsilon) + size - 1)
    for label, row in enumerate(table):
        expected = top if label < size else 1 / size
        assert row[min(label, size - 1)] / 2**64 == pytest.approx(expected, rel=1e-12)


def _best_rate(prior, epsilon):
    """Returns the largest P(answer = label) of all epsilon-DP mechanisms, by linear programming."""
    classes = len(prior)
    factor = math.exp(epsilon)
    rows = []
    for label in range(classes):
        for other in range(classes):
            for answer in range(classes):
                row = np.zeros((classes, classes))
                row[label, answer] += 1
                row[other, answer] -= factor
                rows.append(row.ravel())
    sums = np.kron(np.eye(classes), np.ones(classes))
    solved = linprog(
        -np.diag(prior).ravel(), np.array(rows), np.zeros(len(rows)), sums, np.ones(classes)
    )
    return -solved.fun


@pytest.mark.parametrize("epsilon", [0.1, 0.7, 2.0, 5.0])
def test_no_private_mechanism_is_more_often_right_than_the_best_k(epsilon):
    rng = np.random.default_rng(0)
    priors = [_PRIOR, np.full(4, 0.25), np.array([1.0, 0, 0, 0]), *rng.dirichlet([0.3] * 4, 3)]
    sizes = best_sizes(np.array(priors), epsilon)
    for prior, size in zip(priors, sizes, strict=True):
        largest = np.sort(prior)[::-1]
        rates = [
            math.exp(epsilon) / (math.exp(epsilon) + k - 1) * largest[:k].sum() for k in range(1, 5)
        ]
        assert rates[size - 1] == pytest.approx(max(rates))
        assert rates[size - 1] == pytest.approx(_best_rate(prior, epsilon), abs=1e-7)
    assert len(set(sizes.tolist())) > 1


def test_likelihoods_are_the_probabilities_of_the_answers():
    rng = np.random.default_rng(2)
    priors = rng.dirichlet([0.5] * 4, 6)
    response = with_prior(priors, num_classes=4, epsilon=1.0)
    total = np.zeros((6, 4))
    for answer in range(4):
        is_possible = (response._places(np.full(6, answer)) < response.sizes)[:, None]
        total += np.where(is_possible, response.likelihood(np.full(6, answer)), 0)
    np.testing.assert_allclose(total, 1, rtol=1e-6)
    plain = with_prior(None, num_classes=3, epsilon=1.0).likelihood(np.array([2]))
    keep = math.e / (math.e + 2)
    np.testing.assert_allclose(plain, [[(1 - keep) / 2, (1 - keep) / 2, keep]], rtol=1e-6)


def test_a_label_that_is_no_class_counts_as_one_outside():
    response = with_prior(None, num_classes=4, epsilon=8.0)
    numbers = np.random.default_rng(3).integers(2**64, size=4000, dtype=np.uint64)
    for label in (-1, 4, 2**40):
        counts = np.bincount(response.answer(numbers, np.full(4000, label)), minlength=4)
        assert chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize(
    ("prior", "words"),
    [
        ([0.5, 0.5], "got shape"),
        ([0.5, 0.6, 0.0, 0.0], "with the sum 1"),
        ([0.5, math.nan, 0.5, 0.0], "with the sum 1"),
        ([1.5, -0.5, 0.0, 0.0], "not negative"),
    ],
)
def test_a_prior_that_is_none_is_refused(prior, words):
    with pytest.raises(ValueError, match=words):
        with_prior(prior, num_classes=4, epsilon=1.0)


def test_more_numbers_for_one_answer_than_the_epsilon_allows_are_caught():
    with pytest.raises(ValueError, match="too small"):
        responses._check_exact(4, responses.response_threshold(4, 2.0), 1.9)
