"""The augmentations of the server's images beside each other, as in Fig. 3 of Split Adaptation.

The paper shows pictures of one image. It says that Hilbert augmentation is further from the
original in appearance than amplitude exchange, and that the class is preserved. Here appearance is
the distance to the original, and a class is preserved if the server's model recognises it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import split
from jaxdp.files import read_npz, write_durably
from jaxdp.report import plot_images
from jaxdp.split.backbone import Backbone, in_batches

from . import frame, models, results
from .image_similarity import fitting_windows, ssim
from .study import Rows

Images = jax.Array


def _original(key: jax.Array, images: Images) -> Images:
    return images


def _hilbert(key: jax.Array, images: Images) -> Images:
    return split.hilbert_augment(images)


def _exchanged(key: jax.Array, images: Images) -> Images:
    return split.amplitude_exchange(images, jax.random.permutation(key, images))


AUGMENTATIONS: Mapping[str, Callable[[jax.Array, Images], Images]] = {
    "original": _original,
    "Hilbert augmentation": _hilbert,
    "amplitude exchange": _exchanged,
}


_SHOWN = 10  # images in the figure


class Augmentation(NamedTuple):
    """An augmentation of the server's images."""

    part: str
    name: str


def cells(config: Any) -> Iterator[Augmentation]:
    """Yields the cells of the study.

    Raises:
      ValueError: config.augmentations has an unknown name.
    """
    frame.known("augmentations", config.augmentations, AUGMENTATIONS)
    for name in config.augmentations:
        yield Augmentation("augmentations", name)


def run(cell: Augmentation, work: frame.Work) -> dict[str, float]:
    """Returns the scores of an augmentation on all public images, and keeps some of them."""
    bench, seed = work.shared, work.config.server.seed
    originals = jax.device_put(bench.public["image"])
    images = AUGMENTATIONS[cell.name](jax.random.key(seed), originals)
    shown = np.asarray(images[:_SHOWN])
    write_durably(work.folder(cell) / "images.npz", lambda file: np.savez(file, images=shown))
    return scores(bench.backbone, bench.params, bench.public, np.asarray(images))


def scores(
    backbone: Backbone, params: Any, public: Mapping[str, Any], images: np.ndarray
) -> dict[str, float]:
    """Returns means over augmented images.

    Args:
      backbone, params: The server's whole model.
      public: The originals, "image" and "label".
      images: The augmented images, in the order of the originals.

    Returns:
      "accuracy" of the server's model, "distance", the root of the mean squared difference of
      pixels to the original, and "ssim" to the original with the largest window that fits.
    """
    logits = in_batches(functools.partial(_logits, backbone, params), images, 128)
    originals = public["image"]
    squares = np.mean((images - originals) ** 2, axis=(1, 2, 3))
    window = fitting_windows(min(images.shape[1:3]))[0]
    return {
        "accuracy": float(models.judged(np.asarray(logits), public["label"]).mean()),
        "distance": float(np.sqrt(squares).mean()),
        "ssim": float(ssim(*jax.device_put((images, originals)), window=window).mean()),
    }


@functools.partial(jax.jit, static_argnums=0)  # all augmentations share a program
def _logits(backbone: Backbone, params: Any, images: Images) -> jax.Array:
    return backbone.back(params, backbone.front(params, images))


def table(rows: Rows) -> list[dict[str, str]]:
    """Returns a line for each augmentation."""
    return [
        {
            "augmentation": row["name"],
            "recognised by the server's model": results.percent(row["accuracy"]),
            "distance to the original": results.number(row["distance"]),
            "SSIM to the original": results.number(row["ssim"]),
        }
        for row in rows
    ]


def draw(rows: Rows, work: frame.Work) -> None:
    """Draws Fig. 3 of the paper with some of the server's images, if there are rows."""
    if not rows:
        return
    images, notes = {}, {}
    for row in rows:
        name = row["name"]
        path = work.folder(Augmentation("augmentations", name)) / "images.npz"
        images[name] = read_npz(path, ["images"])["images"]
        recognised = results.percent(row["accuracy"])
        notes[name] = f"{recognised} % recognised, SSIM {row['ssim']:.2f}"
    plot_images(
        work.root / "augmentations.png",
        images,
        notes=notes,
        title="The server's images, augmented",
        subtitle="What the server's model recognises, and SSIM to the original, over all images",
    )
