"""The public model of an experiment: read from a checkpoint, or trained once on public images and kept."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.data import Source, augment
from jaxdp.models.checkpoints import Pretrained, load_checkpoint
from jaxdp.models.preprocessing import Preprocessing
from jaxdp.models.pretrained import load_params, save_params
from jaxdp.models.registry import create
from jaxdp.models.training import train_without_privacy
from jaxdp.transforms import losses


def public_model(config: Any) -> Pretrained:
    """The model that the `model` part of an experiment's config names.

    Args:
      config: an `ml_collections.ConfigDict` with
        name, num_classes, options  as in `create`
        checkpoint, naming          as in `load_checkpoint`; "" is a model that is still to be trained
        preprocessing               fields of a `Preprocessing`; needed without a checkpoint

    Returns:
      The model, without parameters if there is no checkpoint: `trained` gives it some.

    Raises:
      ValueError: the parts do not fit.
      FileNotFoundError: there is no such checkpoint.
    """
    model = create(config.name, num_classes=config.num_classes, **dict(config.options))
    preprocessing = Preprocessing(**config.preprocessing) if config.preprocessing else None
    if config.checkpoint:
        return load_checkpoint(config.checkpoint, model=model, naming=config.naming, preprocessing=preprocessing)
    if preprocessing is None:
        raise ValueError(
            "config.model.preprocessing must be given to train a source model, for example a size and mean."
        )
    return Pretrained(model, {}, preprocessing)


def trained(untrained: Pretrained, images: Source, config: Any, path: pathlib.Path) -> Pretrained:
    """The model with parameters from `path`, where they are put after training if they are not there yet.

    Args:
      untrained: of `public_model`.
      images: PUBLIC images to train on.
      config: an `ml_collections.ConfigDict` with steps, batch_size, learning_rate (of AdamW, decaying as a cosine),
        crop_padding (of random crops and flips; 0 for neither) and init_seed.
      path: a .safetensors file.
    """
    if not path.exists():
        side, channels = untrained.preprocessing.size, len(untrained.preprocessing.mean)
        fresh = untrained.model.init(jax.random.key(config.init_seed), jnp.zeros((1, side, side, channels)))
        params = train_without_privacy(
            lambda p, x: losses.softmax_cross_entropy(untrained.apply_fn(p, x["image"][None])[0], x["label"]),
            fresh["params"],
            images,
            optax.adamw(optax.cosine_decay_schedule(config.learning_rate, config.steps)),
            steps=config.steps,
            batch_size=config.batch_size,
            seed=config.init_seed.to_bytes(16, "little"),
            augment=functools.partial(_augment, config.crop_padding) if config.crop_padding else None,
            label="source model",
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        save_params(path, params)
    return dataclasses.replace(untrained, params=load_params(path))


def _augment(padding: int, key: jax.Array, example: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {**example, "image": augment(key, example["image"], padding=padding)}
