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
from jaxdp.finetune.procedures import Procedure
from jaxdp.finetune.random_round import random_round
from jaxdp.finetune.random_runs import RandomRuns
from jaxdp.finetune.scaler import Scaler, charged_scaler
from jaxdp.finetune.scores import ChargedScore, PublicScore
from jaxdp.finetune.sla_clip import sla_clip
from jaxdp.finetune.step import TrainState
from jaxdp.finetune.strategies import STRATEGIES, CorrelatedPlan, optimal_noise, plan_correlated
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.finetune.tune import Tuned, tune, with_hyperparams

# The methods by name. Each takes the arguments of `dp_sgd` and its own options.
METHODS: Mapping[str, Callable[..., PrivateTrainer]] = {
    "dp_sgd": dp_sgd,
    "adp_alloc": adp_alloc,
    "adp_clip": adp_clip,
    "gep": gep,
    "sla_clip": sla_clip,
}

__all__ = [
    "METHODS",
    "SCHEDULES",
    "STRATEGIES",
    "ChargedScore",
    "CorrelatedPlan",
    "PrivateTrainer",
    "Procedure",
    "PublicScore",
    "RandomRuns",
    "RunOptions",
    "Scaler",
    "Tally",
    "TrainState",
    "Tuned",
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
    "sla_clip",
    "step_noise",
    "tally",
    "time_based_noise",
    "tune",
    "with_hyperparams",
]
