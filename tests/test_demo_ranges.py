"""The documentation states the ranges of the demo's results that `benchmarks.demo_ranges`
measured."""

import json
from pathlib import Path

import pytest

from benchmarks.demo_ranges import span

ROOT = Path(__file__).resolve().parent.parent
FOUND = json.loads((ROOT / "benchmarks" / "results" / "demo_ranges.json").read_text())
STATED = {
    "configs/lifecycle_digits.py": [
        "accuracy after public pre-training",
        "accuracy after private fine-tuning",
        "brightened images, fine-tuned: accuracy",
        "brightened images, deployed: accuracy",
        "brightened images, fine-tuned: ECE",
        "brightened images, only recalibrated: ECE",
        "brightened images, deployed: ECE",
    ],
    "docs/tutorials/data_protection_officer.md": [
        "accuracy after public pre-training",
        "accuracy after private fine-tuning",
        "brightened images, fine-tuned: accuracy",
        "brightened images, deployed: accuracy",
        "certified answers that are right",
    ],
}


@pytest.mark.parametrize("path", STATED)
def test_prose_has_the_same_numbers(path):
    text = " ".join((ROOT / path).read_text().split())
    for name in STATED[path]:
        assert span(FOUND["ranges"][name], not name.endswith("ECE")) in text, name
