"""Data: random-access sources, Poisson sampling, and augmentation.

Importing this package imports neither TensorFlow Datasets nor scikit-learn nor jax-privacy; they load on use.
"""

from jaxdp.data.augment import augment, normalise, random_crop, random_flip
from jaxdp.data.sampling import FixedBatchSampler, PoissonSampler, pad_to_physical
from jaxdp.data.sources import Source, bundled, from_arrays, from_tfds

__all__ = [
    "FixedBatchSampler",
    "PoissonSampler",
    "Source",
    "augment",
    "bundled",
    "from_arrays",
    "from_tfds",
    "normalise",
    "pad_to_physical",
    "random_crop",
    "random_flip",
]
