"""Robust pre-training on public images: python -m launch.pretrain --config
configs/pretrain/digits.py --workdir DIR.

The study makes the upstream half of the tables in Wang et al. 2024: a backbone, and its accuracy
under noise on its parameters. All its data is PUBLIC, so it needs no ledger.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    specs = data.specs(config.data, "public", "test")
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
    name, how, loss = config.method.name, config.train, models.loss(network)
    frame.known("method.name", [name], pretrain.METHODS)
    schedules = {
        "cosine": optax.cosine_decay_schedule(how.learning_rate, max(how.steps, 1)),
        "steps": optax.piecewise_constant_schedule(
            how.learning_rate, {int(part * how.steps): 0.1 for part in how.drops}
        ),
    }
    frame.known("train.schedule", [how.schedule], schedules)
    devices = np.array(jax.devices()[: config.ascent.devices])
    return pretrain.METHODS[name](
        lambda params, batch: jax.vmap(loss, in_axes=(None, 0))(params, batch).mean(),
        optax.chain(
            optax.add_decayed_weights(how.weight_decay),
            optax.sgd(schedules[how.schedule], momentum=how.momentum or None),
        ),
        microbatch_size=config.ascent.microbatch_size or None,
        mesh=jax.sharding.Mesh(devices, ("data",)) if len(devices) > 1 else None,
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


def _run(cell: Model, work: frame.Work) -> dict[str, Any]:
    config, task = work.config, work.shared
    folder = work.folder(cell)
    sizes = {name: value for name, value in vars(task.batches).items() if name != "num_examples"}

    def accuracy(params: Any) -> float:
        (share,) = pretrain.robust_accuracy(
            task.network.apply_fn, params, task.test, std=0.0, draws=1
        )
        return float(share)

    with frame.watching(config, folder) as writers:
        state = pretrain.fit(
            task.trainer,
            models.fresh(task.network, config.seed),
            task.train,
            **sizes,
            augment=augmentation(task.spec),
            evaluate=lambda state: {"accuracy": accuracy(state.params)},
            workdir=folder,
            checkpoint_every=config.train.checkpoint_every,
            evaluate_every=config.train.get("evaluate_every") or None,
            callbacks=writers,
            label=cell.method,
        )
    save_params(work.root / "params.safetensors", state.params)
    lengths = [row["perturbation_norm"] for row in read_metrics(folder / "metrics.jsonl")]
    tenth = max(len(lengths) // 10, 1)
    return {
        "accuracy": accuracy(state.params),
        **_robustness(state.params, config, task),
        # Means over the first and the last tenth of the steps show whether the ball of radius gamma
        # was reached.
        "perturbation_norm": {
            "first": float(np.mean(lengths[:tenth])),
            "last": float(np.mean(lengths[-tenth:])),
        },
    }


def _robustness(params: Any, config: Any, task: _Task) -> dict[str, Any]:
    """Returns the accuracies under noise on the parameters, and rho."""
    predict, robustness = task.network.apply_fn, config.robustness
    draws = {"draws": robustness.draws, "seed": config.seed}
    noisy = functools.partial(pretrain.robust_accuracy, predict, params, task.test, **draws)
    absolute = noisy(std=robustness.std, relative=False)
    relative = noisy(std=robustness.relative_std, relative=True)
    rows = np.arange(min(robustness.inputs, len(task.test)))
    images = task.test.gather(rows)["image"]
    rho = pretrain.parameter_robustness(predict, params, images, **draws)
    return {
        "robust_accuracy": {
            "absolute": {"std": list(robustness.std), "draws": absolute.tolist()},
            "relative": {"std": list(robustness.relative_std), "draws": relative.tolist()},
        },
        "rho": rho._asdict(),
    }


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    sources = {"train": work.shared.train, "test": work.shared.test}
    provenance = {
        **{
            k: {"name": s.name, "fingerprint": s.fingerprint, "examples": len(s)}
            for k, s in sources.items()
        },
        "config": json.loads(work.config.to_json()),
        "versions": frame.versions(),
    }
    return {**rows[0], "provenance": provenance}


def _figures(result: Mapping[str, Any], work: frame.Work) -> None:
    panels = {}
    for kind, title, xlabel in (
        ("absolute", "Noise on every parameter", "standard deviation"),
        ("relative", "Noise relative to each tensor", "standard deviation / root mean square"),
    ):
        robust = result["robust_accuracy"][kind]
        draws = np.array(robust["draws"])
        curves = {"mean": draws.mean(1), "worst draw": draws.min(1)}
        panels[title] = (
            xlabel,
            {
                name: [(0.0, result["accuracy"]), *zip(robust["std"], values.tolist(), strict=True)]
                for name, values in curves.items()
            },
        )
    where = result["provenance"]
    plot_panels(
        work.root / "robustness.png",
        panels,
        title=f"{result['method']} on {where['train']['name']}: {100 * result['accuracy']:.1f}% "
        "accuracy",
        subtitle=f"Accuracy on {where['test']['name']} after Gaussian noise on the parameters, "
        f"{draws.shape[1]} draws",
        ylabel="robust accuracy",
        percent=True,
    )


def _summary(result: Mapping[str, Any]) -> str:
    rows = [{"noise": "none", "accuracy": result["accuracy"]}]
    for kind, found in result["robust_accuracy"].items():
        for std, draws in zip(found["std"], found["draws"], strict=True):
            name = f"std {std:g}" + (" of each tensor" if kind == "relative" else "")
            rows.append(
                {
                    "noise": name,
                    "accuracy": float(np.mean(draws)),
                    "sd over draws": float(np.std(draws)),
                }
            )
    rho, length = result["rho"], result["perturbation_norm"]
    return (
        f"{result['method']} on {result['provenance']['train']['name']}\n\n{format_table(rows)}\n\n"
        f"rho: at least {rho['local']:.4g} (worst direction), {rho['random']:.4g} (random "
        "directions). "
        f"||Delta||: {length['first']:.4g} in the first steps, {length['last']:.4g} in the last."
    )


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
        gradient = functools.partial(trainer.gradient, parts=microbatches)
        arguments = (state.params, state.perturbation, None, images, np.int32(0))
        programs.append((jax.jit(gradient), arguments, calls * microbatches))
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
    about="robust pre-training on public images",
    needs=("ascent",),
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
