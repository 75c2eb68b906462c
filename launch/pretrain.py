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
from .study import Fields, Lines, Result, Rows

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
        trainer, batches = _trainer(config, network), _batches(config, train)
        batches.check_microbatches(trainer)
    shape = "x".join(map(str, image_shape(train)))
    print(
        f"{config.method.name}: {len(train)} public examples ({train.name}), {len(test)} test "
        f"({test.name}), images {shape}, {train.num_classes} classes.",
        flush=True,
    )
    return _Task(specs["public"], train, test, network, trainer, batches)


def _trainer(config: Any, network: Pretrained) -> pretrain.SharpnessTrainer:
    name = config.method.name
    train = config.train
    loss = models.loss(network)
    frame.known("method.name", [name], pretrain.METHODS)
    drops = {int(share * train.steps): 0.1 for share in train.drops}
    schedules = {
        "cosine": optax.cosine_decay_schedule(train.learning_rate, max(train.steps, 1)),
        "steps": optax.piecewise_constant_schedule(train.learning_rate, drops),
    }
    frame.known("train.schedule", [train.schedule], schedules)
    weight_decay = optax.add_decayed_weights(train.weight_decay)
    sgd = optax.sgd(schedules[train.schedule], momentum=train.momentum or None)
    devices = np.array(jax.devices()[: config.ascent.devices])
    mesh = None
    if len(devices) > 1:
        mesh = jax.sharding.Mesh(devices, ("data",))

    def batch_loss(params: Any, batch: Any) -> jax.Array:
        return jax.vmap(loss, in_axes=(None, 0))(params, batch).mean()

    return pretrain.METHODS[name](
        batch_loss,
        optax.chain(weight_decay, sgd),
        microbatch_size=config.ascent.microbatch_size or None,
        mesh=mesh,
        **dict(config.method[name]),
    )


def _batches(config: Any, train: Examples) -> pretrain.Batches:
    shared = config.method.name != "dpadapter"
    return pretrain.Batches(
        num_examples=len(train),
        steps=config.train.steps,
        perturbation_batch_size=config.train.batch_size if shared else config.ascent.batch_size,
        update_batch_size=config.train.batch_size,
        shared_batch=shared,
        warmup_steps=config.ascent.warmup_steps,
        ascent_every=config.ascent.every,
        seed=config.seed.to_bytes(16, "little"),
    )


def _run(cell: Model, work: frame.Work) -> Fields:
    config, task = work.config, work.shared
    predict, batches = task.network.apply_fn, task.batches
    judge = functools.partial(pretrain.robust_accuracy, predict)
    folder = work.folder(cell)
    schedule = dict(vars(batches))
    del schedule["num_examples"]  # `fit` counts the examples itself
    evaluate, rules = _rules(config, task)
    with frame.watching(config, folder) as writers:
        state = pretrain.fit(
            task.trainer,
            models.fresh(task.network, config.seed),
            task.train,
            **schedule,
            augment=augmentation(task.spec),
            evaluate=evaluate,
            **rules,
            workdir=folder,
            checkpoint_every=config.train.checkpoint_every,
            evaluate_every=config.train.get("evaluate_every") or None,
            callbacks=writers,
            label=cell.method,
        )
    save_params(work.root / "params.safetensors", state.params)
    options, params = config.robustness, state.params
    robust = {}
    for kind, stds in (("absolute", options.std), ("relative", options.relative_std)):
        draws = judge(
            params,
            task.test,
            std=stds,
            relative=kind == "relative",
            draws=options.draws,
            seed=config.seed,
        )
        robust[kind] = {"std": list(stds), "draws": draws.tolist()}
    images = task.test.gather(np.arange(min(options.inputs, len(task.test))))["image"]
    rho = pretrain.parameter_robustness(
        predict, params, images, draws=options.draws, seed=config.seed
    )
    return {
        "accuracy": _accuracy(task, params, task.test),
        "robust_accuracy": robust,
        "rho": rho._asdict(),
        "changes": _changes(config, task, params),
        **_course(read_metrics(folder / "metrics.jsonl")),
    }


def _changes(config: Any, task: _Task, params: Any) -> Lines:
    """Returns what Lemma A.1 allows beside the change along the gradient of the public loss and
    along noise, for each length.
    """
    options = config.robustness
    if not options.lengths:
        return []
    examples = task.test.gather(np.arange(min(options.inputs, len(task.test))))
    # One compiled call, so no more than fits in memory.
    public = task.train.gather(np.arange(min(task.batches.perturbation_batch_size, 500)))
    zeros = task.trainer.zeros(params)
    _, gradient, _ = task.trainer.gradient(params, zeros, None, public, np.int32(0), parts=1)
    noise = np.random.default_rng(config.seed)
    directions = {
        "gradient": gradient,
        "noise": jax.tree.map(lambda p: noise.normal(size=p.shape).astype(p.dtype), params),
    }
    rows = []
    for (name, direction), length in itertools.product(directions.items(), options.lengths):
        scale = length / float(optax.tree.norm(direction))
        moved = optax.tree.add_scale(params, scale, direction)
        change = pretrain.parameter_change(
            task.network.apply_fn, params, moved, examples["image"], examples["label"]
        )
        rows.append({"direction": name, **change._asdict()})
    return rows


def _rules(config: Any, task: _Task) -> tuple[Callable[[Any], dict[str, float]], Fields]:
    """Returns `evaluate` of a run, and the rules by which its warm-up ends and it stops."""
    # The test images choose nothing, so the target is one of the accuracy on training images.
    sources = {"accuracy": task.test}
    rules: Fields = {}
    stable, target = config.train.stable, config.ascent.warmup_accuracy
    if target:
        sources["train_accuracy"] = task.train.take(np.arange(min(len(task.train), _JUDGED)))
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
    warm = next((i for i, row in enumerate(rows) if "ascent_gradient_norm" in row), len(rows))
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
    provenance = {
        "train": _origin(work.shared.train),
        "test": _origin(work.shared.test),
        "config": json.loads(work.config.to_json()),
        "versions": frame.versions(),
    }
    return {**rows[0], "provenance": provenance}


def _origin(source: Examples) -> Fields:
    return {"name": source.name, "fingerprint": source.fingerprint, "examples": len(source)}


def _figures(result: Result, work: frame.Work) -> None:
    if result["changes"]:
        _draw_changes(result, work.root / "lemma_a1.png")
    panels = {}
    for kind, title, xlabel in (
        ("absolute", "Noise on every parameter", "standard deviation"),
        ("relative", "Noise relative to each tensor", "standard deviation / root mean square"),
    ):
        sweep = result["robust_accuracy"][kind]
        draws = np.array(sweep["draws"])
        curves = {}
        for name, values in (("mean", draws.mean(1)), ("worst draw", draws.min(1))):
            points = zip(sweep["std"], values.tolist(), strict=True)
            curves[name] = [(0.0, result["accuracy"]), *points]
        panels[title] = (xlabel, curves)
    train_name = result["provenance"]["train"]["name"]
    test_name = result["provenance"]["test"]["name"]
    percent = 100 * result["accuracy"]
    plot_panels(
        work.root / "robustness.png",
        panels,
        title=f"{result['method']} on {train_name}: {percent:.1f}% accuracy",
        subtitle=f"Accuracy on {test_name} after Gaussian noise on the parameters, "
        f"{draws.shape[1]} draws",
        ylabel="robust accuracy",
        percent=True,
    )


def _draw_changes(result: Result, path: pathlib.Path) -> None:
    panels = {}
    for of, title in (("loss", "The loss of an example"), ("gradient", "The gradient")):
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in result["changes"]:
            for kind, key in (("measured", of), ("bound", f"{of}_bound")):
                name = f"{kind}, along {row['direction']}"
                curves.setdefault(name, []).append((row["length"], row[key]))
        panels[title] = ("length of the change of the parameters", curves)
    plot_panels(
        path,
        panels,
        title=f"Lemma A.1 for {result['method']} on {result['provenance']['train']['name']}",
        subtitle="The largest change over the inputs, and the bound with the constants of the pair",
        ylabel="largest change",
        yscale="log",
    )


def _summary(result: Result) -> str:
    rows = [{"noise": "none", "accuracy": result["accuracy"]}]
    for kind, sweep in result["robust_accuracy"].items():
        of = " of each tensor" if kind == "relative" else ""
        for std, draws in zip(sweep["std"], sweep["draws"], strict=True):
            mean, deviation = float(np.mean(draws)), float(np.std(draws))
            rows.append({"noise": f"std {std:g}{of}", "accuracy": mean, "sd over draws": deviation})
    rho, length = result["rho"], result["perturbation_norm"]
    return (
        f"{result['method']} on {result['provenance']['train']['name']}\n\n{format_table(rows)}\n\n"
        f"rho: at least {rho['local']:.4g} (worst direction), {rho['random']:.4g} (random "
        f"directions). {result['steps']} steps, of which {result['warmup_steps']} before the "
        f"first ascent. ||Delta||: {length['first']:.4g} in the first steps with one, "
        f"{length['last']:.4g} in the last."
        f"{_lemma(result['changes'])}"
    )


def _lemma(changes: Rows) -> str:
    """Returns the table of the changes, if there are any."""
    rows = []
    for change in changes:
        row = {"direction": change["direction"], "length": change["length"]}
        rows.append(row | {key: change[key] for key in _CHANGES})
    return f"\n\nLemma A.1:\n\n{format_table(rows)}" if rows else ""


def plan(config: Any, opened: Callable[[], _Task]) -> Iterator[plans.Item]:
    """Returns the computation. All data is public, so nothing is charged."""
    task = opened()
    trainer, batches = task.trainer, task.batches
    state = trainer.init(models.fresh(task.network, config.seed))
    programs = []
    for name, rows, calls in zip(
        ("perturbation_batch", "update_batch"), _sizes(batches), _calls(batches), strict=True
    ):
        microbatches = trainer.microbatches(name, rows)
        images = task.train.gather(np.zeros(rows, np.int64))
        gradient = jax.jit(functools.partial(trainer.gradient, parts=microbatches))
        arguments = (state.params, state.perturbation, None, images, np.int32(0))
        programs.append((gradient, arguments, calls * microbatches))
    yield plans.Item(f"pre-training by {config.method.name}", programs=lambda memory: programs)


def _sizes(batches: pretrain.Batches) -> tuple[int, int]:
    return batches.perturbation_batch_size, batches.update_batch_size


def _calls(batches: pretrain.Batches) -> tuple[int, int]:
    """Returns the number of gradients at perturbation and at update batches."""
    ascents = sum(batches.batches(step)[0] is not None for step in range(batches.steps))
    return ascents, batches.steps


_SOURCE_SHAPE = {"name": str, "fingerprint": str, "examples": int}

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
    report=frame.Report(
        title="public pre-training",
        page="pretrain.html.jinja",
        shape={
            "accuracy": float,
            "method": str,
            "provenance": {"train": _SOURCE_SHAPE, "test": _SOURCE_SHAPE},
        },
        released={"params.safetensors": "public backbone"},
        no_account="No private record was read, so there is nothing to protect.",
    ),
)

if __name__ == "__main__":
    frame.main(STUDY)
