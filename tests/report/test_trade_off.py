"""The trade-off curve on the pages of runs and of ledgers."""

import csv
import html
import io
import re
import urllib.parse

import pytest

from jaxdp import report
from jaxdp.privacy import GaussianDpEvent, Ledger, PureDpEvent, unproven
from jaxdp.report import write_ledger_page
from jaxdp.report.past import Past
from jaxdp.report.verification import verify

_LINK = re.compile(r'<a download="trade_off.csv" href="data:text/csv;charset=utf-8,([^"]*)">')


def spent(path, events):
    """Returns a ledger with one account for each list of events."""
    ledger = Ledger(path)
    for name, of_account in events.items():
        terms = {"adjacency": "add_remove", "unit": "patient", "delta": 1e-5}
        ledger.register(name, allow_unproven=True, epsilon=9.0, **terms)
        for event in of_account:
            with ledger.spend(name, event):
                pass
    return ledger


def points_of(page):
    """Returns the points of every CSV file on a page, as a reader of the page has them."""
    tables = []
    for content in _LINK.findall(page):
        text = urllib.parse.unquote(html.unescape(content))
        rows = csv.DictReader(io.StringIO(text))
        tables.append([(float(row["alpha"]), float(row["beta"])) for row in rows])
    return tables


def test_pages_of_runs_and_ledgers_have_the_curve_of_every_account_that_has_one(tmp_path):
    path = tmp_path / "ledger.sqlite"
    events = {
        "scans": [GaussianDpEvent(2.0), PureDpEvent(0.3)],
        "texts": [GaussianDpEvent(4.0)],
        "untouched": [],
        "without proof": [unproven("none yet"), GaussianDpEvent(4.0)],
    }
    with spent(path, events) as ledger:
        curves = [ledger.trade_off(name) for name in ("scans", "texts")]
    exact = [list(zip(curve.alpha, curve.beta, strict=True)) for curve in curves]
    page = report.write(path, tmp_path / "run.html").read_text()
    assert points_of(page) == exact
    assert exact[0] != exact[1]  # the twin: the curve of another account
    assert page.count('<svg class="chart"') == 2
    assert "What an attacker must miss on texts" in page
    assert "Gaussian DP: mu 0.25" in page  # the multiplier is 4
    write_ledger_page(path, tmp_path / "ledger.html")
    assert sorted(points_of((tmp_path / "ledger.html").read_text())) == sorted(exact)

    def rewrite(output, past: Past):
        report.runs.rewrite(path, output, past)

    assert verify(tmp_path / "run.html", rewrite).is_true
    steeper = page.replace("alpha%2C" if "alpha%2C" in page else "alpha,", "alpha,0", 1)
    (tmp_path / "run.html").write_text(steeper)
    assert not verify(tmp_path / "run.html", rewrite).is_true


@pytest.mark.parametrize("events", [{"empty": []}, {"open": [unproven("none yet")]}])
def test_a_page_without_a_curve_has_no_section(tmp_path, events):
    path = tmp_path / "ledger.sqlite"
    spent(path, events).close()
    assert "What an attacker must miss" not in report.write(path, tmp_path / "a.html").read_text()
