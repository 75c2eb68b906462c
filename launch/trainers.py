"""The trainer that the `private` part of a config describes, for all studies that fine-tune."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp import finetune, split_clip_norm
from jaxdp.data import (
    BallsInBinsSampler,
    BMinSepSampler,
    CyclicPoissonSampler,
    FixedOrderSampler,
    Groups,
    Owners,
    PoissonSampler,
    augmentation,
)
from jaxdp.data.physical import Sampler
from jaxdp.finetune.adp_alloc import schedule_event
from jaxdp.models import Pretrained
from jaxdp.privacy import Account, DpEvent, GaussianDpEvent
from jaxdp.report import Callback, read_metrics

from . import frame, models, settings
from .optimizers import optimizer

Params = Any


def make(
    config: Any,
    network: Pretrained,
    private: Any,
    public: Any,
    images: Any,
    *,
    unit: str,
    part: str = "private",
    **options: Any,
) -> Any:
    """Returns the trainer with the smallest noise at which all steps cost at most the target
    epsilon.

    Args:
      config: The `private` part of a study's config:
        method, method_options       a key of `jaxdp.finetune.METHODS`, and its arguments beyond
                                     `dp_sgd`, by its name
        epsilon, delta, accountant   the target, and "auto" (PLD) or "rdp"
        noise_multiplier             above 0 the noise, in place of the target; 0 or no field
                                     calibrates it
        batch_size, steps
        random_round                 {"seed": S} draws the number of steps in 1..steps; no field
                                     takes all
        truncated_batch_size         the largest batch, with its own event; 0 or no field truncates
                                     none
        participation                {"kind": "cyclic_poisson", "separation": b}: who takes part in
                                     which step (`jaxdp.data.participation`); also "balls_in_bins"
                                     and "b_min_sep"; no field is Poisson sampling
        physical_batch_size          the number of examples per compiled call; 0 lets the library
                                     choose
        clip_norm
        clip_parts                   "uniform" or "dimension" divide clip_norm over trained leaves
                                     (`jaxdp.split_clip_norm`); "" or no field clips them together;
                                     or norms by the regular expressions of paths in place of
                                     clip_norm: "head/.*=1.0 body/.*=0.1"
        learning_rate, schedule, optimizer, optimizer_options, weight_decay  see
                                     `launch/optimizers.py`
        augmult                      augmented views per example; 0 does not augment
        ema_decay, ascent_radius     0 for none
        allow_nonfinite              True starts although more than a tenth of the first examples
                                     have no finite gradient; no field is False
        noise                        {"strategy": a key of `jaxdp.finetune.STRATEGIES`, "bands": N}
                                     correlates the noise of dp_sgd, on batches of `participation`
                                     or, without that, in a fixed order; 0 bands are chosen; no
                                     field, or "" as strategy, is independent noise
        scaler_noise_multiplier      of tables: above 0, the target also pays a `charged_scaler` of
                                     the columns with public ranges; 0 or no field has none
        exact                        True sums and draws noise by integers (dp_sgd); no field is
                                     False
      network: The network to train.
      private: The private images, or `Groups` or `Owners` of them.
      public: PUBLIC images, from which GEP takes its anchors.
      images: The `DataSpec` of the private images, for the augmentation and the adjacency. A
        lifecycle gives its part `augmentation`. It proves its training for "add_remove" only.
      unit: The unit of privacy in the ledger.
      part: The name of the part in the study's config, for errors.
      **options: `trainable` and `mesh` of `jaxdp.finetune.dp_sgd`. The axis of the mesh is "data".

    Raises:
      ValueError: The config is inconsistent.
    """
    frame.known(f"{part}.method", [config.method], finetune.METHODS)
    method_options = _method_options(config, private, public, part)
    sampler = sampler_of(config, private, part)
    if _strategy(config):
        method_options["noise"] = _noise(config, sampler, part)
    method = finetune.METHODS[config.method]
    adjacency = getattr(images, "adjacency", "add_remove")
    with (
        settings.named(f"{part}.method_options.{config.method}", method_options),
        settings.named(
            part, config, method=f"{part}.accountant", strategy=f"{part}.noise.strategy"
        ),
    ):
        augment = augmentation(images) if config.augmult else None
        clip_norm = _clip_norm(config, network.params, options.get("trainable"), part)
        return method(
            models.loss(network),
            optimizer(config, part, steps=steps(config)),
            sampler=sampler,
            clip_norm=clip_norm,
            clip_rule=config.get("clip_rule", "global"),
            exact=config.get("exact", False),
            physical_batch_size=config.physical_batch_size or None,
            augment=augment,
            augmult=config.augmult or 1,
            ema_decay=config.ema_decay or None,
            ascent_radius=config.ascent_radius,
            group=isinstance(private, Groups),
            unit=unit,
            **_target(config, adjacency),
            **options,
            **method_options,
        )


def _target(config: Any, adjacency: str) -> dict[str, Any]:
    """Returns the noise of a trainer, or what it is calibrated for."""
    if config.get("noise_multiplier", 0.0):
        return {"noise_multiplier": config.noise_multiplier}
    return {
        "epsilon": config.epsilon,
        "delta": config.delta,
        "steps": steps(config),
        "accountant": config.accountant,
        "besides": scaler_event(config),
        "adjacency": adjacency,
    }


def scaler_event(config: Any) -> DpEvent | None:
    """Returns the event of the charged scaler of the `private` part of a config, or None."""
    noise_multiplier = config.get("scaler_noise_multiplier", 0.0)
    if noise_multiplier < 0:
        raise ValueError(
            "config.private.scaler_noise_multiplier must be 0, for no scaler, or positive, got "
            f"{noise_multiplier}."
        )
    return GaussianDpEvent(noise_multiplier) if noise_multiplier else None


def steps(config: Any) -> int:
    """Returns the number of steps of the `private` part of a config."""
    if "random_round" not in config:
        return config.steps
    seed = config.random_round.seed.to_bytes(16, "little")
    return finetune.random_round(config.steps, seed=seed)


def _strategy(config: Any) -> str:
    """Returns the strategy of correlated noise, or "" for independent noise."""
    return config.noise.strategy if "noise" in config else ""


def _noise(config: Any, sampler: Any, part: str) -> Any:
    """Returns the correlated noise of a config."""
    if config.method != "dp_sgd":
        raise ValueError(
            f"config.{part}.noise correlates the noise of method 'dp_sgd' only, got "
            f"{config.method!r}. Set config.{part}.noise.strategy=''."
        )
    strategy = _strategy(config)
    frame.known(f"{part}.noise.strategy", [strategy], finetune.STRATEGIES)
    bands = config.noise.bands or None
    return finetune.optimal_noise(sampler, steps=steps(config), strategy=strategy, bands=bands)


def event_of(config: Any, sampler: Any, part: str) -> Callable[[float], DpEvent]:
    """Returns the event of all steps as a function of the noise multiplier, before there is a
    trainer.

    Args:
      config, part: As in `make`. The multiplier of a schedule is its first one.
      sampler: Of `sampler_of`.
    """
    if _strategy(config):
        correlated = _noise(config, sampler, part)
        return lambda noise: finetune.event(noise, sampler, steps(config), correlated)
    if config.method == "adp_alloc":
        schedule = _schedule(config, part)
        return lambda noise: schedule_event(schedule, noise, sampler, steps(config))
    return lambda noise: finetune.event(noise, sampler, steps(config))


def sampler_of(config: Any, private: Any, part: str) -> Sampler:
    """Returns the sampler of the `private` part of a config for the private records."""
    count = len(private)
    if config.batch_size > count:
        raise ValueError(
            f"config.{part}.batch_size must be at most {count}, the number of private examples, "
            f"got {config.batch_size}."
        )
    share = config.batch_size / count
    truncated_batch_size = config.get("truncated_batch_size") or None
    if _strategy(config) and "participation" not in config:
        if truncated_batch_size:
            raise ValueError(
                f"config.{part}.truncated_batch_size must be 0 with correlated noise in a fixed "
                f"order, whose batches have one size, got {truncated_batch_size}."
            )
        return FixedOrderSampler(count, config.batch_size)
    if "participation" not in config:
        records_per_owner = private.max_records if isinstance(private, Owners) else None
        return PoissonSampler(
            count,
            share,
            truncated_batch_size=truncated_batch_size,
            records_per_owner=records_per_owner,
        )
    pattern = config.participation
    frame.known(f"{part}.participation.kind", [pattern.kind], _PATTERNS)
    separation = pattern.separation
    if separation < 1 or share * separation > 1:
        raise ValueError(
            f"config.{part}.participation needs a separation from 1 to "
            f"{count // config.batch_size}, the batches of an epoch, got separation={separation}. "
            "Nobody can take part more often than once in so many steps."
        )
    sampler = _PATTERNS[pattern.kind](count, share, separation, steps(config))
    if not truncated_batch_size:
        return sampler
    if isinstance(sampler, CyclicPoissonSampler):
        raise ValueError(
            f"config.{part}.truncated_batch_size must be 0 with cyclic Poisson sampling, got "
            f"{truncated_batch_size}. Its steps compose one by one, and no event of theirs has a "
            "truncation. Use balls_in_bins or b_min_sep."
        )
    return dataclasses.replace(sampler, truncated_batch_size=truncated_batch_size)


def _cyclic_poisson(count: int, share: float, separation: int, steps: int) -> Sampler:
    in_turn = min(1.0, share * separation)
    return CyclicPoissonSampler(count, in_turn, cycle_length=separation)


def _balls_in_bins(count: int, share: float, separation: int, steps: int) -> Sampler:
    batches = round(1 / share)
    if batches != separation:
        raise ValueError(
            f"separation of balls in bins must be {batches}, the batches of an epoch, got "
            f"{separation}. Every bin is a batch."
        )
    return BallsInBinsSampler(num_examples=count, bins=separation, steps=steps)


def _b_min_sep(count: int, share: float, separation: int, steps: int) -> Sampler:
    # The p whose batches have the expected size: share = p / (1 + (b - 1) p).
    p = min(1.0, share / (1 - (separation - 1) * share))
    return BMinSepSampler(
        num_examples=count, sampling_probability=p, separation=separation, steps=steps
    )


_PATTERNS = {
    "cyclic_poisson": _cyclic_poisson,
    "balls_in_bins": _balls_in_bins,
    "b_min_sep": _b_min_sep,
}


def _clip_norm(config: Any, params: Params, trainable: Any, part: str) -> Any:
    """Returns the clip norm, or those of parts."""
    text = config.get("clip_parts", "")
    if not text:
        return config.clip_norm
    if text in ("uniform", "dimension"):
        return split_clip_norm(params, config.clip_norm, by=text, trainable=trainable)
    norms = {}
    for entry in text.split():
        pattern, _, norm = entry.rpartition("=")
        try:
            norms[pattern] = float(norm)
        except ValueError:
            pattern = ""
        if not pattern:
            raise ValueError(
                f"config.{part}.clip_parts must be 'uniform', 'dimension' or norms by paths such "
                f"as 'head/.*=1.0 body/.*=0.1', got {text!r}."
            )
    return norms


def _method_options(config: Any, private: Any, public: Any, part: str) -> dict[str, Any]:
    """Returns the arguments of the method beyond those of `dp_sgd`, as objects of the library."""
    options = dict(config.method_options.get(config.method, {}))
    if config.method == "adp_alloc":
        options["schedule"] = _schedule(config, part)
    if config.method == "gep":
        options["anchors"] = _anchors(public, options["anchors"], private.num_classes, part)
    return options


def _schedule(config: Any, part: str) -> Any:
    """Returns the schedule of the noise of `adp_alloc`."""
    schedule = config.method_options.adp_alloc.schedule
    field = f"{part}.method_options.adp_alloc.schedule.kind"
    frame.known(field, [schedule.kind], finetune.SCHEDULES)
    return finetune.SCHEDULES[schedule.kind](**dict(schedule[schedule.kind]))


def _anchors(public: Any, count: int, num_classes: int, part: str) -> dict[str, np.ndarray]:
    """Returns the first public images, with labels drawn from the private data's classes as in Yu
    et al. 2021.
    """
    if public is None:
        raise ValueError(
            f"config.{part}.method='gep' needs public examples as anchors. Name some in "
            "config.data.parts."
        )
    if not 1 <= count <= len(public):
        raise ValueError(
            f"config.{part}.method_options.gep.anchors must be in 1..{len(public)}, the number of "
            f"public examples, got {count}."
        )
    examples = public.gather(np.arange(count))
    draw = np.random.default_rng(0)
    labels = draw.integers(num_classes, size=count, dtype=np.int32)
    return {**examples, "label": labels}


def fit(
    trainer: Any,
    start: Params,
    source: Any,
    private: Any,
    account: Account,
    scratch: pathlib.Path,
    callbacks: Sequence[Callback] = (),
) -> tuple[Params, dict[str, Any]]:
    """Trains one of many private models, without a bar. Returns its published parameters and its
    cost, for a row.

    Args:
      trainer, start, source, account, callbacks: As in `jaxdp.finetune.fit`.
      private: Has steps, checkpoint_every and delta, and may have allow_nonfinite.
      scratch: The workdir of the run.
    """
    state = finetune.fit(
        trainer,
        start,
        source,
        account=account,
        workdir=scratch,
        callbacks=callbacks,
        progress=False,
        **fit_options(private),
    )
    cost = {
        "epsilon_spent": account.epsilon(delta=private.delta),
        "noise_multiplier": float(trainer.privatizer.multiplier_at(0)),
        "steps": steps(private),
    }
    return released(state), cost


def fit_options(private: Any) -> dict[str, Any]:
    """Returns the options of `jaxdp.finetune.fit` in the `private` part of a config."""
    return {
        "steps": steps(private),
        "checkpoint_every": private.checkpoint_every,
        "evaluate_every": private.get("evaluate_every") or None,
        "allow_nonfinite": private.get("allow_nonfinite", False),
    }


def released(state: finetune.TrainState) -> Params:
    """Returns the parameters that a run publishes: their moving average, if one is kept."""
    return state.params if state.ema is None else state.ema


def curves(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """Returns (step, value) pairs of the accuracy and epsilon of a run in a folder, for the
    report.
    """
    curves: dict[str, list[tuple[int, float]]] = {"accuracy": [], "epsilon": []}
    for row in read_metrics(folder / "metrics.jsonl"):
        for name, points in curves.items():
            if name in row:
                points.append((row["step"], row[name]))
    return curves
