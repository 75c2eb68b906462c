"""Test-time adaptation: python -m launch.adapt --config configs/tta/digits.py --workdir
workdir/tta_digits.

Runs methods x budgets x seeds over corrupted streams. The tables follow "Private and Stable
Test-Time Adaptation with Differential Privacy" (arXiv:2606.01908). In the workdir, ledger.sqlite
records what each run costs the photographs of its stream. methods.txt describes the private form of
each method.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import tta
from jaxdp.data import DataSpec, Examples, imagenet_r_classes, restrict_classes
from jaxdp.data import open as open_spec
from jaxdp.data.order import shuffled
from jaxdp.data.shifts import Shift
from jaxdp.files import write_durably
from jaxdp.models import Pretrained
from jaxdp.privacy import GaussianDpEvent, NonPrivateDpEvent, calibrate_noise
from jaxdp.report import format_table, progress_bar

from . import adapt_figures, data, frame, models, plans, results

# How a method is run: as published, with its gradients clipped, or with noise for a target epsilon.
ORIGINAL, CLIPPED = "original", "clipped"
SOURCE = adapt_figures.NO_ADAPTATION
_FISHER_BATCH = 64  # of the papers' fisher_strength


class Cell(NamedTuple):
    """A method over one stream: of the held-out corruptions ("tuning"), or of a seed ("runs")."""

    part: str
    method: str
    setting: str
    seed: int


class _Task:
    """The source model, photographs and methods.

    Attributes:
      public: Clean images, to train the source models on and for Fisher information.
      tuning: Photographs under the held-out corruptions, if hyper-parameters are chosen. No stream
          contains them.
      noise: The noise multiplier of each private setting. At it a visit costs at most the setting's
          epsilon.
      source: The source model of a number.
      method: The method of a name, for the source model of a number.
    """

    def __init__(self, config: Any, root: pathlib.Path):
        self.config, self.root = config, root
        self.noise = _noise_of_settings(config)
        self._network = models.network(config.model)
        found = data.parts(
            config.data, "public", "test", "tuning", prepare=self._network.preprocessing.prepare
        )
        self.public, test, tuning = found["public"], found.get("test"), found.get("tuning")
        streams, images = config.protocol.seeds // config.protocol.sources, config.data.images
        # Streams other than "given" share the photographs and differ in their order.
        used = streams * images if config.protocol.domain_order == "given" else images
        self._domains = data.domains(config.data, config.data.corruptions)
        self._mine = self._photographs(
            test, self._domains, np.arange(used), in_memory=config.data.get("in_memory", True)
        )
        self.tuning = dict[str, Examples]()
        if not _declares_all(config):
            self.tuning = self._photographs(
                test if tuning is None else tuning,
                data.domains(config.data, config.tuning.corruptions),
                np.arange(config.tuning.images) + (used if tuning is None else 0),
                in_memory=True,
            )
        self._counted: dict[tta.Method, tta.Method] = {}
        self.source = functools.cache(self._source)
        self.method = functools.cache(self._method)
        print(f"{streams} streams of {len(self._mine)} domains with {images} photographs each.")
        if self.tuning:
            names = ", ".join(self.tuning)
            print(f"Hyper-parameters are chosen on {names} of other photographs.", flush=True)

    def _source(self, number: int) -> Pretrained:
        name = f"source_{number}" if number else "source"
        return models.source_model(
            self.config,
            lambda: self.public,
            self.root,
            name,
            untrained=self._network,
            number=number,
        )

    @functools.cached_property
    def apply_fn(self) -> Callable[[Any, jax.Array], jax.Array]:
        apply_fn: Any = self._network.apply_fn
        return (
            restrict_classes(apply_fn, imagenet_r_classes())
            if self.config.model.classes
            else apply_fn
        )

    def _method(self, name: str, number: int, counting: bool = False) -> tta.Method:
        """Returns a method by its name. The suffix "-COME" puts COME over that method."""
        if counting:
            plain = self.method(name, number)
            return self._counted.setdefault(plain, _counting(plain))
        classes = next(iter(self._mine.values())).num_classes
        base, _, come = name.partition("-")
        options = dict(self.config.method_options.get(base, {}))
        kind = tta.METHODS[base]
        takes = inspect.signature(kind).parameters
        if number and "fisher" not in takes:
            # One object serves all source models, so that its step is compiled once.
            return self.method(name, 0)
        if "num_classes" in takes:
            options["num_classes"] = classes
        if "fisher" in takes:
            starts = range(0, self.config.fisher_images, _FISHER_BATCH)
            rows = [np.arange(start, start + _FISHER_BATCH) for start in starts]
            images = [self.public.gather(batch)["image"] for batch in rows]
            options["fisher"] = tta.fisher(self.apply_fn, self.source(number).params, images)
        method = kind(**options)
        return tta.COME(method, classes) if come else method

    def adapter(self, cell: Cell, choice: Mapping[str, float]) -> tta.Adapter:
        """Returns the adapter of a cell with these hyper-parameters."""
        number = cell.seed % self.config.protocol.sources
        name = "Tent" if cell.method == SOURCE else cell.method  # at a rate of 0 any method will do
        accumulate = 1
        method: Any
        if cell.setting == ORIGINAL:
            method = self.method(name, number, True)
        elif cell.setting == CLIPPED:
            method = tta.clipped(self.method(name, number, True), choice["clip_norm"])
        else:
            method = tta.private(
                self.method(name, number, False),
                clip_norm=choice["clip_norm"],
                noise_multiplier=self.noise[cell.setting],
                **dict(self.config.privacy.filters),
            )
            accumulate = self.config.protocol.accumulate
        return tta.Adapter(
            self.apply_fn,
            self.source(number).params,
            method,
            _sgd(choice["learning_rate"]),
            accumulate=accumulate,
        )

    def stream(self, seed: int) -> tta.Stream:
        """Returns the stream of a seed. Seeds that differ in their source model only have the same
        stream.
        """
        protocol, number = self.config.protocol, seed // self.config.protocol.sources
        names = list(self._mine)
        if protocol.domain_order == "shuffled":
            order = shuffled(len(names), seed=number)
            domains = {names[k]: self._mine[names[k]] for k in order}
        elif protocol.domain_order == "same":
            domains = self._mine
        else:
            first = number * self.config.data.images
            rows = np.arange(first, first + self.config.data.images)
            domains = {name: self._mine[name].take(rows) for name in names}
        return tta.Stream(
            domains,
            seed=number,
            units={name: self._units(name, len(source)) for name, source in domains.items()},
            batch_size=protocol.batch_size,
            order=protocol.order,
            reset=protocol.reset,
            remainder=protocol.remainder,
        )

    def _units(self, name: str, count: int) -> Sequence[Any]:
        """Returns the photograph behind each record of a domain.

        Shifts show the same photographs, so a photograph has the same number in all of them.
        Another set has photographs of its own.
        """
        if isinstance(self._domains[name], DataSpec):
            return [f"{name} {i}" for i in range(count)]
        return range(count)

    def _photographs(
        self,
        test: Examples | None,
        domains: Mapping[str, Shift | DataSpec],
        rows: np.ndarray,
        *,
        in_memory: bool,
    ) -> dict[str, Examples]:
        """Returns the same photographs under each shift.

        In memory, one shift is read at a time, and only these photographs of it are kept. Otherwise
        images are read when a batch needs them.
        """
        keep = data.in_memory if in_memory else lambda images: images
        photographs = {}
        for name in progress_bar(list(domains), label="reading", unit="corruption"):
            domain = domains[name]
            if isinstance(domain, DataSpec):  # it may have fewer images
                images = models.resize(self._network, open_spec(domain))
                photographs[name] = keep(images.take(rows[rows < len(images)]))
                continue
            images = data.under(test, domain)
            if rows[-1] >= len(images):
                raise ValueError(
                    "config.data.images for each of config.protocol.seeds, and "
                    f"config.tuning.images, together need {rows[-1] + 1} photographs, but "
                    f"{images.name} has {len(images)}."
                )
            photographs[name] = keep(images.take(rows))
        return photographs


def _noise_of_settings(config: Any) -> dict[str, float]:
    """Returns the noise multiplier of each private setting."""
    multipliers = {}
    budgets = progress_bar(config.privacy.budgets, label="noise", unit="budget")
    for setting, budget in zip(settings(config)[2:], budgets, strict=True):
        multipliers[setting] = calibrate_noise(
            GaussianDpEvent,
            epsilon=budget,
            delta=config.privacy.delta,
            adjacency=config.privacy.adjacency,
        )
    return multipliers


def _counting(method: tta.Method) -> tta.Method:
    """Returns the method with a memory that also counts the images that took part and those seen,
    since a reset.
    """

    class Counting(type(method)):  # type: ignore[misc]
        def start(self) -> Any:
            return super().start(), jnp.zeros(2)

        def novel(self, memory: Any, sample: tta.Sample) -> jax.Array:
            return super().novel(memory[0], sample)

        def remember(self, memory: Any, samples: tta.Sample, kept: jax.Array) -> Any:
            counts = memory[1] + jnp.array([kept.sum(), len(kept)])
            return super().remember(memory[0], samples, kept), counts

        def lost(self, memory: Any) -> jax.Array:
            return super().lost(memory[0])

    return Counting(
        **{field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    )


def _sgd(learning_rate: float) -> optax.GradientTransformation:
    """Returns SGD with momentum. Its state has the learning rate, the number of steps and the sum
    of their lengths.
    """

    def init(params: Any) -> dict[str, Any]:
        numbers = {
            "rate": jnp.float32(learning_rate),
            "steps": jnp.int32(0),
            "length": jnp.float32(0),
        }
        return {"momentum": _MOMENTUM.init(params), **numbers}

    return optax.GradientTransformation(init, _update)


_MOMENTUM = optax.trace(0.9)


# One function serves all learning rates. So another rate does not compile the step again.
def _update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    direction, momentum = _MOMENTUM.update(gradient, state["momentum"])
    step = jax.tree.map(lambda x: -state["rate"] * x, direction)
    length = state["length"] + optax.tree.norm(step)
    return step, {**state, "momentum": momentum, "steps": state["steps"] + 1, "length": length}


def _names() -> list[str]:
    """Returns the methods, each by itself and under COME."""
    names = [name for name in tta.METHODS if name != "COME"]
    return [*names, *(f"{name}-COME" for name in names)]


def settings(config: Any) -> list[str]:
    """Returns the ways in which each method is run."""
    return [ORIGINAL, CLIPPED, *(f"epsilon {budget:g}" for budget in config.privacy.budgets)]


# --- Cells --------------------------------------------------------------------------------------


def _cells(config: Any) -> Iterator[Cell]:
    if config.privacy.adjacency not in ("replace_one", "zero_out"):
        raise ValueError(
            "config.privacy.adjacency must be 'replace_one' or 'zero_out', got "
            f"{config.privacy.adjacency!r}. Removing a record would change all later batches of "
            "the stream."
        )
    frame.some("data.corruptions", config.data.corruptions)
    frame.some("tuning.corruptions", config.tuning.corruptions)
    if config.protocol.domain_order not in ("given", "shuffled", "same"):
        raise ValueError(
            "config.protocol.domain_order must be 'given', 'shuffled' or 'same', got "
            f"{config.protocol.domain_order!r}."
        )
    if config.protocol.sources < 1 or config.protocol.seeds % config.protocol.sources:
        raise ValueError(
            "config.protocol.seeds must be a multiple of config.protocol.sources, one run for "
            f"each stream and source model, got {config.protocol.seeds} and "
            f"{config.protocol.sources}."
        )
    frame.known("methods", frame.some("methods", config.methods), _names())
    seeds = range(config.protocol.seeds)
    for method, setting in itertools.product(config.methods, settings(config)):
        yield Cell("tuning", method, setting, 0)
    for seed, method, setting in itertools.product(seeds, config.methods, settings(config)):
        yield Cell("runs", method, setting, seed)
    for seed in seeds:
        yield Cell("runs", SOURCE, ORIGINAL, seed)


def _run(cell: Cell, work: frame.Work) -> dict[str, Any]:
    config, task = work.config, work.shared
    if cell.part == "tuning":
        return _choose(cell, config, task)
    if cell.method == SOURCE:  # a rate of 0 changes nothing
        unchanged = task.adapter(cell, {"learning_rate": 0.0})
        served = tta.serve(unchanged, task.stream(cell.seed), account=None)
        return {"visits": 0, "accuracy": served.accuracy, "mean": _mean(served.accuracy)}
    adapter = task.adapter(cell, work.row(Cell("tuning", cell.method, cell.setting, 0))["chosen"])
    # Every run has its own data set. All runs together would cost much more, as the summary says.
    label = f"{cell.method}, {cell.setting}"
    with frame.account(
        work.root / "ledger.sqlite",
        f"{label}, stream {cell.seed}",
        label=label,
        records=config.data.images,
        **_terms(config),
    ) as account:
        event = getattr(adapter.method, "event", NonPrivateDpEvent())
        paid = tta.StreamAccount(account, event=event)
        scratch = work.folder(cell) / "scratch"
        served = tta.serve(adapter, task.stream(cell.seed), account=paid, workdir=scratch)
    row = {"visits": paid.worst, "accuracy": served.accuracy, "mean": _mean(served.accuracy)}
    return row | _diagnostics(served)


def _declared(config: Any, method: str, setting: str) -> Any:
    """Returns the hyper-parameters of the config for a method in a setting, or None."""
    return config.hyper_parameters.get(method, {}).get(setting)


def _declares_all(config: Any) -> bool:
    """Returns whether the config has all hyper-parameters, so that none are chosen."""
    every = itertools.product(config.methods, settings(config))
    return all(_declared(config, method, setting) for method, setting in every)


def _terms(config: Any) -> dict[str, Any]:
    """Returns the terms of a stream in the ledger."""
    return {name: config.privacy[name] for name in ("adjacency", "unit", "delta")}


def _choose(cell: Cell, config: Any, task: _Task) -> dict[str, Any]:
    """Returns hyper-parameters from the config, or the best ones on the held-out corruptions."""
    declared = _declared(config, cell.method, cell.setting)
    if declared:
        return {"chosen": dict(declared), "tried": []}
    if cell.setting == ORIGINAL:
        candidates = [{"learning_rate": rate} for rate in config.tuning.learning_rates]
    else:
        # If most gradients are clipped, a step is about learning_rate * clip_norm long. So this
        # product varies.
        lengths = itertools.product(config.tuning.clipped_steps, config.tuning.clip_norms)
        candidates = [
            {"learning_rate": length / norm, "clip_norm": norm} for length, norm in lengths
        ]
    stream = tta.Stream(
        task.tuning, seed=0, batch_size=config.protocol.batch_size, reset=config.protocol.reset
    )
    tried = []
    for candidate in candidates:
        served = tta.serve(task.adapter(cell, candidate), stream, account=None)
        tried.append({**candidate, "accuracy": _mean(served.accuracy), **_diagnostics(served)})
    best = results.best(tried)
    return {"chosen": {name: best[name] for name in candidates[0]}, "tried": tried}


def _diagnostics(served: tta.Served) -> dict[str, float]:
    """Returns the mean length of an update and the share of images that took part, both since the
    last reset.
    """
    optimizer: Any = served.state.opt_state
    row = {"length": float(optimizer["length"] / jnp.maximum(optimizer["steps"], 1))}
    if served.state.memory:
        taken, seen = np.asarray(served.state.memory[1])
        row["taken"] = float(taken / max(seen, 1))
    return row


def _mean(accuracy: Mapping[str, float]) -> float:
    """Returns the mean over the corruptions of a stream."""
    return results.moments(accuracy.values()).mean


def _plan(config: Any, opened: Callable[[], _Task]) -> Iterator[plans.Item]:
    task = opened()
    streams = f"{len(config.methods)} methods x {config.protocol.seeds} streams"
    for setting in settings(config):
        noise = task.noise.get(setting, 0.0)
        release = GaussianDpEvent(noise) if noise else NonPrivateDpEvent()
        accumulate = config.protocol.accumulate if noise else 1
        yield plans.Item(
            f"{setting}, {streams}",
            "each stream",
            tta.event(release, task.stream(0), accumulate=accumulate),
            _terms(config),
            rows=[("noise multiplier", f"{noise:.6g}")],
            runs=len(config.methods) * config.protocol.seeds,
        )


# --- Results ------------------------------------------------------------------------------------


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    """Returns means and standard deviations over the seeds, per method, setting and corruption."""
    config, cells, tried = work.config, [], []
    tuning, runs = results.select(rows, part="tuning"), results.select(rows, part="runs")
    chosen = {(row["method"], row["setting"]): row["chosen"] for row in tuning}
    for method, setting in dict.fromkeys((row["method"], row["setting"]) for row in runs):
        mine = results.select(runs, method=method, setting=setting)
        mean, deviation, _ = results.over_seeds(mine, "mean")
        original = results.select(runs, method=method, setting=ORIGINAL)
        cell = {
            "method": method,
            "setting": setting,
            **chosen.get((method, setting), {}),
            "mean": mean,
            "std": deviation,
            "over_source": _over(mine, results.select(runs, method=SOURCE), config),
            "over_original": _over(mine, original, config),
        }
        for name in ("length", "taken"):
            if all(name in row for row in mine):
                cell[name] = results.moments(row[name] for row in mine).mean
        cell["per_corruption"] = {
            name: results.moments(row["accuracy"][name] for row in mine).mean
            for name in mine[0]["accuracy"]
        }
        sigma = work.shared.noise.get(setting)
        if sigma:
            cell |= {"noise_multiplier": sigma, **_costs(sigma, mine, config)}
        cells.append(cell)
    for row in tuning:
        tried += [_name(row) | candidate for candidate in row["tried"]]
    return {
        "cells": cells,
        "seeds": config.protocol.seeds,
        "images": config.data.images,
        **{name: config.privacy[name] for name in ("delta", "adjacency", "unit")},
        "tried": tried,
    }


def _over(mine: Sequence[frame.Row], other: Sequence[frame.Row], config: Any) -> list[float]:
    """Returns mean and standard error of the difference to what was run on the same streams."""
    others = {row["seed"]: row["mean"] for row in other}
    differences = {row["seed"]: row["mean"] - others[row["seed"]] for row in mine}
    return list(crossed(differences, config.protocol.sources))


def _costs(sigma: float, mine: Sequence[frame.Row], config: Any) -> dict[str, Any]:
    """Returns what runs at a noise multiplier cost a photograph at most."""
    visits = max(row["visits"] for row in mine)
    paid = tta.epsilons(
        GaussianDpEvent(sigma),
        visits=visits,
        delta=config.privacy.delta,
        adjacency=config.privacy.adjacency,
    )
    return {"epsilon_sample": paid.sample, "epsilon_unit": paid.unit, "visits": visits}


def crossed(values: Mapping[int, float], sources: int) -> tuple[float, float]:
    """Returns the mean over runs, and a standard error for streams and source models that are both
    samples.

    Args:
      values: One number per run, by seed. Run s has source model s % sources and stream s //
          sources.
      sources: The number of source models.

    Returns:
      The mean, and the root of the sum of the squared standard errors of the means per source model
      and per stream. This counts the variation of single runs twice, so it is rather too large.
    """
    by_source: dict[int, list[float]] = {}
    by_stream: dict[int, list[float]] = {}
    for seed, value in values.items():
        by_source.setdefault(seed % sources, []).append(value)
        by_stream.setdefault(seed // sources, []).append(value)
    errors = []
    for groups in (by_source, by_stream):
        if len(groups) > 1:
            means = [results.moments(group).mean for group in groups.values()]
            errors.append(results.moments(means).error)
    return results.moments(values.values()).mean, math.hypot(*errors) if errors else math.nan


def _accuracies(cells: Sequence[frame.Row]) -> list[dict[str, str]]:
    """Returns a line per method with a column per setting."""
    return results.pivot(
        cells, "method", "setting", lambda found: results.percent(found[0]["mean"], found[0]["std"])
    )


def _private(cells: Sequence[frame.Row]) -> list[frame.Row]:
    """Returns the cells of the first method that have an epsilon. Other methods have the same
    epsilons.
    """
    first = results.select(cells, method=cells[0]["method"])
    return [cell for cell in first if "visits" in cell]


def _tables(result: Mapping[str, Any], work: frame.Work) -> dict[str, Any]:
    *cells, source = result["cells"]
    changed = [cell for cell in cells if cell["setting"] != ORIGINAL]
    return {
        "Accuracy in percent over all corruptions, mean ± standard deviation of "
        f"{result['seeds']} streams": _accuracies([source, *cells]),
        "Difference to no adaptation on the same streams ± standard error": _differences(
            "over_source", cells
        ),
        "Difference to the original method on the same streams ± standard error": _differences(
            "over_original", changed
        ),
        "Diagnostics, functions of the records: mean length of an update, and percent of images "
        "that took part": [_name(cell) | _step_length(cell) for cell in cells],
        f"What it costs at delta = {result['delta']:g}, {result['adjacency']}": [
            _cost(cell, result["unit"]) for cell in _private(cells)
        ],
        "Accuracy in percent per corruption": [
            _name(cell) | _per_corruption(cell) for cell in [*cells, source]
        ],
        "Hyper-parameters": [
            _name(cell)
            | {"learning rate": cell["learning_rate"], "clip norm": cell.get("clip_norm")}
            for cell in cells
        ],
    }


def _name(cell: frame.Row) -> dict[str, Any]:
    return {"method": cell["method"], "setting": cell["setting"]}


def _differences(over: str, cells: Sequence[frame.Row]) -> list[dict[str, str]]:
    return results.pivot(
        cells, "method", "setting", lambda found: results.percent(*found[0][over], sign="+")
    )


def _step_length(cell: frame.Row) -> dict[str, Any]:
    taken = results.percent(cell["taken"]) if "taken" in cell else None
    return {"length": cell["length"], "took part": taken}


def _cost(cell: frame.Row, unit: str) -> dict[str, Any]:
    return {
        "setting": cell["setting"],
        "noise multiplier": cell["noise_multiplier"],
        "epsilon of a sample": cell["epsilon_sample"],
        f"epsilon of a {unit}": cell["epsilon_unit"],
        "visits": cell["visits"],
    }


def _per_corruption(cell: frame.Row) -> dict[str, str]:
    return {name: results.percent(value) for name, value in cell["per_corruption"].items()}


def _figures(result: Mapping[str, Any], work: frame.Work) -> None:
    """Draws the figures. Writes methods.txt, which describes the private form of each method."""
    config = work.config
    any_choice = {"learning_rate": 1.0, "clip_norm": 1.0}
    texts = []
    for name in config.methods:
        cell = Cell("runs", name, settings(config)[-1], 0)
        method: Any = work.shared.adapter(cell, any_choice).method
        texts.append(f"{name}: {method.describe()}\n")
    write_durably(work.root / "methods.txt", "\n".join(texts).encode())
    corruptions = len(result["cells"][-1]["per_corruption"])
    streams = f"{result['seeds']} streams of {result['images']} photographs"
    about = f"{corruptions} corruptions, {streams}"
    adapt_figures.draw_streams(result, work, about, settings(config))
    adapt_figures.draw_epsilons(result, work, about)
    adapt_figures.draw_stability(result, work)


def _summary(result: Mapping[str, Any]) -> str:
    at = f"at delta = {result['delta']:g}, {result['adjacency']}"
    costs = [
        f"{cell['setting']}: epsilon = {cell['epsilon_sample']:.4g} for a sample, "
        f"{cell['epsilon_unit']:.4g} for a {result['unit']} (seen {cell['visits']} times), {at}.\n"
        for cell in _private(result["cells"])
    ]
    return (
        f"{format_table(_accuracies(result['cells']))}\n\n{''.join(costs)}"
        "Each epsilon is of one run alone. These runs shared streams and labels. Publish all of "
        "them, as here, for public benchmarks only."
    )


STUDY = frame.Study(
    name="adapt",
    life=".lifecycle.adapt",
    open=_Task,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=_tables,
    figures=_figures,
    plan=_plan,
    benchmark=(
        "The accuracies are functions of the stream's records, and no ledger pays for them. Use "
        "jaxdp.tta.serve to adapt to a private stream."
    ),
    report=frame.Report(title="test-time adaptation, compared"),
)

if __name__ == "__main__":
    frame.main(STUDY)
