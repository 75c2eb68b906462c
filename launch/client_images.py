"""The images of a client of Split Adaptation: a few with labels to adapt to, and test images.

They come from the file `config.images`, or from a half each of the set `config.data`. The ledger
knows them by the names of `images_name` and `queries_name`.
"""

import hashlib
import pathlib
from typing import Any

import numpy as np

from jaxdp.data import from_arrays, resize_images
from jaxdp.data import open as open_spec
from jaxdp.data.selection import everything, few_shots
from jaxdp.files import Limits, read_json, read_npz, shown, write_json
from jaxdp.models import Preprocessing

from . import data, frame
from .study import Fields

_DATASET = "client"  # the default of config.dataset
Images = dict[str, Any]  # image and label


def images_name(config: Any) -> str:
    """Returns the name of a client's few images in its ledger."""
    return f"{_dataset(config)}/images"


def queries_name(config: Any) -> str:
    """Returns the name of a client's test images in its ledger."""
    return f"{_dataset(config)}/queries"


def _dataset(config: Any) -> str:
    # A config of an earlier version has no such field, and its ledger has the default.
    named = config.get("dataset", _DATASET)
    file = pathlib.Path(config.get("images", ""))
    return named or file.stem or _DATASET


def private_sets(
    config: Any, few: Images, test: Images, *, queries: bool
) -> list[frame.PrivateSet]:
    """Returns the sets of images that leave the client, for the registry."""
    is_public = not config.images and data.whole(config.data).is_public
    images = from_arrays(**few)
    private = [frame.PrivateSet(images_name(config), images, is_public)]
    if queries and len(test["image"]):
        queried = from_arrays(**test)
        private.append(frame.PrivateSet(queries_name(config), queried, is_public))
    return private


def stored(
    config: Any, preprocessing: Preprocessing | None, limits: Limits | None
) -> tuple[Images, Images]:
    """Returns the client's few images with labels, and its test images, with labels if they
    exist: as they are stored.

    Args:
      config, limits: As in `launch.parties.run_client`.
      preprocessing: For images of several sizes, which the model's preprocessing cuts.
    """
    if config.images:
        arrays = read_npz(
            config.images,
            ["image", "label"],
            optional=("test_image", "test_label"),
            remedy="Make it again with the arrays 'image' and 'label'.",
            limits=limits,
        )
        few = {"image": arrays["image"], "label": arrays["label"]}
        test = {"image": arrays.get("test_image", few["image"][:0])}
        if "test_label" in arrays:
            test["label"] = arrays["test_label"]
        return few, test
    prepare = None if preprocessing is None else preprocessing.prepare
    images = open_spec(data.whole(config.data), prepare=prepare)
    pool, test_images = images.split((0.5, 0.5), seed=config.data_seed)
    return few_shots(pool, config.shots, seed=None), everything(test_images)


def prepared(
    config: Any, preprocessing: Preprocessing, few: Images, test: Images
) -> tuple[Images, Images]:
    """Returns images in the size of the model, float32 in [0, 1]."""
    size, channels = preprocessing.size, len(preprocessing.mean)

    def prepared(images: Images) -> Images:
        if config.images:
            return images | {"image": preprocessing.prepare(images["image"])}
        return everything(resize_images(from_arrays(**images), size, channels))

    return prepared(few), prepared(test)


def check_same(arrays: Fields, path: pathlib.Path) -> None:
    """Raises ValueError for images that differ from the images of the workdir's upload."""
    sums = {}
    for name, array in arrays.items():
        array_bytes = np.ascontiguousarray(array).tobytes()
        sums[name] = hashlib.sha256(array_bytes).hexdigest()
    if path.exists() and read_json(path) != sums:
        raise ValueError(
            f"{shown(path.parent)} was started with other images or labels. Use a new workdir."
        )
    write_json(path, sums)
