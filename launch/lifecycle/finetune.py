"""The stage of fine-tuning: a model from the private training set, and the attack on one step."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxdp import finetune, privacy
from jaxdp.audit import finetune as canaries
from jaxdp.data import Groups, Source, by_group, from_arrays, take
from jaxdp.models import Pretrained, merge_pretrained, save_params

from .. import data, frame, models, plans, results, trainers
from .networks import Params, backbone, network, tuned
from .parts import Parts
from .stage import (
    CHANGE,
    CONFIDENCE,
    CURVE,
    Accounts,
    Charges,
    Job,
    Stage,
    attack_on,
    audited,
    terms,
)

_CONFIG = ("model", "augmentation", "finetune")


def train(job: Job) -> dict[str, Any]:
    """Trains the backbone on the private training set."""
    options = job.config.finetune
    private, test = job.data.private, job.data.test
    model = network(job.config, private.num_classes)
    start = beginning(job, model)
    trainer = _trainer(job.config, model, job.data)
    account = job.account(private.name)

    def evaluate(params: Params) -> dict[str, float]:
        return {"accuracy": finetune.accuracy(model.apply_fn, params, test)}

    with job.watching() as writers:
        state = finetune.fit(
            trainer,
            start,
            job.data.units,
            steps=options.steps,
            account=account,
            workdir=job.folder,
            checkpoint_every=options.checkpoint_every,
            evaluate=evaluate,
            callbacks=writers,
        )
    params = trainers.released(state)
    save_params(job.folder / "model.safetensors", params)
    before = models.right(model, start, test)
    after = models.right(model, params, test)
    event = trainer.event(0, options.steps)
    first_step = trainer.privatizer.event_at(0)
    return {
        **results.changes(before, after),
        "tested": len(test),
        "epsilon": privacy.epsilon(event, delta=options.delta, adjacency="add_remove"),
        "delta": options.delta,
        "noise_multiplier": float(first_step.noise_multiplier),
        "steps": options.steps,
        "method": options.method,
        "curves": trainers.curves(job.folder),
    }


def beginning(job: Job, model: Pretrained) -> Params:
    """Returns the pre-trained parameters, with a new head if the classes are others."""
    options = job.config.finetune
    public, private = job.data.public, job.data.private
    same_head = public.num_classes == private.num_classes and not options.new_head
    exclude = () if same_head else ("head",)
    _, pretrained = backbone(job)
    return merge_pretrained(models.fresh(model, options.seed), pretrained, exclude=exclude)


def private_account(config: Any) -> Accounts:
    """Returns the terms of the private training set, by its name in the ledger."""
    data.only_adjacency(config.data, "add_remove")
    budget = config.budgets.private
    account = terms(config, "add_remove", budget) | frame.people(config.data)
    return {f"{config.data.name}/private": account}


def _charges(config: Any, parts: Parts) -> Charges:
    model = network(config, parts.private.num_classes)
    trainer = _trainer(config, model, parts)
    return {parts.private.name: trainer.event(0, config.finetune.steps)}


def _trainer(config: Any, model: Pretrained, parts: Parts) -> finetune.PrivateTrainer:
    return trainers.make(
        config.finetune,
        model,
        parts.units,
        parts.public,
        config.augmentation,
        unit=parts.unit,
        part="finetune",
    )


def _plan(config: Any, parts: Parts) -> Iterator[plans.Item]:
    options = config.finetune
    model = network(config, parts.private.num_classes)
    training = plans.training(
        "finetune",
        _trainer(config, model, parts),
        parts.units,
        models.fresh(model, options.seed),
        steps=options.steps,
        every=options.checkpoint_every,
        terms={"delta": options.delta, "unit": parts.unit},
    )
    yield training._replace(event=None)  # is charged with the other stages


def audit(job: Job) -> dict[str, Any]:
    """Attacks a step of the fine-tuning by public images with wrong labels, and the sampling of its
    batches.
    """
    trials = job.config.audit_finetune.trials
    unit = job.data.unit
    model, params = tuned(job)
    trainer = _trainer(job.config, model, job.data)
    step = canaries.audit_step(
        trainer,
        params,
        _mislabelled(job),
        trials=trials,
        delta=job.config.finetune.delta,
        confidence=CONFIDENCE,
    )
    audits = [(step, f"one step of fine-tuning, if the {unit} is in its batch")]
    if getattr(trainer.sampler, "sampling_probability", 1) < 1:
        batches = canaries.audit_sampling(trainer, trials=trials, confidence=CONFIDENCE)
        audits.append((batches, f"which {unit}s are in a batch of fine-tuning"))
    return audited(audits, [job.data.private.name])


def _mislabelled(job: Job) -> Any:
    """Returns public images with the label after their own, as units of privacy."""
    public = job.data.public
    num_classes = job.data.private.num_classes
    count = min(job.config.audit_finetune.candidates, len(public))
    images = public.gather(np.arange(count))
    labels = (images["label"] + 1) % num_classes
    examples: Source = from_arrays(image=images["image"], label=labels, num_classes=num_classes)
    if not isinstance(job.data.units, Groups):
        return examples
    # An owner has as many images as count, all alike.
    most = job.data.units.rows.shape[1]
    owners = np.repeat(np.arange(len(labels)), most)
    return by_group(take(examples, owners), owners, max_records=most)


FINETUNE = Stage(
    "finetune",
    train,
    after=("pretrain",),
    data=("public", "private", "test"),
    config=_CONFIG,
    charges=_charges,
    accounts=private_account,
    plan=_plan,
    shape={
        **dict.fromkeys(("noise_multiplier", "epsilon", "delta"), float),
        **CHANGE,
        "tested": int,
        "steps": int,
        "method": str,
        "curves": {"accuracy": CURVE, "epsilon": CURVE},
    },
    released={"model.safetensors": "fine-tuned model"},
    title="Fine-tuning on private images",
    page="life_finetune.html.jinja",
)
AUDIT = attack_on(FINETUNE, audit, data=("public", "private"), after=("finetune",))
STAGES = (FINETUNE, AUDIT)
