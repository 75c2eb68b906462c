"""One prediction experiment from a config: certify a model, answer queries privately, compare, and draw.

The config is an `ml_collections.ConfigDict` as in `configs/predict/digits.py`, whose comments say what each field
means. The comparison is that of Wicker et al. (arXiv 2406.13433, table 1): one model or an ensemble, with noise
calibrated to global sensitivity, to smooth sensitivity with the paper's constants, or to stability by randomised
response ("ours"); with PATE and DP-SGD beside them; at Q queries and one total (epsilon, delta).
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import data, models
from jaxdp.files import read_npz, write_durably, write_json
from jaxdp.prediction import agt, ensembles, mechanisms, tasks
from jaxdp.prediction import answers as private
from jaxdp.privacy import Account, DpEvent, GaussianDpEvent, Ledger, SelfComposedDpEvent, calibrate_noise
from jaxdp.release import Release, Till, alone, bind, derive, finished_result, stream
from jaxdp.report import format_table, plot_curves
from jaxdp.transforms import losses, noise
from jaxdp.transforms.clipping import clipped_grad

Params = Any

OURS, SMOOTH, GLOBAL = "randomised response (ours)", "smooth sensitivity (paper)", "global sensitivity"


def run(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Runs the experiment and returns its result.

    A finished experiment is not run again. An interrupted one goes on with the same result, and pays nothing twice.

    Args:
      config: the experiment.
      workdir: its directory, made if needed. It holds afterwards:
          answers.npz          which test inputs were asked about, and the private answers
          student.safetensors  a model trained on the private answers, free to use and publish
          ledger.sqlite        what the private data paid for them (`python -m launch.ledger`)
          result.json          the table, with means and standard deviations over repetitions
          certified.png, accuracy_by_epsilon.png, accuracy_by_queries.png, flips.png
          private/             what an interrupted run needs to go on with the answers
          references/          the same and the ledger of everything that is only there to be compared with

    Raises:
      ValueError: the workdir belongs to an experiment with another config or is in use by another process, or the
        config is inconsistent.
      FileNotFoundError: a data set is not there; the message says how to get it.
    """
    root = pathlib.Path(workdir)
    if (result := finished_result(config, root, _summary)) is not None:
        return result
    task = tasks.load(config.data)
    model = _Model.of(config.model, task)
    _check(config, task)
    with alone(root), bind(config, root):
        print(
            f"{config.training.records} private records ({task.train.name}), {len(task.test)} test inputs "
            f"({task.test.name}). Features: {task.provenance}.",
            flush=True,
        )
        result = _run(config, task, model, root)
        write_json(root / "result.json", result)
    figures = " and four figures" if config.references else ""
    print(f"\n{_summary(result)}\n\nIn {root}: answers.npz, student.safetensors, ledger.sqlite{figures}.")
    return result


def _check(config: Any, task: tasks.Task) -> None:
    """Refuses what would fail after the budget is spent."""
    queries, batch, records = config.prediction.queries, config.dp_sgd.batch_size, config.training.records
    if not 1 <= queries < len(task.test):
        raise ValueError(
            f"config.prediction.queries={queries} must lie in [1, {len(task.test)}), the number of test inputs: the "
            "student is tested on those that are not asked about."
        )
    if config.references and not 1 <= batch <= records:
        raise ValueError(
            f"config.dp_sgd.batch_size={batch} must lie in [1, {records}], the declared number of private records "
            "(config.training.records)."
        )


# --- Model ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Model:
    """Dense layers with ReLU on feature vectors; two classes have one logit, which halves what can go wrong.

    Attributes:
      inputs, num_classes: number of features and classes.
      hidden: widths of hidden layers; none is logistic regression.
      bias: whether layers have a bias.
      init_seed: of the hidden layers. The last layer starts at zero.
    """

    inputs: int
    num_classes: int
    hidden: tuple[int, ...]
    bias: bool
    init_seed: int

    @classmethod
    def of(cls, config: Any, task: tasks.Task) -> "_Model":
        inputs = task.train.arrays["features"].shape[1]
        return cls(inputs, task.train.num_classes, tuple(config.hidden), config.bias, config.init_seed)

    def init(self) -> Params:
        outputs = 1 if self.num_classes == 2 else self.num_classes
        sizes = [self.inputs, *self.hidden, outputs]
        key = jax.random.key(self.init_seed)
        params = {}
        for layer, (rows, columns) in enumerate(itertools.pairwise(sizes)):
            last = layer == len(self.hidden)
            scale = 0.0 if last else math.sqrt(2 / rows)
            kernel = scale * jax.random.normal(jax.random.fold_in(key, layer), (rows, columns))
            params[f"dense_{layer}"] = {"kernel": kernel} | ({"bias": jnp.zeros(columns)} if self.bias else {})
        return params

    def logits(self, params: Params, features: jax.Array) -> jax.Array:
        """[] for two classes, else [C]; of one example [d]."""
        for layer in range(len(params)):
            weights = params[f"dense_{layer}"]
            features = features @ weights["kernel"]
            if self.bias:
                features = features + weights["bias"]
            if layer < len(self.hidden):
                features = jax.nn.relu(features)
        return features[0] if self.num_classes == 2 else features

    def loss(self, params: Params, example: Mapping[str, jax.Array]) -> jax.Array:
        """Cross entropy of one example."""
        loss = losses.sigmoid_cross_entropy if self.num_classes == 2 else losses.softmax_cross_entropy
        return loss(self.logits(params, example["features"]), example["label"])

    @functools.cached_property
    def _batched(self) -> Callable[[Params, Any], jax.Array]:
        return jax.jit(jax.vmap(self.logits, in_axes=(None, 0)))

    def accuracy(self, params: Params, examples: Mapping[str, np.ndarray]) -> float:
        logits = np.asarray(self._batched(params, examples["features"]))
        predicted = logits > 0 if logits.ndim == 1 else logits.argmax(axis=1)
        return float(np.mean(predicted == examples["label"]))


def _certified(config: Any, model: _Model, examples: Mapping[str, np.ndarray], divisor: int) -> Any:
    """Trains with bounds for every number of changed records up to the largest that the config asks for.

    `divisor` stands for the number of examples, which is private. All of them are one batch.
    """
    how = config.training
    return agt.train_with_bounds(
        model.loss,
        model.init(),
        examples,
        ks=min(config.certificate.max_distance, divisor),
        clip=how.clip,
        learning_rate=how.learning_rate,
        batch_size=divisor,
        epochs=how.epochs,
        momentum=how.momentum,
        weight_decay=how.weight_decay,
        lr_decay=how.lr_decay,
        lr_min=how.lr_min,
    )


# --- The experiment ---------------------------------------------------------------------------------------------


def _run(config: Any, task: tasks.Task, model: _Model, root: pathlib.Path) -> dict[str, Any]:
    dataset, plan = task.train.name, config.prediction
    train, test = _all(task.train), _all(task.test)
    bounds = _certified(config, model, train, config.training.records)
    each = private.query_epsilon(plan.epsilon, plan.delta, plan.queries)

    # The release: Q answers and the student that learns from them.
    asked = _choose(len(test["label"]), plan.queries, seed=config.query_seed)
    queries = test["features"][asked]
    with _ledger(root / "ledger.sqlite", task.train, plan) as ledger:
        if not (root / "answers.npz").exists():
            account = ledger.account(dataset, label="answers")
            given = private.private_predict(
                bounds, model.logits, queries, account=account, epsilon=each, workdir=root / "private"
            )
            _write_answers(root / "answers.npz", asked, given)
        epsilon = ledger.epsilon(dataset, delta=plan.delta)
    answers = read_npz(root / "answers.npz", ["answers"])["answers"]
    student = _student(config, model, queries, answers)
    models.save_params(root / "student.safetensors", student)
    if task.network is not None:
        models.save_params(root / "network.safetensors", task.network)
    others = np.setdiff1d(np.arange(len(test["label"])), asked)
    result = {
        "dataset": dataset,
        "private_records": config.training.records,
        "queries": plan.queries,
        "epsilon": epsilon,
        "delta": plan.delta,
        "epsilon_per_query": each,
        "released": {
            "per_query": float(np.mean(answers == test["label"][asked])),
            "student": model.accuracy(student, _take(test, others)),
        },
    }
    if config.references:
        with _ledger(root / "references" / "ledger.sqlite", task.train, None) as apart:
            result |= _compare(config, task, model, bounds, apart.account(dataset), root)
    return result


def _compare(
    config: Any, task: tasks.Task, model: _Model, bounds: Any, account: Account, root: pathlib.Path
) -> dict[str, Any]:
    """Everything that is shown beside the release; charged to a ledger of its own."""
    plan, classes = config.prediction, model.num_classes
    train, test = _all(task.train), _all(task.test)
    single = agt.certify(bounds, model.logits, test["features"])
    votes, members = _members(config, model, train, test["features"])
    ensemble = ensembles.vote(votes["label"], votes["distance"], num_classes=classes)
    pools = {
        "single model": _Certified(np.asarray(single.label), np.asarray(single.distance), classes),
        f"{members} models": _Certified(*ensemble, classes, votes["label"]),
    }
    each = private.query_epsilon(plan.epsilon, plan.delta, plan.queries)
    ways = [(pool, way) for pool in pools for way in _ways(classes)]
    answerers: dict[tuple[str, str], Callable[[jax.Array, np.ndarray], np.ndarray]] = {
        (pool, way): functools.partial(_answer, pools[pool], way, each) for pool, way in ways
    }
    events: dict[tuple[str, str], DpEvent] = dict.fromkeys(answerers, private.event(plan.queries, epsilon=each))
    pate = ensembles.ConfidentGNMax.calibrated(
        threshold=config.pate.threshold * members,
        queries=plan.queries,
        max_answers=plan.queries,
        epsilon=plan.epsilon,
        delta=plan.delta,
        ratio=config.pate.ratio,
    )
    name = f"{members} models", "PATE (Confident-GNMax)"
    answerers[name] = lambda key, rows: pate.answer(
        key, votes["label"][:, rows], num_classes=classes, max_answers=plan.queries
    )
    events[name] = pate.event(plan.queries, max_answers=plan.queries)

    # All that the references are made from; the rest is the code of this library.
    facts = [config.to_json(), train, test, [[pool.label, pool.distance] for pool in pools.values()], votes]

    def released(label: str, event: DpEvent, compute: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
        what = Release(label=label, charges=[(account, event)], facts=lambda: facts, compute=compute)
        with Till(root / "references" / re.sub(r"\W+", "_", label).strip("_")) as till:
            return till.once(what)

    rows = []
    for (pool, way), answer in answerers.items():
        event = SelfComposedDpEvent(events[pool, way], config.repetitions)
        given = released(f"{pool}, {way}", event, functools.partial(_repeat, config, answer, len(test["label"])))
        row = {"teacher": pool, "answers": way, **_judge(config, model, given, test)}
        if (pool, way) in ways:
            row["expected"] = pools[pool].expected_accuracy(way, each, test["label"])
        rows.append(row)
    event, dp_sgd = _dp_sgd(config, model, train)

    def accuracies(secret: bytes) -> dict[str, Any]:
        params = [dp_sgd(derive(secret, f"run {run}")) for run in range(config.dp_sgd.runs)]
        return {"accuracy": np.array([model.accuracy(one, test) for one in params])}

    runs = released("DP-SGD", SelfComposedDpEvent(event, config.dp_sgd.runs), accuracies)["accuracy"].tolist()
    whole = {"DP-SGD": float(np.mean(runs)), "without noise": model.accuracy(bounds.params, test)}
    ends = [("DP-SGD", "any number", runs), ("single model", "without noise", [])]
    rows += [
        {"teacher": teacher, "answers": way, "per_query": values, "student": values, "expected": expected}
        for (teacher, way, values), expected in zip(ends, whole.values(), strict=True)
    ]
    _draw(config, task, pools, test["label"], whole, root)
    return {"rows": rows, "references_epsilon": account.epsilon(delta=plan.delta)}


@dataclasses.dataclass(frozen=True)
class _Certified:
    """Labels and calibrated distances [Q] of all test inputs; members' labels [T, Q] of an ensemble."""

    label: np.ndarray
    distance: np.ndarray
    num_classes: int
    votes: np.ndarray | None = None

    def expected_accuracy(self, way: str, epsilon: float, truth: np.ndarray) -> float:
        """The mean over the noise of the accuracy of one answer per test input; for evaluation, not for release."""
        if way == GLOBAL and self.votes is not None:
            return self._laplace_vote_accuracy(epsilon, truth)
        flip = _flip(way, self.distance, epsilon, self.num_classes)
        return float(np.mean(np.where(self.label == truth, 1 - flip, flip / (self.num_classes - 1))))

    def _laplace_vote_accuracy(self, epsilon: float, truth: np.ndarray) -> float:
        # No closed form with several classes. The same draws for every epsilon make a smooth curve.
        counts = np.stack([np.sum(self.votes == label, axis=0) for label in range(self.num_classes)], axis=1)
        standard = np.random.default_rng(0).laplace(size=(50, *counts.shape))
        return float(np.mean((counts + 2 / epsilon * standard).argmax(axis=2) == truth))


def _ways(num_classes: int) -> tuple[str, ...]:
    """The paper's mechanism rounds a number, so it answers two classes only."""
    return (GLOBAL, SMOOTH, OURS) if num_classes == 2 else (GLOBAL, OURS)


def _flip(way: str, distance: np.ndarray, epsilon: float, num_classes: int) -> np.ndarray:
    if way == OURS:
        return mechanisms.flip_probability(distance, epsilon=epsilon, num_classes=num_classes)
    if way == SMOOTH:
        return mechanisms.flip_probability_cauchy(distance, epsilon=epsilon, calibration="paper")
    if num_classes == 2:
        return mechanisms.flip_probability_global_laplace(distance, epsilon=epsilon)
    return mechanisms.flip_probability(np.zeros_like(distance), epsilon=epsilon, num_classes=num_classes)


def _answer(pool: _Certified, way: str, epsilon: float, key: jax.Array, rows: np.ndarray) -> np.ndarray:
    if way == GLOBAL and pool.votes is not None:
        return ensembles.laplace_vote(key, pool.votes[:, rows], epsilon=epsilon, num_classes=pool.num_classes)
    global_mechanism = "global_laplace" if pool.num_classes == 2 else "global_response"
    mechanism = {OURS: "randomised_response", SMOOTH: "paper_cauchy", GLOBAL: global_mechanism}[way]
    return mechanisms.METHODS[mechanism].answer(
        key, pool.label[rows], pool.distance[rows], epsilon=epsilon, num_classes=pool.num_classes
    )


def _repeat(
    config: Any, answer: Callable[[jax.Array, np.ndarray], np.ndarray], count: int, secret: bytes
) -> dict[str, Any]:
    """Asks about other ones of `count` test inputs with fresh noise each time: test inputs and answers, both [R, Q]."""
    key = stream(secret, "repetitions")
    rows = [
        _choose(count, config.prediction.queries, seed=config.query_seed + 1 + repetition)
        for repetition in range(config.repetitions)
    ]
    answers = [answer(jax.random.fold_in(key, repetition), asked) for repetition, asked in enumerate(rows)]
    return {"rows": np.stack(rows), "answers": np.stack(answers)}


def _judge(
    config: Any, model: _Model, given: Mapping[str, np.ndarray], test: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Accuracies of answers, and of students, which are tested on the inputs not asked about."""
    result: dict[str, Any] = {"per_query": [], "student": [], "answered": []}
    for repetition, (rows, answers) in enumerate(zip(given["rows"], given["answers"], strict=True)):
        there = answers >= 0
        result["answered"].append(int(there.sum()))
        if not there.any():
            continue
        result["per_query"].append(float(np.mean(answers[there] == test["label"][rows[there]])))
        if repetition < config.student.repetitions:
            student = _student(config, model, test["features"][rows], answers)
            others = np.setdiff1d(np.arange(len(test["label"])), rows)
            result["student"].append(model.accuracy(student, _take(test, others)))
    return result


def _student(config: Any, model: _Model, queries: np.ndarray, answers: np.ndarray) -> Params:
    features, label = private.answered(queries, answers)
    return private.train_student(
        model.loss,
        model.init(),
        {"features": features, "label": label},
        optimizer=optax.sgd(config.student.learning_rate),
        steps=config.student.steps,
        batch_size=len(queries),
        seed=config.query_seed.to_bytes(16, "little"),
    )


def _members(
    config: Any, model: _Model, train: Mapping[str, np.ndarray], queries: np.ndarray
) -> tuple[dict[str, np.ndarray], int]:
    """Labels and distances [T, Q] of models trained on disjoint parts of the data."""
    count = config.ensemble.members
    parts = ensembles.partition_by_hash(train, count, salt=config.ensemble.salt.encode())
    divisor = config.training.records // count  # public, unlike the size of a part
    certificates = []
    for part in range(count):
        bounds = _certified(config, model, _take(train, np.flatnonzero(parts == part)), divisor)
        certificates.append(agt.certify(bounds, model.logits, queries))
    stacked = {
        field: np.stack([np.asarray(getattr(certificate, field)) for certificate in certificates])
        for field in ("label", "distance")
    }
    return stacked, count


def _dp_sgd(config: Any, model: _Model, train: Mapping[str, np.ndarray]) -> tuple[DpEvent, Callable[[bytes], Params]]:
    """DP-SGD (Abadi et al. 2016) of the same model: what one run costs, and a function that makes one from a secret."""
    how, plan = config.dp_sgd, config.prediction
    # The probability is public; the number of records is not.
    sampling = functools.partial(data.PoissonSampler, len(train["label"]), how.batch_size / config.training.records)
    clipped = clipped_grad(model.loss, clip_norm=how.clip_norm)

    def event(noise_multiplier: float) -> DpEvent:
        sampler = sampling()
        return SelfComposedDpEvent(sampler.event(GaussianDpEvent(noise_multiplier)), how.steps)

    multiplier = calibrate_noise(event, epsilon=plan.epsilon, delta=plan.delta)
    optimizer = optax.chain(
        noise.privatize(clipped, noise_multiplier=multiplier, divisor=how.batch_size),
        optax.sgd(how.learning_rate, momentum=how.momentum or None),
    )

    @jax.jit
    def update(params: Params, state: Any, total: Params) -> tuple[Params, Any]:
        updates, state = optimizer.update(total, state, params)
        return optax.apply_updates(params, updates), state

    add = jax.jit(functools.partial(jax.tree.map, jnp.add))

    def train_once(secret: bytes) -> Params:
        sampler = sampling(seed=derive(secret, "batches"))
        params = model.init()
        first, *rest = optimizer.init(params)
        state: Any = (first._replace(key=stream(secret, "gradient noise")), *rest)
        for step in range(how.steps):
            parts = zip(*data.pad_to_physical(sampler.batch(step), how.batch_size), strict=True)
            total = functools.reduce(add, (clipped(params, _take(train, rows), mask).grads for rows, mask in parts))
            params, state = update(params, state, total)
        return params

    return event(multiplier), train_once


# --- Figures and text -------------------------------------------------------------------------------------------


def _draw(
    config: Any,
    task: tasks.Task,
    pools: Mapping[str, _Certified],
    truth: np.ndarray,
    references: Mapping[str, float],
    root: pathlib.Path,
) -> None:
    plan, classes, account = config.prediction, task.train.num_classes, task.train.name
    each = private.query_epsilon(plan.epsilon, plan.delta, plan.queries)
    shown = range(config.certificate.max_distance + 1)
    plot_curves(
        root / "certified.png",
        {name: [(k, float(np.mean(pool.distance >= k))) for k in shown] for name, pool in pools.items()},
        title=f"{account}: certified answers",
        subtitle=f"{len(truth)} test inputs. Evaluation only, not private.",
        xlabel="records added or removed, k",
        ylabel="Share of test inputs whose answer no k changed records alter",
    )
    references = {f"{name}  {100 * value:.1f}%": value for name, value in references.items()}
    curves = [(pool, way) for pool in pools for way in reversed(_ways(classes))]
    grid = np.logspace(-2, 1, 31)
    plot_curves(
        root / "accuracy_by_epsilon.png",
        {
            f"{pool}, {_SHORT[way]}": [(e, pools[pool].expected_accuracy(way, float(e), truth)) for e in grid]
            for pool, way in curves
        },
        title=f"{account}: accuracy over ε",
        subtitle="Pure ε of each answer. Expectation over the noise; evaluation only, not private.",
        xlabel="ε per query",
        ylabel="Accuracy of an answer",
        xscale="log",
        references={name: value for name, value in references.items() if name.startswith("without noise")},
    )
    numbers = sorted({int(q) for q in np.logspace(0, 4, 13).round()} | {plan.queries})
    budget = {q: private.query_epsilon(plan.epsilon, plan.delta, q) for q in numbers}
    plot_curves(
        root / "accuracy_by_queries.png",
        {
            f"{pool}, {_SHORT[way]}": [(q, pools[pool].expected_accuracy(way, e, truth)) for q, e in budget.items()]
            for pool, way in curves
        },
        title=f"{account}: accuracy over the number of queries",
        subtitle=f"All answers together ({plan.epsilon:g}, {_power(plan.delta)})-DP. Evaluation only, not private.",
        xlabel="number of queries",
        ylabel="Accuracy of an answer",
        xscale="log",
        references=references,
    )
    distances = np.arange(101)
    flips = {"randomised response (ours)": _flip(OURS, distances, each, classes)}
    if classes == 2:
        flips |= {
            "Cauchy, stability": mechanisms.flip_probability_cauchy(distances, epsilon=each),
            "Laplace, stability, δ > 0": mechanisms.flip_probability_smooth_laplace(
                distances, epsilon=each, delta=plan.delta / plan.queries
            ),
            "Cauchy, paper": _flip(SMOOTH, distances, each, 2),
        }
    flips["global sensitivity"] = _flip(GLOBAL, distances, each, classes)
    plot_curves(
        root / "flips.png",
        {name: [(int(k), float(p)) for k, p in zip(distances, flip, strict=True)] for name, flip in flips.items()},
        title="How often an answer differs from the model's",
        subtitle=f"{classes} classes, ε = {each:.3f} per query: {plan.queries} queries at "
        f"({plan.epsilon:g}, {_power(plan.delta)})",
        xlabel="calibrated distance k'",
        ylabel="Flip probability",
    )


_SHORT = {OURS: "ours", SMOOTH: "smooth (paper)", GLOBAL: "global"}


def _summary(result: Mapping[str, Any]) -> str:
    released, delta = result["released"], result["delta"]
    text = (
        f"{result['queries']} answers about {result['dataset']}, pure epsilon {result['epsilon_per_query']:.4f} each: "
        f"{_percent([released['per_query']])} % right; the student trained on them {_percent([released['student']])} %."
        f"\nThe ledger recomputes epsilon = {result['epsilon']:.3f} at delta = {_power(delta)} for all answers together"
        " (adding or removing one example)."
    )
    if "rows" not in result:
        return text
    rows = [
        {
            "teacher": row["teacher"],
            "mechanism": row["answers"],
            "per query": _percent(row["per_query"]),
            "all inputs": _percent([row["expected"]] if "expected" in row else []),
            "student": _percent(row["student"]),
            "answered": f"{np.mean(row['answered']):.0f}/{result['queries']}" if "answered" in row else "all",
        }
        for row in result["rows"]
    ]
    return (
        f"{format_table(rows)}\n\n"
        "Accuracy in percent. Per query and student: mean ± standard deviation over repetitions with fresh noise and\n"
        "other queries, each at the price below. All inputs: expectation over the noise for every test input. The\n"
        f"table and the figures are evaluation, not private: they read certificates without noise.\n\n{text}\n"
        f"Publishing the references too would cost epsilon = {result['references_epsilon']:.4g} on top; "
        "--config.references=False leaves them out."
    )


def _power(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"


# --- Files ------------------------------------------------------------------------------------------------------


def _all(source: data.Source) -> dict[str, np.ndarray]:
    return source.gather(np.arange(len(source)))


def _take(examples: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: array[rows] for name, array in examples.items()}


def _choose(count: int, chosen: int, *, seed: int) -> np.ndarray:
    """Returns the public choice of test inputs to ask about, sorted int64 [chosen]."""
    return np.sort(np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")[:chosen])


def _ledger(path: pathlib.Path, train: data.Source, budget: Any) -> Ledger:
    path.parent.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(path)
    terms = {} if budget is None else {"epsilon": budget.epsilon, "delta": budget.delta}
    ledger.register(train.name, adjacency="add_remove", unit="example", records=len(train), **terms)
    return ledger


def _write_answers(path: pathlib.Path, rows: np.ndarray, answers: np.ndarray) -> None:
    write_durably(path, lambda file: np.savez(file, rows=rows, answers=answers))
