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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from . import data, features, frame, models, plans, results
from .study import PrivateSet
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
            yield Cell(pool, MECHANISMS[name])
        yield Cell(ensemble, PATE)
        yield Cell(DP_SGD, "any number")
        yield EXACT


def _run(cell: Cell, work: frame.Work) -> dict[str, Any]:
    bench = work.shared
    if cell == RELEASED:
        return _release(work)
    if cell == EXACT:
        accuracy = bench.model.accuracy(bench.single[0].params, bench.test)
        return {"per_query": [], "student": [], "expected": accuracy}
    reference = _dp_sgd if cell.teacher == DP_SGD else _answers
    with _references(work) as account:
        return reference(cell, work, account)


def _own_terms(work: frame.Work) -> dict[str, Any]:
    """Returns the terms of the private records in a ledger, without a budget."""
    return {**_terms(work.config), "records": len(work.shared.task.train)}


def _references(work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account of models and answers that serve comparison only."""
    train = work.shared.task.train
    return frame.account(work.root / _REFERENCES, train.name, **_own_terms(work))


def _terms(config: Any) -> dict[str, Any]:
    """Returns unit and adjacency for the ledger. The bounds cover the neighbours of the ledger."""
    return data.terms(config.data, adjacency=config.training.threat)


def _release(work: frame.Work) -> dict[str, Any]:
    """Releases the answers, and trains the student on them."""
    bench, rows = work.shared, work.shared.asked(0)
    if bench.task.network is not None:  # kept before anything is certified for it
        save_params(work.root / "network.safetensors", bench.task.network)

    def ask() -> dict[str, np.ndarray]:
        answers = prediction.private_predict(
            bench.single[0],
            bench.model.logits,
            bench.test["features"][rows],
            account=account,
            epsilon=bench.epsilon,
            workdir=work.folder(RELEASED) / "scratch",
        )
        return {"rows": rows, "answers": answers}

    budget = {"epsilon": bench.plan.epsilon, "delta": bench.plan.delta}
    name = bench.task.train.name
    with work.account(name, label="answers", **budget, **_own_terms(work)) as account:
        answers = work.arrays("answers.npz", ask)["answers"]
        spent = account.epsilon(delta=bench.plan.delta)
    student, accuracy = bench.student(rows, answers)
    save_params(work.root / "student.safetensors", student)
    return {
        "epsilon": spent,
        "per_query": float(np.mean(answers == bench.test["label"][rows])),
        "student": accuracy,
    }


def _answers(cell: Cell, work: frame.Work, account: Account) -> dict[str, Any]:
    """Returns scores of a teacher's answers and its students. Each repetition has other queries and
    fresh noise.
    """
    config, bench = work.config, work.shared
    truth = bench.test["label"]
    queries = [bench.asked(1 + repetition) for repetition in range(config.repetitions)]
    answer, event = _mechanism(cell, bench)

    def compute(secret: bytes) -> dict[str, Any]:
        key = stream(secret, "repetitions")
        answers = [answer(jax.random.fold_in(key, k), rows) for k, rows in enumerate(queries)]
        return {"answers": np.stack(answers)}

    # The answers depend on these facts and on the code of this library only.
    facts = [
        config.to_json(),
        bench.train,
        bench.test,
        [dataclasses.astuple(pool) for pool in bench.pools.values()],
    ]
    what = Release(
        label=f"{cell.teacher}, {cell.answers}",
        charges=[(account, SelfComposedDpEvent(event, config.repetitions))],
        facts=lambda: facts,
        compute=compute,
    )
    with Till(work.folder(cell) / "scratch") as till:
        answers = till.once(what)["answers"]
    scores: dict[str, Any] = {"per_query": [], "student": [], "answered": []}
    repetitions = range(config.repetitions)
    for repetition in progress_bar(repetitions, label=cell.answers, unit="repetition"):
        rows, labels = queries[repetition], answers[repetition]
        answered = labels >= 0  # PATE leaves queries unanswered
        scores["answered"].append(int(answered.sum()))
        if answered.any():
            right = labels[answered] == truth[rows[answered]]
            scores["per_query"].append(float(np.mean(right)))
            if repetition < config.student.repetitions:
                scores["student"].append(bench.student(rows, labels)[1])
    if cell.answers != PATE:
        pool = bench.pools[cell.teacher]
        scores["expected"] = pool.expected_accuracy(cell.answers, bench.epsilon, truth)
    return scores


def _mechanism(
    cell: Cell, bench: Bench
) -> tuple[Callable[[jax.Array, np.ndarray], np.ndarray], DpEvent]:
    """Returns the mechanism of the answers, and the event of a repetition."""
    pool, event = bench.pools[cell.teacher], _event(cell, bench.config)
    if cell.answers != PATE:
        return functools.partial(pool.answer, cell.answers, bench.epsilon), event
    assert pool.votes is not None
    pate, votes = _pate(bench.config), pool.votes

    def answer(key: jax.Array, rows: np.ndarray) -> np.ndarray:
        return pate.answer(
            key, votes[:, rows], num_classes=bench.classes, max_answers=bench.plan.queries
        )

    return answer, event


def _event(cell: Cell, config: Any) -> DpEvent:
    """Returns the event of one repetition of a cell."""
    plan, epsilon = config.prediction, prediction.query_epsilon(**config.prediction)
    if cell.answers == PATE:
        return _pate(config).event(plan.queries, max_answers=plan.queries)
    if cell.teacher == DP_SGD:
        model = models.Dense(1, 2, **config.model)  # the event does not depend on the model
        return dp_sgd(config, model, config.training.records).event(0, config.dp_sgd.steps)
    return prediction.event(plan.queries, epsilon=epsilon)


def _pate(config: Any) -> prediction.ConfidentGNMax:
    options = dict(config.pate)
    options["threshold"] *= config.ensemble.members  # the config has a share
    return prediction.ConfidentGNMax.calibrated(
        **options,
        max_answers=config.prediction.queries,
        adjacency=config.training.threat,
        **config.prediction,
    )


def _plan(config: Any, opened: Callable[[], Bench]) -> Iterator[plans.Item]:
    # A run computes features before it charges. A plan only opens the data.
    opened_data = features.read(config.data)
    check(config, opened_data)
    terms = _terms(config) | {
        "records": config.training.records,
        "delta": config.prediction.delta,
    }
    for cell in _cells(config):
        programs = functools.partial(_programs, cell, config, opened_data)
        steps = _steps(cell, config)
        if cell == RELEASED:
            mine = {"epsilon": config.prediction.epsilon}
            event = _event(cell, config)
            yield plans.Item("answers", "", event, terms | mine, programs=programs, steps=steps)
        elif cell != EXACT:
            times = config.dp_sgd.runs if cell.teacher == DP_SGD else config.repetitions
            yield plans.Item(
                f"reference: {cell.teacher}, {cell.answers}, {times} repetitions",
                "",
                SelfComposedDpEvent(_event(cell, config), times),
                terms,
                ledger=_REFERENCES,
                programs=programs,
                steps=steps,
            )


def _steps(cell: Cell, config: Any) -> int:
    """Returns the number of steps of the training that a cell needs first. Cells share models."""
    if cell.teacher == DP_SGD:
        return int(config.dp_sgd.runs * config.dp_sgd.steps)
    epochs: int = config.training.epochs
    if cell == RELEASED:
        return epochs
    return epochs * int(config.ensemble.members) if cell.answers == PATE else 0


def _programs(
    cell: Cell, config: Any, opened: features.Opened, memory: int | None
) -> plans.Programs:
    """Returns the training of a cell, on zeros in place of features.

    Without a chip it is nothing, because a run computes features before it trains.
    """
    if memory is None:
        return ()
    model = models.Dense(opened.width, opened.classes, **config.model)
    members = config.ensemble.members if cell.answers == PATE else 1
    records = config.training.records // members
    zeros = {
        "features": np.zeros((records, opened.width), np.float32),
        "label": np.zeros(records, np.int32),
    }
    if cell.teacher == DP_SGD:
        source = from_arrays(**zeros, num_classes=opened.classes, name="zeros")
        trainer = dp_sgd(config, model, records)
        return plans.programs_of(trainer, source, model.init(), _steps(cell, config))(memory)
    options = training_options(config, records, records)
    functions = prediction.training_programs(model.loss, model.init(), zeros, **options)
    return [(function, inputs, members * count) for function, inputs, count in functions.values()]


def dp_sgd(config: Any, model: models.Dense, records: int) -> finetune.PrivateTrainer:
    """Returns the DP-SGD trainer with the smallest noise at which a run costs at most the target
    epsilon.
    """
    training = config.dp_sgd
    budget = config.prediction
    sampler = PoissonSampler(records, training.batch_size / config.training.records)
    # A trainer divides by the expected batch size, which depends on the private number of records.
    # The declared number is public.
    declared = optax.scale(sampler.expected_batch_size / training.batch_size)
    sgd = optax.sgd(training.learning_rate, momentum=training.momentum or None)
    return finetune.dp_sgd(
        model.loss,
        optax.chain(declared, sgd),
        sampler=sampler,
        clip_norm=training.clip_norm,
        epsilon=budget.epsilon,
        delta=budget.delta,
        steps=training.steps,
        physical_batch_size=training.batch_size,
        **_terms(config),
    )


def _dp_sgd(cell: Cell, work: frame.Work, account: Account) -> dict[str, Any]:
    """Trains the same model by DP-SGD, several times."""
    bench = work.shared
    train = bench.task.train
    runs, steps = work.config.dp_sgd.runs, work.config.dp_sgd.steps
    trainer = dp_sgd(work.config, bench.model, len(train))
    accuracies = []
    for run in progress_bar(range(runs), label=DP_SGD, unit="run"):
        state = finetune.fit(
            trainer,
            bench.start,
            train,
            account=account,
            workdir=work.folder(cell) / "scratch" / str(run),
            steps=steps,
            checkpoint_every=steps,
            delta=bench.plan.delta,
        )
        accuracies.append(bench.model.accuracy(state.params, bench.test))
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


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    bench, (released, *references) = work.shared, rows
    result = {
        "dataset": bench.task.train.name,
        "private_records": work.config.training.records,
        "queries": bench.plan.queries,
        "tested": len(bench.test["label"]),
        "epsilon": released["epsilon"],
        "delta": bench.plan.delta,
        "changes": CHANGES[work.config.training.threat],
        "epsilon_per_query": bench.epsilon,
        "released": {name: released[name] for name in ("per_query", "student")},
    }
    if references:
        with _references(work) as account:
            spent = account.epsilon(delta=bench.plan.delta)
        result |= {"rows": references, "references_epsilon": spent}
    return result


Curves = dict[str, list[tuple[float, float]]]


def _figures(result: Mapping[str, Any], work: frame.Work) -> None:
    if "rows" in result:
        _draw_certified(result, work)
        _draw_accuracies(result, work)
        _draw_flips(result, work)


def _draw_certified(result: Mapping[str, Any], work: frame.Work) -> None:
    tested = len(work.shared.test["label"])
    curves = Curves()
    for name, pool in work.shared.pools.items():
        distances = range(work.config.certificate.max_distance + 1)
        curves[name] = [(k, float(np.mean(pool.distance >= k))) for k in distances]
    plot_curves(
        work.root / "certified.png",
        curves,
        title=f"{result['dataset']}: certified answers",
        subtitle=f"{tested} test inputs. Evaluation only, not private.",
        xlabel=f"records {CHANGES[work.config.training.threat]}, k",
        ylabel="Share of test inputs whose answer k changed records cannot alter",
    )


def _draw_accuracies(result: Mapping[str, Any], work: frame.Work) -> None:
    """Draws the accuracy of an answer over epsilon, and over the number of queries."""
    bench, plan = work.shared, work.shared.plan
    mechanisms_shown = [MECHANISMS[name] for name in reversed(work.config.mechanisms)]

    def curves(epsilons: Mapping[float, float]) -> Curves:
        """Returns curves over the keys. Each key stands for an epsilon."""
        points = Curves()
        for (name, pool), mechanism in itertools.product(bench.pools.items(), mechanisms_shown):
            points[f"{name}, {_SHORT[mechanism]}"] = [
                (x, pool.expected_accuracy(mechanism, epsilon, bench.test["label"]))
                for x, epsilon in epsilons.items()
            ]
        return points

    dp_sgd, exact = (row["expected"] for row in result["rows"][-2:])
    without_noise = {f"without noise  {100 * exact:.1f}%": exact}
    plot_curves(
        work.root / "accuracy_by_epsilon.png",
        curves({float(epsilon): float(epsilon) for epsilon in np.logspace(-2, 1, 31)}),
        title=f"{result['dataset']}: accuracy over ε",
        subtitle="Pure ε of each answer. Expectation over the noise. Evaluation only, not private.",
        xlabel="ε per query",
        ylabel="Accuracy of an answer",
        xscale="log",
        references=without_noise,
    )
    numbers = {int(number) for number in np.logspace(0, 4, 13).round()}
    queries = sorted(numbers | {plan.queries})
    plot_curves(
        work.root / "accuracy_by_queries.png",
        curves({q: prediction.query_epsilon(plan.epsilon, plan.delta, q) for q in queries}),
        title=f"{result['dataset']}: accuracy over the number of queries",
        subtitle=f"All answers together {_total(plan)}-DP. Evaluation only, not private.",
        xlabel="number of queries",
        ylabel="Accuracy of an answer",
        xscale="log",
        references={f"DP-SGD  {100 * dp_sgd:.1f}%": dp_sgd} | without_noise,
    )


def _total(plan: Any) -> str:
    return f"({plan.epsilon:g}, {_power(plan.delta)})"


def _draw_flips(result: Mapping[str, Any], work: frame.Work) -> None:
    """Draws the probability of another answer than the model's, over the calibrated distance."""
    classes, plan, epsilon = work.shared.classes, work.shared.plan, result["epsilon_per_query"]
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
    queries = f"ε = {epsilon:.3f} per query: {plan.queries} queries at {_total(plan)}"
    plot_curves(
        work.root / "flips.png",
        {name: list(enumerate(map(float, shares))) for name, shares in flips.items()},
        title="How often an answer differs from the model's",
        subtitle=f"{classes} classes, {queries}",
        xlabel="calibrated distance k'",
        ylabel="Flip probability",
    )


def _table(result: Mapping[str, Any]) -> list[dict[str, str]]:
    return [_line(row, result["queries"]) for row in result["rows"]]


def _line(row: Mapping[str, Any], queries: int) -> dict[str, str]:
    answered = "all"
    if "answered" in row:
        answered = f"{np.mean(row['answered']):.0f}/{queries}"
    return {
        "teacher": row["teacher"],
        "mechanism": row["answers"],
        "per query": _percent(row["per_query"]),
        "all inputs": _percent([row["expected"]] if "expected" in row else []),
        "student": _percent(row["student"]),
        "answered": answered,
    }


def _summary(result: Mapping[str, Any]) -> str:
    released, each = result["released"], result["epsilon_per_query"]
    text = (
        f"{result['queries']} answers about {result['dataset']}, pure epsilon {each:.4f} each: "
        f"{_percent([released['per_query']])} % right. Their student: "
        f"{_percent([released['student']])} %."
        f"\nThe ledger recomputes epsilon = {result['epsilon']:.3f} at delta = "
        f"{_power(result['delta'])} for all "
        f"answers together (one example {result['changes']})."
    )
    if "rows" not in result:
        return text
    return (
        f"{format_table(_table(result))}\n\n"
        "Accuracy in percent. Per query and student: mean ± standard deviation over repetitions "
        "with fresh noise and\n"
        "other queries, each at the cost below. All inputs: expectation over the noise for every "
        "test input. The\n"
        "table and the figures are not private. They read certificates without noise for "
        f"evaluation.\n\n{text}\n"
        "Publishing the references too would cost another epsilon = "
        f"{result['references_epsilon']:.4g}. "
        "--config.references=False leaves them out."
    )


def _power(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def _percent(values: Sequence[float]) -> str:
    return results.percent(*results.moments(values)[:2]) if values else "-"


STUDY = frame.Study(
    name="predict",
    life=".lifecycle.predict",
    open=Bench,
    private=_private,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=lambda result, _: {"Accuracy in percent": _table(result)} if "rows" in result else {},
    figures=_figures,
    plan=_plan,
    report=frame.Report(
        title="private answers",
        page="predict.html.jinja",
        shape={
            **dict.fromkeys(("epsilon", "delta", "epsilon_per_query"), float),
            **dict.fromkeys(("queries", "tested"), int),
            "dataset": str,
            "released": {"per_query": float, "student": float},
        },
        released={
            "answers.npz": "private answers",
            "student.safetensors": "student of the answers",
            "network.safetensors": "frozen public network",
        },
        references=True,
    ),
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
