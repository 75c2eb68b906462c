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

import itertools
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from configs.tta import cifar10, usps_shift
from jaxdp.models import save_params
from jaxdp.models.layers import GroupNorm
from jaxdp.report import plot_curves
from launch import adapt, adapt_results, adapt_settings, data, frame, models, results

_RESULTS = ("mean", "std", "over_source", "over_original", "over_usual")
KEPT = ("method", "setting", *_RESULTS, "length", "taken", "learning_rate")
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


def run(study: str, data_dir: str, root: pathlib.Path, checkpoint: str = "") -> dict:
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


def group_norm_source(config, checkpoint: str, path: pathlib.Path) -> float:
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


def group_norms(model, params, images) -> dict:
    """Returns parameters of a ResNet with GroupNorm from those of one with BatchNorm, whose outputs
    they imitate.

    On the images [B, H, W, C] each channel then has the BatchNorm's scale as deviation and its bias
    as mean."""
    converted = dict(params)

    def is_norm(module, _):
        return isinstance(module, GroupNorm)

    @jax.jit
    def moments(params):
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


def summary(result, rows: Sequence, config, minutes: float) -> dict:
    """Returns the numbers of a finished study that the page can state."""
    runs = {}
    for row in results.select(rows, part="runs"):
        runs[row["method"], row["setting"], row["seed"]] = row["mean"]
    seeds = range(config.protocol.seeds)
    ways = adapt_settings.settings(config)
    sources = config.protocol.sources

    def gaps(method, setting, over):
        return {seed: runs[method, setting, seed] - runs[*over, seed] for seed in seeds}

    def higher(cell, setting):
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
    place = ("method", "setting")
    lengths = adapt_results.by_length(result)
    tried = [results.only(row, *place, "length", "accuracy") for row in result["tried"]]
    shorter = [results.only(row, *place, "images", "mean", "over_original") for row in lengths]
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


def tables(report) -> dict:
    """Returns the tables of the page, by the name in their comment."""
    markdown = {}
    for study in STUDIES:
        if study in report:
            tables_of = _ablations if study in ABLATIONS else _diagnostics
            of_study = _accuracies(report[study]) | tables_of(report[study])
            markdown |= {f"{study}: {name}": table for name, table in of_study.items()}
    return markdown


def _change(study, over: str, higher: str):
    """Returns the text of a change of a cell, and in how many runs it is a gain."""
    runs = study["streams"] * study["source models"]
    return lambda c: f"{results.percent(*c[over], sign='+')} ({c[higher]} of {runs})"


def _accuracies(study) -> dict:
    *cells, source = study["cells"]
    changed = [cell for cell in cells if cell["setting"] != adapt_settings.ORIGINAL]
    return {
        "accuracy": _pivot([*cells, source], lambda c: f"{100 * c['mean']:.1f}"),
        "change": _pivot(changed, _change(study, "over_original", "higher")),
    }


def _diagnostics(study) -> dict:
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
        shares = {"clean test images": study["clean"], "the stream": source["mean"]}
        cells = {images: f"{100 * share:.1f}" for images, share in shares.items()}
        markdown["source"] = [{"source right on": "percent"} | cells]
    return markdown


def _ablations(study) -> dict:
    """Returns what kept filters and clipped batches change, and how the length of a stream does."""
    ablated = [cell for cell in study["cells"] if "over_usual" in cell]
    markdown = {"usual": _pivot(ablated, _change(study, "over_usual", "higher_usual"))}
    if study["by length"]:
        markdown["photographs"] = results.pivot(
            results.select(study["by length"], setting=PRIVATE),
            "method",
            "images",
            lambda rows: results.percent(*rows[0]["over_original"], sign="+"),
            heading="{} photographs",
        )
    return markdown


def _pivot(cells: Sequence, text) -> list[dict]:
    return results.pivot(cells, "method", "setting", lambda rows: text(rows[0]))


def _by_length(tried: Sequence) -> list[dict]:
    """Returns accuracy on the tuning stream with the length of an update, one column per learning
    rate."""
    settings = (adapt_settings.ORIGINAL, adapt_settings.CLIPPED)
    methods = dict.fromkeys(row["method"] for row in tried)
    rows = []
    for method, setting in itertools.product(methods, settings):
        row = {"method": method, "setting": setting}
        for k, one in enumerate(results.select(tried, method=method, setting=setting), 1):
            row[f"rate {k}"] = f"{100 * one['accuracy']:.1f} at {one['length']:.3f}"
        rows.append(row)
    return rows


STREAMS = {
    "USPS, continual": "continual",
    "USPS, episodic": "episodic",
    "CIFAR-10, continual": "cifar10",
    "CIFAR-10, episodic": "cifar10_episodic",
}


def beside(paper, report) -> dict:
    """Returns Tent by epsilon beside the paper's Tent, with the differences to the original."""
    original = adapt_settings.ORIGINAL
    means = {"paper: ViT-B/16, ImageNet-C, continual": paper["Tent"]}
    for stream, study in STREAMS.items():
        ours = results.select(report[study]["cells"], method="Tent")
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
    return {"Tent beside the paper": rows}


_IMAGES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}


def costs(scattering, squeezenet, report) -> list[dict]:
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


def _cost(private: str, epsilon: float, change: float, error: float | None) -> dict:
    return {"what is private": private, "epsilon": epsilon, "change": (change, error)}


def cost_tables(*reports) -> dict:
    """Returns the costs of privacy at the epsilons that are closest in both."""
    rows = []
    for row in results.select(costs(*reports), epsilon=(1.0, 8.0, 10.0)):
        at = "epsilon 1" if row["epsilon"] == 1 else "epsilon 8 (adaptation: 10)"
        rows.append({**row, "at": at})

    def change(rows):
        (row,) = rows
        return results.percent(*row["change"], sign="+")

    return {"costs of privacy": results.pivot(rows, "what is private", "at", change)}


def draw_costs(*reports_and_path):
    """Draws the costs of privacy in training and, as the mean of the methods, in adaptation."""
    *reports, path = reports_and_path
    curves = {}
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


def draw(report, path: pathlib.Path):
    """Draws what each private form gains over no adaptation, by epsilon."""
    study = report["continual"]
    *cells, source = study["cells"]
    curves = {}
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


FLAGS = {
    "data_dir": "",
    "workdir": "workdir/evidence_tta",
    "study": {"action": "append", "choices": STUDIES, "help": "the default is those of USPS"},
    "checkpoint": ("", "the published ResNet-20 of the studies of CIFAR-10"),
}


def measure(flags) -> dict:
    report = timing.earlier(flags.output)
    for study in flags.study or ("continual", "episodic", "ablations"):
        workdir = pathlib.Path(flags.workdir) / study
        report[study] = run(study, flags.data_dir, workdir, flags.checkpoint)
        timing.write(report, flags.output)  # a later study may fail
    return report
