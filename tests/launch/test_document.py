"""The report of a workdir with forged files: text stays text, and damage is named."""

import json
import re

import pytest

from jaxdp.files import write_json
from jaxdp.privacy import GaussianDpEvent, Ledger
from jaxdp.report import verification
from launch.lifecycle import cache, document
from tests.launch.forgery import forgeries, put
from tests.report.pages import allows_only_its_style

FORGED = "<script>alert(1)</script>"
BOTH = {"before": 0.5, "after": 0.25}
CHANGE = BOTH | {"gained": 1, "lost": 3}
CURVE = [[0, 0.5], [4, 0.75]]
AUDIT = {"lower": 0.1, "upper": 1.0, "ceiling": 2.0, "delta": 0.0, "confidence": 0.95, "trials": 10}
RESULTS = {
    "pretrain": {
        "images": 60,
        "accuracy": 0.875,
        "tested": 40,
        "judged_on_test": True,
        "noise": CURVE,
    },
    "finetune": {
        **{**CHANGE, "noise_multiplier": 1.5, "epsilon": 1.0, "delta": 1e-5},
        **{
            "tested": 40,
            "steps": 4,
            "method": "dp_sgd",
            "curves": {"accuracy": CURVE, "epsilon": CURVE},
        },
    },
    "recalibrate": {
        **{"shift": "fog", "sources": 2, "epsilon": 1.0, "accuracy": 0.5, "tested": 40},
        **{"ece": BOTH, "brier": BOTH, "reliability": {"before": CURVE, "after": CURVE}},
    },
    "adapt": {
        **{
            "images": 16,
            "epsilon": 4.0,
            "delta": 1e-5,
            "tested": {"fog": 40},
            "accuracy": {"fog": CHANGE},
        },
        "stream": {"adapted": CURVE, "not adapted": CURVE},
    },
    "split": {"images": 8, "directions": 2, "bytes": 96, "epsilon": 8.0, "delta": 1e-5},
    "deploy": {
        "tested": {"fog": 40},
        "models": {"fog": {"deployed": {"accuracy": 0.5, "ece": 0.25, "low": -0.1, "high": 0.1}}},
    },
    "predict": {
        "queries": 4,
        "epsilon": 6.0,
        "delta": 1e-5,
        "epsilon_per_query": 1.0,
        "accuracy": 0.5,
    },
    "certificates": {"without_noise": 0.5, "shares": [[0, 1.0], [1, 0.4]]},
    "audit_adapt": {
        "audits": [
            {
                **AUDIT,
                "method": "counts",
                "verdict": "consistent",
                "accounts": ["data"],
                "release": "adaptation",
            }
        ]
    },
}


@pytest.fixture
def root(tmp_path):
    """Returns the workdir of a finished lifecycle."""
    states = {}
    for stage, result in RESULTS.items():
        folder = tmp_path / "cells" / stage / "key"
        write_json(folder / "row.json", {"result": result, "content": ""})
        (folder / "model.safetensors").write_bytes(b"a model")
        states[stage] = {"status": "done", "message": "", "folder": f"cells/{stage}/key"}
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("data", adjacency="add_remove", unit="image", epsilon=4.0, delta=1e-5)
        with ledger.spend("data", GaussianDpEvent(2.0), label="fine-tuning"):
            pass
    write_json(tmp_path / "config.json", {"study": "lifecycle", "versions": {"jax": "1"}})
    found = {"config": {"ledger": "", "data": {"name": "digits"}}}
    write_json(tmp_path / "result.json", found | {"accounts": ["data"], "stages": states})
    return tmp_path


@pytest.mark.slow
def test_nothing_that_is_forged_becomes_markup(root):
    """Forges every value of every file. A string is shown as text, and refused if a number is
    declared."""
    shown = refused = 0
    document.write(root)  # writes ledger.json
    (root / "ledger.sqlite").unlink()
    rows = sorted(root.glob("cells/*/*/row.json"))
    places = [root / "config.json", root / "result.json", root / "ledger.json", *rows]
    for path in places:
        for where, value in forgeries(path, FORGED):
            try:
                document.write(root)
            except (ValueError, FileNotFoundError) as error:
                refused += 1
                assert str(root) in str(error) and (
                    "Restore it from a copy" in str(error) or where[-1] == "folder"
                )
            else:
                shown += not isinstance(value, int | float)
            for page in root.glob("*.html"):
                assert "<script" not in page.read_text(), (path, where)
                # One forged value stands in each section, and the name of a data set in each table.
                assert page.read_text().count("&lt;script") < 40
    assert refused > 40 and shown > 10
    assert "<script" not in document.write(root).read_text()


def test_names_are_text_too(root):
    path = root / "cells" / "adapt" / "key" / "row.json"
    path.write_text(path.read_text().replace('"fog"', json.dumps(FORGED)))
    assert "Accuracy under &lt;script&gt;" in document.write(root).read_text()


def test_the_page_of_a_lifecycle_is_verified(root):
    page = document.write(root)
    certificates = (root / "certificates.html").read_bytes()

    def write(output, past):
        document.write(root, output, past)

    answer = verification.verify(page, write)
    assert answer.is_true, answer.text
    page.write_text(page.read_text().replace("digits", "letters", 1))
    assert not verification.verify(page, write).is_true
    assert (root / "certificates.html").read_bytes() == certificates


def test_the_policy_allows_the_style_and_nothing_else(root):
    for page in (document.write(root), root / "certificates.html"):
        assert allows_only_its_style(page.read_text())


def test_a_folder_outside_of_the_workdir_is_not_read(root):
    outside = root.parent / "outside"
    write_json(outside / "row.json", {"result": RESULTS["pretrain"]})
    for folder in ("../outside", str(outside)):
        found = json.loads((root / "result.json").read_text())
        put(found, ("stages", "pretrain", "folder"), folder)
        write_json(root / "result.json", found)
        with pytest.raises(
            ValueError, match=r"result\.json names a folder outside of it for 'pretrain'"
        ):
            document.write(root)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["result.json", "cells/adapt/key/row.json"])
def test_a_truncated_file_is_named(root, name):
    path = root / name
    text = path.read_bytes()
    for size in (0, 1, len(text) // 2, len(text) - 3):
        path.write_bytes(text[:size])
        with pytest.raises(
            ValueError, match=rf"{re.escape(str(path))} is damaged: .*Restore it from a copy"
        ):
            document.write(root)
        if path.name == "row.json":
            with pytest.raises(
                ValueError, match=rf"{re.escape(str(path))} is damaged: .* makes it again"
            ):
                cache.find(path.parent)
