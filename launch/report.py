"""Writes the report of a run, from its workdir alone: python -m launch.report WORKDIR.

The workdir is of a lifecycle or of one launcher. Every launcher writes its report at its end.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.files import read_json, understood

from . import document

_REMEDY = "Restore it from a copy, or delete it and run the same command again. Paid releases are not paid again."
_CURVE = [[float]]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a report tells about the runs of one study.

    Attributes:
      title: What the run did.
      bought: The part of run.html.jinja about the results.
      shape: The types of result.json that this part reads.
      released: What the released files are, by their patterns in the workdir.
      ledgers: The patterns of the ledgers.
      nothing: The verdict without an account.
    """

    title: str
    bought: str = "tables"
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    released: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ledgers: Sequence[str] = ("ledger.sqlite",)
    nothing: str = "No ledger was charged."


_NO_RECORDS = "No private record was read, so there is nothing to protect."
_KINDS = {
    "finetune": _Kind(
        "private fine-tuning",
        "finetune",
        {
            **dict.fromkeys(("before", "after", "epsilon", "delta", "noise_multiplier"), float),
            **dict.fromkeys(("gained", "lost", "tested", "steps"), int),
            **{"method": str, "dataset": str, "curves": {"accuracy": _CURVE, "epsilon": _CURVE}},
        },
        {"params.safetensors": "fine-tuned model", "pretrained.safetensors": "public backbone"},
    ),
    "predict": _Kind(
        "private answers",
        "predict",
        {
            **{"dataset": str, "queries": int, "tested": int},
            **dict.fromkeys(("epsilon", "delta", "epsilon_per_query"), float),
            "released": {"per_query": float, "student": float},
        },
        {
            "answers.npz": "private answers",
            "student.safetensors": "student of the answers",
            "network.safetensors": "frozen public network",
        },
    ),
    "pretrain": _Kind(
        "public pre-training",
        "pretrain",
        {
            **{"accuracy": float, "method": str},
            "provenance": {
                role: {"name": str, "fingerprint": str, "examples": int}
                for role in ("train", "test")
            },
        },
        {"params.safetensors": "public backbone"},
        nothing=_NO_RECORDS,
    ),
    "adapt": _Kind("test-time adaptation, compared"),
    "recalibrate": _Kind(
        "recalibration, compared", released={"source.safetensors": "public classifier"}
    ),
    "split": _Kind(
        "Split Adaptation, compared", released={"backbone.safetensors": "model of the server"}
    ),
    "lm": _Kind(
        "private training of a language model", released={"params.safetensors": "language model"}
    ),
    "curve": _Kind(
        "accuracy over epsilon",
        released={"cells/*/*/params.safetensors": "a model of its own"},
        ledgers=("cells/*/*/ledger.sqlite",),
    ),
    "table": _Kind("private fine-tuning, compared", ledgers=("cells/**/ledger.sqlite",)),
    "split client": _Kind(
        "the client of Split Adaptation",
        "client",
        {"mode": str, "bytes": int, "queries": int},
        {"upload/*": "upload", "queries/*": "representations of the queries"},
    ),
    "split server": _Kind(
        "the server of Split Adaptation",
        "server",
        {"mode": str, "bytes": int, "queries": int},
        {"backbone.safetensors": "public model", "adapted-*.safetensors": "adapted backend"},
        nothing="This party has no private record. The client's ledger has what its upload cost.",
    ),
}


def write(
    workdir: str | os.PathLike[str], *, ledger: str | os.PathLike[str] | None = None
) -> pathlib.Path:
    """Writes report.html in the workdir of a lifecycle or of a finished run.

    Args:
      workdir: The workdir.
      ledger: The ledger, if the run was told to use another one than its workdir's.

    Raises:
      FileNotFoundError: The workdir has no lifecycle, or no run that is finished.
      ValueError: A file is damaged.
    """
    root = pathlib.Path(workdir)
    if (root / "lifecycle.json").exists():
        from .lifecycle import document as life

        return life.write(root)
    for name in ("config.json", "result.json"):
        if not (root / name).exists():
            raise FileNotFoundError(
                f"{root / name} does not exist. Give the workdir of a lifecycle, or of a run that "
                "is finished."
            )
    shape = {"study": str, "config": dict, "versions": {str: str}}
    bound = document.checked(root / "config.json", shape, "config", remedy=_REMEDY)
    config, kind = bound["config"], _KINDS.get(bound["study"], _Kind(bound["study"]))
    with understood(root, _REMEDY):
        found = (
            document.checked(root / "result.json", dict(kind.shape), "result", remedy=_REMEDY)
            if kind.shape
            else {}
        )
        return document.write(
            root,
            "run.html.jinja",
            title=f"Privacy report: {kind.title}",
            books=document.Books(root, _ledgers(root, kind, ledger), remedy=_REMEDY),
            released={
                path: what
                for pattern, what in kind.released.items()
                for path in sorted(root.glob(pattern))
            },
            config=config,
            versions=bound["versions"],
            bought=kind.bought,
            nothing=kind.nothing,
            found=found,
            tables=_tables(root) if kind.bought == "tables" else {},
            benchmark=bool(config.get("public_benchmark")),
            references=bool(config.get("references")),
        )


def _ledgers(
    root: pathlib.Path, kind: _Kind, ledger: str | os.PathLike[str] | None
) -> dict[str, pathlib.Path]:
    if ledger is not None:
        return {"": pathlib.Path(ledger)}
    found = [path for pattern in kind.ledgers for path in sorted(root.glob(pattern))]
    if found == [root / "ledger.sqlite"]:
        return {"": found[0]}
    return {f"{'/'.join(path.parent.relative_to(root).parts[1:])}: ": path for path in found}


def _tables(root: pathlib.Path) -> dict[str, Any]:
    """Returns the tables of a study as (headings, rows) of texts, or as a paragraph, by their
    titles.
    """
    path = root / "tables.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = {}
    for title, rows in read_json(path, remedy=_REMEDY).items():
        if isinstance(rows, str):
            found[title] = rows
            continue
        document.check(rows, [{str: object}], "a table")
        headings = list(dict.fromkeys(key for row in rows for key in row))
        found[title] = headings, [[_cell(row.get(key)) for key in headings] for row in rows]
    return found


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str]) -> None:
    """Writes WORKDIR/report.html."""
    if len(argv) != 2:
        raise ValueError("give the workdir of one run: python -m launch.report WORKDIR.")
    print(write(argv[1]))


if __name__ == "__main__":
    from . import frame

    frame.start(main)
