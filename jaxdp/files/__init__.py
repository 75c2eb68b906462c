"""Files that are written whole and durably, and read with size checks first.

`transforms` imports nothing of the house. All other packages may import this one.
"""

from jaxdp.files.arguments import (
    check_choice,
    check_count,
    check_delta,
    check_folder,
    check_function,
    check_numbers,
)
from jaxdp.files.durable import sync_folder, sync_tree, to_disk, write_durably, write_json
from jaxdp.files.extras import optional
from jaxdp.files.full import DiskFull, explained_if_full, free_bytes
from jaxdp.files.happenings import happened, unwatched
from jaxdp.files.keywords import shows_keywords
from jaxdp.files.package import Package, pack, read_package, unpack, write_package
from jaxdp.files.reading import (
    Limits,
    check_finite,
    check_image,
    npz_names,
    read_json,
    read_npz,
    sha256_of,
    understood,
)
from jaxdp.files.text import parse_json, shown, shown_lines

__all__ = [
    "DiskFull",
    "Limits",
    "Package",
    "check_choice",
    "check_count",
    "check_delta",
    "check_finite",
    "check_folder",
    "check_function",
    "check_image",
    "check_numbers",
    "explained_if_full",
    "free_bytes",
    "happened",
    "npz_names",
    "optional",
    "pack",
    "parse_json",
    "read_json",
    "read_npz",
    "read_package",
    "sha256_of",
    "shown",
    "shown_lines",
    "shows_keywords",
    "sync_folder",
    "sync_tree",
    "to_disk",
    "understood",
    "unpack",
    "unwatched",
    "write_durably",
    "write_json",
    "write_package",
]
