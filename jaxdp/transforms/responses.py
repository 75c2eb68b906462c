"""Randomised response on labels, by integers, so that its epsilon is exact.

`Response` is RRTop-k of Ghazi, Golowich, Kumar, Manurangsi and Zhang 2021, "Deep Learning with
Label Differential Privacy", arXiv:2102.06062, Algorithm 2. S holds the k classes that a public
prior thinks most of. A label y in S stays with probability e^eps / (e^eps + k - 1), and becomes
each other class of S with probability 1 / (e^eps + k - 1). A label outside of S becomes each class
of S with probability 1 / k. With k = K it is K-ary randomised response (Warner 1965).

RRWithPrior (Algorithm 3) takes the k that is most often right under the prior p:

    k* = argmax_k  e^eps / (e^eps + k - 1) * sum of the k largest p           `best_sizes`

No epsilon-DP mechanism is more often right under p (Theorem 3 there).

**Proof.** A class of S is answered with one of three probabilities, and the ratio of the largest to
the smallest is e^eps. The classes outside of S are never answered. Here the probabilities are
integers out of 2**64, and `_check_exact` compares them with a rational number below e^eps. So the
guarantee holds for the sampled distribution, and only the generator of the bits must be trusted.
"""

import fractions
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BITS = 64  # random bits of a label
MOST_CLASSES = 2**16
_WHOLE = 2**BITS


def numbers(key: jax.Array, count: int) -> np.ndarray:
    """Returns independent uniform numbers uint64 [count] of a key, for this call only."""
    return of_words(jax.random.bits(key, (2, count), jnp.uint32))


def of_words(words: Any) -> np.ndarray:
    """Returns numbers uint64 [n] from their upper and lower halves, words uint32 [2, n]."""
    high, low = np.asarray(words).astype(np.uint64)
    joined: np.ndarray = high << np.uint64(32) | low
    return joined


def flipped(
    numbers: np.ndarray, labels: np.ndarray, thresholds: Any, num_classes: int
) -> np.ndarray:
    """Returns labels int32 [n] of uniform numbers uint64 [n]. Each other label gets `thresholds` of
    2**64 numbers, one threshold for all or [n], and the rest keep the label.
    """
    # The numbers below (K - 1) r form K - 1 runs of r, one for each other label.
    # A threshold of 0 would divide by 0. `is_flipped` leaves it out.
    run_length = np.maximum(thresholds, np.uint64(1))
    runs = numbers // run_length
    is_flipped = (runs < num_classes - 1) & (thresholds > np.uint64(0))
    # A shift by 1 to K - 1 modulo K reaches each other label once.
    shift = np.where(is_flipped, runs + np.uint64(1), np.uint64(0)).astype(np.int64)
    return ((labels + shift) % num_classes).astype(np.int32)


def response_threshold(num_classes: int, epsilon: float) -> int:
    """Returns how many of 2**64 numbers stand for each other label, 0 for an infinite epsilon.

    It is the least number r that is exactly epsilon-DP.

    With own = 2**64 - (K - 1) r for the true label and a rational E below e^epsilon: own <= E r and
    r <= E own.

    Raises:
      ValueError: num_classes is no integer in [2, 2**16], or epsilon is not positive, or too small
        for 64 bits.
    """
    whole = isinstance(num_classes, int) and not isinstance(num_classes, bool)
    if not whole or not 2 <= num_classes <= MOST_CLASSES:
        raise ValueError(
            f"num_classes must be an integer in [2, {MOST_CLASSES}], got {num_classes!r}."
        )
    if not epsilon > 0:
        raise ValueError(
            "the epsilon of labels must be > 0 (math.inf for labels without noise), got "
            f"{epsilon!r}."
        )
    if math.isinf(epsilon):
        return 0
    ratio = below_exp(epsilon)
    others = num_classes - 1
    # own <= E r means 2^64 <= (E + K - 1) r.
    threshold: int = math.ceil(_WHOLE / (ratio + others))
    # Rounding up may give another label more numbers than the true one.
    if ratio <= 1 or threshold > ratio * (_WHOLE - others * threshold):
        raise ValueError(
            f"epsilon={epsilon!r} is too small for {num_classes} classes and {BITS} random bits. "
            "Use a larger one."
        )
    return threshold


def below_exp(epsilon: float) -> fractions.Fraction:
    """Returns a rational number just below e^epsilon."""
    # math.exp is right to 2**-52. Above e^55 one number in 2**64 for each other label is enough.
    power = fractions.Fraction(math.exp(min(epsilon, 55.0)))
    return power * (1 - fractions.Fraction(1, 2**50))


class Response(NamedTuple):
    """RRTop-k for n labels. All fields are public.

    Attributes:
      order: int32 [n, K] or [1, K], the classes by falling prior. One row is for all labels.
      sizes: int32 [n] or [1], the number k of answers for each label, in [1, K].
      epsilon: > 0 and finite.
    """

    order: np.ndarray
    sizes: np.ndarray
    epsilon: float

    def answer(self, numbers: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns answers int32 [n] for labels [n] and independent uniform numbers uint64 [n].

        Formal guarantees:
          The answer for a label is (epsilon, 0)-DP for its replacement by any other integer: one
          outside of [0, K) counts as a class outside of S.
        """
        sizes = np.broadcast_to(self.sizes, labels.shape)
        places = self._places(labels)
        answers = np.zeros(labels.shape, np.int64)  # a set of one class tells nothing
        for size in np.unique(sizes[sizes > 1]).tolist():
            rows = np.flatnonzero(sizes == size)
            answers[rows] = _top(numbers[rows], places[rows], size, self.epsilon)
        order = np.broadcast_to(self.order, (*labels.shape, self.order.shape[1]))
        return np.take_along_axis(order, answers[:, None], 1)[:, 0].astype(np.int32)

    def likelihood(self, answers: np.ndarray) -> np.ndarray:
        """Returns P(answer | true label c) for every class c, float32 [n, K], of answers [n]."""
        places = np.broadcast_to(self._place_of_class, (len(answers), self.order.shape[1]))
        sizes = np.broadcast_to(self.sizes, answers.shape)
        likelihood = np.ones(places.shape, np.float32)
        for size in np.unique(sizes[sizes > 1]).tolist():
            rows = np.flatnonzero(sizes == size)
            other = response_threshold(size, self.epsilon) * 2.0**-BITS
            outside = places[rows] >= size
            likelihood[rows] = np.where(outside, 1 / size, other)
            # An answer is in S, so this overwrites the entry of a class of S.
            likelihood[rows, answers[rows]] = 1 - (size - 1) * other
        return likelihood

    @property
    def _place_of_class(self) -> np.ndarray:
        """The place of each class, of the shape of `order`."""
        return np.argsort(self.order, axis=1, kind="stable")

    def _places(self, labels: np.ndarray) -> np.ndarray:
        """Returns the place of each label in its order, K for a label that is no class."""
        classes = self.order.shape[1]
        places = self._place_of_class
        is_class = (labels >= 0) & (labels < classes)
        columns = np.where(is_class, labels, 0).astype(np.int64)
        rows = np.arange(len(labels)) if len(places) > 1 else 0  # one order may serve all labels
        of_labels: np.ndarray = np.where(is_class, places[rows, columns], classes)
        return of_labels


def _top(numbers: np.ndarray, places: np.ndarray, size: int, epsilon: float) -> np.ndarray:
    """Returns the places of the answers among `size` classes."""
    threshold = response_threshold(size, epsilon)
    _check_exact(size, threshold, epsilon)
    inside = flipped(numbers, places, np.uint64(threshold), size)
    # The last class has what division leaves. `_check_exact` counts it so.
    equal = numbers // np.uint64(_WHOLE // size)
    outside = np.minimum(equal, np.uint64(size - 1)).astype(np.int64)
    return np.where(places < size, inside, outside)


def _check_exact(size: int, threshold: int, epsilon: float) -> None:
    """Raises ValueError unless the counts of all answers are within a factor below e^epsilon."""
    own = _WHOLE - (size - 1) * threshold
    equal = _WHOLE // size  # numbers for each class, and the last one has the rest
    counts = (own, threshold, equal, _WHOLE - (size - 1) * equal)
    if max(counts) > below_exp(epsilon) * min(counts):
        raise ValueError(
            f"epsilon={epsilon!r} is too small for {size} classes and {BITS} random bits. Use a "
            "larger one."
        )


def with_prior(prior: Any, *, num_classes: int, epsilon: float) -> Response:
    """Returns RRWithPrior for a public prior, or K-ary randomised response for None.

    Args:
      prior: None, or probabilities [K] for all labels, or [n, K] for each. A prior that depends on
        the labels must have been released before.
      num_classes: K in [2, 2**16], a public declaration.
      epsilon: > 0 and finite.

    Raises:
      ValueError: The prior has another shape, a negative number or NaN, or a row whose sum is not
        1 to a thousandth. Or another argument is out of range.
    """
    response_threshold(num_classes, epsilon)
    if math.isinf(epsilon):
        raise ValueError("epsilon must be finite, got inf. Labels without noise need no release.")
    if prior is None:
        order = np.arange(num_classes, dtype=np.int32)[None]
        return Response(order, np.array([num_classes], np.int32), float(epsilon))
    shares = np.atleast_2d(np.asarray(prior, np.float64))
    if shares.ndim != 2 or shares.shape[1] != num_classes:
        raise ValueError(
            f"prior must be [K] or [n, K] with K={num_classes} classes, got shape "
            f"{np.shape(prior)}."
        )
    is_share = (shares >= 0).all() and (abs(shares.sum(1) - 1) < 1e-3).all()
    if not is_share:
        raise ValueError(
            "prior must be probabilities: not negative, and with the sum 1 in every row. Divide by "
            "the sum, or take the softmax of logits."
        )
    order = np.argsort(-shares, axis=1, kind="stable").astype(np.int32)
    return Response(order, best_sizes(shares, epsilon), float(epsilon))


def best_sizes(prior: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns k* of RRWithPrior for each row of a prior [n, K], int32 [n] in [1, K].

    It is the smallest k with the largest probability that an answer is the label.
    """
    largest = -np.sort(-prior, axis=1)
    others = np.arange(prior.shape[1])
    # Divided by e^eps, which overflows for a large epsilon.
    right = largest.cumsum(1) / (1 + others * math.exp(-epsilon))
    sizes: np.ndarray = right.argmax(1) + 1  # the first of equal ones
    return sizes.astype(np.int32)
