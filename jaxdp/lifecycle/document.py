"""The report of a lifecycle: one HTML file without scripts or links, made from what is in the workdir alone.

What reads private images without noise is never in it: `certificates.html` is a file of its own.
"""

import base64
import html
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.privacy import Ledger, SelfComposedDpEvent, epsilon
from jaxdp.privacy.events import from_json
from jaxdp.release import write_json
from jaxdp.report import format_table

# What a neighbouring data set differs in, and what somebody would like to know.
_NEIGHBOURS = {
    "add_remove": ("adding or removing one {}", "whether a certain {} was in it"),
    "replace_one": ("replacing one {} by another", "which of two possible {}s was in it"),
    "zero_out": ("blanking out one {}", "whether a certain {} was blank"),
}


def write(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Writes report.html, the same bytes for the same workdir; and certificates.html if the config asks for it.

    certificates.html is NOT private. It is removed if the config no longer asks for it.

    Args:
      workdir: of `jaxdp.lifecycle.run`.

    Returns:
      The path of the report.

    Raises:
      FileNotFoundError: there is no lifecycle in the workdir.
      ValueError: its ledger is not the one that the lifecycle used.
    """
    root = pathlib.Path(workdir)
    life = _Life(root)
    apart = root / "certificates.html"
    if found := life.result("certificates"):
        _put(apart, _certificates(life, found))
    else:
        apart.unlink(missing_ok=True)
    return _put(root / "report.html", _report(life))


def _put(path: pathlib.Path, text: str) -> pathlib.Path:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
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
            "audited, at least": life.audited(entry["name"]),
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
        found = json.loads(path.read_text())
        self.root, self.version, self.config, self.stages = root, found["version"], found["config"], found["stages"]
        self.accounts = _accounts(root, self.config["ledger"], found["accounts"])

    def result(self, stage: str) -> dict[str, Any] | None:
        """Of a stage that is done."""
        state = self.stages.get(stage)
        if state is None or state["status"] != "done":
            return None
        return json.loads((self.root / state["folder"] / "stage.json").read_text())["result"]

    def figure(self, stage: str, name: str, caption: str) -> str:
        data = base64.b64encode((self.root / self.stages[stage]["folder"] / name).read_bytes()).decode()
        image = f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{_t(caption)}</figcaption></figure>"

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
        return [found for name in self.stages if name.startswith("audit_") and (found := self.result(name))]

    def audited(self, account: str) -> float | None:
        """The largest epsilon that an attack on a release about a data set proved."""
        return max((audit["lower"] for audit in self.audits if account in audit["accounts"]), default=None)


def _accounts(root: pathlib.Path, ledger: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """From the ledger; where a shared one is out of reach, as it was after the last run."""
    path = pathlib.Path(ledger) if ledger else root / "ledger.sqlite"
    copy = root / "ledger.json"
    if path.exists():
        with Ledger(path) as opened:
            entries = {entry["name"]: entry for entry in opened.report()["datasets"]}
        if missing := [name for name in names if name not in entries]:
            raise ValueError(f"{path} knows no {', '.join(missing)}: it is not the ledger of this lifecycle.")
        write_json(copy, [entries[name] for name in names])
    return json.loads(copy.read_text())


# --- The pages ------------------------------------------------------------------------------------------------------


def _report(life: _Life) -> str:
    title = f"A private model's life: {life.config['data']['name']}"
    parts = [
        f"<h1>{_t(title)}</h1>",
        f'<p class="small">Written by jaxdp {_t(life.version)} from the workdir of one lifecycle.</p>',
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
        f"<p><strong>{_t(warning)}</strong></p>",
        f"<h1>{_t(title)}</h1>",
        f"<p>{_t(words)}</p>",
        life.figure("certificates", "certified.png", "Certified share of answers over k. Not private."),
    ]
    return _page(title, parts)


def _page(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{_t(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
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
        if audit["violated"]:
            text = f"An attack on {audit['release']} told more than it should. Do not rely on what is said here of it."
            items.append(f"<strong>{_t(text)}</strong>")
    for names, entry in life.grouped:
        items.append(f"<strong>{_t(names)}:</strong> {_t(_in_words(entry, life.audited(entry['name'])))}")
    outro = (
        "These are guarantees for the worst case, against somebody who knows every other image, the program and all "
        "settings, and sees what was released. They hold for one image, not for a person with several, and not for "
        "what the section “What is not protected” lists. An epsilon up to 1 is usually called strong. Near 10 the "
        "guarantee is weak: it hardly limits the best conceivable attack, and one has to trust that real ones, such as "
        "those under “What attacks found”, are worse."
    )
    return [f"<p>{_t(intro)}</p>", _list(items), f"<p>{_t(outro)}</p>"]


def _in_words(entry: Mapping[str, Any], audited: float | None) -> str:
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
    if audited == 0:
        text += " The attacks that were tried on such releases found no leak."
    elif audited is not None:
        text += f" The best attack that was tried on such a release proves an epsilon of at least {_floor(audited)}."
    return text


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
        audited = life.audited(entry["name"])
        rows.append(
            [
                _t(names),
                _t(f"{_NEIGHBOURS[entry['adjacency']][0].format(entry['unit'])} ({entry['adjacency']})"),
                _t(entry["headline"]),
                _t(f"{entry['delta']:g}"),
                _t("none" if entry["budget"] is None else f"{entry['budget']:g}"),
                f'<div class="bar"><div style="width:{100 * share:.1f}%"></div></div>',
                _t("not audited" if audited is None else _floor(audited)),
            ]
        )
    headings = ["data set", "protects against", "epsilon", "delta", "budget", "used", "attacks prove at least"]
    note = (
        "Everything that was ever reserved in the ledger for a data set counts, also by other programs that share the "
        "ledger, also if it was interrupted. A release that a budget has no room for is refused before it is made."
    )
    return [_table(headings, rows), f'<p class="small">{_t(note)}</p>']


def _spends(life: _Life) -> list[str]:
    rows = []
    for names, entry in life.grouped:
        for row in entry["spends"]:
            event = SelfComposedDpEvent(from_json(json.dumps(row["event"])), row["spends"])
            alone = epsilon(event, delta=entry["delta"], adjacency=entry["adjacency"])
            labels = list(dict.fromkeys(label for label in (row["first_label"], row["last_label"]) if label))
            rows.append(
                [
                    _t(names),
                    _t(" … ".join(labels)),
                    _t(f"{row['spends']} × {row['description']}"),
                    _t(f"{alone:.6g}"),
                    _t(f"{row['first_at'][:16].replace('T', ' ')} UTC"),
                    _t(row["open"] or ""),
                ]
            )
    if not rows:
        return ["<p>Nothing was released yet.</p>"]
    headings = ["data set", "by", "mechanism", "epsilon alone", "first", "not committed"]
    note = (
        "A mechanism is counted as often as it was used. Gaussian(s) adds normal noise of s times the most that one "
        "image can contribute, PoissonSampled(q, …) does so to a random share q of the images, Pure(e) is any other "
        "mechanism, of epsilon e at delta 0. Epsilons of several releases do not simply add up: the ledger composes "
        "the distributions of their privacy losses, and errs upwards."
    )
    return [_table(headings, rows), f'<p class="small">{_t(note)}</p>']


def _attacks(life: _Life) -> list[str]:
    rows = []
    for audit in life.audits:
        share = min(audit["lower"] / audit["upper"], 1.0) if audit["upper"] else 0.0
        rows.append(
            [
                _t(audit["release"]),
                _t(_together(audit["accounts"])),
                _t(f"{audit['upper']:.6g}"),
                _t(_floor(audit["lower"])),
                f'<div class="bar"><div style="width:{100 * share:.1f}%"></div></div>',
                _t("VIOLATED: leaks more than claimed" if audit["violated"] else "consistent"),
                _t(f"{audit['trials']} trials, {audit['method']}, confidence {100 * audit['confidence']:g} %"),
            ]
        )
    headings = ["release", "data set", "claimed: at most", "attack: at least", "", "verdict", "how"]
    note = (
        "For each release the same program was run on made-up or public records, some of them made to be noticed, and "
        "an attacker who knows all but one of them guessed. The guesses prove that epsilon is at least the number "
        "shown, but for the chance that the confidence leaves. A number above the claim would refute it; that an "
        "attack finds little proves nothing. No private image was used, so the ledger was not charged."
    )
    table = _table(headings, rows) if rows else "<p>No release was audited yet.</p>"
    return [table, f'<p class="small">{_t(note)}</p>']


def _quality(life: _Life) -> list[str]:
    parts = [
        "<p>Measured on held-out public test images with released parameters, which costs nothing, unless said "
        "otherwise.</p>"
    ]
    if found := life.result("pretrain"):
        judge = "test images" if found["judged_on_test"] else "its own training images"
        parts += [
            "<h3>Pre-training on public images</h3>",
            f"<p>{found['images']} public images: accuracy {_p(found['accuracy'])} on {judge}.</p>",
            life.figure("pretrain", "robustness.png", "Accuracy of the backbone under noise on its parameters."),
        ]
    if found := life.result("finetune"):
        parts += [
            "<h3>Fine-tuning on private images</h3>",
            f"<p>Accuracy {_p(found['before'])} before and {_p(found['accuracy'])} after {found['steps']} private "
            f"steps of {_t(found['method'])} with noise multiplier {found['noise_multiplier']:.4g}: epsilon "
            f"{found['epsilon']:.6g} at delta {found['delta']:g}.</p>",
            life.figure("finetune", "training.png", "Accuracy and epsilon over the steps."),
        ]
    if found := life.result("recalibrate"):
        rows = [
            [_t(label), *(f"{found[score][when]:.3f}" for when in ("before", "after"))]
            for score, label in (("ece", "expected calibration error (ECE)"), ("brier", "Brier score"))
        ]
        parts += [
            "<h3>Recalibration by private sources</h3>",
            f"<p>{found['sources']} sources whose images are under {_t(_words(found['shift']))} answered with noise, "
            f"at epsilon {found['epsilon']:g} each. The model is right on {_p(found['accuracy'])} of such images.</p>",
            _table(["confidence", "before", "after"], rows),
            life.figure("recalibrate", "reliability.png", "How often the model is right, by how sure it is."),
        ]
    if found := life.result("adapt"):
        rows = [
            [_t(_words(shift)), *(_p(row[when]) for when in ("before", "after"))]
            for shift, row in found["accuracy"].items()
        ]
        parts += [
            "<h3>Adaptation to a private stream</h3>",
            f"<p>{found['images']} unlabelled images, each in one noisy update: epsilon {found['epsilon']:.6g} at "
            f"delta {found['delta']:g}.</p>",
            _table(["shift", "accuracy before", "after"], rows),
            life.figure("adapt", "stream.png", "Accuracy over the stream."),
        ]
    if found := life.result("deploy"):
        rows = [
            [_t(_words(shift)), *(f"{row[when]:.3f}" for when in ("before", "after"))]
            for shift, row in found["ece"].items()
        ]
        parts += [
            "<h3>The model in use</h3>",
            "<p>The adapted parameters with recalibrated confidences: ECE against that of the fine-tuned model.</p>",
            _table(["shift", "ECE before", "after"], rows),
        ]
    if found := life.result("predict"):
        parts += [
            "<h3>Certified private answers</h3>",
            f"<p>{found['queries']} answers, pure epsilon {found['epsilon_per_query']:.4g} each and "
            f"{found['epsilon']:.6g} together at delta {found['delta']:g}: {_p(found['accuracy'])} of them right. They "
            "come from a linear model on the public backbone's outputs, trained without noise together with bounds on "
            "what any change of k training images could have made of it; where no such change alters an answer, little "
            "noise is enough. Bounds for the fine-tuned network itself would be far too loose to be of use.</p>",
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
    return [_list(map(_t, items))]


def _stages(life: _Life) -> list[str]:
    rows = [[_t(name), _t(state["status"]), _t(state["message"])] for name, state in life.stages.items()]
    config = _t(json.dumps(life.config, indent=1))
    return [
        _table(["stage", "state", ""], rows),
        f"<details><summary>The config</summary><pre>{config}</pre></details>",
    ]


# --- HTML -----------------------------------------------------------------------------------------------------------


def _t(value: Any) -> str:
    return html.escape(str(value), quote=False)


def _p(value: float) -> str:
    return f"{100 * value:.1f} %"


def _together(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names) + (", each" if len(names) > 1 else "")
    return f"{names[0]} … {names[-1]} ({len(names)} alike), each"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{_t(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{_t(heading)}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


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
.bar div { height: 100%; background: #0072b2; }
figure { margin: 1.2rem 0; break-inside: avoid; }
img { max-width: min(100%, 44rem); }
figcaption { color: #666; font-size: .9rem; }
pre { font-size: .8rem; white-space: pre-wrap; }
tr, li { break-inside: avoid; }
@media print { body { font-size: 11pt; margin: 0; max-width: none; } details { display: none; } }
"""
