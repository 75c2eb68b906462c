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
        task = features.read(config.data).compute(root / "network.safetensors")
        self.train, self.test = everything(task.train), everything(task.test)
        self.model = models.Dense(
            self.train["features"].shape[1], task.train.num_classes, **config.model
        )
        self.name = task.train.name
        count = len(task.train)
        share = config.changes.public
        if not 0 <= share < 1:
            raise ValueError(f"config.changes.public must be in [0, 1), got {share}.")
        rows = choose(count, round(share * count), seed=config.changes.seed)
        self.public = np.isin(np.arange(count), rows)

    def fit(self, kind: str, examples: Examples, ks: Any, public: Any) -> prediction.Bounds:
        """Trains in full batches, and bounds training on changed records."""
        training = dict(self.config.training)
        training["batch_size"] = training.pop("records")
        training["threat"] = {"remove": "remove", "replace": "replace_one"}.get(kind, "poison")
        return prediction.train_with_bounds(
            self.model.loss,
            self.model.init(),
            examples,
            ks=ks,
            public=public,
            poisoning=self.poisoning(kind),
            **training,
        )

    def poisoning(self, kind: str) -> prediction.Poisoning | None:
        """Returns what a poisoned record may become."""
        if kind in ("remove", "replace"):
            return None
        radius = self.config.changes.radius if kind in ("features", "both") else 0.0
        labels: tuple[float, ...] = ()
        if kind in ("labels", "both"):
            labels = tuple(range(self.model.num_classes))
        return prediction.Poisoning(radius=radius, labels=labels)

    def changed(self, kind: str, number: int) -> Examples:
        """Returns the records after the largest number of random changes of a kind."""
        changes, model = self.config.changes, self.model
        free = np.flatnonzero(~self.public)
        rng = np.random.default_rng([changes.seed, number])
        who = rng.permutation(free)[: changes.most]
        if kind == "remove":
            return {name: np.delete(array, who, axis=0) for name, array in self.train.items()}
        vectors, labels = self.train["features"].copy(), self.train["label"].copy()
        if kind in ("features", "both"):
            signs = rng.choice([-1, 1], size=vectors[who].shape)
            vectors[who] += np.float32(changes.radius) * signs
        if kind == "replace":
            vectors[who] = vectors[rng.permutation(len(vectors))[: len(who)]]
        if kind != "features":
            labels[who] = (labels[who] + 1) % model.num_classes
        return {"features": vectors, "label": labels}


def _cells(config: Any) -> Iterator[Cell]:
    frame.known("changes.kinds", config.changes.kinds, KINDS)
    for kind in frame.some("changes.kinds", config.changes.kinds):
        yield Cell(kind)


def _run(cell: Cell, work: frame.Work) -> Fields:
    opened, most = work.shared, work.config.changes.most
    bounds = opened.fit(cell.kind, opened.train, most, opened.public)
    certificates = prediction.certify(bounds, opened.model.logits, opened.test["features"])
    distance = np.asarray(certificates.distance)
    is_right = np.asarray(certificates.label) == opened.test["label"]
    certified = [float(np.mean(is_right & (distance >= k))) for k in range(most + 1)]
    ends = [[np.asarray(x[-1]) for x in jax.tree.leaves(tree)] for tree in _ends(bounds)]
    outside, accuracies = 0, []
    numbers = range(work.config.changes.witnesses)
    for number in progress_bar(numbers, label=cell.kind, unit="retraining"):
        examples = opened.changed(cell.kind, number)
        retrained = opened.fit(cell.kind, examples, (0,), None).params
        outside += _outside(jax.tree.leaves(retrained), *ends)
        accuracies.append(opened.model.accuracy(retrained, opened.test))
    return {
        "accuracy": float(np.mean(is_right)),
        "certified": certified,
        "distance": float(np.mean(distance)),
        "width": float(np.mean([np.mean(high - low) for low, high in zip(*ends, strict=True)])),
        "retrained": accuracies,
        "outside": outside,
    }


def _ends(bounds: prediction.Bounds) -> tuple[Any, Any]:
    return bounds.lower, bounds.upper


def _outside(leaves: Sequence[Any], low: Sequence[Any], high: Sequence[Any]) -> int:
    """Returns whether a coordinate lies outside of the box, as 0 or 1."""
    for x, least, most in zip(leaves, low, high, strict=True):
        if not np.all((least <= x) & (x <= most)):
            return 1
    return 0


def _result(rows: Rows, work: frame.Work) -> Fields:
    opened, changes = work.shared, work.config.changes
    return {
        "dataset": opened.name,
        "records": len(opened.public),
        "public": int(opened.public.sum()),
        "radius": changes.radius,
        "rows": list(rows),
    }


def table(result: Result) -> Lines:
    """Returns the shares of test inputs whose right label is certified, in percent."""
    lines = []
    for row in result["rows"]:
        most = len(row["certified"]) - 1
        line = {"change": row["kind"], "accuracy": results.percent(row["accuracy"])}
        for k in np.unique(np.linspace(0, most, _STEPS).astype(int))[1:]:
            line[f"k = {k}"] = results.percent(row["certified"][k])
        line["mean distance"] = f"{row['distance']:.1f}"
        if row["retrained"]:
            line["least retrained"] = results.percent(min(row["retrained"]))
            line["outside"] = f"{row['outside']} of {len(row['retrained'])}"
        lines.append(line)
    return lines


def _summary(result: Result) -> str:
    return (
        f"{format_table(table(result))}\n\n{result['records']} records of {result['dataset']}, "
        f"{result['public']} of them public. Features move by up to {result['radius']:g}.\n"
        "Percent of test inputs whose right label no k changes alter. Retrained models have as many"
        " random changes as\nthe last k. None may be outside of the bounds."
    )


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
    tables=lambda result, _: {"Certified accuracy in percent": table(result)},
    figures=_figures,
    benchmark=(
        "Certificates and retrained models are exact functions of the records. For private data "
        "call jaxdp.prediction.train_with_bounds, and keep the results as private as the records."
    ),
    report=frame.Report(title="certificates against changed records"),
)

if __name__ == "__main__":
    frame.main(STUDY)
