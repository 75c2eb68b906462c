"""One fine-tuning experiment from a config: public pre-training, private fine-tuning, references, figure.

The config is an `ml_collections.ConfigDict` as in `configs/digits_dpsgd.py`, whose comments say what each field means.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp import data, models
from jaxdp.files import read_json, write_json
from jaxdp.finetune.configured import configured_trainer
from jaxdp.finetune.evaluate import accuracy
from jaxdp.finetune.loop import fit
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.models.training import train_without_privacy
from jaxdp.privacy import Account, Ledger
from jaxdp.release import alone, bind, finished_result
from jaxdp.report import format_table, plot_training, read_metrics
from jaxdp.transforms import losses

Params = Any


def run(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Runs the experiment, or what is left of it, and returns its result.

    A finished experiment is not run again; an interrupted one resumes, and pays nothing for steps that it repeats.

    Args:
      config: the experiment.
      workdir: its directory, made if needed. It holds afterwards:
          result.json       accuracies, epsilon, noise multiplier
          training.png      accuracy and epsilon over steps
          params.safetensors  the private model
          ledger.sqlite     what the private data paid (`python -m launch.ledger`)
          private/          metrics.jsonl and checkpoints of the private run
          references/       the runs it is compared with, and their own ledger

    Raises:
      ValueError: the workdir belongs to an experiment with another config, or the config is inconsistent.
      FileNotFoundError: a data set is not there; the message says how to get it.
    """
    root = pathlib.Path(workdir)
    if (result := finished_result(config, root, _summary)) is not None:
        return result
    task = _Task.of(config)
    trainer = _trainer(config, task)
    if config.pretrain.weights:
        models.load_params(config.pretrain.weights)  # raises now rather than after the workdir is bound
    elif task.public is not None and not config.pretrain.steps:
        raise ValueError(
            "config.pretrain.steps must be at least 1 with public examples, got 0; name no public examples."
        )
    with alone(root), bind(config, root):
        print(task.describe(), flush=True)
        result = _run(config, task, trainer, root)
        write_json(root / "result.json", result)
    print(f"\n{_summary(result)}\n\nIn {root}: training.png, params.safetensors, ledger.sqlite, private/metrics.jsonl")
    return result


@dataclasses.dataclass(frozen=True)
class _Task:
    """Data and model of an experiment."""

    public: data.Source | None
    private: data.Source
    test: data.Source
    model: Any
    mean: Any
    std: Any

    @classmethod
    def of(cls, config: Any) -> "_Task":
        public, private, test = _sources(config.data)
        if "image" not in private.arrays:
            raise ValueError(f"config.data must name a data set of images, got {config.data.name!r}.")
        if public is not None:
            side, _, channels = private.arrays["image"].shape[1:]
            public = data.resize_images(public, side, channels)
        model = models.create(config.model.name, num_classes=private.num_classes, **dict(config.model.options))
        return cls(public, private, test, model, config.data.mean, config.data.std)

    def describe(self) -> str:
        public = f"{len(self.public)} public examples ({self.public.name}), " if self.public else ""
        return f"{public}{len(self.private)} private ({self.private.name}), {len(self.test)} test ({self.test.name})."

    def init(self, source: data.Source, seed: int) -> Params:
        """Fresh parameters, with a head for the classes of `source`."""
        image = source[0]["image"][None]
        model = self.model.clone(num_classes=source.num_classes)
        return model.init(jax.random.key(seed), jnp.zeros_like(image))["params"]

    def logits(self, params: Params, images: jax.Array) -> jax.Array:
        head = params["head"]["bias"].shape[0]
        images = data.normalise(images, self.mean, self.std)
        return self.model.clone(num_classes=head).apply({"params": params}, images)

    def loss(self, params: Params, example: Mapping[str, jax.Array]) -> jax.Array:
        """Cross entropy of one example."""
        return losses.softmax_cross_entropy(self.logits(params, example["image"][None])[0], example["label"])


def _run(config: Any, task: _Task, trainer: PrivateTrainer, root: pathlib.Path) -> dict[str, Any]:
    public = task.public is not None or config.pretrain.weights
    backbone = _pretrained(config, task, root / "pretrained.safetensors") if public else None
    fresh = task.init(task.private, config.init_seed)
    start = fresh
    if backbone is not None:
        start = models.merge_pretrained(fresh, backbone, exclude=("head",) if config.pretrain.new_head else ())

    account = _account(root / "ledger.sqlite", task.private, config.private, label="private")
    train = functools.partial(_finetune, config, task, trainer)
    params = train(start, root / "private", account)
    models.save_params(root / "params.safetensors", params)

    references: dict[str, float] = {}
    if config.references:
        references["no privacy"] = _reference_without_privacy(config, task, start, root / "references")
        if backbone is not None:
            apart = root / "references" / "ledger.sqlite"
            apart_account = _account(apart, task.private, config.private, label="no pre-training")
            scratch = train(fresh, root / "references" / "no_pretraining", apart_account)
            references["no pre-training"] = accuracy(task.logits, scratch, task.test)
    rows = read_metrics(root / "private" / "metrics.jsonl")
    result = {
        "private": accuracy(task.logits, params, task.test),
        **references,
        "epsilon": account.epsilon(delta=config.private.delta),
        "delta": config.private.delta,
        "method": config.private.method,
        "noise_multiplier": float(trainer.privatizer.event_at(0).noise_multiplier),
        "steps": config.private.steps,
        "dataset": account.name,
    }
    plot_training(
        root / "training.png",
        accuracy=[(0, accuracy(task.logits, start, task.test))]
        + [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row],
        epsilon=[(0, 0.0)] + [(row["step"], row["epsilon"]) for row in rows if "epsilon" in row],
        budget=config.private.epsilon,
        delta=config.private.delta,
        dataset=account.name,
        references=references,
    )
    return result


def _pretrained(config: Any, task: _Task, path: pathlib.Path) -> Params:
    """The backbone: a given file of public weights, or one trained here on the public examples."""
    if config.pretrain.weights:
        return models.load_params(config.pretrain.weights)
    if not path.exists():
        assert task.public is not None
        params = task.init(task.public, config.init_seed)
        trained = _without_privacy(config, task, params, task.public, config.pretrain, "public pre-training")
        path.parent.mkdir(parents=True, exist_ok=True)
        models.save_params(path, trained)
    return models.load_params(path)


def _without_privacy(config: Any, task: _Task, params: Params, source: data.Source, how: Any, label: str) -> Params:
    optimizer = optax.adam(optax.cosine_decay_schedule(how.learning_rate, how.steps))
    return train_without_privacy(
        task.loss,
        params,
        source,
        optimizer,
        steps=how.steps,
        batch_size=how.batch_size,
        seed=config.init_seed.to_bytes(16, "little"),
        augment=data.augmentation(config.data),
        label=label,
    )


def _trainer(config: Any, task: _Task) -> PrivateTrainer:
    return configured_trainer(
        config.private,
        task.loss,
        len(task.private),
        augment=data.augmentation(config.data),
        public=task.public,
        num_classes=task.private.num_classes,
    )


def _finetune(
    config: Any,
    task: _Task,
    trainer: PrivateTrainer,
    start: Params,
    workdir: pathlib.Path,
    account: Account,
) -> Params:
    state = fit(
        trainer,
        start,
        task.private,
        steps=config.private.steps,
        account=account,
        workdir=workdir,
        checkpoint_every=config.private.checkpoint_every,
        evaluate=lambda params: {"accuracy": accuracy(task.logits, params, task.test)},
    )
    return state.params if state.ema is None else state.ema


def _reference_without_privacy(config: Any, task: _Task, start: Params, folder: pathlib.Path) -> float:
    path = folder / "no_privacy.json"
    if not path.exists():
        trained = _without_privacy(config, task, start, task.private, config.no_privacy, "no privacy")
        write_json(path, {"accuracy": accuracy(task.logits, trained, task.test)})
    return read_json(path, keys=["accuracy"])["accuracy"]


def _account(path: pathlib.Path, source: data.Source, private: Any, *, label: str) -> Account:
    path.parent.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(path)
    terms: Any = {"adjacency": "add_remove", "unit": "example", "records": len(source)}
    ledger.register(source.name, **terms, epsilon=private.epsilon, delta=private.delta)
    return ledger.account(source.name, label=label)


def _sources(config: Any) -> tuple[data.Source | None, data.Source, data.Source]:
    """(public, private, test) examples; which is which does not depend on the records."""
    if config.source == "bundled":
        public, private, test = data.bundled_parts(config).values()
        return public, private, test
    if config.source != "tfds":
        raise ValueError(f"config.data.source must be 'bundled' or 'tfds', got {config.source!r}.")
    where = {"private_split": config.name, "test_split": config.name} | (
        {"public_split": config.public_name} if config.public_name else {}
    )
    data_dir = config.data_dir or None
    data.check_disjoint({f"config.data.{part}": (name, config[part], data_dir) for part, name in where.items()})
    read = functools.partial(data.from_tfds, data_dir=data_dir)
    pretrain = read(config.public_name, config.public_split) if config.public_name else None
    return pretrain, read(config.name, config.private_split), read(config.name, config.test_split)


def _summary(result: Mapping[str, Any]) -> str:
    spent = f"{result['epsilon']:.3f}"
    rows = [{"model": "private", "test accuracy": result["private"], "epsilon": spent}]
    paid = {"no privacy": "inf", "no pre-training": spent}
    rows += [{"model": n, "test accuracy": result[n], "epsilon": e} for n, e in paid.items() if n in result]
    text = format_table(rows)
    text += (
        f"\n\nThe ledger recomputes epsilon = {spent} at delta = {result['delta']:g} for {result['dataset']}"
        " (adding or removing one example)."
    )
    if len(rows) > 1:
        text += (
            "\nThe other models are references. They used the private examples too: publishing them would cost their"
            "\nown epsilon on top. Set --config.references=False where the data is really private."
        )
    return text
