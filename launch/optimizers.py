"""The optimizer that a part of a config describes, for private and for public training."""

import inspect
from typing import Any

import optax

from . import frame


def optimizer(
    config: Any, part: str = "private", *, steps: int | None = None
) -> optax.GradientTransformation:
    """Returns the optimizer of a part of a study's config.

    Args:
      config: Has steps, learning_rate and

        optimizer, optimizer_options  the name of a function of optax with a `learning_rate`, and
                                      its arguments by name
        weight_decay                  of the function, or added to the gradient where the function
                                      has none
        schedule                      "constant", "cosine", "linear" to zero, "warmup", which
                                      rises for a tenth of the steps and falls as a cosine, or
                                      "step", which falls to a tenth after a half and after three
                                      quarters of the steps (He et al. 2016, section 4.2)
      part: The name of the part, for errors.
      steps: The number of steps, by default `config.steps`.

    Raises:
      ValueError: There is no such optimizer or schedule, or the optimizer lacks an argument.
    """
    rate = config.learning_rate
    steps = config.steps if steps is None else steps
    rise = max(1, steps // 10)
    falls = {steps // 2: 0.1, 3 * steps // 4: 0.1}
    rates = {
        "constant": optax.constant_schedule(rate),
        "cosine": optax.cosine_decay_schedule(rate, steps),
        "linear": optax.linear_schedule(rate, 0.0, steps),
        "warmup": optax.warmup_cosine_decay_schedule(0.0, rate, rise, max(2, steps)),
        "step": optax.piecewise_constant_schedule(rate, falls),
    }
    frame.known(f"{part}.schedule", [config.schedule], rates)
    schedule = rates[config.schedule]
    name = config.optimizer
    decay = config.weight_decay
    make = getattr(optax, name, None)
    known = inspect.signature(make).parameters if inspect.isfunction(make) else {}
    if make is None or "learning_rate" not in known:
        raise ValueError(
            f"config.{part}.optimizer must be an optimizer of optax, such as 'sgd' or 'adamw', "
            f"got {name!r}."
        )
    options = dict(config.optimizer_options.get(name, {}))
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(
            f"config.{part}.optimizer_options.{name} has {', '.join(unknown)}, which optax.{name} "
            f"lacks. It has {', '.join(known)}."
        )
    if "weight_decay" in known:
        return make(schedule, weight_decay=decay, **options)
    method = make(schedule, **options)
    if not decay:
        return method
    return optax.chain(optax.add_decayed_weights(decay), method)
