"""Pre-training on public data so that the noise of private fine-tuning hurts less."""

from jaxdp.models.robustness import ParameterRobustness, parameter_robustness, robust_accuracy
from jaxdp.pretrain.batches import Batches
from jaxdp.pretrain.dpadapter import METHODS, SharpnessState, SharpnessTrainer, amp, dpadapter, sam
from jaxdp.pretrain.loop import RunOptions, fit
from jaxdp.pretrain.progress import Stable, Target

__all__ = [
    "METHODS",
    "Batches",
    "ParameterRobustness",
    "RunOptions",
    "SharpnessState",
    "SharpnessTrainer",
    "Stable",
    "Target",
    "amp",
    "dpadapter",
    "fit",
    "parameter_robustness",
    "robust_accuracy",
    "sam",
]
