r"""A private search for the settings of a training, which costs one event.

    python -m launch.finetune --config configs/finetune/tune.py --workdir workdir/tune

    python -m launch.finetune --config configs/digits_dpsgd.py --workdir workdir/tune \
        --tune 'learning_rate=0.1,0.3 clip_norm=0.5,1'

The part `tune` of a config, of which --tune gives the grid, has
  grid              fields of `private` with their values; all combinations are candidates
  runs              the mean number of runs: the number is drawn, and stays secret
  distribution      "geometric", "logarithmic" or "poisson"
  score             "public" takes the accuracy on the public examples, "charged" a noisy count of
                    right answers on the private ones
  score_noise_multiplier  the deviation of the noise on that count

`private.epsilon` is that of the whole search. All candidates have the same noise.
"""

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jaxdp
from jaxdp import finetune
from jaxdp.data import Groups
from jaxdp.models import save_params
from jaxdp.privacy import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    OneOfDpEvent,
    calibrate_noise,
)
from jaxdp.report import format_table

from . import frame, models, plans, settings, tasks, trainers

Params = Any
SCORES = ("public", "charged")
SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
_DEFAULTS: Mapping[str, Any] = {
    "runs": 8.0,
    "distribution": "geometric",
    "score": "charged",
    "score_noise_multiplier": 20.0,
}
# What a search must not change: the budget, and what a run does not depend on.
_FIXED = ("epsilon", "delta", "accountant", "method", "noise_multiplier", "checkpoint_every")


class Model(NamedTuple):
    """The only cell. The runs of a search are no cells: their rows would be published."""

    model: str


class _Opened(NamedTuple):
    task: tasks.Task
    privates: Mapping[str, Any]  # the `private` part of each candidate, by its name
    trainers: Mapping[str, Any]
    runs: finetune.RandomRuns
    event: DpEvent


def with_grid(config: Any, text: str) -> Any:
    """Returns the config of a search over a grid such as "learning_rate=0.1,0.3 clip_norm=0.5,1".

    A config without the part `tune` gets one, with a charged score and 8 runs on average.
    """
    grid = {}
    for entry in text.split():
        field, equals, values = entry.partition("=")
        if not (field and equals and values):
            raise ValueError(
                "--tune must name fields of config.private with their values, such as "
                f"'learning_rate=0.1,0.3 clip_norm=0.5,1', got {text!r}."
            )
        grid[field] = tuple(map(_value, values.split(",")))
    searched = config.copy_and_resolve_references()
    with searched.unlocked():
        searched.tune = {**_DEFAULTS, **dict(config.get("tune", {})), "grid": grid}
    return searched


def _value(text: str) -> Any:
    """Returns the number or the text of a value of a grid."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _open(config: Any, root: Any) -> _Opened:
    frame.known("tune.score", [config.tune.score], SCORES)
    frame.known("tune.distribution", [config.tune.distribution], SHAPES)
    if config.private.method != "dp_sgd" or trainers.scaler_event(config.private):
        raise ValueError(
            "config.private.method must be 'dp_sgd' for a search, without a scaler, got "
            f"{config.private.method!r}. `jaxdp.tune` takes trainers of every method."
        )
    task = tasks.open_task(config, root)
    if config.tune.score == "public" and task.public is None:
        raise ValueError(
            "config.tune.score='public' needs public examples. Name some in config.data.parts, or "
            "take 'charged'."
        )
    if config.tune.score == "charged" and isinstance(task.units, Groups):
        raise ValueError(
            "config.tune.score must be 'public' where config.data.group protects owners of several "
            "records: a charged count protects one record."
        )
    with settings.named("tune", config.tune, mean="tune.runs"):
        runs = finetune.RandomRuns(config.tune.runs, SHAPES[config.tune.distribution])
    privates = _privates(config)
    noise = _noise(config, task, runs, privates)
    for private in privates.values():
        with private.unlocked():
            private.noise_multiplier = noise
    candidates = {name: task.trainer(private) for name, private in privates.items()}
    return _Opened(task, privates, candidates, runs, _event(config, task, runs, privates, noise))


def _privates(config: Any) -> dict[str, Any]:
    """Returns the `private` part of the config of each candidate by its name."""
    grid = dict(config.tune.grid)
    frame.known("tune.grid", grid, [name for name in config.private if name not in _FIXED])
    for name, values in grid.items():
        frame.some(f"tune.grid.{name}", values)
    privates = {}
    for values in itertools.product(*grid.values()):
        private = config.private.copy_and_resolve_references()
        private.update(dict(zip(grid, values, strict=True)))
        settings.check_numbers({"private": private})
        pairs = zip(grid, values, strict=True)
        name = ", ".join(f"{field} {value}" for field, value in pairs)
        privates[name] = private
    return privates


def _noise(config: Any, task: tasks.Task, runs: Any, privates: Mapping[str, Any]) -> float:
    """Returns the least noise multiplier at which the search costs at most its epsilon."""
    private = config.private
    if private.get("noise_multiplier", 0.0):
        return float(private.noise_multiplier)
    adjacency: Any = task.spec.adjacency
    return calibrate_noise(
        functools.partial(_event, config, task, runs, privates),
        epsilon=private.epsilon,
        delta=private.delta,
        adjacency=adjacency,
    )


def _event(
    config: Any, task: tasks.Task, runs: Any, privates: Mapping[str, Any], noise: float
) -> DpEvent:
    """Returns the event of the search at a noise multiplier."""
    score = []
    if config.tune.score == "charged":
        score.append(GaussianDpEvent(float(config.tune.score_noise_multiplier)))
    candidates = []
    for private in privates.values():
        sampler = trainers.sampler_of(private, task.units, "private")
        training = finetune.event(noise, sampler, trainers.steps(private))
        candidates.append(ComposedDpEvent([training, *score]))
    return runs.event(OneOfDpEvent(tuple(candidates)))


def _cells(config: Any) -> Iterator[Model]:
    yield Model("private")


def _score(config: Any, task: tasks.Task) -> Any:
    predict = task.network.apply_fn
    if config.tune.score == "public":
        public: Any = task.public
        return finetune.PublicScore(lambda params: finetune.accuracy(predict, params, public))
    noise = config.tune.score_noise_multiplier
    return finetune.ChargedScore(predict=predict, source=task.private, noise_multiplier=noise)


def _run(cell: Model, work: frame.Work) -> dict[str, Any]:
    config, private = work.config, work.config.private
    task = work.shared.task
    start = tasks.start(config, task, work)
    terms = task.terms(private)
    with work.account(task.private.name, label="search", **terms) as account:
        best = jaxdp.tune(
            work.shared.trainers,
            account,
            start,
            task.units,
            steps={name: trainers.steps(each) for name, each in work.shared.privates.items()},
            runs=work.shared.runs,
            score=_score(config, task),
            workdir=work.folder(cell) / "search",
            checkpoint_every=private.checkpoint_every,
            allow_nonfinite=private.get("allow_nonfinite", False),
        )
        epsilon = account.epsilon(delta=private.delta)
    save_params(work.root / "params.safetensors", task.serving(best.params))
    accuracy = functools.partial(finetune.accuracy, task.network.apply_fn)
    return {
        "best": best.name or "none",
        "score": best.score if math.isfinite(best.score) else None,
        "before": accuracy(start, task.test),
        "accuracy": accuracy(best.params, task.test),
        "epsilon": epsilon,
    }


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    (row,) = rows
    task, config = work.shared.task, work.config
    some_trainer = next(iter(work.shared.trainers.values()))
    return {
        **{name: row[name] for name in ("best", "score", "before", "accuracy", "epsilon")},
        "delta": config.private.delta,
        "candidates": len(work.shared.trainers),
        "expected_runs": config.tune.runs,
        "distribution": config.tune.distribution,
        "scored_by": config.tune.score,
        "noise_multiplier": some_trainer.privatizer.event.noise_multiplier,
        "tested": len(task.test),
        **task.spec.terms,
        "dataset": task.private.name,
    }


def _summary(result: Mapping[str, Any]) -> str:
    row = {
        "best of": f"{result['candidates']} candidates",
        "settings": result["best"],
        "before": f"{result['before']:.4f}",
        "test accuracy": f"{result['accuracy']:.4f}",
        "epsilon": f"{result['epsilon']:.3f}",
    }
    return (
        f"{format_table([row])}\n\nOne search of {result['dataset']}, "
        f"{result['expected_runs']:g} runs expected. Epsilon is that of the whole search. The "
        "number of runs is secret. The time of a search tells it."
    )


def _tables(result: Mapping[str, Any], work: frame.Work) -> dict[str, str]:
    score = {
        "public": "the accuracy on public examples",
        "charged": "a noisy count of right answers on the private records, which epsilon includes",
    }
    return {
        "One search": (
            f"One search among {result['candidates']} candidates, with "
            f"{result['expected_runs']:g} runs expected. The best was chosen by "
            f"{score[result['scored_by']]}. Epsilon {result['epsilon']:.3f} at delta "
            f"{result['delta']:g} is that of the whole search. It holds if nobody learns how many "
            "runs there were: neither from the duration, nor from the folder `secret_search` that "
            "an unfinished search leaves."
        )
    }


def _plan(config: Any, opened: Callable[[], _Opened]) -> Iterator[plans.Item]:
    shared = opened()
    task, runs = shared.task, shared.runs
    start = models.fresh(task.network, config.init_seed)
    _, units = task.blank()
    given = config.pretrain.weights or models.has_backbone(config.model)
    if task.public is not None and not given:
        loss = models.loss(task.network)
        public = task.public
        yield plans.public_training("public pre-training", loss, start, public, config.pretrain)
    name, trainer = next(iter(shared.trainers.items()))
    steps = trainers.steps(shared.privates[name])
    rows = (
        ("candidates", f"{len(shared.trainers)}"),
        ("runs", f"{runs.mean:g} expected, at most {runs.quantile(0.95)} in 95 of 100 searches"),
        ("noise multiplier", f"{trainer.privatizer.event.noise_multiplier:.6g}"),
        ("steps of a run", f"{steps}"),
    )
    yield plans.Item(
        "search",
        task.private.name,
        shared.event,
        task.terms(config.private),
        rows,
        folder="cells/private/search",
        programs=_of_all_runs(plans.programs_of(trainer, units, start, steps), runs.mean),
        steps=math.ceil(runs.mean * steps),
    )


def _of_all_runs(programs: Callable[[int | None], Any], mean: float) -> Callable[[Any], Any]:
    """Returns the programs of a run with the calls of the expected number of runs."""

    def repeated(memory: int | None) -> Any:
        return [(function, args, mean * calls) for function, args, calls in programs(memory)]

    return repeated


STUDY = frame.Study(
    name="tune",
    open=_open,
    private=lambda opened: [opened.task.private_set],
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=_tables,
    plan=_plan,
    report=frame.Report(
        title="a private search",
        released={
            "params.safetensors": "the best model of a search",
            "pretrained.safetensors": "public backbone",
        },
    ),
)
