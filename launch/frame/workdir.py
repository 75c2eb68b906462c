"""A workdir belongs to one study, one config and one layout of files."""

import contextlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdp.files import read_json, sha256_of, shown, write_json
from jaxdp.privacy.contacts import FIELDS
from jaxdp.release import locked
from jaxdp.version import __version__

from ..usage import flat

RELEASED = "released.json"
FORMAT = 3  # The first releases wrote no number.
_REMEDY = "Restore it from a copy, or use a new workdir."
# Fields that workdirs of earlier versions lack, with the value that does what these versions did.
_ADDED = {
    "data.separator": "",
    "private.method_options.sla_clip.clip_learning_rate": 0.5,
    "private.method_options.sla_clip.clip_range": [0.1, 50.0],
    "private.method_options.sla_clip.unit_norm": True,
    "private.clip_parts": "",
    "private.exact": False,
    "privacy.exact": False,
    "finetune.exact": False,
    "adapt.exact": False,
    "private.truncated_batch_size": 0,
    "privacy.noise": ["independent"],
    "privacy.noise_steps": 0,
    "training.threat": "add_remove",
    "training.dampening": 0.0,
    "training.nesterov": False,
}


def file_name(coordinate: Any) -> str:
    """Returns a coordinate of a cell as the name of a file or folder."""
    if isinstance(coordinate, float):
        text = f"{coordinate:g}"
    else:
        text = str(coordinate)
    return re.sub(r"[^\w.-]", "_", text)


def make_once(path: pathlib.Path, make: Callable[[], None]) -> None:
    """Calls `make`, which writes a file, unless it is there. Other processes wait for it."""
    if not path.exists():
        with locked(path.with_name(f"{path.name}.lock"), wait=True):
            if not path.exists():
                make()


def cell_folder(root: pathlib.Path, cell: Any) -> pathlib.Path:
    """Returns the folder of a cell in a workdir."""
    return root.joinpath("cells", *map(file_name, cell))


def bound_to(root: pathlib.Path) -> dict[str, Any] | None:
    """Returns what config.json says of a workdir, None if the workdir is not bound.

    Raises:
      ValueError: The file is damaged.
    """
    path = root / "config.json"
    return read_json(path, remedy=_REMEDY) if path.exists() else None


def check_same_config(study: str, config: Any, root: pathlib.Path) -> None:
    """Refuses to mix two experiments in one workdir.

    Raises:
      ValueError: The workdir is of another study, config or release, which the message names. Or
        its config.json is damaged.
    """
    stored = bound_to(root)
    if stored is None:
        return
    if stored.get("format") != FORMAT:
        raise ValueError(
            f"{shown(root)} was made by another release of jaxdp with another layout. Use a new "
            "workdir."
        )
    if stored["study"] != study:
        raise ValueError(
            f"{shown(root)} belongs to the study {stored['study']!r}, not to {study!r}. Use a new "
            "workdir."
        )
    before = flat(stored["config"])
    after = flat(json.loads(config.to_json()))
    for fields in (before, after):
        fields.pop("watch", None)  # It changes how a run is shown, and nothing in its results.
        # It decides whether a run starts, and older workdirs do not have it.
        fields.pop("private.allow_nonfinite", None)
        for field, default in _ADDED.items():
            fields.setdefault(field, default)
        for part, name in itertools.product(("data.", "client.", ""), FIELDS):
            fields.pop(f"{part}{name}", None)  # The ledger has whom to ask, and its history.
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    # A field that is None and a missing field are two configs, though `get` gives None for both.
    changed |= before.keys() ^ after.keys()
    if changed:
        listed = ", ".join(map(shown, sorted(changed)))
        raise ValueError(
            f"{shown(root)} belongs to an experiment with another {listed}. Use a new workdir."
        )


@contextlib.contextmanager
def bind(
    study: str, config: Any, root: pathlib.Path, ledger: pathlib.Path | None = None
) -> Iterator[None]:
    """Binds a workdir to a config for the body. Unbinds it if the body fails before it makes a
    file.

    So after a late error, such as a model that does not fit the images, a corrected config can use
    the same workdir. `ledger` is the one that pays, which may lie elsewhere.
    """
    path = root / "config.json"
    is_new = not path.exists()
    # A workdir may be moved, and with it a ledger inside.
    is_outside = ledger is not None and not ledger.resolve().is_relative_to(root.resolve())
    write_json(
        path,
        {
            "study": study,
            "format": FORMAT,
            "versions": versions(),
            "ledger": os.path.abspath(ledger) if ledger is not None and is_outside else None,
            "run": run_of(root) or secrets.token_hex(8),
            "config": json.loads(config.to_json()),
        },
    )
    try:
        yield
    except BaseException:
        if is_new and not _has_results(root):
            path.unlink()
        raise


def run_of(root: pathlib.Path) -> str:
    """Returns the word by which ledgers know the runs of a workdir, or "" for an older workdir."""
    stored = bound_to(root) or {}
    return str(stored.get("run", ""))


def _has_results(root: pathlib.Path) -> bool:
    """Returns whether a workdir has a file besides config.json, code.json and locks."""
    files = (path for path in root.rglob("*") if path.is_file())
    own = ("code.json", "lock")
    return any(path != root / "config.json" and not path.name.endswith(own) for path in files)


def note_released(root: pathlib.Path, patterns: Iterable[str], row: pathlib.Path) -> None:
    """Writes the digests of the released files of a run, by which `released_file` knows them.

    Args:
      root: The workdir.
      patterns: Those of the files.
      row: The row.json without which the same command makes the files again.
    """
    paths = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    digests = {str(path.relative_to(root)): sha256_of(path) for path in paths}
    write_json(root / RELEASED, {"row": str(row.relative_to(root)), "digests": digests})


def _noted(root: pathlib.Path) -> dict[str, Any]:
    path = root / RELEASED
    if not path.exists():  # the run was finished by an earlier version, or released nothing
        return {"row": "", "digests": {}}
    content: dict[str, Any] = read_json(path, remedy=_REMEDY, keys=("row", "digests"))
    return content


def lacking(root: pathlib.Path) -> str:
    """Returns what to do about a released file of a finished run that was deleted, or ""."""
    noted = _noted(root)
    for name in noted["digests"]:
        if not (root / name).exists():
            return (
                f"{shown(name)} is not in the workdir {shown(root)} any more. Restore it from a "
                f"copy. Or delete result.json and {shown(noted['row'])} there, and give the "
                "command of the run again. It makes the file again, and pays again only for what "
                "the workdir does not keep. A public network of which all outputs are kept is not "
                "made again, so take a new workdir for that."
            )
    return ""


def released_file(root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file of a finished run. It exists unless the run has written none.

    Raises:
      FileNotFoundError: It was deleted. The message says how to get it again.
      ValueError: It is another file than the one that the run wrote.
    """
    path = root / name
    digest = _noted(root)["digests"].get(name)
    if digest is None:
        return path
    if not path.exists():
        raise FileNotFoundError(lacking(root))
    if sha256_of(path) != digest:
        raise ValueError(
            f"{shown(path)} is not the file that the run wrote, whose digest {RELEASED} has. The "
            "accounts of the run say nothing about it. Restore the file from a copy, or release "
            "the workdir of the run that wrote it."
        )
    return path


def versions() -> dict[str, str]:
    """Returns the versions of Python, this library, and those that it computes with."""
    libraries = ("jax", "flax", "optax", "numpy")
    return {
        "jaxdp": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in libraries},
    }
