"""Fine-tuning on private data."""

from jaxdp.finetune.dp_sgd import PrivateTrainer, TrainState, dp_sgd
from jaxdp.finetune.evaluate import accuracy, charged_accuracy
from jaxdp.finetune.experiment import run
from jaxdp.finetune.loop import fit
from jaxdp.models.training import train_without_privacy

__all__ = [
    "PrivateTrainer",
    "TrainState",
    "accuracy",
    "charged_accuracy",
    "dp_sgd",
    "fit",
    "run",
    "train_without_privacy",
]
