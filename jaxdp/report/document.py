"""The page of every report: accounts and their verdicts, released files, and what was bought.

A report is one HTML file without scripts or requests. The same workdir gives the same bytes. It
shows nothing that is computed from private records without a charge to the ledger.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.files import sha256_of
from jaxdp.privacy import trade_offs
from jaxdp.privacy.group_privacy import SIZES, of_account
from jaxdp.privacy.reports import LISTED
from jaxdp.privacy.units import unit_words
from jaxdp.report.books import Books, spends_of
from jaxdp.report.html import Chart, render_page, round_up
from jaxdp.report.intervals import chance, interval
from jaxdp.report.trade_off import CURVES, csv_link, trade_off_chart
from jaxdp.report.verdicts import verdict


def page(
    template: str | os.PathLike[str],
    *,
    books: Books,
    released: Sequence[Sequence[str]],
    config: Any,
    versions: Mapping[str, str],
    audits: Sequence[Mapping[str, Any]] = (),
    **facts: Any,
) -> bytes:
    """Returns the page of a template that extends report.html.jinja.

    Args:
      template: The file.
      books: The accounts.
      released: The place, the meaning and the SHA-256 of each released file, of `file_row`.
      config: The settings of the run.
      versions: The versions of the libraries that ran last.
      audits: The attacks on releases, as the lifecycle keeps them.
      **facts: What the template shows besides. `noise` has the sentences of `noise_of`.
    """
    accounts = []
    spends: list[list[str]] = []
    for names, group in books.groups:
        entry = group[0]
        account = {
            "names": names,
            "entry": entry,
            "verdict": verdict(entry),
            "audited": audited(audits, entry["name"]),
            "families": _families(entry),
            "chart": None,
        }
        accounts.append(account)
        spends += spends_of(names, group)
    _add_curves(accounts)
    units = {entry["unit"] for entry in books.entries}
    words = unit_words(units.pop() if len(units) == 1 else "record")
    facts["books"] = books
    facts["accounts"] = accounts
    facts["audits"] = audits
    facts["spends"] = spends
    facts["sizes"] = SIZES
    unfinished = [len(entry["open"]) for entry in books.entries]
    # Not how many more, since a page verifies by the listed ones, and others may commit.
    more = " or more" if LISTED in unfinished else ""
    facts["unfinished"] = f"{sum(unfinished)}{more}" if any(unfinished) else ""
    facts["words"] = words
    facts["unit"] = words.one
    facts["units"] = words.many
    facts["released"] = released
    facts["config"] = json.dumps(config, indent=1)
    facts["versions"] = [f"{name} {version}" for name, version in versions.items()]
    facts["interval"] = interval
    facts["chance"] = chance
    facts["Chart"] = Chart
    facts.setdefault("noise", [])
    return render_page(template, **facts)


def _add_curves(accounts: Sequence[dict[str, Any]]) -> None:
    """Adds the trade-off curves of the first accounts that have one."""
    count = 0
    for account in accounts:
        curve = trade_offs.of_account(account["entry"]) if count < CURVES else None
        chart = trade_off_chart(curve)
        if curve is not None and chart is not None:
            count += 1
            account |= {"chart": chart, "trade_off": curve, "csv": csv_link(curve)}


def _families(entry: Mapping[str, Any]) -> list[str]:
    """Returns epsilon for several units together, or nothing where it is not computed."""
    table = of_account(entry)
    return [] if table is None else [round_up(row.epsilon) for row in table.groups]


def audited(audits: Sequence[Mapping[str, Any]], account: str) -> str:
    """Returns the worst verdict on a release about a data set. Bounds of several releases are not
    compared.
    """
    verdicts = {audit["verdict"] for audit in audits if account in audit["accounts"]}
    for word in ("VIOLATED", "cannot tell", "consistent"):
        if word in verdicts:
            return word
    return "none"


def file_row(place: pathlib.Path | str, path: pathlib.Path, what: str) -> list[str]:
    """Returns the place of a released file in its workdir, what it is, and its SHA-256."""
    return [str(place), what, sha256_of(path)]
