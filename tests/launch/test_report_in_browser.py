"""The report in a browser: it shows text and figures and fetches nothing."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from jaxdp.files import write_json
from jaxdp.privacy import GaussianDpEvent, Ledger
from jaxdp.report import round_up
from launch.lifecycle import document

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)


@pytest.fixture
def report(tmp_path):
    """Writes the report of a lifecycle whose pre-training is done and whose fine-tuning failed
    after it had paid."""
    folder = tmp_path / "cells" / "pretrain" / "key"
    result = {
        "images": 60,
        "accuracy": 0.875,
        "tested": 40,
        "judged_on_test": True,
        "noise": [[0, 0.9], [1, 0.2]],
    }
    write_json(folder / "row.json", {"result": result})
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register(
            "digits/private", adjacency="add_remove", unit="image", epsilon=4.0, delta=1e-5
        )
        with ledger.spend("digits/private", GaussianDpEvent(2.0), label="fine-tuning"):
            pass
    states = {
        "pretrain": {"status": "done", "message": "", "folder": "cells/pretrain/key"},
        "finetune": {
            "status": "failed",
            "message": "RuntimeError: a <b>bold</b> claim",
            "folder": "",
        },
    }
    found = {
        "config": {"ledger": "", "data": {"name": "digits"}},
        "accounts": ["digits/private"],
        "stages": states,
    }
    write_json(tmp_path / "config.json", {"study": "lifecycle", "versions": {"jax": "1"}})
    write_json(tmp_path / "result.json", found)
    return document.write(tmp_path)


def browse(report, *flags):
    profile = report.parent / "profile"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ]
    return subprocess.run(
        [BROWSER, *options, "--virtual-time-budget=5000", *flags, report.as_uri()],
        cwd=report.parent,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    ).stdout


@pytest.mark.slow
def test_the_text_is_in_the_page(report):
    page = browse(report, "--dump-dom")
    with Ledger(report.parent / "ledger.sqlite") as ledger:
        assert f">{round_up(ledger.epsilon('digits/private'))}</span>" in page
    assert "<h2>The verdict</h2>" in page and "<h2>What is not protected</h2>" in page
    assert "a &lt;b&gt;bold&lt;/b&gt; claim" in page and "87.5 %" in page


@pytest.mark.slow
def test_the_page_is_not_blank(report):
    browse(report, f"--screenshot={report.parent / 'page.png'}", "--window-size=1100,2600")
    with Image.open(report.parent / "page.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    ink = (pixels < 128).any(axis=2)
    assert 0.005 < ink.mean() < 0.3  # text, and neither a blank page nor a black one
    blue = (np.abs(pixels - (0, 114, 178)).max(axis=2) < 8).sum()
    assert blue > 300  # the figure's curve, and a link


@pytest.mark.slow
def test_the_report_prints(report):
    browse(report, f"--print-to-pdf={report.parent / 'report.pdf'}")
    assert (report.parent / "report.pdf").read_bytes().startswith(b"%PDF")
    assert json.loads((report.parent / "config.json").read_text())["study"] == "lifecycle"
