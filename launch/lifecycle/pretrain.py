"""The stage of pre-training: a backbone from public images. It spends nothing."""

from collections.abc import Iterator
from typing import Any

import jax
import optax

from jaxdp import pretrain
from jaxdp.data import augmentation
from jaxdp.models import save_params

from .. import models, plans
from .networks import Params, network
from .parts import Parts
from .stage import CURVE, Job, Stage

_STDS = [0.0, 0.1, 0.2, 0.3, 0.5]  # of noise on parameters, over the root mean square of a tensor


def train(job: Job) -> dict[str, Any]:
    """Trains a backbone on public images so that noise on its parameters hurts less."""
    options = job.config.pretrain
    public = job.data.public
    model = network(job.config, public.num_classes)
    loss = models.loss(model)

    def batch_loss(params: Params, batch: Any) -> jax.Array:
        return jax.vmap(loss, in_axes=(None, 0))(params, batch).mean()

    schedule = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = optax.sgd(schedule, momentum=0.9)
    trainer = pretrain.dpadapter(batch_loss, optimizer, gamma=options.gamma)
    with job.watching() as writers:
        state = pretrain.fit(
            trainer,
            models.fresh(model, options.seed),
            public,
            steps=options.steps,
            perturbation_batch_size=options.perturbation_batch_size,
            update_batch_size=options.batch_size,
            seed=options.seed.to_bytes(16, "little"),
            augment=augmentation(job.config.augmentation),
            workdir=job.folder,
            checkpoint_every=options.checkpoint_every,
            callbacks=writers,
        )
    save_params(job.folder / "backbone.safetensors", state.params)

    # If the test images have other classes, the accuracy is measured on the public images.
    has_same_classes = job.data.test.num_classes == public.num_classes
    judge = job.data.test if has_same_classes else public
    of_draws = pretrain.robust_accuracy(
        model.apply_fn, state.params, judge, std=_STDS, draws=5, relative=True
    )
    accuracies = of_draws.mean(1)
    return {
        "images": len(public),
        "accuracy": float(accuracies[0]),
        "tested": len(judge),
        "judged_on_test": has_same_classes,
        "noise": list(zip(_STDS, accuracies.tolist(), strict=True)),
    }


def _plan(config: Any, parts: Parts) -> Iterator[plans.Item]:
    model = network(config, parts.public.num_classes)
    loss = models.loss(model)
    start = models.fresh(model, config.pretrain.seed)
    yield plans.public_training("pretrain", loss, start, parts.public, config.pretrain)


STAGES = (
    Stage(
        "pretrain",
        train,
        data=("public", "test"),
        config=("model", "augmentation", "pretrain"),
        plan=_plan,
        shape={
            "images": int,
            "accuracy": float,
            "tested": int,
            "judged_on_test": bool,
            "noise": CURVE,
        },
        released={"backbone.safetensors": "public backbone"},
        title="Pre-training on public images",
        page="life_pretrain.html.jinja",
    ),
)
