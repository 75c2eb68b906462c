r"""A private search for the settings of a training, which costs one event.

    python -m launch.finetune --config configs/finetune/tune.py --workdir workdir/tune

    python -m launch.finetune --config configs/digits_dpsgd.py --workdir workdir/tune \
        --tune 'learning_rate=0.1,0.3 clip_norm=0.5,1'

    python -m launch.lm --config configs/lm/bytes.py:bundled --workdir workdir/tune \
        --tune 'method=dp_sgd,adp_clip learning_rate=0.001,0.003'

The part `tune` of a config, of which --tune gives the grid, has
  grid              fields of `private` with their values; all combinations are candidates. Inner
                    fields have dots: method_options.adp_clip.quantile
  runs              the mean number of runs: the number is drawn, and stays secret
  distribution      "geometric", "logarithmic" or "poisson"
  score             "public" takes a score of the public examples, "charged" a noisy count of right
                    answers on the private ones
  score_noise_multiplier  the deviation of the noise on that count

`private.epsilon` is that of the whole search. All candidates have the same `noise_multiplier`,
which is the first one of a schedule (`adp_alloc`). Every method and every mechanism is searched
whose runs have a Renyi divergence. The others are refused, with the reason.
"""

import ast
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jaxdp
from jaxdp import finetune
from jaxdp.data import Groups, Owners, PoissonSampler
from jaxdp.finetune.scores import Score
from jaxdp.models import save_params
from jaxdp.privacy import (
    Account,
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    OneOfDpEvent,
    calibrate_noise,
)
from jaxdp.report import format_table

from . import frame, models, plans, results, settings, tasks, trainers
from .study import PrivateSet

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
_FIXED = (
    *("epsilon", "delta", "accountant", "noise_multiplier", "scaler_noise_multiplier"),
    *("checkpoint_every", "evaluate_every", "allow_nonfinite"),
)
# Studies that have no search, by the part of the config that makes them.
_NO_SEARCH = {
    "labels": (
        "noisy labels are paid once, by a pure epsilon for labels. A training on released labels "
        "costs nothing more, so try its settings one after the other"
    ),
    "grids": "a table compares settings, and publishes all of its cells",
    "curve": "a curve compares budgets, and publishes all of its points",
}


class Model(NamedTuple):
    """The only cell. The runs of a search are no cells: their rows would be published."""

    model: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is searched: private data, a model, and how the model is judged.

    Attributes:
      private: The private records by unit of privacy, which are trained on.
      adjacency: Of the private records.
      private_set: What a ledger counts for.
      trainer: `trainer(private)` returns the trainer of a `private` part of the config.
      terms: `terms(private)` returns the terms of the records in a ledger.
      start: `start(work)` returns the first parameters.
      scores: Functions that make the scores, by the names in `SCORES`. Data may lack one.
      judge: `judge(params)` returns `measure` of the test examples.
      measure: What is measured, for people.
      serving: `serving(params)` returns the parameters that are released.
      tested: The number of test examples.
      blank: Records and first parameters of the same shapes, for a plan.
      before: What a plan computes before the search.
    """

    private: Any
    adjacency: Any
    private_set: PrivateSet
    trainer: Callable[[Any], finetune.PrivateTrainer]
    terms: Callable[[Any], dict[str, Any]]
    start: Callable[[frame.Work], Params]
    scores: Mapping[str, Callable[[], Score]]
    judge: Callable[[Params], float]
    measure: str
    serving: Callable[[Params], Params]
    tested: int
    blank: Callable[[], tuple[Any, Params]]
    before: Callable[[], Iterator[plans.Item]]


class _Opened(NamedTuple):
    subject: Subject
    privates: Mapping[str, Any]  # the `private` part of each candidate, by its name
    trainers: Mapping[str, Any]
    runs: finetune.RandomRuns
    event: DpEvent


# --- The grid -----------------------------------------------------------------------------------


def with_grid(config: Any, text: str) -> Any:
    """Returns the config of a search over a grid such as "learning_rate=0.1,0.3 clip_norm=0.5,1".

    A config without the part `tune` gets one, with a charged score and 8 runs on average.

    Raises:
      ValueError: The text is no grid, or the config is of a study without a search.
    """
    for part, reason in _NO_SEARCH.items():
        if part in config:
            raise ValueError(
                f"--tune must be left out for a config with the part {part!r}: {reason}."
            )
    grid: dict[str, Any] = {}
    for entry in text.split():
        field, equals, values = entry.partition("=")
        if not (field and equals and values):
            raise ValueError(
                "--tune must name fields of config.private with their values, such as "
                f"'learning_rate=0.1,0.3 clip_norm=0.5,1', got {text!r}."
            )
        *groups, name = field.split(".")
        inner = grid
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or name in inner:
            raise ValueError(f"--tune must name each field once, got {field!r} again in {text!r}.")
        inner[name] = tuple(map(_value, values.split(",")))
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


def _privates(config: Any) -> dict[str, Any]:
    """Returns the `private` part of the config of each candidate by its name."""
    grid = dict(_fields(config.tune.grid))
    fields = dict(_fields(config.private)).keys() - set(_FIXED)
    frame.known("tune.grid", grid, sorted(fields))
    for field, values in grid.items():
        frame.some(f"tune.grid.{field}", values)
    privates = {}
    for values in itertools.product(*grid.values()):
        private = config.private.copy_and_resolve_references()
        pairs = dict(zip(grid, values, strict=True))
        for field, value in pairs.items():
            _set(private, field, value)
        settings.check_values({"private": private})
        privates[", ".join(f"{field} {value}" for field, value in pairs.items())] = private
    return privates


def _fields(part: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all fields of a part of a config, whose names have dots, with their values."""
    for name, value in part.items():
        if hasattr(value, "items"):
            yield from _fields(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _set(private: Any, field: str, value: Any) -> None:
    """Sets a field whose name has dots. Raises ValueError for a value of another type."""
    *groups, name = field.split(".")
    inner = private
    for group in groups:
        inner = inner[group]
    try:
        inner[name] = value
    except TypeError as error:
        raise ValueError(
            f"config.tune.grid.{field} must have values such as {inner[name]!r}, got {value!r}."
        ) from error


# --- What is searched ---------------------------------------------------------------------------


def subject_of_task(config: Any, root: pathlib.Path) -> Subject:
    """Returns what `launch.finetune` searches."""
    task = tasks.open_task(config, root)
    predict = task.network.apply_fn
    judge = functools.partial(finetune.accuracy, predict)

    def public() -> Score:
        records: Any = task.public
        if task.head:
            records = task.head.source("public", records)
        facts = ["accuracy", records.fingerprint]  # the token has the network's training programs
        return finetune.PublicScore(lambda params: judge(params, records), facts=facts)

    def charged() -> Score:
        return finetune.ChargedScore(
            predict=predict,
            source=task.private,
            noise_multiplier=config.tune.score_noise_multiplier,
            unit=task.spec.unit,
        )

    scores = {} if task.public is None else {"public": public}
    if not isinstance(task.units, Groups):
        scores["charged"] = charged

    def blank() -> tuple[Any, Params]:
        return task.blank()[1], models.fresh(task.network, config.init_seed)

    return Subject(
        private=task.units,
        adjacency=task.spec.adjacency,
        private_set=task.private_set,
        trainer=task.trainer,
        terms=task.terms,
        start=lambda work: tasks.start(config, task, work),
        scores=scores,
        judge=lambda params: judge(params, task.test),
        measure="accuracy",
        serving=task.serving,
        tested=len(task.test),
        blank=blank,
        before=lambda: tasks.plan_of_start(config, task),
    )


def _open(subject_of: Callable[[Any, pathlib.Path], Subject], config: Any, root: Any) -> _Opened:
    frame.known("tune.score", [config.tune.score], SCORES)
    frame.known("tune.distribution", [config.tune.distribution], SHAPES)
    if trainers.scaler_event(config.private):
        raise ValueError(
            "config.private.scaler_noise_multiplier must be 0 for a search, got "
            f"{config.private.scaler_noise_multiplier}: the scaler is a release of its own, before "
            "all runs. Give the columns public ranges."
        )
    subject = subject_of(config, root)
    _check_score(config, subject)
    with settings.named("tune", config.tune, mean="tune.runs"):
        runs = finetune.RandomRuns(config.tune.runs, SHAPES[config.tune.distribution])
    privates = _privates(config)
    trainings = []
    for name, private in privates.items():
        frame.known("private.method", [private.method], finetune.METHODS)
        sampler = trainers.sampler_of(private, subject.private, "private")
        _check_rule(name, private, subject, sampler)
        trainings.append(trainers.event_of(private, sampler, "private"))
    event = functools.partial(_event, config, runs, trainings)
    noise = _noise(config, subject, event)
    for private in privates.values():
        with private.unlocked():
            private.noise_multiplier = noise
    candidates = {name: subject.trainer(private) for name, private in privates.items()}
    return _Opened(subject, privates, candidates, runs, event(noise))


def _check_score(config: Any, subject: Subject) -> None:
    """Raises ValueError for a score that the data cannot have."""
    if config.tune.score in subject.scores:
        return
    if config.tune.score == "public":
        raise ValueError(
            "config.tune.score='public' needs public examples. Name some in config.data.parts, or "
            "take 'charged'."
        )
    raise ValueError(
        "config.tune.score must be 'public' where config.data.group protects owners of several "
        "records: a charged count protects one record."
    )


def _check_rule(name: str, private: Any, subject: Subject, sampler: Any) -> None:
    """Raises ValueError for a candidate whose runs have no Renyi divergence, and names the field.

    The theorem of a search (arXiv 2110.03620) bounds its Renyi divergence by that of one run.
    """
    field, remedy = "", ""
    if isinstance(subject.private, Owners):
        field = f"data.separator must be '' for a search, got {sampler.records_per_owner} records"
        remedy = "Records of several owners are a mixture without a rule. Take one owner each"
    elif getattr(sampler, "truncated_batch_size", None):
        field = f"private.truncated_batch_size must be 0, got {sampler.truncated_batch_size}"
        remedy = "Truncated batches are a mixture without a rule"
    elif hasattr(sampler, "steps"):
        field = f"private.participation.kind is {private.participation.kind!r}"
        remedy = "Its deltas are simulated, and say nothing of large losses. Take 'cyclic_poisson'"
    elif subject.adjacency == "replace_one" and isinstance(sampler, PoissonSampler):
        field = "data.adjacency must be 'add_remove' or 'zero_out', got 'replace_one'"
        remedy = "Poisson samples have no Renyi divergence for replaced records"
    if field:
        raise ValueError(
            f"config.{field}. A search needs the Renyi divergence of a run of {name!r}. {remedy}."
        )


def _noise(config: Any, subject: Subject, event: Callable[[float], DpEvent]) -> float:
    """Returns the least noise multiplier at which the search costs at most its epsilon."""
    private = config.private
    if private.get("noise_multiplier", 0.0):
        return float(private.noise_multiplier)
    with settings.named("private", private, method="private.accountant"):
        return calibrate_noise(
            event,
            epsilon=private.epsilon,
            delta=private.delta,
            adjacency=subject.adjacency,
            method=private.accountant,
        )


def _event(
    config: Any,
    runs: finetune.RandomRuns,
    trainings: Sequence[Callable[[float], DpEvent]],
    noise_multiplier: float,
) -> DpEvent:
    """Returns the event of the search at a noise multiplier."""
    score = []
    if config.tune.score == "charged":
        score.append(GaussianDpEvent(float(config.tune.score_noise_multiplier)))
    candidates = [ComposedDpEvent([training(noise_multiplier), *score]) for training in trainings]
    return runs.event(OneOfDpEvent(tuple(candidates)))


# --- The study ----------------------------------------------------------------------------------


def _account(cell: Model, work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account of the search."""
    subject = work.shared.subject
    terms = subject.terms(work.config.private)
    return work.account(subject.private_set.name, label="search", **terms)


def _run(cell: Model, work: frame.Work) -> dict[str, Any]:
    config, private, subject = work.config, work.config.private, work.shared.subject
    start = subject.start(work)
    with _account(cell, work) as account:
        best = jaxdp.tune(
            work.shared.trainers,
            account,
            start,
            subject.private,
            steps={name: trainers.steps(each) for name, each in work.shared.privates.items()},
            runs=work.shared.runs,
            score=subject.scores[config.tune.score](),
            workdir=work.folder(cell) / "search",
            checkpoint_every=private.checkpoint_every,
            allow_nonfinite=private.get("allow_nonfinite", False),
        )
        epsilon = account.epsilon(delta=private.delta)
    save_params(work.root / "params.safetensors", subject.serving(best.params))
    return {
        "best": best.name or "none",
        "score": best.score if math.isfinite(best.score) else None,
        "before": subject.judge(start),
        subject.measure: subject.judge(best.params),
        "epsilon": epsilon,
    }


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    (row,) = rows
    subject, config = work.shared.subject, work.config
    some_trainer = next(iter(work.shared.trainers.values()))
    terms = subject.terms(config.private)
    return {
        **results.only(row, "best", "score", "before", subject.measure, "epsilon"),
        "measure": subject.measure,
        "delta": config.private.delta,
        "candidates": len(work.shared.trainers),
        "expected_runs": config.tune.runs,
        "distribution": config.tune.distribution,
        "scored_by": config.tune.score,
        "noise_multiplier": float(some_trainer.privatizer.multiplier_at(0)),
        "tested": subject.tested,
        **results.only(terms, "unit", "adjacency"),
        "dataset": subject.private_set.name,
    }


def _summary(result: Mapping[str, Any]) -> str:
    row = {
        "best of": f"{result['candidates']} candidates",
        "settings": result["best"],
        "before": f"{result['before']:.4f}",
        f"test {result['measure']}": f"{result[result['measure']]:.4f}",
        "epsilon": f"{result['epsilon']:.3f}",
    }
    return (
        f"{format_table([row])}\n\nOne search of {result['dataset']}, "
        f"{result['expected_runs']:g} runs expected. Epsilon is that of the whole search. The "
        "number of runs is secret. The time of a search tells it."
    )


def _tables(result: Mapping[str, Any], work: frame.Work) -> dict[str, str]:
    score = {
        "public": "a score of public examples",
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
    subject, runs = shared.subject, shared.runs
    records, start = subject.blank()
    yield from subject.before()
    name, trainer = next(iter(shared.trainers.items()))
    steps = trainers.steps(shared.privates[name])
    rows = (
        ("candidates", f"{len(shared.trainers)}"),
        ("runs", f"{runs.mean:g} expected, at most {runs.quantile(0.95)} in 95 of 100 searches"),
        ("noise multiplier", f"{float(trainer.privatizer.multiplier_at(0)):.6g}"),
        ("steps of a run", f"{steps}"),
    )
    yield plans.Item(
        "search",
        subject.private_set.name,
        shared.event,
        subject.terms(config.private),
        rows,
        folder="cells/private/search",
        programs=_of_all_runs(plans.programs_of(trainer, records, start, steps), runs.mean),
        steps=math.ceil(runs.mean * steps),
    )


def _of_all_runs(programs: Callable[[int | None], Any], mean: float) -> Callable[[Any], Any]:
    """Returns the programs of a run with the calls of the expected number of runs."""

    def repeated(memory: int | None) -> Any:
        return [(function, args, mean * calls) for function, args, calls in programs(memory)]

    return repeated


def study(subject_of: Callable[[Any, pathlib.Path], Subject]) -> frame.Study:
    """Returns the study of a search for what `subject_of(config, root)` returns."""
    return frame.Study(
        name="tune",
        open=functools.partial(_open, subject_of),
        private=lambda opened: [opened.subject.private_set],
        account=_account,
        cells=lambda config: [Model("private")],
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


STUDY = study(subject_of_task)
