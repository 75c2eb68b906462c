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
SOURCE = "no adaptation"


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
      tuning: Photographs under the held-out corruptions. No stream contains them.
      noise: The noise multiplier of each private setting. At it a visit costs at most the setting's
          epsilon.
      source: The source model of a number.
      method: The method of a name, for the source model of a number.
    """

    def __init__(self, config: Any, root: pathlib.Path):
        self.config, self.root = config, root
        terms: Any = {name: config.privacy[name] for name in ("delta", "adjacency")}
        budgets = progress_bar(config.privacy.budgets, label="noise", unit="budget")
        noise = [calibrate_noise(GaussianDpEvent, epsilon=budget, **terms) for budget in budgets]
        self.noise = dict(zip(settings(config)[2:], noise, strict=True))
        self._network = models.network(config.model)
        sources = data.parts(
            config.data, "public", "test", "tuning", prepare=self._network.preprocessing.prepare
        )
        self.public = sources["public"]
        test = sources.get("test")
        tuning = sources.get("tuning")
        streams = config.protocol.seeds // config.protocol.sources
        images = config.data.images
        used = images if config.protocol.domain_order == "shuffled" else streams * images
        self._domains = data.domains(config.data, config.data.corruptions)
        self._mine = self._photographs(test, self._domains, np.arange(used))
        held_out = np.arange(config.tuning.images) + (used if tuning is None else 0)
        self.tuning = self._photographs(
            test if tuning is None else tuning,
            data.domains(config.data, config.tuning.corruptions),
            held_out,
        )
        self._counted: dict[tta.Method, tta.Method] = {}
        self.source, self.method = functools.cache(self._source), functools.cache(self._method)
        print(
            f"{streams} streams of {len(self._mine)} domains with {images} photographs each. "
            f"Hyper-parameters are chosen on {', '.join(self.tuning)} of other photographs.",
            flush=True,
        )

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
        if not self.config.model.classes:
            return apply_fn
        return restrict_classes(apply_fn, imagenet_r_classes())

    def _method(self, name: str, number: int, counting: bool = False) -> tta.Method:
        """Returns a method by its name. The suffix "-COME" puts COME over that method."""
        if counting:
            plain = self.method(name, number)
            return self._counted.setdefault(plain, _counting(plain))
        classes = next(iter(self.tuning.values())).num_classes
        base, _, come = name.partition("-")
        options = dict(self.config.method_options.get(base, {}))
        kind = tta.METHODS[base]
        takes = inspect.signature(kind).parameters
        if number and "fisher" not in takes:
            return self.method(
                name, 0
            )  # one object for all source models, so that its step is compiled once
        if "num_classes" in takes:
            options["num_classes"] = classes
        if "fisher" in takes:
            starts = range(
                0, self.config.fisher_images, 64
            )  # the papers' fisher_strength is for batches of 64
            images = [self.public.gather(np.arange(k, k + 64))["image"] for k in starts]
            options["fisher"] = tta.fisher(self.apply_fn, self.source(number).params, images)
        method = kind(**options)
        return tta.COME(method, classes) if come else method

    def adapter(self, cell: Cell, choice: Mapping[str, float]) -> tta.Adapter:
        """Returns the adapter of a cell with these hyper-parameters."""
        number = cell.seed % self.config.protocol.sources
        counting = cell.setting in (ORIGINAL, CLIPPED)
        method: Any = self.method(
            "Tent" if cell.method == SOURCE else cell.method, number, counting
        )
        accumulate = 1
        if cell.setting == CLIPPED:
            method = tta.clipped(method, choice["clip_norm"])
        elif not counting:
            noise, filters = self.noise[cell.setting], dict(self.config.privacy.filters)
            method = tta.private(
                method, clip_norm=choice["clip_norm"], noise_multiplier=noise, **filters
            )
            accumulate = self.config.protocol.accumulate
        optimizer = _sgd(choice["learning_rate"])
        return tta.Adapter(
            self.apply_fn, self.source(number).params, method, optimizer, accumulate=accumulate
        )

    def stream(self, seed: int) -> tta.Stream:
        """Returns the stream of a seed. Seeds that differ in their source model only have the same
        stream.
        """
        protocol, number = self.config.protocol, seed // self.config.protocol.sources
        options = {name: protocol[name] for name in ("batch_size", "order", "reset", "remainder")}
        if protocol.domain_order == "shuffled":
            names = list(self._mine)
            order = shuffled(len(names), seed=number)
            mine = {names[k]: self._mine[names[k]] for k in order}
        else:
            images = self.config.data.images
            rows = np.arange(number * images, (number + 1) * images)
            mine = {name: source.take(rows) for name, source in self._mine.items()}
        units = {name: self._units(name, len(source)) for name, source in mine.items()}
        return tta.Stream(mine, seed=number, units=units, **options)

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
    ) -> dict[str, Examples]:
        """Returns the same photographs under each shift. Reads one shift at a time and keeps only
        these photographs.
        """
        photographs = {}
        for name in progress_bar(list(domains), label="reading", unit="corruption"):
            domain = domains[name]
            if isinstance(domain, DataSpec):  # it may have fewer images
                images = models.resize(self._network, open_spec(domain))
                photographs[name] = data.in_memory(images.take(rows[rows < len(images)]))
                continue
            images = data.under(test, domain)
            if rows[-1] >= len(images):
                raise ValueError(
                    "config.data.images for each of config.protocol.seeds, and "
                    f"config.tuning.images, together need {rows[-1] + 1} photographs, but "
                    f"{images.name} has {len(images)}."
                )
            photographs[name] = data.in_memory(images.take(rows))
        return photographs


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
    if config.protocol.domain_order not in ("given", "shuffled"):
        raise ValueError(
            "config.protocol.domain_order must be 'given' or 'shuffled', got "
            f"{config.protocol.domain_order!r}."
        )
    if config.protocol.sources < 1 or config.protocol.seeds % config.protocol.sources:
        raise ValueError(
            "config.protocol.seeds must be a multiple of config.protocol.sources, one run for "
            f"each stream and source model, got {config.protocol.seeds} and "
            f"{config.protocol.sources}."
        )
    frame.known("methods", frame.some("methods", config.methods), _names())
    pairs = list(itertools.product(config.methods, settings(config)))
    seeds = range(config.protocol.seeds)
    yield from (Cell("tuning", *pair, 0) for pair in pairs)
    for seed in seeds:
        yield from (Cell("runs", *pair, seed) for pair in pairs)
    yield from (Cell("runs", SOURCE, ORIGINAL, seed) for seed in seeds)


def _run(cell: Cell, work: frame.Work) -> dict[str, Any]:
    config, task = work.config, work.shared
    if cell.part == "tuning":
        return _choose(cell, config, task)
    stream = task.stream(cell.seed)
    if cell.method == SOURCE:  # a rate of 0 changes nothing
        served = tta.serve(task.adapter(cell, {"learning_rate": 0.0}), stream, account=None)
        return {"visits": 0, "accuracy": served.accuracy, "mean": _mean(served.accuracy)}
    tuning = work.row(Cell("tuning", cell.method, cell.setting, 0))
    adapter = task.adapter(cell, tuning["chosen"])
    # Every run has its own data set. All runs together would cost much more, as the summary says.
    label = f"{cell.method}, {cell.setting}"
    terms = {name: config.privacy[name] for name in ("adjacency", "unit", "delta")}
    terms["records"] = config.data.images
    ledger = work.root / "ledger.sqlite"
    event = getattr(adapter.method, "event", NonPrivateDpEvent())
    with frame.account(ledger, f"{label}, stream {cell.seed}", label=label, **terms) as account:
        paid = tta.StreamAccount(account, event=event)
        scratch = work.folder(cell) / "scratch"
        served = tta.serve(adapter, stream, account=paid, workdir=scratch)
    row = {"visits": paid.worst, "accuracy": served.accuracy, "mean": _mean(served.accuracy)}
    return row | _diagnostics(served)


def _choose(cell: Cell, config: Any, task: _Task) -> dict[str, Any]:
    """Returns hyper-parameters from the config, or the best ones on the held-out corruptions."""
    if given := config.hyper_parameters.get(cell.method, {}).get(cell.setting):
        return {"chosen": dict(given), "tried": []}
    if cell.setting == ORIGINAL:
        candidates = [{"learning_rate": rate} for rate in config.tuning.learning_rates]
    else:
        # If most gradients are clipped, a step is about learning_rate * clip_norm long. So this
        # product varies.
        lengths = itertools.product(config.tuning.clipped_steps, config.tuning.clip_norms)
        candidates = [
            {"learning_rate": length / norm, "clip_norm": norm} for length, norm in lengths
        ]
    options = {name: config.protocol[name] for name in ("batch_size", "reset")}
    stream = tta.Stream(task.tuning, seed=0, **options)
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
    diagnostics = {"length": float(optimizer["length"] / jnp.maximum(optimizer["steps"], 1))}
    if served.state.memory:
        taken, seen = np.asarray(served.state.memory[1])
        diagnostics["taken"] = float(taken / max(seen, 1))
    return diagnostics


def _mean(accuracy: Mapping[str, float]) -> float:
    """Returns the mean over the corruptions of a stream."""
    return results.moments(accuracy.values()).mean


def _plan(config: Any, opened: Callable[[], _Task]) -> Iterator[plans.Item]:
    task, terms = opened(), {name: config.privacy[name] for name in ("adjacency", "unit", "delta")}
    streams = f"{len(config.methods)} methods x {config.protocol.seeds} streams"
    for setting in settings(config):
        noise = task.noise.get(setting, 0.0)
        release = GaussianDpEvent(noise) if noise else NonPrivateDpEvent()
        accumulate = config.protocol.accumulate if noise else 1
        yield plans.Item(
            f"{setting}, {streams}",
            "each stream",
            tta.event(release, task.stream(0), accumulate=accumulate),
            terms,
            rows=[("noise multiplier", f"{noise:.6g}")],
            runs=len(config.methods) * config.protocol.seeds,
        )


# --- Results ------------------------------------------------------------------------------------


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    """Returns means and standard deviations over the seeds, per method, setting and corruption."""
    config, privacy = work.config, work.config.privacy
    tuning = results.select(rows, part="tuning")
    runs = results.select(rows, part="runs")
    chosen = {(row["method"], row["setting"]): row["chosen"] for row in tuning}
    cells = []
    for method, setting in dict.fromkeys((row["method"], row["setting"]) for row in runs):
        hyper_parameters = chosen.get((method, setting), {})
        cells.append(_cell_result(method, setting, hyper_parameters, runs, work))
    tried: list[frame.Row] = []
    for row in tuning:
        about = {"method": row["method"], "setting": row["setting"]}
        tried += [about | candidate for candidate in row["tried"]]
    return {
        "cells": cells,
        "seeds": config.protocol.seeds,
        "images": config.data.images,
        **{name: privacy[name] for name in ("delta", "adjacency", "unit")},
        "tried": tried,
    }


def _cell_result(
    method: str,
    setting: str,
    hyper_parameters: Mapping[str, float],
    runs: Sequence[frame.Row],
    work: frame.Work,
) -> frame.Row:
    """Returns means over the seeds of one method in one setting, and what they cost."""
    mine = results.select(runs, method=method, setting=setting)
    original = results.select(runs, method=method, setting=ORIGINAL)
    sources = work.config.protocol.sources
    mean, deviation, _ = results.over_seeds(mine, "mean")
    cell: frame.Row = {
        "method": method,
        "setting": setting,
        **hyper_parameters,
        "mean": mean,
        "std": deviation,
        "over_source": _difference(mine, results.select(runs, method=SOURCE), sources),
        "over_original": _difference(mine, original, sources),
    }
    for name in ("length", "taken"):
        if all(name in row for row in mine):
            cell[name] = results.moments(row[name] for row in mine).mean
    cell["per_corruption"] = {
        name: results.moments(row["accuracy"][name] for row in mine).mean
        for name in mine[0]["accuracy"]
    }
    sigma = work.shared.noise.get(setting)
    if not sigma:
        return cell
    terms: Any = {name: work.config.privacy[name] for name in ("delta", "adjacency")}
    visits = max(row["visits"] for row in mine)
    paid = tta.epsilons(GaussianDpEvent(sigma), visits=visits, **terms)
    return cell | {
        "noise_multiplier": sigma,
        "epsilon_sample": paid.sample,
        "epsilon_unit": paid.unit,
        "visits": visits,
    }


def _difference(mine: Sequence[frame.Row], other: Sequence[frame.Row], sources: int) -> list[float]:
    """Returns mean and standard error of the difference to what was run on the same streams."""
    means = {row["seed"]: row["mean"] for row in other}
    differences = {row["seed"]: row["mean"] - means[row["seed"]] for row in mine}
    return list(crossed(differences, sources))


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
    error = math.hypot(*errors) if errors else math.nan
    return results.moments(values.values()).mean, error


def _accuracies(cells: Sequence[frame.Row]) -> list[dict[str, str]]:
    """Returns a line per method with a column per setting."""
    return results.pivot(
        cells, "method", "setting", lambda c: results.percent(c[0]["mean"], c[0]["std"])
    )


def _private(cells: Sequence[frame.Row]) -> list[frame.Row]:
    """Returns the cells of the first method that have an epsilon. Other methods have the same
    epsilons.
    """
    return [c for c in cells if c["method"] == cells[0]["method"] and "visits" in c]


def _tables(result: Mapping[str, Any], work: frame.Work) -> dict[str, Any]:
    *cells, source = result["cells"]
    changed = [c for c in cells if c["setting"] != ORIGINAL]
    accuracy = (
        "Accuracy in percent over all corruptions, mean ± standard deviation of "
        f"{result['seeds']} streams"
    )
    difference = "Difference to {} on the same streams ± standard error"
    diagnostics = (
        "Diagnostics, functions of the records: mean length of an update, and percent of images "
        "that took part"
    )
    costs = f"What it costs at delta = {result['delta']:g}, {result['adjacency']}"
    return {
        accuracy: _accuracies([source, *cells]),
        difference.format("no adaptation"): _differences(cells, "over_source"),
        difference.format("the original method"): _differences(changed, "over_original"),
        diagnostics: [_diagnostics_row(cell) for cell in cells],
        costs: [_cost_row(cell, result["unit"]) for cell in _private(cells)],
        "Accuracy in percent per corruption": [_corruptions_row(c) for c in result["cells"]],
        "Hyper-parameters": [_hyper_parameters_row(cell) for cell in cells],
    }


def _differences(cells: Sequence[frame.Row], over: str) -> list[dict[str, str]]:
    """Returns a line per method with a column per setting."""
    return results.pivot(
        cells, "method", "setting", lambda mine: results.percent(*mine[0][over], sign="+")
    )


def _names_row(cell: frame.Row) -> frame.Row:
    return {"method": cell["method"], "setting": cell["setting"]}


def _diagnostics_row(cell: frame.Row) -> frame.Row:
    taken = results.percent(cell["taken"]) if "taken" in cell else None
    return _names_row(cell) | {"length": cell["length"], "took part": taken}


def _cost_row(cell: frame.Row, unit: str) -> frame.Row:
    return {
        "setting": cell["setting"],
        "noise multiplier": cell["noise_multiplier"],
        "epsilon of a sample": cell["epsilon_sample"],
        f"epsilon of a {unit}": cell["epsilon_unit"],
        "visits": cell["visits"],
    }


def _corruptions_row(cell: frame.Row) -> frame.Row:
    accuracies = cell["per_corruption"].items()
    return _names_row(cell) | {name: results.percent(value) for name, value in accuracies}


def _hyper_parameters_row(cell: frame.Row) -> frame.Row:
    chosen = {"learning rate": cell["learning_rate"], "clip norm": cell.get("clip_norm")}
    return _names_row(cell) | chosen


def _figures(result: Mapping[str, Any], work: frame.Work) -> None:
    """Draws the figures. Writes methods.txt, which describes the private form of each method."""
    _describe_methods(work)
    adapt_figures.draw_streams(result, work.root, settings(work.config))
    adapt_figures.draw_by_epsilon(result, work.root, work.config.methods)
    adapt_figures.draw_stability(result, work.root)


def _describe_methods(work: frame.Work) -> None:
    hyper_parameters = {"learning_rate": 1.0, "clip_norm": 1.0}
    setting = settings(work.config)[-1]
    texts = []
    for name in work.config.methods:
        private = work.shared.adapter(Cell("runs", name, setting, 0), hyper_parameters)
        texts.append(f"{name}: {private.method.describe()}\n")
    write_durably(work.root / "methods.txt", "\n".join(texts).encode())


def _summary(result: Mapping[str, Any]) -> str:
    at = f"at delta = {result['delta']:g}, {result['adjacency']}"
    costs = [
        f"{c['setting']}: epsilon = {c['epsilon_sample']:.4g} for a sample, "
        f"{c['epsilon_unit']:.4g} for a "
        f"{result['unit']} (seen {c['visits']} times), {at}.\n"
        for c in _private(result["cells"])
    ]
    return (
        f"{format_table(_accuracies(result['cells']))}\n\n{''.join(costs)}Each epsilon is of one "
        "run alone. These runs "
        "shared streams and labels. Publish all of them, as here, for public benchmarks only."
    )


STUDY = frame.Study(
    name="adapt",
    about="private test-time adaptation",
    needs=("protocol",),
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
