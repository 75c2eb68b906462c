r"""The accuracy of a fine-tuning config over epsilon.

    python -m launch.finetune --config configs/finetune/cifar10_squeezenet.py \
        --workdir workdir/curve --config.public_benchmark

The part `curve` of a config has `epsilons`, a learning rate for each in `learning_rates`, and
`runs`. A point is one private model. It has its own ledger, as if it alone were released. Releasing
all points would cost the sum.
"""

import copy
import functools
import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from jaxdp import finetune
from jaxdp.models import save_params
from jaxdp.privacy import Account
from jaxdp.report import format_table, plot_curves

from . import frame, models, plans, results, tasks, trainers
from .study import Fields, Lines, Result, Rows


class Point(NamedTuple):
    """One private model. The noise of a run has no seed."""

    epsilon: float
    run: int


class _Opened(NamedTuple):
    task: tasks.Task
    trainer: Any  # of an epsilon; compiled once for all runs


def _private(config: Any, epsilon: float) -> Any:
    """Returns the `private` part of the config of one point."""
    points = config.curve
    place = list(points.epsilons).index(epsilon)
    private = copy.deepcopy(config.private)
    private.epsilon = epsilon
    private.learning_rate = points.learning_rates[place]
    return private


def _open(config: Any, root: pathlib.Path) -> _Opened:
    task = tasks.open_task(config, root)

    @functools.cache
    def trainer(epsilon: float) -> Any:
        return task.trainer(_private(config, epsilon))

    for epsilon in config.curve.epsilons:
        trainer(epsilon)
    return _Opened(task, trainer)


def _cells(config: Any) -> Iterator[Point]:
    epsilons, rates = config.curve.epsilons, config.curve.learning_rates
    if len(epsilons) != len(rates):
        raise ValueError(
            f"config.curve.learning_rates must have one rate for each of {len(epsilons)} "
            f"epsilons, got {len(rates)}."
        )
    if len({*epsilons}) < len(epsilons):
        raise ValueError(
            f"config.curve.epsilons must have each epsilon once, got {tuple(epsilons)}. A point "
            "has one learning rate."
        )
    for run in range(config.curve.runs):
        for epsilon in frame.some("curve.epsilons", epsilons):
            yield Point(epsilon, run)


def _account(cell: Point, work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account of a point in the point's own ledger."""
    task = work.shared.task
    private = _private(work.config, cell.epsilon)
    path = work.folder(cell) / frame.LEDGER
    terms = task.terms(private)
    return frame.account(path, task.private.name, label=private.method, **terms)


def _run(cell: Point, work: frame.Work) -> Fields:
    config, task = work.config, work.shared.task
    trainer = work.shared.trainer(cell.epsilon)
    private = _private(config, cell.epsilon)
    folder = work.folder(cell)
    scratch = folder / "scratch"
    start = models.fresh(task.network, config.init_seed)
    with _account(cell, work) as account, frame.watching(config, folder) as writers:
        params, cost = trainers.fit(trainer, start, task.units, private, account, scratch, writers)
    save_params(folder / "params.safetensors", task.serving(params))
    accuracy = finetune.accuracy(task.network.apply_fn, params, task.test)
    return {"accuracy": accuracy, **cost, "learning_rate": private.learning_rate}


def _result(rows: Rows, work: frame.Work) -> Fields:
    config, task = work.config, work.shared.task
    points = []
    for epsilon in config.curve.epsilons:
        runs = results.select(rows, epsilon=epsilon)
        moments = results.moments(row["accuracy"] for row in runs)
        deviation = moments.deviation if config.curve.runs > 1 else None
        point = {"epsilon": epsilon, "accuracy": moments.mean, "deviation": deviation}
        points.append(point)
    without_privacy = None
    if config.references:
        start = models.fresh(task.network, config.init_seed)
        without_privacy = tasks.without_privacy(config, task, start)
    return {
        "dataset": task.private.name,
        "records": len(task.private),
        "test_records": len(task.test),
        "delta": config.private.delta,
        "runs": config.curve.runs,
        "points": points,
        "without_privacy": without_privacy,
    }


def _table(result: Result) -> Lines:
    lines = []
    for point in result["points"]:
        accuracy = results.percent(point["accuracy"], point["deviation"])
        lines.append(_line(f"{point['epsilon']:g}", accuracy))
    plain = result["without_privacy"]
    if plain is not None:
        lines.append(_line("inf", results.percent(plain)))
    return lines


def _line(epsilon: str, accuracy: str) -> Fields:
    return {"epsilon": epsilon, "test accuracy %": accuracy}


def _tables(result: Result, work: frame.Work) -> Fields:
    return {"Test accuracy over epsilon": _table(result)}


def _records(result: Result) -> str:
    return f"{result['records']} private records of {result['dataset']}"


def _summary(result: Result) -> str:
    table = format_table(_table(result))
    return (
        f"{table}\n\n{_records(result)}, delta = {result['delta']:g}. "
        f"Mean and standard deviation over {result['runs']} runs.\n"
        "Each private model alone has its epsilon. Releasing several costs the sum."
    )


def _figures(result: Result, work: frame.Work) -> None:
    points = []
    ticks = {}
    for point in result["points"]:
        epsilon = point["epsilon"]
        points.append((epsilon, point["accuracy"]))
        ticks[epsilon] = f"{epsilon:g}"
    plain = result["without_privacy"]
    plot_curves(
        work.root / "curve.png",
        {"private": points},
        title=_records(result),
        subtitle=f"mean of {result['runs']} runs, delta = {result['delta']:g}",
        xlabel="epsilon",
        ylabel="test accuracy",
        xscale="log",
        xticks=ticks,
        references={} if plain is None else {"no privacy": plain},
    )


def _plan(config: Any, opened: Callable[[], _Opened]) -> Iterator[plans.Item]:
    task, trainer = opened()
    start = models.fresh(task.network, config.init_seed)
    _, units = task.blank()
    for epsilon in config.curve.epsilons:
        private = _private(config, epsilon)
        yield plans.training(
            f"epsilon {epsilon:g}",
            trainer(epsilon),
            units,
            start,
            steps=private.steps,
            every=private.checkpoint_every,
            terms=task.terms(private),
            runs=config.curve.runs,
            ledger="the point's own",
        )


_REPORT = frame.Report(
    title="accuracy over epsilon",
    released={"cells/*/*/params.safetensors": "a model of its own"},
    ledgers=("cells/*/*/ledger.sqlite",),
)

STUDY = frame.Study(
    name="curve",
    open=_open,
    account=_account,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=_tables,
    figures=_figures,
    plan=_plan,
    benchmark=(
        "It trains many models on one private set and compares them on its test set. For private "
        "data fine-tune one model, with a config without config.curve."
    ),
    report=_REPORT,
)
