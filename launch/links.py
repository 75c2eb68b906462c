"""How a launcher reaches the other parties: by Flower (`launch.flower`), or through folders without
a network.

A question in a folder is a file NAME.question, and its answer NAME.answer, where NAME is the
SHA-256 of the question. So a repeated question finds its answer. Other means may carry the files,
if each appears whole. Whoever may write to the folder is trusted as the other party.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from absl import flags

from jaxdp.files import Limits, read_package, shown, write_package

from . import flower

EXCHANGE = flags.DEFINE_list(
    "exchange", [], "Without a network: a folder for each pair of parties, and nobody else."
)
ADDRESS = flags.DEFINE_string(
    "address", "", "The server: host:port of the SuperLink. A party: that of its SuperNode."
)
KEYS = flags.DEFINE_string(
    "keys", "", "With --address: this party's folder of `launch.certificates`."
)
TIMEOUT = flags.DEFINE_float(
    "timeout", 3600.0, "Seconds to wait for the other parties.", lower_bound=0.0
)
LIMITS = flags.DEFINE_list("limits", [], "NAME=NUMBER of jaxdp.files.Limits, for larger packages.")
_POLL_SECONDS = 0.01

Answer = Callable[[bytes], bytes]
Serve = Callable[..., None]  # serve(answer, until=...) answers questions until `until()` is true


class Parties(Protocol):
    """The parties that a server asks. `names` are the names of all."""

    names: tuple[str, ...]

    def ask(self, questions: Mapping[str, bytes], *, timeout: float) -> dict[str, bytes]:
        """Asks parties at the same time. Returns the answers by name, without parties that refused
        or were too late.
        """


@contextlib.contextmanager
def parties() -> Iterator[Parties]:
    """Yields the parties that the flags name."""
    _check()
    if EXCHANGE.value:
        yield Folders(list(map(pathlib.Path, EXCHANGE.value)), limits=limits())
    else:
        with flower.running(ADDRESS.value, pathlib.Path(KEYS.value)) as nodes:
            yield nodes


def serve() -> Serve:
    """Returns the function that answers the questions of the server that the flags name."""
    _check()
    if len(EXCHANGE.value) > 1:
        raise ValueError(f"--exchange must be one folder, got {EXCHANGE.value}.")
    if EXCHANGE.value:
        folder = pathlib.Path(EXCHANGE.value[0])
        return functools.partial(serve_folder, folder, limits=limits(), timeout=TIMEOUT.value)
    keys = pathlib.Path(KEYS.value)
    return functools.partial(flower.serve, address=ADDRESS.value, keys=keys, timeout=TIMEOUT.value)


def limits() -> Limits:
    """Returns the limits on packages of other parties."""
    return parsed_limits(LIMITS.value)


def parsed_limits(pairs: Sequence[str]) -> Limits:
    """Returns the limits of NAME=NUMBER pairs, as in ["bytes=17179869184"]."""
    names = [field.name for field in dataclasses.fields(Limits)]
    numbers = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        if name not in names or not re.fullmatch("[1-9][0-9]*", number):
            raise ValueError(
                "--limits must be NAME=NUMBER pairs, for example bytes=17179869184, with a name of "
                f"{', '.join(names)}, got {pair!r}."
            )
        numbers[name] = int(number)
    return Limits(**numbers)


def _check() -> None:
    if bool(EXCHANGE.value) == bool(ADDRESS.value) or bool(KEYS.value) != bool(ADDRESS.value):
        raise ValueError(
            "give either --address and --keys, for a network, or --exchange, a folder for both "
            "parties."
        )
    if math.isnan(TIMEOUT.value):
        raise ValueError("--timeout must be a number of seconds, got nan.")
    if not KEYS.value:
        return
    if not re.fullmatch(r".+:\d+", ADDRESS.value):
        raise ValueError(f"--address must be HOST:PORT, got {ADDRESS.value!r}.")
    if not (pathlib.Path(KEYS.value) / "ca.crt").is_file():
        raise FileNotFoundError(
            f"--keys must be a folder that launch.certificates has made, with ca.crt, got "
            f"{shown(KEYS.value)!r}."
        )


# --- Folders ------------------------------------------------------------------------------------


class Folders:
    """Parties behind folders, which have the names of the folders."""

    def __init__(self, folders: Sequence[pathlib.Path], *, limits: Limits | None = None):
        self._folders = {folder.name: folder for folder in folders}
        if len(self._folders) < len(folders):
            raise ValueError(
                "--exchange must name folders with names of their own, which are the names of the "
                f"parties, got {', '.join(shown(folder) for folder in folders)}."
            )
        self._limits = limits
        self.names = tuple(self._folders)

    def ask(self, questions: Mapping[str, bytes], *, timeout: float) -> dict[str, bytes]:
        """Asks as `Parties.ask`, and removes questions and answers."""
        stems = {
            name: self._folders[name] / hashlib.sha256(data).hexdigest()
            for name, data in questions.items()
        }
        for name, data in questions.items():
            write_package(stems[name].with_suffix(".question"), data)
        end = time.monotonic() + timeout
        answers: dict[str, bytes] = {}
        while len(answers) < len(questions) and time.monotonic() <= end:
            for name in questions.keys() - answers.keys():
                path = stems[name].with_suffix(".answer")
                if path.exists():
                    answers[name] = read_package(path, limits=self._limits)
            time.sleep(_POLL_SECONDS)
        for name in answers:  # the question first, or it would be answered again
            stems[name].with_suffix(".question").unlink()
            stems[name].with_suffix(".answer").unlink()
        return answers


def serve_folder(
    folder: pathlib.Path,
    answer: Answer,
    *,
    until: Callable[[], bool],
    timeout: float,
    limits: Limits | None = None,
) -> None:
    """Answers the questions in a folder.

    Raises:
      TimeoutError: `until()` is false `timeout` seconds after the last question.
    """
    last = time.monotonic()
    while not until():
        for question in folder.glob("*.question"):
            reply = question.with_suffix(".answer")
            if not reply.exists():
                # The server may have read the answer and removed both files in the meantime.
                with contextlib.suppress(FileNotFoundError):
                    data = read_package(question, limits=limits)
                    write_package(reply, answer(data))
                    last = time.monotonic()
        if time.monotonic() > last + timeout:
            raise TimeoutError(
                f"no question came through {shown(folder)} within {timeout:g} seconds. Is the "
                "server running with the same folder? Start again as before. What was paid is "
                "kept and not paid twice."
            )
        time.sleep(_POLL_SECONDS)
