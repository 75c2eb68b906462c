"""Files that are written whole and durably, and read with size checks first. All packages may import this one."""

from jaxdp.files.durable import sync_folder, sync_tree, to_disk, write_durably, write_json
from jaxdp.files.extras import optional
from jaxdp.files.reading import Limits, check_finite, check_image, read_json, read_npy, read_npz, understood

__all__ = [
    "Limits",
    "check_finite",
    "check_image",
    "optional",
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
