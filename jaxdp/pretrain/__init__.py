"""Pre-training on public data so that the noise of private fine-tuning hurts less."""

from jaxdp.models.robustness import ParameterRobustness, parameter_robustness, robust_accuracy
from jaxdp.pretrain.dpadapter import SharpnessState, SharpnessTrainer, amp, dpadapter, sam
from jaxdp.pretrain.experiment import run
from jaxdp.pretrain.loop import fit

__all__ = [
    "ParameterRobustness",
    "SharpnessState",
    "SharpnessTrainer",
    "amp",
    "dpadapter",
    "fit",
    "parameter_robustness",
    "robust_accuracy",
    "run",
    "sam",
]
