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
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from jaxdp import finetune
from jaxdp.data import DataSpec, Examples
from jaxdp.data.spec import open_parts
from jaxdp.files import check_choice
from jaxdp.models import Pretrained, load_params, merge_pretrained
from jaxdp.models.robustness import robust_accuracy
from jaxdp.privacy import Account
from jaxdp.privacy.relations import Method
from jaxdp.report import plot_panels, plot_points

from . import data, frame, models, optimizers, plans, pretrain, results, trainers
from .config_dict import ConfigDict
from .study import Fields, Lines, Result, Row, Rows

Params = Any

SCRATCH = "none"  # no upstream model
Points = list[tuple[float, float]]  # of a curve
_ROBUSTNESS = "robust accuracy of the upstream model"  # an axis of figures
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
        _, source, _ = self.task(dataset)
        # epochs of ceil(1 / q) steps
        epoch = -(-len(source) // private.batch_size)
        steps = private.epochs * epoch
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
        public_set = images.source, images.name
        private_set = private.get("source", images.source), private.name
        with images.unlocked(), images.ignore_type():
            if private_set != public_set:
                images.parts = {}  # the records of another set are not those of the public part
            images.update(private)
        return images

    def _specs(self, dataset: str) -> dict[str, DataSpec]:
        return data.specs(self.images(dataset), "private", "test", needs=("private", "test"))

    def _task(self, dataset: str) -> tuple[Pretrained, Examples, Examples]:
        sources = open_parts(self.specs(dataset))
        private, test = sources["private"], sources["test"]
        network = models.with_classes(self.network, private.num_classes)
        resized = models.resize(network, private)
        named = dataclasses.replace(resized, name=dataset)
        return network, named, models.resize(network, test)

    def _trainer(self, method: str, epsilon: float, dataset: str, rate: float | None = None) -> Any:
        network, source, _ = self.task(dataset)
        private = self.private(method, epsilon, dataset, rate)
        public = None
        if private.method == "gep":
            sources = data.parts(self.config.pretrain.data, "public", needs=("public",))
            public = models.resize(network, sources["public"])
        spec = self.specs(dataset)["private"]
        return trainers.make(private, network, source, public, spec, unit=spec.unit)

    def upstream(self, name: str, seed: int) -> tuple[Params, Row]:
        """Returns the parameters of an upstream model and its results. Trains the model first if it
        is missing.
        """
        folder = self.root / "upstream" / frame.file_name(name) / str(seed)
        config = self.upstream_config(name, seed)
        result = frame.compute(pretrain.STUDY, config, folder)
        params = load_params(folder / "params.safetensors")
        return params, result

    def terms(self, dataset: str, private: Any) -> Fields:
        """Returns the terms of a private set in a ledger, with the budget of a cell."""
        _, source, _ = self.task(dataset)
        spec = self.specs(dataset)["private"]
        budget = results.only(private, "epsilon", "delta")
        return spec.terms | {"records": len(source)} | budget

    def upstream_config(self, name: str, seed: int) -> Any:
        """Returns the config of an upstream model."""
        config = copy.deepcopy(self.config.pretrain)
        config.update(self.config.upstreams[name])
        config.seed = seed
        config.watch = self.config.get("watch", "")
        return config


def _cells(config: Any) -> Iterator[Cell]:
    """Yields all cells of all grids. Seeds come outermost, so that an unfinished table has whole
    seeds.
    """
    _check(config)
    frame.some("seeds", config.seeds)
    for seed, grid in itertools.product(config.seeds, config.grids.values()):
        if seed not in _seeds(grid, config):
            continue
        axes = grid.sets, grid.methods, grid.epsilons, grid.upstreams
        for dataset, method, epsilon, upstream in itertools.product(*axes):
            yield Cell(dataset, method, float(epsilon), upstream, int(seed))


def _check(config: Any) -> None:
    """Refuses a config that names a part which it does not have."""
    upstreams = [SCRATCH, *config.upstreams]
    for names in (upstreams, config.methods, config.sets):
        frame.distinct((name,) for name in names)
    if tuning := config.get("tuning"):
        frame.known("tuning.set", [tuning.set], config.sets)
        frame.known("tuning.methods", tuning.methods, config.methods)
    sweep = "relative_std" if config.robust.relative else "std"
    stds = config.pretrain.robustness[sweep]
    frame.known("robust.std", [config.robust.std], stds)
    for name, changes in config.methods.items():
        private = copy.deepcopy(config.private)
        private.update(changes)
        frame.known(f"methods.{name}.method", [private.method], finetune.METHODS)
        check_choice(f"config.methods.{name}.accountant", private.accountant, Method)
        optimizers.optimizer(private, f"methods.{name}", steps=1)
    for name, changes in config.upstreams.items():
        upstream = copy.deepcopy(config.pretrain)
        upstream.update(changes)
        pretrain.check(upstream, f"upstreams.{name}.")
    for name, grid in config.grids.items():
        field = f"grids.{name}"
        for axis in ("upstreams", "methods", "sets", "epsilons"):
            frame.some(f"{field}.{axis}", grid[axis])
        frame.known(f"{field}.upstreams", grid.upstreams, upstreams)
        frame.known(f"{field}.methods", grid.methods, config.methods)
        frame.known(f"{field}.sets", grid.sets, config.sets)
        for key, *pair in grid.comparisons:
            choices = config.methods if key == "method" else upstreams
            frame.known(f"{field}.comparisons", pair, choices)


def _tuned(cell: Cell, work: frame.Work) -> float | None:
    """Returns the best learning rate for the upstream model of a cell on a PUBLIC set, None if it
    is not tuned.
    """
    tuning = work.config.get("tuning")
    if not tuning or cell.method in tuning.methods:
        return None
    rows = []
    for method in tuning.methods:
        on_public = cell._replace(dataset=tuning.set, method=method)
        rows.append(work.row(on_public))
    best = results.best(rows)
    return best["learning_rate"]


def _account(cell: Cell, work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account of a cell in the cell's own ledger."""
    private = work.shared.private(cell.method, cell.epsilon, cell.dataset, _tuned(cell, work))
    terms = work.shared.terms(cell.dataset, private)
    path = work.folder(cell) / frame.LEDGER
    return frame.account(path, cell.dataset, label=cell.method, **terms)


def _run(cell: Cell, work: frame.Work) -> Fields:
    bench, robust = work.shared, work.config.robust
    network, source, test = bench.task(cell.dataset)
    options = cell.method, cell.epsilon, cell.dataset, _tuned(cell, work)
    private = bench.private(*options)
    trainer = bench.trainer(*options)
    start = models.fresh(network, cell.seed)
    if cell.upstream != SCRATCH:
        backbone, _ = bench.upstream(cell.upstream, cell.seed)
        start = merge_pretrained(start, backbone, exclude=("head",))
    folder = work.folder(cell)
    with _account(cell, work) as account, frame.watching(work.config, folder) as writers:
        scratch = folder / "scratch"
        params, cost = trainers.fit(trainer, start, source, private, account, scratch, writers)
    predict = network.apply_fn
    noise = {"std": robust.std, "relative": robust.relative, "draws": robust.draws}
    under_noise = robust_accuracy(predict, params, test, **noise)
    return {
        "accuracy": finetune.accuracy(predict, params, test),
        "robust_accuracy": float(under_noise.mean()),
        "delta": private.delta,
        "learning_rate": private.learning_rate,
        **cost,
    }


def _result(rows: Rows, work: frame.Work) -> Fields:
    config = work.config
    upstreams = []
    for name, seed in dict.fromkeys((row["upstream"], row["seed"]) for row in rows):
        if name != SCRATCH:
            upstreams.append(_upstream(work, name, seed))
    means = []
    for name in dict.fromkeys(row["upstream"] for row in upstreams):
        of_upstream = results.select(upstreams, upstream=name)
        mean = {"upstream": name}
        for key in ("accuracy", "robust_accuracy", "rho", "perturbation_norm"):
            moments = results.over_seeds(of_upstream, key)
            mean[key] = moments.mean
        means.append(mean)
    grids = {}
    for name, grid in config.grids.items():
        grids[name] = _grid_result(rows, grid, config)
    return {
        "seeds": len(config.seeds),
        "grids": grids,
        "upstreams": upstreams,
        "upstream_means": means,
    }


def _upstream(work: frame.Work, name: str, seed: int) -> Fields:
    """Returns what is known of an upstream model of a seed."""
    robust = work.config.robust
    _, result = work.shared.upstream(name, seed)
    sweep = result["robust_accuracy"]["relative" if robust.relative else "absolute"]
    place = sweep["std"].index(robust.std)
    draws = sweep["draws"][place]
    family = result["method"]
    config = result["provenance"]["config"]
    options = config["method"][family]
    row = {"upstream": name, "seed": seed, "family": family}
    row["gamma"] = options.get("gamma", 0.0)
    row["batch size"] = config["train"]["batch_size"]
    row["accuracy"] = result["accuracy"]
    row["robust_accuracy"] = float(np.mean(draws))
    row["rho"] = result["rho"]["local"]
    row["perturbation_norm"] = result["perturbation_norm"]["last"]
    return row


def _grid_result(rows: Rows, grid: Any, config: Any) -> Fields:
    mine = _of_grid(rows, grid, config)
    names = {*grid.upstreams, *grid.methods}
    differences = []
    for key, first, second in grid.comparisons:
        # A grid with fewer methods or upstreams has fewer comparisons.
        if names >= {first, second}:
            differences.append(_difference(mine, key, first, second))
    robust_accuracy: Lines = []
    if grid.get("figures", False):
        robust_accuracy = layout(mine, grid, "robust_accuracy")
    return {
        "seeds": len(_seeds(grid, config)),
        "table": layout(mine, grid),
        "robust_accuracy": robust_accuracy,
        "differences": differences,
    }


def _seeds(grid: Any, config: Any) -> tuple[int, ...]:
    """Returns the seeds of a grid: its own, or those of the config."""
    seeds = grid.get("seeds", config.seeds)
    return tuple(map(int, seeds))


def _of_grid(rows: Rows, grid: Any, config: Any) -> Rows:
    epsilons = map(float, grid.epsilons)
    axes = {
        "epsilon": epsilons,
        "seed": _seeds(grid, config),
        "upstream": grid.upstreams,
        "method": grid.methods,
        "dataset": grid.sets,
    }
    coordinates = {name: tuple(values) for name, values in axes.items()}
    return results.select(rows, **coordinates)


def layout(rows: Rows, grid: Any, value: str = "accuracy") -> Lines:
    """Returns Table 1: a line per method and upstream, a column per data set and epsilon, averages
    last.
    """
    table = []
    for method, upstream in itertools.product(grid.methods, grid.upstreams):
        line = {"method": method, "upstream": upstream}
        of_model = results.select(rows, **line)
        for epsilon in map(float, grid.epsilons):
            every = results.select(of_model, epsilon=epsilon)
            for name in grid.sets:
                cells = results.select(every, dataset=name)
                line[f"{name} ε={epsilon:g}"] = _mean(cells, value)
            line[f"average ε={epsilon:g}"] = _mean(every, value)
        table.append(line)
    return table


def _mean(rows: Rows, value: str) -> str:
    """Returns "0.812 ± 0.004", the mean and standard deviation over seeds."""
    mean, deviation, _ = results.over_seeds(rows, value)
    spread = f" ± {deviation:.3f}" if np.isfinite(deviation) else ""
    return f"{mean:.3f}{spread}"


def _difference(rows: Rows, key: str, first: Any, second: Any) -> str:
    mean, error, higher, pairs = results.paired_difference(
        rows, key, first, second, coordinates=Cell._fields
    )
    spread = f" (standard error {error:.4f})" if np.isfinite(error) else ""
    return f"{second} over {first}: {mean:+.4f}{spread}, higher in {higher} of {pairs}"


def _tables(result: Result) -> Fields:
    tables: Fields = {}
    for name, grid in result["grids"].items():
        title = f"{name}: accuracy, mean ± standard deviation over {grid['seeds']} seeds"
        tables[title] = grid["table"]
        if differences := grid["differences"]:
            lines = [f"* {line}" for line in differences]
            tables[f"{name}: differences"] = "\n".join(lines)
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
            drawn = _drawn(config, work.root / name, grid, rows, upstreams)
            _draw_robustness(drawn)
            _draw_transfer(drawn)
            _draw_magnitude(drawn)


def _drawn(config: Any, stem: pathlib.Path, grid: Any, rows: Rows, upstreams: Rows) -> "_Drawn":
    """Returns what Figures 1 to 3, 5 and 6 show: the grid's first method and epsilon."""
    method = grid.methods[0]
    epsilon = float(grid.epsilons[0])
    seeds = _seeds(grid, config)
    of_seeds = results.select(upstreams, seed=seeds)
    families = {}
    for row in of_seeds:
        if row["upstream"] in grid.upstreams:
            families[row["upstream"]] = row["family"]
    several = len(seeds) > 1
    on = " of each tensor" if config.robust.relative else " on every parameter"
    noise = f"{config.robust.std:g}{on}"
    numbers = ", ".join(map(str, seeds))
    text = f"{method}, ε = {epsilon:g}; robust: under noise of {noise}; seed{'s' * several} "
    of_grid = _of_grid(rows, grid, config)
    drawn_rows = results.select(of_grid, method=method, epsilon=epsilon)
    spread = ", bars: standard error" * several
    return _Drawn(stem, grid, drawn_rows, of_seeds, families, text + numbers, spread)


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

    def point(self, upstream: str, key: str, sets: Sequence[str]) -> tuple[float, ...]:
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
    """Draws Figure 6: private models against the robust accuracy of their upstream model."""
    sets = drawn.grid.sets
    by_family: Fields = {}
    for upstream, family in drawn.families.items():
        points = by_family.setdefault(_FAMILIES[family], [])
        points.append(drawn.point(upstream, "accuracy", sets))
    plot_points(
        drawn.file("robustness"),
        by_family,
        title="Robustness of the upstream model, and private accuracy",
        subtitle=drawn.text + drawn.spread,
        xlabel=_ROBUSTNESS,
        ylabel="private accuracy, mean of the data sets",
    )


def _draw_transfer(drawn: _Drawn) -> None:
    """Draws Figure 2: robustness of private models against that of their upstream models."""
    by_set: Fields = {}
    for name in drawn.grid.sets:
        by_set[name] = [drawn.point(up, "robust_accuracy", [name]) for up in drawn.families]
    plot_points(
        drawn.file("transfer"),
        by_set,
        title="Robustness before and after private fine-tuning",
        subtitle=drawn.text + drawn.spread,
        xlabel=_ROBUSTNESS,
        ylabel="robust accuracy of the private model",
    )


def _draw_magnitude(drawn: _Drawn) -> None:
    """Draws Figures 1, 3 and 5: accuracies against gamma or another field of the upstream
    models.
    """
    field = drawn.grid.get("field", "gamma")
    is_gamma = field == "gamma"
    magnitude = {row["upstream"]: row[field] for row in drawn.known}
    sources: dict[str, tuple[Rows, str]] = {}
    for name in drawn.grid.sets:
        sources[name] = results.select(drawn.rows, dataset=name), "accuracy"
    sources["upstream"] = drawn.known, "accuracy"
    sources["upstream, robust"] = drawn.known, "robust_accuracy"
    xlabel = "γ (0 is standard pre-training)" if is_gamma else field

    def panel(family: str) -> tuple[str, dict[str, Points]]:
        shown = {family, "standard"} if is_gamma else {family}  # gamma 0 is standard pre-training
        mine = [name for name, other in drawn.families.items() if other in shown]
        ascending = sorted(mine, key=magnitude.__getitem__)
        curves = {}
        for label, (rows, key) in sources.items():
            points = []
            for name in ascending:
                of_upstream = results.select(rows, upstream=name)
                moments = results.over_seeds(of_upstream, key)
                points.append((magnitude[name], moments.mean))
            curves[label] = points
        return xlabel, curves

    families = {*drawn.families.values()} - {"standard"} or {"standard"}
    file_name = field.replace(" ", "_")
    plot_panels(
        drawn.file(file_name),
        {_FAMILIES[family]: panel(family) for family in sorted(families)},
        title="Perturbation magnitude" if is_gamma else f"The {field}",
        subtitle=drawn.text,
        ylabel="accuracy",
        percent=True,
    )


def _plan(config: Any, opened: Callable[[], _Bench]) -> Iterator[plans.Item]:
    bench = opened()
    cells = frame.distinct(_cells(config))
    upstreams = dict.fromkeys(cell.upstream for cell in cells)
    upstreams.pop(SCRATCH, None)
    for name in upstreams:
        upstream = bench.upstream_config(name, 0)
        open_upstream = functools.partial(pretrain.STUDY.open, upstream, bench.root)
        for item in pretrain.plan(upstream, open_upstream):
            yield item._replace(what=f"upstream {name}", runs=len(config.seeds))
    runs = collections.Counter((cell.method, cell.epsilon, cell.dataset) for cell in cells)
    for options, count in runs.items():
        method, epsilon, dataset = options
        network, source, _ = bench.task(dataset)
        private = bench.private(*options)
        trainer = bench.trainer(*options)
        start = models.fresh(network, 0)
        yield plans.training(
            f"{method} on {dataset}, epsilon {epsilon:g}",
            trainer,
            source,
            start,
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
    del fields["seeds"]
    del fields["grids"]
    fields["pretrain"]["data"]["data_dir"] = ""
    return ConfigDict(fields, allow_dotted_keys=True)


_REPORT = frame.Report(title="private fine-tuning, compared", ledgers=("cells/**/ledger.sqlite",))

STUDY = frame.Study(
    name="table",
    open=_Bench,
    account=_account,
    cells=_cells,
    run=_run,
    result=_result,
    summary=lambda result: results.markdown(_tables(result)),
    tables=lambda result, work: _tables(result),
    figures=_figures,
    grows=_grows,
    plan=_plan,
    report=_REPORT,
)
