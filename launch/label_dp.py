r"""Training on noisy labels: features are public, and labels have a pure epsilon.

    python -m launch.finetune --config configs/finetune/labels.py --workdir workdir/labels

The part `labels` of a config has
  prior           "none" answers with all classes, "public" takes the probabilities of a model of
                  the public examples, "histogram" those of a charged histogram, and "stages" those
                  of a model of the labels that were released before (LP-MST of Ghazi et al. 2021)
  stages          the parts of "stages"
  split_seed      the public seed of their division
  histogram_share the share of epsilon that the histogram costs
  corrected       True trains by forward correction, False on the noisy labels as they are
"""

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import finetune, labels
from jaxdp.data import augmentation
from jaxdp.models import load_params, save_params
from jaxdp.privacy import Account, LabelDpEvent
from jaxdp.report import format_table

from . import data, frame, models, plans, results, tasks

Params = Any
PRIORS = ("none", "public", "histogram", "stages")


class Model(NamedTuple):
    """The only cell."""

    model: str


def _open(config: Any, root: pathlib.Path) -> tasks.Task:
    data.only_adjacency(config.data, "replace_label")
    prior = config.labels.prior
    frame.known("labels.prior", [prior], PRIORS)
    share = config.labels.histogram_share
    if not 0 < share < 1:
        raise ValueError(f"config.labels.histogram_share must be in (0, 1), got {share!r}.")
    task = tasks.open_task(config, root)
    if prior == "public" and task.public is None and not config.pretrain.weights:
        raise ValueError(
            "config.labels.prior='public' needs public examples or config.pretrain.weights. Name "
            "some in config.data.parts, or take 'stages'."
        )
    return task


def _has_start(work: frame.Work) -> bool:
    """Returns whether a public model is there."""
    return work.shared.public is not None or bool(work.config.pretrain.weights)


def _start(work: frame.Work) -> Params:
    """Returns public parameters, or fresh ones without public data."""
    config, task = work.config, work.shared
    if config.pretrain.weights:
        return load_params(config.pretrain.weights)
    start = models.fresh(task.network, config.init_seed)
    if task.public is None:
        return start
    return _trained(work, start, task.public, config.pretrain, "public pre-training")


def _trained(work: frame.Work, start: Params, source: Any, settings: Any, label: str) -> Params:
    config = work.config
    task = work.shared
    augment = augmentation(task.spec) if config.private.augmult else None
    return models.train(
        task.network,
        start,
        source,
        settings,
        seed=config.init_seed,
        augment=augment,
        optimizer=functools.partial(models.adam_on, chosen=task.chosen),
        label=label,
    )


def _on_labels(work: frame.Work, start: Params, noisy: labels.NoisyLabels, label: str) -> Params:
    source = noisy.corrected() if work.config.labels.corrected else noisy
    return _trained(work, start, source, work.config.private, label)


def _beliefs(work: frame.Work, params: Params, records: Any) -> np.ndarray:
    """Returns the probabilities [n, K] of a public model for records."""
    logits = models.logits(work.shared.network, params, records)
    return np.asarray(jax.nn.softmax(logits, axis=1))


def _released(work: frame.Work, start: Params, account: Account) -> labels.NoisyLabels:
    """Pays for the noisy labels."""
    options = work.config.labels
    epsilon = work.config.private.epsilon
    records = work.shared.units
    folder = work.folder(Model("private"))
    release = functools.partial(
        labels.release_labels, records, account=account, workdir=folder / "labels"
    )
    if options.prior == "none":
        return release(epsilon=epsilon)
    if options.prior == "public":
        return release(epsilon=epsilon, prior=_beliefs(work, start, records))
    if options.prior == "histogram":
        cost = options.histogram_share * epsilon
        prior = labels.release_label_prior(
            records, account=account, epsilon=cost, workdir=folder / "histogram"
        )
        return release(epsilon=epsilon - cost, prior=prior)

    def prior_from(noisy: labels.NoisyLabels, part: Any) -> np.ndarray:
        params = _on_labels(work, start, noisy, "a stage")
        return _beliefs(work, params, part)

    first = functools.partial(_beliefs, work, start) if _has_start(work) else None
    return labels.release_labels_in_stages(
        records,
        prior_from,
        account=account,
        epsilon=epsilon,
        stages=options.stages,
        split_seed=options.split_seed,
        prior=first,
        workdir=folder / "labels",
    )


def _account(cell: Model, work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account of the labels."""
    task = work.shared
    return work.account(task.private.name, label="labels", **task.terms(work.config.private))


def _run(cell: Model, work: frame.Work) -> dict[str, Any]:
    task = work.shared
    private = work.config.private
    start = _start(work)
    with _account(cell, work) as account:
        noisy = _released(work, start, account)
        epsilon = account.epsilon(delta=private.delta)
    params = _on_labels(work, start, noisy, "training on noisy labels")
    save_params(work.root / "params.safetensors", task.serving(params))
    accuracy = functools.partial(finetune.accuracy, task.network.apply_fn)
    return {
        "before": accuracy(start, task.test),
        "accuracy": accuracy(params, task.test),
        "answers": float(noisy.response.sizes.mean()),
        "epsilon": epsilon,
    }


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    (row,) = rows
    task = work.shared
    config = work.config
    return {
        **results.only(row, "before", "accuracy", "answers", "epsilon"),
        "delta": config.private.delta,
        "prior": config.labels.prior,
        "corrected": config.labels.corrected,
        "records": len(task.private),
        "tested": len(task.test),
        **task.spec.terms,
        "dataset": task.private.name,
    }


def _summary(result: Mapping[str, Any]) -> str:
    row = {
        "prior": result["prior"],
        "answers to a label": f"{result['answers']:.2f}",
        "before": f"{result['before']:.4f}",
        "test accuracy": f"{result['accuracy']:.4f}",
        "epsilon": f"{result['epsilon']:.3f}",
    }
    return (
        f"{format_table([row])}\n\nEpsilon is for the replacement of the label of one "
        f"{result['unit']} of {result['dataset']}. Features, and who is in the data, are not "
        "protected."
    )


def _plan(config: Any, opened: Callable[[], tasks.Task]) -> Iterator[plans.Item]:
    task = opened()
    event = LabelDpEvent(config.private.epsilon)
    terms = task.terms(config.private)
    yield plans.Item("noisy labels", task.private.name, event, terms)
    records, _ = task.blank()
    start = models.fresh(task.network, config.init_seed)
    loss = models.loss(task.network)
    yield plans.public_training("training on them", loss, start, records, config.private)


STUDY = frame.Study(
    name="label_dp",
    open=_open,
    private=lambda task: [task.private_set],
    account=_account,
    cells=lambda config: [Model("private")],
    run=_run,
    result=_result,
    summary=_summary,
    tables=lambda result, work: {
        "What is protected": "The labels only. Features, and who is in the data, count as public."
    },
    plan=_plan,
    report=frame.Report(
        title="training on noisy labels",
        released={"params.safetensors": "a model of noisy labels"},
    ),
)
