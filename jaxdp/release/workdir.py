"""The directory of an experiment: one config, files that appear whole or not at all."""

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxdp.files import read_json, understood, write_json
from jaxdp.release.settings import check_numbers

_LOCK = "lock"
_REMEDY = "Restore it from a copy, or use a new workdir."


def check_same_config(config: Any, path: pathlib.Path) -> None:
    """Refuses a config with a mistake in its numbers, and to mix two experiments in one workdir.

    Args:
        config: an `ml_collections.ConfigDict`.
        path: where the config of the workdir's experiment is, if it has one yet.

    Raises:
        ValueError: a number is out of its range (`check_numbers`); the two differ, and the message names the fields;
            or the file is damaged.
    """
    check_numbers(config)
    if not path.exists():
        return
    stored, given = _flat(read_json(path, remedy=_REMEDY)), _flat(json.loads(config.to_json()))
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
        ValueError: as `check_same_config`, or the result is damaged.
    """
    check_same_config(config, root / "config.json")
    path = root / "result.json"
    if not path.exists():
        return None
    remedy = "Delete it: the command then makes it again from what else the workdir keeps, which costs nothing twice."
    result = read_json(path, remedy=remedy)
    with understood(path, remedy):
        text = summary(result)
    print(f"{root} holds a finished run: nothing to do.\n\n{text}")
    return result


@contextlib.contextmanager
def bind(config: Any, root: pathlib.Path) -> Iterator[None]:
    """Makes a workdir that of an experiment, for the body; it stays so, unless the body fails before it makes a file.

    So a mistake that is found late, such as a model that does not fit the images, can be mended in the same workdir.
    """
    path = root / "config.json"
    fresh = not path.exists()
    write_json(path, json.loads(config.to_json()))
    try:
        yield
    except BaseException:
        if fresh and not any(other.is_file() for other in root.rglob("*") if other not in (path, root / _LOCK)):
            path.unlink()
        raise


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
            stack.enter_context(locked(workdir / _LOCK))
        except BlockingIOError as error:
            raise ValueError(f"another process is running in {workdir}; wait for it or use a new workdir.") from error
        yield


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}
