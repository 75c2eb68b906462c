"""The report of a lifecycle: one HTML file without scripts or links, made from the workdir alone.

`_SHAPES` states the types of everything that is read from a file. The templates in `pages` escape their inputs. The
report never contains a value that is computed from private images without noise. `certificates.html` is a separate
file.
"""

import base64
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.files import read_json, understood, write_durably, write_json
from jaxdp.privacy import Ledger, SelfComposedDpEvent, epsilon
from jaxdp.privacy.events import from_json
from jaxdp.report import format_table, render_page

_FOLDER = pathlib.Path(__file__).parent / "pages"
# The difference between neighbouring data sets, and the question of an attacker.
_NEIGHBOURS = {
    "add_remove": ("adding or removing one {}", "whether a certain {} was in it"),
    "replace_one": ("replacing one {} by another", "which of two possible {}s was in it"),
    "zero_out": ("blanking out one {}", "whether a certain {} was blank"),
}
_REMEDY = "Restore it from a copy, or delete it and run launch.lifecycle again. Paid releases are not paid again."
_BOTH = {"before": float, "after": float}
# The types of each file by name. `{str: ...}` is any name, a list any number, a tuple a choice.
_SHAPES: Mapping[str, Any] = {
    "lifecycle": {
        "version": str,
        "config": {"ledger": str, "data": {"name": str}},
        "accounts": [str],
        "stages": {str: {"status": str, "message": str, "folder": str}},
    },
    "ledger": [
        {
            **dict.fromkeys(("name", "adjacency", "unit", "headline"), str),
            "delta": float,
            **dict.fromkeys(("budget", "proven_epsilon"), (float, type(None))),
            "open": list,
            "spends": [
                {
                    **{"event": object, "spends": int, "description": str, "first_at": str, "open": object},
                    **dict.fromkeys(("first_label", "last_label"), (str, type(None))),
                }
            ],
        }
    ],
    "pretrain": {"images": int, "accuracy": float, "judged_on_test": bool},
    "finetune": {
        **dict.fromkeys(("before", "accuracy", "noise_multiplier", "epsilon", "delta"), float),
        **{"steps": int, "method": str},
    },
    "recalibrate": {
        **{"shift": str, "sources": int, "epsilon": float, "accuracy": float},
        **{"ece": _BOTH, "brier": _BOTH},
    },
    "adapt": {"images": int, "epsilon": float, "delta": float, "accuracy": {str: _BOTH}},
    "split": {
        **dict.fromkeys(("images", "directions", "bytes"), int),
        **dict.fromkeys(("epsilon", "delta"), float),
    },
    "deploy": {"ece": {str: _BOTH}},
    "predict": {"queries": int, **dict.fromkeys(("epsilon", "delta", "epsilon_per_query", "accuracy"), float)},
    "certificates": {"without_noise": float, "shares": [[float]]},
    "audit": {
        "audits": [
            {
                **dict.fromkeys(("lower", "upper", "ceiling", "delta", "confidence"), float),
                **{"trials": int, "method": str, "verdict": str, "accounts": [str], "release": str},
            }
        ]
    },
}


def write(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Writes report.html. Writes certificates.html if the config asks for it, and removes it otherwise.

    The same workdir gives the same bytes. certificates.html is NOT private.

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
        apart, page = root / "certificates.html", root / "report.html"
        if found := life.result("certificates"):
            half = max((k for k, share in found["shares"] if share >= 0.5), default=None)
            title = f"Certificates without noise: {data}"
            write_durably(
                apart, render_page(_FOLDER / "certificates.html.jinja", title=title, life=life, found=found, half=half)
            )
        else:
            apart.unlink(missing_ok=True)
        facts = {
            "title": f"A private model's life: {data}",
            "accounts": [_account(names, entry, life.audited(entry["name"])) for names, entry in life.grouped],
            "spends": [_spend(names, entry, row) for names, entry in life.grouped for row in entry["spends"]],
            "unfinished": sum(len(entry["open"]) for entry in life.accounts),
            "config": json.dumps(life.config, indent=1),
            "unit": life.accounts[0]["unit"],
            "grouped": bool(life.config["data"].get("group")),
        }
        write_durably(page, render_page(_FOLDER / "report.html.jinja", life=life, **facts))
        return page


def summary(workdir: str | os.PathLike[str]) -> str:
    """Returns a table for the terminal: the spends and audits of every private data set."""
    life = Life(pathlib.Path(workdir))
    rows = [
        {
            "data set": entry["name"],
            "epsilon": entry["headline"],
            "delta": entry["delta"],
            "budget": entry["budget"],
            "audits": life.audited(entry["name"]),
        }
        for entry in life.accounts
    ]
    return format_table(rows)


class Life:
    """The stages, results and accounts of a workdir."""

    def __init__(self, root: pathlib.Path):
        path = root / "lifecycle.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist. Give the workdir of launch.lifecycle.")
        found = _read(path, "lifecycle")
        self.root, self.version, self.config, self.stages = root, found["version"], found["config"], found["stages"]
        self.accounts = _accounts(root, self.config["ledger"], found["accounts"])

    def result(self, stage: str) -> dict[str, Any] | None:
        """Returns the result of a stage that is done, otherwise None."""
        state = self.stages.get(stage)
        if state is None or state["status"] != "done":
            return None
        return _read(self._folder(stage) / "stage.json", stage)

    def figure(self, stage: str, name: str) -> str:
        """Returns a figure of a stage as the source of an image."""
        return f"data:image/png;base64,{base64.b64encode((self._folder(stage) / name).read_bytes()).decode()}"

    def _folder(self, stage: str) -> pathlib.Path:
        folder = self.root / self.stages[stage]["folder"]
        if not folder.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"{self.root / 'lifecycle.json'} names a folder outside of it for {stage!r}. {_REMEDY}")
        return folder

    @property
    def grouped(self) -> list[tuple[str, dict[str, Any]]]:
        """The (names, account) pairs of the data sets. Equal accounts, for example of hospitals, form one group."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for entry in self.accounts:
            spends = [{key: row[key] for key in row if key not in ("first_at", "last_at")} for row in entry["spends"]]
            alike = {key: entry[key] for key in ("adjacency", "unit", "budget", "delta", "headline")}
            groups.setdefault(json.dumps([alike, spends]), []).append(entry)
        return [(_together([entry["name"] for entry in group]), group[0]) for group in groups.values()]

    @property
    def audits(self) -> list[dict[str, Any]]:
        """The audits of all releases that were audited."""
        results = [self.result(name) for name in self.stages if name.startswith("audit_")]
        return [audit for result in results if result for audit in result["audits"]]

    def audited(self, account: str) -> str:
        """Returns the worst verdict on a release about a data set. Bounds of several releases are not compared."""
        found = {audit["verdict"] for audit in self.audits if account in audit["accounts"]}
        return next((verdict for verdict in ("VIOLATED", "cannot tell", "consistent") if verdict in found), "none")


def _accounts(root: pathlib.Path, ledger: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the accounts from the ledger. If the ledger is missing, returns the copy of the last run."""
    path = pathlib.Path(ledger) if ledger else root / "ledger.sqlite"
    copy = root / "ledger.json"
    if path.exists():
        with Ledger(path, read_only=True) as opened:
            entries = {entry["name"]: entry for entry in opened.report()["datasets"]}
        if missing := [name for name in names if name not in entries]:
            raise ValueError(f"{path} has no {', '.join(missing)}. It is not the ledger of this lifecycle.")
        write_json(copy, [entries[name] for name in names])
    return _read(copy, "ledger")


def _read(path: pathlib.Path, what: str) -> Any:
    """Returns the checked content of a file of the workdir. For a stage this is its result, or {} without one."""
    stage = path.name == "stage.json"
    shape = _SHAPES["audit" if what.startswith("audit_") else what]
    found = read_json(path, remedy=_REMEDY, kind=type(shape), keys=("result",) if stage else ())
    with understood(path, _REMEDY):
        if stage and not (found := found["result"]):
            return {}
        _check(found, shape, what)
        for entry in found if what == "ledger" else ():
            _check(_NEIGHBOURS.get(entry["adjacency"]), tuple, "the adjacency")
            for row in entry["spends"]:
                from_json(json.dumps(row["event"]))
    return found


def _check(value: Any, shape: Any, name: str) -> None:
    """Raises TypeError for a value that is not of a shape. Fields that the shape does not name are ignored."""
    if isinstance(shape, dict):
        _check(value, dict, name)
        for field, inner in shape.items():
            for key in value if field is str else (field,):
                if key not in value:
                    raise TypeError(f"{name} lacks {key!r}")
                _check(value[key], inner, f"{name}.{key}")
    elif isinstance(shape, list):
        _check(value, list, name)
        for item in value:
            _check(item, shape[0], f"an entry of {name}")
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        allowed = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds and object not in kinds):
            raise TypeError(f"{name} is a {type(value).__name__}, not a {kinds[0].__name__}")


# --- What the templates show ------------------------------------------------------------------------------------------


def _account(names: str, entry: Mapping[str, Any], audited: str) -> dict[str, Any]:
    spent, budget, delta = entry["proven_epsilon"], entry["budget"], entry["delta"]
    untouched = entry["headline"] == "0"
    bounded = math.exp(min(spent or 0.0, 700))
    change, question = (text.format(entry["unit"]) for text in _NEIGHBOURS[entry["adjacency"]])
    return {
        "names": names,
        "adjacency": entry["adjacency"],
        "headline": entry["headline"],
        "proven": spent is not None and "inf" not in entry["headline"],
        "delta": f"{delta:g}",
        "change": change,
        "question": question,
        "guesses": _ceil_percent((bounded + delta) / (1 + bounded)),
        "budget": "none" if budget is None else f"{budget:g}",
        "used": 0.0 if untouched or not budget else min((spent or math.inf) / budget, 1.0),
        "audited": audited,
    }


def _spend(names: str, entry: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    event = SelfComposedDpEvent(from_json(json.dumps(row["event"])), row["spends"])
    alone = epsilon(event, delta=entry["delta"], adjacency=entry["adjacency"])
    labels = dict.fromkeys(label for label in (row["first_label"], row["last_label"]) if label)
    return [
        names,
        " … ".join(labels),
        f"{row['spends']} × {row['description']}",
        f"{alone:.6g}",
        f"{row['first_at'][:16].replace('T', ' ')} UTC",
        row["open"] or "",
    ]


def _ceil_percent(value: float) -> str:
    """Returns a percentage, rounded up. A report must not understate the risk."""
    digits = 1 if value < 0.99 else 3
    return f"{min(math.ceil(100 * value * 10**digits) / 10**digits, 100):g}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _together(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names) + (", each" if len(names) > 1 else "")
    return f"{names[0]} … {names[-1]} ({len(names)} alike), each"
