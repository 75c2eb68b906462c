"""Whether a report's page is the one that its ledger and workdir make.

The page is written again as of the spend that it names, and the bytes are compared. It keeps the
heads of its ledgers and the version of jaxdp in a `meta` element.
"""

import dataclasses
import difflib
import html
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxdp.files import parse_json, shown, understood
from jaxdp.report.books import STATES, check, digest_of
from jaxdp.report.past import Differs, Past
from jaxdp.version import __version__

_ORIGIN = re.compile(r'<meta name="jaxdp-report" content="([^"]*)">')
_SHAPE = {"jaxdp": str, "ledgers": STATES, "shared": str, "public": bool}
_HEADING = re.compile(r"<(h[1-6]|caption)[^>]*>(.*?)</\1>")
_AGAIN = "Write the report again with `jaxdp report`."
_MOST = 10  # differences that are listed
_AROUND = 40  # characters of a line on each side of a difference


@dataclasses.dataclass(frozen=True)
class Answer:
    """Whether a page is the one that its ledger and workdir make.

    Attributes:
      is_true: Whether the bytes are equal.
      text: The reason in sentences. For another page it lists what differs.
    """

    is_true: bool
    text: str


def verify(
    page: str | os.PathLike[str],
    write: Callable[[pathlib.Path, Past], Any],
    *,
    ledger: str | os.PathLike[str] | None = None,
) -> Answer:
    """Returns whether a page is the one that its ledger and workdir make.

    Args:
      page: The HTML file.
      write: `write(path, past)` writes the page of the workdir, with the accounts of `past`.
      ledger: The ledger's file, if it is not where the workdir says.

    Raises:
      ValueError, OSError: It cannot be told. The page names no head or is of another version of
        jaxdp, or the workdir or the ledger is gone or damaged.
    """
    content = pathlib.Path(page).read_bytes()
    try:
        said = _origin(page, content)
    except Differs as error:
        return Answer(False, f"{shown(page)} was changed: its first lines are damaged. {error}")
    past = Past(said["ledgers"], said["shared"], ledger, public=said["public"])
    with tempfile.TemporaryDirectory() as folder:
        again = pathlib.Path(folder) / "report.html"
        try:
            write(again, past)
        except Differs as error:
            return Answer(False, f"{shown(page)} is NOT the page of this ledger. {error}")
        rewritten = again.read_bytes()
    if len(past.later) < len(said["ledgers"]):
        raise ValueError(
            f"cannot tell: {shown(page)} names {len(said['ledgers'])} ledger(s), and the workdir "
            f"leads to {len(past.later)}. Restore the ledger, or name its workdir."
        )
    if content == rewritten:
        return Answer(True, _praise(page, past))
    lines = list(_differences(content, rewritten))
    title = f"{shown(page)} is NOT the page that its ledger and workdir make."
    if any(past.later.values()):
        title += " Spends came since then, and the run itself may have gone on."
    if len(lines) > _MOST:
        lines[_MOST:] = [f"and {len(lines) - _MOST} more"]
    return Answer(False, "\n".join([title, *lines]))


def _origin(page: str | os.PathLike[str], content: bytes) -> Any:
    """Returns what a page says about itself. Raises Differs if its digest is another."""
    match = _ORIGIN.search(content.decode(errors="replace"))
    if match is None:
        raise ValueError(
            f"cannot tell: {shown(page)} names no head of a ledger. It is of an earlier version of "
            "jaxdp, a page of `jaxdp ledger show --html`, which is not verified but written again, "
            f"or no report. {_AGAIN}"
        )
    try:
        said, digest = parse_json(html.unescape(match[1]))
    except (TypeError, ValueError) as error:
        raise Differs(error) from error
    if not isinstance(said, dict) or digest_of(said) != digest:
        raise Differs("Their digest is another.")
    if said.get("jaxdp") != __version__:
        raise ValueError(
            f"cannot tell: {shown(page)} is of jaxdp {shown(said.get('jaxdp'))}, whose pages "
            f"differ from those of {__version__}. Verify it with that version, or write it again."
        )
    if said.get("ledgers") is None:
        raise ValueError(
            f"cannot tell: {shown(page)} was made from a copy of the accounts that an earlier "
            f"version of jaxdp left, which names no head. {_AGAIN}"
        )
    with understood(pathlib.Path(page), _AGAIN):
        check(said, _SHAPE, "the page's origin")
    return said


def _praise(page: str | os.PathLike[str], past: Past) -> str:
    name = shown(page)
    if not past.later:
        return f"{name} is the page that its workdir makes. It names no ledger."
    lines = [f"{name} is the page that its ledger and workdir make."]
    for path, later in past.later.items():
        if later:
            lines[0] = f"{name} was true when it was written."
            lines.append(f"{later} spend(s) have come since in {shown(path)}. {_AGAIN}")
    if past.finished:
        lines.append(
            f"{past.finished} payment(s) committed that the page has as unfinished. When they "
            "committed is not compared."
        )
    return "\n".join(lines)


def _differences(content: bytes, made: bytes) -> Iterator[str]:
    """Yields where two pages differ: the line, its section, and both texts."""
    old = content.decode(errors="replace").split("\n")
    new = made.decode(errors="replace").split("\n")
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, start, end, first, last in matcher.get_opcodes():
        if kind == "equal":
            continue
        ours, theirs = _windows("\n".join(old[start:end]), "\n".join(new[first:last]))
        yield (
            f"  line {start + 1}, {_section(old[:start])}: the page has {ours}, ledger and workdir "
            f"make {theirs}"
        )


def _windows(ours: str, theirs: str) -> tuple[str, str]:
    """Returns two texts around their first difference."""
    if _plain(ours) != _plain(theirs):
        ours, theirs = _plain(ours), _plain(theirs)
    pairs = enumerate(zip(ours, theirs, strict=False))
    shorter = min(len(ours), len(theirs))
    place = next((i for i, (one, other) in pairs if one != other), shorter)
    window = slice(max(0, place - _AROUND), place + _AROUND)
    return shown(repr(ours[window])), shown(repr(theirs[window]))


def _plain(text: str) -> str:
    """Returns the words of a part of a page, without its tags."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def _section(lines: Sequence[str]) -> str:
    """Returns the last heading of the lines before a difference."""
    headings = _HEADING.findall("\n".join(lines))
    if not headings:
        return "before the first heading"
    return f"below {shown(_plain(headings[-1][1])[:60])!r}"
