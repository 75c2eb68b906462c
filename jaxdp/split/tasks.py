"""The images that a config of `jaxdp.split.roles` names."""

from typing import Any

from jaxdp.data import Source, bundled, from_tfds, resize_images
from jaxdp.models import Preprocessing


def read_images(spec: Any, preprocessing: Preprocessing) -> Source:
    """The images that a config names, of some classes, as large as the model wants them."""
    if spec.source == "bundled":
        source = bundled(spec.name)
    else:
        prepare = preprocessing.prepare if spec.prepare else None
        source = from_tfds(spec.name, spec.split, data_dir=spec.data_dir or None, prepare=prepare)
    source = source.of_classes(spec.classes) if spec.classes else source
    return resize_images(source, preprocessing.size, len(preprocessing.mean))
