"""The report of a lifecycle: one HTML file without scripts or links, made from what is in the workdir alone.

What is read from a file is of the type that `_SHAPES` states. What enters a page is escaped, unless it is `_Html`.
What reads private images without noise is never in it: `certificates.html` is a file of its own.
"""

import base64
import hashlib
import html
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.files import read_json, understood, write_durably, write_json
from jaxdp.privacy import Ledger, SelfComposedDpEvent, epsilon
from jaxdp.privacy.events import from_json
from jaxdp.report import format_table

# What a neighbouring data set differs in, and what somebody would like to know.
_NEIGHBOURS = {
    "add_remove": ("adding or removing one {}", "whether a certain {} was in it"),
    "replace_one": ("replacing one {} by another", "which of two possible {}s was in it"),
    "zero_out": ("blanking out one {}", "whether a certain {} was blank"),
}
_REMEDY = "Restore it from a copy, or delete it and run launch.lifecycle again: what it paid for is not paid again."
_BOTH = {"before": float, "after": float}
# What is read of each file: types by name; `{str: ...}` is any name, a list any number, a tuple one or the other.
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
    """Writes report.html, the same bytes for the same workdir; and certificates.html if the config asks for it.

    certificates.html is NOT private. It is removed if the config no longer asks for it.

    Args:
      workdir: of `launch.lifecycle.run`.

    Returns:
      The path of the report.

    Raises:
      FileNotFoundError: there is no lifecycle in the workdir.
      ValueError: its ledger is not the one that the lifecycle used, or a file is damaged.
    """
    root = pathlib.Path(workdir)
    with understood(root, _REMEDY):
        life = _Life(root)
        apart = root / "certificates.html"
        if found := life.result("certificates"):
            _put(apart, _certificates(life, found))
        else:
            apart.unlink(missing_ok=True)
        return _put(root / "report.html", _report(life))


def _put(path: pathlib.Path, text: str) -> pathlib.Path:
    write_durably(path, text.encode())
    return path


def summary(workdir: str | os.PathLike[str]) -> str:
    """What every private data set paid, and what attacks found, for a terminal."""
    life = _Life(pathlib.Path(workdir))
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


class _Life:
    """What the workdir says: stages, results, accounts."""

    def __init__(self, root: pathlib.Path):
        path = root / "lifecycle.json"
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}; give the workdir that launch.lifecycle was given.")
        found = _read(path, "lifecycle")
        self.root, self.version, self.config, self.stages = root, found["version"], found["config"], found["stages"]
        self.accounts = _accounts(root, self.config["ledger"], found["accounts"])

    def result(self, stage: str) -> dict[str, Any] | None:
        """Of a stage that is done."""
        state = self.stages.get(stage)
        if state is None or state["status"] != "done":
            return None
        return _read(self._folder(stage) / "stage.json", stage)

    def figure(self, stage: str, name: str, caption: str) -> "_Html":
        data = base64.b64encode((self._folder(stage) / name).read_bytes()).decode()
        image = f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        return _Html(f"<figure>{image}<figcaption>{_t(caption)}</figcaption></figure>")

    def _folder(self, stage: str) -> pathlib.Path:
        folder = self.root / self.stages[stage]["folder"]
        if not folder.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"{self.root / 'lifecycle.json'} names a folder outside of it for {stage!r}. {_REMEDY}")
        return folder

    @property
    def grouped(self) -> list[tuple[str, dict[str, Any]]]:
        """(names, account) of the data sets; those with equal accounts, as hospitals may have, are one."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for entry in self.accounts:
            spends = [{key: row[key] for key in row if key not in ("first_at", "last_at")} for row in entry["spends"]]
            alike = {key: entry[key] for key in ("adjacency", "unit", "budget", "delta", "headline")}
            groups.setdefault(json.dumps([alike, spends]), []).append(entry)
        return [(_together([entry["name"] for entry in group]), group[0]) for group in groups.values()]

    @property
    def audits(self) -> list[dict[str, Any]]:
        """Of the releases that were audited."""
        results = [self.result(name) for name in self.stages if name.startswith("audit_")]
        return [audit for result in results if result for audit in result["audits"]]

    def audited(self, account: str) -> str:
        """The worst verdict on a release about a data set. Bounds of several releases are not compared."""
        found = {audit["verdict"] for audit in self.audits if account in audit["accounts"]}
        return next((verdict for verdict in ("VIOLATED", "cannot tell", "consistent") if verdict in found), "none")


def _accounts(root: pathlib.Path, ledger: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """From the ledger; where a shared one is out of reach, as it was after the last run."""
    path = pathlib.Path(ledger) if ledger else root / "ledger.sqlite"
    copy = root / "ledger.json"
    if path.exists():
        with Ledger(path, read_only=True) as opened:
            entries = {entry["name"]: entry for entry in opened.report()["datasets"]}
        if missing := [name for name in names if name not in entries]:
            raise ValueError(f"{path} knows no {', '.join(missing)}: it is not the ledger of this lifecycle.")
        write_json(copy, [entries[name] for name in names])
    return _read(copy, "ledger")


def _read(path: pathlib.Path, what: str) -> Any:
    """What a file of the workdir says, of the shape that `_SHAPES` states; of a stage its result, {} for none."""
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
    """Raises TypeError for a value that is not of a shape; fields that the shape does not name are not looked at."""
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


# --- The pages ------------------------------------------------------------------------------------------------------


def _report(life: _Life) -> str:
    title = f"A private model's life: {life.config['data']['name']}"
    parts = [
        _tag("h1", title),
        _small(f"Written by jaxdp {life.version} from the workdir of one lifecycle."),
        _section("In plain words", *_plain_words(life)),
        _section("What each data set paid", *_budgets(life)),
        _section("What spent it", *_spends(life)),
        _section("What attacks found", *_attacks(life)),
        _section("What came of it", *_quality(life)),
        _section("What is not protected", *_unprotected(life)),
        _section("Stages", *_stages(life)),
    ]
    return _page(title, parts)


def _certificates(life: _Life, found: Mapping[str, Any]) -> str:
    """The page of what the stage `certificates` found, which is not private."""
    title = f"Certificates without noise: {life.config['data']['name']}"
    warning = (
        "This page is NOT private: it is computed from the private images without noise, nothing paid for it, and it "
        "must not be given to anybody who may not see these images."
    )
    half = max((k for k, share in found["shares"] if share >= 0.5), default=None)
    words = (
        f"Without noise the linear model of the certified answers is right on {_p(found['without_noise'])} of the test "
        "images. "
    )
    words += (
        "No distance is certified for half of them."
        if half is None
        else f"For half of them no {half} changed training images alter the answer."
    )
    parts = [
        _tag("p", _tag("strong", warning)),
        _tag("h1", title),
        _tag("p", words),
        life.figure("certificates", "certified.png", "Certified share of answers over k. Not private."),
    ]
    return _page(title, parts)


def _page(title: str, parts: Sequence[str]) -> str:
    style = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{_t(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(map(_t, parts)) + "\n</body>\n</html>\n"
    )


def _plain_words(life: _Life) -> list[str]:
    intro = (
        "Several parties let a model learn from their images without having them published. What was released instead "
        "(model parameters, noisy counts, noisy answers) was computed with random noise, and a ledger counted how much "
        "all of it together can tell about any single image. The number is called epsilon: at 0 nothing can be told, "
        "and more the larger it is. With it comes delta, roughly the probability that more can be told than epsilon "
        "says; it should be far smaller than one divided by the number of images."
    )
    items = []
    for audit in life.audits:
        if audit["verdict"] == "VIOLATED":
            text = (
                f"An attack on {audit['release']} told more than it should. Do not rely on what is said here of "
                f"{_together(audit['accounts'])}."
            )
            items.append(_tag("strong", text))
    for names, entry in life.grouped:
        items.append(_Html(f"{_tag('strong', f'{names}:')} {_t(_in_words(entry, life.audited(entry['name'])))}"))
    outro = (
        "These are guarantees for the worst case, against somebody who knows every other image, the program and all "
        "settings, and sees what was released. They hold for one image, not for a person with several, and not for "
        "what the section “What is not protected” lists. An epsilon up to 1 is usually called strong. Near 10 the "
        "guarantee is weak: it hardly limits the best conceivable attack, and one has to trust that real ones, such as "
        "those under “What attacks found”, are worse."
    )
    return [_tag("p", intro), _list(items), _tag("p", outro)]


_AUDITED = {
    "none": " No release about it was audited.",
    "consistent": " Attacks on such releases did not refute what is claimed for them, though they could have.",
    "cannot tell": " Attacks on such releases could not have refuted all that is claimed for them: they say little.",
    "VIOLATED": " An attack refuted what is claimed for such a release: the guarantee does not hold.",
}


def _in_words(entry: Mapping[str, Any], audited: str) -> str:
    spent = entry["proven_epsilon"]
    if entry["headline"] == "0":
        return "nothing was released about it yet."
    if spent is None or "inf" in entry["headline"]:
        return "there is no guarantee: what was released about it has no proof of privacy."
    odds = (math.exp(min(spent, 700)) + entry["delta"]) / (1 + math.exp(min(spent, 700)))
    change, question = (text.format(entry["unit"]) for text in _NEIGHBOURS[entry["adjacency"]])
    text = (
        f"epsilon is {entry['headline']} at delta {entry['delta']:g}, for {change}. Somebody who at first can only "
        f"toss a coin over {question} guesses right in at most {_ceil_percent(odds)} % of cases after seeing "
        "everything that was released about it."
    )
    return text + _AUDITED[audited]


def _floor(value: float) -> str:
    """An audited bound, rounded down: not more than was proven."""
    return f"{math.floor(100 * value) / 100:g}"


def _ceil_percent(value: float) -> str:
    """Rounded up: a report must not understate the risk."""
    digits = 1 if value < 0.99 else 3
    return f"{min(math.ceil(100 * value * 10**digits) / 10**digits, 100):g}"


def _budgets(life: _Life) -> list[str]:
    rows = []
    for names, entry in life.grouped:
        share = 0.0 if not entry["budget"] else min((entry["proven_epsilon"] or math.inf) / entry["budget"], 1.0)
        share = 0.0 if entry["headline"] == "0" else share
        rows.append(
            [
                names,
                f"{_NEIGHBOURS[entry['adjacency']][0].format(entry['unit'])} ({entry['adjacency']})",
                entry["headline"],
                f"{entry['delta']:g}",
                "none" if entry["budget"] is None else f"{entry['budget']:g}",
                _bar(share),
                life.audited(entry["name"]),
            ]
        )
    headings = ["data set", "protects against", "epsilon", "delta", "budget", "used", "audits"]
    note = (
        "Everything that was ever reserved in the ledger for a data set counts, also by other programs that share the "
        "ledger, also if it was interrupted. A release that a budget has no room for is refused before it is made."
    )
    return [_table(headings, rows), _small(note)]


def _spends(life: _Life) -> list[str]:
    rows = []
    for names, entry in life.grouped:
        for row in entry["spends"]:
            event = SelfComposedDpEvent(from_json(json.dumps(row["event"])), row["spends"])
            alone = epsilon(event, delta=entry["delta"], adjacency=entry["adjacency"])
            labels = list(dict.fromkeys(label for label in (row["first_label"], row["last_label"]) if label))
            rows.append(
                [
                    names,
                    " … ".join(labels),
                    f"{row['spends']} × {row['description']}",
                    f"{alone:.6g}",
                    f"{row['first_at'][:16].replace('T', ' ')} UTC",
                    row["open"] or "",
                ]
            )
    if not rows:
        return [_tag("p", "Nothing was released yet.")]
    headings = ["data set", "by", "mechanism", "epsilon alone", "first", "not committed"]
    note = (
        "A mechanism is counted as often as it was used. Gaussian(s) adds normal noise of s times the most that one "
        "image can contribute, PoissonSampled(q, …) does so to a random share q of the images, Pure(e) is any other "
        "mechanism, of epsilon e at delta 0. Epsilons of several releases do not simply add up: the ledger composes "
        "the distributions of their privacy losses, and errs upwards."
    )
    return [_table(headings, rows), _small(note)]


def _attacks(life: _Life) -> list[str]:
    rows = []
    for audit in life.audits:
        share = min(audit["lower"] / audit["upper"], 1.0) if audit["upper"] else 0.0
        rows.append(
            [
                audit["release"],
                _together(audit["accounts"]),
                f"{audit['upper']:.6g}",
                f"{audit['delta']:g}",
                _floor(audit["lower"]),
                _floor(audit["ceiling"]),
                _bar(share),
                audit["verdict"],
                f"{audit['trials']} trials, {audit['method']}, confidence {100 * audit['confidence']:g} %",
            ]
        )
    columns = ["claimed: at most", "at delta", "attack: at least", "ceiling"]
    headings = ["release", "data set", *columns, "", "verdict", "how"]
    note = (
        "For each release the same program was run on made-up or public records, some of them made to be noticed, and "
        "an attacker who knows all but one of them guessed. The guesses prove that epsilon is at least the number "
        "shown, but for the chance that the confidence leaves. The claim is that of the release which was attacked, "
        "such as one step or one answer, and not of all that a data set paid. VIOLATED: the number is above the claim, "
        "which it refutes. Consistent: the number is not above the claim. That proves nothing, since another attack "
        "may find more. The ceiling is the largest number that the audit could have found. Cannot tell: the ceiling "
        "is not above the claim, so that the audit could not have refuted it. No private image was used, so the ledger "
        "was not charged."
    )
    table = _table(headings, rows) if rows else _tag("p", "No release was audited yet.")
    return [table, _small(note)]


def _quality(life: _Life) -> list[str]:
    parts: list[str] = [
        _tag(
            "p",
            "Measured on held-out public test images with released parameters, which costs nothing, unless said "
            "otherwise.",
        )
    ]
    if found := life.result("pretrain"):
        judge = "test images" if found["judged_on_test"] else "its own training images"
        parts += [
            _tag("h3", "Pre-training on public images"),
            _tag("p", f"{found['images']} public images: accuracy {_p(found['accuracy'])} on {judge}."),
            life.figure("pretrain", "robustness.png", "Accuracy of the backbone under noise on its parameters."),
        ]
    if found := life.result("finetune"):
        parts += [
            _tag("h3", "Fine-tuning on private images"),
            _tag(
                "p",
                f"Accuracy {_p(found['before'])} before and {_p(found['accuracy'])} after {found['steps']} private "
                f"steps of {found['method']} with noise multiplier {found['noise_multiplier']:.4g}: epsilon "
                f"{found['epsilon']:.6g} at delta {found['delta']:g}.",
            ),
            life.figure("finetune", "training.png", "Accuracy and epsilon over the steps."),
        ]
    if found := life.result("recalibrate"):
        rows = [
            [label, *(f"{found[score][when]:.3f}" for when in ("before", "after"))]
            for score, label in (("ece", "expected calibration error (ECE)"), ("brier", "Brier score"))
        ]
        parts += [
            _tag("h3", "Recalibration by private sources"),
            _tag(
                "p",
                f"{found['sources']} sources whose images are under {_words(found['shift'])} answered with noise, "
                f"at epsilon {found['epsilon']:g} each. The model is right on {_p(found['accuracy'])} of such images.",
            ),
            _table(["confidence", "before", "after"], rows),
            life.figure("recalibrate", "reliability.png", "How often the model is right, by how sure it is."),
        ]
    if found := life.result("adapt"):
        rows = [
            [_words(shift), *(_p(row[when]) for when in ("before", "after"))]
            for shift, row in found["accuracy"].items()
        ]
        parts += [
            _tag("h3", "Adaptation to a private stream"),
            _tag(
                "p",
                f"{found['images']} unlabelled images, each in one noisy update: epsilon {found['epsilon']:.6g} at "
                f"delta {found['delta']:g}.",
            ),
            _table(["shift", "accuracy before", "after"], rows),
            life.figure("adapt", "stream.png", "Accuracy over the stream."),
        ]
    if found := life.result("split"):
        parts += [
            _tag("h3", "A client's upload"),
            _tag(
                "p",
                f"{found['images']} images, each as {found['directions']} bounded, noisy numbers and a noisy label, "
                f"once: epsilon {found['epsilon']:.6g} at delta {found['delta']:g}, in {found['bytes']} bytes. The "
                "numbers are coordinates of the public backbone's outputs. Whatever a server makes of them costs no "
                "more privacy.",
            ),
        ]
    if found := life.result("deploy"):
        rows = [
            [_words(shift), *(f"{row[when]:.3f}" for when in ("before", "after"))]
            for shift, row in found["ece"].items()
        ]
        parts += [
            _tag("h3", "The model in use"),
            _tag(
                "p", "The adapted parameters with recalibrated confidences: ECE against that of the fine-tuned model."
            ),
            _table(["shift", "ECE before", "after"], rows),
        ]
    if found := life.result("predict"):
        parts += [
            _tag("h3", "Certified private answers"),
            _tag(
                "p",
                f"{found['queries']} answers, pure epsilon {found['epsilon_per_query']:.4g} each and "
                f"{found['epsilon']:.6g} together at delta {found['delta']:g}: {_p(found['accuracy'])} of them right. "
                "They come from a linear model on the public backbone's outputs, trained without noise together with "
                "bounds on what any change of k training images could have made of it; where no such change alters an "
                "answer, little noise is enough. Bounds for the fine-tuned network itself would be far too loose to be "
                "of use.",
            ),
        ]
    return parts


def _unprotected(life: _Life) -> list[str]:
    items = [
        "Anything from those who run the computations: they see the images that they compute on. The guarantee is "
        "against everybody else, who sees what was released.",
        "Public and test images, and the labels of both: they are taken to be anybody's.",
        "How many images each party has, the settings, the moment of each release, whether a stage failed. Settings "
        "that somebody chose by looking at private images cost privacy that no ledger sees.",
        "People. The unit is one image: who is in a data set with several images, or in several data sets, loses more "
        "than the figure of any one of them says.",
        "Images that change sides. The ledger knows a data set by its name: if the data are divided in another way "
        "(another seed, other parts), nobody counts what an image gives away that was private and becomes public.",
        "What a prediction tells about the image that it is for: during the stream every prediction belongs to the "
        "owner of its image. None of them is kept.",
        "This workdir as a whole. Its folder names are hashes to which the private images contribute, so that they "
        "confirm a guess of a whole data set; a stage that is not finished keeps its secret seed there. Publish this "
        "report and the released parameters, not the folder.",
        "How long computations took, and the rounding of floating-point noise.",
        "Mistakes that no attack here looked for. The audits are attempts, not proofs.",
    ]
    if life.result("certificates"):
        items.insert(
            0,
            "The file certificates.html beside this report, which is computed from the private images without noise "
            "and must not be given to anybody who may not see them.",
        )
    open_spends = sum(len(entry["open"]) for entry in life.accounts)
    if open_spends:
        items.append(f"{open_spends} payment(s) for releases that did not finish: they count in full.")
    return [_list(items)]


def _stages(life: _Life) -> list[str]:
    rows = [[name, state["status"], state["message"]] for name, state in life.stages.items()]
    config = _tag("pre", json.dumps(life.config, indent=1))
    return [
        _table(["stage", "state", ""], rows),
        _tag("details", _tag("summary", "The config"), config),
    ]


# --- HTML -----------------------------------------------------------------------------------------------------------


class _Html(str):
    """Markup, which is not escaped again. What is put together of it and of text is text once more."""


def _t(value: Any) -> _Html:
    return value if isinstance(value, _Html) else _Html(html.escape(str(value), quote=False))


def _tag(name: str, *parts: Any) -> _Html:
    return _Html(f"<{name}>{''.join(map(_t, parts))}</{name}>")


def _small(text: str) -> _Html:
    return _Html(f'<p class="small">{_t(text)}</p>')


def _bar(share: float) -> _Html:
    # An attribute of SVG, since the policy of the page refuses style attributes.
    return _Html(f'<svg class="bar"><rect width="{100 * share:.1f}%" height="100%"></rect></svg>')


def _p(value: float) -> str:
    return f"{100 * value:.1f} %"


def _together(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names) + (", each" if len(names) > 1 else "")
    return f"{names[0]} … {names[-1]} ({len(names)} alike), each"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _section(title: str, *parts: str) -> _Html:
    return _Html(f"<section>\n<h2>{_t(title)}</h2>\n" + "\n".join(map(_t, parts)) + "\n</section>")


def _list(items: Iterable[str]) -> _Html:
    return _tag("ul", *(_tag("li", item) for item in items))


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> _Html:
    head = _tag("thead", _tag("tr", *(_tag("th", heading) for heading in headings)))
    body = "\n".join(_tag("tr", *(_tag("td", cell) for cell in row)) for row in rows)
    return _Html(f'<div class="wide"><table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table></div>')


_STYLE = """
body { font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #222; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.8rem; margin-bottom: 0; }
h2 { font-size: 1.3rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
h3 { font-size: 1.05rem; margin-top: 1.8rem; }
.small { color: #666; font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid #e6e6e6; }
th { color: #666; font-weight: 600; }
.bar { width: 7rem; height: .8rem; margin-top: .3rem; background: #e6e6e6; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.bar rect { fill: #0072b2; }
figure { margin: 1.2rem 0; break-inside: avoid; }
img { max-width: min(100%, 44rem); }
figcaption { color: #666; font-size: .9rem; }
pre { font-size: .8rem; white-space: pre-wrap; }
tr, li { break-inside: avoid; }
@media print { body { font-size: 11pt; margin: 0; max-width: none; } details { display: none; } }
"""
