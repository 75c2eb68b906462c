"""The networks of a life: the public backbone, and the fine-tuned model."""

from typing import Any

from jaxdp.models import Pretrained, load_params

from .. import models
from .stage import Job

Params = Any


def network(config: Any, num_classes: int) -> Pretrained:
    """Returns the network of the config, for a number of classes."""
    return models.network(config.model, num_classes)


def backbone(job: Job) -> tuple[Pretrained, Params]:
    """Returns the network for the public classes, with the parameters of pre-training."""
    path = job.before["pretrain"].folder / "backbone.safetensors"
    return network(job.config, job.data.public.num_classes), load_params(path)


def tuned(job: Job) -> tuple[Pretrained, Params]:
    """Returns the network for the private classes, with the parameters of fine-tuning."""
    path = job.before["finetune"].folder / "model.safetensors"
    return network(job.config, job.data.private.num_classes), load_params(path)
