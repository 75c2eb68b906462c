"""Mechanisms that answer queries of a model, with noise that is calibrated to stability.

A certificate (`jaxdp.prediction.certify`) gives every query a label and a *calibrated distance* k.
This integer changes by at most one between neighbouring data sets, and is 0 for both if their
labels differ. All label mechanisms here are one family: they keep the label with probability 1 -
p(k) and otherwise answer one of the other labels, uniformly. Adding noise to a label in {0, 1} and
rounding at 1/2 is the member with p(k) = P(noise > 1/2).

===================  =======================================================  ==============
label mechanism      flip probability p(k)                                    guarantee
===================  =======================================================  ==============
randomised_response  the smallest possible p(k), `flip_probability`           epsilon
smooth_cauchy        Cauchy, scale exp(-epsilon k) / (2 sinh(epsilon / 2))    epsilon
  "smooth"           Cauchy, scale exp(-beta k) / (epsilon - beta)            epsilon
  "paper"            Cauchy, scale 6 exp(-epsilon k / 6) / epsilon            epsilon
(smooth Laplace)     Laplace, scale exp(-beta k) / epsilon                    epsilon, delta
  "paper"            Laplace, scale 2 exp(-beta k) / epsilon                  epsilon, delta
global_laplace       Laplace, scale 1 / epsilon, for every k                  epsilon
global_response      p(0) of randomised_response, for every k                 epsilon
===================  =======================================================  ==============

The ledger has no event for (epsilon, delta)-DP answers, so `flip_probability_smooth_laplace` is for
comparison only.

**Proof for the family.** Let E = exp(epsilon) and C the number of labels. Neighbours with different
labels have k = 0, so their answers are k-ary randomised response. This is (epsilon, 0)-DP iff (1 -
p(0)) (C - 1) <= E p(0) (and p(0) <= (C - 1) E (1 - p(0)), which any mechanism better than a uniform
guess satisfies). Neighbours with the same label have distances k and k + 1 or equal distances. With
p non-increasing, the two densities are within a factor E iff

    p(k) <= E p(k + 1)   and   1 - p(k + 1) <= E (1 - p(k)).                            (*)

Each bound on p(k + 1) rises with p(k), so the smallest p that satisfies all three is found
greedily. It is `flip_probability`. So no epsilon-DP member of the family is more accurate than
randomised response.

**Proof for Cauchy noise.** For Cauchy laws of centres x, x' and scales s, s' the largest log ratio
of the densities is

    arcosh(1 + ((x - x')^2 + (s - s')^2) / (2 s s')),                                  (**)

the hyperbolic distance of (x, s) and (x', s') in the upper half-plane. (Shift and scale to x' = 0,
s' = 1. The ratio s (1 + z^2) / ((z - x)^2 + s^2) touches its maximum r where a quadratic in z has a
double root, which is r + 1/r = (1 + x^2 + s^2) / s.) For a label, centres differ only if both
distances are 0 and the scales are equal. Scales differ only if centres are equal. The first costs
arcosh(1 + 1 / (2 s(0)^2)), the second the log of the ratio. Both are epsilon for "stable". "smooth"
adds the two instead, because neither derivative of the log density, by x / s and by log s, exceeds
1. "paper" is Nissim, Raskhodnikova and Smith 2007, Corollary 2.4.

**Proof for Laplace noise.** Centres at a distance of D cost D / scale. A scale that shrinks by
exp(b) costs (e, (1 - exp(-b)) exp(-(e + b) / (exp(b) - 1))) for every e >= 0. A scale that grows by
exp(b) costs (b, 0). Both follow by integrating the excess of one density over exp(e) times the
other. For labels only one of the two happens.

**Sampling is exact.** A comparison of 64 random bits with integer thresholds draws the flips. The
thresholds satisfy the three conditions in integer arithmetic, with a rational number below E in
place of E (`exact_thresholds`). So the sampled distribution itself is epsilon-DP, not only the
real-valued one that it approximates. Probabilities below 2**-64 are rounded up to it. The generator
of the bits remains to be trusted. Noise on values is floating point and has the limits in
`jaxdp.transforms.noise`.
"""

import dataclasses
import fractions
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from jaxdp.files import check_choice
from jaxdp.prediction.answer_checks import (
    check_binary,
    check_classes,
    check_distances,
    check_labels,
    check_range,
)
from jaxdp.prediction.checks import positive
from jaxdp.prediction.ensembles import laplace_vote
from jaxdp.privacy.events import DpEvent, PureDpEvent
from jaxdp.transforms import noise, responses

CauchyCalibration = Literal["stable", "smooth", "paper"]
LaplaceCalibration = Literal["stable", "paper"]


# --- Flip probabilities -------------------------------------------------------------------------


def flip_probability(distance: Any, *, epsilon: float, num_classes: int = 2) -> np.ndarray:
    """Returns p(k) of randomised response, the smallest that pure DP allows. The module's text has
    the proof.

        p(0) = (C - 1) / (e^epsilon + C - 1)
        p(k + 1) = max(e^-epsilon p(k), 1 - e^epsilon (1 - p(k)))

    For two classes p(k) = e^(-epsilon k) / (1 + e^epsilon). With many classes 1 - p(k) first grows
    by e^epsilon per step, until p(k) <= e^epsilon / (1 + e^epsilon). Then p(k) shrinks by e^epsilon
    per step.

    `distance` has integers >= 0 of any shape, epsilon is finite and > 0, num_classes is C >= 2.
    Returns float64 of that shape, 0 where it underflows (below about e^-745). Raises ValueError for
    an argument out of range.
    """
    epsilon = positive("epsilon", epsilon)
    classes = check_classes(num_classes)
    k = check_distances(distance).astype(np.float64)
    # In logarithms, because e^epsilon overflows above 709.
    log_others = math.log(classes - 1)
    log_total = float(np.logaddexp(epsilon, log_others))  # of e^epsilon + C - 1
    # The first distance at which p <= e^epsilon / (1 + e^epsilon).
    log_turn = float(np.logaddexp(0.0, epsilon))
    # 1 - p(k) = e^(epsilon (k + 1)) / (e^epsilon + C - 1) until there.
    steps_to_turn = math.ceil((log_total - log_turn) / epsilon)
    turn = max(0, steps_to_turn - 1)
    if turn == 0:
        at_turn = math.exp(log_others - log_total)
    else:
        at_turn = -math.expm1((turn + 1) * epsilon - log_total)
    with np.errstate(under="ignore"):
        # Beyond the turn it would be positive, and is not used there.
        exponent = np.minimum((k + 1) * epsilon - log_total, 0.0)
        before = -np.expm1(exponent)
        steps_after_turn = np.maximum(k - turn, 0.0)
        after = at_turn * np.exp(-epsilon * steps_after_turn)
    return np.where(k < turn, before, after)


def needed_distance(epsilon: float, *, flip: float = 1e-3, num_classes: int = 2) -> int:
    """Returns the largest distance that answers use, the K for `train_with_bounds(ks=K)`.

    It is the smallest K with flip_probability(K) <= `flip`. An answer reads the smaller of stable
    distance and K. So bounds up to K raise the probability of a wrong answer by less than `flip`,
    and only of answers beyond K. With flip=2**-64 the rise is below the resolution of what is
    sampled.

    `epsilon` is that of one answer, as from `query_epsilon`. K is 6 at an epsilon of 1 and 31 at
    0.2. Twice as many are needed where a neighbour is two steps away, see `private_predict`. Raises
    ValueError for an argument out of range.
    """
    if not 0 < flip < 1:
        raise ValueError(f"flip must be in (0, 1), got {flip!r}.")
    flips = functools.partial(flip_probability, epsilon=epsilon, num_classes=num_classes)
    # Flip probabilities fall with the distance, so doubling soon passes the last one.
    largest = 1
    while flips(largest) > flip:
        largest *= 2
    # The first True.
    is_rare = flips(np.arange(largest + 1)) <= flip
    return int(np.argmax(is_rare))


def flip_probability_global_laplace(distance: Any, *, epsilon: float) -> np.ndarray:
    """Returns P(noise > 1/2) for Laplace noise of scale 1 / epsilon. Else as `flip_probability`."""
    shape = check_distances(distance).shape
    epsilon = positive("epsilon", epsilon)
    return np.full(shape, math.exp(-epsilon / 2) / 2)


def flip_probability_cauchy(
    distance: Any,
    *,
    epsilon: float,
    calibration: CauchyCalibration = "stable",
    beta: float | None = None,
) -> np.ndarray:
    """Returns arctan(2 s(k)) / pi, the probability that Cauchy noise of scale s(k) exceeds 1/2.

    `calibration` chooses s(k), see the module's text. All choices are epsilon-DP. `beta` is for
    "smooth" only, in (0, epsilon) and fixed without looking at data. epsilon - 1 / k gives the
    smallest scale at the distance k. The default epsilon / 2 is the best at k = 2 / epsilon.
    Otherwise as `flip_probability`.
    """
    epsilon = positive("epsilon", epsilon)
    k = check_distances(distance)
    check_choice("calibration", calibration, CauchyCalibration)
    if beta is not None and (calibration != "smooth" or not 0 < beta < epsilon):
        raise ValueError(
            f"beta={beta!r} needs calibration='smooth' and must lie in (0, epsilon={epsilon:g})."
        )
    if calibration == "stable":
        rate = epsilon
        twice_scale = 2 * math.exp(-epsilon / 2) / -math.expm1(-epsilon)  # 1 / sinh(epsilon / 2)
    elif calibration == "smooth":
        rate = epsilon / 2 if beta is None else beta
        # M1: the shift costs epsilon - beta, the change of the scale beta.
        twice_scale = 2 / (epsilon - rate)
    else:
        # Nissim et al., Corollary 2.4, with gamma = 2: the scale is 6 S / epsilon.
        rate = epsilon / 6
        twice_scale = 12 / epsilon
    with np.errstate(under="ignore"):
        shrinking = np.exp(-rate * k)
        return np.arctan(twice_scale * shrinking) / math.pi


def flip_probability_smooth_laplace(
    distance: Any,
    *,
    epsilon: float,
    delta: float,
    calibration: LaplaceCalibration = "stable",
) -> np.ndarray:
    """Returns exp(-1 / (2 s(k))) / 2, the probability that Laplace noise of scale s(k) exceeds 1/2.

    "stable" has s(k) = exp(-b k) / epsilon with b = `dilation_rate(epsilon, delta)`. "paper" has
    s(k) = 2 exp(-b k) / epsilon with b = epsilon / (2 log(2 / delta)). "paper" is refused if
    epsilon is so large that this b does not give delta. Otherwise as `flip_probability`.
    """
    k = check_distances(distance)
    rate = dilation_rate(epsilon, delta)
    inverse_scale = epsilon
    check_choice("calibration", calibration, LaplaceCalibration)
    if calibration == "paper":
        rate = epsilon / (2 * math.log(2 / delta))
        inverse_scale = epsilon / 2
        if _log_dilation_delta(rate, epsilon) > math.log(delta):
            raise ValueError(
                f"epsilon={epsilon:g} is too large for the paper's constants to give "
                f"delta={delta:g}. Use calibration='stable'."
            )
    with np.errstate(under="ignore", over="ignore"):
        growing = np.exp(rate * k)
        return np.exp(-inverse_scale * growing / 2) / 2


def dilation_rate(epsilon: float, delta: float) -> float:
    """Returns the largest b <= epsilon by which exp(+-b) may change the scale of Laplace noise.

    The change is then (epsilon, delta)-DP. b solves (1 - exp(-b)) exp(-(epsilon + b) / (exp(b) -
    1)) = delta. The left side rises in b, and the result is on the side where delta holds. Raises
    ValueError for an argument out of range.
    """
    epsilon = positive("epsilon", epsilon)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta!r}.")
    log_delta = math.log(delta)
    if _log_dilation_delta(epsilon, epsilon) <= log_delta:
        return epsilon
    # The exponent at the start is below -3 log(2 / delta).
    bound = 4 * math.log(2 / delta) + 4
    start = min(epsilon, 1.0) / bound

    def excess(b: float) -> float:
        return _log_dilation_delta(b, epsilon) - log_delta

    root = optimize.brentq(excess, start, epsilon, rtol=1e-13)
    return root * (1 - 1e-12)  # the side where delta holds


def _log_dilation_delta(rate: float, epsilon: float) -> float:
    """Returns log delta of changing a Laplace scale by exp(+-rate), at `epsilon` >= rate."""
    rate = min(rate, 700.0)  # larger rates do not change the value
    exponent = (epsilon + rate) / math.expm1(rate)
    return math.log(-math.expm1(-rate)) - exponent


# --- Labels -------------------------------------------------------------------------------------


def randomised_response(
    key: jax.Array,
    labels: Any,
    distances: Any,
    *,
    epsilon: float,
    num_classes: int,
) -> np.ndarray:
    """Answers labels by randomised response with the flip probability of their distance.

    Args:
        key: A typed noise key, used for this call only (`jaxdp.release.stream`).
        labels: int [Q] in [0, num_classes).
        distances: int [Q] >= 0, calibrated (see the module's text).
        epsilon: The epsilon of each answer, finite and > 0.
        num_classes: C >= 2, a public declaration.

    Returns:
        int32 [Q].

    Raises:
        TypeError: The key is an old-style key.
        ValueError: An argument is out of range, or epsilon is too small for 64 bits (below about
            1e-12).

    Formal guarantees:
        Each answer is (epsilon, 0)-DP, `PureDpEvent(epsilon)`, for the neighbouring relation of the
        distances and any number of classes. This holds for the sampled distribution. No other
        member of the family is more accurate.
    """
    return _answer(key, labels, distances, None, epsilon=epsilon, num_classes=num_classes)


def smooth_cauchy(
    key: jax.Array,
    labels: Any,
    distances: Any,
    *,
    epsilon: float,
    num_classes: int = 2,
    calibration: CauchyCalibration = "stable",
    beta: float | None = None,
) -> np.ndarray:
    """Answers labels in {0, 1} by rounding label + Cauchy noise at 1/2, the paper's mechanism.

    Arguments, result, errors and guarantee are as in `randomised_response` and
    `flip_probability_cauchy`: every calibration is (epsilon, 0)-DP. `num_classes` must be 2.
    """
    check_binary("smooth_cauchy", num_classes)
    flips = functools.partial(
        flip_probability_cauchy, epsilon=epsilon, calibration=calibration, beta=beta
    )
    return _answer(key, labels, distances, flips, epsilon=epsilon, num_classes=2)


def global_laplace(
    key: jax.Array,
    labels: Any,
    distances: Any,
    *,
    epsilon: float,
    num_classes: int = 2,
) -> np.ndarray:
    """Answers labels in {0, 1} by rounding label + Laplace(1 / epsilon) at 1/2.

    It needs no certificate. It works as `randomised_response` with `num_classes` 2, but does not
    use the distances. Answers are (epsilon, 0)-DP for every model and every neighbouring relation.
    """
    check_binary("global_laplace", num_classes)
    flips = functools.partial(flip_probability_global_laplace, epsilon=epsilon)
    nowhere = np.zeros(np.shape(labels), np.int64)
    return _answer(key, labels, nowhere, flips, epsilon=epsilon, num_classes=2)


def global_response(
    key: jax.Array,
    labels: Any,
    distances: Any,
    *,
    epsilon: float,
    num_classes: int,
) -> np.ndarray:
    """Answers labels of any `num_classes` by k-ary randomised response. Needs no certificate."""
    nowhere = np.zeros(np.shape(labels), np.int64)
    return randomised_response(key, labels, nowhere, epsilon=epsilon, num_classes=num_classes)


def _answer(
    key: jax.Array,
    labels: Any,
    distances: Any,
    flips: Callable[[np.ndarray], np.ndarray] | None,
    *,
    epsilon: float,
    num_classes: int,
) -> np.ndarray:
    """Answers labels by the smallest exactly epsilon-DP thresholds that are at least `flips`.

    With None for `flips` they are the smallest of all.
    """
    epsilon = positive("epsilon", epsilon)
    classes = check_classes(num_classes)
    k = check_distances(distances)
    labels = check_labels(labels, classes, k.shape)
    last = int(k.max(initial=0))
    floor = None
    if flips is not None:
        floor = flips(np.arange(last + 1)).tolist()
    table = exact_thresholds(floor, last, epsilon=epsilon, num_classes=classes)
    # Later thresholds are all 1, the last one of the table.
    rows = np.minimum(k, len(table) - 1)
    thresholds = np.array(table, np.uint64)[rows]
    noise.check_key(key)
    drawn = responses.numbers(key, len(labels))
    return responses.flipped(drawn, labels, thresholds, classes)


def exact_thresholds(
    floor: Sequence[float] | None,
    last: int,
    *,
    epsilon: float,
    num_classes: int,
) -> list[int]:
    """Returns integers r(0) >= r(1) >= ... for the distances k.

    Each of the C - 1 other labels is answered with probability r(k) / 2**64. They are the smallest
    integers that are at least `floor[k] * 2**64 / (C - 1)` (`floor` does not increase) and satisfy
    exactly, with own = 2**64 - (C - 1) r and a rational number E, 1 < E < exp(epsilon),

        own(0) <= E r(0),   r(0) <= E own(0),   r(k) <= E r(k + 1),   own(k + 1) <= E own(k).

    The list ends at distance `last`, or earlier if all later r are 1.
    """
    unit = 2**responses.BITS
    others = num_classes - 1
    factor = responses.below_exp(epsilon)

    def at_least(k: int) -> int:
        if floor is None:
            return 0
        return math.ceil(unit * fractions.Fraction(floor[k]) / others)

    by_response = math.ceil(unit / (factor + others))  # own(0) <= E r(0)
    rare = max(at_least(0), by_response)
    # What is left of 2^64 for the label itself.
    own = unit - others * rare
    if factor <= 1 or rare > factor * own:
        raise ValueError(
            f"epsilon={epsilon:g} is too small for {num_classes} classes and 64 random bits."
        )
    table = [rare]
    while len(table) <= last and not (rare == 1 and floor is None):
        by_others = math.ceil(rare / factor)  # r(k) <= E r(k + 1)
        by_own = math.ceil((unit - factor * own) / others)  # own(k + 1) <= E own(k)
        least = max(by_others, by_own, at_least(len(table)))
        # Rounding may make `floor` rise by an ulp.
        rare = min(rare, least)
        own = unit - others * rare
        table.append(rare)
    return table


# --- Values -------------------------------------------------------------------------------------


def smooth_sensitivity(
    values: Any,
    lower: Any,
    upper: Any,
    *,
    beta: float,
    output_range: tuple[float, float],
) -> np.ndarray:
    """Returns a beta-smooth upper bound on the move of values between neighbours.

    Let box_0 = {value}, and box_j the interval for data at distance j, or the whole range beyond
    the last row. Everything is clipped to `output_range`. Then

        S = max_j exp(-beta j) g_j,   g_j = max(upper_{j+1} - lower_j, upper_j - lower_{j+1}).

    Args:
        values: [Q], the outputs of the model, real.
        lower, upper: [J, Q], row j - 1 bounds the outputs of all models within distance j = 1, 2,
            ..., J.
        beta: > 0, fixed without looking at data.
        output_range: (low, high), a public declaration.

    Returns:
        float64 [Q] in (0, high - low].

    Raises:
        ValueError: An argument is out of range or has another shape.

    Formal guarantees:
        S(D) >= |value(D) - value(D')| and S(D) <= exp(beta) S(D') for all neighbours D, D', if the
        boxes nest across neighbours: box_j(D) lies in box_{j+1}(D'). Certified boxes nest
        (`jaxdp.prediction.certify`), also for a sparse grid of distances. Proof: value(D') lies in
        box_1(D), so g_0 bounds the difference. Nesting gives g_j(D) <= g_{j+1}(D'), so exp(-beta j)
        g_j(D) <= exp(beta) exp(-beta (j + 1)) g_{j+1}(D') <= exp(beta) S(D'). Beyond the last row
        both g are high - low.
    """
    beta = positive("beta", beta)
    low, high = check_range(output_range)
    middle = (low + high) / 2
    values = _clip(values, middle, low, high)
    lower = _clip(lower, low, low, high)
    upper = _clip(upper, high, low, high)
    is_matrix = lower.ndim == 2 and lower.shape == upper.shape
    if values.ndim != 1 or not is_matrix or lower.shape[1:] != values.shape:
        raise ValueError(
            f"values must be [Q] and lower, upper [J, Q], got {values.shape}, {lower.shape} and "
            f"{upper.shape}."
        )
    # Beyond the last row the box is the whole range: box_{J + 1} and box_{J + 2}.
    lowest = np.full_like(values, low)
    highest = np.full_like(values, high)
    lows = np.vstack([values, lower, lowest, lowest])
    highs = np.vstack([values, upper, highest, highest])
    above = highs[1:] - lows[:-1]
    below = highs[:-1] - lows[1:]
    gaps = np.maximum(above, below)  # g_j
    decay = np.exp(-beta * np.arange(len(gaps)))
    # [J + 2, Q], of which the largest is S.
    decayed = decay[:, None] * gaps
    return np.max(decayed, axis=0)


def cauchy_values(
    key: jax.Array,
    values: Any,
    lower: Any,
    upper: Any,
    *,
    epsilon: float,
    output_range: tuple[float, float],
    beta: float | None = None,
) -> np.ndarray:
    """Answers real values with Cauchy noise scaled to their smooth sensitivity.

    Args:
        key: A typed noise key, used for this call only.
        values, lower, upper, output_range: As in `smooth_sensitivity`.
        epsilon: The epsilon of each answer, finite and > 0.
        beta: In (0, epsilon), fixed without looking at data. None for `default_beta`.

    Returns:
        float32 [Q] in `output_range`.

    Raises:
        TypeError, ValueError: An argument is out of range or has another shape.

    Formal guarantees:
        Each answer is (epsilon, 0)-DP, `PureDpEvent(epsilon)`, up to the floating-point limits in
        `jaxdp.transforms.noise`. The scale is S / sqrt(2 min(cosh(epsilon) - 1, e^beta
        (cosh(epsilon) - cosh(beta)))), about S / sqrt(epsilon^2 - beta^2). Proof: centres are d <=
        min(S, S') apart, and scales differ by a factor exp(t) with 0 <= t <= beta. By (**) of the
        module's text this costs at most arcosh(cosh(t) + exp(-t) / (2 c^2)) for scale c S. The
        argument of arcosh is convex in t, so the cost is largest at t = 0 or t = beta. Both costs
        are at most epsilon.
    """
    epsilon = positive("epsilon", epsilon)
    if beta is None:
        beta = default_beta(epsilon)
    if not 0 < beta < epsilon:
        raise ValueError(f"beta={beta!r} must lie in (0, epsilon={epsilon:g}).")
    beta = float(beta)  # sums with a scalar of 16 bits would be rounded to 16 bits
    sensitivity = smooth_sensitivity(values, lower, upper, beta=beta, output_range=output_range)
    scale = cauchy_multiplier(epsilon, beta) * sensitivity
    return _add_noise(noise.cauchy, key, values, scale, output_range)


def default_beta(epsilon: float) -> float:
    """Returns the beta of `cauchy_values`: 0.8 epsilon, or more if more costs nothing.

    0.8 epsilon gives the least noise if g_j is decisive at the distance j = 2.2 / epsilon. At
    distance 0 it gives 5/3 of the least noise. Up to log(2 cosh(epsilon) - 1) a larger beta does
    not raise the scale at distance 0.
    """
    epsilon = positive("epsilon", epsilon)
    # log(2 cosh(epsilon) - 1), which does not overflow here.
    free = epsilon + math.log1p(math.exp(-2 * epsilon) - math.exp(-epsilon))
    # beta stays below epsilon, where the scale would be infinite.
    largest = (1 - 1e-9) * epsilon
    return max(0.8 * epsilon, min(free, largest))


def cauchy_multiplier(epsilon: float, beta: float) -> float:
    """Returns the scale of the noise of `cauchy_values` for a smooth sensitivity of 1."""
    # More than 50 would overflow and does not lower the noise.
    epsilon = min(epsilon, 50.0)
    beta = min(beta, 49.9)
    # cosh a - cosh b = 2 sinh((a + b) / 2) sinh((a - b) / 2), which is exact near a = b.
    same = 2 * math.sinh(epsilon / 2) ** 2
    mean = (epsilon + beta) / 2
    half_gap = (epsilon - beta) / 2
    scaled = 2 * math.exp(beta) * math.sinh(mean) * math.sinh(half_gap)
    return 1 / math.sqrt(2 * min(same, scaled))


def laplace_values(
    key: jax.Array,
    values: Any,
    *,
    epsilon: float,
    output_range: tuple[float, float],
) -> np.ndarray:
    """Answers real values with Laplace noise of scale (high - low) / epsilon. Needs no certificate.

    Otherwise as `cauchy_values`, for every model and every neighbouring relation.
    """
    low, high = check_range(output_range)
    epsilon = positive("epsilon", epsilon)
    # Clipped values move by at most high - low.
    scale = np.full(np.shape(values), (high - low) / epsilon)
    return _add_noise(noise.laplace, key, values, scale, output_range)


def _add_noise(
    draw: Callable[[jax.Array, Any, float], Any],
    key: jax.Array,
    values: Any,
    scale: np.ndarray,
    output_range: tuple[float, float],
) -> np.ndarray:
    low, high = check_range(output_range)
    like = jax.ShapeDtypeStruct(scale.shape, jnp.float32)
    # Noise of scale 1, because every query has a scale of its own and `draw` takes one for all.
    standard = np.asarray(draw(key, like, 1.0), np.float64)
    # A value that is NaN must not show, so the middle of the range stands for it.
    middle = (low + high) / 2
    noisy = _clip(values, middle, low, high) + scale * standard
    return np.clip(noisy, low, high).astype(np.float32)


def _clip(
    array: Any,
    instead: float,
    low: float,
    high: float,
) -> np.ndarray:
    """Clips to the declared range. NaN, from a bound that overflowed, becomes `instead`."""
    array = np.asarray(array, np.float64)
    numbers = np.where(np.isnan(array), instead, array)
    return np.clip(numbers, low, high)


# --- Registry -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A row of `METHODS`: the function that answers queries, and the cost of one answer.

    Attributes:
        kind: "labels" for `private_predict`, "values" for `private_values`.
        answer: A function like `randomised_response` for labels, like `cauchy_values` for values.
        certified: Whether it uses certificates. If not, distances are 0, and values have no boxes
            (`laplace_values`).
        binary: Whether it answers two classes only.
        vote: A function like `ensembles.laplace_vote` that answers an ensemble with any number of
            classes. None applies `answer` to the certified vote.
        event: `event(epsilon) -> DpEvent` of one answer.
    """

    kind: Literal["labels", "values"]
    answer: Callable[..., np.ndarray]
    certified: bool = True
    binary: bool = False
    vote: Callable[..., np.ndarray] | None = None
    event: Callable[[float], DpEvent] = PureDpEvent


METHODS: dict[str, Mechanism] = {
    "randomised_response": Mechanism("labels", randomised_response),
    "smooth_cauchy": Mechanism("labels", smooth_cauchy, binary=True),
    "paper_cauchy": Mechanism(
        "labels", functools.partial(smooth_cauchy, calibration="paper"), binary=True
    ),
    "global_laplace": Mechanism(
        "labels", global_laplace, certified=False, binary=True, vote=laplace_vote
    ),
    "global_response": Mechanism("labels", global_response, certified=False),
    "cauchy_values": Mechanism("values", cauchy_values),
    "laplace_values": Mechanism("values", laplace_values, certified=False),
}
