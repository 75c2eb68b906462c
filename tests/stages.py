"""The ways in which stages release something of private data, one row each, for test_stages."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import data, finetune, labels, prediction, recalibration, split, tta
from jaxdp.privacy import ComposedDpEvent, DpEvent, GaussianDpEvent, LabelDpEvent, PureDpEvent
from jaxdp.release import Release, Till
from jaxdp.transforms import noise

Options = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A function that takes an account and a workdir.

    Attributes:
      call: `call(account, workdir=, seed=, **arguments)`, which returns a pytree of arrays.
      arguments: Its further arguments.
      event: What a call charges.
      label: What the ledger shows to people.
      work: The module and the name of a function that computes on private data, or nothing.
      changes: Arguments by name, each of which makes another release. "data" has other private data
        of the same shapes.
      mistakes: Arguments that are refused, with the words of the refusal.
      accounts: Terms of an account that is refused, with the words.
      empty: Arguments that select no records, with the words, or None if they cost nothing.
      calling: Arguments with a program that calls back to Python.
      terms: The terms of the account.
      releases: How many releases a call makes.
      value: What is released of the value of a release.
      coarse: Whether few values are possible, so that other noise may give the same one.
      keeps: Whether the workdir is for one release, whose value it keeps.
      compiles: Whether every call compiles again.
    """

    call: Callable[..., Any]
    event: DpEvent
    label: str
    changes: Mapping[str, Options]
    mistakes: tuple[tuple[Options, str], ...]
    arguments: Options = dataclasses.field(default_factory=dict)
    work: tuple[str, str] | None = None
    accounts: tuple[tuple[Options, str], ...] = ()
    empty: tuple[Options, str | None] | None = None
    calling: Options | None = None
    terms: Options = dataclasses.field(
        default_factory=lambda: {"adjacency": "add_remove", "unit": "example"}
    )
    releases: int = 1
    value: Callable[[Any], Any] = lambda value: value
    coarse: bool = False
    keeps: bool = True
    compiles: bool = False

    def __call__(
        self, account: Any, *, workdir: Any = None, seed: bytes | None = None, **changes: Any
    ) -> Any:
        return self.call(account, workdir=workdir, seed=seed, **self.arguments | changes)


ROWS: dict[str, Callable[[], Row]] = {}


def row(*names: str) -> Callable[[Callable[..., Row]], Callable[..., Row]]:
    """Enters the rows of a builder: one, or one for each name, which the builder gets."""

    def enter(build: Callable[..., Row]) -> Callable[..., Row]:
        for name in names:
            words = name.split(": ")
            ROWS[name] = functools.cache(functools.partial(build, *words[1:]))
        return build

    return enter


def identity_of(x: jax.Array) -> jax.Array:
    """Returns x, after a call back to Python."""
    still = jax.lax.stop_gradient(x)
    return x + jax.pure_callback(np.zeros_like, still, still, vmap_method="sequential")


# --- Fine-tuning ---------------------------------------------------------------------------------

COUNT = 24


@functools.cache
def blobs(start: int = 0, count: int = COUNT) -> Any:
    return data.bundled("blobs").take(np.arange(start, start + count))


def linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params


def twice(params: Any, x: jax.Array) -> jax.Array:
    return 2 * x @ params


def calling_linear(params: Any, x: jax.Array) -> jax.Array:
    return identity_of(linear(params, x))


@row("finetune: accuracy")
def _accuracy(_: str) -> Row:
    # Right for the classes 2 and 3, wrong for the others.
    angles = np.pi / 4 + np.pi / 2 * np.array([1, 0, 2, 3])
    params = jnp.asarray([np.cos(angles), np.sin(angles)], jnp.float32)

    def call(account: Any, *, predict: Any, params: Any, source: Any, **options: Any) -> float:
        return finetune.charged_accuracy(predict, params, source, account=account, **options)

    noises = [0.0, -1.0, float("nan"), float("inf")]
    return Row(
        call=call,
        arguments={
            "predict": linear,
            "params": params,
            "source": blobs(0, 100),
            "noise_multiplier": 3.0,
        },
        event=GaussianDpEvent(3.0),
        label="accuracy",
        work=("jaxdp.finetune.evaluate", "count_correct"),
        changes={
            "data": {"source": blobs(100, 100)},
            "noise": {"noise_multiplier": 4.0},
            "params": {"params": 2 * params},
            "program": {"predict": twice},
        },
        mistakes=(
            *(({"noise_multiplier": x}, "noise_multiplier must be positive and") for x in noises),
            ({"params": params.at[0, 0].set(jnp.nan)}, "NaN"),
            ({"seed": b"short"}, "seed must be 16 bytes, got 5"),
            ({"unit": "patient"}, "unit must be that of account 'private', 'example'"),
        ),
        accounts=(({"unit": "patient"}, "unit must be that of account 'private', 'patient'"),),
        empty=({"source": blobs(0, 0)}, "source 'blobs' has no examples"),
        calling={"predict": calling_linear},
    )


@row("finetune: scaler", "finetune: scaler of owners")
def _scaler(name: str) -> Row:
    def call(account: Any, *, source: Any, ranges: Any, **options: Any) -> tuple[float, ...]:
        scaler = finetune.charged_scaler(source, ranges, account=account, **options)
        return scaler.mean + scaler.std

    table = np.random.default_rng(0).normal(size=(2, COUNT, 2)).astype(np.float32)
    sources = [data.from_arrays(features=features) for features in table]
    owners = data.by_group(sources[0], np.arange(COUNT) // 2, max_records=2)
    if name == "scaler of owners":
        sources[:] = [owners, data.by_group(sources[1], np.arange(COUNT) // 2, max_records=2)]
    unit, other = ("patient", "example") if name == "scaler of owners" else ("example", "patient")
    another = f"unit must be that of account 'private', '{unit}'"
    return Row(
        call=call,
        arguments={
            "source": sources[0],
            "ranges": {"0": (-2, 2)},
            "noise_multiplier": 3.0,
            "unit": unit,
        },
        event=GaussianDpEvent(3.0),
        label="scaler",
        work=("jaxdp.finetune.scaler", "column_sums"),
        changes={
            "data": {"source": sources[1]},
            "noise": {"noise_multiplier": 4.0},
            "ranges": {"ranges": {"0": (-2, 3)}},
        },
        mistakes=(
            ({"ranges": {"age": (0, 1)}}, r"ranges must name features .* got 'age'\. It has 0"),
            ({"ranges": {"0": (1, 1)}}, "ranges must have low < high for '0'"),
            # Half of the width would be 0, and 0 / 0 an integer of 2^63 steps.
            ({"ranges": {"0": (0, 5e-324)}}, "a width that float64 holds for '0'"),
            ({"ranges": {"0": (2**53, 2**53 + 1)}}, "a width that float64 holds for '0'"),
            ({"ranges": {"0": (1e308, 1.7e308)}}, "a middle and a width .* for '0'"),
            ({"ranges": {}}, "ranges must name a column"),
            ({"noise_multiplier": 0.0}, "noise_multiplier must be positive and finite, got 0.0"),
            ({"noise_multiplier": 1e40}, r"noise_multiplier=1e\+40 times the clip norm"),
            ({"source": owners, "unit": "example"}, another),
            ({"source": owners, "unit": other}, another),
            ({"unit": other}, another),
        ),
        accounts=(({"unit": other}, f"unit must be that of account 'private', '{other}'"),),
        terms={"adjacency": "add_remove", "unit": unit},
    )


def squares(params: Any, example: Any) -> jax.Array:
    return ((example["features"] @ params["w"] - example["label"]) ** 2).sum()


def calling_squares(params: Any, example: Any) -> jax.Array:
    return squares(params, example | {"label": identity_of(example["label"])})


@functools.cache
def trainer(noise_multiplier: float = 1.0, loss: Any = squares) -> Any:
    return finetune.dp_sgd(
        loss,
        optax.sgd(0.1),
        sampler=data.PoissonSampler(COUNT, 0.25),
        noise_multiplier=noise_multiplier,
        clip_norm=1.0,
        physical_batch_size=8,
    )


@row("finetune: fit")
def _fit(_: str) -> Row:
    """Its workdir keeps a state. finetune/test_methods has the methods."""

    def call(account: Any, *, trainer: Any, source: Any, params: Any, **options: Any) -> Any:
        options = {"steps": 2, "delta": 1e-5, "progress": False} | options
        return finetune.fit(trainer, params, source, account=account, **options).params

    params = {"w": jnp.zeros(2)}
    by_patient = data.by_group(blobs(), np.arange(COUNT), max_records=1)
    return Row(
        call=call,
        arguments={"trainer": trainer(), "source": blobs(), "params": params},
        event=finetune.event(1.0, data.PoissonSampler(COUNT, 0.25), 2),
        label="training, steps 0..1",
        changes={
            "data": {"source": blobs(COUNT)},
            "params": {"params": {"w": jnp.ones(2)}},
        },
        mistakes=(
            ({"source": blobs(0, 8)}, "source has 8"),
            ({"source": by_patient}, "group"),
            ({"params": {"w": jnp.full(2, jnp.nan)}}, "NaN"),
            ({"checkpoint_every": 0}, "checkpoint_every"),
        ),
        accounts=(({"unit": "patient"}, "unit"),),
        calling={"trainer": trainer(1.0, calling_squares)},
        keeps=False,
        compiles=True,
    )


# --- Answers to queries --------------------------------------------------------------------------

QUERIES = 30


def logit(params: Any, x: jax.Array) -> jax.Array:
    return x @ params


def other_logit(params: Any, x: jax.Array) -> jax.Array:
    return 0.9 * x @ params


def calling_logit(params: Any, x: jax.Array) -> jax.Array:
    return identity_of(x @ params)


def logistic(params: Any, record: Any) -> jax.Array:
    return jaxdp.losses.sigmoid_cross_entropy(logit(params, record["x"]), record["y"])


@functools.cache
def bounds(seed: int = 0) -> prediction.Bounds:
    rng = np.random.default_rng(seed)
    records = {
        "x": rng.normal(size=(40, 2)).astype(np.float32),
        "y": rng.integers(0, 2, 40).astype(np.float32),
    }
    options = {"ks": 3, "clip": 0.2, "learning_rate": 1.0, "batch_size": 40, "epochs": 1}
    return prediction.train_with_bounds(logistic, jnp.zeros(2), records, **options)


def queries(seed: int = 9, count: int = QUERIES) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)


def answers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the call of a function whose first three arguments have no keywords."""

    def call(account: Any, *, model: Any, apply_fn: Any, queries: Any, **options: Any) -> Any:
        return function(model, apply_fn, queries, account=account, **options)

    return call


# What the answers of all mechanisms refuse.
QUERY_MISTAKES: tuple[tuple[Options, str], ...] = (
    ({"epsilon": 0.0}, "epsilon must be"),
    ({"epsilon": None}, "either epsilon"),
    ({"total": (1.0, 1e-5)}, "either epsilon"),
    ({"mechanism": "smooth_laplace"}, "mechanism must be one of"),
    ({"queries": np.full((4, 2), np.nan, np.float32)}, "queries has NaN|queries leaf .* has NaN"),
    ({"apply_fn": lambda params, query: jnp.zeros((2, 2))}, "ONE query|one value"),
    ({"seed": b"short"}, "seed must be 16 bytes, got 5"),
)
LABELS = [name for name, row in prediction.METHODS.items() if row.kind == "labels"]
VALUES = [name for name, row in prediction.METHODS.items() if row.kind == "values"]


def _asked(function: Any, mechanism: str, model: Any, other: Any, **fields: Any) -> Row:
    arguments = {
        "model": model,
        "apply_fn": logit,
        "queries": queries(),
        "epsilon": 0.3,
        "mechanism": mechanism,
    }
    changes = {
        "data": {"model": other},
        "queries": {"queries": queries(8)},
        "program": {"apply_fn": other_logit},
        "epsilon": {"epsilon": 0.25},
    }
    fields["arguments"] = arguments | fields.get("arguments", {})
    fields["mistakes"] = QUERY_MISTAKES + fields.get("mistakes", ())
    return Row(
        call=answers(function),
        event=prediction.event(QUERIES, epsilon=0.3, mechanism=mechanism),
        changes=changes | fields.pop("changes", {}),
        empty=({"queries": queries(9, 0)}, None),
        # A certificate of a call back to Python does not exist.
        calling=None if prediction.METHODS[mechanism].certified else {"apply_fn": calling_logit},
        **fields,
    )


@row(*[f"prediction: {name}" for name in LABELS])
def _answers(mechanism: str) -> Row:
    whole, other = bounds(), bounds(1)
    wider = dataclasses.replace(whole, upper=whole.upper + 1)
    changes = {"members": {"model": [whole, other]}, "boxes": {"model": wider}}
    per_batch = dataclasses.replace(whole, threat="replace_per_batch")
    return _asked(
        prediction.private_predict,
        mechanism,
        whole,
        other,
        label="private prediction",
        work=("jaxdp.prediction.answers", "_votes"),
        changes=changes,
        mistakes=(
            ({"model": []}, "bounds is empty"),
            ({"mechanism": "cauchy_values"}, "mechanism must be one of"),
            ({"model": dataclasses.replace(whole, ks=(1, 2, 3, 4))}, "must start at 0"),
            ({"model": dataclasses.replace(whole, product="rump")}, "product='tight'"),
            ({"model": per_batch}, "threat='replace_per_batch' cover .* is registered with"),
        ),
    )


@row("prediction: ensemble")
def _ensemble(_: str) -> Row:
    members = [bounds(0), bounds(1), bounds(2)]
    return _asked(
        prediction.private_predict,
        "randomised_response",
        members,
        members[::-1],
        label="private prediction",
        work=("jaxdp.prediction.answers", "_votes"),
    )


@row(*[f"prediction: {name}" for name in VALUES])
def _values(mechanism: str) -> Row:
    row = prediction.METHODS[mechanism]
    return _asked(
        prediction.private_values,
        mechanism,
        bounds(),
        bounds(1),
        arguments={"output_range": (-1.0, 1.0)},
        label="private regression",
        work=("jaxdp.prediction.answers", "certify") if row.certified else None,
        changes={"range": {"output_range": (-1.0, 2.0)}},
        mistakes=(
            ({"output_range": (1.0, 0.0)}, "output_range must be"),
            ({"model": [bounds()]}, "bounds must be of one model"),
            ({"apply_fn": lambda params, query: 0 * query.sum() + jnp.zeros(2)}, "one value"),
            ({"mechanism": "randomised_response"}, r"one of \['cauchy_values', 'laplace_values'\]"),
        ),
    )


@row("prediction: PATE")
def _pate(_: str) -> Row:
    mechanism = prediction.ConfidentGNMax(threshold=2.0, sigma_threshold=2.0, sigma_votes=2.0)
    members = [jnp.asarray(w, jnp.float32) for w in ([0, 1], [0, 2], [1, 0], [1, 1])]
    other_noise = dataclasses.replace(mechanism, sigma_votes=2.5)
    louder = type("Louder", (prediction.ConfidentGNMax,), {})(8.0, 0.5, 0.5)
    return Row(
        call=answers(prediction.pate_predict),
        arguments={
            "model": members,
            "apply_fn": logit,
            "queries": queries(),
            "mechanism": mechanism,
            "max_answers": 20,
        },
        event=mechanism.event(QUERIES, max_answers=20),
        label="PATE",
        work=("jaxdp.prediction.answers", "_labels"),
        changes={
            "data": {"model": [-member for member in members]},
            "queries": {"queries": queries(8)},
            "program": {"apply_fn": other_logit},
            "noise": {"mechanism": other_noise},
        },
        mistakes=(
            ({"model": []}, "members is empty"),
            ({"mechanism": louder}, "mechanism must be a ConfidentGNMax, got Louder"),
            ({"max_answers": 31}, "max_answers=31 must lie in"),
        ),
        empty=({"queries": queries(9, 0)}, None),
        calling={"apply_fn": calling_logit},
    )


# --- Recalibration -------------------------------------------------------------------------------


def people(seed: int = 0, count: int = 30) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 4)).astype(np.float32), rng.integers(0, 4, count)


SEARCH = {"iterations": 1}
RECALIBRATIONS: dict[str, Options] = {
    "acc_t": SEARCH,
    "nll_t": SEARCH,
    "ece_t": SEARCH,
    "histogram_binning": {"bins": 3},
    "logistic_binning": {},
}


@row(*[f"recalibration: {name}" for name in RECALIBRATIONS])
def _recalibration(name: str) -> Row:
    function = getattr(recalibration, name)

    def call(account: Any, *, records: Any, seed: bytes | None, epsilon: float, **options: Any):
        key = None if seed is None else noise.stream(seed, "test")
        sources = [recalibration.Party(*records, account=account)]
        return function(sources, epsilon=epsilon, key=key, **options).parameters

    logits, classes = people()
    mistakes = (
        ({"epsilon": 0.0}, "epsilon must be > 0 .* got 0.0"),
        ({"epsilon": 1e-8}, r"epsilon=1e-08 .* Use at least \d"),
        ({"adjacency": "swap"}, "adjacency must be one of .* got 'swap'"),
        ({"adjacency": "replace_one"}, "'replace_one', but 'private' .* 'add_remove'"),
        ({"records": (logits, classes * 1.0)}, "must be integers, got dtype float64"),
        ({"records": (logits, classes[1:])}, "labels .* of another n"),
    )
    if "iterations" in RECALIBRATIONS[name]:
        mistakes += (({"iterations": 0}, "iterations .* got 0"),)
    return Row(
        call=call,
        arguments={"records": (logits, classes), "epsilon": 1.0, **RECALIBRATIONS[name]},
        event=recalibration.event(1.0),
        label=type(recalibration.METHODS[name](**RECALIBRATIONS[name])).__name__,
        work=("jaxdp.recalibration.recalibrate", "converse"),
        changes={
            "data": {"records": people(1)},
            "label": {
                "records": (logits, np.where(np.arange(30) == 7, (classes + 1) % 4, classes))
            },
            "epsilon": {"epsilon": 1.5},
        },
        mistakes=mistakes,
        accounts=(({"adjacency": "replace_one"}, "'add_remove', but 'private' is registered"),),
        coarse="iterations" in RECALIBRATIONS[name],
    )


# --- A client's upload ---------------------------------------------------------------------------


@row("split: gaussian", "split: laplace")
def _upload(mechanism: str) -> Row:
    def call(account: Any, **arguments: Any) -> tuple[Any, ...]:
        return tuple(split.release_privately(account, **arguments))

    def config(**options: Any) -> split.PrivateRelease:
        options = {"noise_multiplier": 2.0, "label_epsilon": 0.5, "clip_norm": 2.0} | options
        return split.PrivateRelease(num_classes=4, mechanism=mechanism, **options)

    def basis(directions: np.ndarray, shape: tuple[int, int] = (3, 4)) -> split.Projection:
        return split.Projection(np.zeros(shape), directions)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3, 4)).astype(np.float32)
    y = rng.integers(0, 4, 20)
    projection = split.public_projection(x[::-1] + 1, 5)
    moved = projection._replace(directions=projection.directions.at[0, 0].add(1e-6))
    refused = (
        "is registered with '{}'.*Register the dataset with adjacency='replace_one'",
        ("add_remove", "zero_out"),
    )
    return Row(
        call=call,
        arguments={
            "release": config(),
            "representations": x,
            "labels": y,
            "projection": projection,
        },
        event=split.event(2.0, 0.5, mechanism=mechanism),
        label="split adaptation",
        work=("jaxdp.split.noisy_upload", "PrivateRelease._draw"),
        changes={
            "data": {"representations": np.where(np.arange(20)[:, None, None] == 7, x + 1e-6, x)},
            "labels": {"labels": np.where(np.arange(20) == 7, (y + 1) % 4, y)},
            "projection": {"projection": moved},
            "clip norm": {"release": config(clip_norm=np.nextafter(2.0, 3.0))},
            "labels' epsilon": {"release": config(label_epsilon=0.6)},
        },
        mistakes=(
            ({"representations": x[:, 0]}, r"representations must be \[n, T, D\] with n >= 1"),
            ({"representations": x.astype("i1")}, "floating point, got int8. Dequantise"),
            (
                {"representations": x.transpose(0, 2, 1)},
                r"does not fit representations \(20, 4, 3\)",
            ),
            ({"labels": y[1:]}, r"labels must be \[n\] for the 20 images, got shape \(19,\)"),
            ({"labels": y + 4}, r"labels must be in \[0, 4\)"),
            ({"labels": y * 1.0}, "labels must be integers"),
            ({"projection": basis(np.zeros((11, 2)))}, r"directions \(11, 2\) does not"),
            ({"projection": basis(np.zeros((12, 0)))}, r"directions \(12, 0\) does not"),
            ({"projection": basis(np.full((12, 2), np.nan))}, "NaN or infinite entries"),
            ({"projection": basis(np.zeros((12, 2), "c8"))}, "complex"),
            (
                {
                    "projection": basis(np.zeros((1, 2**20 + 1), "i1"), (1, 1)),
                    "representations": np.zeros((20, 1, 1), np.float32),
                },
                "at most 1048576 directions, got 1048577",
            ),
            ({"seed": b"short"}, "seed must be 16 bytes, got 5"),
            ({"seed": 3}, "seed must be 16 bytes, got int"),
        ),
        accounts=tuple(({"adjacency": name}, refused[0].format(name)) for name in refused[1]),
        empty=({"representations": x[:0], "labels": y[:0]}, r"n >= 1 images, got shape \(0, 3"),
        terms={"adjacency": "replace_one", "unit": "image"},
    )


# --- Labels --------------------------------------------------------------------------------------


@functools.cache
def survey(shift: int = 0, count: int = 90) -> Any:
    features = np.eye(3, dtype=np.float32)[np.arange(count) % 3]
    truth = (np.arange(count) + shift) % 3
    return data.from_arrays(features=features, label=truth, num_classes=3, name="survey")


def even_beliefs(noisy: Any, records: Any) -> np.ndarray:
    return np.full((len(records), 3), 1 / 3)


@row("labels: labels", "labels: stages", "labels: prior")
def _labels(name: str) -> Row:
    releases = {"prior": labels.release_label_prior, **labels.METHODS}

    def call(account: Any, *, source: Any, **options: Any) -> np.ndarray:
        beliefs = (even_beliefs,) if name == "stages" else ()
        noisy = releases[name](source, *beliefs, account=account, **options)
        return noisy if name == "prior" else noisy.labels

    owners = data.by_group(survey(), np.arange(90) // 2, max_records=2)
    floats = data.from_arrays(features=np.zeros((2, 1)), label=np.zeros(2))
    mistakes: tuple[tuple[Options, str], ...] = (
        ({"epsilon": 0.0}, "epsilon"),
        ({"num_classes": 1}, "num_classes"),
        ({"source": owners}, "one record of each owner"),
        ({"source": floats}, "dtype"),
        ({"seed": b"short"}, "seed must be 16 bytes, got 5"),
    )
    if name == "labels":
        mistakes += (({"prior": np.full((5, 3), 1 / 3)}, "row for each record"),)
    if name != "prior":
        mistakes += (
            ({"columns": ["age"]}, "columns must name public columns"),
            ({"columns": ["label"]}, "columns must name public columns"),
        )
    if name == "stages":
        mistakes += (({"stages": 1}, "stages must be at least 2"),)
    if name == "prior":  # noise that cannot be drawn
        least = 2 / 2**18
        mistakes += (({"epsilon": np.nextafter(least, 0)}, rf"epsilon must be at least {least}"),)
    planned = labels.event(1.0)
    assert isinstance(planned, ComposedDpEvent) and planned.events[0] == LabelDpEvent(1.0)
    whole = "whole examples.*labels only"
    adjacencies = ("add_remove", "replace_one", "zero_out")
    return Row(
        call=call,
        arguments={"source": survey(), "epsilon": 1.0},
        event=LabelDpEvent(1.0),
        label="label prior" if name == "prior" else "labels",
        work=("jaxdp.labels." + ("histogram" if name == "prior" else "noisy"), "read_column"),
        changes={"data": {"source": survey(1)}, "epsilon": {"epsilon": 0.9}},
        mistakes=mistakes,
        accounts=tuple(({"adjacency": adjacency}, whole) for adjacency in adjacencies),
        terms={"adjacency": "replace_label", "unit": "respondent"},
        releases=2 if name == "stages" else 1,
    )


# --- Adaptation to a stream ----------------------------------------------------------------------


def normalised(params: Any, images: jax.Array) -> jax.Array:
    x = images.reshape(len(images), -1)
    x = (x - x.mean(-1, keepdims=True)) * params["norm"]["scale"][None] + params["norm"]["bias"][
        None
    ]
    return x @ params["head"]


def twice_normalised(params: Any, images: jax.Array) -> jax.Array:
    return 2 * normalised(params, images)


def calling_normalised(params: Any, images: jax.Array) -> jax.Array:
    return identity_of(normalised(params, images))


@functools.cache
def adapter(name: str, noise_multiplier: float = 2.0, apply_fn: Any = normalised) -> tta.Adapter:
    options = {"num_classes": 3} if name in ("EATA", "SAR", "DeYO") else {}
    method = tta.METHODS[name](tta.Tent()) if name == "COME" else tta.METHODS[name](**options)
    private = tta.private(method, clip_norm=1.0, noise_multiplier=noise_multiplier)
    head = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    params = {"norm": {"scale": jnp.ones(12), "bias": jnp.zeros(12)}, "head": jnp.asarray(head)}
    chosen = {"adapted": lambda path, leaf: path.startswith("norm/")}
    return tta.Adapter(apply_fn, params, private, optax.sgd(0.5), **chosen)


@functools.lru_cache(maxsize=1)
def stream_account(account: Any, event: DpEvent) -> tta.StreamAccount:
    """Returns one account of a stream for one account of a ledger, which knows what it paid."""
    return tta.StreamAccount(account, event=event)


def stream(seed: int = 0, count: int = 4) -> tta.Stream:
    image = np.random.default_rng(seed).uniform(size=(count, 2, 2, 3)).astype(np.float32)
    source = data.from_arrays(image=image, label=np.zeros(count, int), num_classes=3)
    return tta.Stream({"clean": source}, batch_size=4, seed=0)


@row("tta: Tent")
def _stream(name: str) -> Row:
    """Its workdir keeps a state. tta/test_methods has the methods."""

    def call(account: Any, *, adapter: Any, stream: Any, event: Any = None, **options: Any) -> Any:
        paying = stream_account(account, event or adapter.method.event)
        served = tta.serve(adapter, stream, account=paying, **options)
        return served.state.params, served.correct

    used = adapter(name)
    return Row(
        call=call,
        arguments={"adapter": used, "stream": stream()},
        event=GaussianDpEvent(2.0),
        label="test-time adaptation",
        work=("jaxdp.tta.adapter", "Adapter.step"),
        changes={
            "data": {"stream": stream(1)},
            "program": {"adapter": adapter(name, 2.0, twice_normalised)},
        },
        mistakes=(
            ({"event": GaussianDpEvent(9.0)}, "event"),
            ({"seed": b"short"}, "seed must be 16 bytes, got 5"),
        ),
        accounts=(({"adjacency": "add_remove"}, "add_remove"),),
        calling={"adapter": adapter(name, 2.0, calling_normalised)},
        terms={"adjacency": "replace_one", "unit": "photograph"},
        value=lambda value: (value[0].params, value[1]),
        keeps=False,
    )


# --- Broken twins --------------------------------------------------------------------------------


def work(values: np.ndarray) -> np.ndarray:
    return values.cumsum()


def toy(flaw: str = "") -> Row:
    """A release of noisy sums that is right, or has one flaw."""

    def call(
        account: Any, *, values: np.ndarray, epsilon: float, workdir: Any, seed: bytes | None
    ) -> np.ndarray:
        if flaw == "works first":
            work(values)
        if flaw != "checks late":
            check(account, epsilon)
        if flaw == "compiles":
            jax.jit(lambda x: x + 1)(values)

        def compute(secret: bytes) -> dict[str, np.ndarray]:
            check(account, epsilon)
            secret = bytes(16) if flaw == "draws no noise" else secret
            drawn = np.random.default_rng(list(secret)).laplace(size=len(values))
            return {"sums": work(values) + drawn}

        what = Release(
            label=f"{values.sum()}" if flaw == "labels data" else "toy",
            charges=[(account, PureDpEvent(epsilon / (1 + (flaw == "pays a half"))))],
            facts=lambda: [epsilon] if flaw == "forgets its data" else [values, epsilon],
            compute=compute,
        )
        with Till(None if flaw == "keeps nothing" else workdir, seed=seed) as till:
            return till.once(what)["sums"]

    def check(account: Any, epsilon: float) -> None:
        if epsilon <= 0:
            raise ValueError(f"epsilon must be > 0, got {epsilon}.")
        if account.unit != "example":
            raise ValueError(f"unit must be 'example', got {account.unit!r}.")

    values = np.arange(5.0)
    return Row(
        call=call,
        arguments={"values": values, "epsilon": 1.0},
        event=PureDpEvent(1.0),
        label="toy",
        work=("tests.stages", "work"),
        changes={"data": {"values": values[::-1]}, "epsilon": {"epsilon": 0.5}},
        mistakes=(({"epsilon": 0.0}, "epsilon must be > 0, got 0.0"),),
        accounts=(({"unit": "patient"}, "unit must be 'example', got 'patient'"),),
    )


def spied(row: Row) -> tuple[Any, str]:
    """Returns the object and the name of the attribute that works on private data."""
    assert row.work is not None
    module, path = row.work
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name
