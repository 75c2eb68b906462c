"""One pre-training experiment from a config: public images in, a robust backbone and what it withstands out.

The config is an `ml_collections.ConfigDict` as in `configs/pretrain/cifar100.py`, whose comments say what each field
means. What it makes is the upstream half of the tables in Wang et al. 2024.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import data, models
from jaxdp.files import write_json
from jaxdp.models.robustness import parameter_robustness, robust_accuracy
from jaxdp.pretrain.dpadapter import SharpnessState, SharpnessTrainer, amp, dpadapter, sam
from jaxdp.pretrain.loop import Plan, fit
from jaxdp.release import bind, finished_result
from jaxdp.report import format_table, plot_panels, read_metrics
from jaxdp.transforms import losses
from jaxdp.version import __version__

_LIBRARIES = ("jax", "flax", "optax", "numpy")
# SAM and AMP ascend on the batch of the update; standard training has no ball to ascend in.
_METHODS: Mapping[str, Callable[..., SharpnessTrainer]] = {
    "standard": functools.partial(dpadapter, gamma=0.0),
    "sam": sam,
    "amp": amp,
    "dpadapter": dpadapter,
}


def run(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Runs the experiment, or what is left of it, and returns its result.

    Everything it reads is PUBLIC data: no ledger is asked.

    Args:
      config: the experiment.
      workdir: its directory, made if needed. It holds afterwards:
          params.safetensors  the model, which `config.pretrain.weights` of a fine-tuning experiment can name
          result.json         test accuracy, robust accuracy, rho, and where the model comes from
          robustness.png      accuracy under noise on the parameters
          training/           metrics.jsonl and the last checkpoint

    Raises:
      ValueError: the workdir belongs to an experiment with another config, or the config is inconsistent.
      FileNotFoundError: a data set is not there; the message says how to get it.
    """
    root = pathlib.Path(workdir)
    if (result := finished_result(config, root, _summary)) is not None:
        return result
    task = _Task.of(config)
    trainer, plan = _trainer(config, task), _plan(config, task)
    plan.check_microbatches(trainer)
    with bind(config, root):
        print(f"{config.method.name}: {task.describe()}", flush=True)
        state = _train(config, task, trainer, plan, root / "training")
    models.save_params(root / "params.safetensors", state.params)
    result = _measure(config, task, state, root)
    _figure(result, root / "robustness.png")
    write_json(root / "result.json", result)
    print(f"\n{_summary(result)}\n\nIn {root}: params.safetensors, robustness.png, training/metrics.jsonl")
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
    """Data and model of an experiment."""

    train: data.Source
    test: data.Source
    model: Any
    mean: Any
    std: Any

    @classmethod
    def of(cls, config: Any) -> "_Task":
        train, test = (
            data.resize_images(part, config.data.size, config.data.channels) for part in _sources(config.data)
        )
        model = models.create(config.model.name, num_classes=train.num_classes, **dict(config.model.options))
        return cls(train, test, model, config.data.mean, config.data.std)

    def describe(self) -> str:
        shape = "x".join(map(str, self.train.arrays["image"].shape[1:]))
        examples = f"{len(self.train)} public examples ({self.train.name}), {len(self.test)} test ({self.test.name})"
        return f"{examples}, images {shape}, {self.train.num_classes} classes."

    def init(self, seed: int) -> Any:
        """Fresh parameters."""
        image = jnp.zeros((1, *self.train.arrays["image"].shape[1:]))
        return jax.jit(self.model.init)(jax.random.key(seed), image)["params"]

    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        return self.model.apply({"params": params}, data.normalise(images, self.mean, self.std))

    def loss(self, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Mean cross entropy of a batch."""
        return jax.vmap(losses.softmax_cross_entropy)(self.logits(params, batch["image"]), batch["label"]).mean()

    def accuracy(self, params: Any) -> float:
        """On the test images: robust accuracy without noise."""
        return float(robust_accuracy(self.logits, params, self.test, std=0.0, draws=1)[0])


def _sources(config: Any) -> tuple[data.Source, data.Source]:
    """Public examples to train on, and test examples; which is which does not depend on the records."""
    if config.source == "bundled":  # what is private to a fine-tuning experiment with these fractions is not read
        parts = data.bundled_parts(config)
        return parts["public"], parts["test"]
    if config.source != "tfds":
        raise ValueError(f"config.data.source must be 'bundled' or 'tfds', got {config.source!r}.")
    read = functools.partial(data.from_tfds, config.name, data_dir=config.data_dir or None)
    return read(config.train_split), read(config.test_split)


def _trainer(config: Any, task: _Task) -> SharpnessTrainer:
    name, train = config.method.name, config.train
    if name not in _METHODS:
        raise ValueError(f"config.method.name must be one of {', '.join(_METHODS)}, got {name!r}.")
    schedules = {
        "cosine": optax.cosine_decay_schedule(train.learning_rate, max(train.steps, 1)),
        "steps": optax.piecewise_constant_schedule(
            train.learning_rate, {int(part * train.steps): 0.1 for part in train.drops}
        ),
    }
    if train.schedule not in schedules:
        raise ValueError(f"config.train.schedule must be one of {', '.join(schedules)}, got {train.schedule!r}.")
    return _METHODS[name](
        task.loss,
        optax.chain(
            optax.add_decayed_weights(train.weight_decay),
            optax.sgd(schedules[train.schedule], momentum=train.momentum or None),
        ),
        microbatch_size=config.ascent.microbatch_size or None,
        **dict(config.method[name]),
    )


def _plan(config: Any, task: _Task) -> Plan:
    shared = config.method.name != "dpadapter"
    return Plan(
        num_examples=len(task.train),
        steps=config.train.steps,
        perturbation_batch_size=config.train.batch_size if shared else config.ascent.batch_size,
        update_batch_size=config.train.batch_size,
        shared_batch=shared,
        warmup_steps=config.ascent.warmup_steps,
        ascent_every=config.ascent.every,
        seed=config.seed.to_bytes(16, "little"),
    )


def _train(config: Any, task: _Task, trainer: SharpnessTrainer, plan: Plan, workdir: pathlib.Path) -> SharpnessState:
    arguments = dataclasses.asdict(plan)
    del arguments["num_examples"]
    return fit(
        trainer,
        task.init(config.seed),
        task.train,
        **arguments,
        augment=data.augmentation(config.data),
        devices=jax.devices()[: config.ascent.devices] if config.ascent.devices > 1 else None,
        evaluate=lambda state: {"accuracy": task.accuracy(state.params)},
        workdir=workdir,
        checkpoint_every=config.train.checkpoint_every,
        label=config.method.name,
    )


def _measure(config: Any, task: _Task, state: SharpnessState, root: pathlib.Path) -> dict[str, Any]:
    how, params = config.robustness, state.params
    noisy = functools.partial(robust_accuracy, task.logits, params, task.test, draws=how.draws, seed=config.seed)
    images = task.test.gather(np.arange(min(how.inputs, len(task.test))))["image"]
    rho = parameter_robustness(task.logits, params, images, draws=how.draws, seed=config.seed)
    lengths = [row["perturbation_norm"] for row in read_metrics(root / "training" / "metrics.jsonl")]
    tenth = max(len(lengths) // 10, 1)
    return {
        "method": config.method.name,
        "accuracy": task.accuracy(params),
        "robust_accuracy": {
            kind: {"std": list(stds), "draws": noisy(std=stds, relative=kind == "relative").tolist()}
            for kind, stds in (("absolute", how.std), ("relative", how.relative_std))
        },
        "rho": rho._asdict(),
        # Means over the first and the last tenth of the steps: whether the ball of radius gamma was reached.
        "perturbation_norm": {"first": float(np.mean(lengths[:tenth])), "last": float(np.mean(lengths[-tenth:]))},
        "provenance": {
            "train": {"name": task.train.name, "fingerprint": task.train.fingerprint, "examples": len(task.train)},
            "test": {"name": task.test.name, "fingerprint": task.test.fingerprint, "examples": len(task.test)},
            "config": json.loads(config.to_json()),
            "versions": {"jaxdp": __version__, **{name: importlib.metadata.version(name) for name in _LIBRARIES}},
        },
    }


def _figure(result: Mapping[str, Any], path: pathlib.Path) -> None:
    panels = {}
    for kind, title, xlabel in (
        ("absolute", "Noise on every parameter", "standard deviation"),
        ("relative", "Noise relative to each tensor", "standard deviation / root mean square"),
    ):
        found = result["robust_accuracy"][kind]
        draws = np.array(found["draws"])
        curves = {"mean": draws.mean(1), "worst draw": draws.min(1)}
        panels[title] = (
            xlabel,
            {
                name: [(0.0, result["accuracy"]), *zip(found["std"], values.tolist(), strict=True)]
                for name, values in curves.items()
            },
        )
    where = result["provenance"]
    plot_panels(
        path,
        panels,
        title=f"{result['method']} on {where['train']['name']}: {100 * result['accuracy']:.1f}% accuracy",
        subtitle=f"Accuracy on {where['test']['name']} after Gaussian noise on the parameters, {draws.shape[1]} draws",
        ylabel="robust accuracy",
        percent=True,
    )


def _summary(result: Mapping[str, Any]) -> str:
    rows = [{"noise": "none", "accuracy": result["accuracy"]}]
    for kind, found in result["robust_accuracy"].items():
        for std, draws in zip(found["std"], found["draws"], strict=True):
            name = f"std {std:g}" + (" of each tensor" if kind == "relative" else "")
            rows.append({"noise": name, "accuracy": float(np.mean(draws)), "sd over draws": float(np.std(draws))})
    rho, length = result["rho"], result["perturbation_norm"]
    return (
        f"{result['method']} on {result['provenance']['train']['name']}\n\n{format_table(rows)}\n\n"
        f"rho: at least {rho['local']:.4g} (worst direction), {rho['random']:.4g} (random directions). "
        f"||Delta||: {length['first']:.4g} in the first steps, {length['last']:.4g} in the last."
    )
