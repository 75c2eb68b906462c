"""Digits of patients with several images: a folder of five sites, and its life."""

import csv

import numpy as np
import PIL.Image

from jaxdp.data import bundled
from tests.launch import tiny

# Images and images per patient of each part. Patients have one to `most` images, and the last one
# what is left.
SIZES = {
    **{
        "public": (60, 1),
        "private": (90, 3),
        "client": (24, 2),
        "test": (40, 1),
        "stream_0": (16, 2),
    },
    **{"stream_1": (16, 2), **{f"site_{k}": (10, 2) for k in range(5)}},
}
GROUP = {"group": "patient", "max_records": 2, "unit": "patient"}


def write(root):
    """Writes digits as images with a CSV file per part, which names the patient of each image."""
    source, start = bundled("digits"), 0
    for name, (size, most) in SIZES.items():
        owners = [f"{name} {k}" for k in range(size) for _ in range(1 + k % most)][:size]
        with (root / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", "label", "patient"])
            for k, owner in enumerate(owners, start):
                pixels = np.rint(255 * source[k]["image"][..., 0]).astype(np.uint8)
                PIL.Image.fromarray(pixels).save(root / f"{k}.png")
                table.writerow([f"{k}.png", source[k]["label"], owner])
        start += size


def owners(folder, part):
    """Returns the patient of each image of a part."""
    with (folder / f"{part}.csv").open() as file:
        return [row["patient"] for row in csv.DictReader(file)]


def lifecycle(folder, **fields):
    """Returns the config of a life that protects the patients of a folder."""
    study = tiny.lifecycle_own(folder)
    study.data.update(GROUP | fields)
    return study
