"""Mechanisms: exact enumeration of the privacy loss, closed forms against densities, sampling,
smooth sensitivity.

Statistical tests use fixed keys, so they are deterministic; a correct implementation fails with
probability below 1e-5 per test over the choice of key, and one whose flip probability or scale is
off by 0.7 or 1.3 is rejected."""

import decimal
import math

import numpy as np
import pytest
from scipy import integrate, stats

from jaxdp import prediction
from jaxdp.prediction import mechanisms
from jaxdp.privacy.events import PureDpEvent
from jaxdp.transforms import noise, responses

SEED = bytes(range(16))
ACCEPT, REJECT = 1e-6, 1e-9
CLASSES = [2, 3, 10, 100]
EPSILONS = [0.01, 0.176, 1.0, 5.0, 40.0]
CAUCHY = ["stable", "smooth", "paper"]


def key(purpose):
    return noise.stream(SEED, purpose)


def neighbours(last):
    """Yields all pairs of (label, distance) of neighbouring data sets. 0 and 1 stand for any two
    labels."""
    for k in range(last + 1):
        yield (0, k), (0, k)
    for k in range(last):
        yield (0, k), (0, k + 1)
    yield (0, 0), (1, 0)


def largest_ratio(flips, num_classes, total=1):
    """Returns the largest probability ratio of any answer under any two neighbours, exact for
    integer `flips`.

    flips[k] is the probability (over `total`) of EACH other label.
    """

    def answers(label, k):
        # Answers 0 and 1 and, for more classes, one that neither neighbour's label is.
        own = total - (num_classes - 1) * flips[k]
        return [own if answer == label else flips[k] for answer in range(min(num_classes, 3))]

    worst = 0
    for one, other in neighbours(len(flips) - 1):
        for a, b in zip(answers(*one), answers(*other), strict=True):
            worst = max(
                worst,
                max(a, b) / min(a, b) if total == 1 else decimal.Decimal(max(a, b)) / min(a, b),
            )
    return worst


def exact_table(name, epsilon, num_classes, last):
    flips = {
        "response": lambda k: None,
        "laplace": lambda k: mechanisms.flip_probability_global_laplace(
            k, epsilon=epsilon
        ).tolist(),
        **{
            c: lambda k, c=c: mechanisms.flip_probability_cauchy(
                k, epsilon=epsilon, calibration=c
            ).tolist()
            for c in CAUCHY
        },
    }[name](np.arange(last + 1))
    table = mechanisms.exact_thresholds(flips, last, epsilon=epsilon, num_classes=num_classes)
    return table + [1] * (last + 1 - len(table))


# --- flip probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", CLASSES)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_flip_probability_is_the_recursion(num_classes, epsilon):
    with decimal.localcontext() as context:
        context.prec = 60
        factor = decimal.Decimal(epsilon).exp()
        p = (num_classes - 1) / (factor + num_classes - 1)
        expected = [p]
        for _ in range(60):
            p = max(p / factor, 1 - factor * (1 - p))
            expected.append(p)
    got = mechanisms.flip_probability(np.arange(61), epsilon=epsilon, num_classes=num_classes)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, np.array(expected, np.float64), rtol=1e-11)


def test_flip_probability_of_two_classes_and_extremes():
    k = np.array([[0, 3], [10, 2000]])
    np.testing.assert_allclose(
        mechanisms.flip_probability(k, epsilon=0.3),
        np.exp(-0.3 * k) / (1 + math.exp(0.3)),
        rtol=1e-12,
    )
    # Far out and at large epsilon: no overflow, no rounding to a negative, only underflow to zero.
    for epsilon in (1e-6, 50.0, 700.0, 1e4):
        for num_classes in (2, 1000):
            p = mechanisms.flip_probability([0, 1, 10**9], epsilon=epsilon, num_classes=num_classes)
            assert (p >= 0).all() and (np.diff(p) <= 0).all() and p[0] < 1
    assert mechanisms.flip_probability([0], epsilon=700.0)[0] == pytest.approx(
        math.exp(-700.0), rel=1e-12
    )


@pytest.mark.parametrize(("epsilon", "num_classes"), [(0.05, 2), (1.0, 2), (1.0, 10), (9.0, 3)])
def test_distances_beyond_the_needed_one_change_no_answer(epsilon, num_classes):
    """A twin that is one too small fails."""
    for flip in (0.01, 1e-3):
        k = prediction.needed_distance(epsilon, flip=flip, num_classes=num_classes)
        chances = mechanisms.flip_probability(
            np.arange(k + 1), epsilon=epsilon, num_classes=num_classes
        )
        assert chances[-1] <= flip and (chances[:-1] > flip).all()
    last = prediction.needed_distance(epsilon, flip=2.0**-64, num_classes=2)
    table = mechanisms.exact_thresholds(None, last + 5, epsilon=epsilon, num_classes=2)
    assert table[last] - table[-1] <= 1
    with pytest.raises(ValueError, match="flip must be"):
        prediction.needed_distance(epsilon, flip=0.0)


def test_flip_probabilities_of_a_published_operating_point():
    """At epsilon 0.176, which is 100 queries at (10, 1e-5): values computed by hand from the
    formulas."""
    k = np.array([3, 10, 30, 100])
    at = {"epsilon": 0.176}
    np.testing.assert_allclose(
        mechanisms.flip_probability_global_laplace(k, **at), 0.4579, atol=1e-4
    )
    paper = mechanisms.flip_probability_cauchy(k, calibration="paper", **at)
    np.testing.assert_allclose(paper, [0.495, 0.494, 0.489, 0.414], atol=1e-3)
    np.testing.assert_allclose(
        mechanisms.flip_probability(k, **at), [0.269, 0.0785, 0.00232, 1.04e-8], rtol=0.01
    )


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_no_pure_mechanism_beats_randomised_response(epsilon):
    k = np.arange(50)
    best = mechanisms.flip_probability(k, epsilon=epsilon)
    for calibration in CAUCHY:
        assert (
            mechanisms.flip_probability_cauchy(k, epsilon=epsilon, calibration=calibration) >= best
        ).all()
    assert (mechanisms.flip_probability_global_laplace(k, epsilon=epsilon) >= best).all()


@pytest.mark.parametrize("calibration", CAUCHY)
def test_cauchy_flips_are_the_tail_of_the_noise(calibration):
    epsilon, beta = 0.7, 0.2
    k = np.array([0, 1, 5, 20])
    scale = {
        "stable": np.exp(-epsilon * k) / (2 * math.sinh(epsilon / 2)),
        "smooth": np.exp(-beta * k) / (epsilon - beta),
        "paper": 6 * np.exp(-epsilon * k / 6) / epsilon,
    }[calibration]
    chosen = {"beta": beta} if calibration == "smooth" else {}
    got = mechanisms.flip_probability_cauchy(k, epsilon=epsilon, calibration=calibration, **chosen)
    np.testing.assert_allclose(got, stats.cauchy(scale=scale).sf(0.5), rtol=1e-12)


@pytest.mark.parametrize("calibration", ["stable", "paper"])
def test_laplace_flips_are_the_tail_of_the_noise(calibration):
    epsilon, delta = 0.7, 1e-5
    k = np.array([0, 1, 5, 20])
    rate = (
        mechanisms.dilation_rate(epsilon, delta)
        if calibration == "stable"
        else epsilon / 2 / math.log(2 / delta)
    )
    scale = np.exp(-rate * k) / epsilon * (1 if calibration == "stable" else 2)
    got = mechanisms.flip_probability_smooth_laplace(
        k, epsilon=epsilon, delta=delta, calibration=calibration
    )
    np.testing.assert_allclose(got, stats.laplace(scale=scale).sf(0.5), rtol=1e-10)
    np.testing.assert_allclose(
        mechanisms.flip_probability_global_laplace(k, epsilon=epsilon),
        stats.laplace(scale=1 / epsilon).sf(0.5),
    )


# --- privacy loss -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", CLASSES)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_randomised_response_loses_epsilon_exactly(num_classes, epsilon):
    """All neighbours, all answers, on the integers that are sampled from: never above epsilon, and
    it is reached."""
    with decimal.localcontext() as context:
        context.prec = 60
        worst = largest_ratio(
            exact_table("response", epsilon, num_classes, 400), num_classes, 2**64
        )
        # exp(-40) is a few hundred of 2**64 only.
        rounding = decimal.Decimal("1e-9" if epsilon < 10 else "1e-3")
        assert decimal.Decimal(epsilon) * (1 - rounding) < worst.ln() <= decimal.Decimal(epsilon)


@pytest.mark.parametrize("name", [*CAUCHY, "laplace"])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_rounded_noise_on_labels_loses_at_most_epsilon(name, epsilon):
    table = exact_table(name, epsilon, 2, 400)
    with decimal.localcontext() as context:
        context.prec = 60
        assert largest_ratio(table, 2, 2**64).ln() <= decimal.Decimal(epsilon)
    # The integers are the closed form, not a repair of a wrong one.
    k = np.arange(401)
    flips = (
        mechanisms.flip_probability_global_laplace(k, epsilon=epsilon)
        if name == "laplace"
        else mechanisms.flip_probability_cauchy(k, epsilon=epsilon, calibration=name)
    )
    np.testing.assert_allclose(np.array(table) / 2**64, flips, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_classes", CLASSES)
def test_the_enumeration_rejects_flips_that_are_too_rare(num_classes):
    epsilon, k = 0.5, np.arange(30)
    flips = mechanisms.flip_probability(k, epsilon=epsilon, num_classes=num_classes) / (
        num_classes - 1
    )
    assert largest_ratio(flips, num_classes) == pytest.approx(math.exp(epsilon), rel=1e-9)
    assert math.log(largest_ratio(flips * 0.9, num_classes)) > epsilon * 1.02
    at_double = mechanisms.flip_probability(2 * k, epsilon=epsilon, num_classes=num_classes) / (
        num_classes - 1
    )
    assert math.log(largest_ratio(at_double, num_classes)) > epsilon * 1.02


def cauchy_loss(shift, one, other):
    """Maximises the log density ratio of Cauchy laws `shift` apart with scales `one`, `other`."""
    z = np.concatenate(
        [np.linspace(-30, 30, 200_001), np.geomspace(30, 1e7, 2000), -np.geomspace(30, 1e7, 2000)]
    )
    z = z * max(one, other)
    ratio = one / (one**2 + (z - shift) ** 2) / (other / (other**2 + z**2))
    return max(math.log(ratio.max()), -math.log(ratio.min()))


@pytest.mark.parametrize(
    ("shift", "one", "other"),
    [(1.0, 1.0, 1.0), (0.0, 1.0, 3.0), (1.0, 0.5, 2.0), (0.3, 2.0, 1.7), (-5.0, 1.0, 0.2)],
)
def test_cauchy_loss_is_the_hyperbolic_distance(shift, one, other):
    exact = math.acosh(1 + (shift**2 + (one - other) ** 2) / (2 * one * other))
    assert cauchy_loss(shift, one, other) == pytest.approx(exact, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_cauchy_noise_on_a_label_is_private_before_rounding(epsilon):
    """The noisy label itself: centres differ at distance 0 only, scales change by one step; half
    the scale is not."""
    scales = {
        "stable": lambda k: math.exp(-epsilon * k) / (2 * math.sinh(epsilon / 2)),
        "smooth": lambda k: math.exp(-epsilon / 2 * k) / (epsilon - epsilon / 2),
        "paper": lambda k: 6 * math.exp(-epsilon / 6 * k) / epsilon,
    }
    for scale in scales.values():
        assert cauchy_loss(1.0, scale(0), scale(0)) <= epsilon * (1 + 1e-9)
        assert max(cauchy_loss(0.0, scale(k), scale(k + 1)) for k in range(4)) <= epsilon * (
            1 + 1e-9
        )
    half = scales["stable"](0) / 2
    assert cauchy_loss(1.0, half, half) > 1.2 * epsilon


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.99])
def test_cauchy_noise_on_values_is_private_for_joint_changes(epsilon, share):
    """Centres that move by the smaller sensitivity while the scale changes by exp(beta) at most:
    tight at epsilon."""
    beta = share * epsilon
    multiplier = mechanisms.cauchy_multiplier(epsilon, beta)

    def worst(multiplier):
        steps = np.linspace(0, beta, 9)
        return max(cauchy_loss(1.0, multiplier, multiplier * math.exp(t)) for t in steps)

    assert epsilon * 0.999 < worst(multiplier) <= epsilon * (1 + 1e-9)
    assert worst(multiplier * 0.7) > epsilon * 1.005
    # Never more noise than paying for the two changes separately.
    assert multiplier <= 1 / (epsilon - beta)


def hockey_stick(epsilon, one, other):
    """Returns delta(epsilon) of centred Laplace laws with scales `one` and `other`, by
    quadrature."""

    def excess(x):
        return max(math.exp(-x / one) / one - math.exp(epsilon - x / other) / other, 0.0)

    reach = 60 * max(one, other)
    crossing = abs((epsilon + math.log(one / other)) / (1 / other - 1 / one))
    return integrate.quad(excess, 0, reach, points=[min(crossing, reach)], limit=400, epsabs=1e-14)[
        0
    ]


@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 1e-3), (1.0, 1e-3), (1.0, 1e-5), (4.0, 1e-4)])
def test_the_laplace_scale_changes_as_fast_as_delta_allows(epsilon, delta):
    rate = mechanisms.dilation_rate(epsilon, delta)
    assert hockey_stick(epsilon, math.exp(rate), 1.0) == pytest.approx(delta, rel=1e-3)
    assert hockey_stick(epsilon, 1.0, math.exp(rate)) == 0
    for slower in (0.1, 0.5, 0.9):
        assert hockey_stick(epsilon, math.exp(slower * rate), 1.0) <= delta
    assert hockey_stick(epsilon, math.exp(1.3 * rate), 1.0) > 2 * delta
    assert mechanisms.dilation_rate(epsilon, 0.999) == epsilon


def test_the_papers_laplace_constants_are_checked():
    at = {"delta": 1e-5, "calibration": "paper"}
    mechanisms.flip_probability_smooth_laplace([0], epsilon=5.0, **at)
    with pytest.raises(ValueError, match=r"too large for the paper's constants"):
        mechanisms.flip_probability_smooth_laplace([0], epsilon=100.0, **at)


# --- sampling -----------------------------------------------------------------------------------


def test_a_flip_uses_exactly_its_share_of_the_64_bit_numbers():
    r, classes = 5, 4
    ends = [0, 4, 5, 9, 10, 14, 15, 2**32, 2**64 - 1]
    draws = np.array(ends, np.uint64)
    got = responses.flipped(draws, np.full(len(ends), 2), np.full(len(ends), r, np.uint64), classes)
    assert got.tolist() == [3, 3, 0, 0, 1, 1, 2, 2, 2] and got.dtype == np.int32
    huge = np.array([2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    assert responses.flipped(huge, np.zeros(3, int), np.full(3, 2**63, np.uint64), 2).tolist() == [
        1,
        0,
        0,
    ]
    assert responses.flipped(draws, np.zeros(9, int), np.zeros(9, np.uint64), 2).tolist() == [0] * 9


def test_all_64_bits_are_drawn(monkeypatch):
    seen = []
    monkeypatch.setattr(responses, "flipped", lambda draws, *rest: seen.append(draws))
    mechanisms.randomised_response(key("bits"), [0] * 4096, [0] * 4096, epsilon=1.0, num_classes=2)
    (draws,) = seen
    assert draws.dtype == np.uint64 and len(np.unique(draws)) == 4096
    bits = np.unpackbits(draws.view(np.uint8).reshape(-1, 8), axis=1).astype(float)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5.5 / math.sqrt(4 * 4096)
    correlations = np.corrcoef(bits.T) - np.eye(64)
    assert np.abs(correlations).max() < 6.5 / math.sqrt(4096)


def test_mixed_distances_each_get_their_own_probability_and_far_ones_never_flip():
    distances = np.tile([0, 10**6], 5000)
    answers = mechanisms.randomised_response(
        key("mixed"), np.zeros(10_000, int), distances, epsilon=1.0, num_classes=2
    )
    assert (answers[1::2] == 0).all()
    p = float(mechanisms.flip_probability(0, epsilon=1.0))
    assert stats.binomtest(int(answers[::2].sum()), 5000, p).pvalue > ACCEPT


# --- values -------------------------------------------------------------------------------------


def worlds(rng, nodes):
    """Makes data sets on a ring (neighbours are adjacent) with values and exact boxes for distance
    1, 2, ..."""
    values = np.cumsum(rng.normal(size=nodes) * (rng.random(nodes) < 0.5))
    values -= np.linspace(0, values[-1] - values[0], nodes)
    reach = [
        [values[np.arange(i - j, i + j + 1) % nodes] for i in range(nodes)]
        for j in range(1, nodes // 2)
    ]
    return (
        values,
        np.array([[w.min() for w in row] for row in reach]),
        np.array([[w.max() for w in row] for row in reach]),
    )


@pytest.mark.parametrize("beta", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("rows", [0, 1, 4, 100])
def test_smooth_sensitivity_bounds_the_change_and_is_smooth(beta, rows):
    rng = np.random.default_rng(7)
    for _ in range(20):
        values, lower, upper = worlds(rng, 24)
        ends = (-3.0, 3.0)
        s = mechanisms.smooth_sensitivity(
            values, lower[:rows], upper[:rows], beta=beta, output_range=ends
        )
        clipped = np.clip(values, *ends)
        assert (np.abs(clipped - np.roll(clipped, 1)) <= s * (1 + 1e-12)).all()
        assert (np.abs(clipped - np.roll(clipped, -1)) <= s * (1 + 1e-12)).all()
        assert (np.abs(np.log(s) - np.log(np.roll(s, 1))) <= beta * (1 + 1e-9)).all()
        assert (s > 0).all() and (s <= 6.0).all()


def test_smooth_sensitivity_by_hand():
    # Gaps: 0..1 -> 0.5 + 0.1; box 1..2; box 2..range; then the range.
    lower, upper, value = [[-0.1], [-0.2]], [[0.5], [1.0]], [0.0]
    decay = np.exp(-0.7 * np.arange(4))
    expected = max(
        decay * [max(0.5, 0.1), max(1.0 + 0.1, 0.5 + 0.2), max(4.0 + 0.2, 1.0 + 4.0), 8.0]
    )
    got = mechanisms.smooth_sensitivity(value, lower, upper, beta=0.7, output_range=(-4.0, 4.0))
    assert got == pytest.approx([expected])


def test_a_bound_that_overflowed_counts_as_the_whole_range():
    at = {"beta": 0.5, "output_range": (0.0, 2.0)}
    whole = mechanisms.smooth_sensitivity([1.0], [[0.0]], [[2.0]], **at)
    assert mechanisms.smooth_sensitivity([1.0], [[math.nan]], [[math.inf]], **at) == pytest.approx(
        whole
    )


@pytest.mark.slow
def test_values_and_answers_stay_in_the_declared_range():
    values = np.array([-50.0, 0.25, np.nan, 50.0])
    boxes = np.tile(values, (3, 1))
    got = mechanisms.cauchy_values(
        key("range"), values, boxes, boxes, epsilon=1.0, output_range=(0.0, 1.0)
    )
    assert ((got >= 0) & (got <= 1)).all()
    got = mechanisms.laplace_values(
        key("range"), np.full(20_000, 0.5), epsilon=8.0, output_range=(0.0, 1.0)
    )
    inner = got[(got > 0) & (got < 1)].astype(float)
    assert stats.kstest(inner, stats.truncnorm(-1, 1).cdf).pvalue < REJECT  # The test can reject.
    mass = stats.laplace(0.5, 1 / 8)
    law = lambda x: (mass.cdf(x) - mass.cdf(0)) / (mass.cdf(1) - mass.cdf(0))  # noqa: E731
    assert stats.kstest(inner, law).pvalue > ACCEPT


def test_a_beta_of_few_digits_does_not_shrink_the_noise():
    # In 16 bits epsilon - beta = 0.0003 would become 0.0005, and the noise 0.8 of what is needed.
    beta = np.float16(0.7)
    epsilon = float(beta) + 0.0003
    values = np.linspace(0.2, 0.8, 50)
    boxes = np.tile(values, (3, 1))

    def answer(beta):
        return mechanisms.cauchy_values(
            key("beta"), values, boxes, boxes, epsilon=epsilon, beta=beta, output_range=(0.0, 1e6)
        )

    np.testing.assert_array_equal(answer(beta), answer(float(beta)))


def test_default_beta_is_free_or_useful():
    for epsilon in (0.1, 1.0, 10.0, 1000.0):
        beta = mechanisms.default_beta(epsilon)
        assert 0 < beta < epsilon and mechanisms.cauchy_multiplier(epsilon, beta) > 0
        free = math.log(2 * math.cosh(min(epsilon, 30)) - 1)
        if epsilon <= 30:
            assert mechanisms.cauchy_multiplier(epsilon, 0.999 * free) == pytest.approx(
                1 / (2 * math.sinh(epsilon / 2)), rel=1e-9
            )
            assert beta == pytest.approx(max(0.8 * epsilon, free))


# --- events and refusals ------------------------------------------------------------------------


def test_events():
    for row in mechanisms.METHODS.values():
        assert row.event(0.3) == PureDpEvent(0.3)
    assert set(mechanisms.METHODS) >= {"randomised_response", "global_laplace", "cauchy_values"}


GOOD = {"labels": [0, 1], "distances": [0, 3], "epsilon": 1.0, "num_classes": 2}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_classes": 1}, "num_classes must be"),
        ({"num_classes": 2.5}, "num_classes must be"),
        ({"labels": [0, 2]}, r"labels must lie in \[0, num_classes=2\)"),
        ({"labels": [0, -1]}, "labels must lie"),
        ({"labels": [0.0, 1.0]}, "labels must be integers"),
        ({"labels": [0]}, "labels must be integers"),
        ({"distances": [0, -3]}, "distances must be integers >= 0"),
        ({"distances": [0.5, 1.0]}, "distances must be integers >= 0"),
    ],
)
def test_bad_arguments(change, match):
    with pytest.raises(ValueError, match=match) as info:
        mechanisms.randomised_response(key("bad"), **{**GOOD, **change})
    assert "-3" not in str(info.value)  # Private values stay out of messages.


@pytest.mark.slow
def test_more_bad_arguments():
    for mechanism in (mechanisms.smooth_cauchy, mechanisms.global_laplace):
        with pytest.raises(ValueError, match="Use randomised_response"):
            mechanism(key("bad"), [0], [0], epsilon=1.0, num_classes=3)
    with pytest.raises(ValueError, match="calibration must be"):
        mechanisms.flip_probability_cauchy([0], epsilon=1.0, calibration="best")
    with pytest.raises(ValueError, match=r"beta=0\.5 needs calibration='smooth'"):
        mechanisms.flip_probability_cauchy([0], epsilon=1.0, beta=0.5)
    with pytest.raises(ValueError, match=r"beta=1\.0"):
        mechanisms.flip_probability_cauchy([0], epsilon=1.0, calibration="smooth", beta=1.0)
    with pytest.raises(ValueError, match="delta must be"):
        mechanisms.dilation_rate(1.0, 0.0)
    values = ([0.0], [[0.0]], [[1.0]])
    for bad in ((1.0, 1.0), (0.0, math.inf), (2.0, 1.0)):
        with pytest.raises(ValueError, match="output_range must be"):
            mechanisms.smooth_sensitivity(*values, beta=1.0, output_range=bad)
    with pytest.raises(ValueError, match="beta must be"):
        mechanisms.smooth_sensitivity(*values, beta=0.0, output_range=(0.0, 1.0))
    with pytest.raises(ValueError, match=r"lower, upper \[J, Q\]"):
        mechanisms.smooth_sensitivity([0.0], [0.0], [1.0], beta=1.0, output_range=(0.0, 1.0))
    with pytest.raises(ValueError, match="must lie in"):
        mechanisms.cauchy_values(
            key("bad"), *values, epsilon=1.0, output_range=(0.0, 1.0), beta=2.0
        )
