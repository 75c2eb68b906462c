"""Recalibration: python -m launch.recalibrate --config configs/recalibration/digits.py --workdir
workdir/recal.

Runs methods x shifts x sizes x budgets with hundreds of trials each. It makes Tables 1 and 4 and
Figures 1 to 3 of "Privacy Preserving Recalibration under Domain Shift" (Luo et al. 2020). What its
Table 2 says in words are sweeps that a config may add: `sweep.options` has values of an attribute
of the methods, such as iterations or bins, and `sweep.division` divides the same records among few
or many sources. With several `data.severity`, a shift has its severity in its name, such as fog_3.

Besides the files of all studies, the workdir holds `logits` of the test images under each shift,
`figures`, the classifier if it was trained here (source.safetensors), and the spends of the sources
of the reliability diagrams (ledger.sqlite).
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import recalibration
from jaxdp.data import CORRUPTIONS, HELD_OUT_CORRUPTIONS, Examples, read_column
from jaxdp.data import open as open_spec
from jaxdp.data.shifts import CLEAN, Shift
from jaxdp.models import Pretrained
from jaxdp.privacy import Account, Ledger, SelfComposedDpEvent
from jaxdp.recalibration import Records
from jaxdp.recalibration.methods import TemperatureSearch
from jaxdp.release import stream
from jaxdp.report.exactness import noise_of

from . import calibration, data, frame, models, plans, refits, results, simulation
from .calibration import CENTRE, DIVISION, FACTORS, NO_PRIVACY
from .settings import named
from .simulation import Setting

# A config may also ask for no method, for the usual method of the first source alone (Guo et al.
# 2017), and for fits to the records of all sources without privacy.
_KINDS: Mapping[str, Any] = {
    "none": None,
    **recalibration.METHODS,
    "one_source": recalibration.METHODS["nll_t"],
    **refits.REFITS,
}


class Cell(NamedTuple):
    """A method under a shift, in all settings."""

    shift: str
    method: str


class Values(NamedTuple):
    """All private methods with an option, at each of its values, at the centre under a shift."""

    option: str
    shift: str


class Diagrams(NamedTuple):
    """Reliability under a shift, before and after a paid recalibration by each of some methods."""

    figure: str
    shift: str


# --- What a config says -------------------------------------------------------------------------


def _cells(config: Any) -> Iterator[Cell | Values | Diagrams]:
    figures = config.figures
    private = _private(config)
    corruptions = (CLEAN, *CORRUPTIONS, *HELD_OUT_CORRUPTIONS)
    frame.known("data.corruptions", config.data.corruptions, corruptions)
    shifts = list(severities(config))
    frame.known("figures.methods", figures.methods, config.methods)
    frame.known("figures.reliability_shift", [figures.reliability_shift], shifts)
    frame.known("figures.reliability_methods", figures.reliability_methods, private)
    count = len(figures.reliability_methods)
    if not 1 <= count <= 3:
        raise ValueError(f"config.figures.reliability_methods must be one to three, got {count}.")
    if not (config.model.checkpoint or config.data.parts.get("public")):
        raise ValueError(
            "config.data.parts.public must name images to train the classifier on, without a "
            "checkpoint."
        )
    every = methods(config)
    for name, setting in itertools.product(private, _settings(config)):
        _scale(config, every[name], setting.epsilon)  # raises if the method has no noise scale
    options = option_values(config)
    for option in options:
        valued(config, option)  # raises if no method has the option, or a value is impossible
    for shift, name in itertools.product(shifts, config.methods):
        yield Cell(shift, name)
    for option, shift in itertools.product(options, shifts):
        yield Values(option, shift)
    yield Diagrams("reliability", figures.reliability_shift)


def parts(config: Any) -> dict[str, list[Setting]]:
    """Returns the settings in which each factor varies, and the centre with and without privacy."""
    settings = {}
    for factor in FACTORS:
        fields = dict(config.sweep[factor])
        values = fields.pop("values", ())
        if not values or sorted((factor, *fields)) != sorted(FACTORS):
            raise ValueError(
                f"config.sweep.{factor} must have values, the {factor} to try, and fix the other "
                "two factors."
            )
        settings[factor] = [Setting(**{factor: value, **fields}) for value in values]
    centre = dict(config.sweep.centre)
    if set(centre) != set(FACTORS):
        raise ValueError(
            f"config.sweep.centre must fix {', '.join(FACTORS)}, but it names {', '.join(centre)}."
        )
    settings[CENTRE] = [Setting(**centre)]
    settings[NO_PRIVACY] = [Setting(**centre | {"epsilon": math.inf})]
    if config.sweep.division.sources:
        settings[DIVISION] = _divided(**config.sweep.division)
    return settings


def _centre(config: Any) -> Setting:
    """Returns the setting at which methods are compared and paid for."""
    (centre,) = parts(config)[CENTRE]
    return centre


def _divided(records: int, epsilon: float, sources: Sequence[int]) -> list[Setting]:
    """Returns settings in which each number of sources has the same records together."""
    for count in sources:
        if records % count:
            raise ValueError(
                f"config.sweep.division.sources must divide the {records} records, got {count}."
            )
    return [Setting(count, records // count, epsilon) for count in sources]


def severities(config: Any) -> dict[str, tuple[str, int]]:
    """Returns the name and severity of each shift, by the shift's label."""
    levels = config.data.severity
    shifts = {}
    for level, name in itertools.product(levels, config.data.corruptions):
        label = f"{name}_{level}"
        if name == CLEAN or len(levels) == 1:
            label = name
        shifts[label] = (name, level)
    return shifts


def _shifts(config: Any) -> dict[str, Shift]:
    shifts = {}
    for label, (name, level) in severities(config).items():
        at_level = {**config.data, "severity": level}
        shifts[label] = data.shift(at_level, name)
    return shifts


def _settings(config: Any) -> list[Setting]:
    points = itertools.chain.from_iterable(parts(config).values())
    return list(dict.fromkeys(points))


def methods(config: Any) -> dict[str, Any]:
    """Returns the methods by name. None means no recalibration."""
    by_name = {}
    for name in config.methods:
        declared = config.method_options.get(name, {})
        by_name[name] = method(f"method_options.{name}", declared)
    return by_name


def _private(config: Any) -> list[str]:
    """Returns the names of the methods that ask sources with noise."""
    known = methods(config)  # raises for a kind that there is not
    return [name for name in known if _kind(config, name) in recalibration.METHODS]


def option_values(config: Any) -> dict[str, Sequence[Any]]:
    """Returns the values of each option that a config sweeps."""
    return {option: values for option, values in config.sweep.options.items() if values}


def valued(config: Any, option: str) -> dict[str, list[Any]]:
    """Returns each private method with an option at all of its values, by name.

    Raises:
      ValueError: No method has the option, or a value is impossible.
    """
    options = config.sweep.options
    every = methods(config)
    variants = {}
    for name in _private(config):
        method = every[name]
        if option in _fields(method):
            with named("sweep.options", options):
                variants[name] = [
                    dataclasses.replace(method, **{option: value}) for value in options[option]
                ]
    if not variants:
        raise ValueError(
            f"config.sweep.options.{option} must be an attribute of some private method in "
            f"config.methods, got {', '.join(config.methods)}."
        )
    return variants


def method(field: str, declared: Mapping[str, Any]) -> Any:
    """Returns the method of config.`field`, which has its kind and options. None means no
    recalibration.
    """
    options = dict(declared)
    kind = options.pop("kind", None)
    frame.known(f"{field}.kind", [kind], _KINDS)
    if kind == "none":
        frame.known(field, options, ())
        return None
    fields = _fields(_KINDS[kind])
    if "bracket" in fields:
        fields.add("spacing")
    frame.known(field, options, sorted(fields))
    if "bracket" in options:
        spacing = options.pop("spacing", "log")
        options["bracket"] = recalibration.Bracket.of(options["bracket"], spacing)
    return _KINDS[kind](**options)


def _fields(method: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(method)}


def _kind(config: Any, name: str) -> str:
    return config.method_options.get(name, {}).get("kind", "")


def _scale(config: Any, method: Any, epsilon: float) -> Any:
    return recalibration.noise_scale(
        method,
        epsilon=epsilon,
        adjacency=config.sweep.adjacency,
        num_classes=config.model.num_classes,
    )


# --- Cells --------------------------------------------------------------------------------------


class Bench:
    """What the cells share: images, the classifier, and the order of records in each trial.

    Attributes:
      specs, shifts: What the images are, by role, and their shifts by name.
      test: The test images without a shift.
      order: The order of the records in each trial.
    """

    def __init__(self, config: Any, root: pathlib.Path):
        self.config, self.root = config, root
        self.prepare = models.network(config.model).preprocessing.prepare
        models.check_recipe(config)
        self.specs = data.specs(config.data, "public", "test", needs=("test",))
        self.test = open_spec(self.specs["test"], prepare=self.prepare)
        self.shifts = _shifts(config)
        first = next(iter(self.shifts))
        records = len(self.images(first))
        settings = _settings(config)
        self.order = simulation.Order.draw(
            config.sweep.seed, records=records, trials=config.sweep.trials, settings=settings
        )
        print(
            f"{len(config.methods)} methods under {len(self.shifts)} shifts of {records} test "
            f"images, {len(settings)} settings of sources, samples and epsilon.",
            flush=True,
        )

    def images(self, shift: str) -> Examples:
        """Returns the test images under a shift."""
        return data.under(self.test, self.shifts[shift])

    @functools.cached_property
    def network(self) -> Pretrained:
        """The classifier."""
        return models.source_model(
            self.config, lambda: open_spec(self.specs["public"], prepare=self.prepare), self.root
        )


def _records(work: frame.Work, shift: str) -> Records:
    """Returns the labelled logits of the test images under a shift."""

    def classify() -> dict[str, np.ndarray]:
        images = work.shared.images(shift)
        network = work.shared.network
        batch_size = work.config.data.batch_size
        logits = models.logits(network, network.params, images, batch_size=batch_size)
        if not np.isfinite(logits).all():
            raise ValueError(
                f"logits under {shift} must be finite. Train or choose another classifier."
            )
        return {"logits": logits, "labels": read_column(images, "label")}

    arrays = work.arrays(f"logits/{frame.file_name(shift)}.npz", classify)
    return Records(*jax.device_put((arrays["logits"], arrays["labels"])))


def _run(cell: Cell | Values | Diagrams, work: frame.Work) -> dict[str, Any]:
    if isinstance(cell, Diagrams):
        return _diagrams(cell, work)
    if isinstance(cell, Values):
        return _values(cell, work)
    settings = _settings(work.config)
    outcomes = _outcomes(cell, work, settings)
    by_setting = dict(zip(settings, outcomes, strict=True))
    row = {}
    for part, points in parts(work.config).items():
        row[part] = _moments([by_setting[point] for point in points])
    return row


def _outcomes(
    cell: Cell, work: frame.Work, settings: Sequence[Setting]
) -> Sequence[simulation.Outcome]:
    """Returns the outcomes of the trials of a method in each setting."""
    config = work.config
    method = methods(config)[cell.method]
    kind = _kind(config, cell.method)
    task = _records(work, cell.shift), work.shared.order, settings
    if method is None:
        return simulation.unchanged(*task)
    if kind in refits.REFITS:
        return refits.outcomes(method, *task)
    if kind == "one_source":
        return simulation.simulate(method, *task, key=None)
    key = _key(config, cell.shift, cell.method)
    return simulation.simulate(method, *task, key=key, adjacency=config.sweep.adjacency)


def _key(config: Any, *names: str) -> Any:
    """Returns the key of simulated noise, which is not secret."""
    return stream(config.sweep.seed.to_bytes(16, "little"), ", ".join(names))


def _values(cell: Values, work: frame.Work) -> dict[str, Any]:
    """Returns the scores of each method at each value, with and without privacy."""
    sweep = work.config.sweep
    records = _records(work, cell.shift)
    by_part = parts(work.config)
    points = [*by_part[CENTRE], *by_part[NO_PRIVACY]]
    order = work.shared.order.only(points)
    row: dict[str, Any] = {}
    for name, variants in valued(work.config, cell.option).items():
        outcomes = []
        for value, variant in zip(sweep.options[cell.option], variants, strict=True):
            key = _key(work.config, cell.shift, name, f"{cell.option}={value}")
            trials = simulation.simulate(
                variant, records, order, points, key=key, adjacency=sweep.adjacency
            )
            outcomes.append(trials)
        at_centre, without_noise = zip(*outcomes, strict=True)
        row[name] = {CENTRE: _moments(at_centre), NO_PRIVACY: _moments(without_noise)}
    return row


def _moments(outcomes: Sequence[simulation.Outcome]) -> dict[str, list[Any]]:
    """Returns means over the trials and their standard errors, per setting. One trial has None as
    error.
    """
    ece, brier = (np.array(values, np.float64) for values in zip(*outcomes, strict=True))
    return {
        "ece": ece.mean(1).tolist(),
        "ece_error": [results.moments(trials).as_json()["error"] for trials in ece],
        "brier": brier.mean(1).tolist(),
    }


@jax.jit
def _correct(records: Records) -> jax.Array:
    """Returns `records.correct`. Its operations are one program."""
    return records.correct


def _diagrams(cell: Diagrams, work: frame.Work) -> dict[str, Any]:
    """Recalibrates the first trial at the centre with sources that pay. Judges on records that no
    source has.
    """
    config = work.config
    records = _records(work, cell.shift)
    centre = _centre(config)
    first_trial = np.asarray(work.shared.order.rows[0])
    rows = first_trial[: centre.sources * centre.samples]
    logits = np.asarray(records.logits)
    every = methods(config)
    scratch = work.folder(cell) / "scratch"
    recalibrations = {"before": recalibration.none()}
    with Ledger(work.root / frame.LEDGER) as ledger:
        owned = np.split(rows, centre.sources)
        parties = _parties(records, owned, _accounts(work, ledger))
        for name in config.figures.reliability_methods:
            recalibrations[name] = recalibration.recalibrate(
                every[name],
                parties,
                epsilon=centre.epsilon,
                adjacency=config.sweep.adjacency,
                workdir=scratch / frame.file_name(name),
            )
    test = np.setdiff1d(np.arange(len(logits)), rows)
    right = np.asarray(_correct(records))[test]
    diagrams = {}
    temperatures = {}
    for name, one in recalibrations.items():
        confidences = jnp.asarray(one.apply(logits[test]))
        curve = recalibration.reliability(confidences, right)._asdict()
        diagrams[name] = {score: _numbers(values) for score, values in curve.items()}
        if isinstance(one.method, TemperatureSearch):
            temperatures[name] = one.temperature
    return {"diagrams": diagrams, "temperatures": temperatures}


def _accounts(work: frame.Work, ledger: Ledger) -> list[Account]:
    """Returns the accounts of the sources at the centre."""
    centre = _centre(work.config)
    unit = work.shared.specs["test"].unit
    accounts = []
    for number in range(centre.sources):
        name = f"source {number}"
        ledger.register(
            name,
            adjacency=work.config.sweep.adjacency,
            unit=unit,
            records=centre.samples,
            delta=0.0,
        )
        accounts.append(ledger.account(name))
    return accounts


@contextlib.contextmanager
def _account(cell: Any, work: frame.Work) -> Iterator[Account]:
    """Yields the account of the first source. Those of the others are in its ledger."""
    with Ledger(work.root / frame.LEDGER) as ledger:
        first, *_ = _accounts(work, ledger)
        yield first


def _parties(
    records: Records, owned: Sequence[np.ndarray], accounts: Sequence[Account]
) -> list[recalibration.Party]:
    """Returns sources with some rows of the records each, and an account of their own."""
    logits = np.asarray(records.logits)
    labels = np.asarray(records.labels)
    parties = []
    for rows, account in zip(owned, accounts, strict=True):
        parties.append(recalibration.Party(logits[rows], labels[rows], account=account))
    return parties


def _numbers(values: Any) -> list[float | None]:
    """Returns numbers for JSON, which has no NaN."""
    numbers = np.asarray(values).tolist()
    return [None if math.isnan(number) else number for number in numbers]


def _plan(config: Any, opened: Callable[[], Bench]) -> Iterator[plans.Item]:
    opened()
    centre = _centre(config)
    names = config.figures.reliability_methods
    every = methods(config)
    event = SelfComposedDpEvent(recalibration.event(centre.epsilon), len(names))
    terms = {"adjacency": config.sweep.adjacency, "records": centre.samples, "delta": 0.0}
    yield plans.Item(
        f"a source of the reliability diagrams: {', '.join(names)}",
        "source 0",
        event,
        terms,
        runs=centre.sources,
        programs=functools.partial(_programs, config),
        steps=sum(every[name].rounds for name in names),
    )


def _programs(config: Any, memory: int | None) -> plans.Programs:
    """Returns what a source computes in all rounds. Without a chip it is nothing, because it takes
    no time worth a plan.
    """
    if memory is None:
        return ()
    centre = _centre(config)
    logits = np.zeros((centre.samples, config.model.num_classes), np.float32)
    labels = np.zeros(centre.samples, np.int32)
    source = recalibration.Party(logits, labels)
    every = methods(config)
    calls = []
    for name in config.figures.reliability_methods:
        functions = source.programs(
            every[name], epsilon=centre.epsilon, adjacency=config.sweep.adjacency
        )
        calls += [(*program, 1.0) for program in functions.values()]
    return calls


# --- Results ------------------------------------------------------------------------------------


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    config = work.config
    *rows, example = rows
    levels = severities(config)
    accuracy = {}
    for shift in levels:
        right = np.asarray(_correct(_records(work, shift)))
        accuracy[shift] = float(right.mean(dtype=np.float32))
    settings = parts(config)
    cells: dict[str, Any] = {shift: {} for shift in levels}
    swept: dict[str, Any] = {}
    for option, values in option_values(config).items():
        swept[option] = {"values": list(values), "cells": {}}
    for row in rows:
        if "option" in row:
            scores = results.only(row, *valued(config, row["option"]))
            swept[row["option"]]["cells"][row["shift"]] = scores
        else:
            cells[row["shift"]][row["method"]] = results.only(row, *settings)
    del settings[NO_PRIVACY]  # its settings are those of the centre
    return {
        "images": len(work.shared.order.rank[0]),
        "trials": config.sweep.trials,
        "adjacency": config.sweep.adjacency,
        "settings": {part: list(map(list, points)) for part, points in settings.items()},
        "accuracy": accuracy,
        "severities": {shift: level for shift, (_, level) in levels.items()},
        "cells": cells,
        "options": swept,
        "costs": [_cost(config, name, method) for name, method in methods(config).items()],
        "example": results.only(example, "shift", "diagrams", "temperatures"),
    }


def _cost(config: Any, name: str, method: Any) -> dict[str, Any]:
    """Returns what a source releases and pays at the centre. An epsilon of None is infinite."""

    def row(releases: int | None, noise: float | None, epsilon: float | None) -> dict[str, Any]:
        return {"method": name, "releases": releases, "noise": noise, "epsilon": epsilon}

    kind = _kind(config, name)
    if method is None:
        return row(0, None, 0.0)
    if kind == "one_source":
        return row(1, 0.0, None)  # its temperature
    if kind in refits.REFITS:
        return row(None, 0.0, None)  # all records
    centre = _centre(config)
    variance = _scale(config, method, centre.epsilon).variance
    return row(method.rounds, math.sqrt(variance * centre.sources), centre.epsilon)


STUDY = frame.Study(
    name="recalibrate",
    life=".lifecycle.recalibrate",
    open=Bench,
    account=_account,
    cells=_cells,
    run=_run,
    result=_result,
    summary=calibration.summary,
    tables=calibration.tables,
    figures=calibration.figures,
    plan=_plan,
    benchmark=(
        "Calibration errors and reliability diagrams are functions of test labels, and no ledger "
        "pays for them. Use jaxdp.recalibration.recalibrate for private sources."
    ),
    report=frame.Report(
        title="recalibration, compared",
        released={"source.safetensors": "public classifier"},
        noise=lambda config: noise_of(True, "recalibration"),
    ),
)

if __name__ == "__main__":
    frame.main(STUDY)
