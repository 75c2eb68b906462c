"""The directory of an experiment: one config, files that appear whole or not at all."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any


def check_same_config(config: Any, path: pathlib.Path) -> None:
    """Refuses to mix two experiments in one workdir.

    Args:
        config: an `ml_collections.ConfigDict`.
        path: where the config of the workdir's experiment is, if it has one yet.

    Raises:
        ValueError: the two differ; the message names the fields.
    """
    if not path.exists():
        return
    stored, given = _flat(json.loads(path.read_text())), _flat(json.loads(config.to_json()))
    if stored != given:
        names = sorted(name for name in {*stored, *given} if stored.get(name) != given.get(name))
        raise ValueError(f"{path.parent} belongs to an experiment with another {', '.join(names)}; use a new workdir.")


def finished_result(config: Any, root: pathlib.Path, summary: Callable[[Any], str]) -> Any:
    """The result of a finished experiment, which is printed; None if there is none yet.

    Args:
        config: an `ml_collections.ConfigDict`.
        root: the workdir, with config.json and, once it is finished, result.json.
        summary: of a result, for the terminal.

    Raises:
        ValueError: the workdir belongs to an experiment with another config.
    """
    check_same_config(config, root / "config.json")
    if not (root / "result.json").exists():
        return None
    result = json.loads((root / "result.json").read_text())
    print(f"{root} holds a finished run: nothing to do.\n\n{summary(result)}")
    return result


def bind(config: Any, root: pathlib.Path) -> None:
    """Makes a workdir that of an experiment: once the config is checked, since a mistake in it could not be mended."""
    write_json(root / "config.json", json.loads(config.to_json()))


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as indented JSON, making the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


def write_durably(path: pathlib.Path, data: bytes, *, mode: int = 0o666) -> None:
    """Puts a whole new file in the place of `path`, on the disk when this returns; `mode` is as `os.open` takes it."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # of a process that died; it may have another mode
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Makes new and deleted names in a folder durable, where the system has such a thing."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def locked(path: pathlib.Path, *, wait: bool = False) -> Iterator[None]:
    """Holds a file that only one process can hold; the system lets go of it when the process dies.

    Args:
        path: the file, made if needed, as is its folder; it stays behind, empty.
        wait: until another process lets go of it.

    Raises:
        BlockingIOError: another process holds it, without `wait`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


@contextlib.contextmanager
def alone(workdir: pathlib.Path) -> Iterator[None]:
    """Refuses a workdir, made if needed, in which another process is running.

    Raises:
        ValueError: there is one.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(workdir / "lock"))
        except BlockingIOError as error:
            raise ValueError(f"another process is running in {workdir}; wait for it or use a new workdir.") from error
        yield


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}
