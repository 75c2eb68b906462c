"""Upstream models x private methods x epsilons x data sets x seeds: Table 1 of Wang et al. 2024
(DPAdapter) and more.

    python -m launch.finetune --config configs/dpadapter_table1.py:digits --workdir workdir/table1

A cell is one private model. It has its own ledger, as if it alone were released. Releasing all
cells would cost the sum. The folders `upstream/NAME/SEED` in the workdir have the pre-trained
models.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp import finetune
from jaxdp.data import DataSpec, Examples
from jaxdp.data.spec import open_parts
from jaxdp.models import Pretrained, load_params, merge_pretrained
from jaxdp.models.robustness import robust_accuracy
from jaxdp.report import plot_panels, plot_points

from . import data, frame, models, plans, pretrain, results, trainers
from .config_dict import ConfigDict
from .study import Fields, Lines, Result, Row, Rows

Params = Any

SCRATCH = "none"  # no upstream model
_FAMILIES = {"standard": "standard", "sam": "SAM", "amp": "SAM (AMP)", "dpadapter": "DPAdapter"}


class Cell(NamedTuple):
    """One private model. It has its own ledger, as if it alone were released. The seed does not fix
    the noise.
    """

    dataset: str
    method: str
    epsilon: float
    upstream: str
    seed: int


class _Bench:
    """What the cells of a table share: data, trainers with their compiled steps, upstream
    models.
    """

    def __init__(self, config: Any, root: pathlib.Path):
        self.config, self.root = config, root
        self.network = models.network(config.pretrain.model, 2)
        self.specs = functools.cache(self._specs)
        self.task = functools.cache(self._task)
        self.trainer = functools.cache(self._trainer)

    def private(self, method: str, epsilon: float, dataset: str, rate: float | None = None) -> Any:
        """Returns the `private` part of a fine-tuning config, with the method's learning rate or
        another one.
        """
        private = copy.deepcopy(self.config.private)
        private.update(self.config.methods[method])
        private.learning_rate = rate or private.learning_rate
        # epochs of ceil(1 / q) steps
        steps = private.epochs * -(-len(self.task(dataset)[1]) // private.batch_size)
        with private.unlocked():
            private.update({"epsilon": epsilon, "steps": steps})
            private.checkpoint_every = min(private.checkpoint_every, steps)
        return private

    def images(self, dataset: str) -> Any:
        """Returns the `data` part of a fine-tuning config, with the public images and a data
        set.
        """
        images = copy.deepcopy(self.config.pretrain.data)
        private = self.config.sets[dataset]
        source = private.get("source", images.source)
        same_set = (source, private.name) == (images.source, images.name)
        with images.unlocked(), images.ignore_type():
            if not same_set:
                images.parts = {}  # another set, whose records are not those of the public part
            images.update(private)
        return images

    def _specs(self, dataset: str) -> dict[str, DataSpec]:
        return data.specs(self.images(dataset), "private", "test", needs=("private", "test"))

    def _task(self, dataset: str) -> tuple[Pretrained, Examples, Examples]:
        sources = open_parts(self.specs(dataset))
        network = models.with_classes(self.network, sources["private"].num_classes)
        private = models.resize(network, sources["private"])
        test = models.resize(network, sources["test"])
        return network, dataclasses.replace(private, name=dataset), test

    def _trainer(self, method: str, epsilon: float, dataset: str, rate: float | None = None) -> Any:
        network, source, _ = self.task(dataset)
        private = self.private(method, epsilon, dataset, rate)
        public = None
        if private.method == "gep":
            images = data.parts(self.config.pretrain.data, "public")
            public = models.resize(network, images["public"])
        spec = self.specs(dataset)["private"]
        return trainers.make(private, network, source, public, spec, unit=spec.unit)

    def upstream(self, name: str, seed: int) -> tuple[Params, Row]:
        """Returns the parameters of an upstream model and its results. Trains the model first if it
        is missing.
        """
        folder = self.root / "upstream" / frame.file_name(name) / str(seed)
        known = frame.compute(pretrain.STUDY, self.upstream_config(name, seed), folder)
        return load_params(folder / "params.safetensors"), known

    def terms(self, dataset: str, private: Any) -> Fields:
        """Returns the terms of a private set in a ledger, with the budget of a cell."""
        budget = {
            "records": len(self.task(dataset)[1]),
            "epsilon": private.epsilon,
            "delta": private.delta,
        }
        return self.specs(dataset)["private"].terms | budget

    def upstream_config(self, name: str, seed: int) -> Any:
        """Returns the config of an upstream model."""
        config = copy.deepcopy(self.config.pretrain)
        config.update(self.config.upstreams[name])
        config.seed, config.watch = seed, self.config.get("watch", "")
        return config


def _cells(config: Any) -> Iterator[Cell]:
    """Yields all cells of all grids. Seeds come outermost, so that an unfinished table has whole
    seeds.
    """
    upstreams = [SCRATCH, *config.upstreams]
    for names in (upstreams, config.methods, config.sets):
        frame.distinct((name,) for name in names)
    if tuning := config.get("tuning"):
        frame.known("tuning.set", [tuning.set], config.sets)
        frame.known("tuning.methods", tuning.methods, config.methods)
    sweep = "relative_std" if config.robust.relative else "std"
    frame.known("robust.std", [config.robust.std], config.pretrain.robustness[sweep])
    for name, grid in config.grids.items():
        frame.known(f"grids.{name}.upstreams", grid.upstreams, upstreams)
        frame.known(f"grids.{name}.methods", grid.methods, config.methods)
        frame.known(f"grids.{name}.sets", grid.sets, config.sets)
        for key, *pair in grid.comparisons:
            choices = config.methods if key == "method" else upstreams
            frame.known(f"grids.{name}.comparisons", pair, choices)
    for seed, grid in itertools.product(config.seeds, config.grids.values()):
        if seed not in _seeds(grid, config):
            continue
        for dataset, method, epsilon, upstream in itertools.product(
            grid.sets, grid.methods, grid.epsilons, grid.upstreams
        ):
            yield Cell(dataset, method, float(epsilon), upstream, int(seed))


def _tuned(cell: Cell, work: frame.Work) -> float | None:
    """Returns the best learning rate for the upstream model of a cell on a PUBLIC set, None if it
    is not tuned.
    """
    tuning = work.config.get("tuning")
    if not tuning or cell.method in tuning.methods:
        return None
    on_public = cell._replace(dataset=tuning.set)
    rows = [work.row(on_public._replace(method=method)) for method in tuning.methods]
    return results.best(rows)["learning_rate"]


def _run(cell: Cell, work: frame.Work) -> Fields:
    bench, robust = work.shared, work.config.robust
    network, source, test = bench.task(cell.dataset)
    rate = _tuned(cell, work)
    private = bench.private(cell.method, cell.epsilon, cell.dataset, rate)
    trainer = bench.trainer(cell.method, cell.epsilon, cell.dataset, rate)
    start = models.fresh(network, cell.seed)
    if cell.upstream != SCRATCH:
        backbone, _ = bench.upstream(cell.upstream, cell.seed)
        start = merge_pretrained(start, backbone, exclude=("head",))
    folder = work.folder(cell)
    terms = bench.terms(cell.dataset, private)
    ledger = frame.account(folder / "ledger.sqlite", cell.dataset, label=cell.method, **terms)
    with ledger as account, frame.watching(work.config, folder) as writers:
        params, cost = trainers.fit(
            trainer, start, source, private, account, folder / "scratch", writers
        )
    noise = {"std": robust.std, "relative": robust.relative, "draws": robust.draws}
    return {
        "accuracy": finetune.accuracy(network.apply_fn, params, test),
        "robust_accuracy": float(robust_accuracy(network.apply_fn, params, test, **noise).mean()),
        "delta": private.delta,
        "learning_rate": private.learning_rate,
        **cost,
    }


def _result(rows: Rows, work: frame.Work) -> Fields:
    models_by_seed = dict.fromkeys((row["upstream"], row["seed"]) for row in rows)
    upstreams = [_upstream(work, name, seed) for name, seed in models_by_seed if name != SCRATCH]
    means = []
    for name in dict.fromkeys(row["upstream"] for row in upstreams):
        of_upstream = results.select(upstreams, upstream=name)
        mean = {"upstream": name}
        for key in ("accuracy", "robust_accuracy", "rho", "perturbation_norm"):
            mean[key] = results.over_seeds(of_upstream, key).mean
        means.append(mean)
    config = work.config
    return {
        "seeds": len(config.seeds),
        "grids": {name: _grid_result(rows, grid, config) for name, grid in config.grids.items()},
        "upstreams": upstreams,
        "upstream_means": means,
    }


def _upstream(work: frame.Work, name: str, seed: int) -> Fields:
    """Returns what is known of an upstream model of a seed."""
    robust = work.config.robust
    _, known = work.shared.upstream(name, seed)
    sweep = known["robust_accuracy"]["relative" if robust.relative else "absolute"]
    draws = sweep["draws"][sweep["std"].index(robust.std)]
    method, config = known["method"], known["provenance"]["config"]
    return {
        "upstream": name,
        "seed": seed,
        "family": method,
        "gamma": config["method"][method].get("gamma", 0.0),
        "batch size": config["train"]["batch_size"],
        "accuracy": known["accuracy"],
        "robust_accuracy": float(np.mean(draws)),
        "rho": known["rho"]["local"],
        "perturbation_norm": known["perturbation_norm"]["last"],
    }


def _grid_result(rows: Rows, grid: Any, config: Any) -> Fields:
    mine = _of_grid(rows, grid, config)
    # A grid with fewer methods or upstreams has fewer comparisons.
    known = {*grid.upstreams, *grid.methods}
    compared = [comparison for comparison in grid.comparisons if known.issuperset(comparison[1:])]
    has_figures = grid.get("figures", False)
    return {
        "seeds": len(_seeds(grid, config)),
        "table": layout(mine, grid),
        "robust_accuracy": layout(mine, grid, "robust_accuracy") if has_figures else [],
        "differences": [_difference(mine, *comparison) for comparison in compared],
    }


def _seeds(grid: Any, config: Any) -> tuple[int, ...]:
    """Returns the seeds of a grid: its own, or those of the config."""
    return tuple(map(int, grid.get("seeds", config.seeds)))


def _of_grid(rows: Rows, grid: Any, config: Any) -> list[Row]:
    return results.select(
        rows,
        epsilon=tuple(map(float, grid.epsilons)),
        seed=_seeds(grid, config),
        upstream=tuple(grid.upstreams),
        method=tuple(grid.methods),
        dataset=tuple(grid.sets),
    )


def layout(rows: Rows, grid: Any, value: str = "accuracy") -> Lines:
    """Returns Table 1: a line per method and upstream, a column per data set and epsilon, averages
    last.
    """
    table = []
    for method, upstream in itertools.product(grid.methods, grid.upstreams):
        line = {"method": method, "upstream": upstream}
        for epsilon in grid.epsilons:
            every = results.select(rows, method=method, upstream=upstream, epsilon=float(epsilon))
            columns = {name: results.select(every, dataset=name) for name in grid.sets}
            columns["average"] = every
            for name, cells in columns.items():
                mean, deviation, _ = results.over_seeds(cells, value)
                spread = f" ± {deviation:.3f}" if np.isfinite(deviation) else ""
                line[f"{name} ε={epsilon:g}"] = f"{mean:.3f}{spread}"
        table.append(line)
    return table


def _difference(rows: Rows, key: str, first: Any, second: Any) -> str:
    mean, error, higher, pairs = results.paired_difference(
        rows, key, first, second, coordinates=Cell._fields
    )
    known = f" (standard error {error:.4f})" if np.isfinite(error) else ""
    return f"{second} over {first}: {mean:+.4f}{known}, higher in {higher} of {pairs}"


def _tables(result: Result) -> Fields:
    tables: Fields = {}
    for name, grid in result["grids"].items():
        title = f"{name}: accuracy, mean ± standard deviation over {grid['seeds']} seeds"
        tables[title] = grid["table"]
        if grid["differences"]:
            tables[f"{name}: differences"] = "\n".join(f"* {line}" for line in grid["differences"])
    if result["upstreams"]:
        tables["upstream models, means over seeds"] = result["upstream_means"]
    return tables


def _figures(result: Result, work: frame.Work) -> None:
    config, upstreams = work.config, result["upstreams"]
    if not upstreams:
        return
    for name, grid in config.grids.items():
        if grid.get("figures", False):
            rows = [work.row(cell) for cell in frame.distinct(_cells(config))]
            _draw(config, work.root / name, grid, _of_grid(rows, grid, config), upstreams)


def _draw(
    config: Any,
    stem: pathlib.Path,
    grid: Any,
    rows: Rows,
    known: Rows,
) -> None:
    """Draws Figures 1 to 3, 5 and 6, at the grid's first method and epsilon."""
    method = grid.methods[0]
    epsilon = float(grid.epsilons[0])
    seeds = _seeds(grid, config)
    known = results.select(known, seed=seeds)
    family_of = {row["upstream"]: row["family"] for row in known}
    several = len(seeds) > 1
    on = " of each tensor" if config.robust.relative else " on every parameter"
    drawn = _Drawn(
        stem=stem,
        grid=grid,
        rows=results.select(rows, method=method, epsilon=epsilon),
        known=known,
        families={name: family_of[name] for name in family_of if name in grid.upstreams},
        text=f"{method}, ε = {epsilon:g}; robust: under noise of {config.robust.std:g}{on}; "
        f"seed{'s' * several} {', '.join(map(str, seeds))}",
        spread=", bars: standard error" * several,
    )
    _draw_robustness(drawn)
    _draw_magnitude(drawn)


class _Drawn(NamedTuple):
    """What the figures of a grid show.

    Attributes:
      stem: The beginning of the names of the files.
      rows, known: The rows of the private models and of the upstream models.
      families: The family of each upstream model.
      text, spread: What the subtitles say of the grid, and of the bars.
    """

    stem: pathlib.Path
    grid: Any
    rows: Rows
    known: Rows
    families: Mapping[str, str]
    text: str
    spread: str

    def point(
        self, upstream: str, key: str, sets: Sequence[str]
    ) -> tuple[float, float, float, float]:
        """Returns x, y and their standard errors: the robust accuracy of an upstream model, and a
        value of the private models on some sets.
        """
        of_upstream = results.select(self.known, upstream=upstream)
        private = results.select(self.rows, upstream=upstream, dataset=tuple(sets))
        x = results.over_seeds(of_upstream, "robust_accuracy")
        y = results.over_seeds(private, key)
        return x.mean, y.mean, x.error, y.error

    def file(self, name: str) -> pathlib.Path:
        """Returns the path of a figure."""
        return self.stem.with_name(f"{self.stem.name}_{name}.png")


def _draw_robustness(drawn: _Drawn) -> None:
    """Draws Figures 6 and 2: private models against the robust accuracy of their upstream model."""
    families, sets = drawn.families, drawn.grid.sets
    by_family = Fields()
    for upstream, family in families.items():
        points = by_family.setdefault(_FAMILIES[family], [])
        points.append(drawn.point(upstream, "accuracy", sets))
    xlabel = "robust accuracy of the upstream model"
    plot_points(
        drawn.file("robustness"),
        by_family,
        title="Robustness of the upstream model, and private accuracy",
        subtitle=drawn.text + drawn.spread,
        xlabel=xlabel,
        ylabel="private accuracy, mean of the data sets",
    )
    plot_points(
        drawn.file("transfer"),
        {name: [drawn.point(up, "robust_accuracy", [name]) for up in families] for name in sets},
        title="Robustness before and after private fine-tuning",
        subtitle=drawn.text + drawn.spread,
        xlabel=xlabel,
        ylabel="robust accuracy of the private model",
    )


def _draw_magnitude(drawn: _Drawn) -> None:
    """Draws Figures 1, 3 and 5: accuracies against gamma or another field of the upstream
    models.
    """
    field = drawn.grid.get("field", "gamma")
    magnitude = {row["upstream"]: row[field] for row in drawn.known}
    curves: dict[str, tuple[Rows, str]] = {
        name: (results.select(drawn.rows, dataset=name), "accuracy") for name in drawn.grid.sets
    }
    curves["upstream"] = drawn.known, "accuracy"
    curves["upstream, robust"] = drawn.known, "robust_accuracy"
    xlabel = "γ (0 is standard pre-training)" if field == "gamma" else field

    def panel(family: str) -> tuple[str, dict[str, list[tuple[float, float]]]]:
        start = "standard" if field == "gamma" else family  # gamma 0 is standard pre-training
        mine = [name for name, other in drawn.families.items() if other in (start, family)]
        points = dict[str, list[tuple[float, float]]]()
        for label, (rows, key) in curves.items():
            points[label] = [
                (magnitude[name], results.over_seeds(results.select(rows, upstream=name), key).mean)
                for name in sorted(mine, key=magnitude.__getitem__)
            ]
        return xlabel, points

    families = sorted({*drawn.families.values()} - {"standard"}) or ["standard"]
    plot_panels(
        drawn.file(field.replace(" ", "_")),
        {_FAMILIES[family]: panel(family) for family in families},
        title="Perturbation magnitude" if field == "gamma" else f"The {field}",
        subtitle=drawn.text,
        ylabel="accuracy",
        percent=True,
    )


def _plan(config: Any, opened: Callable[[], _Bench]) -> Iterator[plans.Item]:
    bench = opened()
    cells = frame.distinct(_cells(config))
    for name in dict.fromkeys(cell.upstream for cell in cells if cell.upstream != SCRATCH):
        upstream = bench.upstream_config(name, 0)
        open_upstream = functools.partial(pretrain.STUDY.open, upstream, bench.root)
        for item in pretrain.plan(upstream, open_upstream):
            yield item._replace(what=f"upstream {name}", runs=len(config.seeds))
    runs = collections.Counter((cell.dataset, cell.method, cell.epsilon) for cell in cells)
    for (dataset, method, epsilon), count in runs.items():
        network, source, _ = bench.task(dataset)
        private = bench.private(method, epsilon, dataset)
        yield plans.training(
            f"{method} on {dataset}, epsilon {epsilon:g}",
            bench.trainer(method, epsilon, dataset),
            source,
            models.fresh(network, 0),
            steps=private.steps,
            every=private.checkpoint_every,
            terms=bench.terms(dataset, private),
            runs=count,
            ledger="the cell's own",
        )


def _grows(config: Any) -> Any:
    """Returns the config without what may change: the seeds, the grids and the folder of the
    data.
    """
    fields = config.to_dict()  # a deep copy refuses names with a dot
    del fields["seeds"], fields["grids"]
    fields["pretrain"]["data"]["data_dir"] = ""
    return ConfigDict(fields, allow_dotted_keys=True)


STUDY = frame.Study(
    name="table",
    open=_Bench,
    cells=_cells,
    run=_run,
    result=_result,
    summary=lambda result: results.markdown(_tables(result)),
    tables=lambda result, work: _tables(result),
    figures=_figures,
    grows=_grows,
    plan=_plan,
    report=frame.Report(title="private fine-tuning, compared", ledgers=("cells/**/ledger.sqlite",)),
)
