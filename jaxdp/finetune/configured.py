"""The trainer that the `private` part of an experiment's config describes.

Its fields, beside those of `fit`:

    method          "dp_sgd", "adp_alloc", "adp_clip" or "gep"
    method_options  what each of them takes beyond `dp_sgd`, by its name
    epsilon, delta, accountant   the target, and "auto" (PLD) or "rdp"
    batch_size, physical_batch_size, steps
    clip_norm, learning_rate, momentum, schedule ("constant" or "cosine")
    augmult         augmented views per example; 0 does not augment
    ema_decay, ascent_radius     0 for none
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxdp.data import PoissonSampler, Source
from jaxdp.finetune.adp_alloc import SCHEDULES, NoiseSchedule, adp_alloc, calibrate_schedule
from jaxdp.finetune.adp_clip import adp_clip
from jaxdp.finetune.dp_sgd import dp_sgd
from jaxdp.finetune.gep import gep
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import GaussianDpEvent, SelfComposedDpEvent, calibrate_noise

METHODS: Mapping[str, Callable[..., PrivateTrainer]] = {
    "dp_sgd": dp_sgd,
    "adp_alloc": adp_alloc,
    "adp_clip": adp_clip,
    "gep": gep,
}


def configured_trainer(
    private: Any,
    loss_fn: Callable[..., Any],
    num_examples: int,
    *,
    augment: Callable[[jax.Array, Any], Any] | None,
    public: Source | None,
    num_classes: int,
) -> PrivateTrainer:
    """The trainer with the smallest noise with which all steps cost at most the target epsilon.

    Args:
      private: see above.
      loss_fn: of one example.
      num_examples: of the private data; public.
      augment: of one example; used if the config asks for it.
      public: PUBLIC examples, from which GEP takes its anchors, with random labels.
      num_classes: of the private data; what random labels are drawn from.

    Raises:
      ValueError: the config is inconsistent.
    """
    if private.method not in METHODS:
        raise ValueError(f"config.private.method must be one of {sorted(METHODS)}, got {private.method!r}.")
    options = dict(private.method_options.get(private.method, {}))
    sampler = PoissonSampler(num_examples, private.batch_size / num_examples)
    target = {"epsilon": private.epsilon, "delta": private.delta, "method": private.accountant}
    if private.method == "adp_alloc":
        options["schedule"] = _noise_schedule(options["schedule"])
        noise_multiplier = calibrate_schedule(options["schedule"], sampler, steps=private.steps, **target)
    else:
        noise_multiplier = calibrate_noise(
            lambda z: SelfComposedDpEvent(sampler.event(GaussianDpEvent(z)), private.steps), **target
        )
    if private.method == "gep":
        options["anchors"] = _anchors(public, options["anchors"], num_classes)
    rates = {
        "constant": optax.constant_schedule(private.learning_rate),
        "cosine": optax.cosine_decay_schedule(private.learning_rate, private.steps),
    }
    if private.schedule not in rates:
        raise ValueError(f"config.private.schedule must be one of {sorted(rates)}, got {private.schedule!r}.")
    return METHODS[private.method](
        loss_fn,
        optax.sgd(rates[private.schedule], momentum=private.momentum or None),
        sampler=sampler,
        clip_norm=private.clip_norm,
        noise_multiplier=noise_multiplier,
        physical_batch_size=private.physical_batch_size,
        augment=augment if private.augmult else None,
        augmult=private.augmult or 1,
        ema_decay=private.ema_decay or None,
        ascent_radius=private.ascent_radius,
        **options,
    )


def _noise_schedule(config: Any) -> NoiseSchedule:
    if config.kind not in SCHEDULES:
        raise ValueError(f"the kind of AdpAlloc's schedule must be one of {sorted(SCHEDULES)}, got {config.kind!r}.")
    return SCHEDULES[config.kind](**dict(config[config.kind]))


def _anchors(public: Source | None, count: int, num_classes: int) -> dict[str, np.ndarray]:
    """The first public images, with labels drawn from the private data's classes as in Yu et al. 2021."""
    if public is None:
        raise ValueError("config.private.method='gep' needs public examples as anchors; name some in config.data.")
    if not 1 <= count <= len(public):
        raise ValueError(f"gep's anchors must be in 1..{len(public)}, the number of public examples, got {count}.")
    examples = public.gather(np.arange(count))
    return {**examples, "label": np.random.default_rng(0).integers(num_classes, size=count, dtype=np.int32)}
