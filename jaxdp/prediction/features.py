"""A public linear map that prepares feature vectors for certified training.

One full-batch step from zero on features x moves the parameters along sum_i clip((sigma(0) - y_i)
x_i). This is a good classifier if the features are centred and have similar variances. k records
move the logit of a query x by at most k clip |x|_1, for any number of records. So the map centres
the features, whitens them and gives them one length.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """The map x -> radius * u / |u| with u = (x - mean) matrix.

    It comes from PUBLIC vectors and maps single records.

    Attributes:
      mean: float64 [d].
      matrix: float64 [d, r].
      radius: The Euclidean length of every result.
    """

    mean: np.ndarray
    matrix: np.ndarray
    radius: float

    @classmethod
    def from_public(
        cls,
        public: np.ndarray,
        *,
        dimensions: int = 0,
        whiten: float = 1.0,
        radius: float = 1.0,
        weights: np.ndarray | None = None,
    ) -> "FeatureMap":
        """Centres on the mean of `public` and projects on its principal axes over std**whiten.

        Args:
          public: [m, d], public vectors that resemble the private ones.
          dimensions: r, the number of leading axes. 0 for all with a standard deviation above 1e-6
              of the largest.
          whiten: 0 keeps the variances, 1 makes them equal.
          radius: See the class.
          weights: [m], non-negative. None for equal weights.

        Raises:
          ValueError: There are fewer than two vectors, or all are equal. Or `dimensions` is
              negative, or exceeds the number of axes with any variance.
        """
        public = np.asarray(public, np.float64)
        if public.ndim != 2 or len(public) < 2:
            raise ValueError(
                f"public must hold at least two vectors [m, d], got shape {public.shape}."
            )
        if weights is None:
            shares = np.full(len(public), 1 / len(public))
        else:
            shares = weights / np.sum(weights)
        mean = shares @ public
        deviations, axes = _principal_axes(public - mean, shares)
        # Axes below that are rounding, which whitening would blow up to the size of the others.
        available = int(np.sum(deviations > 1e-6 * deviations[0]))
        if dimensions < 0 or not available:
            raise ValueError(
                f"public must hold vectors that differ, and dimensions be at least 0, got "
                f"{available} axes with any variance and dimensions={dimensions}."
            )
        if dimensions > available:
            raise ValueError(
                f"dimensions={dimensions} exceeds the {available} that the public vectors span."
            )
        leading = dimensions or available
        scales = deviations[:leading] ** whiten
        matrix = axes[:, :leading] / scales
        return cls(mean, matrix, radius)

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Maps [n, d] to float32 [n, r]. A vector equal to the mean becomes zero."""
        centred = np.asarray(vectors, np.float64) - self.mean
        mapped = centred @ self.matrix
        lengths = np.linalg.norm(mapped, axis=1, keepdims=True)
        # The mean itself has no direction.
        divisors = np.where(lengths > 0, lengths, 1.0)
        features = self.radius * mapped / divisors
        return features.astype(np.float32)


def _principal_axes(centred: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns standard deviations, the largest first, and their axes as columns."""
    vectors, dimensions = centred.shape
    if vectors <= dimensions:  # then the covariance would have more entries than the vectors
        # Its squared singular values are the variances.
        weighted = centred * np.sqrt(shares)[:, None]
        _, deviations, rows = np.linalg.svd(weighted, full_matrices=False)
        return deviations, rows.T
    weighted = centred * shares[:, None]
    variances, axes = np.linalg.eigh(weighted.T @ centred)
    deviations = np.sqrt(np.maximum(variances[::-1], 0))  # rounding may make them negative
    return deviations, axes[:, ::-1]
