"""Certificates against poisoned records and for unlearning: python -m launch.poisoning --config
configs/predict/poisoning.py --workdir workdir/poisoning.

A kind of change is "remove" (unlearning), "features", "labels", "both" or "replace". For each, one
certified model says how many changed records leave the label of a test input as it is. Models that
are retrained on changed records check its bounds.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import prediction
from jaxdp.data.selection import choose, everything
from jaxdp.report import format_table, plot_curves, progress_bar

from . import features, frame, models, results
from .study import Fields, Lines, Result, Rows

Examples = dict[str, np.ndarray]
KINDS = ("remove", "features", "labels", "both", "replace")
# What `jaxdp.prediction` calls a kind. The others poison records.
_THREATS = {"remove": "remove", "replace": "replace_one"}
_MOVES_FEATURES = ("features", "both")
_STEPS = 6  # columns of the table, over the numbers of changes


class Cell(NamedTuple):
    """A kind of change."""

    kind: str


class Opened:
    """What the cells share.

    Attributes:
      train, test: {"features" [n, d], "label" [n]}.
      public: bool [n], the records that nobody can change.
      model: The untrained model.
      name: The data set.
    """

    def __init__(self, config: Any, root: pathlib.Path):
        self.config = config
        changes = config.changes
        task = features.read(config.data).compute(root / "network.safetensors")
        self.train = everything(task.train)
        self.test = everything(task.test)
        self.name = task.train.name
        count, width = self.train["features"].shape
        self.model = models.dense(width, task.train.num_classes, **config.model)
        if not 0 <= changes.public < 1:
            raise ValueError(f"config.changes.public must be in [0, 1), got {changes.public}.")
        rows = choose(count, round(changes.public * count), seed=changes.seed)
        self.public = np.isin(np.arange(count), rows)

    def fit(self, kind: str, examples: Examples, ks: Any, public: Any) -> prediction.Bounds:
        """Trains in full batches, and bounds training on changed records."""
        training = dict(self.config.training)
        training["batch_size"] = training.pop("records")
        training["threat"] = _THREATS.get(kind, "poison")
        training["poisoning"] = self.poisoning(kind)
        start = self.model.init()
        return prediction.train_with_bounds(
            self.model.loss, start, examples, ks=ks, public=public, **training
        )

    def poisoning(self, kind: str) -> prediction.Poisoning | None:
        """Returns what a poisoned record may become."""
        if kind in _THREATS:
            return None
        radius = 0.0
        if kind in _MOVES_FEATURES:
            radius = self.config.changes.radius
        labels: tuple[float, ...] = ()
        if kind in ("labels", "both"):
            labels = tuple(range(self.model.num_classes))
        return prediction.Poisoning(radius=radius, labels=labels)

    def changed(self, kind: str, number: int) -> Examples:
        """Returns the records after the largest number of random changes of a kind."""
        changes = self.config.changes
        free = np.flatnonzero(~self.public)
        rng = np.random.default_rng([changes.seed, number])
        rows = rng.permutation(free)[: changes.most]
        if kind == "remove":
            return {name: np.delete(array, rows, axis=0) for name, array in self.train.items()}
        vectors = self.train["features"].copy()
        labels = self.train["label"].copy()
        if kind in _MOVES_FEATURES:
            signs = rng.choice([-1, 1], size=vectors[rows].shape)
            vectors[rows] += np.float32(changes.radius) * signs
        if kind == "replace":
            others = rng.permutation(len(vectors))[: len(rows)]
            vectors[rows] = vectors[others]
        if kind != "features":
            next_labels = labels[rows] + 1
            labels[rows] = next_labels % self.model.num_classes
        return {"features": vectors, "label": labels}


def _cells(config: Any) -> Iterator[Cell]:
    frame.known("changes.kinds", config.changes.kinds, KINDS)
    for kind in frame.some("changes.kinds", config.changes.kinds):
        yield Cell(kind)


def _run(cell: Cell, work: frame.Work) -> Fields:
    opened, changes = work.shared, work.config.changes
    model, test = opened.model, opened.test
    bounds = opened.fit(cell.kind, opened.train, changes.most, opened.public)
    certificates = prediction.certify(bounds, model.logits, test["features"])
    distance = np.asarray(certificates.distance)
    is_right = np.asarray(certificates.label) == test["label"]
    certified = []
    for k in range(changes.most + 1):
        share = np.mean(is_right & (distance >= k))
        certified.append(float(share))
    lower, upper = _largest_box(bounds.lower), _largest_box(bounds.upper)
    widths = [np.mean(high - low) for low, high in zip(lower, upper, strict=True)]
    outside = 0
    accuracies = []
    numbers = range(changes.witnesses)
    for number in progress_bar(numbers, label=cell.kind, unit="retraining"):
        examples = opened.changed(cell.kind, number)
        retrained = opened.fit(cell.kind, examples, (0,), None)
        outside += _is_outside(retrained.params, lower, upper)
        accuracies.append(model.accuracy(retrained.params, test))
    return {
        "accuracy": float(np.mean(is_right)),
        "certified": certified,
        "distance": float(np.mean(distance)),
        "width": float(np.mean(widths)),
        "retrained": accuracies,
        "outside": outside,
    }


def _largest_box(ends: Any) -> list[np.ndarray]:
    """Returns one end of the box for the most changes, a leaf of the parameters each."""
    return [np.asarray(of_changes)[-1] for of_changes in jax.tree.leaves(ends)]


def _is_outside(params: Any, lower: Sequence[Any], upper: Sequence[Any]) -> bool:
    """Returns whether a coordinate lies outside of the box."""
    for leaf, least, most in zip(jax.tree.leaves(params), lower, upper, strict=True):
        trained = np.asarray(leaf)
        if not np.all((least <= trained) & (trained <= most)):
            return True
    return False


def _result(rows: Rows, work: frame.Work) -> Fields:
    opened = work.shared
    return {
        "dataset": opened.name,
        "records": len(opened.public),
        "public": int(opened.public.sum()),
        "radius": work.config.changes.radius,
        "rows": list(rows),
    }


def table(result: Result) -> Lines:
    """Returns the shares of test inputs whose right label is certified, in percent."""
    lines = []
    for row in result["rows"]:
        certified = row["certified"]
        retrained = row["retrained"]
        line = {"change": row["kind"]}
        line["accuracy"] = results.percent(row["accuracy"])
        most = len(certified) - 1
        numbers = np.linspace(0, most, _STEPS).astype(int)
        for k in np.unique(numbers)[1:]:
            line[f"k = {k}"] = results.percent(certified[k])
        line["mean distance"] = f"{row['distance']:.1f}"
        if retrained:
            line["least retrained"] = results.percent(min(retrained))
            line["outside"] = f"{row['outside']} of {len(retrained)}"
        lines.append(line)
    return lines


def _summary(result: Result) -> str:
    lines = format_table(table(result))
    records = f"{result['records']} records of {result['dataset']}"
    return (
        f"{lines}\n\n{records}, "
        f"{result['public']} of them public. Features move by up to {result['radius']:g}.\n"
        "Percent of test inputs whose right label no k changes alter. Retrained models have as many"
        " random changes as\nthe last k. None may be outside of the bounds."
    )


def _tables(result: Result, work: frame.Work) -> Fields:
    return {"Certified accuracy in percent": table(result)}


def _figures(result: Result, work: frame.Work) -> None:
    curves = {row["kind"]: list(enumerate(row["certified"])) for row in result["rows"]}
    plot_curves(
        work.root / "certified.png",
        curves,
        title=f"{result['dataset']}: certified accuracy",
        subtitle=f"{result['records']} records, features within {result['radius']:g}",
        xlabel="changed records",
        ylabel="Right and certified",
    )


STUDY = frame.Study(
    name="poisoning",
    open=Opened,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=_tables,
    figures=_figures,
    benchmark=(
        "Certificates and retrained models are exact functions of the records. For private data "
        "call jaxdp.prediction.train_with_bounds, and keep the results as private as the records."
    ),
    report=frame.Report(title="certificates against changed records"),
)

if __name__ == "__main__":
    frame.main(STUDY)
