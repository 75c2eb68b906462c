"""Files: written whole and durably, read with their sizes checked first. The floor below all others."""

from jaxdp.files.durable import sync_folder, sync_tree, to_disk, write_durably, write_json
from jaxdp.files.reading import Limits, check_finite, check_image, read_json, read_npy, read_npz, understood

__all__ = [
    "Limits",
    "check_finite",
    "check_image",
    "read_json",
    "read_npy",
    "read_npz",
    "sync_folder",
    "sync_tree",
    "to_disk",
    "understood",
    "write_durably",
    "write_json",
]
