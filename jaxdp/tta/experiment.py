"""One adaptation experiment from a config: methods x budgets x seeds over corrupted streams, two tables, figures.

The config is an `ml_collections.ConfigDict` as in `configs/tta/cifar10.py`, whose comments say what each field means.
The tables are those of "Private and Stable Test-Time Adaptation with Differential Privacy" (arXiv:2606.01908):
accuracy per corruption at each epsilon, and the methods as published, with and without clipping.
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jaxdp import data
from jaxdp.data.shifts import clean_images, shifted_images
from jaxdp.files import read_json, write_json
from jaxdp.models.public import public_model, trained
from jaxdp.privacy import GaussianDpEvent, Ledger, NonPrivateDpEvent, calibrate_noise
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import alone, bind, finished_result
from jaxdp.report import format_table, plot_curves
from jaxdp.tta.accounts import StreamAccount, epsilons
from jaxdp.tta.adapter import Adapter
from jaxdp.tta.come import COME
from jaxdp.tta.deyo import DeYO
from jaxdp.tta.eata import EATA, fisher
from jaxdp.tta.method import Method
from jaxdp.tta.private import Private, private
from jaxdp.tta.sar import SAR
from jaxdp.tta.serving import serve
from jaxdp.tta.streams import Stream
from jaxdp.tta.tent import Tent

# How a method is run: as published, with its gradients clipped, or with noise for a target epsilon.
ORIGINAL, CLIPPED = "original", "clipped"
_METHODS = ("Tent", "EATA", "SAR", "DeYO")
SOURCE = "no adaptation"


def run(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Runs the experiment, or what is left of it, and returns its result.

    Every run over a stream is kept as soon as it ends. An interrupted experiment goes on in the middle of the run that
    was interrupted, which is not charged twice.

    Args:
      config: the experiment.
      workdir: its directory, made if needed. It holds afterwards:
          result.json, tables.md  accuracy per method, setting and corruption: mean and deviation over seeds
          by_epsilon.png          accuracy against epsilon
          stream_*.png, gain_*.png  accuracy over the stream, and what it gains, one figure per setting
          stability_*.png         accuracy on the held-out corruptions against the length of updates, per method
          ledger.sqlite           what each run would cost the photographs of its stream (`python -m launch.ledger`)
          tuning/, runs/          what was tried on the held-out corruptions; every run, and the workdir of an
                                  unfinished one
          source.safetensors      the source model, if it was trained here

    Raises:
      ValueError: the workdir belongs to an experiment with another config or is in use by another process, the config
        is inconsistent, or the stream is not declared a public benchmark.
      FileNotFoundError: data or a checkpoint is not there; the message says how to get it.
    """
    root = pathlib.Path(workdir)
    if (result := finished_result(config, root, _summary)) is not None:
        return result
    _check(config)
    with alone(root), bind(config, root):
        task = _Task.of(config, root)
        print(task.describe(), flush=True)
        result = _run(config, task, root)
        write_json(root / "result.json", result)
    print(
        f"\n{_summary(result)}\n\nIn {root}: tables.md, by_epsilon, stream, gain and stability figures, ledger.sqlite."
    )
    return result


def _check(config: Any) -> None:
    """Refuses what would fail after the source model is trained."""
    if not config.public_benchmark:
        raise ValueError(
            "config.public_benchmark must be True: accuracies are functions of the stream's records that no ledger "
            "pays for. To adapt to a private stream use jaxdp.tta.serve."
        )
    if config.privacy.adjacency not in ("replace_one", "zero_out"):
        raise ValueError(
            f"config.privacy.adjacency must be 'replace_one' or 'zero_out', got {config.privacy.adjacency!r}: a stream "
            "from which a record is removed has other batches from there on."
        )
    lists = {"methods": config.methods, "data.corruptions": config.data.corruptions}
    for name, given in {**lists, "tuning.corruptions": config.tuning.corruptions}.items():
        if not given:
            raise ValueError(f"config.{name} must have at least one name, got none.")
    for name in config.methods:
        base, _, come = name.partition("-")
        if base not in _METHODS or come not in ("", "COME"):
            raise ValueError(f"config.methods has {name!r}; there are {', '.join(_METHODS)}, each also with -COME.")
    for setting in _settings(config)[1:]:
        _noise_multiplier(config, setting)  # raises where no noise meets the budget


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
    """Source model and data of an experiment.

    Attributes:
      apply_fn, params: the source model, on images in [0, 1].
      num_classes: of its logits.
      evaluation: per seed, the photographs of its stream under each corruption.
      tuning: photographs of nobody's stream, under the held-out corruptions.
      public: clean images for Fisher information.
    """

    apply_fn: Callable[[Any, jax.Array], jax.Array]
    params: Any
    num_classes: int
    evaluation: tuple[Mapping[str, data.Source], ...]
    tuning: Mapping[str, data.Source]
    public: data.Source

    @classmethod
    def of(cls, config: Any, root: pathlib.Path) -> "_Task":
        source = public_model(config.model)
        prepare = source.preprocessing.prepare
        public = clean_images(config.data, prepare)
        if not config.model.checkpoint:
            source = trained(source, public, config.train, root / "source.safetensors")
        n, m, seeds = config.data.images, config.tuning.images, config.protocol.seeds
        ends = [*itertools.accumulate([n] * seeds + [m], initial=0)]
        *evaluated, held_out = (np.arange(a, b) for a, b in itertools.pairwise(ends))
        streams = _photographs(config.data, prepare, config.data.corruptions, evaluated)
        (tuning,) = _photographs(config.data, prepare, config.tuning.corruptions, [held_out])
        apply_fn: Any = source.apply_fn
        if config.model.classes == "imagenet_r":
            apply_fn = data.restrict_classes(apply_fn, data.imagenet_r_classes())
        num_classes = next(iter(tuning.values())).num_classes
        return cls(apply_fn, source.params, num_classes, streams, tuning, public)

    def describe(self) -> str:
        stream = self.evaluation[0]
        return (
            f"{len(self.evaluation)} streams of {len(stream)} domains with {len(next(iter(stream.values())))} "
            f"photographs each; hyper-parameters are chosen on {', '.join(self.tuning)} of other photographs."
        )


def _photographs(
    config: Any, prepare: Callable[[Any], Any], corruptions: Sequence[str], groups: Sequence[np.ndarray]
) -> tuple[Mapping[str, data.Source], ...]:
    """Per group of positions, these photographs under each corruption; one corruption is read at a time."""
    found: tuple[dict[str, data.Source], ...] = tuple({} for _ in groups)
    for name in tqdm(corruptions, desc="reading", unit="corruption"):
        domain = shifted_images(config, name, prepare)
        if groups[-1][-1] >= len(domain):
            raise ValueError(
                f"config.data.images for each of config.protocol.seeds, and config.tuning.images, together need "
                f"{groups[-1][-1] + 1} photographs, but {domain.name} has {len(domain)}."
            )
        for positions, sources in zip(groups, found, strict=True):
            sources[name] = _in_memory(domain.take(positions))
    return found


def _in_memory(source: data.Source) -> data.Source:
    """Corruptions are computed whenever they are read: here once for all runs."""
    columns = source.gather(np.arange(len(source)))
    return data.from_arrays(
        image=np.rint(255 * columns["image"]).astype(np.uint8),
        label=columns["label"],
        num_classes=source.num_classes,
        name=source.name,
    )


# --- Methods and settings ---------------------------------------------------------------------------------------


def _methods(config: Any, task: _Task) -> dict[str, Method]:
    """The methods by name; "-COME" behind a name is COME over that method."""
    n, options = task.num_classes, config.method_options
    starts = range(0, config.fisher_images, 64)  # the batch size to which the papers' fisher_strength belongs
    images = [task.public.gather(np.arange(k, k + 64))["image"] for k in starts]
    makers: dict[str, Callable[[], Method]] = {
        "Tent": Tent,
        "EATA": lambda: EATA(n, **options.EATA, fisher=fisher(task.apply_fn, task.params, images)),
        "SAR": lambda: SAR(n, **options.SAR),
        "DeYO": lambda: DeYO(n, **options.DeYO),
    }
    methods = {}
    for name in config.methods:
        base, _, come = name.partition("-")
        methods[name] = COME(makers[base](), n) if come else makers[base]()
    return methods


def _settings(config: Any) -> list[str]:
    return [ORIGINAL, CLIPPED, *(f"epsilon {budget:g}" for budget in config.privacy.budgets)]


def _noise_multiplier(config: Any, setting: str) -> float:
    if setting == CLIPPED:
        return 0.0
    return _calibrated(float(setting.removeprefix("epsilon ")), config.privacy.delta, config.privacy.adjacency)


@functools.lru_cache
def _calibrated(epsilon: float, delta: float, adjacency: Adjacency) -> float:
    """The noise multiplier of one visit; the same for every run at a budget."""
    return calibrate_noise(GaussianDpEvent, epsilon=epsilon, delta=delta, adjacency=adjacency)


# One update function whatever the learning rate, so that trying another does not compile the step again.
_SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.9)


class _Measured(NamedTuple):
    """State of SGD, the number of updates so far and the sum of their lengths."""

    inner: Any
    updates: jax.Array
    length: jax.Array


def _update(gradient: Any, state: _Measured, params: Any = None) -> tuple[Any, _Measured]:
    step, inner = _SGD.update(gradient, state.inner, params)
    return step, _Measured(inner, state.updates + 1, state.length + optax.tree.norm(step))


def _sgd(learning_rate: float) -> optax.GradientTransformation:
    def init(params: Any) -> _Measured:
        inner: Any = _SGD.init(params)
        rate = jnp.asarray(learning_rate, inner.hyperparams["learning_rate"].dtype)
        inner = inner._replace(hyperparams={**inner.hyperparams, "learning_rate": rate})
        return _Measured(inner, jnp.int32(0), jnp.float32(0))

    return optax.GradientTransformation(init, _update)


def _adapter(config: Any, task: _Task, method: Method, setting: str, choice: Mapping[str, float]) -> Adapter:
    chosen: Method | Private = method
    accumulate = 1
    if setting != ORIGINAL:
        noise_multiplier = _noise_multiplier(config, setting)
        filters = dict(config.privacy.filters)
        chosen = private(method, clip_norm=choice["clip_norm"], noise_multiplier=noise_multiplier, **filters)
        accumulate = config.protocol.accumulate
    optimizer = _sgd(choice["learning_rate"])
    return Adapter(task.apply_fn, task.params, chosen, optimizer, accumulate=accumulate)


def _choose(
    config: Any, task: _Task, name: str, method: Method, setting: str, root: pathlib.Path
) -> Mapping[str, float]:
    """Hyper-parameters from the config, or the best on the held-out corruptions."""
    given = config.hyper_parameters.get(name, {}).get(setting)
    if given:
        return dict(given)
    path = root / "tuning" / f"{name}_{setting}.json".replace(" ", "_")
    if not path.exists():
        if setting == ORIGINAL:
            candidates = [{"learning_rate": rate} for rate in config.tuning.learning_rates]
        else:
            # With most gradients clipped a step is about learning_rate * clip_norm long, so that is what varies.
            products, norms = config.tuning.clipped_steps, config.tuning.clip_norms
            candidates = [{"learning_rate": p / c, "clip_norm": c} for p in products for c in norms]
        stream = Stream(task.tuning, batch_size=config.protocol.batch_size, seed=0)
        tried = []
        for candidate in candidates:
            served = serve(_adapter(config, task, method, setting, candidate), stream, account=None)
            measured = served.state.opt_state
            length = float(measured.length / jnp.maximum(measured.updates, 1))
            tried.append({**candidate, "length": length, "accuracy": float(np.mean(list(served.accuracy.values())))})
        write_json(path, tried)
    best = max(read_json(path, kind=list), key=lambda row: row["accuracy"])
    return {key: best[key] for key in ("learning_rate", "clip_norm") if key in best}


def _tried(root: pathlib.Path, methods: Iterable[str], settings: Iterable[str]) -> list[dict[str, Any]]:
    """Everything that was tried on the held-out corruptions."""
    rows = []
    for name, setting in itertools.product(methods, settings):
        path = root / "tuning" / f"{name}_{setting}.json".replace(" ", "_")
        if path.exists():
            rows += [{"method": name, "setting": setting, **row} for row in read_json(path, kind=list)]
    return rows


# --- Runs -------------------------------------------------------------------------------------------------------


def _run(config: Any, task: _Task, root: pathlib.Path) -> dict[str, Any]:
    methods, settings = _methods(config, task), _settings(config)
    (root / "methods.txt").write_text(_descriptions(config, methods, settings))
    choices = {
        (name, setting): _choose(config, task, name, methods[name], setting, root)
        for name, setting in tqdm(list(itertools.product(methods, settings)), desc="tuning")
    }
    plan = list(itertools.product(range(len(task.evaluation)), methods, settings))
    with Ledger(root / "ledger.sqlite") as ledger:
        rows = [
            _one_run(config, task, methods[name], name, setting, seed, choices[name, setting], ledger, root)
            for seed, name, setting in tqdm(plan, desc="runs")
        ]
    rows += [_without_adaptation(config, task, seed) for seed in range(len(task.evaluation))]
    result = _result(config, choices, rows) | {"tried": _tried(root, methods, settings)}
    (root / "tables.md").write_text(_tables(result))
    _figures(result, root)
    return result


def _stream(config: Any, task: _Task, seed: int) -> Stream:
    protocol = config.protocol
    return Stream(
        task.evaluation[seed],
        batch_size=protocol.batch_size,
        order=protocol.order,
        reset=protocol.reset,
        seed=seed,
        remainder=protocol.remainder,
    )


def _one_run(
    config: Any,
    task: _Task,
    method: Method,
    name: str,
    setting: str,
    seed: int,
    choice: Mapping[str, float],
    ledger: Ledger,
    root: pathlib.Path,
) -> dict[str, Any]:
    path = root / "runs" / f"{name}_{setting}_{seed}.json".replace(" ", "_")
    unfinished = path.with_suffix("")
    if not path.exists():
        adapter = _adapter(config, task, method, setting, choice)
        # A data set of its own for every run: together they would cost much more, which the summary says.
        dataset = f"{name}, {setting}, stream {seed}"
        terms = {"adjacency": config.privacy.adjacency, "unit": config.privacy.unit, "delta": config.privacy.delta}
        ledger.register(dataset, **terms)
        event = getattr(adapter.method, "event", NonPrivateDpEvent())
        paid = StreamAccount(ledger.account(dataset, label=f"{name}, {setting}"), event=event)
        served = serve(adapter, _stream(config, task, seed), account=paid, workdir=unfinished)
        row = {"method": name, "setting": setting, "seed": seed, "visits": paid.worst, "accuracy": served.accuracy}
        write_json(path, row)
    shutil.rmtree(unfinished, ignore_errors=True)
    return read_json(path)


def _without_adaptation(config: Any, task: _Task, seed: int) -> dict[str, Any]:
    predict = jax.jit(task.apply_fn)
    hits: dict[str, list[np.ndarray]] = {}
    for batch in _stream(config, task, seed):
        right = np.asarray(predict(task.params, batch.images)).argmax(-1) == batch.labels
        for domain, hit in zip(batch.domains, right[batch.mask], strict=True):
            hits.setdefault(domain, []).append(hit)
    accuracy = {domain: float(np.mean(hit)) for domain, hit in hits.items()}
    return {"method": SOURCE, "setting": ORIGINAL, "seed": seed, "visits": 0, "accuracy": accuracy}


# --- Results ----------------------------------------------------------------------------------------------------


def _result(config: Any, choices: Mapping[Any, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and standard deviations over the seeds, per method, setting and corruption."""
    cells = []
    keys = dict.fromkeys((row["method"], row["setting"]) for row in rows)
    reference = {row["seed"]: _mean(row) for row in rows if row["method"] == SOURCE}
    originals = {(row["method"], row["seed"]): _mean(row) for row in rows if row["setting"] == ORIGINAL}
    for method, setting in keys:
        these = [row for row in rows if (row["method"], row["setting"]) == (method, setting)]
        means = np.array([_mean(row) for row in these])
        cell: dict[str, Any] = {
            "method": method,
            "setting": setting,
            **dict(choices.get((method, setting), {})),
            "mean": float(means.mean()),
            "std": _std(means),
            "over_source": _paired(these, lambda row: reference[row["seed"]]),
            "over_original": _paired(these, lambda row: originals[row["method"], row["seed"]]),
            "per_corruption": {
                name: float(np.mean([row["accuracy"][name] for row in these])) for name in these[0]["accuracy"]
            },
        }
        if setting not in (ORIGINAL, CLIPPED):
            sigma = _noise_multiplier(config, setting)
            visits = max(row["visits"] for row in these)
            paid = epsilons(
                GaussianDpEvent(sigma), visits=visits, delta=config.privacy.delta, adjacency=config.privacy.adjacency
            )
            cell |= {"noise_multiplier": sigma, "epsilon_sample": paid.sample, "epsilon_unit": paid.unit}
            cell["visits"] = visits
        cells.append(cell)
    return {
        "cells": cells,
        "seeds": config.protocol.seeds,
        "images": config.data.images,
        "delta": config.privacy.delta,
        "adjacency": config.privacy.adjacency,
        "unit": config.privacy.unit,
    }


def _mean(row: Mapping[str, Any]) -> float:
    return float(np.mean(list(row["accuracy"].values())))


def _std(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _paired(rows: Sequence[Mapping[str, Any]], other: Callable[[Any], float]) -> list[float]:
    """Mean and standard error of a difference on the same streams."""
    gaps = np.array([_mean(row) - other(row) for row in rows])
    return [float(gaps.mean()), _std(gaps) / math.sqrt(len(gaps))]


def _percent(mean: float, std: float) -> str:
    return f"{100 * mean:.1f} ± {100 * std:.1f}" if math.isfinite(std) else f"{100 * mean:.1f}"


def _tables(result: Mapping[str, Any]) -> str:
    cells = result["cells"]
    settings = list(dict.fromkeys(c["setting"] for c in cells))
    by_key = {(c["method"], c["setting"]): c for c in cells}
    methods = [m for m in dict.fromkeys(c["method"] for c in cells) if m != SOURCE]
    source = by_key[SOURCE, ORIGINAL]

    def gains(setting: str, field: str) -> Iterator[dict[str, str]]:
        for method in methods:
            gap, error = by_key[method, setting][field]
            yield {"method": method, setting: f"{100 * gap:+.1f} ± {100 * error:.1f}"}

    first = [{"method": SOURCE, ORIGINAL: _percent(source["mean"], source["std"])}]
    first += [
        {"method": m, **{s: _percent(by_key[m, s]["mean"], by_key[m, s]["std"]) for s in settings}} for m in methods
    ]
    second = []
    for row in zip(
        gains(ORIGINAL, "over_source"), gains(CLIPPED, "over_source"), gains(CLIPPED, "over_original"), strict=True
    ):
        plain, clipped, change = row
        second.append(
            {
                "method": plain["method"],
                "without clipping, over no adaptation": plain[ORIGINAL],
                "with clipping, over no adaptation": clipped[CLIPPED],
                "change by clipping": change[CLIPPED],
            }
        )
    corruptions = list(source["per_corruption"])
    third = [
        {
            "method": c["method"],
            "setting": c["setting"],
            **{name: f"{100 * c['per_corruption'][name]:.1f}" for name in corruptions},
        }
        for c in cells
    ]
    costs = [
        {
            "setting": c["setting"],
            "noise multiplier": c["noise_multiplier"],
            "epsilon of a sample": c["epsilon_sample"],
            f"epsilon of a {result['unit']}": c["epsilon_unit"],
            "visits": c["visits"],
        }
        for c in cells
        if c["method"] == methods[0] and "noise_multiplier" in c
    ]
    chosen = [
        {
            "method": c["method"],
            "setting": c["setting"],
            "learning rate": c["learning_rate"],
            "clip norm": c.get("clip_norm"),
        }
        for c in cells
        if c["method"] != SOURCE
    ]
    parts = {
        f"Accuracy in percent, mean over corruptions; mean ± standard deviation of {result['seeds']} streams": first,
        "The stabilising effect of clipping; difference on the same streams ± standard error": second,
        f"What it costs at delta = {result['delta']:g}, {result['adjacency']}": costs,
        "Accuracy in percent per corruption": third,
        "Hyper-parameters": chosen,
    }
    return "\n\n".join(f"## {title}\n\n{format_table(rows, style='markdown')}" for title, rows in parts.items()) + "\n"


def _figures(result: Mapping[str, Any], root: pathlib.Path) -> None:
    cells = result["cells"]
    source = next(c for c in cells if c["method"] == SOURCE)
    private_cells = [c for c in cells if "noise_multiplier" in c]
    subtitle = (
        f"{len(source['per_corruption'])} corruptions, {result['seeds']} streams of {result['images']} photographs"
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    for c in sorted(private_cells, key=lambda c: c["epsilon_sample"]):
        curves.setdefault(c["method"], []).append((c["epsilon_sample"], c["mean"]))
    if curves:
        plot_curves(
            root / "by_epsilon.png",
            curves,
            title="Accuracy under corruption against ε of a sample",
            subtitle=f"{subtitle}, δ = {result['delta']:g}",
            xlabel="ε of one visit (log scale)",
            ylabel="mean accuracy over the stream",
            xscale="log",
            xticks={c["epsilon_sample"]: c["setting"].removeprefix("epsilon ") for c in private_cells},
            references={SOURCE: source["mean"]},
        )
    names = list(enumerate(source["per_corruption"]))
    for setting in dict.fromkeys(c["setting"] for c in cells if c["method"] != SOURCE):
        shown = [c for c in cells if c["setting"] == setting and c["method"] != SOURCE]
        marks: dict[float, str] = {k: name.replace("_", " ") for k, name in names}
        file = setting.replace(" ", "_")
        plot_curves(
            root / f"stream_{file}.png",
            {c["method"]: [(k, c["per_corruption"][name]) for k, name in names] for c in (*shown, source)},
            title=f"Accuracy over the stream, {setting}",
            subtitle=subtitle,
            xlabel="",
            ylabel="accuracy on the corruption",
            xticks=marks,
        )
        plot_curves(
            root / f"gain_{file}.png",
            {
                c["method"]: [(k, c["per_corruption"][name] - source["per_corruption"][name]) for k, name in names]
                for c in shown
            },
            title=f"What adaptation gains over the stream, {setting}",
            subtitle=subtitle,
            xlabel="",
            ylabel="accuracy on the corruption less that of the source model",
            xticks=marks,
            references={SOURCE: 0.0},
        )
    tried = [row for row in result["tried"] if row["length"] > 0]
    for method in dict.fromkeys(row["method"] for row in tried):
        lengths: dict[str, list[tuple[float, float]]] = {}
        for row in tried:
            if row["method"] == method:
                lengths.setdefault(row["setting"], []).append((row["length"], row["accuracy"]))
        plot_curves(
            root / f"stability_{method}.png",
            {setting: sorted(points) for setting, points in lengths.items()},
            title=f"{method}: accuracy against the length of an update",
            subtitle="held-out corruptions; every point is one learning rate",
            xlabel="mean L2 norm of an update (log scale)",
            ylabel="mean accuracy over the stream",
            xscale="log",
        )


def _descriptions(config: Any, methods: Mapping[str, Method], settings: Sequence[str]) -> str:
    """What was done to each operator of each method."""
    sigma = _noise_multiplier(config, settings[-1])
    filters = dict(config.privacy.filters)
    texts = [private(m, clip_norm=1.0, noise_multiplier=sigma, **filters).describe() for m in methods.values()]
    return "\n\n".join(f"{name}: {text}" for name, text in zip(methods, texts, strict=True)) + "\n"


def _summary(result: Mapping[str, Any]) -> str:
    cells = result["cells"]
    settings = list(dict.fromkeys(c["setting"] for c in cells))
    rows = []
    for method in dict.fromkeys(c["method"] for c in cells):
        these = {c["setting"]: c for c in cells if c["method"] == method}
        rows.append(
            {"method": method, **{s: _percent(these[s]["mean"], these[s]["std"]) for s in settings if s in these}}
        )
    lines = [format_table(rows), ""]
    for c in cells:
        if c["method"] == rows[0]["method"] and "noise_multiplier" in c:
            lines.append(
                f"{c['setting']}: epsilon = {c['epsilon_sample']:.4g} for a sample, {c['epsilon_unit']:.4g} for a "
                f"{result['unit']} (seen {c['visits']} times), at delta = {result['delta']:g}, {result['adjacency']}."
            )
    lines.append(
        "Each figure is one run alone. These runs shared streams and labels: publishing them all, as here, is for "
        "public benchmarks only."
    )
    return "\n".join(lines)
