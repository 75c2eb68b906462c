"""The commands `jaxdp ledger`: questions to a ledger, which is opened for reading only.

`describe` and `accept` alone write to it.
"""

import argparse
import csv
import datetime
import json
import math
import pathlib
import sys
import zoneinfo
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.files import check_folder, shown, write_durably
from jaxdp.files.text import aligned, finite, up
from jaxdp.privacy import (
    BudgetExceeded,
    GroupPrivacy,
    Ledger,
    Registry,
    RenyiStatement,
    TradeOff,
    report_text,
)
from jaxdp.privacy.contacts import FIELDS
from jaxdp.privacy.database import check_new, existing
from jaxdp.privacy.events import describe, parse
from jaxdp.privacy.explanations import GROUPINGS
from jaxdp.privacy.group_privacy import SIZES, of_account
from jaxdp.privacy.store import accept, anchor_of
from jaxdp.privacy.times import local

from . import ledger_metrics

_FAMILIES = 6  # accounts with a table of groups, of about 0.5 s each
_ALERT = 3  # the exit status of --alert. A mistake has 2.
_VERDICTS = {
    True: "the budget allows it",
    False: "the budget does not allow it",
    None: "it has no budget",
}
_OF_A_SPEND = (
    "spend",
    "reserved_at",
    "dataset",
    "partition",
    "event",
    "label",
    "status",
    "who",
    "host",
    "run",
    "version",
    "finished_at",
    "token",
    "link",
)
_OF_A_DAY = ("day", "dataset", "spends", "epsilon", "delta")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the commands to the parser of `jaxdp ledger`."""
    commands = parser.add_subparsers(
        required=True,
        metavar=(
            "show | explain | curve | renyi | group | history | describe | verify | backup | accept"
        ),
    )
    show = _add_show(commands)
    _add_explain(commands)
    _add_curves(commands)
    history = _add_history(commands)
    for command in (show, history):
        command.add_argument(
            "--timezone", type=_timezone, default=datetime.UTC, help="for example Europe/Berlin"
        )

    describe = _command(commands, "describe", _describe)
    describe.add_argument("dataset", help="the dataset")
    for field in FIELDS:
        describe.add_argument(f"--{field}", help="a text, or '' if it is not known")
    _command(commands, "verify", _verify)
    backup = _command(commands, "backup", _backup)
    backup.add_argument("copy", help="the new file")
    backup.add_argument(
        "--registry", metavar="FILE", help="copy the registry of JAXDP_HOME too, with mode 0600"
    )
    _command(commands, "accept", _accept)


def _add_show(commands: Any) -> argparse.ArgumentParser:
    """Adds `jaxdp ledger show`, and returns its parser."""
    show = _command(commands, "show", _show)
    show.add_argument(
        "--delta", type=float, default=1e-5, help="for datasets that have none registered"
    )
    show.add_argument(
        "--if",
        dest="events",
        action="append",
        default=[],
        metavar="'DATASET: EVENT'",
        help="what if",
    )
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument("--html", metavar="PAGE", help="write a page for a browser instead of text")
    form.add_argument(
        "--metrics", metavar="FILE", help="write an OpenMetrics file for a monitor instead of text"
    )
    show.add_argument(
        "--alert",
        type=float,
        metavar="SHARE",
        help="exit with 3 if a dataset has spent this share of its budget, for cron",
    )
    return show


def _add_explain(commands: Any) -> None:
    """Adds `jaxdp ledger explain`."""
    explain = _command(commands, "explain", _explain)
    explain.add_argument("dataset", nargs="?", help="the dataset, by default all")
    explain.add_argument(
        "--by", choices=GROUPINGS, default="event", help="what the releases of a group share"
    )
    explain.add_argument("--delta", type=float, help="by default the registered one, or 1e-5")
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_curves(commands: Any) -> None:
    """Adds the commands that print a curve or a table of one data set."""
    curve = _command(commands, "curve", _curve)
    curve.add_argument(
        "--slack", type=float, help="the probability that mu may leave out, by default delta"
    )
    renyi = _command(commands, "renyi", _renyi)
    group = _command(commands, "group", _group)
    group.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=SIZES,
        help="the numbers of members, by default 2 3 5 10",
    )
    group.add_argument("--delta", type=float, help="by default the registered one, or 1e-5")
    for command in (curve, renyi, group):
        command.add_argument("dataset", help="the dataset")
        form = command.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print JSON instead of text")
        form.add_argument("--csv", action="store_true", help="print CSV instead of text")


def _add_history(commands: Any) -> argparse.ArgumentParser:
    """Adds `jaxdp ledger history`, and returns its parser."""
    history = _command(commands, "history", _history)
    history.add_argument("--dataset", help="the dataset to list, by default all")
    history.add_argument(
        "--by-day", action="store_true", help="one row per day, with epsilon at its end"
    )
    history.add_argument("--csv", action="store_true", help="print CSV instead of text")
    history.add_argument("--delta", type=float, help="for --by-day, by default the registered one")
    return history


def _command(commands: Any, name: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=run.__doc__.rstrip("."))
    command.add_argument("path", help="the ledger's file")
    command.set_defaults(run=run)
    return command


def _timezone(name: str) -> datetime.tzinfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"no time zone {name!r}. Use a name such as Europe/Berlin."
        ) from error


# --- What was spent -----------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> None:
    """Shows what every dataset has spent."""
    for flag in ("html", "metrics"):
        if (path := getattr(options, flag)) is not None:
            check_folder(f"--{flag}", path)
            if options.events:
                raise ValueError(
                    f"--{flag} shows what is spent, and --if what would be. Leave one of them out."
                )
    if options.html is not None:
        _write_page(options)  # also of a ledger that cannot be opened
        if options.alert is None:
            return
    with Ledger(options.path, read_only=True) as ledger:
        report = ledger.report(delta=options.delta)
        if options.html is None:
            _print(ledger, report, options)
    if options.alert is not None:
        _alert(report, options.alert)


def _print(ledger: Ledger, report: dict[str, Any], options: argparse.Namespace) -> None:
    answers = [_what_if(ledger, text, options.delta) for text in options.events]
    if options.json:
        if answers:
            report["if"] = answers
        print(json.dumps(report, indent=2))
    elif options.metrics is not None:
        content = ledger_metrics.text(report)
        write_durably(pathlib.Path(options.metrics), content.encode())
    else:
        print(report_text.text(report, options.timezone))
        _print_groups(report)
        for answer in answers:
            print(f"\n{_sentence(answer)}")


def _print_groups(report: dict[str, Any]) -> None:
    """Prints what a family of several units loses, for the first accounts that spent."""
    accounts = [group[0] for group in report_text.grouped(report)]
    for account in accounts[:_FAMILIES]:
        table = of_account(account)
        if table is not None:
            print(f"\n{table.text()}")


def _alert(report: dict[str, Any], share: float) -> None:
    """Exits with 3 if a data set has spent a share of its budget."""
    if not 0 < share <= 1:
        raise ValueError(f"--alert must be in (0, 1], the share of a budget, got {share!r}.")
    alerts = list(ledger_metrics.alerts(report, share))
    for alert in alerts:
        print(f"ALERT {shown(alert)}", file=sys.stderr)
    if alerts:
        sys.exit(_ALERT)


def _write_page(options: argparse.Namespace) -> None:
    page = pathlib.Path(options.html)
    is_ledger = page.resolve() == pathlib.Path(options.path).resolve()
    if page.suffix != ".html" or is_ledger:
        raise ValueError(f"--html must name a new page that ends in .html, got {options.html!r}.")
    from jaxdp.report import write_ledger_page  # other commands do without NumPy and Jinja

    write_ledger_page(options.path, page, delta=options.delta, timezone=options.timezone)
    print(f"{shown(options.html)}: the page of {shown(options.path)}")


def _what_if(ledger: Ledger, text: str, default_delta: float) -> dict[str, Any]:
    """Returns what "DATASET: EVENT" would cost."""
    name, colon, description = text.rpartition(": ")
    if not colon:
        raise ValueError(
            f"--if takes 'DATASET: EVENT', for example 'data: 100 * Gaussian(5)', got {text!r}."
        )
    event = parse(description)
    registered = ledger.delta(name)
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


def _sentence(answer: dict[str, Any]) -> str:
    after = _epsilon(answer["epsilon"])
    before = _epsilon(answer["before"])
    return (
        f"If {shown(answer['event'])} were spent on {shown(answer['dataset'])}: epsilon {after} at "
        f"delta {answer['delta']:g}, after {before}; {_VERDICTS[answer['allowed']]}"
    )


def _epsilon(value: float | None) -> str:
    return "inf" if value is None else up(value)


def _explain(options: argparse.Namespace) -> None:
    """Shows what each group of releases adds to epsilon, and what would be left without it."""
    with Ledger(options.path, read_only=True) as ledger:
        names = [options.dataset] if options.dataset else ledger.names()
        explanations = []
        for name in names:
            delta = _delta_of(ledger, name, options.delta)
            explanations.append(ledger.explain(name, delta=delta, by=options.by))
    if options.json:
        print(json.dumps([explanation.as_dict() for explanation in explanations], indent=2))
        return
    print("\n\n".join(explanation.text() for explanation in explanations))
    print(
        "\nalone: epsilon of these releases only. marginal: epsilon less epsilon without them. "
        "Neither adds up to epsilon."
    )


def _curve(options: argparse.Namespace) -> None:
    """Shows the trade-off curve (f-DP) of everything that was spent, and its mu."""
    with Ledger(options.path, read_only=True) as ledger:
        slack = _delta_of(ledger, options.dataset, options.slack)
        curve = ledger.trade_off(options.dataset, slack=slack)
    _print_statement(curve, ("alpha", "beta"), options)


def _renyi(options: argparse.Namespace) -> None:
    """Shows the Renyi DP and the zCDP of everything that was spent, for other accountants."""
    with Ledger(options.path, read_only=True) as ledger:
        statement = ledger.renyi(options.dataset)
    _print_statement(statement, ("order", "rdp"), options)


def _group(options: argparse.Namespace) -> None:
    """Shows epsilon for several units together, such as the members of a family."""
    with Ledger(options.path, read_only=True) as ledger:
        delta = _delta_of(ledger, options.dataset, options.delta)
        table = ledger.group_privacy(options.dataset, options.sizes, delta=delta)
    _print_statement(table, ("size", "epsilon", "delta"), options)


def _print_statement(
    statement: TradeOff | RenyiStatement | GroupPrivacy,
    columns: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """Prints a statement as text, as JSON, or as CSV with all digits."""
    if options.json:
        print(json.dumps(statement.as_dict(), indent=2))
    elif options.csv:
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(statement.rows())
    else:
        print(statement.text())


def _delta_of(ledger: Ledger, name: str, delta: float | None) -> float:
    """Returns the delta of an option, of the dataset, or 1e-5."""
    registered = ledger.delta(name)
    known = [value for value in (delta, registered) if value is not None]
    return known[0] if known else 1e-5


def _history(options: argparse.Namespace) -> None:
    """Lists every spend, or the growth of epsilon by the day."""
    with Ledger(options.path, read_only=True) as ledger:
        rows = _days(ledger, options) if options.by_day else _spends(ledger, options)
    columns = _OF_A_DAY if options.by_day else _OF_A_SPEND
    if options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row[column]) for column in columns] for row in rows)
        return
    _print_table(columns[:10], rows)  # A terminal has no room for token and link.


def _print_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [[_cell(row[column]) or "-" for column in columns] for row in rows]
    print(*aligned([columns, *lines]), sep="\n")


def _days(ledger: Ledger, options: argparse.Namespace) -> list[dict[str, Any]]:
    names = [options.dataset] if options.dataset else ledger.names()
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += ledger.by_day(name, delta=options.delta, timezone=options.timezone)
    return rows


def _spends(ledger: Ledger, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = ledger.history(options.dataset)
    for row in rows:
        for key in ("reserved_at", "finished_at"):
            if row[key]:
                row[key] = local(row[key], options.timezone).isoformat()
    return rows


def _cell(value: Any) -> str:
    """Returns a value for a terminal or a spreadsheet, which would read some texts as formulas."""
    if value is None:
        return ""
    if isinstance(value, float):
        return up(value)  # an epsilon or a delta
    text = shown(str(value))
    is_formula = isinstance(value, str) and text[:1] in ("=", "+", "-", "@")
    return f"'{text}" if is_formula else text


def _describe(options: argparse.Namespace) -> None:
    """Sets or corrects whom to ask about a dataset, or lists the changes until now."""
    changes = {field: getattr(options, field) for field in FIELDS}
    is_change = any(text is not None for text in changes.values())
    existing(options.path)  # A mistyped path must not become a new ledger.
    with Ledger(options.path, read_only=not is_change) as ledger:
        if is_change:
            ledger.describe(options.dataset, **changes)
        history = ledger.contact_history(options.dataset)
    _print_table(("at", "who", "host", *FIELDS), history)


# --- The file -----------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> None:
    """Checks whether the file holds everything that was spent."""
    with Ledger(options.path, read_only=True) as ledger:
        head = ledger.head
        print(
            f"{shown(options.path)}: {head.spend} spend(s), each linked to all before it. Totals "
            "equal their sums."
        )
        if ledger.has_head:
            print(f"The head beside it agrees. Its last spend is {head.spend}, link {head.link}.")
        else:
            print("No head lies beside it, so missing last spends cannot be detected.")
        if not anchor_of(options.path).exists():
            print("No anchor lies beside it, so nothing shows whether it is an older copy.")


def _backup(options: argparse.Namespace) -> None:
    """Makes a copy, which appears whole."""
    registry = None
    if options.registry is not None:
        # Before the ledger is copied, since a backup of the next try must have another name.
        check_new(options.registry)
        from .frame import ledgers  # which imports JAX

        registry = Registry(existing(ledgers.registry_path()))
    with Ledger(options.path, read_only=True) as ledger:
        ledger.backup(options.copy)
    if registry is not None:
        registry.backup(options.registry)
        print(f"{shown(options.registry)}: a copy of {shown(registry.path)}, as secret as records")
    with Ledger(options.copy, read_only=True) as copy:
        print(f"{shown(options.copy)}: {copy.head.spend} spend(s), verified")


def _accept(options: argparse.Namespace) -> None:
    """Makes an older copy valid, if no newer one is left."""
    head = accept(options.path)
    print(
        f"{shown(options.path)} is valid up to its spend {head.spend}. Resume every run that was "
        "charged later. Its workdir charges the spends that this copy lacks."
    )
