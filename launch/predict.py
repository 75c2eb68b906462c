"""Private prediction: python -m launch.predict --config configs/predict/digits.py --workdir
workdir/predict_digits.

Answers queries privately, and compares methods as Wicker et al. (arXiv 2406.13433, table 1) do. The
methods are one certified model or an ensemble, mechanisms with and without certificates, PATE and
DP-SGD. Each gets Q queries and one total (epsilon, delta). Besides the files of all studies, the
workdir holds:

    answers.npz, ledger.sqlite   the test inputs that were asked about, the private answers, and
                                 their cost
    student.safetensors          a model trained on the private answers, free to use and publish
    network.safetensors          the frozen network of the features, if one is used
    references/ledger.sqlite     the cost of the models and answers that serve comparison only
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxdp import finetune, prediction
from jaxdp.data import DataSpec, PoissonSampler, from_arrays
from jaxdp.models import save_params
from jaxdp.prediction import mechanisms
from jaxdp.privacy import Account, DpEvent, SelfComposedDpEvent
from jaxdp.release import Release, Till, stream
from jaxdp.report import format_table, plot_curves, progress_bar
from jaxdp.report.exactness import noise_of

from . import data, features, frame, models, plans, results
from .study import Fields, Lines, PrivateSet, Result, Row, Rows
from .teachers import (
    GLOBAL,
    MECHANISMS,
    OURS,
    SINGLE,
    SMOOTH,
    Bench,
    check,
    flip_probability,
    training_options,
)

PATE, DP_SGD = "PATE (Confident-GNMax)", "DP-SGD"
_REFERENCES = "references/ledger.sqlite"
# What one step of distance is, by the threat that the bounds cover. Theorem 4.6 holds for
# "replace_one", T4 of docs/design/prediction.md for "add_remove".
CHANGES = {"add_remove": "added or removed", "replace_one": "replaced"}
_SHORT = {GLOBAL: "global", SMOOTH: "smooth (paper)", OURS: "ours"}  # in figures


class Cell(NamedTuple):
    """The released answers, or a reference that they are compared with."""

    teacher: str
    answers: str


RELEASED, EXACT = Cell(SINGLE, "released"), Cell(SINGLE, "without noise")


def _cells(config: Any) -> Iterator[Cell]:
    threat = config.training.threat
    frame.known("mechanisms", config.mechanisms, MECHANISMS)
    frame.known("training.threat", [threat], CHANGES)
    data.only_adjacency(config.data, threat)
    if not config.mechanisms:
        raise ValueError(f"config.mechanisms must have some of {', '.join(MECHANISMS)}.")
    yield RELEASED
    if config.references:
        ensemble = f"{config.ensemble.members} models"
        for pool, name in itertools.product((SINGLE, ensemble), config.mechanisms):
            mechanism = MECHANISMS[name]
            yield Cell(pool, mechanism)
        yield Cell(ensemble, PATE)
        yield Cell(DP_SGD, "any number")
        yield EXACT


def _run(cell: Cell, work: frame.Work) -> Fields:
    bench = work.shared
    if cell == RELEASED:
        return _release(work)
    if cell == EXACT:
        teacher, _, _ = bench.single
        accuracy = bench.model.accuracy(teacher.params, bench.test)
        return {"per_query": [], "student": [], "expected": accuracy}
    with _account(cell, work) as account:
        if cell.teacher == DP_SGD:
            return _dp_sgd(cell, work, account)
        return _answers(cell, work, account)


def _own_terms(work: frame.Work) -> Fields:
    """Returns the terms of the private records in a ledger, without a budget."""
    train = work.shared.task.train
    return _terms(work.config) | {"records": len(train)}


def _account(cell: Cell, work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account of a cell. Models and answers that serve comparison only have their own
    ledger.
    """
    plan, name = work.shared.plan, work.shared.task.train.name
    terms = _own_terms(work)
    if cell != RELEASED:
        return frame.account(work.root / _REFERENCES, name, **terms)
    budget = results.only(plan, "epsilon", "delta")
    return work.account(name, label="answers", **terms, **budget)


def _terms(config: Any) -> Fields:
    """Returns unit and adjacency for the ledger. The bounds cover the neighbours of the ledger."""
    return data.terms(config.data, adjacency=config.training.threat)


def _release(work: frame.Work) -> Fields:
    """Releases the answers, and trains the student on them."""
    bench = work.shared
    plan, task = bench.plan, bench.task
    rows = bench.asked(0)
    queries = bench.test["features"][rows]
    labels = bench.test["label"][rows]
    scratch = work.folder(RELEASED) / "scratch"
    if task.network is not None:  # kept before anything is certified for it
        save_params(work.root / "network.safetensors", task.network)

    def ask() -> Fields:
        teacher, _, _ = bench.single
        answers = prediction.private_predict(
            teacher,
            bench.model.logits,
            queries,
            account=account,
            epsilon=bench.epsilon,
            workdir=scratch,
        )
        return {"rows": rows, "answers": answers}

    with _account(RELEASED, work) as account:
        released = work.arrays("answers.npz", ask)
        spent = account.epsilon(delta=plan.delta)
    answers = released["answers"]
    student, accuracy = bench.student(rows, answers)
    save_params(work.root / "student.safetensors", student)
    share = np.mean(answers == labels)
    return {"epsilon": spent, "per_query": float(share), "student": accuracy}


def _answers(cell: Cell, work: frame.Work, account: Account) -> Fields:
    """Returns scores of a teacher's answers and its students. Each repetition has other queries and
    fresh noise.
    """
    config, bench = work.config, work.shared
    repetitions = range(config.repetitions)
    queries = [bench.asked(1 + repetition) for repetition in repetitions]
    answer, event = _mechanism(cell, bench)

    def compute(secret: bytes) -> Fields:
        key = stream(secret, "repetitions")
        answers = []
        for repetition, rows in enumerate(queries):
            answers.append(answer(jax.random.fold_in(key, repetition), rows))
        return {"answers": np.stack(answers)}

    # The answers depend on these facts and on the code of this library only.
    pools = [dataclasses.astuple(pool) for pool in bench.pools.values()]
    facts = [config.to_json(), bench.train, bench.test, pools]
    label = f"{cell.teacher}, {cell.answers}"
    charge = account, SelfComposedDpEvent(event, config.repetitions)
    what = Release(label=label, charges=[charge], facts=lambda: facts, compute=compute)
    with Till(work.folder(cell) / "scratch") as till:
        answers = till.once(what)["answers"]
    truth = bench.test["label"]
    scores: Fields = {"per_query": [], "student": [], "answered": []}
    for repetition in progress_bar(repetitions, label=cell.answers, unit="repetition"):
        rows = queries[repetition]
        labels = answers[repetition]
        answered = labels >= 0  # PATE leaves queries unanswered
        count = int(answered.sum())
        scores["answered"].append(count)
        if not count:
            continue
        right = labels[answered] == truth[rows[answered]]
        scores["per_query"].append(float(np.mean(right)))
        if repetition < config.student.repetitions:
            _, accuracy = bench.student(rows, labels)
            scores["student"].append(accuracy)
    if cell.answers != PATE:
        pool = bench.pools[cell.teacher]
        scores["expected"] = pool.expected_accuracy(cell.answers, bench.epsilon, truth)
    return scores


Answer = Callable[[jax.Array, np.ndarray], np.ndarray]  # from a key and the rows of the queries


def _mechanism(cell: Cell, bench: Bench) -> tuple[Answer, DpEvent]:
    """Returns the mechanism of the answers, and the event of a repetition."""
    pool = bench.pools[cell.teacher]
    event = _event(cell, bench.config)
    if cell.answers != PATE:
        return functools.partial(pool.answer, cell.answers, bench.epsilon), event
    votes = pool.votes
    assert votes is not None
    pate = _pate(bench.config)
    limits = {"num_classes": bench.classes, "max_answers": bench.plan.queries}

    def answer(key: jax.Array, rows: np.ndarray) -> np.ndarray:
        return pate.answer(key, votes[:, rows], **limits)

    return answer, event


def _event(cell: Cell, config: Any) -> DpEvent:
    """Returns the event of one repetition of a cell."""
    queries = config.prediction.queries
    epsilon = prediction.query_epsilon(**config.prediction)
    if cell.answers == PATE:
        pate = _pate(config)
        return pate.event(queries, max_answers=queries)
    if cell.teacher == DP_SGD:
        model = models.dense(1, 2, **config.model)  # the event does not depend on the model
        trainer = dp_sgd(config, model, config.training.records)
        return trainer.event(0, config.dp_sgd.steps)
    return prediction.event(queries, epsilon=epsilon)


def _pate(config: Any) -> prediction.ConfidentGNMax:
    options = {**config.pate, **config.prediction}
    options["threshold"] *= config.ensemble.members  # the config has a share
    options["max_answers"] = options["queries"]
    options["adjacency"] = config.training.threat
    return prediction.ConfidentGNMax.calibrated(**options)


def _plan(config: Any, opened: Callable[[], Bench]) -> Iterator[plans.Item]:
    # A run computes features before it charges. A plan only opens the data.
    opened_data = features.read(config.data)
    check(config, opened_data)
    budget = config.prediction
    terms = _terms(config)
    terms |= {"records": config.training.records, "delta": budget.delta}
    for cell in _cells(config):
        if cell == EXACT:
            continue
        event = _event(cell, config)
        programs = functools.partial(_programs, cell, config, opened_data)
        computation: Fields = {"programs": programs, "steps": _steps(cell, config)}
        if cell == RELEASED:
            own = terms | {"epsilon": budget.epsilon}
            yield plans.Item("answers", event=event, terms=own, **computation)
            continue
        times = config.dp_sgd.runs if cell.teacher == DP_SGD else config.repetitions
        what = f"reference: {cell.teacher}, {cell.answers}, {times} repetitions"
        event = SelfComposedDpEvent(event, times)
        yield plans.Item(what, event=event, terms=terms, ledger=_REFERENCES, **computation)


def _steps(cell: Cell, config: Any) -> int:
    """Returns the number of steps of the training that a cell needs first. Cells share models."""
    epochs = config.training.epochs
    if cell.teacher == DP_SGD:
        return config.dp_sgd.runs * config.dp_sgd.steps
    if cell.answers == PATE:
        return epochs * config.ensemble.members
    return epochs if cell == RELEASED else 0


def _programs(
    cell: Cell, config: Any, opened: features.Opened, memory: int | None
) -> plans.Programs:
    """Returns the training of a cell, on zeros in place of features.

    Without a chip it is nothing, because a run computes features before it trains.
    """
    if memory is None:
        return ()
    model = models.dense(opened.width, opened.classes, **config.model)
    start = model.init()
    members = config.ensemble.members if cell.answers == PATE else 1
    records = config.training.records // members
    vectors = np.zeros((records, opened.width), np.float32)
    labels = np.zeros(records, np.int32)
    zeros = {"features": vectors, "label": labels}
    if cell.teacher == DP_SGD:
        source = from_arrays(**zeros, num_classes=opened.classes, name="zeros")
        trainer = dp_sgd(config, model, records)
        of_memory = plans.programs_of(trainer, source, start, _steps(cell, config))
        return of_memory(memory)
    options = training_options(config, records, records)
    functions = prediction.training_programs(model.loss, start, zeros, **options)
    programs = []
    for function, inputs, count in functions.values():
        programs.append((function, inputs, members * count))
    return programs


def dp_sgd(config: Any, model: models.Dense, records: int) -> finetune.PrivateTrainer:
    """Returns the DP-SGD trainer with the smallest noise at which a run costs at most the target
    epsilon.
    """
    training = config.dp_sgd
    budget = config.prediction
    batch_size = training.batch_size
    rate = batch_size / config.training.records
    sampler = PoissonSampler(records, rate)
    # A trainer divides by the expected batch size, which depends on the private number of records.
    # The declared number is public.
    declared = optax.scale(sampler.expected_batch_size / batch_size)
    momentum = training.momentum or None
    sgd = optax.sgd(training.learning_rate, momentum=momentum)
    optimizer = optax.chain(declared, sgd)
    terms = _terms(config) | results.only(budget, "epsilon", "delta")
    return finetune.dp_sgd(
        model.loss,
        optimizer,
        sampler=sampler,
        clip_norm=training.clip_norm,
        steps=training.steps,
        physical_batch_size=batch_size,
        **terms,
    )


def _dp_sgd(cell: Cell, work: frame.Work, account: Account) -> Fields:
    """Trains the same model by DP-SGD, several times."""
    bench, training = work.shared, work.config.dp_sgd
    train = bench.task.train
    steps = training.steps
    scratch = work.folder(cell) / "scratch"
    trainer = dp_sgd(work.config, bench.model, len(train))
    accuracies = []
    for run in progress_bar(range(training.runs), label=DP_SGD, unit="run"):
        state = finetune.fit(
            trainer,
            bench.start,
            train,
            account=account,
            workdir=scratch / str(run),
            steps=steps,
            checkpoint_every=steps,
            delta=bench.plan.delta,
        )
        accuracy = bench.model.accuracy(state.params, bench.test)
        accuracies.append(accuracy)
    mean = results.moments(accuracies).mean
    return {"per_query": accuracies, "student": accuracies, "expected": mean}


def _private(bench: Bench) -> list[PrivateSet]:
    """Returns the private records. Those of other stages are recognised if they are feature vectors
    too.
    """
    config, task = bench.config.data, bench.task
    source_of_kind = {"blobs": "bundled", "text": "tfds"}
    source = source_of_kind.get(config.kind) or config.get("source", "")
    is_public = DataSpec(source=source).is_public
    rows = task.train if task.rows is None else task.rows
    return [PrivateSet(task.train.name, rows, is_public)]


# --- Results ------------------------------------------------------------------------------------


def _result(rows: Rows, work: frame.Work) -> Fields:
    bench, training = work.shared, work.config.training
    released, *references = rows
    queries, delta = bench.plan.queries, bench.plan.delta
    tested = len(bench.test["label"])
    result = {
        "dataset": bench.task.train.name,
        "private_records": training.records,
        "queries": queries,
        "tested": tested,
        "epsilon": released["epsilon"],
        "delta": delta,
        "changes": CHANGES[training.threat],
        "epsilon_per_query": bench.epsilon,
        "released": results.only(released, "per_query", "student"),
    }
    if references:
        with _account(EXACT, work) as account:
            spent = account.epsilon(delta=delta)
        result |= {"rows": references, "references_epsilon": spent}
    return result


Points = list[tuple[float, float]]
Curves = dict[str, Points]


def _figures(result: Result, work: frame.Work) -> None:
    if "rows" in result:
        _draw_certified(result, work)
        _draw_accuracies(result, work)
        _draw_flips(result, work)


def _draw_certified(result: Result, work: frame.Work) -> None:
    distances = range(work.config.certificate.max_distance + 1)
    curves = Curves()
    for name, pool in work.shared.pools.items():
        shares = [float(np.mean(pool.distance >= k)) for k in distances]
        curves[name] = list(zip(distances, shares, strict=True))
    plot_curves(
        work.root / "certified.png",
        curves,
        title=f"{result['dataset']}: certified answers",
        subtitle=f"{result['tested']} test inputs. Evaluation only, not private.",
        xlabel=f"records {result['changes']}, k",
        ylabel="Share of test inputs whose answer k changed records cannot alter",
    )


def _draw_accuracies(result: Result, work: frame.Work) -> None:
    """Draws the accuracy of an answer over epsilon, and over the number of queries."""
    bench, plan = work.shared, work.shared.plan
    draw = functools.partial(plot_curves, ylabel="Accuracy of an answer", xscale="log")
    *_, dp_sgd_row, exact_row = result["rows"]
    dp_sgd, exact = dp_sgd_row["expected"], exact_row["expected"]
    references = {f"without noise  {100 * exact:.1f}%": exact}
    axis = np.logspace(-2, 1, 31).tolist()
    draw(
        work.root / "accuracy_by_epsilon.png",
        _expected(bench, axis, axis),
        title=f"{result['dataset']}: accuracy over ε",
        subtitle="Pure ε of each answer. Expectation over the noise. Evaluation only, not private.",
        xlabel="ε per query",
        references=references,
    )
    numbers = np.logspace(0, 4, 13).round().astype(int)
    queries = sorted({*numbers.tolist(), plan.queries})
    epsilons = [prediction.query_epsilon(plan.epsilon, plan.delta, number) for number in queries]
    curves = _expected(bench, queries, epsilons)
    draw(
        work.root / "accuracy_by_queries.png",
        curves,
        title=f"{result['dataset']}: accuracy over the number of queries",
        subtitle=f"All answers together {_total(plan)}-DP. Evaluation only, not private.",
        xlabel="number of queries",
        references={f"DP-SGD  {100 * dp_sgd:.1f}%": dp_sgd} | references,
    )


def _expected(bench: Bench, axis: Sequence[float], epsilons: Sequence[float]) -> Curves:
    """Returns the expected accuracy of each teacher and mechanism. Each place of the axis has an
    epsilon.
    """
    truth = bench.test["label"]
    names = reversed(bench.config.mechanisms)
    curves = Curves()
    for teacher, name in itertools.product(bench.pools, names):
        pool = bench.pools[teacher]
        mechanism = MECHANISMS[name]
        accuracies = [pool.expected_accuracy(mechanism, epsilon, truth) for epsilon in epsilons]
        label = f"{teacher}, {_SHORT[mechanism]}"
        curves[label] = list(zip(axis, accuracies, strict=True))
    return curves


def _total(plan: Any) -> str:
    return f"({plan.epsilon:g}, {_power(plan.delta)})"


def _draw_flips(result: Result, work: frame.Work) -> None:
    """Draws the probability of another answer than the model's, over the calibrated distance."""
    classes, plan = work.shared.classes, work.shared.plan
    epsilon = result["epsilon_per_query"]
    distance = np.arange(101)
    flips = {OURS: flip_probability(OURS, distance, epsilon, classes)}
    if classes == 2:
        delta = plan.delta / plan.queries
        flips["Cauchy, stability"] = mechanisms.flip_probability_cauchy(distance, epsilon=epsilon)
        flips["Laplace, stability, δ > 0"] = mechanisms.flip_probability_smooth_laplace(
            distance, epsilon=epsilon, delta=delta
        )
        flips["Cauchy, paper"] = flip_probability(SMOOTH, distance, epsilon, 2)
    flips[GLOBAL] = flip_probability(GLOBAL, distance, epsilon, classes)
    curves = Curves()
    for name, probabilities in flips.items():
        curves[name] = list(enumerate(probabilities.tolist()))
    queries = f"{plan.queries} queries at {_total(plan)}"
    plot_curves(
        work.root / "flips.png",
        curves,
        title="How often an answer differs from the model's",
        subtitle=f"{classes} classes, ε = {epsilon:.3f} per query: {queries}",
        xlabel="calibrated distance k'",
        ylabel="Flip probability",
    )


def _table(result: Result) -> Lines:
    return [_line(row, result["queries"]) for row in result["rows"]]


def _line(row: Row, queries: int) -> dict[str, str]:
    answered = "all"
    if "answered" in row:
        mean = np.mean(row["answered"])
        answered = f"{mean:.0f}/{queries}"
    expected = [row["expected"]] if "expected" in row else []
    line = {"teacher": row["teacher"], "mechanism": row["answers"]}
    line["per query"] = _percent(row["per_query"])
    line["all inputs"] = _percent(expected)
    line["student"] = _percent(row["student"])
    line["answered"] = answered
    return line


def _summary(result: Result) -> str:
    released, each = result["released"], result["epsilon_per_query"]
    right = results.percent(released["per_query"])
    student = results.percent(released["student"])
    delta = _power(result["delta"])
    answers = f"{result['queries']} answers about {result['dataset']}"
    text = (
        f"{answers}, pure epsilon {each:.4f} each: "
        f"{right} % right. Their student: {student} %.\n"
        f"The ledger recomputes epsilon = {result['epsilon']:.3f} at delta = {delta} for all "
        f"answers together (one example {result['changes']})."
    )
    if "rows" not in result:
        return text
    table = format_table(_table(result))
    another = result["references_epsilon"]
    return (
        f"{table}\n\n{_EXPLAINED}\n\n{text}\n"
        f"Publishing the references too would cost another epsilon = {another:.4g}. "
        "--config.references=False leaves them out."
    )


_EXPLAINED = (
    "Accuracy in percent. Per query and student: mean ± standard deviation over repetitions with "
    "fresh noise and\n"
    "other queries, each at the cost below. All inputs: expectation over the noise for every test "
    "input. The\n"
    "table and the figures are not private. They read certificates without noise for evaluation."
)


def _power(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, deviation, _ = results.moments(values)
    return results.percent(mean, deviation)


def _tables(result: Result, work: frame.Work) -> Fields:
    if "rows" not in result:
        return {}
    return {"Accuracy in percent": _table(result)}


_REPORT = frame.Report(
    title="private answers",
    page="predict.html.jinja",
    noise=lambda config: noise_of(False),
    shape={
        "dataset": str,
        "queries": int,
        "tested": int,
        "epsilon": float,
        "delta": float,
        "epsilon_per_query": float,
        "released": {"per_query": float, "student": float},
    },
    released={
        "answers.npz": "private answers",
        "student.safetensors": "student of the answers",
        "network.safetensors": "frozen public network",
    },
    references=True,
)

STUDY = frame.Study(
    name="predict",
    life=".lifecycle.predict",
    open=Bench,
    private=_private,
    account=_account,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=_tables,
    figures=_figures,
    plan=_plan,
    report=_REPORT,
)


def _no_search(config: Any, text: str) -> Any:
    """Refuses --tune, with the reason."""
    raise ValueError(
        f"--tune must be left out for launch.predict, got {text!r}. The student learns from "
        "answers that are paid for, so that its settings can be tried at no further cost. Each "
        "further teacher would answer, and pay, anew."
    )


if __name__ == "__main__":
    frame.main(STUDY, tunes=_no_search)
