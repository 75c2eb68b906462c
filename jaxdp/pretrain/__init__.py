"""Pre-training on public data so that the noise of private fine-tuning hurts less."""

from jaxdp.models.robustness import ParameterRobustness, parameter_robustness, robust_accuracy
from jaxdp.pretrain.batches import Batches
from jaxdp.pretrain.dpadapter import METHODS, SharpnessState, SharpnessTrainer, amp, dpadapter, sam
from jaxdp.pretrain.loop import RunOptions, fit
from jaxdp.pretrain.progress import Stable, Target
from jaxdp.pretrain.theory import (
    CROSS_ENTROPY,
    Constants,
    ParameterChange,
    excess_loss_bound,
    loss_constants,
    parameter_change,
)

__all__ = [
    "CROSS_ENTROPY",
    "METHODS",
    "Batches",
    "Constants",
    "ParameterChange",
    "ParameterRobustness",
    "RunOptions",
    "SharpnessState",
    "SharpnessTrainer",
    "Stable",
    "Target",
    "amp",
    "dpadapter",
    "excess_loss_bound",
    "fit",
    "loss_constants",
    "parameter_change",
    "parameter_robustness",
    "robust_accuracy",
    "sam",
]
