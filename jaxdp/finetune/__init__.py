"""Fine-tuning on private data."""

from collections.abc import Callable, Mapping

from jaxdp.finetune.adam_bc import dp_adam_bc
from jaxdp.finetune.adp_alloc import (
    SCHEDULES,
    adp_alloc,
    calibrate_schedule,
    constant_noise,
    exponential_noise,
    polynomial_noise,
    step_noise,
    time_based_noise,
)
from jaxdp.finetune.adp_clip import adp_clip
from jaxdp.finetune.dp_sgd import dp_sgd
from jaxdp.finetune.evaluate import Tally, accuracy, charged_accuracy, tally
from jaxdp.finetune.gep import gep
from jaxdp.finetune.loop import RunOptions, fit
from jaxdp.finetune.options import event
from jaxdp.finetune.random_round import random_round
from jaxdp.finetune.scaler import Scaler, charged_scaler
from jaxdp.finetune.step import TrainState
from jaxdp.finetune.strategies import STRATEGIES, CorrelatedPlan, optimal_noise, plan_correlated
from jaxdp.finetune.trainer import PrivateTrainer

# The methods by name. Each takes the arguments of `dp_sgd` and its own options.
METHODS: Mapping[str, Callable[..., PrivateTrainer]] = {
    "dp_sgd": dp_sgd,
    "adp_alloc": adp_alloc,
    "adp_clip": adp_clip,
    "gep": gep,
}

__all__ = [
    "METHODS",
    "SCHEDULES",
    "STRATEGIES",
    "CorrelatedPlan",
    "PrivateTrainer",
    "RunOptions",
    "Scaler",
    "Tally",
    "TrainState",
    "accuracy",
    "adp_alloc",
    "adp_clip",
    "calibrate_schedule",
    "charged_accuracy",
    "charged_scaler",
    "constant_noise",
    "dp_adam_bc",
    "dp_sgd",
    "event",
    "exponential_noise",
    "fit",
    "gep",
    "optimal_noise",
    "plan_correlated",
    "polynomial_noise",
    "random_round",
    "step_noise",
    "tally",
    "time_based_noise",
]
