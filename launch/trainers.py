"""The trainer that the `private` part of a config describes, for all studies that fine-tune."""

from typing import Any

import numpy as np
import optax

from jaxdp import finetune
from jaxdp.data import Examples, PoissonSampler, augmentation
from jaxdp.models import Pretrained

from . import data, frame, models, settings

Params = Any


def make(
    config: Any, network: Pretrained, private: Examples, public: Examples | None, images: Any, *, part: str = "private"
) -> Any:
    """Returns the trainer with the smallest noise at which all steps cost at most the target epsilon.

    Args:
      config: The `private` part of a study's config:
        method, method_options       a key of `jaxdp.finetune.METHODS`, and its arguments beyond `dp_sgd`, by its name
        epsilon, delta, accountant   the target, and "auto" (PLD) or "rdp"
        batch_size, physical_batch_size, steps
        clip_norm, learning_rate, momentum, schedule ("constant" or "cosine")
        augmult                      augmented views per example; 0 does not augment
        ema_decay, ascent_radius     0 for none
      network: The network to train.
      private: The private images.
      public: PUBLIC images, from which GEP takes its anchors.
      images: The `data` part of the study's config, for the augmentation and the adjacency.
      part: The name of the part in the study's config, for errors.

    Raises:
      ValueError: The config is inconsistent.
    """
    frame.known(f"{part}.method", [config.method], finetune.METHODS)
    options = dict(config.method_options.get(config.method, {}))
    if config.batch_size > len(private):
        raise ValueError(
            f"config.{part}.batch_size must be at most {len(private)}, the number of private examples, got "
            f"{config.batch_size}."
        )
    sampler = PoissonSampler(len(private), config.batch_size / len(private))
    if config.method == "adp_alloc":
        frame.known(f"{part}.method_options.adp_alloc.schedule.kind", [options["schedule"].kind], finetune.SCHEDULES)
        kind = options["schedule"].kind
        options["schedule"] = finetune.SCHEDULES[kind](**dict(options["schedule"][kind]))
    if config.method == "gep":
        options["anchors"] = _anchors(public, options["anchors"], private.num_classes, part)
    rates = {
        "constant": optax.constant_schedule(config.learning_rate),
        "cosine": optax.cosine_decay_schedule(config.learning_rate, config.steps),
    }
    frame.known(f"{part}.schedule", [config.schedule], rates)
    mine = f"{part}.method_options.{config.method}"
    with settings.named(mine, options), settings.named(part, config, method=f"{part}.accountant"):
        return finetune.METHODS[config.method](
            models.loss(network),
            optax.sgd(rates[config.schedule], momentum=config.momentum or None),
            sampler=sampler,
            clip_norm=config.clip_norm,
            clip_rule=config.get("clip_rule", "global"),
            **{name: config[name] for name in ("epsilon", "delta", "steps", "accountant")},
            adjacency=data.terms(images)["adjacency"],
            physical_batch_size=config.physical_batch_size,
            augment=augmentation(images) if config.augmult else None,
            augmult=config.augmult or 1,
            ema_decay=config.ema_decay or None,
            ascent_radius=config.ascent_radius,
            **options,
        )


def _anchors(public: Examples | None, count: int, num_classes: int, part: str) -> dict[str, np.ndarray]:
    """Returns the first public images, with labels drawn from the private data's classes as in Yu et al. 2021."""
    if public is None:
        raise ValueError(
            f"config.{part}.method='gep' needs public examples as anchors. Name some in config.data.parts."
        )
    if not 1 <= count <= len(public):
        raise ValueError(
            f"config.{part}.method_options.gep.anchors must be in 1..{len(public)}, the number of public examples, got "
            f"{count}."
        )
    examples = public.gather(np.arange(count))
    return {**examples, "label": np.random.default_rng(0).integers(num_classes, size=count, dtype=np.int32)}


def released(state: finetune.TrainState) -> Params:
    """Returns the parameters that a run publishes: their moving average, if one is kept."""
    return state.params if state.ema is None else state.ema
