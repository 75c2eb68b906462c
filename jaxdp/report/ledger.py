"""The page of a ledger: its accounts, spends and state.

It shows what was spent by whom and when, what is left, and whether the file is whole.
"""

import datetime
import functools
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.files import DiskFull, write_durably
from jaxdp.privacy import Ledger, LedgerDamaged, unit_words
from jaxdp.privacy.contacts import FIELDS
from jaxdp.privacy.group_privacy import of_account
from jaxdp.privacy.report_text import grouped
from jaxdp.privacy.times import local
from jaxdp.report.html import Chart, render_page
from jaxdp.report.trade_off import CURVES, csv_link, trade_off_chart
from jaxdp.report.verdicts import verdict
from jaxdp.version import __version__

CHARTS = 12  # accounts with a figure: those with the least left
POINTS = 120  # of all figures together, because the accountant may take 0.1 s for each
ROWS = 10  # of a table about one account; fewer if there are many accounts
NEWEST = 50  # rows of the table of the newest spends
_PAGES = pathlib.Path(__file__).parent / "pages"


def write_ledger_page(
    path: str | os.PathLike[str],
    page: str | os.PathLike[str],
    *,
    delta: float = 1e-5,
    timezone: datetime.tzinfo = datetime.UTC,
) -> None:
    """Writes the page of a ledger: one HTML file without scripts or requests.

    It is for a browser and for paper.

    Epsilons are rounded up, and what is left is rounded down. The element `data` around such a
    number has the exact one of `Ledger.report` as its `value`.

    Args:
        path: The ledger. It is opened for reading only.
        page: The HTML file. An older one is replaced, also if the ledger is damaged.
        delta: The delta for data sets that have none registered.
        timezone: The time zone of all times on the page.

    Raises:
        LedgerDamaged: The file lost history or is inconsistent. The page is written. It says so and
            has no numbers, because they would be too small.
        ValueError: The file does not exist or is not a ledger. No page is written.
        OSError: The page cannot be written.
    """
    content, damage = ledger_page(path, delta=delta, timezone=timezone)
    try:
        write_durably(pathlib.Path(page), content)
    except DiskFull:
        raise
    except OSError as error:
        raise OSError(
            f"page {os.fspath(page)!r} cannot be written: {error.strerror}. Choose another place."
        ) from error
    if damage is not None:
        raise damage


def ledger_page(
    path: str | os.PathLike[str],
    *,
    delta: float = 1e-5,
    timezone: datetime.tzinfo = datetime.UTC,
) -> tuple[bytes, LedgerDamaged | None]:
    """Returns the page that `write_ledger_page` writes, and the error if the ledger is damaged."""

    def time(text: str) -> str:
        return f"{local(text, timezone):%Y-%m-%d %H:%M:%S}"

    common = {
        "title": "Privacy ledger",
        "version": __version__,
        "made": time(datetime.datetime.now(datetime.UTC).isoformat()),
        "timezone": timezone,
    }
    try:
        facts = ledger_facts(path, delta=delta)
    except LedgerDamaged as error:
        damaged = {"path": os.fspath(path), "error": str(error)}
        return render_page(_PAGES / "damaged.html.jinja", **damaged, **common), error
    groups = facts["groups"]
    facts["charts"] = [_chart(facts, group, timezone) for group in groups]
    facts["trade_offs"] = [trade_off_chart(group["trade_off"]) for group in groups]
    facts["csv_link"] = csv_link
    facts["units"] = list(dict.fromkeys(group["words"] for group in groups))
    facts["verdicts"] = [verdict(group["account"]) for group in groups]
    # About 300 rows in all tables together, so that the page of many accounts can be read.
    facts["limit"] = max(3, min(ROWS, 300 // max(len(groups), 1)))
    return render_page(_PAGES / "ledger.html.jinja", **facts, time=time, **common), None


def ledger_facts(path: str | os.PathLike[str], *, delta: float = 1e-5) -> dict[str, Any]:
    """Returns what the page of a ledger shows, all of one instant, also while others spend.

    Returns:
        `report` as `Ledger.report` returns it, and `has_head`. `groups` are the data sets with
        equal accounts, those with the least left first. Each has the `names`, the `account` of the
        first one, the `words` for its unit, its `people`, the `share` of its budget that is spent
        (None without a budget), and `growth` as
        `Ledger.growth` returns it, which is empty if there is no figure. `explanation` and
        `trade_off` are what `Ledger.explain` and `Ledger.trade_off` return, or None. `families` is
        the table of `Ledger.group_privacy`, or None. `newest` are
        the last spends, the newest first.

    Raises:
        LedgerDamaged: The file lost history or is inconsistent.
        ValueError: The file does not exist or is not a ledger.
    """
    with Ledger(path, read_only=True) as ledger, tempfile.TemporaryDirectory() as folder:
        ledger.backup(f"{folder}/copy")
        with Ledger(f"{folder}/copy", read_only=True) as copy:
            report = copy.report(delta=delta) | {"path": os.fspath(path)}
            groups = [_group(accounts) for accounts in grouped(report)]
            groups.sort(key=_spent, reverse=True)
            touched = [group["account"] for group in groups if group["account"]["rows"]]
            drawn = [account["name"] for account in touched[:CHARTS]]
            for group in groups:
                account = group["account"]
                if account["name"] in drawn:
                    group["explanation"] = copy.explain(account["name"], delta=account["delta"])
                    group["growth"] = copy.growth(
                        account["name"],
                        delta=account["delta"],
                        points=min(40, POINTS // len(drawn)),
                    )
                if account["name"] in drawn[:CURVES]:
                    group["trade_off"] = copy.trade_off(account["name"], slack=account["delta"])
                    group["families"] = of_account(account)
            newest = copy.history()[-NEWEST:][::-1]
        return {"report": report, "has_head": ledger.has_head, "groups": groups, "newest": newest}


def _group(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = accounts[0]
    names = [account["name"] for account in accounts]
    people = {field: first[field] for field in FIELDS if first[field]}
    return {
        "names": names,
        "account": first,
        "share": _share(first),
        "words": unit_words(first["unit"]),
        "people": people,
        "growth": [],
        "explanation": None,
        "trade_off": None,
        "families": None,
    }


def _spent(group: Mapping[str, Any]) -> float:
    """Returns the share that is spent, by which groups are sorted. No budget is below any share."""
    return -1.0 if group["share"] is None else group["share"]


def _share(account: Mapping[str, Any]) -> float | None:
    """Returns the share of the budget that is spent, or None without a budget.

    It is infinite if a release has no proof.
    """
    if account["headline"].startswith("inf"):
        return math.inf
    if account["budget"] is None:
        return None
    return 1 - account["remaining"] / account["budget"]


def _chart(
    facts: Mapping[str, Any],
    group: Mapping[str, Any],
    timezone: datetime.tzinfo,
) -> Chart | None:
    """Returns epsilon over the time from the ledger's first to its last spend.

    It is None if that is one moment.
    """
    if not group["growth"]:
        return None
    spends = [entry["spends"] for entry in facts["report"]["datasets"] if entry["spends"]]
    first = _seconds(min(of_dataset[0]["first_at"] for of_dataset in spends))
    last = _seconds(facts["newest"][0]["reserved_at"])
    now = first
    epsilon = 0.0
    points = [(now, epsilon)]
    for row in group["growth"]:
        # A row counts from its first spend on, so that the curve is never too low. Clocks may go
        # back.
        now = max(_seconds(row["first_at"]), now)
        epsilon = row["epsilon"]
        points.append((now, epsilon))
    now = max(last, now)
    points.append((now, epsilon))
    if now == first:
        return None
    budget = group["account"]["budget"]

    def text(form: str, x: float) -> str:
        return datetime.datetime.fromtimestamp(x, timezone).strftime(form)

    return Chart(
        curves={"spent": points},
        limits={} if budget is None else {f"budget {budget:g}": budget},
        xlabel=f"time ({timezone})",
        ylabel="epsilon",
        text=functools.partial(text, "%Y-%m-%d %H:%M:%S"),
        mark=functools.partial(text, _mark(now - first)),
        steps=True,
    )


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def _mark(seconds: float) -> str:
    """Returns the format of the marks of an axis of time."""
    if seconds < 3600:
        return "%H:%M:%S"
    return "%H:%M" if seconds < 86400 else "%Y-%m-%d"
