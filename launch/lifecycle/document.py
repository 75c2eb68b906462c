"""The report of a lifecycle, made from the workdir alone. `certificates.html` is a separate file.

`_SHAPES` states the types of everything that is read from a file.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxdp.files import understood, write_durably
from jaxdp.report import Chart, format_table, render_page, verdict

from .. import document

_REMEDY = "Restore it from a copy, or delete it and run launch.lifecycle again. Paid releases are not paid again."
_PAIR = {"before": float, "after": float}
_CHANGE = {**_PAIR, "gained": int, "lost": int}
_CURVE = [[float]]
# The types of each file by name.
_SHAPES: Mapping[str, Any] = {
    "lifecycle": {
        "version": str,
        "versions": {str: str},
        "config": {"ledger": str, "data": {"name": str}},
        "accounts": [str],
        "stages": {str: {"status": str, "message": str, "folder": str}},
    },
    "pretrain": {
        "images": int,
        "accuracy": float,
        "tested": int,
        "judged_on_test": bool,
        "noise": _CURVE,
    },
    "finetune": {
        **dict.fromkeys(("noise_multiplier", "epsilon", "delta"), float),
        **_CHANGE,
        **{
            "tested": int,
            "steps": int,
            "method": str,
            "curves": {"accuracy": _CURVE, "epsilon": _CURVE},
        },
    },
    "recalibrate": {
        **{"shift": str, "sources": int, "epsilon": float, "accuracy": float, "tested": int},
        **{"ece": _PAIR, "brier": _PAIR, "reliability": {"before": _CURVE, "after": _CURVE}},
    },
    "adapt": {
        **{
            "images": int,
            "epsilon": float,
            "delta": float,
            "tested": {str: int},
            "accuracy": {str: _CHANGE},
        },
        "stream": {"adapted": _CURVE, "not adapted": _CURVE},
    },
    "split": {
        **dict.fromkeys(("images", "directions", "bytes"), int),
        **dict.fromkeys(("epsilon", "delta"), float),
    },
    "deploy": {
        "tested": {str: int},
        "models": {str: {str: dict.fromkeys(("accuracy", "ece", "low", "high"), float)}},
    },
    "predict": {
        "queries": int,
        **dict.fromkeys(("epsilon", "delta", "epsilon_per_query", "accuracy"), float),
    },
    "certificates": {"without_noise": float, "shares": _CURVE},
    "audit": {
        "audits": [
            {
                **dict.fromkeys(("lower", "upper", "ceiling", "delta", "confidence"), float),
                **{"trials": int, "method": str, "verdict": str, "accounts": [str], "release": str},
            }
        ]
    },
}
# What each stage releases.
_RELEASED = {
    "pretrain": {"backbone.safetensors": "public backbone"},
    "finetune": {"model.safetensors": "fine-tuned model"},
    "recalibrate": {"confidence.safetensors": "its confidence"},
    "adapt": {"adapted.safetensors": "adapted model"},
    "split": {"upload.safetensors": "the clinic's upload"},
    "deploy": {"deployed.safetensors": "model in use"},
    "predict": {"released.safetensors": "certified answers"},
}


def write(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Writes report.html. Writes certificates.html if the config asks for it, and removes it
    otherwise.

    certificates.html is NOT private.

    Args:
      workdir: The workdir of `launch.lifecycle.run`.

    Returns:
      The path of the report.

    Raises:
      FileNotFoundError: The workdir has no lifecycle.
      ValueError: The lifecycle used another ledger, or a file is damaged.
    """
    root = pathlib.Path(workdir)
    with understood(root, _REMEDY):
        life = Life(root)
        data = life.config["data"]["name"]
        _write_certificates(life, data)
        return document.write(
            root,
            "lifecycle.html.jinja",
            title=f"Privacy report: a model's life on {data}",
            books=life.books,
            released={
                life.folder(stage) / name: what
                for stage, files in _RELEASED.items()
                if life.done(stage)
                for name, what in files.items()
            },
            config=life.config,
            versions=life.versions,
            audits=life.audits,
            life=life,
            nothing="No private data set was registered.",
            grouped=bool(life.config["data"].get("group")),
            percentage=lambda share: f"{100 * share:.0f} %",
        )


def _write_certificates(life: "Life", data: str) -> None:
    apart = life.root / "certificates.html"
    if not (found := life.result("certificates")):
        return apart.unlink(missing_ok=True)
    half = max((k for k, share in found["shares"] if share >= 0.5), default=None)
    title, shares = f"Certificates without noise: {data}", {"certified": found["shares"]}
    chart = Chart(
        curves=shares,
        xlabel=f"training {life.config['data'].get('unit') or 'image'}s added or removed, k",
        ylabel="share of answers that no such change alters",
        top=1.0,
        percent=True,
    )
    template = document.PAGES / "certificates.html.jinja"
    write_durably(apart, render_page(template, title=title, found=found, half=half, chart=chart))


def summary(workdir: str | os.PathLike[str]) -> str:
    """Returns a table for the terminal: the spends and audits of every private data set."""
    life = Life(pathlib.Path(workdir))
    rows = [
        {
            "data set": entry["name"],
            "protection": verdict(entry).word,
            "epsilon": verdict(entry).epsilon,
            "delta": verdict(entry).delta,
            "budget": entry["budget"],
            "audits": document.audited(life.audits, entry["name"]),
        }
        for entry in life.books.entries
    ]
    return format_table(rows)


class Life:
    """The stages, results and accounts of a workdir."""

    def __init__(self, root: pathlib.Path):
        path = root / "lifecycle.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist. Give the workdir of launch.lifecycle.")
        found = _read(path, "lifecycle")
        self.root, self.config, self.stages, self.versions = (
            root,
            found["config"],
            found["stages"],
            found["versions"],
        )
        ledger = pathlib.Path(self.config["ledger"] or root / "ledger.sqlite")
        self.books = document.Books(root, {"": ledger}, remedy=_REMEDY, names=found["accounts"])

    def done(self, stage: str) -> bool:
        """Returns whether a stage is done."""
        return stage in self.stages and self.stages[stage]["status"] == "done"

    def result(self, stage: str) -> dict[str, Any] | None:
        """Returns the result of a stage that is done, otherwise None."""
        return _read(self.folder(stage) / "stage.json", stage) if self.done(stage) else None

    def folder(self, stage: str) -> pathlib.Path:
        """Returns the folder of a stage.

        Raises:
          ValueError: lifecycle.json names a folder outside of the workdir.
        """
        folder = self.root / self.stages[stage]["folder"]
        if not folder.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(
                f"{self.root / 'lifecycle.json'} names a folder outside of it for {stage!r}. "
                f"{_REMEDY}"
            )
        return folder

    @property
    def audits(self) -> list[dict[str, Any]]:
        """The audits of all releases that were audited."""
        results = [self.result(name) for name in self.stages if name.startswith("audit_")]
        return [audit for result in results if result for audit in result["audits"]]


def _read(path: pathlib.Path, what: str) -> Any:
    """Returns the checked content of a file of the workdir. For a stage this is its result, or {}
    without one.
    """
    shape = _SHAPES["audit" if what.startswith("audit_") else what]
    if path.name != "stage.json":
        return document.checked(path, shape, what, remedy=_REMEDY)
    found = document.checked(path, {"result": dict}, what, remedy=_REMEDY)["result"]
    with understood(path, _REMEDY):
        if found:
            document.check(found, shape, what)
    return found
