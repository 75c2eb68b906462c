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
from typing import Any, NamedTuple

from jaxdp import finetune
from jaxdp.models import save_params
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
    private = copy.deepcopy(config.private)
    private.epsilon = epsilon
    private.learning_rate = config.curve.learning_rates[list(config.curve.epsilons).index(epsilon)]
    return private


def _open(config: Any, root: pathlib.Path) -> _Opened:
    task = tasks.open_task(config, root)
    trainer = functools.cache(lambda epsilon: task.trainer(_private(config, epsilon)))
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
    for run in range(config.curve.runs):
        for epsilon in frame.some("curve.epsilons", epsilons):
            yield Point(epsilon, run)


def _run(cell: Point, work: frame.Work) -> Fields:
    task, trainer = work.shared.task, work.shared.trainer(cell.epsilon)
    private, folder = _private(work.config, cell.epsilon), work.folder(cell)
    start = models.fresh(task.network, work.config.init_seed)
    ledger = frame.account(
        folder / "ledger.sqlite", task.private.name, label=private.method, **task.terms(private)
    )
    with ledger as account, frame.watching(work.config, folder) as writers:
        params, cost = trainers.fit(
            trainer, start, task.units, private, account, folder / "scratch", writers
        )
    save_params(folder / "params.safetensors", task.serving(params))
    return {
        "accuracy": finetune.accuracy(task.network.apply_fn, params, task.test),
        **cost,
        "learning_rate": private.learning_rate,
    }


def _result(rows: Rows, work: frame.Work) -> Fields:
    points = []
    for epsilon in work.config.curve.epsilons:
        runs = results.select(rows, epsilon=epsilon)
        moments = results.moments(row["accuracy"] for row in runs)
        deviation = moments.deviation if work.config.curve.runs > 1 else None
        points.append({"epsilon": epsilon, "accuracy": moments.mean, "deviation": deviation})
    task = work.shared.task
    return {
        "dataset": task.private.name,
        "records": len(task.private),
        "test_records": len(task.test),
        "delta": work.config.private.delta,
        "runs": work.config.curve.runs,
        "points": points,
        "without_privacy": _without(work) if work.config.references else None,
    }


def _without(work: frame.Work) -> float:
    """Returns the accuracy without clipping and noise."""
    task, config = work.shared.task, work.config
    params = models.train(
        task.network,
        models.fresh(task.network, config.init_seed),
        task.private,
        config.no_privacy,
        seed=config.init_seed,
        optimizer=functools.partial(models.adam_on, chosen=task.chosen),
        label="no privacy",
    )
    return finetune.accuracy(task.network.apply_fn, params, task.test)


def _table(result: Result) -> Lines:
    rows = [
        {
            "epsilon": f"{p['epsilon']:g}",
            "test accuracy %": results.percent(p["accuracy"], p["deviation"]),
        }
        for p in result["points"]
    ]
    plain = result["without_privacy"]
    return rows + (
        [{"epsilon": "inf", "test accuracy %": results.percent(plain)}] if plain is not None else []
    )


def _summary(result: Result) -> str:
    return (
        f"{format_table(_table(result))}\n\n{result['records']} private records of "
        f"{result['dataset']}, delta = "
        f"{result['delta']:g}. Mean and standard deviation over {result['runs']} runs.\nEach "
        "private model alone has "
        "its epsilon. Releasing several costs the sum."
    )


def _figures(result: Result, work: frame.Work) -> None:
    plain = result["without_privacy"]
    plot_curves(
        work.root / "curve.png",
        {"private": [(point["epsilon"], point["accuracy"]) for point in result["points"]]},
        title=f"{result['records']} private records of {result['dataset']}",
        subtitle=f"mean of {result['runs']} runs, delta = {result['delta']:g}",
        xlabel="epsilon",
        ylabel="test accuracy",
        xscale="log",
        xticks={point["epsilon"]: f"{point['epsilon']:g}" for point in result["points"]},
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


STUDY = frame.Study(
    name="curve",
    open=_open,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=lambda result, work: {"Test accuracy over epsilon": _table(result)},
    figures=_figures,
    plan=_plan,
    benchmark=(
        "It trains many models on one private set and compares them on its test set. For private "
        "data fine-tune one model, with a config without config.curve."
    ),
    report=frame.Report(
        title="accuracy over epsilon",
        released={"cells/*/*/params.safetensors": "a model of its own"},
        ledgers=("cells/*/*/ledger.sqlite",),
    ),
)
