"""Images of an experiment on domain shift: public clean ones, and the test images under each shift.

Both take the `data` part of the experiment's config, an `ml_collections.ConfigDict`:

    source          "bundled", or "tfds"
    name            the data set
    test_fraction   bundled: the share of the test images; the others are the clean ones
    test_split, public_name, public_split, data_dir   tfds: where the test images and the clean ones are
    prepare         tfds: whether images differ in size and must be cut to the model's
    corrupted_name  tfds: a data set of images that are corrupted already; "" corrupts the test images here
    severity        1 to 5
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxdp.data.corruptions import corrupt, corrupted_tfds
from jaxdp.data.sources import Source, bundled, check_disjoint, from_tfds

Prepare = Callable[[Any], Any]
CLEAN = "clean"  # the shift that is none


def clean_images(config: Any, prepare: Prepare) -> Source:
    """The public images, none of which is a test image.

    Args:
      config: see above.
      prepare: as in `from_tfds`; used where the config asks for it.

    Raises:
      ValueError: one of them is a test image.
      FileNotFoundError: the data is not there; the message says how to get it.
    """
    if config.source == "bundled":
        return _bundled(config)[0]
    if not config.corrupted_name:  # else the test images are of another data set
        parts = {
            "public_split": (config.public_name, config.public_split),
            "test_split": (config.name, config.test_split),
        }
        check_disjoint({f"config.data.{part}": (*where, config.data_dir or None) for part, where in parts.items()})
    return _read(config.public_name, config.public_split, config.data_dir or None, prepare if config.prepare else None)


def shifted_images(config: Any, shift: str, prepare: Prepare) -> Source:
    """The test images under a shift, `CLEAN` or one of `CORRUPTIONS`, always in the same order.

    Corruptions that are made here are made whenever an image is read.

    Args:
      config, prepare: as in `clean_images`.
      shift: its name.

    Raises:
      ValueError: for an unknown shift.
      FileNotFoundError: the data is not there; the message says how to get it.
    """
    if config.source == "bundled":
        test = _bundled(config)[1]
    elif config.corrupted_name and shift != CLEAN:
        return corrupted_tfds(config.corrupted_name, shift, config.severity, data_dir=config.data_dir or None)
    else:
        test = _read(config.name, config.test_split, config.data_dir or None, prepare if config.prepare else None)
    return test if shift == CLEAN else corrupt(test, shift, severity=config.severity)


def _bundled(config: Any) -> Sequence[Source]:
    return bundled(config.name).split([1 - config.test_fraction, config.test_fraction], seed=0)


@functools.lru_cache(maxsize=2)
def _read(name: str, split: str, data_dir: str | None, prepare: Prepare | None) -> Source:
    return from_tfds(name, split, data_dir=data_dir, prepare=prepare)
