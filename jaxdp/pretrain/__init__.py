"""Pre-training on public data so that the noise of private fine-tuning hurts less."""

from jaxdp.pretrain.dpadapter import SharpnessState, SharpnessTrainer, amp, dpadapter, sam

__all__ = [
    "SharpnessState",
    "SharpnessTrainer",
    "amp",
    "dpadapter",
    "sam",
]
