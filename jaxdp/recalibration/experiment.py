"""One recalibration experiment from a config: methods x shifts x sizes x budgets, hundreds of trials each.

The config is an `ml_collections.ConfigDict` as in `configs/recalibration/cifar10.py`, whose comments say what each
field means. Tables and figures are those of "Privacy Preserving Recalibration under Domain Shift" (Luo et al. 2020):
Tables 1 and 4, Figures 1 to 3.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxdp.data import CORRUPTIONS, HELD_OUT_CORRUPTIONS, Source
from jaxdp.data.shifts import CLEAN, clean_images, shifted_images
from jaxdp.files import read_json, read_npz, write_durably, write_json
from jaxdp.models import Pretrained
from jaxdp.models.public import public_model, trained
from jaxdp.privacy import Ledger
from jaxdp.recalibration.methods import (
    AccBisection,
    AccT,
    Bracket,
    EceT,
    HistogramBinning,
    LogisticBinning,
    NllT,
    TemperatureSearch,
)
from jaxdp.recalibration.metrics import Reliability, reliability
from jaxdp.recalibration.protocol import Method, Party, Records, noise_scale
from jaxdp.recalibration.recalibrate import none, recalibrate
from jaxdp.recalibration.sweep import Order, Outcome, Setting, one_source, simulate, unchanged
from jaxdp.release import alone, bind, finished_result, stream
from jaxdp.report import format_table, plot_panels, plot_reliability

_KINDS: Mapping[str, Any] = {
    "acc_t": AccT,
    "nll_t": NllT,
    "ece_t": EceT,
    "histogram_binning": HistogramBinning,
    "acc_bisection": AccBisection,
    "logistic_binning": LogisticBinning,
    "one_source": NllT,  # temperature scaling as usual (Guo et al. 2017)
}
# The factor that varies, and how the figures call it.
_FACTORS = {"sources": "number of sources", "samples": "samples of each source", "epsilon": "ε of each source"}
_CENTRE, _NO_PRIVACY = "centre", "no privacy"


def run(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Runs the experiment, or what is left of it, and returns its result.

    Every method under every shift is kept as soon as it is done; an interrupted experiment goes on with the next.

    Args:
      config: the experiment.
      workdir: its directory, made if needed. It holds afterwards:
          result.json, tables.md  calibration error and Brier score per shift, method and setting: means over trials
          figures/                error against sources, samples and epsilon under each shift; reliability diagrams
          ledger.sqlite           what the sources of the diagrams paid (`python -m launch.ledger`)
          logits/, sweep/         of the test images under each shift; every method under every shift
          private/                what an interrupted run needs to go on with the diagrams
          source.safetensors      the classifier, if it was trained here

    Raises:
      ValueError: the workdir belongs to an experiment with another config or is in use by another process, the config
        is inconsistent, or the test images are not declared a public benchmark.
      FileNotFoundError: data or a checkpoint is not there; the message says how to get it.
    """
    root = pathlib.Path(workdir)
    if (result := finished_result(config, root, _summary)) is not None:
        return result
    if not config.public_benchmark:
        raise ValueError(
            "config.public_benchmark must be True: calibration errors and reliability diagrams are functions of test "
            "labels that no ledger pays for. Private sources are recalibrated by jaxdp.recalibration.recalibrate."
        )
    plan = _Plan.of(config)
    model = public_model(config.model)
    prepare = model.preprocessing.prepare
    images = len(shifted_images(config.data, plan.shifts[0], prepare))
    order = Order.draw(config.sweep.seed, records=images, trials=plan.trials, settings=plan.settings)
    with alone(root), bind(config, root):
        print(plan.describe(images), flush=True)
        if not config.model.checkpoint:
            model = trained(model, clean_images(config.data, prepare), config.train, root / "source.safetensors")
        for shift in tqdm(plan.shifts, desc="logits", unit="shift"):
            _keep_logits(config, model, shift, root)
        pairs = list(itertools.product(plan.shifts, plan.methods))
        for shift, name in tqdm(pairs, desc="sweep", unit="method"):
            _sweep(plan, shift, name, order, root)
        result = _result(plan, images, _example(plan, order, root), root)
        (root / "tables.md").write_text(_tables(result))
        _figures(config, result, root)
        write_json(root / "result.json", result)
    print(f"\n{_summary(result)}\n\nIn {root}: tables.md, figures, ledger.sqlite.")
    return result


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is run.

    Attributes:
      methods: by name; None is no recalibration.
      alone: names of those that one source runs for itself.
      shifts: names.
      parts: settings per factor, and the centre with and without privacy.
      adjacency: of the sources' data sets.
      seed: of the noise, which protects nobody here.
      trials: of every method in every setting.
      example: shift and methods of the reliability diagrams.
    """

    methods: Mapping[str, Method | None]
    alone: frozenset[str]
    shifts: Sequence[str]
    parts: Mapping[str, Sequence[Setting]]
    adjacency: Any
    seed: bytes
    trials: int
    example: tuple[str, Sequence[str]]

    @classmethod
    def of(cls, config: Any) -> "_Plan":
        """ValueError names the field that is wrong."""
        sweep = config.sweep
        centre = _setting("centre", dict(sweep.centre))
        parts = {factor: _varied(factor, dict(sweep[factor])) for factor in _FACTORS}
        parts |= {_CENTRE: [centre], _NO_PRIVACY: [centre._replace(epsilon=math.inf)]}
        options = {name: config.method_options.get(name, {}) for name in config.methods}
        plan = cls(
            {name: _method(name, options[name]) for name in config.methods},
            frozenset(name for name in config.methods if options[name]["kind"] == "one_source"),
            tuple(config.data.corruptions),
            parts,
            sweep.adjacency,
            sweep.seed.to_bytes(16, "little"),
            sweep.trials,
            (config.figures.reliability_shift, tuple(config.figures.reliability_methods)),
        )
        plan._check(config)
        return plan

    def _check(self, config: Any) -> None:
        known = (CLEAN, *CORRUPTIONS, *HELD_OUT_CORRUPTIONS)
        _named("data.corruptions", self.shifts, known)
        _named("figures.methods", config.figures.methods, self.methods)
        _named("figures.reliability_shift", self.example[:1], self.shifts)
        askable = [name for name, method in self.methods.items() if method and name not in self.alone]
        _named("figures.reliability_methods", self.example[1], askable)
        if not 1 <= len(self.example[1]) <= 3:
            raise ValueError(f"config.figures.reliability_methods must be one to three, got {len(self.example[1])}.")
        for name, setting in itertools.product(askable, self.settings):
            self.scale(name, setting.epsilon, config.model.num_classes)

    @property
    def settings(self) -> list[Setting]:
        """All of them, once each."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self.parts.values())))

    @property
    def centre(self) -> Setting:
        """Where methods are compared."""
        return self.parts[_CENTRE][0]

    def scale(self, name: str, epsilon: float, num_classes: int) -> Any:
        """The noise of a source; ValueError if there is none for this epsilon or adjacency."""
        method: Any = self.methods[name]
        return noise_scale(method, epsilon=epsilon, adjacency=self.adjacency, num_classes=num_classes)

    def describe(self, images: int) -> str:
        """One line."""
        return (
            f"{len(self.methods)} methods under {len(self.shifts)} shifts of {images} test images, "
            f"{len(self.settings)} settings of sources, samples and epsilon."
        )


def _named(field: str, names: Sequence[str], known: Any) -> None:
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"config.{field} has {wrong[0]!r}; there are {', '.join(known)}.")


def _setting(part: str, values: Mapping[str, Any]) -> Setting:
    if set(values) != set(Setting._fields):
        raise ValueError(f"config.sweep.{part} must fix {', '.join(_FACTORS)}, but it names {', '.join(values)}.")
    setting = Setting(**values)
    if not (setting.sources >= 1 and setting.samples >= 1 and 0 < setting.epsilon < math.inf):
        raise ValueError(
            f"config.sweep.{part} must have sources, samples >= 1 and a finite epsilon > 0, got {setting}."
        )
    return setting


def _varied(factor: str, fields: dict[str, Any]) -> list[Setting]:
    values = fields.pop("values", ())
    if not values or factor in fields:
        raise ValueError(f"config.sweep.{factor} must have values, the {factor} to try, and fix the other two factors.")
    return [_setting(factor, {factor: value, **fields}) for value in values]


def _method(name: str, given: Mapping[str, Any]) -> Method | None:
    options = dict(given)
    kind = options.pop("kind", None)
    if kind == "none" and not options:
        return None
    if kind not in _KINDS:
        raise ValueError(
            f"config.method_options[{name!r}] must have a kind, one of none, {', '.join(_KINDS)}, got {kind!r}."
        )
    if "bracket" in options:
        options["bracket"] = Bracket.of(options["bracket"], options.pop("spacing", "log"))
    fields = {field.name for field in dataclasses.fields(_KINDS[kind])}
    if wrong := sorted(set(options) - fields):
        raise ValueError(
            f"config.method_options[{name!r}] has {', '.join(wrong)}; {kind} has {', '.join(sorted(fields))}"
            f"{', spacing' if 'bracket' in fields else ''}."
        )
    return _KINDS[kind](**options)


# --- Runs -------------------------------------------------------------------------------------------------------


def _keep_logits(config: Any, model: Pretrained, shift: str, root: pathlib.Path) -> None:
    """Classifies the test images under a shift, unless that is done."""
    path = _file(root / "logits", shift, ".npz")
    if path.exists():
        return
    images = shifted_images(config.data, shift, model.preprocessing.prepare)
    classify = jax.jit(model.apply_fn)
    batches = [classify(model.params, jnp.asarray(x["image"])) for x in _batches(config, images)]
    logits = np.concatenate([np.asarray(batch) for batch in batches])
    if not np.isfinite(logits).all():
        raise ValueError(f"the classifier has logits that are not finite, {shift}; train or choose another one.")
    labels = images.arrays["label"] if images.rows is None else images.arrays["label"][images.rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, lambda file: np.savez(file, logits=logits, labels=labels))


def _batches(config: Any, images: Source) -> Iterator[Mapping[str, np.ndarray]]:
    size = config.data.batch_size
    for start in range(0, len(images), size):
        yield images.gather(np.arange(start, min(start + size, len(images))))


def _records(root: pathlib.Path, shift: str) -> Records:
    found = read_npz(_file(root / "logits", shift, ".npz"), ["logits", "labels"])
    return Records(jnp.asarray(found["logits"]), jnp.asarray(found["labels"]))


def _file(folder: pathlib.Path, name: str, suffix: str) -> pathlib.Path:
    return folder / f"{urllib.parse.quote(name, safe=' ').replace(' ', '_')}{suffix}"


def _sweep(plan: _Plan, shift: str, name: str, order: Order, root: pathlib.Path) -> None:
    """One method in all settings under one shift, unless that is done."""
    path = _file(root / "sweep" / shift, name, ".json")
    if path.exists():
        return
    records, method, settings = _records(root, shift), plan.methods[name], plan.settings
    if method is None:
        outcomes = unchanged(records, order, settings)
    elif name in plan.alone:
        outcomes = one_source(method, records, order, settings)
    else:
        key = stream(plan.seed, f"{shift}, {name}")
        outcomes = simulate(method, records, order, settings, key=key, adjacency=plan.adjacency)
    found = dict(zip(settings, outcomes, strict=True))
    write_json(path, {part: _moments([found[s] for s in points]) for part, points in plan.parts.items()})


def _moments(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Means over the trials and their standard errors, per setting."""
    ece, brier = (np.array([getattr(o, score) for o in outcomes], np.float64) for score in Outcome._fields)
    return {
        "ece": ece.mean(1).tolist(),
        "ece_error": (ece.std(1) / math.sqrt(ece.shape[1])).tolist(),
        "brier": brier.mean(1).tolist(),
    }


def _example(plan: _Plan, order: Order, root: pathlib.Path) -> dict[str, Any]:
    """The first trial at the centre as real sources that pay, judged on the records that are nobody's."""
    path = root / "example.json"
    if path.exists():
        return read_json(path)
    shift, names = plan.example
    records, (count, size, epsilon) = _records(root, shift), plan.centre
    rows = np.asarray(order.rows[0])[: count * size]
    logits, labels = np.asarray(records.logits), np.asarray(records.labels)
    test = np.setdiff1d(np.arange(len(labels)), rows)
    right = records.correct[test]

    found = {"before": none()}
    with Ledger(root / "ledger.sqlite") as ledger:
        sources = []
        for i, owned in enumerate(np.split(rows, count)):
            terms: Any = {"adjacency": plan.adjacency, "unit": "example", "records": len(owned), "delta": 0.0}
            ledger.register(f"source {i}", **terms)
            sources.append(Party(logits[owned], labels[owned], account=ledger.account(f"source {i}")))
        for name in names:
            method: Any = plan.methods[name]
            workdir = _file(root / "private", name, "")
            found[name] = recalibrate(method, sources, epsilon=epsilon, adjacency=plan.adjacency, workdir=workdir)
    diagrams = {name: reliability(jnp.asarray(r.apply(logits[test])), right) for name, r in found.items()}
    example = {
        "shift": shift,
        "diagrams": {name: {k: _numbers(v) for k, v in d._asdict().items()} for name, d in diagrams.items()},
        "temperatures": {name: r.temperature for name, r in found.items() if isinstance(r.method, TemperatureSearch)},
    }
    write_json(path, example)
    return example


def _numbers(values: jax.Array) -> list[float | None]:
    """For JSON, which has no NaN."""
    return [None if math.isnan(value) else value for value in np.asarray(values).tolist()]


# --- Results ----------------------------------------------------------------------------------------------------


def _result(plan: _Plan, images: int, example: Mapping[str, Any], root: pathlib.Path) -> dict[str, Any]:
    accuracy = {shift: float(_records(root, shift).correct.mean()) for shift in plan.shifts}
    classes = _records(root, plan.shifts[0]).logits.shape[1]
    return {
        "images": images,
        "trials": plan.trials,
        "adjacency": plan.adjacency,
        "settings": {part: [list(s) for s in points] for part, points in plan.parts.items() if part != _NO_PRIVACY},
        "accuracy": accuracy,
        "cells": {
            shift: {name: read_json(_file(root / "sweep" / shift, name, ".json")) for name in plan.methods}
            for shift in plan.shifts
        },
        "costs": [_cost(plan, name, method, classes) for name, method in plan.methods.items()],
        "example": example,
    }


def _cost(plan: _Plan, name: str, method: Method | None, classes: int) -> dict[str, Any]:
    """What a source releases and pays at the centre; an epsilon of None is infinite."""
    if method is None:
        return {"method": name, "releases": 0, "noise": None, "epsilon": 0.0}
    if name in plan.alone:
        return {"method": name, "releases": 1, "noise": 0.0, "epsilon": None}  # its temperature
    scale = plan.scale(name, plan.centre.epsilon, classes)
    spread = math.sqrt(scale.variance * plan.centre.sources)
    return {"method": name, "releases": method.rounds, "noise": spread, "epsilon": plan.centre.epsilon}


def _values(result: Mapping[str, Any], name: str, parts: Sequence[str], score: str) -> list[float]:
    """A score under all shifts and in all settings of some parts."""
    return [
        value for shift in _shifted(result) for part in parts for value in result["cells"][shift][name][part][score]
    ]


def _shifted(result: Mapping[str, Any]) -> list[str]:
    """What medians and means are over: not the clean images, as in Table 1, whose first row is a mean of Table 4."""
    return [shift for shift in result["cells"] if shift != CLEAN] or [CLEAN]


def _methods(result: Mapping[str, Any]) -> list[str]:
    return [cost["method"] for cost in result["costs"]]


def _overall(result: Mapping[str, Any], parts: Sequence[str]) -> list[dict[str, str]]:
    """Rows of Table 1."""
    rows = []
    for name in _methods(result):
        row = {"method": name}
        for score, heading in (("ece", "ECE"), ("brier", "Brier")):
            values = _values(result, name, parts, score)
            row |= {f"median {heading}": f"{np.median(values):.4f}", f"mean {heading}": f"{np.mean(values):.4f}"}
        rows.append(row)
    return rows


def _per_shift(result: Mapping[str, Any], part: str) -> list[dict[str, str]]:
    """Rows of Table 4, with the accuracies of Table 3."""
    return [
        {
            "shift": shift.replace("_", " "),
            "accuracy": f"{result['accuracy'][shift]:.4f}",
            **{name: f"{result['cells'][shift][name][part]['ece'][0]:.4f}" for name in _methods(result)},
        }
        for shift in result["cells"]
    ]


def _centre(result: Mapping[str, Any]) -> str:
    sources, samples, epsilon = result["settings"][_CENTRE][0]
    return f"{sources} sources of {samples} samples at epsilon = {epsilon:g}"


_CONSTANT = (
    "The ECE alone does not say that a confidence is of use: one that is the same for all images, their accuracy, has "
    "an ECE of nearly 0, so that binning with a single bin would win. The Brier score, the mean squared difference "
    "between confidence and whether the prediction is right, is lower only for confidences that also tell images apart."
)


def _tables(result: Mapping[str, Any]) -> str:
    centre, shifts = _centre(result), len(_shifted(result))
    costs = [
        {
            "method": cost["method"],
            "releases of a source": cost["releases"],
            "noise in the sum over sources, standard deviation": cost["noise"],
            "what a source pays": _paid(cost),
        }
        for cost in result["costs"]
    ]
    parts = {
        f"Calibration over {shifts} shifts and all numbers of sources, samples and epsilon": (
            _overall(result, list(_FACTORS))
        ),
        f"Calibration over {shifts} shifts with {centre}": _overall(result, [_CENTRE]),
        f"ECE under each shift with {centre}": _per_shift(result, _CENTRE),
        "ECE under each shift without privacy, with the same sources and samples": _per_shift(result, _NO_PRIVACY),
        f"What {centre} cost, pure epsilon, {result['adjacency']}": costs,
    }
    tables = [f"## {title}\n\n{format_table(rows, style='markdown')}" for title, rows in parts.items()]
    errors = [
        e for cell in result["cells"].values() for m in cell.values() for part in m.values() for e in part["ece_error"]
    ]
    precision = (
        f"Scores are means of {result['trials']} trials; the standard error of an ECE is at most {max(errors):.2g}."
    )
    return "\n\n".join([tables[0], precision, _CONSTANT, *tables[1:]]) + "\n"


def _paid(cost: Mapping[str, Any]) -> float:
    return math.inf if cost["epsilon"] is None else cost["epsilon"]


def _figures(config: Any, result: Mapping[str, Any], root: pathlib.Path) -> None:
    shifted = _shifted(result)
    groups = {shift: [shift] for shift in result["cells"]} | {"all_shifts": shifted}
    for file, shifts in groups.items():
        where = "clean images" if shifts == [CLEAN] else f"images under {shifts[0].replace('_', ' ')}"
        plot_panels(
            root / "figures" / f"{file}.png",
            {
                _fixed(factor, Setting(*points[0])): (label, _curves(result, config.figures.methods, factor, shifts))
                for factor, label in _FACTORS.items()
                for points in [result["settings"][factor]]
            },
            title="Calibration under all shifts" if file == "all_shifts" else f"Calibration on {where}",
            subtitle=f"{result['images']} test images, means of {result['trials']} trials",
            ylabel="expected calibration error",
        )
    example = result["example"]
    plot_reliability(
        root / "figures" / "reliability.png",
        {name: Reliability(**diagram) for name, diagram in example["diagrams"].items()},
        title=f"Reliability under {example['shift'].replace('_', ' ')}",
        subtitle=f"One recalibration by each method: {_centre(result)}",
    )


def _curves(
    result: Mapping[str, Any], names: Sequence[str], factor: str, shifts: Sequence[str]
) -> dict[str, list[tuple[float, float]]]:
    """Mean ECE over some shifts against a factor, by method."""
    axis = [point[Setting._fields.index(factor)] for point in result["settings"][factor]]
    means = {name: np.mean([result["cells"][shift][name][factor]["ece"] for shift in shifts], 0) for name in names}
    return {name: list(zip(axis, values.tolist(), strict=True)) for name, values in means.items()}


def _fixed(factor: str, setting: Setting) -> str:
    """The title of a panel: what does not vary in it."""
    if factor == "epsilon":
        return f"{setting.sources} sources of {setting.samples} samples"
    size = f"{setting.samples} samples each" if factor == "sources" else f"{setting.sources} sources"
    return f"{size}, ε = {setting.epsilon:g}"


def _summary(result: Mapping[str, Any]) -> str:
    rows = [
        {
            "method": cost["method"],
            "releases": cost["releases"],
            "epsilon": _paid(cost),
            **{name: everywhere[name] for name in ("median ECE", "mean ECE", "mean Brier")},
            **{f"centre: {name}": centre[name] for name in ("median ECE", "mean ECE", "mean Brier")},
        }
        for cost, everywhere, centre in zip(
            result["costs"], _overall(result, list(_FACTORS)), _overall(result, [_CENTRE]), strict=True
        )
    ]
    return (
        f"{format_table(rows)}\n\n"
        f"The centre is {_centre(result)}; the other scores are over all settings and shifts. Every source pays "
        f"PureDpEvent(epsilon) for one record ({result['adjacency']}), whatever the number of sources; with epsilon = "
        "inf it has no privacy. Public are the classifier, the settings and the noisy answers. Scores and diagrams are "
        "of test labels without noise, for public benchmarks only."
    )
