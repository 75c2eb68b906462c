"""Robust pre-training on public images: python -m launch.pretrain --config
configs/pretrain/digits.py --workdir DIR.

The study makes the upstream half of the tables in Wang et al. 2024: a backbone, and its accuracy
under noise on its parameters. All its data is PUBLIC, so it needs no ledger.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxdp import pretrain
from jaxdp.data import DataSpec, Examples, augmentation
from jaxdp.data.selection import image_shape
from jaxdp.data.spec import open_parts
from jaxdp.models import Pretrained, save_params
from jaxdp.report import format_table, plot_panels, read_metrics

from . import data, frame, models, plans, settings
from .study import Fields, Lines, Result, Row, Rows

_CHANGES = ("rho", "beta", "loss", "loss_bound", "gradient", "gradient_bound")
_JUDGED = 2000  # the most training images that judge the warm-up


class Model(NamedTuple):
    """The one cell."""

    method: str


@dataclasses.dataclass(frozen=True)
class _Task:
    spec: DataSpec  # of the training images
    train: Examples
    test: Examples
    network: Pretrained
    trainer: pretrain.SharpnessTrainer
    batches: pretrain.Batches


def _open(config: Any, root: pathlib.Path) -> _Task:
    specs = data.specs(config.data, "public", "test", needs=("public", "test"))
    sources = open_parts(specs, images=True)
    network = models.network(config.model, sources["public"].num_classes)
    train = models.resize(network, sources["public"])
    test = models.resize(network, sources["test"])
    sizes = {
        "perturbation_batch_size": "ascent.batch_size",
        "update_batch_size": "train.batch_size",
    }
    with settings.named("ascent", config.ascent, **sizes):
        trainer = _trainer(config, network)
        batches = _batches(config, train)
        batches.check_microbatches(trainer)
    public = f"{len(train)} public examples ({train.name})"
    tested = f"{len(test)} test ({test.name})"
    shape = "x".join(map(str, image_shape(train)))
    images = f"images {shape}, {train.num_classes} classes"
    print(f"{config.method.name}: {public}, {tested}, {images}.", flush=True)
    return _Task(specs["public"], train, test, network, trainer, batches)


def _trainer(config: Any, network: Pretrained) -> pretrain.SharpnessTrainer:
    name = config.method.name
    ascent = config.ascent
    loss = models.loss(network)
    check(config)
    optimizer = _optimizer(config.train)
    devices = np.array(jax.devices()[: ascent.devices])
    mesh = None
    if len(devices) > 1:
        mesh = jax.sharding.Mesh(devices, ("data",))

    def batch_loss(params: Any, batch: Any) -> jax.Array:
        losses = jax.vmap(loss, in_axes=(None, 0))(params, batch)
        return losses.mean()

    microbatch_size = ascent.microbatch_size or None
    options = dict(config.method[name])
    return pretrain.METHODS[name](
        batch_loss, optimizer, microbatch_size=microbatch_size, mesh=mesh, **options
    )


def check(config: Any, before: str = "") -> None:
    """Refuses a method or a schedule that does not exist. `before` is set before their fields."""
    frame.known(f"{before}method.name", [config.method.name], pretrain.METHODS)
    frame.known(f"{before}train.schedule", [config.train.schedule], _SCHEDULES)


def _optimizer(train: Any) -> optax.GradientTransformation:
    """Returns SGD with the schedule of `config.train`."""
    schedule = _SCHEDULES[train.schedule](train)
    sgd = optax.sgd(schedule, momentum=train.momentum or None)
    weight_decay = optax.add_decayed_weights(train.weight_decay)
    return optax.chain(weight_decay, sgd)


def _cosine(train: Any) -> optax.Schedule:
    return optax.cosine_decay_schedule(train.learning_rate, max(train.steps, 1))


def _steps(train: Any) -> optax.Schedule:
    drops = {int(share * train.steps): 0.1 for share in train.drops}
    return optax.piecewise_constant_schedule(train.learning_rate, drops)


_SCHEDULES = {"cosine": _cosine, "steps": _steps}


def _batches(config: Any, train: Examples) -> pretrain.Batches:
    ascent = config.ascent
    batch_size = config.train.batch_size
    shared = config.method.name != "dpadapter"
    perturbation_batch_size = batch_size if shared else ascent.batch_size
    seed = config.seed.to_bytes(16, "little")
    return pretrain.Batches(
        num_examples=len(train),
        steps=config.train.steps,
        perturbation_batch_size=perturbation_batch_size,
        update_batch_size=batch_size,
        shared_batch=shared,
        warmup_steps=ascent.warmup_steps,
        ascent_every=ascent.every,
        seed=seed,
    )


def _run(cell: Model, work: frame.Work) -> Fields:
    config, task = work.config, work.shared
    folder = work.folder(cell)
    start = models.fresh(task.network, config.seed)
    schedule = dict(vars(task.batches))
    del schedule["num_examples"]  # `fit` counts the examples itself
    evaluate, rules = _rules(config, task)
    options = schedule | rules
    options["workdir"] = folder
    options["checkpoint_every"] = config.train.checkpoint_every
    options["evaluate_every"] = config.train.get("evaluate_every") or None
    options["augment"] = augmentation(task.spec)
    options["evaluate"] = evaluate
    with frame.watching(config, folder) as writers:
        state = pretrain.fit(
            task.trainer, start, task.train, callbacks=writers, label=cell.method, **options
        )
    params = state.params
    save_params(work.root / "params.safetensors", params)
    images = _tested(config, task)["image"]
    draws = {"draws": config.robustness.draws, "seed": config.seed}
    rho = pretrain.parameter_robustness(task.network.apply_fn, params, images, **draws)
    course = _course(read_metrics(folder / "metrics.jsonl"))
    return {
        "accuracy": _accuracy(task, params, task.test),
        "robust_accuracy": _robust(config, task, params),
        "rho": rho._asdict(),
        "changes": _changes(config, task, params),
        **course,
    }


def _robust(config: Any, task: _Task, params: Any) -> Fields:
    """Returns the accuracies under noise on the parameters, for each kind of standard deviation."""
    options = config.robustness
    robust = {}
    for kind, stds in (("absolute", options.std), ("relative", options.relative_std)):
        noise = {"std": stds, "relative": kind == "relative", "draws": options.draws}
        accuracies = pretrain.robust_accuracy(
            task.network.apply_fn, params, task.test, seed=config.seed, **noise
        )
        robust[kind] = {"std": list(stds), "draws": accuracies.tolist()}
    return robust


def _tested(config: Any, task: _Task) -> Row:
    """Returns the test images, with labels, on which rho and Lemma A.1 are measured."""
    count = min(config.robustness.inputs, len(task.test))
    return task.test.gather(np.arange(count))


# Compiled, because each operation on each shape would be a program.
_norm = jax.jit(optax.tree.norm)
_add_scale = jax.jit(optax.tree.add_scale)


def _changes(config: Any, task: _Task, params: Any) -> Lines:
    """Returns what Lemma A.1 allows beside the change along the gradient of the public loss and
    along noise, for each length.
    """
    lengths = config.robustness.lengths
    if not lengths:
        return []
    examples = _tested(config, task)
    images, labels = examples["image"], examples["label"]
    # One compiled call, so no more than fits in memory.
    count = min(task.batches.perturbation_batch_size, 500)
    public = task.train.gather(np.arange(count))
    zeros = task.trainer.zeros(params)
    arguments = params, zeros, None, public, np.int32(0)
    _, gradient, _ = task.trainer.gradient(*arguments, parts=1)
    generator = np.random.default_rng(config.seed)

    def normal(leaf: jax.Array) -> np.ndarray:
        noise = generator.normal(size=leaf.shape)
        return noise.astype(leaf.dtype)

    directions = {"gradient": gradient, "noise": jax.tree.map(normal, params)}
    rows = []
    for (name, direction), length in itertools.product(directions.items(), lengths):
        scale = length / float(_norm(direction))
        moved = _add_scale(params, scale, direction)
        change = pretrain.parameter_change(task.network.apply_fn, params, moved, images, labels)
        row = {"direction": name}
        rows.append(row | change._asdict())
    return rows


Evaluate = Callable[[Any], dict[str, float]]


def _rules(config: Any, task: _Task) -> tuple[Evaluate, Fields]:
    """Returns `evaluate` of a run, and the rules by which its warm-up ends and it stops."""
    # The test images choose nothing, so the target is one of the accuracy on training images.
    sources = {"accuracy": task.test}
    rules: Fields = {}
    stable = config.train.stable
    target = config.ascent.warmup_accuracy
    if target:
        count = min(len(task.train), _JUDGED)
        sources["train_accuracy"] = task.train.take(np.arange(count))
        rules["warmup_until"] = pretrain.Target("train_accuracy", target)
    if stable.steps:
        rules["stop_when"] = pretrain.Stable(stable.steps, stable.tolerance)

    def evaluate(state: pretrain.SharpnessState) -> dict[str, float]:
        return {name: _accuracy(task, state.params, source) for name, source in sources.items()}

    return evaluate, rules


def _accuracy(task: _Task, params: Any, source: Examples) -> float:
    judged = pretrain.robust_accuracy(task.network.apply_fn, params, source, std=0.0, draws=1)
    return float(judged[0])


def _course(rows: Rows) -> Fields:
    """Returns the number of steps, of those before the first ascent, and the mean length of the
    perturbation over the first and the last tenth of the steps with one.

    The lengths show whether the ball of radius gamma was reached.
    """
    warm = 0
    while warm < len(rows) and "ascent_gradient_norm" not in rows[warm]:
        warm += 1
    lengths = [row["perturbation_norm"] for row in rows[warm:]] or [0.0]
    tenth = max(len(lengths) // 10, 1)
    first = float(np.mean(lengths[:tenth]))
    last = float(np.mean(lengths[-tenth:]))
    return {
        "steps": len(rows),
        "warmup_steps": warm,
        "perturbation_norm": {"first": first, "last": last},
    }


def _result(rows: Rows, work: frame.Work) -> Fields:
    task = work.shared
    config = json.loads(work.config.to_json())
    provenance = {"train": _origin(task.train), "test": _origin(task.test)}
    provenance["config"] = config
    provenance["versions"] = frame.versions()
    (row,) = rows
    return {**row, "provenance": provenance}


def _origin(source: Examples) -> Fields:
    return {"name": source.name, "fingerprint": source.fingerprint, "examples": len(source)}


def _figures(result: Result, work: frame.Work) -> None:
    if result["changes"]:
        _draw_changes(result, work.root / "lemma_a1.png")
    accuracy = result["accuracy"]
    panels = {}
    for kind, title, xlabel in _NOISES:
        sweep = result["robust_accuracy"][kind]
        draws = np.array(sweep["draws"])
        curves = {}
        for name, values in (("mean", draws.mean(1)), ("worst draw", draws.min(1))):
            points = zip(sweep["std"], values.tolist(), strict=True)
            curves[name] = [(0.0, accuracy), *points]
        panels[title] = (xlabel, curves)
    test = result["provenance"]["test"]
    _, count = draws.shape
    noise = f"Gaussian noise on the parameters, {count} draws"
    plot_panels(
        work.root / "robustness.png",
        panels,
        title=f"{_trained(result)}: {100 * accuracy:.1f}% accuracy",
        subtitle=f"Accuracy on {test['name']} after {noise}",
        ylabel="robust accuracy",
        percent=True,
    )


# The kinds of noise in figures, with titles and axes.
_NOISES = (
    ("absolute", "Noise on every parameter", "standard deviation"),
    ("relative", "Noise relative to each tensor", "standard deviation / root mean square"),
)


def _trained(result: Result) -> str:
    """Returns "dpadapter on digits", the method and the training images."""
    train = result["provenance"]["train"]
    return f"{result['method']} on {train['name']}"


def _draw_changes(result: Result, path: pathlib.Path) -> None:
    panels = {}
    for of, title in (("loss", "The loss of an example"), ("gradient", "The gradient")):
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in result["changes"]:
            for kind, key in (("measured", of), ("bound", f"{of}_bound")):
                name = f"{kind}, along {row['direction']}"
                points = curves.setdefault(name, [])
                points.append((row["length"], row[key]))
        panels[title] = ("length of the change of the parameters", curves)
    plot_panels(
        path,
        panels,
        title=f"Lemma A.1 for {_trained(result)}",
        subtitle="The largest change over the inputs, and the bound with the constants of the pair",
        ylabel="largest change",
        yscale="log",
    )


def _summary(result: Result) -> str:
    rows: Lines = [{"noise": "none", "accuracy": result["accuracy"]}]
    for kind, sweep in result["robust_accuracy"].items():
        of = " of each tensor" if kind == "relative" else ""
        for std, draws in zip(sweep["std"], sweep["draws"], strict=True):
            row: Fields = {"noise": f"std {std:g}{of}"}
            row["accuracy"] = float(np.mean(draws))
            row["sd over draws"] = float(np.std(draws))
            rows.append(row)
    table = format_table(rows)
    trained = _trained(result)
    rho = result["rho"]
    local, random = f"{rho['local']:.4g}", f"{rho['random']:.4g}"
    length = result["perturbation_norm"]
    first, last = f"{length['first']:.4g}", f"{length['last']:.4g}"
    steps, before = result["steps"], result["warmup_steps"]
    lemma = _lemma(result["changes"])
    return (
        f"{trained}\n\n{table}\n\n"
        f"rho: at least {local} (worst direction), {random} (random directions). "
        f"{steps} steps, of which {before} before the first ascent. "
        f"||Delta||: {first} in the first steps with one, {last} in the last.{lemma}"
    )


def _lemma(changes: Rows) -> str:
    """Returns the table of the changes, if there are any."""
    if not changes:
        return ""
    headings = "direction", "length", *_CHANGES
    rows = [{heading: change[heading] for heading in headings} for change in changes]
    table = format_table(rows)
    return f"\n\nLemma A.1:\n\n{table}"


def plan(config: Any, opened: Callable[[], _Task]) -> Iterator[plans.Item]:
    """Returns the computation. All data is public, so nothing is charged."""
    task = opened()
    trainer, batches = task.trainer, task.batches
    start = models.fresh(task.network, config.seed)
    state = trainer.init(start)
    perturbation = "perturbation_batch", batches.perturbation_batch_size, batches.ascents
    update = "update_batch", batches.update_batch_size, batches.steps
    programs = []
    for name, rows, calls in (perturbation, update):
        microbatches = trainer.microbatches(name, rows)
        images = task.train.gather(np.zeros(rows, np.int64))
        gradient = jax.jit(functools.partial(trainer.gradient, parts=microbatches))
        arguments = (state.params, state.perturbation, None, images, np.int32(0))
        programs.append((gradient, arguments, calls * microbatches))
    yield plans.Item(f"pre-training by {config.method.name}", programs=lambda memory: programs)


_SOURCE_SHAPE = {"name": str, "fingerprint": str, "examples": int}

_REPORT = frame.Report(
    title="public pre-training",
    page="pretrain.html.jinja",
    shape={
        "accuracy": float,
        "method": str,
        "provenance": {"train": _SOURCE_SHAPE, "test": _SOURCE_SHAPE},
    },
    released={"params.safetensors": "public backbone"},
    no_account="No private record was read, so there is nothing to protect.",
)

STUDY = frame.Study(
    name="pretrain",
    life=".lifecycle.pretrain",
    open=_open,
    cells=lambda config: [Model(config.method.name)],
    run=_run,
    result=_result,
    summary=_summary,
    figures=_figures,
    plan=plan,
    report=_REPORT,
)

if __name__ == "__main__":
    frame.main(STUDY)
