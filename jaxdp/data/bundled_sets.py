"""Data sets that need no download. Two of them come with scikit-learn."""

import numpy as np

from jaxdp.data.arrays import from_arrays
from jaxdp.data.sources import Examples
from jaxdp.files import optional

# Public ranges (low, high) of the mean, standard error and worst value of each measurement in
# breast_cancer, from its documentation, rounded outwards.
_BREAST_CANCER_RANGES = {
    "radius": ((6, 30), (0, 3), (6, 40)),
    "texture": ((9, 40), (0, 5), (10, 50)),
    "perimeter": ((40, 200), (0, 25), (50, 260)),
    "area": ((100, 2600), (0, 600), (100, 4300)),
    "smoothness": ((0.05, 0.2), (0, 0.04), (0.05, 0.25)),
    "compactness": ((0, 0.4), (0, 0.15), (0, 1.1)),
    "concavity": ((0, 0.5), (0, 0.4), (0, 1.3)),
    "concave points": ((0, 0.25), (0, 0.06), (0, 0.3)),
    "symmetry": ((0.1, 0.4), (0, 0.1), (0.1, 0.7)),
    "fractal dimension": ((0.04, 0.1), (0, 0.04), (0.05, 0.25)),
}


def bundled(name: str) -> Examples:
    """Returns a data set that needs no download: "digits", "breast_cancer" or "blobs".

    - "digits": 1797 handwritten digits, image 8x8x1 with 17 grey levels divided by 16, 10 classes
      (UCI).
    - "breast_cancer": 569 rows of 30 features, 2 classes, 1 = benign (UCI). Each feature is mapped
      affinely from the range that the data set's documentation states (rounded outwards) to [-1, 1]
      and clipped there.
    - "blobs": synthetic, 1000 rows of 2 features, 4 classes in turn. The centre of class k is 2
      (cos a, sin a) with a = pi k / 2 + pi / 4. `numpy.random.RandomState(0)` adds independent
      normal noise of standard deviation 0.6.

    Raises:
      ValueError: The name is another one.
    """
    makers = {"digits": _digits, "breast_cancer": _breast_cancer, "blobs": _blobs}
    if name not in makers:
        raise ValueError(
            f"name must be one of 'digits', 'breast_cancer', 'blobs', got {name!r}. See also "
            "from_tfds."
        )
    return makers[name]()


def _digits() -> Examples:
    datasets = optional("sklearn.datasets", "bundled")
    digits = datasets.load_digits()
    image = digits.images / 16  # pixels are 0..16
    return from_arrays(image=image, label=digits.target, num_classes=10, name="digits")


def _breast_cancer() -> Examples:
    datasets = optional("sklearn.datasets", "bundled")
    table = datasets.load_breast_cancer()
    ranges = np.array(list(_BREAST_CANCER_RANGES.values()), np.float64)  # [measurement, kind, 2]
    # The columns have all means, then all standard errors, then all worst values.
    low, high = ranges.swapaxes(0, 1).reshape(30, 2).T
    scaled = 2 * (table.data - low) / (high - low) - 1
    features = np.clip(scaled, -1, 1)
    return from_arrays(features=features, label=table.target, num_classes=2, name="breast_cancer")


def _blobs() -> Examples:
    label = np.arange(1000) % 4
    angle = np.pi * label / 2 + np.pi / 4
    directions = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    # The stream of RandomState is the same in all versions of NumPy.
    noise = np.random.RandomState(0).standard_normal((1000, 2))
    features = 2 * directions + 0.6 * noise
    return from_arrays(features=features, label=label, num_classes=4, name="blobs")
