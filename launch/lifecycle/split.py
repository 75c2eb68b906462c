"""The stage of a client's upload: noisy representations and labels of its images, once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp import privacy, split
from jaxdp.audit import split as canaries
from jaxdp.data import Examples, Groups, read_column
from jaxdp.models import save_params

from .. import models
from .networks import backbone
from .parts import Parts
from .stage import CONFIDENCE, Accounts, Charges, Job, Stage, attack_on, audited, terms


def upload(job: Job) -> dict[str, Any]:
    """Uploads bounded, noisy outputs of the public backbone on a client's images and noisy labels,
    once.

    Post-processing by the server, for example `split.adapt`, costs nothing more. Every row is about
    one image, so only the first image of each owner is uploaded.
    """
    if isinstance(job.data.units, Groups):
        print(f"split: only the first image of each {job.data.unit} is uploaded", flush=True)
    options = job.config.split
    client = job.data.client
    prepared = _prepared(job)
    released = split.release_privately(
        job.account(client.name),
        release=prepared.release,
        representations=prepared.represent(client),
        labels=read_column(client, "label"),
        projection=prepared.projection,
        workdir=job.folder,
    )
    save_params(job.folder / "upload.safetensors", released._asdict())
    event = prepared.release.event
    spent = privacy.epsilon(event, delta=options.delta, adjacency="replace_one")
    return {
        "images": len(client),
        "directions": options.directions,
        "bytes": released.features.nbytes + released.labels.nbytes,
        "epsilon": spent,
        "delta": options.delta,
    }


def _accounts(config: Any) -> Accounts:
    return {"clinic": terms(config, "replace_one", config.budgets.client)}


def _charges(config: Any, parts: Parts) -> Charges:
    # The event does not depend on the clip norm, which public images determine later.
    release = _release(config.split, parts.client.num_classes, clip_norm=1.0)
    return {parts.client.name: release.event}


def _release(options: Any, num_classes: int, *, clip_norm: float) -> split.PrivateRelease:
    return split.PrivateRelease.calibrated(
        clip_norm=clip_norm,
        num_classes=num_classes,
        epsilon=options.epsilon,
        delta=options.delta,
        label_share=options.label_share,
    )


class _Prepared(NamedTuple):
    """What public images determine: outputs of the backbone [n, 1, D] of images, a projection of
    them, and the release with its clip norm.
    """

    represent: Callable[[Examples], np.ndarray]
    projection: split.Projection
    release: split.PrivateRelease


def _prepared(job: Job) -> _Prepared:
    model, params = backbone(job)

    def represent(images: Examples) -> np.ndarray:
        return models.logits(model, params, images)[:, None]

    representations = represent(job.data.public)
    projection = split.public_projection(representations, job.config.split.directions)
    projected = split.project(projection, representations)
    norms = np.linalg.norm(np.asarray(projected), axis=1)
    clip_norm = float(np.median(norms))
    num_classes = job.data.client.num_classes
    release = _release(job.config.split, num_classes, clip_norm=clip_norm)
    return _Prepared(represent, projection, release)


def audit(job: Job) -> dict[str, Any]:
    """Attacks features and labels of the client's upload by the public images that differ most."""
    options = job.config.audit_split
    prepared = _prepared(job)
    count = min(options.candidates, len(job.data.public))
    public = job.data.public.take(np.arange(count))
    attack = functools.partial(
        canaries.audit_upload,
        prepared.release,
        prepared.represent(public),
        read_column(public, "label") % prepared.release.num_classes,
        projection=prepared.projection,
        trials=options.trials,
        confidence=CONFIDENCE,
    )
    features = attack(part="features", delta=job.config.split.delta)
    labels = attack(part="labels", delta=0.0)
    audits = [
        (features, "features of the client's upload"),
        (labels, "labels of the client's upload"),
    ]
    return audited(audits, [job.data.client.name])


SPLIT = Stage(
    "split",
    upload,
    after=("pretrain",),
    data=("public", "client"),
    config=("model", "split"),
    charges=_charges,
    accounts=_accounts,
    shape={
        **dict.fromkeys(("images", "directions", "bytes"), int),
        **dict.fromkeys(("epsilon", "delta"), float),
    },
    released={"upload.safetensors": "the clinic's upload"},
    title="A client's upload",
    page="life_split.html.jinja",
)
AUDIT = attack_on(SPLIT, audit, data=("public", "client"))
STAGES = (SPLIT, AUDIT)
