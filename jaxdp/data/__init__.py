"""Data: random-access sources, Poisson sampling, augmentation, and corruptions.

TensorFlow Datasets, Hugging Face datasets, scikit-learn, jax-privacy, OpenCV and numba load on use,
not with this package.
"""

from jaxdp.data.adapters import from_folder, from_grain, from_hf, from_npz, from_texts, from_torch
from jaxdp.data.arrays import from_arrays
from jaxdp.data.augment import augment, augmentation, normalise, random_crop, random_flip
from jaxdp.data.bundled_sets import bundled
from jaxdp.data.corruptions import (
    CORRUPTIONS,
    HELD_OUT_CORRUPTIONS,
    corrupt,
    corrupted_tfds,
    imagenet_r_classes,
    restrict_classes,
)
from jaxdp.data.digests import record_digests
from jaxdp.data.fixed_order import FixedOrderSampler
from jaxdp.data.groups import Groups, Records, by_group
from jaxdp.data.ids import identifiers
from jaxdp.data.images import resize_images
from jaxdp.data.numbers import check_batch
from jaxdp.data.owners import Owners, by_owners
from jaxdp.data.participation import BallsInBinsSampler, BMinSepSampler, CyclicPoissonSampler
from jaxdp.data.physical import PhysicalSizes, pad_to_physical
from jaxdp.data.protocol import Source, check_source
from jaxdp.data.sampling import FixedBatchSampler, PoissonSampler
from jaxdp.data.sources import Examples, read_column, read_ids, take
from jaxdp.data.spec import DataSpec, open
from jaxdp.data.storage import ExampleReader
from jaxdp.data.tabular import from_csv
from jaxdp.data.tfds import check_disjoint, from_tfds
from jaxdp.transforms.not_finite import NotFinite, count_not_finite

__all__ = [
    "CORRUPTIONS",
    "HELD_OUT_CORRUPTIONS",
    "BMinSepSampler",
    "BallsInBinsSampler",
    "CyclicPoissonSampler",
    "DataSpec",
    "ExampleReader",
    "Examples",
    "FixedBatchSampler",
    "FixedOrderSampler",
    "Groups",
    "NotFinite",
    "Owners",
    "PhysicalSizes",
    "PoissonSampler",
    "Records",
    "Source",
    "augment",
    "augmentation",
    "bundled",
    "by_group",
    "by_owners",
    "check_batch",
    "check_disjoint",
    "check_source",
    "corrupt",
    "corrupted_tfds",
    "count_not_finite",
    "from_arrays",
    "from_csv",
    "from_folder",
    "from_grain",
    "from_hf",
    "from_npz",
    "from_texts",
    "from_tfds",
    "from_torch",
    "identifiers",
    "imagenet_r_classes",
    "normalise",
    "open",
    "pad_to_physical",
    "random_crop",
    "random_flip",
    "read_column",
    "read_ids",
    "record_digests",
    "resize_images",
    "restrict_classes",
    "take",
]
