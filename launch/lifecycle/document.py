"""The report of a lifecycle, made from the workdir alone. certificates.html is a separate file."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxdp.files import understood, write_durably
from jaxdp.privacy import unit_words
from jaxdp.report import Chart, render_page, verdict
from jaxdp.report.exactness import noise_of
from jaxdp.report.past import Past

from .. import document, frame
from . import stages
from .stage import Stage

_REMEDY = (
    "Restore it from a copy, or delete it and run launch.lifecycle again. Paid releases are not "
    "paid again."
)
# The types of what the report reads from result.json and config.json.
_RESULT = {
    "config": {"ledger": str, "data": {"name": str}},
    "accounts": [str],
    "stages": {str: {"status": str, "message": str, "folder": str}},
}
_BOUND = {"versions": {str: str}}


def write(
    workdir: str | os.PathLike[str],
    output: pathlib.Path | None = None,
    past: Past | None = None,
) -> pathlib.Path:
    """Writes report.html, or `output`. Writes certificates.html if the config asks for it, and
    removes it otherwise.

    certificates.html is NOT private.

    Args:
      workdir: The workdir of `launch.lifecycle.run`.
      output: The HTML file, by default report.html in the workdir.
      past: The ledger as it was when a page was written. With it certificates.html stays as it is.

    Returns:
      The path of the report.

    Raises:
      FileNotFoundError: The workdir has no lifecycle.
      ValueError: The lifecycle used another ledger, or a file is damaged.
    """
    root = pathlib.Path(workdir)
    with understood(root, _REMEDY):
        life = Life(root, past=past)
        name = life.config["data"]["name"]
        if past is None:
            _write_certificates(life, name)
        bound = document.checked(root / "config.json", _BOUND, "config", remedy=_REMEDY)
        return document.write(
            root,
            "lifecycle.html.jinja",
            output=output,
            title=f"Privacy report: a model's life on {name}",
            books=life.books,
            released=life.released,
            place=_without_key,
            config=life.config,
            versions=bound["versions"],
            audits=life.audits,
            life=life,
            nothing="No private data set was registered.",
            noise=_noise(life.config),
            grouped=bool(life.config["data"].get("group")),
            percentage=lambda share: f"{100 * share:.0f} %",
        )


def _without_key(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of a stage's file with "*" for its folder, whose name hashes records."""
    return path.parent.with_name("*") / path.name


def _noise(config: Mapping[str, Any]) -> list[str]:
    """Returns what the report says of the noise of the stages."""
    is_exact = {"recalibration": True, "uploads": False, "answers": False}
    for stage, name in (("finetune", "training"), ("adapt", "adaptation")):
        is_exact[name] = config.get(stage, {}).get("exact", False)
    sentences = []
    for kind in (True, False):
        names = [name for name, exact in is_exact.items() if exact == kind]
        if names:
            sentences += noise_of(kind, " and ".join(names))
    return sentences


def _write_certificates(life: "Life", name: str) -> None:
    page = life.root / "certificates.html"
    certificates = life.result("certificates")
    if not certificates:
        page.unlink(missing_ok=True)
        return
    shares = certificates["shares"]
    units = unit_words(life.config["data"].get("unit") or "image").many
    chart = Chart(
        curves={"certified": shares},
        xlabel=f"training {units} added or removed, k",
        ylabel="share of answers that no such change alters",
        top=1.0,
        percent=True,
    )
    content = render_page(
        document.PAGES / "certificates.html.jinja",
        title=f"Certificates without noise: {name}",
        found=certificates,
        half=max((k for k, share in shares if share >= 0.5), default=None),
        chart=chart,
    )
    write_durably(page, content)


def protection(life: "Life") -> list[dict[str, Any]]:
    """Returns a row for each private data set: its verdict, and the worst verdict of attacks."""
    audits = life.audits
    rows = []
    for entry in life.books.entries:
        words = verdict(entry)
        row = {
            "data set": entry["name"],
            "protection": words.word,
            "epsilon": words.epsilon,
            "delta": words.delta,
            "budget": entry["budget"],
            "audits": document.audited(audits, entry["name"]),
        }
        rows.append(row)
    return rows


def accuracies(life: "Life") -> list[dict[str, Any]]:
    """Returns the accuracy on held-out images before and after each stage that changes it.

    "without privacy" is what the same stage reaches without noise, where `config.references.show`
    asks for it.
    """
    references = life.result("references") or {"finetune": None, "adapt": {}}
    rows = []
    if change := life.result("finetune"):
        name = f"fine-tuning on {life.config['data']['name']}"
        rows.append(_change(name, change, references["finetune"]))
    if adapted := life.result("adapt"):
        for shift, change in adapted["accuracy"].items():
            name = f"adaptation to {shift.replace('_', ' ')}"
            rows.append(_change(name, change, references["adapt"].get(shift)))
    return rows


def _change(name: str, change: Mapping[str, float], reference: float | None) -> dict[str, str]:
    without = "not measured" if reference is None else f"{reference:.1%}"
    return {
        "accuracy": name,
        "before": f"{change['before']:.1%}",
        "after": f"{change['after']:.1%}",
        "without privacy": without,
    }


class Life:
    """The stages, results and accounts of a workdir.

    Attributes:
      root: The workdir.
      config: The config of the last run.
      stages: The states of the stages.
      books: The accounts.
    """

    def __init__(
        self,
        root: pathlib.Path,
        result: Mapping[str, Any] | None = None,
        *,
        past: Past | None = None,
    ):
        """Reads a workdir.

        Args:
          root: The workdir.
          result: The content of result.json, if it is not written yet.
          past: The ledger as it was when a page was written.
        """
        path = root / "result.json"
        if result is None and not path.exists():
            raise FileNotFoundError(f"{path} does not exist. Give the workdir of launch.lifecycle.")
        if result is None:
            result = document.checked(path, _RESULT, "lifecycle", remedy=_REMEDY)
        self.root = root
        self.config = result["config"]
        self.stages = result["stages"]
        self._known = {stage.name: stage for stage in stages.known()}
        ledger = pathlib.Path(
            self.config["ledger"] or frame.of_workdir(root) or root / frame.LEDGER
        )
        self.books = document.Books.read(
            root, {"": ledger}, remedy=_REMEDY, names=result["accounts"], past=past
        )

    def is_done(self, stage: str) -> bool:
        """Returns whether a stage is done."""
        return stage in self.stages and self.stages[stage]["status"] == "done"

    def result(self, stage: str) -> dict[str, Any] | None:
        """Returns the result of a stage that is done, otherwise None."""
        if not self.is_done(stage) or stage not in self._known:
            return None
        path = self.folder(stage) / "row.json"
        result: dict[str, Any] = document.checked(path, {"result": dict}, stage, remedy=_REMEDY)[
            "result"
        ]
        with understood(path, _REMEDY):
            if result:  # Certificates that nobody asked for have none.
                document.check(result, self._known[stage].shape, stage)
        return result

    def folder(self, stage: str) -> pathlib.Path:
        """Returns the folder of a stage.

        Raises:
          ValueError: result.json names a folder outside of the workdir.
        """
        folder = self.root / self.stages[stage]["folder"]
        if not folder.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(
                f"{self.root / 'result.json'} names a folder outside of it for {stage!r}. {_REMEDY}"
            )
        return folder

    @property
    def shown(self) -> list[Stage]:
        """The stages that have a part of the report, in the order of these parts."""
        titled = [stage for stage in self._known.values() if stage.title]
        return sorted(titled, key=lambda stage: not stage.opens)

    @property
    def released(self) -> dict[pathlib.Path, str]:
        """What each released file is, by its path."""
        files: dict[pathlib.Path, str] = {}
        for stage in self._known.values():
            if self.is_done(stage.name):
                folder = self.folder(stage.name)
                files |= {folder / name: what for name, what in stage.released.items()}
        return files

    @property
    def audits(self) -> list[dict[str, Any]]:
        """The audits of all releases that were audited."""
        audits: list[dict[str, Any]] = []
        for stage in self._known.values():
            result = self.result(stage.name) if stage.is_audit else None
            if result:
                audits += result["audits"]
        return audits
