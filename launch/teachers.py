"""The teachers of private prediction: certified models, their labels of the test inputs, and their
answers.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxdp import prediction
from jaxdp.data.labels import check_labels
from jaxdp.data.selection import choose, everything
from jaxdp.prediction import ensembles, mechanisms
from jaxdp.report import progress_bar

from . import features, models

Examples = Mapping[str, np.ndarray]

SINGLE = "single model"
OURS = "randomised response (ours)"
SMOOTH = "smooth sensitivity (paper)"
GLOBAL = "global sensitivity"
MECHANISMS = {"global": GLOBAL, "smooth": SMOOTH, "ours": OURS}  # by their names in a config


@dataclasses.dataclass(frozen=True)
class Pool:
    """What a teacher knows of all test inputs.

    Attributes:
      label, distance: Integers [Q], labels and calibrated distances.
      num_classes: The number of classes.
      votes: The labels [T, Q] of the members of an ensemble.
    """

    label: np.ndarray
    distance: np.ndarray
    num_classes: int
    votes: np.ndarray | None = None

    def answer(
        self, mechanism: str, epsilon: float, key: jax.Array, rows: np.ndarray
    ) -> np.ndarray:
        """Returns private answers about some of the inputs. `mechanism` is a value of
        `MECHANISMS`.
        """
        terms: dict[str, Any] = {"epsilon": epsilon, "num_classes": self.num_classes}
        if mechanism == GLOBAL and self.votes is not None:
            return ensembles.laplace_vote(key, self.votes[:, rows], **terms)
        names = {OURS: "randomised_response", SMOOTH: "paper_cauchy", GLOBAL: "global_response"}
        name = names[mechanism]
        if mechanism == GLOBAL and self.num_classes == 2:
            name = "global_laplace"  # a rounded noisy label, which answers two classes only
        method = prediction.METHODS[name]
        return method.answer(key, self.label[rows], self.distance[rows], **terms)

    def expected_accuracy(self, mechanism: str, epsilon: float, truth: np.ndarray) -> float:
        """Returns the mean accuracy of an answer over noise and test inputs. It is not private, for
        evaluation only.
        """
        check_labels(np.asarray(truth), len(self.label), name="truth")
        if mechanism == GLOBAL and self.votes is not None:
            # Several classes have no closed form. The same draws for every epsilon make a smooth
            # curve.
            labels = range(self.num_classes)
            counts = np.stack([np.sum(self.votes == label, axis=0) for label in labels], axis=1)
            draw = np.random.default_rng(0)
            noise = 2 / epsilon * draw.laplace(size=(50, *counts.shape))
            answers = (counts + noise).argmax(axis=2)
            return float(np.mean(answers == truth))
        flip = flip_probability(mechanism, self.distance, epsilon, self.num_classes)
        flipped_right = flip / (self.num_classes - 1)
        right = np.where(self.label == truth, 1 - flip, flipped_right)
        return float(right.mean())


def flip_probability(
    mechanism: str, distance: np.ndarray, epsilon: float, num_classes: int
) -> np.ndarray:
    """Returns the probability that an answer of one model differs from the model's label, by
    calibrated distance.
    """
    if mechanism == SMOOTH:
        return mechanisms.flip_probability_cauchy(distance, epsilon=epsilon, calibration="paper")
    if mechanism == GLOBAL and num_classes == 2:
        return mechanisms.flip_probability_global_laplace(distance, epsilon=epsilon)
    if mechanism == GLOBAL:
        distance = np.zeros_like(distance)  # as if one record could flip every label
    return mechanisms.flip_probability(distance, epsilon=epsilon, num_classes=num_classes)


def check(config: Any, opened: features.Opened) -> None:
    """Raises ValueError if a config does not fit its data."""
    queries = config.prediction.queries
    records = config.training.records
    batch = config.dp_sgd.batch_size
    if not 1 <= queries < opened.inputs:
        raise ValueError(
            f"config.prediction.queries={queries} must lie in [1, {opened.inputs}), the number of "
            "test inputs. The student is tested on the other inputs."
        )
    if config.references and not 1 <= batch <= records:
        raise ValueError(
            f"config.dp_sgd.batch_size={batch} must lie in [1, {records}], the declared number of "
            "private records (config.training.records)."
        )
    if opened.classes > 2 and "smooth" in config.mechanisms:
        raise ValueError(
            f"config.mechanisms has 'smooth', which answers 2 classes, not {opened.classes}. Drop "
            "it."
        )


def training_options(config: Any, records: int, divisor: int) -> dict[str, Any]:
    """Returns the options of `jaxdp.prediction.train_with_bounds` for one batch of all records."""
    training = dict(config.training) | {"batch_size": divisor}
    del training["records"]
    ks = min(config.certificate.max_distance, divisor)
    if training["threat"] == "replace_one":  # which leaves the number of records public
        ks = min(ks, records)
    return {"ks": ks, **training}


class Bench:
    """What the cells of a study share. Models are trained when they are first needed.

    Attributes:
      config, plan: The config, and its part `prediction`.
      task: The data.
      train, test: All of it, {"features" [n, d], "label" [n]}.
      classes, model, start: The number of classes, the model, and its initial parameters.
      epsilon: The epsilon of each answer.
    """

    def __init__(self, config: Any, root: pathlib.Path):
        self.config = config
        self.plan = config.prediction
        opened = features.read(config.data)
        check(config, opened)
        self.task = opened.compute(root / "network.safetensors")
        self.train = everything(self.task.train)
        self.test = everything(self.task.test)
        self.classes = self.task.train.num_classes
        width = self.train["features"].shape[1]
        self.model = models.dense(width, self.classes, **config.model)
        self.start = _start(self.model, self.task.start)
        self.epsilon = prediction.query_epsilon(**self.plan)
        print(
            f"{config.training.records} private records ({self.task.train.name}), {opened.inputs} "
            f"test inputs ({self.task.test.name}). Features: {self.task.provenance}.",
            flush=True,
        )

    def certified(
        self, examples: Examples, divisor: int
    ) -> tuple[prediction.Bounds, np.ndarray, np.ndarray]:
        """Returns a certified model, and its labels and distances [Q] of the test inputs.

        Distances go up to the largest of the config. `divisor` is public and replaces the number of
        examples, which is private. All examples are one batch.
        """
        model = self.model
        options = training_options(self.config, len(examples["label"]), divisor)
        bounds = prediction.train_with_bounds(model.loss, self.start, examples, **options)
        certificates = prediction.certify(bounds, model.logits, self.test["features"])
        return bounds, np.asarray(certificates.label), np.asarray(certificates.distance)

    @functools.cached_property
    def single(self) -> tuple[prediction.Bounds, np.ndarray, np.ndarray]:
        """The certified model of all records, with its labels and distances."""
        return self.certified(self.train, self.config.training.records)

    @functools.cached_property
    def pools(self) -> dict[str, Pool]:
        """The pools by teacher. The ensemble has a model for each of several disjoint parts of the
        records.
        """
        count = self.config.ensemble.members
        salt = self.config.ensemble.salt.encode()
        ids: Sequence[int] | None = None
        if self.config.training.threat == "replace_one":
            ids = range(len(self.train["label"]))  # a replaced record stays in its part
        part = prediction.partition_by_hash(self.train, count, salt=salt, ids=ids)
        divisor = self.config.training.records // count  # public, unlike the size of a part
        labels = []
        distances = []
        for member in progress_bar(range(count), label="ensemble", unit="model"):
            mine = _take(self.train, np.flatnonzero(part == member))
            _, label, distance = self.certified(mine, divisor)
            labels.append(label)
            distances.append(distance)
        votes = np.stack(labels)
        ensemble = prediction.vote(votes, np.stack(distances), num_classes=self.classes)
        _, label, distance = self.single
        return {
            SINGLE: Pool(label, distance, self.classes),
            f"{count} models": Pool(*ensemble, self.classes, votes),
        }

    def asked(self, number: int) -> np.ndarray:
        """Returns a public choice of test inputs, sorted int64 [queries]."""
        seed = self.config.query_seed + number
        rows = choose(len(self.task.test), self.plan.queries, seed=seed)
        return np.sort(rows)

    def student(self, rows: np.ndarray, answers: np.ndarray) -> tuple[Any, float]:
        """Returns parameters that learn from answers, and their accuracy on the other inputs."""
        known, label = prediction.answered(self.test["features"][rows], answers)
        params = prediction.train_student(
            self.model.loss,
            self.start,
            {"features": known, "label": label},
            optimizer=optax.sgd(self.config.student.learning_rate),
            steps=self.config.student.steps,
            batch_size=len(rows),
            seed=self.config.query_seed.to_bytes(16, "little"),
        )
        others = np.setdiff1d(np.arange(len(self.task.test)), rows)
        accuracy = self.model.accuracy(params, _take(self.test, others))
        return params, accuracy


def _start(model: models.Dense, layers: Mapping[str, Any] | None) -> Any:
    """Returns initial parameters of the dense layers: those of a public network, or fresh ones.

    Raises:
      ValueError: The network has dense layers of other sizes.
    """
    fresh = model.init()
    if layers is None:
        return fresh
    fresh_shapes = jax.tree.map(np.shape, fresh)
    shapes = jax.tree.map(np.shape, dict(layers))
    if fresh_shapes != shapes:
        raise ValueError(
            "config.data.network.dense needs the layers of the network in config.model, hidden="
            f"(100,) and bias=True. They have the shapes {shapes}, and config.model has "
            f"{fresh_shapes}."
        )
    return layers


def _take(examples: Examples, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: array[rows] for name, array in examples.items()}
