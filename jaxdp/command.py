"""The command `jaxdp`: questions to a ledger, from a terminal.

    jaxdp ledger show PATH                            what every dataset has spent
    jaxdp ledger show PATH --if "data: 100 * Gaussian(5)"     and what it would have spent after that
    jaxdp ledger history PATH --csv                   every spend
    jaxdp ledger history PATH --by-day                how epsilon grew
    jaxdp ledger verify PATH                          whether the file holds everything that was spent
    jaxdp ledger backup PATH COPY                     a copy, which appears whole
    jaxdp ledger accept PATH                          an older copy becomes valid, if no newer one is left

Only `accept` writes to the ledger. `python -m jaxdp.command` is the same command.
"""

import argparse
import csv
import datetime
import json
import math
import sys
import zoneinfo
from collections.abc import Sequence
from typing import Any

from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.privacy.events import describe, parse
from jaxdp.privacy.readout import aligned, finite, local, shown
from jaxdp.privacy.store import accept


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. An error becomes a sentence and the exit status 1."""
    about: Any = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="jaxdp", **about)
    ledger = parser.add_subparsers(required=True, metavar="ledger").add_parser("ledger", **about)
    commands = ledger.add_subparsers(required=True, metavar="show | history | verify | backup | accept")

    show = _command(commands, "show", _show)
    show.add_argument("--json", action="store_true", help="print JSON instead of text")
    show.add_argument("--delta", type=float, default=1e-5, help="for datasets that have none registered")
    show.add_argument("--if", dest="events", action="append", default=[], metavar="'DATASET: EVENT'", help="what if")

    history = _command(commands, "history", _history)
    history.add_argument("--dataset", help="the dataset to list, by default all")
    history.add_argument("--by-day", action="store_true", help="one row per day, with epsilon at its end")
    history.add_argument("--csv", action="store_true", help="print CSV instead of text")
    history.add_argument("--delta", type=float, help="for --by-day, by default the registered one")
    for command in (show, history):
        command.add_argument("--timezone", type=_timezone, default=datetime.UTC, help="for example Europe/Berlin")

    _command(commands, "verify", _verify)
    _command(commands, "backup", _backup).add_argument("copy", help="the new file")
    _command(commands, "accept", _accept)

    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(shown(str(error))) from error


def _command(commands: Any, name: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=run.__doc__.rstrip("."))
    command.add_argument("path", help="the ledger's file")
    command.set_defaults(run=run)
    return command


def _timezone(name: str) -> datetime.tzinfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"no time zone {name!r}. Use a name such as Europe/Berlin.") from error


def _show(given: argparse.Namespace) -> None:
    """Shows what every dataset has spent."""
    with Ledger(given.path, read_only=True) as ledger:
        asked = []
        for text in given.events:
            name, colon, event = text.rpartition(": ")
            if not colon:
                raise ValueError(f"--if takes 'DATASET: EVENT', for example 'data: 100 * Gaussian(5)', got {text!r}.")
            asked.append(_what_if(ledger, name, event, given.delta))
        if given.json:
            print(json.dumps(ledger.report(delta=given.delta) | ({"if": asked} if asked else {}), indent=2))
            return
        print(ledger.report_text(delta=given.delta, timezone=given.timezone))
        verdicts = {True: "the budget allows it", False: "the budget does not allow it", None: "it has no budget"}
        for answer in asked:
            after, before = ("inf" if answer[key] is None else f"{answer[key]:.6g}" for key in ("epsilon", "before"))
            print(
                f"\nIf {shown(answer['event'])} were spent on {shown(answer['dataset'])}: epsilon {after} at delta "
                f"{answer['delta']:g}, after {before}; {verdicts[answer['allowed']]}"
            )


def _what_if(ledger: Ledger, name: str, text: str, default_delta: float) -> dict[str, Any]:
    event, registered = parse(text), ledger.delta(name)
    delta = default_delta if registered is None else registered
    allowed = True if math.isfinite(ledger.remaining(name)) else None
    try:
        ledger.check([(name, event)])
    except BudgetExceeded:
        allowed = False
    return {
        "dataset": name,
        "event": describe(event),
        "delta": delta,
        "before": finite(ledger.epsilon(name, delta=delta)),
        "epsilon": finite(ledger.would_cost(name, event, delta=delta)),
        "allowed": allowed,
    }


def _history(given: argparse.Namespace) -> None:
    """Lists every spend, or the growth of epsilon by the day."""
    with Ledger(given.path, read_only=True) as ledger:
        if given.by_day:
            names = [given.dataset] if given.dataset else [entry["name"] for entry in ledger.report()["datasets"]]
            rows = [row for name in names for row in ledger.by_day(name, delta=given.delta, timezone=given.timezone)]
            columns = ["day", "dataset", "spends", "epsilon", "delta"]
        else:
            rows = ledger.history(given.dataset)
            for row in rows:
                for key in ("reserved_at", "finished_at"):
                    row[key] = row[key] and local(row[key], given.timezone).isoformat()
            columns = ["spend", "reserved_at", "dataset", "partition", "event", "label", "status", "who", "host", "run"]
            columns += ["version", "finished_at", "token", "link"]
    if given.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row[column]) for column in columns] for row in rows)
        return
    shorter = columns[:10]  # enough for a terminal
    for line in aligned([shorter, *([_cell(row[column]) or "-" for column in shorter] for row in rows)]):
        print(line)


def _cell(value: Any) -> str:
    """Returns a value for a terminal or a spreadsheet, which would read some texts as formulas."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = shown(str(value))
    return f"'{text}" if isinstance(value, str) and text[:1] in ("=", "+", "-", "@") else text


def _verify(given: argparse.Namespace) -> None:
    """Checks whether the file holds everything that was spent."""
    with Ledger(given.path, read_only=True) as ledger:
        head = ledger.head
        print(f"{shown(given.path)}: {head.spend} spend(s), each linked to all before it. Totals equal their sums.")
        if ledger.has_head:
            print(f"The head beside it agrees. Its last spend is {head.spend}, link {head.link}.")
        else:
            print("No head lies beside it, so missing last spends cannot be detected.")


def _backup(given: argparse.Namespace) -> None:
    """Makes a copy, which appears whole."""
    with Ledger(given.path, read_only=True) as ledger:
        ledger.backup(given.copy)
    with Ledger(given.copy, read_only=True) as copy:
        print(f"{shown(given.copy)}: {copy.head.spend} spend(s), verified")


def _accept(given: argparse.Namespace) -> None:
    """Makes an older copy valid, if no newer one is left."""
    head = accept(given.path)
    print(
        f"{shown(given.path)} is valid up to its spend {head.spend}. Resume every run that was charged later. Its "
        "workdir charges the spends that this copy lacks."
    )


if __name__ == "__main__":
    main()
