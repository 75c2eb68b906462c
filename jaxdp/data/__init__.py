"""Data: random-access sources, Poisson sampling, augmentation, and corruptions.

TensorFlow Datasets, scikit-learn, jax-privacy, OpenCV and numba load on use, not with this package.
"""

from jaxdp.data.augment import augment, augmentation, normalise, random_crop, random_flip
from jaxdp.data.corruptions import (
    CORRUPTIONS,
    HELD_OUT_CORRUPTIONS,
    corrupt,
    corrupted_tfds,
    imagenet_r_classes,
    restrict_classes,
)
from jaxdp.data.images import resize_images
from jaxdp.data.sampling import FixedBatchSampler, PoissonSampler, pad_to_physical
from jaxdp.data.sources import Source, bundled, check_disjoint, from_arrays, from_tfds

__all__ = [
    "CORRUPTIONS",
    "HELD_OUT_CORRUPTIONS",
    "FixedBatchSampler",
    "PoissonSampler",
    "Source",
    "augment",
    "augmentation",
    "bundled",
    "check_disjoint",
    "corrupt",
    "corrupted_tfds",
    "from_arrays",
    "from_tfds",
    "imagenet_r_classes",
    "normalise",
    "pad_to_physical",
    "random_crop",
    "random_flip",
    "resize_images",
    "restrict_classes",
]
