"""Checks of single fields of a config, and the writers that config.watch names."""

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxdp.files import optional
from jaxdp.privacy import contacts
from jaxdp.report import Callback, TensorBoardWriter, WandbWriter

from ..settings import named


def known(field: str, names: Iterable[Any], choices: Iterable[Any]) -> None:
    """Raises ValueError for a name in config.`field` that is not one of the choices."""
    choices = list(choices)
    for name in names:
        if name not in choices:
            raise ValueError(
                f"config.{field} has {name!r}, which is not one of {', '.join(map(str, choices))}."
            )


def some(field: str, entries: Any) -> Any:
    """Returns the entries of config.`field`. Raises ValueError if there are none."""
    if not len(entries):
        raise ValueError(f"config.{field} must have at least one entry, got none.")
    return entries


def people(described: Any, part: str = "data") -> dict[str, str]:
    """Returns whom to ask about private data, as `Ledger.register` takes it.

    Args:
      described: A part of a config that may have the fields owner, purpose, contact and approver.
        A field that is "" says nothing, and is left out.
      part: The name of the part.

    Raises:
      ValueError, TypeError: A field is no text, or is longer than a line of 500 characters.
    """
    filled = {name: described[name] for name in contacts.FIELDS if described.get(name)}
    with named(part, described):
        return contacts.checked(**filled)


def _tensorboard(folder: pathlib.Path) -> Any:
    return TensorBoardWriter(folder / "tensorboard")


def _wandb(folder: pathlib.Path) -> Any:
    return WandbWriter(dir=folder)


_LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_WRITERS: Mapping[str, Callable[[pathlib.Path], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


@contextlib.contextmanager
def watching(config: Any, folder: pathlib.Path) -> Iterator[list[Callback]]:
    """Yields the writers that config.watch names, as callbacks of `fit` for a run in a folder."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(_WRITERS[name](folder)) for name in _watch(config)]


def check_watch(config: Any) -> None:
    """Raises ValueError if config.watch names an unknown writer, and ImportError if the library of
    one is missing.
    """
    known("watch", _watch(config), _WRITERS)
    for name in _watch(config):
        optional(_LIBRARIES[name], name)


def _watch(config: Any) -> list[str]:
    return list(filter(None, (config.get("watch") or "").split(",")))
