"""The ledgers as they were when a page was written, by what the page says about itself."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.files import shown
from jaxdp.privacy import Ledger
from jaxdp.privacy.chain import Head
from jaxdp.privacy.rewind import report_at


class Differs(Exception):
    """A page is not what its ledger and workdir make."""


def state_of(report: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what a page keeps about a ledger: its head, and what no link of its chain covers.

    Args:
      report: `Ledger.report`.
      entries: The accounts of it that the page shows.
    """
    unfinished: list[int] = []
    for entry in entries:
        unfinished += [spend["id"] for spend in entry["open"]]
    head = report["head"]
    return {
        "ledger": _identity(head["ledger"]),
        "spend": head["spend"],
        "link": head["link"],
        "contacts": report["contacts"],
        "records": {entry["name"]: entry["records"] for entry in entries},
        "unfinished": sorted(unfinished),
    }


class Past:
    """The ledgers of a page at the spends that it names.

    Attributes:
      shared: The path of the ledger in the page, or "".
      public: Whether the page leaves out who spent, when and where.
      later: The number of spends since then by the path of the ledger.
      finished: How many payments that the page has as unfinished have committed since.
    """

    def __init__(
        self,
        states: Sequence[Mapping[str, Any]],
        shared: str,
        ledger: str | os.PathLike[str] | None,
        *,
        public: bool = False,
    ):
        """Takes the states of `state_of`, and the file of the ledger if it is elsewhere."""
        self.shared = shared
        self.public = public
        self.later: dict[pathlib.Path, int] = {}
        self.finished = 0
        self._ledger = ledger
        self._states = {state["ledger"]: state for state in states}

    def report(self, path: pathlib.Path) -> dict[str, Any]:
        """Returns the report of a ledger of the page at that time.

        Raises:
          Differs: The page is of another ledger, or of another history of it.
          ValueError: There is no such ledger.
        """
        path = pathlib.Path(self._ledger or path)
        if not path.is_file():
            raise ValueError(
                f"cannot tell: the ledger {shown(path)} does not exist. Name it with --ledger."
            )
        with Ledger(path, read_only=True) as ledger:
            head = ledger.head
            state = self._state(path, ledger)
            history = ledger.history()
        self.later[path] = head.spend - state["spend"]
        statuses = {row["spend"]: row["status"] for row in history}
        closed = [number for number in state["unfinished"] if statuses.get(number) == "committed"]
        self.finished += len(closed)
        report = report_at(
            path,
            state["spend"],
            contacts=state["contacts"],
            names=list(state["records"]),
            unfinished=state["unfinished"],
        )
        for entry in report["datasets"]:
            # The number may be declared later, once.
            if state["records"].get(entry["name"], 0) is None:
                entry["records"] = None
        return report

    def _state(self, path: pathlib.Path, ledger: Ledger) -> Mapping[str, Any]:
        """Returns what the page says about a ledger. Raises Differs if its history is another."""
        head = ledger.head
        identity = _identity(head.ledger)
        if identity not in self._states:
            named = ", ".join(map(shown, self._states)) or "none"
            raise Differs(
                f"The ledger {shown(path)} has the identity {identity}. The page names {named}."
            )
        state = self._states[identity]
        spend = state["spend"]
        if spend > head.spend:
            raise Differs(
                f"The page is of spend {spend}, and the ledger {shown(path)} has {head.spend}. It "
                "is an older copy of the ledger, or the page was changed."
            )
        if not ledger.contains(Head(head.ledger, spend, state["link"])):
            raise Differs(
                f"Spend {spend} of the ledger {shown(path)} has another link than the page says. "
                "The ledger has another history, or the page was changed."
            )
        return state


def _identity(ledger: str) -> str:
    """Returns the ledger of a head without the branch of its history."""
    return ledger.partition(".")[0]
