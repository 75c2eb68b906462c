"""The stage of recalibration: confidences that fit the images of several private sources."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import recalibration
from jaxdp.audit import recalibration as canaries
from jaxdp.data import Groups, read_column
from jaxdp.data.selection import held
from jaxdp.models import save_params
from jaxdp.privacy import NoOpDpEvent
from jaxdp.recalibration.methods import Logistic

from .. import models
from .networks import tuned
from .parts import Parts, hospitals
from .stage import CONFIDENCE, CURVE, PAIR, Accounts, Charges, Job, Stage, attack_on, audited, terms

_OTHERS = 20  # images of the attacked source besides the canary


def fit(job: Job) -> dict[str, Any]:
    """Fits the model's confidence to the images of several sources. Each source answers with noise
    and pays.
    """
    epsilon = job.config.recalibrate.epsilon
    model, params = tuned(job)
    sources = []
    for source in job.data.sources:
        images, owners = held(source)
        party = recalibration.Party(
            models.logits(model, params, images),
            read_column(images, "label"),
            account=job.account(source.name),
            group=owners if isinstance(source, Groups) else None,
        )
        sources.append(party)
    fitted = recalibration.logistic_binning(sources, epsilon=epsilon, workdir=job.folder)
    save_params(job.folder / "confidence.safetensors", fitted.parameters._asdict())

    [(shift, test)] = job.data.source_test.items()
    logits = models.logits(model, params, test)
    right = models.judged(logits, read_column(test, "label"))
    confidences = {"before": recalibration.none().apply(logits), "after": fitted.apply(logits)}
    measures: dict[str, dict[str, Any]] = {"reliability": {}, "ece": {}, "brier": {}}
    for name, confidence in confidences.items():
        squares = (confidence - right) ** 2
        measures["reliability"][name] = _reliability(confidence, right)
        measures["ece"][name] = ece(confidence, right)
        measures["brier"][name] = float(squares.mean())
    return {
        "shift": shift,
        "sources": len(sources),
        "epsilon": epsilon,
        "accuracy": float(right.mean()),
        "tested": len(right),
        **measures,
    }


def _accounts(config: Any) -> Accounts:
    sources = terms(config, "add_remove", config.budgets.sources)
    return {f"hospital {k}": sources for k in range(hospitals(config.data))}


def _charges(config: Any, parts: Parts) -> Charges:
    event = recalibration.event(config.recalibrate.epsilon)
    return {source.name: event for source in parts.sources}


def restored(parameters: Mapping[str, jax.Array]) -> recalibration.Recalibration:
    """Returns the recalibration of the parameters that the stage has saved."""
    method = recalibration.LogisticBinning()
    return recalibration.Recalibration(method, Logistic(**parameters), NoOpDpEvent())


def _reliability(confidence: np.ndarray, right: np.ndarray) -> list[tuple[float, float]]:
    """Returns the mean confidence and the accuracy of each of ten bins that has images."""
    bins = recalibration.reliability(jnp.asarray(confidence), jnp.asarray(right), bins=10)
    table = np.stack([bins.confidence, bins.accuracy, bins.counts], axis=1)
    return [(confident, right) for confident, right, count in table.tolist() if count]


def ece(confidence: np.ndarray, right: np.ndarray) -> float:
    """Returns the expected calibration error in ten bins of equal width."""
    error = recalibration.ece(jnp.asarray(confidence), jnp.asarray(right), bins=10)
    return float(error)


def audit(job: Job) -> dict[str, Any]:
    """Attacks the answers of one source by a record that changes them most. The other records are
    test images.
    """
    model, params = tuned(job)
    (test,) = job.data.source_test.values()
    others = test.take(np.arange(min(_OTHERS, len(test))))
    paying = [source.name for source in job.data.sources]
    attack = canaries.audit_source(
        recalibration.LogisticBinning(),
        models.logits(model, params, others),
        read_column(others, "label"),
        epsilon=job.config.recalibrate.epsilon,
        trials=job.config.audit_recalibrate.trials,
        confidence=CONFIDENCE,
    )
    return audited([(attack, "recalibration")], paying)


RECALIBRATE = Stage(
    "recalibrate",
    fit,
    after=("finetune",),
    data=("sources", "source_test"),
    config=("model", "recalibrate"),
    charges=_charges,
    accounts=_accounts,
    shape={
        "shift": str,
        "sources": int,
        "epsilon": float,
        "accuracy": float,
        "tested": int,
        "ece": PAIR,
        "brier": PAIR,
        "reliability": {"before": CURVE, "after": CURVE},
    },
    released={"confidence.safetensors": "its confidence"},
    title="Recalibration by private sources",
    page="life_recalibrate.html.jinja",
)
AUDIT = attack_on(RECALIBRATE, audit, data=("source_test",))
STAGES = (RECALIBRATE, AUDIT)
