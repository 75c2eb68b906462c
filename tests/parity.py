"""Compares with publishers and other libraries, and writes the page: `python -m tests.parity
--output FILE`.

It runs the tests marked `parity`, which record what they compare. `make parity` installs what they
need."""

import argparse
import importlib.metadata
import pathlib
import platform
import sys

import pytest

from jaxdp.report import format_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = (
    "jax",
    "flax",
    "safetensors",
    "torch",
    "torchvision",
    "transformers",
    "timm",
    "datasets",
    "netcal",
    "lpips",
)
HEAD = """# Parity with publishers

`make parity` writes this page. It builds networks of torch, transformers and timm with random weights and compares
them with ours. No weights are downloaded. `make test` compares with stored logits of the same libraries instead.
Sources are read from data sets of torch and Hugging Face and compared with the records that were written.
Metrics are compared with scikit-learn, netcal, and lpips, the package of LPIPS' authors.
"""  # noqa: E501


class Results:
    """The pytest plugin that collects a row for each test, and the docstring of each test
    function."""

    def __init__(self) -> None:
        """Starts without rows."""
        self.rows: dict[str, list[dict[str, str]]] = {}
        self.titles: dict[str, str] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Keeps the docstring of a test function as the title of its table."""
        if isinstance(item, pytest.Function):
            name = item.nodeid.partition("[")[0]
            self.titles[name] = (item.function.__doc__ or item.originalname).strip()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the row of a test that ran, or of one that failed before it ran."""
        if report.when == "call" or not report.passed:
            name, _, case = report.nodeid.partition("[")
            row = {
                "case": case.rstrip("]") or "all",
                **dict(report.user_properties),
                "result": report.outcome,
            }
            self.rows.setdefault(name, []).append(row)


def page(results: Results) -> str:
    """Returns the page of a run."""
    versions = {"Python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in PACKAGES
    }
    rows = [{"package": name, "version": version} for name, version in versions.items()]
    parts = [HEAD.strip(), format_table(rows, style="markdown")]
    for name, rows in results.rows.items():
        parts += [f"## {results.titles[name].rstrip('.')}", format_table(rows, style="markdown")]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Runs the tests and writes the page, also if some fail. Returns the exit status of pytest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=pathlib.Path, required=True)
    output = parser.parse_args().output
    results = Results()
    status = pytest.main(["-m", "parity and not download", str(ROOT / "tests")], plugins=[results])
    output.write_text(page(results))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
