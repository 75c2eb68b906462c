r"""The claims of arXiv:2606.01908 on USPS and CIFAR-10 under shift: clipping, conversion cost, and
budgets.

    python -m benchmarks run evidence_tta --update \
        --data_dir DIR [--study continual] [--workdir workdir/evidence_tta]
    python -m benchmarks run evidence_tta --update --data_dir DIR --study cifar10 \
        --study cifar10_episodic \
        --checkpoint resnet20_cifar10.npz
    python -m benchmarks run evidence_tta --update --data_dir DIR --study cifar10_filters \
        --checkpoint resnet20_cifar10.npz
    python -m benchmarks.evidence results/tta.md

The first runs configs/tta/usps_shift.py. The second runs configs/tta/cifar10.py:group_norm,
continual and episodic. The third runs the latter with the filters of private forms kept. They keep
what docs/results/tta.md states. The last writes the page. An interrupted run goes on from its
workdir.
Update lengths and shares of images are functions of the records: for public benchmarks only.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from configs.tta import cifar10, usps_shift
from jaxdp.models import save_params
from jaxdp.models.layers import GroupNorm
from jaxdp.report import format_table, plot_curves
from launch import adapt, adapt_results, adapt_settings, data, frame, models, results

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "evidence_tta.json"
KEPT = (
    "method",
    "setting",
    "mean",
    "std",
    "over_source",
    "over_original",
    "over_usual",
    "length",
    "taken",
    "learning_rate",
)
STUDIES = {
    "continual": lambda: usps_shift.get_config("continual"),
    "episodic": lambda: usps_shift.get_config("episodic"),
    "ablations": lambda: usps_shift.get_config("ablations"),
    "cifar10": lambda: cifar10.get_config("group_norm"),
    "cifar10_episodic": lambda: cifar10.get_config("group_norm_episodic"),
    "cifar10_filters": lambda: cifar10.get_config("group_norm_episodic_filters"),
}

ABLATIONS = ("ablations", "cifar10_filters")
PRIVATE = "epsilon 20"  # of shorter streams


def run(study: str, data_dir: str, root: pathlib.Path, checkpoint: str = "") -> dict[str, Any]:
    """Returns what is kept of a study."""
    config = STUDIES[study]()
    config.data.data_dir = data_dir
    start = time.process_time()
    clean = {}
    if study.startswith("cifar10"):
        clean["clean"] = group_norm_source(config, checkpoint, root / "source.safetensors")
    result = frame.run(adapt.STUDY, config, root)
    lines = (root / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    minutes = (time.process_time() - start) / 60
    return clean | summary(result, rows, config, minutes)


def group_norm_source(config: Any, checkpoint: str, path: pathlib.Path) -> float:
    """Writes the source model of CIFAR-10 for launch/adapt.py. Returns its accuracy on clean test
    images.

    It is a published ResNet-20 whose BatchNorms became GroupNorms, see `group_norms`. No parameter
    is trained."""
    batch_norm = cifar10.get_config("resnet20").model
    batch_norm.checkpoint = checkpoint
    network = models.network(config.model)
    images_of = data.parts(config.data, "public", "test")
    public = images_of["public"].gather(np.arange(256))
    images = network.preprocessing.normalise(public["image"])
    params = group_norms(network.model, models.network(batch_norm).params, images)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_params(path, params)
    right = models.right(network, params, images_of["test"])
    return float(np.mean(right))


def group_norms(model: Any, params: Any, images: Any) -> dict[str, Any]:
    """Returns parameters of a ResNet with GroupNorm from those of one with BatchNorm, whose outputs
    they imitate.

    On the images [B, H, W, C] each channel then has the BatchNorm's scale as deviation and its bias
    as mean."""
    converted = dict(params)

    def is_norm(module: Any, _: str) -> bool:
        return isinstance(module, GroupNorm)

    @jax.jit
    def moments(params: Any) -> Any:
        _, state = model.apply({"params": params}, images, capture_intermediates=is_norm)
        axes = tuple(range(images.ndim - 1))
        of_norms = {}
        for name, calls in state["intermediates"].items():
            (output,) = calls["__call__"]
            of_norms[name] = (output.mean(axes), output.std(axes))
        return of_norms

    # In the order of the network, where "norm" is the first, since a norm moves all behind it.
    norms = [name for name in converted if "norm" in name]
    for name in sorted(norms, key=lambda name: (name != "norm", name)):
        scale, bias = converted[name]["scale"], converted[name]["bias"]
        plain = {"scale": jnp.ones_like(scale), "bias": jnp.zeros_like(bias)}
        mean, deviation = moments({**converted, name: plain})[name]
        slope = scale / deviation
        converted[name] = {"scale": slope, "bias": bias - scale * mean / deviation}
    return converted


def summary(result: Any, rows: Sequence[Any], config: Any, minutes: float) -> dict[str, Any]:
    """Returns the numbers of a finished study that the page can state."""
    runs = {}
    for row in results.select(rows, part="runs"):
        runs[row["method"], row["setting"], row["seed"]] = row["mean"]
    seeds = range(config.protocol.seeds)
    ways = adapt_settings.settings(config)
    sources = config.protocol.sources

    def gaps(method: str, setting: str, over: tuple[str, str]) -> dict[int, float]:
        return {seed: runs[method, setting, seed] - runs[*over, seed] for seed in seeds}

    def higher(cell: Any, setting: str) -> int:
        """Returns the runs in which a cell is better than its method in another setting."""
        less = gaps(cell["method"], cell["setting"], (cell["method"], setting))
        return sum(gap > 0 for gap in less.values())

    cells = []
    for of_method in result["cells"]:
        cell = {name: of_method[name] for name in KEPT if name in of_method}
        cell["higher"] = higher(cell, adapt_settings.ORIGINAL)
        other = adapt_settings.usual(ways, cell["setting"])
        if other:
            cell["higher_usual"] = higher(cell, other)
        cells.append(cell)
    compared = [setting for _, setting in adapt_settings.compared(config)]
    unadapted = (adapt_settings.SOURCE, adapt_settings.ORIGINAL)
    of_five = {}
    for setting in ways:
        if compared.count(setting) < len(config.methods):
            continue  # kept filters are for methods with filters
        gains = [gaps(method, setting, unadapted) for method in config.methods]
        means = {seed: results.moments(gain[seed] for gain in gains).mean for seed in seeds}
        of_five[setting] = adapt_results.crossed(means, sources)
    tried = []
    for row in result["tried"]:
        tried.append(results.only(row, "method", "setting", "length", "accuracy"))
    shorter = []
    for row in adapt_results.by_length(result):
        shorter.append(results.only(row, "method", "setting", "images", "mean", "over_original"))
    return {
        "source models": sources,
        "streams": result["seeds"] // sources,
        "images per domain": result["images"],
        "cpu minutes": round(minutes, 1),
        "cells": cells,
        "mean gain of the methods": of_five,
        "tried": tried,
        "by length": shorter,
        "domains": dict(result["cells"][-1]["per_corruption"]),
    }


# --- The page -----------------------------------------------------------------------------------


def tables(report: Any) -> dict[str, str]:
    """Returns the tables of the page in Markdown, by the name in their comment."""
    markdown = {}
    for study in STUDIES:
        if study not in report:
            continue
        tables_of = _ablations if study in ABLATIONS else _diagnostics
        of_study = _accuracies(report[study]) | tables_of(report[study])
        for name, table in of_study.items():
            markdown[f"{study}: {name}"] = table
    return markdown


def _accuracies(study: Any) -> dict[str, str]:
    *cells, source = study["cells"]
    changed = [cell for cell in cells if cell["setting"] != adapt_settings.ORIGINAL]
    runs = study["streams"] * study["source models"]

    def change(c: Any) -> str:
        return f"{results.percent(*c['over_original'], sign='+')} ({c['higher']} of {runs})"

    return {
        "accuracy": _pivot([*cells, source], lambda c: f"{100 * c['mean']:.1f}"),
        "change": _pivot(changed, change),
    }


def _diagnostics(study: Any) -> dict[str, str]:
    *cells, source = study["cells"]
    five = []
    for setting, gain in study["mean gain of the methods"].items():
        five.append({"method": "mean of the five", "setting": setting, "over_source": gain})
    counted = [cell for cell in cells if "taken" in cell]
    markdown = {
        "gain": _pivot([*cells, *five], lambda c: results.percent(*c["over_source"], sign="+")),
        "length": _pivot(cells, lambda c: f"{c['length']:.3f}"),
        "taken": _pivot(counted, lambda c: f"{100 * c['taken']:.0f}"),
        "by length": _by_length(study["tried"]),
    }
    if "clean" in study:
        shares = {
            "source right on": "percent",
            "clean test images": f"{100 * study['clean']:.1f}",
            "the stream": f"{100 * source['mean']:.1f}",
        }
        markdown["source"] = format_table([shares], style="markdown")
    return markdown


def _ablations(study: Any) -> dict[str, str]:
    """Returns what kept filters and clipped batches change, and how the length of a stream does."""
    ablated = [cell for cell in study["cells"] if "over_usual" in cell]
    runs = study["streams"] * study["source models"]

    def change(c: Any) -> str:
        return f"{results.percent(*c['over_usual'], sign='+')} ({c['higher_usual']} of {runs})"

    markdown = {"usual": _pivot(ablated, change)}
    if study["by length"]:
        by_images = results.pivot(
            results.select(study["by length"], setting=PRIVATE),
            "method",
            "images",
            lambda rows: results.percent(*rows[0]["over_original"], sign="+"),
            heading="{} photographs",
        )
        markdown["photographs"] = format_table(by_images, style="markdown")
    return markdown


def _pivot(cells: Sequence[Any], text: Any) -> str:
    table = results.pivot(cells, "method", "setting", lambda rows: text(rows[0]))
    return format_table(table, style="markdown")


def _by_length(tried: Sequence[Any]) -> str:
    """Returns accuracy on the tuning stream with the length of an update, one column per learning
    rate."""
    rows = []
    for method in dict.fromkeys(row["method"] for row in tried):
        for setting in (adapt_settings.ORIGINAL, adapt_settings.CLIPPED):
            row = {"method": method, "setting": setting}
            mine = results.select(tried, method=method, setting=setting)
            for k, one in enumerate(mine, 1):
                row[f"rate {k}"] = f"{100 * one['accuracy']:.1f} at {one['length']:.3f}"
            rows.append(row)
    return format_table(rows, style="markdown")


def beside(paper: Any, report: Any) -> dict[str, str]:
    """Returns Tent by epsilon beside the paper's Tent, with the differences to the original."""
    original = adapt_settings.ORIGINAL
    streams = {
        "USPS, continual": report["continual"],
        "USPS, episodic": report["episodic"],
        "CIFAR-10, continual": report["cifar10"],
        "CIFAR-10, episodic": report["cifar10_episodic"],
    }
    means = {"paper: ViT-B/16, ImageNet-C, continual": paper["Tent"]}
    for stream, study in streams.items():
        ours = results.select(study["cells"], method="Tent")
        means[stream] = {cell["setting"]: 100 * cell["mean"] for cell in ours}
    every = [name for name in means["USPS, continual"] if name != adapt_settings.CLIPPED]
    rows = []
    for stream, accuracy in means.items():
        row = {"Tent": stream} | dict.fromkeys(every, "")
        for name in every:
            if name in accuracy:
                row[name] = f"{accuracy[name]:.1f}"
            if name in accuracy and name != original:
                row[name] += f" ({accuracy[name] - accuracy[original]:+.1f})"
        rows.append(row)
    return {"Tent beside the paper": format_table(rows, style="markdown")}


_IMAGES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}


def costs(scattering: Any, squeezenet: Any, report: Any) -> list[dict[str, Any]]:
    """Returns how much accuracy privacy takes from training and from adaptation, by epsilon.

    The error of training is the standard deviation over runs, of one run there is none."""
    training = {"scattering features": scattering, "SqueezeNet features": squeezenet}
    rows = []
    for features, report_of_training in training.items():
        for name, run in report_of_training["runs"].items():
            images = f"{run['records']} images of {_IMAGES[name.removesuffix('_full')]}"
            for point in run["points"]:
                change = point["accuracy"] - run["without_privacy"]
                private = f"DP-SGD on {features}, {images}"
                rows.append(_cost(private, point["epsilon"], change, point["deviation"]))
    for protocol in ("continual", "episodic"):
        gains = report[protocol]["mean gain of the methods"]
        without, _ = gains[adapt_settings.ORIGINAL]
        for setting, (gain, _) in gains.items():
            if setting.startswith("epsilon"):
                mean = f"adaptation, {protocol}, mean of the five"
                rows.append(_cost(mean, _epsilon(setting), gain - without, None))
        for cell in report[protocol]["cells"]:
            if cell["setting"].startswith("epsilon"):
                private = f"adaptation, {protocol}, {cell['method']}"
                rows.append(_cost(private, _epsilon(cell["setting"]), *cell["over_original"]))
    return rows


def _epsilon(setting: str) -> float:
    return float(setting.removeprefix("epsilon "))


def _cost(private: str, epsilon: float, change: float, error: float | None) -> dict[str, Any]:
    return {"what is private": private, "epsilon": epsilon, "change": (change, error)}


def cost_tables(*reports: Any) -> dict[str, str]:
    """Returns the costs of privacy at the epsilons that are closest in both."""
    rows = []
    for row in results.select(costs(*reports), epsilon=(1.0, 8.0, 10.0)):
        at = "epsilon 1" if row["epsilon"] == 1 else "epsilon 8 (adaptation: 10)"
        rows.append({**row, "at": at})

    def change(rows: Sequence[Any]) -> str:
        (row,) = rows
        return results.percent(*row["change"], sign="+")

    table = results.pivot(rows, "what is private", "at", change)
    return {"costs of privacy": format_table(table, style="markdown")}


def draw_costs(*reports_and_path: Any) -> None:
    """Draws the costs of privacy in training and, as the mean of the methods, in adaptation."""
    *reports, path = reports_and_path
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in costs(*reports):
        name = row["what is private"]
        if name.startswith("DP-SGD") or name.endswith("mean of the five"):
            change, _ = row["change"]
            curves.setdefault(_short(name), []).append((row["epsilon"], change))
    plot_curves(
        path,
        {name: sorted(points) for name, points in curves.items()},
        title="What privacy costs in training and in adaptation",
        subtitle="DP-SGD on features of images; adaptation on USPS, mean of five methods",
        xlabel="ε (log scale)",
        ylabel="accuracy less that without privacy",
        xscale="log",
        references={"no cost": 0.0},
    )


def _short(private: str) -> str:
    name = private.removeprefix("DP-SGD on ").removesuffix(", mean of the five")
    return name.replace(" features, ", ", ").replace(" images of", "")


def draw(report: Any, path: pathlib.Path) -> None:
    """Draws what each private form gains over no adaptation, by epsilon."""
    study = report["continual"]
    *cells, source = study["cells"]
    curves: dict[str, list[tuple[float, float]]] = {}
    ticks = {}
    for cell in cells:
        if cell["setting"].startswith("epsilon"):
            epsilon = _epsilon(cell["setting"])
            curves.setdefault(cell["method"], []).append((epsilon, cell["mean"]))
            ticks[epsilon] = f"{epsilon:g}"
    plot_curves(
        path,
        {method: sorted(points) for method, points in curves.items()},
        title="Accuracy under shift by ε of a sample, USPS, continual",
        subtitle=f"{study['streams']} streams of 5 domains, {study['source models']} sources",
        xlabel="ε of one visit (log scale)",
        ylabel="mean accuracy over the stream",
        xscale="log",
        xticks=ticks,
        references={adapt_settings.SOURCE: source["mean"]},
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--workdir", default="workdir/evidence_tta")
    parser.add_argument(
        "--study",
        action="append",
        choices=STUDIES,
        help="the default is those of USPS",
    )
    parser.add_argument(
        "--checkpoint", default="", help="the published ResNet-20 of the studies of CIFAR-10"
    )


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    report = timing.earlier(flags.output)
    for study in flags.study or ("continual", "episodic", "ablations"):
        workdir = pathlib.Path(flags.workdir) / study
        report[study] = run(study, flags.data_dir, workdir, flags.checkpoint)
        timing.write(report, flags.output)  # a later study may fail
    return report
