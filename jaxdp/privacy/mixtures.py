"""The shifts of runs whose participations are random, as mixtures that can be drawn.

A mixture is E_x N(m_x, I), where m_x is what participation x of a record adds to the noisy values,
in standard deviations. Both classes have, besides their methods:

    width           the numbers of a draw
    largest         M = max_x |m_x|^2
    mean_square     E_x |m_x|^2
    square_of_mean  |E_x m_x|^2
"""

import math

import numpy as np
from scipy import special


class Bins:
    """The shifts of balls in bins, seen through the products <m_j, y> of a draw with all of them.

    Args:
        products: The products of the shifts with each other, float64 [b, b].
    """

    def __init__(self, products: np.ndarray):
        self._products = products
        self._squares = np.diag(products)
        self.width = len(products)
        self.largest = float(self._squares.max())
        self.mean_square = float(self._squares.mean())
        self._with_mean = products.mean(axis=0)
        self.square_of_mean = float(self._with_mean.mean())
        # The square root of the products, or None where they are diagonal.
        self._root: np.ndarray | None = None
        if (products - np.diag(self._squares)).any():
            values, vectors = np.linalg.eigh(products)
            # Rounding may leave an eigenvalue just below 0.
            self._root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T

    def _noise(self, rng: np.random.Generator, count: int) -> np.ndarray:
        noise = rng.standard_normal((count, self.width))
        noise = noise * np.sqrt(self._squares) if self._root is None else noise @ self._root
        return noise

    def draw(self, rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
        """Returns values of N(scale m_j, I) with a uniform j, float64 [count, b]."""
        own = rng.integers(self.width, size=count)
        values: np.ndarray = scale * self._products[own] + self._noise(rng, count)
        return values

    def draw_mean(self, rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
        """Returns values of N(scale E_j m_j, I), float64 [count, b]."""
        values: np.ndarray = scale * self._with_mean + self._noise(rng, count)
        return values

    def log_ratio(self, values: np.ndarray, scale: float) -> np.ndarray:
        """Returns the logarithm of the density ratio of scaled shifts, float64 [count]."""
        # log E_j exp(<s m_j, y> - |s m_j|^2 / 2), for the scale s.
        exponents = scale * values - scale * scale * self._squares / 2
        largest = exponents.max(axis=1)  # against overflow
        exponents -= largest[:, None]
        np.exp(exponents, out=exponents)
        ratio: np.ndarray = largest + np.log(exponents.mean(axis=1))
        return ratio

    def along_mean(self, values: np.ndarray) -> np.ndarray:
        """Returns the products of values with the mean shift, float64 [count]."""
        product: np.ndarray = values.mean(axis=1)
        return product


class Renewals:
    """The shifts of b-min-sep sampling.

    Steps of a record move disjoint rows, so |m_x|^2 is the sum over its steps.

    Args:
        matrix: C / sigma, float64 [T, T], with at most b bands.
        separation: b.
        probability: p.
    """

    def __init__(self, matrix: np.ndarray, separation: int, probability: float):
        self.matrix = matrix
        self.separation = separation
        self.probability = probability
        self.width = len(matrix)
        # The probability that a record may take part in the first step.
        self._may_begin = 1 / (1 + (separation - 1) * probability)
        # The probability that a record is in a step: p / (1 + (b - 1) p).
        self.rate = probability * self._may_begin
        self._squares: np.ndarray = np.square(matrix).sum(axis=0)
        self._mean: np.ndarray = self.rate * matrix.sum(axis=1)
        self.mean_square = float(self.rate * self._squares.sum())
        self.square_of_mean = float(self._mean @ self._mean)
        # best[t] is the largest sum of squares over steps from t on, over all x with steps b or
        # more apart.
        best = np.zeros(self.width + separation)
        for step in reversed(range(self.width)):
            taken = self._squares[step] + best[step + separation]
            best[step] = max(best[step + 1], taken)
        self.largest = float(best[0])

    def draw(self, rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
        """Returns values of N(scale m_x, I) with random x, float64 [count, T]."""
        taking_part = np.zeros((count, self.width))
        free_from = self.first_free(rng, count)
        for step in range(self.width):
            is_in = (free_from <= step) & (rng.random(count) < self.probability)
            taking_part[is_in, step] = 1.0
            free_from[is_in] = step + self.separation
        noise = rng.standard_normal((count, self.width))
        values: np.ndarray = scale * (taking_part @ self.matrix.T) + noise
        return values

    def first_free(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Returns the steps from which records may take part, in 0, ..., b - 1, int64 [count]."""
        # In the stationary process a record waits w > 0 steps if it took part b - w steps before
        # the first one.
        waits = np.full(self.separation, self.rate)
        waits[0] = self._may_begin
        return rng.choice(self.separation, size=count, p=waits / waits.sum())

    def draw_mean(self, rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
        """Returns values of N(scale E_x m_x, I), float64 [count, T]."""
        values: np.ndarray = scale * self._mean + rng.standard_normal((count, self.width))
        return values

    def log_ratio(self, values: np.ndarray, scale: float) -> np.ndarray:
        """Returns the logarithm of the density ratio of scaled shifts, float64 [count].

        By dynamic programming over the steps, the last one first (arXiv 2602.09338, equation 2):
        the ratio of the steps from t on is (1 - p) times that from t + 1 on, plus p times the
        ratio of a participation in t times that from t + b on.
        """
        own = scale * (values @ self.matrix) - scale * scale * self._squares / 2
        later = np.zeros((self.width + self.separation, len(values)))
        # `math.log1p` raises for -1.
        stays_out = math.log1p(-self.probability) if self.probability < 1 else -math.inf
        takes_part = math.log(self.probability)
        for step in reversed(range(self.width)):
            without = stays_out + later[step + 1]
            with_own = takes_part + own[:, step] + later[step + self.separation]
            later[step] = np.logaddexp(without, with_own)  # equation 2
        weights = np.full((self.separation, 1), self.rate)
        weights[0] = self._may_begin
        ratio: np.ndarray = special.logsumexp(later[: self.separation], axis=0, b=weights)
        return ratio

    def along_mean(self, values: np.ndarray) -> np.ndarray:
        """Returns the products of values with the mean shift, float64 [count]."""
        product: np.ndarray = values @ self._mean
        return product


Mixture = Bins | Renewals
