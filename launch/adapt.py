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
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import finetune, tta
from jaxdp.data import DataSpec, Examples, imagenet_r_classes, restrict_classes
from jaxdp.data import open as open_spec
from jaxdp.data.order import shuffled
from jaxdp.data.shifts import Shift
from jaxdp.files import check_choice, write_durably
from jaxdp.models import Pretrained
from jaxdp.privacy import Account, GaussianDpEvent, NonPrivateDpEvent, calibrate_noise
from jaxdp.report import progress_bar
from jaxdp.report.exactness import noise_of
from jaxdp.tta.streams import Order, Remainder, Reset

from . import adapt_figures, adapt_results, data, frame, models, plans, results
from .adapt_settings import (
    CLIPPINGS,
    FILTERS,
    INDEPENDENT,
    NOISES,
    ORIGINAL,
    SOURCE,
    compared,
    lengths,
    noises,
    period,
    settings,
)
from .settings import named

_FISHER_BATCH = 64  # of the papers' fisher_strength
# Where the numbers do not matter, as for the text or the program of a method.
_ANY_CHOICE = {"learning_rate": 1.0, "clip_norm": 1.0}


class Cell(NamedTuple):
    """A method over one stream.

    `part` is "tuning" for the held-out corruptions, "runs" for the stream of a seed, and "first n"
    for the same stream with n photographs of each domain.
    """

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
          epsilon. That of correlated noise is over its sensitivity.
      correlations: The correlated noise of each strategy.
      source: The source model of a number.
      method: The method of a name, for the source model of a number.
    """

    def __init__(self, config: Any, root: pathlib.Path):
        self.config, self.root = config, root
        self.noise = _noise_of_settings(config)
        self.correlations = {
            name: finetune.optimal_noise(None, steps=period(config), strategy=name)
            for name in noises(config)
            if name != INDEPENDENT
        }
        self._network = models.network(config.model)
        prepare = self._network.preprocessing.prepare
        models.check_recipe(config)
        opened = data.parts(
            config.data, "public", "test", "tuning", needs=("public",), prepare=prepare
        )
        self.public = opened["public"]
        test = opened.get("test")
        images = config.data.images
        streams = config.protocol.seeds // config.protocol.sources
        # Streams other than "given" share the photographs and differ in their order.
        used = images
        if config.protocol.domain_order == "given":
            used = streams * images
        self._domains = data.domains(config.data, config.data.corruptions)
        in_memory = config.data.get("in_memory", True)
        with named("data", (), name="data.corruptions"):
            self._mine = self._photographs(
                test, self._domains, np.arange(used), in_memory=in_memory
            )
        self.tuning = dict[str, Examples]()
        if not _declares_all(config):
            held_out = data.domains(config.data, config.tuning.corruptions)
            rows = np.arange(config.tuning.images)
            photographs = opened.get("tuning")
            if photographs is None:  # those behind the photographs of the streams
                photographs = test
                rows += used
            with named("tuning", (), name="tuning.corruptions"):
                self.tuning = self._photographs(photographs, held_out, rows, in_memory=True)
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
        if not self.config.model.classes:
            return apply_fn
        return restrict_classes(apply_fn, imagenet_r_classes())

    def _method(self, name: str, number: int, counting: bool = False) -> tta.Method:
        """Returns a method by its name. The suffix "-COME" puts COME over that method."""
        if counting:
            plain = self.method(name, number)
            return self._counted.setdefault(plain, _counting(plain))
        first = next(iter(self._mine.values()))
        classes = first.num_classes
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
            images = [self.public.gather(rows)["image"] for rows in self._fisher_rows()]
            params = self.source(number).params
            options["fisher"] = tta.fisher(self.apply_fn, params, images)
        method = kind(**options)
        return tta.COME(method, classes) if come else method

    def _fisher_rows(self) -> list[np.ndarray]:
        """Returns the rows of the public images of each batch."""
        starts = range(0, self.config.fisher_images, _FISHER_BATCH)
        return [np.arange(start, start + _FISHER_BATCH) for start in starts]

    def adapter(self, cell: Cell, choice: Mapping[str, float]) -> tta.Adapter:
        """Returns the adapter of a cell with these hyper-parameters."""
        number = cell.seed % self.config.protocol.sources
        name = "Tent" if cell.method == SOURCE else cell.method  # at a rate of 0 any method will do
        accumulate = 1
        setting: Any = settings(self.config)[cell.setting]
        method: Any = self.method(name, number, not setting.epsilon)
        if setting.epsilon:
            noise = self.correlations.get(setting.noise)
            sensitivity = noise.sensitivity if noise else 1.0
            kept_fraction = 1.0
            if setting.filters == "keep":
                kept_fraction = self.config.privacy.kept_fraction
            method = tta.private(
                method,
                clip_norm=choice["clip_norm"],
                noise_multiplier=self.noise[cell.setting] * sensitivity,
                noise=noise,
                filters=setting.filters,
                kept_fraction=kept_fraction,
                exact=self.config.privacy.get("exact", False),
            )
            accumulate = self.config.protocol.accumulate
        elif setting.unit:
            method = tta.clipped(method, choice["clip_norm"], unit=setting.unit)
        return tta.Adapter(
            self.apply_fn,
            self.source(number).params,
            method,
            _sgd(choice["learning_rate"]),
            accumulate=accumulate,
        )

    def stream(self, seed: int, images: int = 0) -> tta.Stream:
        """Returns the stream of a seed, or its first images of each domain.

        Seeds that differ in their source model only have the same stream.
        """
        protocol = self.config.protocol
        number = seed // protocol.sources
        names = list(self._mine)
        if protocol.domain_order == "shuffled":
            names = [names[k] for k in shuffled(len(names), seed=number)]
        domains, units = {}, {}
        for name in names:
            source = self._mine[name]
            if protocol.domain_order == "given":
                first = number * self.config.data.images
                source = source.take(np.arange(first, first + self.config.data.images))
            if images:
                source = source.take(np.arange(min(images, len(source))))
            domains[name] = source
            units[name] = self._units(name, len(source))
        return tta.Stream(
            domains,
            seed=number,
            units=units,
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


class _Untrained(_Task):
    """The same task with a network that is not trained. Its steps are the same programs."""

    def __init__(self, task: _Task):
        vars(self).update(vars(task))
        self.source = functools.cache(self._source)
        self.method = functools.cache(self._method)

    def _source(self, number: int) -> Pretrained:
        params = models.fresh(self._network, number)
        return dataclasses.replace(self._network, params=params)

    def _fisher_rows(self) -> list[np.ndarray]:
        return [np.arange(1)]


def _noise_of_settings(config: Any) -> dict[str, float]:
    """Returns the noise multiplier of each private setting."""
    multipliers = {}
    for budget in progress_bar(config.privacy.budgets, label="noise", unit="budget"):
        multipliers[budget] = calibrate_noise(
            GaussianDpEvent,
            epsilon=budget,
            delta=config.privacy.delta,
            adjacency=config.privacy.adjacency,
        )
    ways = settings(config).items()
    return {name: multipliers[way.epsilon] for name, way in ways if way.epsilon}


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
            of_method, counts = memory
            counts += jnp.array([kept.sum(), len(kept)])
            return super().remember(of_method, samples, kept), counts

        def lost(self, memory: Any) -> jax.Array:
            return super().lost(memory[0])

    names = [field.name for field in dataclasses.fields(method)]
    return Counting(**{name: getattr(method, name) for name in names})


def _sgd(learning_rate: float) -> optax.GradientTransformation:
    """Returns SGD with momentum. Its state has the learning rate, the number of steps and the sum
    of their lengths.
    """

    def init(params: Any) -> dict[str, Any]:
        return {
            "momentum": _MOMENTUM.init(params),
            "rate": jnp.float32(learning_rate),
            "steps": jnp.int32(0),
            "length": jnp.float32(0),
        }

    return optax.GradientTransformation(init, _update)


_MOMENTUM = optax.trace(0.9)


# One function serves all learning rates. So another rate does not compile the step again.
def _update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    direction, momentum = _MOMENTUM.update(gradient, state["momentum"])
    step = jax.tree.map(lambda x: -state["rate"] * x, direction)
    length = state["length"] + optax.tree.norm(step)
    steps = state["steps"] + 1
    return step, {**state, "momentum": momentum, "steps": steps, "length": length}


def _names() -> list[str]:
    """Returns the methods, each by itself and under COME."""
    names = [name for name in tta.METHODS if name != "COME"]
    return [*names, *(f"{name}-COME" for name in names)]


# --- Cells --------------------------------------------------------------------------------------


def _cells(config: Any) -> Iterator[Cell]:
    _check(config)
    for method, setting in compared(config):
        yield Cell("tuning", method, setting, 0)
    seeds = range(config.protocol.seeds)
    for part in lengths(config):
        for seed, (method, setting) in itertools.product(seeds, compared(config, part)):
            yield Cell(part, method, setting, seed)
        for seed in seeds:
            yield Cell(part, SOURCE, ORIGINAL, seed)


def _check(config: Any) -> None:
    """Refuses a config of which no stream could be run."""
    protocol, adjacency = config.protocol, config.privacy.adjacency
    if adjacency not in ("replace_one", "zero_out"):
        raise ValueError(
            "config.privacy.adjacency must be 'replace_one' or 'zero_out', got "
            f"{adjacency!r}. Removing a record would change all later batches of the stream."
        )
    frame.some("data.corruptions", config.data.corruptions)
    frame.some("tuning.corruptions", config.tuning.corruptions)
    orders = ("given", "shuffled", "same")
    check_choice("config.protocol.domain_order", protocol.domain_order, orders)
    check_choice("config.model.classes", config.model.classes, ("", "imagenet_r"))
    check_choice("config.protocol.order", protocol.order, Order)
    check_choice("config.protocol.reset", protocol.reset, Reset)
    check_choice("config.protocol.remainder", protocol.remainder, Remainder)
    if protocol.sources < 1 or protocol.seeds % protocol.sources:
        raise ValueError(
            "config.protocol.seeds must be a multiple of config.protocol.sources, one run for "
            f"each stream and source model, got {protocol.seeds} and {protocol.sources}."
        )
    methods = frame.some("methods", config.methods)
    frame.known("methods", methods, _names())
    frame.known("clipping", config.clipping, CLIPPINGS)
    frame.known("privacy.filters", config.privacy.filters, FILTERS)
    kinds = frame.some("privacy.noise", noises(config))
    frame.known("privacy.noise", kinds, NOISES)
    correlated = [kind for kind in kinds if kind != INDEPENDENT]
    if correlated and config.privacy.get("exact", False):
        raise ValueError(
            f"config.privacy.exact must be False with config.privacy.noise {correlated}, got True. "
            "Rows of correlated noise are sums of floats."
        )
    if not _declares_all(config):
        for name in ("learning_rates", "clip_norms"):
            frame.some(f"tuning.{name}", config.tuning[name])
    for images in protocol.lengths:
        if not protocol.batch_size <= images < config.data.images:
            raise ValueError(
                "config.protocol.lengths must be at least config.protocol.batch_size and below "
                f"config.data.images, got {images}. A shorter stream has no batch, and the whole "
                "one is run anyway."
            )


def _account(cell: Cell, work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account of a run."""
    # Every run has its own data set. All runs together would cost much more, as the summary says.
    label = f"{cell.method}, {cell.setting}"
    dataset = f"{label}, stream {cell.seed}"
    if cell.part != "runs":
        dataset += f", {cell.part}"
    images = lengths(work.config)[cell.part]
    terms = _terms(work.config) | {"label": label, "records": images}
    return frame.account(work.root / frame.LEDGER, dataset, **terms)


def _run(cell: Cell, work: frame.Work) -> dict[str, Any]:
    config = work.config
    task = work.shared
    if cell.part == "tuning":
        return _choose(cell, config, task)
    images = lengths(config)[cell.part]
    stream = task.stream(cell.seed, images)
    if cell.method == SOURCE:  # a rate of 0 changes nothing
        unchanged = task.adapter(cell, {"learning_rate": 0.0})
        served = tta.serve(unchanged, stream, account=None)
        return {"visits": 0, **_scores(served)}
    tuning = work.row(Cell("tuning", cell.method, cell.setting, 0))
    adapter = task.adapter(cell, tuning["chosen"])
    with _account(cell, work) as account:
        event = getattr(adapter.method, "event", NonPrivateDpEvent())
        paid = tta.StreamAccount(account, event=event)
        scratch = work.folder(cell) / "scratch"
        served = tta.serve(adapter, stream, account=paid, workdir=scratch)
    return {"visits": paid.worst, **_scores(served), **_diagnostics(served)}


def _scores(served: tta.Served) -> dict[str, Any]:
    return {"accuracy": served.accuracy, "mean": _mean(served.accuracy)}


def _declared(config: Any, method: str, setting: str) -> Any:
    """Returns the hyper-parameters of the config for a method in a setting, or None."""
    return config.hyper_parameters.get(method, {}).get(setting)


def _declares_all(config: Any) -> bool:
    """Returns whether the config has all hyper-parameters, so that none are chosen."""
    every = itertools.product(config.methods, settings(config))
    return all(_declared(config, method, setting) for method, setting in every)


def _terms(config: Any) -> dict[str, Any]:
    """Returns the terms of a stream in the ledger."""
    return results.only(config.privacy, "adjacency", "unit", "delta")


def _choose(cell: Cell, config: Any, task: _Task) -> dict[str, Any]:
    """Returns hyper-parameters from the config, or the best ones on the held-out corruptions."""
    declared = _declared(config, cell.method, cell.setting)
    if declared:
        return {"chosen": dict(declared), "tried": []}
    setting = settings(config)[cell.setting]
    candidates = _candidates(setting.unit, config.tuning)
    protocol = config.protocol
    stream = tta.Stream(task.tuning, seed=0, batch_size=protocol.batch_size, reset=protocol.reset)
    tried = []
    for candidate in candidates:
        adapter = task.adapter(cell, candidate)
        served = tta.serve(adapter, stream, account=None)
        accuracy = _mean(served.accuracy)
        tried.append({**candidate, "accuracy": accuracy, **_diagnostics(served)})
    best = results.best(tried)
    return {"chosen": results.only(best, *candidates[0]), "tried": tried}


def _candidates(unit: str, tuning: Any) -> list[dict[str, float]]:
    """Returns the hyper-parameters that are tried."""
    if not unit:
        return [{"learning_rate": rate} for rate in tuning.learning_rates]
    norms = tuning.batch_clip_norms if unit == "batch" else tuning.clip_norms
    if not tuning.clipped_steps:
        rates = itertools.product(tuning.learning_rates, norms)
        return [{"learning_rate": rate, "clip_norm": norm} for rate, norm in rates]
    # If most gradients are clipped, a step is about learning_rate * clip_norm long. So this product
    # varies.
    lengths = itertools.product(tuning.clipped_steps, norms)
    return [{"learning_rate": length / norm, "clip_norm": norm} for length, norm in lengths]


def _diagnostics(served: tta.Served) -> dict[str, float]:
    """Returns the mean length of an update and the share of images that took part, both since the
    last reset.
    """
    optimizer: Any = served.state.opt_state
    steps = jnp.maximum(optimizer["steps"], 1)
    row = {"length": float(optimizer["length"] / steps)}
    if served.state.memory:
        taken, seen = np.asarray(served.state.memory[1])
        row["taken"] = float(taken / max(seen, 1))
    return row


def _mean(accuracy: Mapping[str, float]) -> float:
    """Returns the mean over the corruptions of a stream."""
    return results.moments(accuracy.values()).mean


def _plan(config: Any, opened: Callable[[], _Task]) -> Iterator[plans.Item]:
    task = opened()
    pairs = compared(config)
    count = config.protocol.seeds * len(lengths(config))
    stream = task.stream(0)
    for setting in settings(config):
        methods = [method for method, name in pairs if name == setting]
        streams = f"{len(methods)} methods x {count} streams"
        noise = task.noise.get(setting, 0.0)
        event = tta.event(NonPrivateDpEvent(), stream)
        if noise:
            is_correlated = settings(config)[setting].noise in task.correlations
            event = tta.event(
                GaussianDpEvent(noise),
                stream,
                accumulate=config.protocol.accumulate,
                updates=period(config) if is_correlated else 1,
            )
        yield plans.Item(
            f"{setting}, {streams}",
            "each stream",
            event,
            _terms(config),
            rows=[("noise multiplier", f"{noise:.6g}")],
            runs=len(methods) * count,
            programs=functools.partial(_programs, task, setting, methods, stream),
            steps=len(stream) if noise else 0,
        )


def _programs(
    task: _Task, setting: str, methods: Sequence[str], stream: tta.Stream, memory: int | None
) -> plans.Programs:
    """Returns the steps of methods over a stream. Each has an equal share of the calls, so together
    they are the mean over the methods.

    Without a chip there are none, because a plan for this machine stays quick.
    """
    if memory is None:
        return ()
    untrained = _Untrained(task)
    images = jax.ShapeDtypeStruct(stream.batch(0).images.shape, jnp.float32)
    calls = []
    for name in methods:
        adapter = untrained.adapter(Cell("runs", name, setting, 0), _ANY_CHOICE)
        programs = adapter.programs(adapter.init(), images)
        calls.append((*programs["step"], len(stream) / len(methods)))
    return calls


# --- Results ------------------------------------------------------------------------------------


def _figures(result: Mapping[str, Any], work: frame.Work) -> None:
    """Draws the figures. Writes methods.txt, which describes the private form of each method."""
    texts = "\n".join(_descriptions(work.config, work.shared))
    write_durably(work.root / "methods.txt", texts.encode())
    corruptions = len(result["cells"][-1]["per_corruption"])
    streams = f"{result['seeds']} streams of {result['images']} photographs"
    about = f"{corruptions} corruptions, {streams}"
    adapt_figures.draw_streams(result, work, about, settings(work.config))
    adapt_figures.draw_epsilons(result, work, about)
    adapt_figures.draw_lengths(adapt_results.by_length(result), work)
    adapt_figures.draw_stability(result, work)


def _descriptions(config: Any, task: _Task) -> Iterator[str]:
    """Yields what each private form at the last budget keeps, moves and removes."""
    for name, setting in compared(config):
        epsilon = settings(config)[setting].epsilon
        if epsilon and epsilon == config.privacy.budgets[-1]:
            method: Any = task.adapter(Cell("runs", name, setting, 0), _ANY_CHOICE).method
            yield f"{name}: {method.describe()}\n"


def _noise(config: Mapping[str, Any]) -> list[str]:
    """Returns what a report says of the noise of private adaptation."""
    return noise_of(config.get("privacy", {}).get("exact", False), "private adaptation")


STUDY = frame.Study(
    name="adapt",
    life=".lifecycle.adapt",
    open=_Task,
    account=_account,
    cells=_cells,
    run=_run,
    result=adapt_results.result_of,
    summary=adapt_results.summary,
    tables=adapt_results.tables,
    figures=_figures,
    plan=_plan,
    benchmark=(
        "The accuracies are functions of the stream's records, and no ledger pays for them. Use "
        "jaxdp.tta.serve to adapt to a private stream."
    ),
    report=frame.Report(
        title="test-time adaptation, compared",
        noise=_noise,
    ),
)

if __name__ == "__main__":
    frame.main(STUDY)
