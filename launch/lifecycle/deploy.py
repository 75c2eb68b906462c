"""The stage of deployment: the model in use, from released values."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import recalibration
from jaxdp.data import Examples, read_column
from jaxdp.models import load_params, save_params
from jaxdp.recalibration.metrics import equal_width_bin

from .. import models
from . import references
from .networks import Params, tuned
from .recalibrate import ece, restored
from .stage import Job, Stage

_BINS = 10  # of the ECE
_RESAMPLES = 1000  # of the bootstrap


class _Version(NamedTuple):
    """The model after some of the steps."""

    params: Params
    confidence: recalibration.Recalibration


class _Judged(NamedTuple):
    """The confidences of a model on images, and whether it is right."""

    confidence: np.ndarray
    right: np.ndarray


def deploy(job: Job) -> dict[str, Any]:
    """Combines released values: the adapted parameters and the recalibrated confidences."""
    network, params = tuned(job)
    adapted = load_params(job.before["adapt"].folder / "adapted.safetensors")
    parameters = load_params(job.before["recalibrate"].folder / "confidence.safetensors")
    save_params(job.folder / "deployed.safetensors", {"params": adapted, "confidence": parameters})

    tests = job.data.source_test | job.data.stream_test
    plain, fitted = recalibration.none(), restored(parameters)
    versions = {
        "fine-tuned": _Version(params, plain),
        "only recalibrated": _Version(params, fitted),
        "only adapted": _Version(adapted, plain),
        "deployed": _Version(adapted, fitted),
    }

    def measured(test: Examples) -> dict[str, dict[str, float]]:
        judged = {}
        for name, version in versions.items():
            logits = models.logits(network, version.params, test)
            right = models.judged(logits, read_column(test, "label"))
            judged[name] = _Judged(version.confidence.apply(logits), right)
        return {name: _measures(judged["fine-tuned"], other) for name, other in judged.items()}

    return {
        "tested": {shift: len(test) for shift, test in tests.items()},
        "models": {shift: measured(test) for shift, test in tests.items()},
    }


def _measures(first: _Judged, other: _Judged) -> dict[str, float]:
    """Returns accuracy and ECE of `other`, and how much its ECE is above that of `first`."""
    return {
        "accuracy": float(other.right.mean()),
        "ece": ece(other.confidence, other.right),
        **_ece_change(first, other),
    }


def _ece_change(first: _Judged, other: _Judged) -> dict[str, float]:
    """Returns a paired bootstrap 95 % interval of how much the ECE of `other` is above that of
    `first`, on the same images.
    """
    draw = np.random.default_rng(0)
    size = len(other.right)
    before = _gaps(first)
    after = _gaps(other)
    changes = []
    for _ in range(_RESAMPLES):
        rows = draw.integers(size, size=size)
        changes.append(_ece_of(after, rows) - _ece_of(before, rows))
    low, high = np.quantile(changes, [0.025, 0.975]).tolist()
    return {"low": low, "high": high}


class _Gaps(NamedTuple):
    """The bin of each image, and how far its confidence is from whether the model is right."""

    bins: np.ndarray
    gaps: np.ndarray


def _gaps(judged: _Judged) -> _Gaps:
    bins = np.asarray(equal_width_bin(jnp.asarray(judged.confidence), _BINS))
    return _Gaps(bins, judged.right - judged.confidence)


def _ece_of(images: _Gaps, rows: np.ndarray) -> float:
    sums = np.bincount(images.bins[rows], weights=images.gaps[rows], minlength=_BINS)
    return float(np.abs(sums).sum() / len(rows))


_MEASURES = dict.fromkeys(("accuracy", "ece", "low", "high"), float)

STAGES = (
    Stage(
        "deploy",
        deploy,
        after=("finetune", "recalibrate", "adapt"),
        data=("source_test", "stream_test"),
        config=("model",),
        shape={"tested": {str: int}, "models": {str: {str: _MEASURES}}},
        released={"deployed.safetensors": "model in use"},
        title="The model in use",
        page="life_deploy.html.jinja",
        opens=True,
    ),
    references.STAGE,
)
