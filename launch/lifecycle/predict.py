"""The stages of certified answers: private ones, and certificates without noise, which are NOT
private.

The answers come from a linear model on the public backbone's outputs. Its training bounds are
tight, and the network's would be loose.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import prediction, privacy
from jaxdp.audit import prediction as canaries
from jaxdp.data import Examples, Groups, Records, from_arrays, read_column
from jaxdp.models import save_params
from jaxdp.prediction import checks
from jaxdp.prediction.features import FeatureMap
from jaxdp.transforms import losses

from .. import models
from .finetune import private_account
from .networks import Params, backbone
from .parts import Parts
from .stage import CONFIDENCE, CURVE, Charges, Job, Stage, attack_on, audited

_Featurise = Callable[[Examples], dict[str, np.ndarray]]


def answer(job: Job) -> dict[str, Any]:
    """Answers queries about test images privately. Certificates let little noise be enough."""
    options = job.config.predict
    private, test = job.data.private, job.data.test
    records = _featurise(job)
    queries = records(test.take(np.arange(options.queries)))  # the test images are in random order
    epsilon = _query_epsilon(options)
    answers = prediction.private_predict(
        _trained(job, records),
        _linear,
        queries["x"],
        account=job.account(private.name),
        epsilon=epsilon,
        workdir=job.folder,
    )
    # The file of the till has a check of the private records beside the answers.
    save_params(job.folder / "answers.safetensors", {"answers": answers})
    event = prediction.event(options.queries, epsilon=epsilon)
    spent = privacy.epsilon(event, delta=options.delta, adjacency="add_remove")
    return {
        "queries": options.queries,
        "epsilon": spent,
        "delta": options.delta,
        "epsilon_per_query": epsilon,
        "answers": answers.tolist(),
        "accuracy": float(np.mean(answers == queries["y"])),
    }


def _query_epsilon(options: Any) -> float:
    return prediction.query_epsilon(options.epsilon, options.delta, options.queries)


def _charges(config: Any, parts: Parts) -> Charges:
    options = config.predict
    checks.positive("predict.clip", options.clip, "the per-coordinate bound of a record's gradient")
    checks.positive("predict.learning_rate", options.learning_rate, "the step size")
    checks.distances(options.max_distance)
    event = prediction.event(options.queries, epsilon=_query_epsilon(options))
    return {parts.private.name: event}


def certify(job: Job) -> dict[str, Any]:
    """Counts the test images whose answers k changed training images cannot alter, without noise:
    NOT private.
    """
    if not job.config.certificates.show:
        return {}
    records = _featurise(job)
    test = records(job.data.test)
    certificates = prediction.certify(_trained(job, records), _linear, test["x"])
    right = np.asarray(certificates.label) == test["y"]
    distance = np.asarray(certificates.distance)
    shares = []
    for k in range(job.config.predict.max_distance + 1):
        unaltered = distance >= k
        shares.append((k, float(unaltered.mean())))
    return {"without_noise": float(right.mean()), "shares": shares}


def _featurise(job: Job) -> _Featurise:
    """Returns `records(source) -> {"x" [n, d], "y" [n]}`: scaled outputs of the public backbone,
    and labels.
    """
    options = job.config.predict
    network, params = backbone(job)
    features = FeatureMap.from_public(
        models.logits(network, params, job.data.public),
        dimensions=options.dimensions,
        whiten=options.whiten,
    )

    def records(source: Examples) -> dict[str, np.ndarray]:
        outputs = models.logits(network, params, source)
        return {"x": features(outputs), "y": read_column(source, "label")}

    return records


def _trained(job: Job, featurise: _Featurise) -> prediction.Bounds:
    """Returns the linear model of the private training set, with bounds."""
    private = job.data.private
    units = job.data.units
    records: Any = featurise(private)
    if isinstance(units, Groups):
        owned = dataclasses.replace(units, source=from_arrays(**records))
        records = owned.gather(np.arange(len(units)))
    return _bounds(job.config.predict, len(units), private.num_classes, records)


def _bounds(options: Any, units: int, num_classes: int, records: Any) -> prediction.Bounds:
    """Trains with bounds in one step of a full batch. `units` is the public number of images, or of
    their owners.
    """
    group = isinstance(records, Records)
    x = records.records["x"] if group else records["x"]
    return prediction.train_with_bounds(
        _linear_loss,
        jnp.zeros((x.shape[-1], num_classes)),
        records,
        ks=min(options.max_distance, units),
        clip=options.clip,
        learning_rate=options.learning_rate,
        batch_size=units,
        epochs=1,
        group=group,
    )


def _linear(params: Params, x: jax.Array) -> jax.Array:
    return params.T @ x


def _linear_loss(params: Params, record: Mapping[str, jax.Array]) -> jax.Array:
    logits = _linear(params, record["x"])
    return losses.softmax_cross_entropy(logits, record["y"])


def audit(job: Job) -> dict[str, Any]:
    """Attacks one answer of a model of a few test images, by the image that changes it most."""
    options = job.config.audit_predict
    test = job.data.test
    featurise = _featurise(job)
    records = featurise(test.take(np.arange(options.images + options.candidates)))
    others = {name: column[: options.images] for name, column in records.items()}
    candidates = {name: column[options.images :] for name, column in records.items()}
    epsilon = _query_epsilon(job.config.predict)

    def ask(records: Any, queries: Any, **terms: Any) -> np.ndarray:
        bounds = _bounds(job.config.predict, options.images, test.num_classes, records)
        return prediction.private_predict(bounds, _linear, queries, epsilon=epsilon, **terms)

    attack = canaries.audit_answers(
        ask,
        prediction.event(1, epsilon=epsilon),
        candidates["x"][0],
        others,
        candidates,
        trials=options.trials,
        confidence=CONFIDENCE,
    )
    return audited([(attack, "one certified answer")], [job.data.private.name])


_DATA = ("public", "private", "test")

PREDICT = Stage(
    "predict",
    answer,
    after=("pretrain",),
    data=_DATA,
    config=("model", "predict"),
    charges=_charges,
    accounts=private_account,
    shape={
        "queries": int,
        **dict.fromkeys(("epsilon", "delta", "epsilon_per_query", "accuracy"), float),
    },
    released={"answers.safetensors": "certified answers"},
    title="Certified private answers",
    page="life_predict.html.jinja",
)
CERTIFICATES = Stage(
    "certificates",
    certify,
    after=("pretrain",),
    data=_DATA,
    config=("model", "predict", "certificates"),
    shape={"without_noise": float, "shares": CURVE},
)
AUDIT = attack_on(PREDICT, audit, data=("public", "test"))
STAGES = (PREDICT, CERTIFICATES, AUDIT)
