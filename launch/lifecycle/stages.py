"""The stages of a model's life, one function each, in the order in which they are run.

    pretrain     public images                  a backbone on which noise hurts less (DPAdapter)
    finetune     the private training set       a model, by DP-SGD or one of its relatives
    recalibrate  several private sources        confidences that fit their images, from noisy answers
    adapt        a private stream under drift   an adapted model (DP test-time adaptation)
    split        a client's private images      noisy representations and labels of them (Split Adaptation, DP mode)
    deploy       no data                        the model in use: the adapted model with recalibrated confidences
    predict      the private training set       certified, private answers of a small model to some queries
    certificates the private training set       how many changed records leave answers as they are, NOT private
    audit_*      canaries                       what attackers can prove about each of these releases

A private stage touches private data through the function that a user would call, with an account
and a workdir. A second function says what the stage will spend, so a lifecycle can reserve
everything before it spends anything. Quality is measured on the public held-out test images with
released parameters, which costs nothing. The one exception is `certificates`, which is optional.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import audit, finetune, prediction, pretrain, privacy, recalibration, split, tta
from jaxdp.audit import finetune as finetune_canaries
from jaxdp.audit import prediction as prediction_canaries
from jaxdp.audit import recalibration as recalibration_canaries
from jaxdp.audit import split as split_canaries
from jaxdp.audit import tta as tta_canaries
from jaxdp.data import Examples, Groups, Records, Source, augmentation, by_group, from_arrays, take
from jaxdp.models import Pretrained, load_params, merge_pretrained, save_params
from jaxdp.prediction import checks
from jaxdp.prediction.features import FeatureMap
from jaxdp.privacy import GaussianDpEvent, NoOpDpEvent
from jaxdp.privacy.events import composition
from jaxdp.recalibration.methods import Logistic
from jaxdp.recalibration.metrics import equal_width_bin
from jaxdp.transforms import losses

from .. import data, models, plans, results, trainers
from .cache import Charges, Job, Stage
from .parts import Parts, hospitals, unit_of

Params = Any


def accounts(config: Any) -> dict[str, dict[str, Any]]:
    """Returns the terms of the private data sets by their name in the ledger."""
    budgets, unit = config.budgets, unit_of(config.data)
    data.only_adjacency(config.data, "add_remove")
    terms = {
        f"{config.data.name}/private": {"adjacency": "add_remove", "unit": unit, **budgets.private}
    }
    for k in range(hospitals(config.data)):
        terms[f"hospital {k}"] = {"adjacency": "add_remove", "unit": unit, **budgets.sources}
    replaced = {"stream": budgets.stream, "clinic": budgets.client}
    return terms | {
        name: {"adjacency": "replace_one", "unit": unit, **budget}
        for name, budget in replaced.items()
    }


# --- The model ----------------------------------------------------------------------------------


def _network(config: Any, num_classes: int) -> Pretrained:
    return models.network(config.model, num_classes)


def _backbone(job: Job) -> tuple[Pretrained, Params]:
    path = job.before["pretrain"].folder / "backbone.safetensors"
    return _network(job.config, job.data.public.num_classes), load_params(path)


def _model(job: Job) -> tuple[Pretrained, Params]:
    path = job.before["finetune"].folder / "model.safetensors"
    return _network(job.config, job.data.private.num_classes), load_params(path)


# --- Pre-training -------------------------------------------------------------------------------


def pretrain_public(job: Job) -> dict[str, Any]:
    """Trains a backbone on public images so that noise on its parameters hurts less. It spends
    nothing.
    """
    how, public = job.config.pretrain, job.data.public
    network = _network(job.config, public.num_classes)
    loss = models.loss(network)
    trainer = pretrain.dpadapter(
        lambda params, batch: jax.vmap(loss, in_axes=(None, 0))(params, batch).mean(),
        optax.sgd(optax.cosine_decay_schedule(how.learning_rate, how.steps), momentum=0.9),
        gamma=how.gamma,
    )
    with job.watching() as writers:
        params = pretrain.fit(
            trainer,
            models.fresh(network, how.seed),
            public,
            steps=how.steps,
            perturbation_batch_size=how.perturbation_batch_size,
            update_batch_size=how.batch_size,
            seed=how.seed.to_bytes(16, "little"),
            augment=augmentation(job.config.augmentation),
            workdir=job.folder,
            checkpoint_every=how.checkpoint_every,
            callbacks=writers,
        ).params
    save_params(job.folder / "backbone.safetensors", params)

    # If the test images have other classes, the accuracy is measured on the public images.
    judge = job.data.test if job.data.test.num_classes == public.num_classes else public
    stds = [0.0, 0.1, 0.2, 0.3, 0.5]
    robust = pretrain.robust_accuracy(
        network.apply_fn, params, judge, std=stds, draws=5, relative=True
    ).mean(1)
    return {
        "images": len(public),
        "accuracy": float(robust[0]),
        "tested": len(judge),
        "judged_on_test": judge is job.data.test,
        "noise": list(zip(stds, robust.tolist(), strict=True)),
    }


# --- Fine-tuning --------------------------------------------------------------------------------


def finetune_private(job: Job) -> dict[str, Any]:
    """Trains the backbone on the private training set."""
    how, private, test = job.config.finetune, job.data.private, job.data.test
    network = _network(job.config, private.num_classes)
    start = models.fresh(network, how.seed)
    _, backbone = _backbone(job)
    same_head = job.data.public.num_classes == private.num_classes and not how.new_head
    start = merge_pretrained(start, backbone, exclude=() if same_head else ("head",))
    made = _trainer(job.config, network, job.data)
    judge = functools.partial(finetune.accuracy, network.apply_fn)
    account = job.account(private.name)
    with job.watching() as writers:
        state = finetune.fit(
            made,
            start,
            job.data.units,
            steps=how.steps,
            account=account,
            workdir=job.folder,
            checkpoint_every=how.checkpoint_every,
            evaluate=lambda params: {"accuracy": judge(params, test)},
            callbacks=writers,
        )
    params = trainers.released(state)
    save_params(job.folder / "model.safetensors", params)
    event = made.event(0, how.steps)
    return {
        **results.changes(*(models.right(network, model, test) for model in (start, params))),
        "tested": len(test),
        "epsilon": privacy.epsilon(event, delta=how.delta, adjacency="add_remove"),
        "delta": how.delta,
        "noise_multiplier": float(made.privatizer.event_at(0).noise_multiplier),
        "steps": how.steps,
        "method": how.method,
        "curves": trainers.curves(job.folder),
    }


def _finetune_charges(config: Any, parts: Parts) -> Charges:
    made = _trainer(config, _network(config, parts.private.num_classes), parts)
    return {parts.private.name: made.event(0, config.finetune.steps)}


def _trainer(config: Any, network: Pretrained, parts: Parts) -> finetune.PrivateTrainer:
    given = config.finetune, network, parts.units, parts.public, config.augmentation
    return trainers.make(*given, unit=parts.unit, part="finetune")


def computations(config: Any, parts: Parts) -> Iterator[plans.Item]:
    """Returns what public and private training compute, for --dry_run."""
    network = _network(config, parts.private.num_classes)
    public = _network(config, parts.public.num_classes)
    start = models.fresh(public, config.pretrain.seed)
    yield plans.public_training(
        "pretrain", models.loss(public), start, parts.public, config.pretrain
    )
    how = config.finetune
    training = plans.training(
        "finetune",
        _trainer(config, network, parts),
        parts.units,
        models.fresh(network, how.seed),
        steps=how.steps,
        every=how.checkpoint_every,
        terms={"delta": how.delta},
    )
    yield training._replace(event=None)  # is charged with the other stages


# --- Recalibration ------------------------------------------------------------------------------


def recalibrate(job: Job) -> dict[str, Any]:
    """Fits the model's confidence to the images of several sources. Each source answers with noise
    and pays.
    """
    epsilon = job.config.recalibrate.epsilon
    network, params = _model(job)
    sources = []
    for source in job.data.sources:
        images, owners = data.held(source)
        group = owners if isinstance(source, Groups) else None
        logits, labels = models.logits(network, params, images), data.labels(images)
        sources.append(
            recalibration.Party(logits, labels, account=job.account(source.name), group=group)
        )
    found = recalibration.logistic_binning(sources, epsilon=epsilon, workdir=job.folder)
    save_params(job.folder / "confidence.safetensors", found.parameters._asdict())

    ((shift, test),) = job.data.source_test.items()
    logits, labels = models.logits(network, params, test), data.labels(test)
    right = models.judged(logits, labels)
    confidences = {"before": recalibration.none().apply(logits), "after": found.apply(logits)}
    return {
        "shift": shift,
        "sources": len(sources),
        "epsilon": epsilon,
        "accuracy": float(right.mean()),
        "tested": len(right),
        "reliability": {
            name: _reliability(confidence, right) for name, confidence in confidences.items()
        },
        "ece": {name: _ece(confidence, right) for name, confidence in confidences.items()},
        "brier": {name: float(np.mean((c - right) ** 2)) for name, c in confidences.items()},
    }


def _recalibrate_charges(config: Any, parts: Parts) -> Charges:
    return dict.fromkeys(
        (source.name for source in parts.sources), recalibration.event(config.recalibrate.epsilon)
    )


def _recalibration(parameters: Mapping[str, jax.Array]) -> recalibration.Recalibration:
    return recalibration.Recalibration(
        recalibration.LogisticBinning(), Logistic(**parameters), NoOpDpEvent()
    )


def _reliability(confidence: np.ndarray, right: np.ndarray) -> list[tuple[float, float]]:
    """Returns the mean confidence and the accuracy of each of ten bins that has images."""
    found = recalibration.reliability(jnp.asarray(confidence), jnp.asarray(right), bins=10)
    pairs = zip(found.confidence.tolist(), found.accuracy.tolist(), strict=True)
    return [pair for pair, count in zip(pairs, found.counts.tolist(), strict=True) if count]


def _ece(confidence: np.ndarray, right: np.ndarray) -> float:
    return float(recalibration.ece(jnp.asarray(confidence), jnp.asarray(right), bins=10))


# --- Adaptation ---------------------------------------------------------------------------------


def adapt(job: Job) -> dict[str, Any]:
    """Adapts the model's normalisation layers to a stream, batch by batch. Every image comes once.

    The noise is for all images of an owner together.
    """
    how = job.config.adapt
    network, params = _model(job)
    batches = _batches(job.config, job.data)
    visits = _visits(batches)
    method = _private(how, visits)
    adapter = tta.Adapter(
        network.apply_fn, params, method, optax.sgd(how.learning_rate, momentum=0.9)
    )
    judge = functools.partial(finetune.accuracy, network.apply_fn)
    served = tta.serve(
        adapter,
        batches,
        account=tta.StreamAccount(job.account("stream"), event=method.event),
        workdir=job.folder,
        evaluate=lambda batch, params: {
            "accuracy": judge(params, job.data.stream_test[batch.domains[0]])
        },
    )
    save_params(job.folder / "adapted.safetensors", served.state.params)
    right = {
        shift: models.right(network, params, test) for shift, test in job.data.stream_test.items()
    }
    adapted = [
        (batch.domains[0], row["accuracy"])
        for batch, row in zip(batches, served.evaluated, strict=True)
    ]
    last = {
        shift: models.right(network, served.state.params, test)
        for shift, test in job.data.stream_test.items()
    }
    return {
        "images": len(batches) * how.batch_size,
        "epsilon": method.epsilon(visits=visits, delta=how.delta),
        "delta": how.delta,
        "noise_multiplier": method.noise_multiplier,
        "visits": visits,
        "method": method.describe(),
        "tested": {shift: len(test) for shift, test in job.data.stream_test.items()},
        "accuracy": {shift: results.changes(right[shift], last[shift]) for shift in right},
        "stream": {
            "adapted": [(k * how.batch_size, value) for k, (_, value) in enumerate(adapted, 1)],
            "not adapted": [
                (k * how.batch_size, float(right[shift].mean()))
                for k, (shift, _) in enumerate(adapted, 1)
            ],
        },
    }


def _adapt_charges(config: Any, parts: Parts) -> Charges:
    batches = _batches(config, parts)
    return {"stream": tta.event(_private(config.adapt, _visits(batches)).event, batches)}


def _batches(config: Any, parts: Parts) -> tta.Stream:
    domains, units = {}, {}
    for domain, source in parts.stream.items():  # no owner has images in two domains
        domains[domain], owners = data.held(source)
        units[domain] = [(domain, owner) for owner in owners.tolist()]
    return tta.Stream(
        domains, batch_size=config.adapt.batch_size, seed=config.adapt.seed, units=units
    )


def _visits(batches: tta.Stream) -> int:
    """Returns the visits of the unit that comes most often, as `tta.StreamAccount` counts them."""
    found = composition(tta.event(GaussianDpEvent(1.0), batches))
    return round(sum(count / event.noise_multiplier**2 for event, count in found.items()))


def _private(how: Any, visits: int) -> tta.Private:
    terms = {"epsilon": how.epsilon, "delta": how.delta, "adjacency": "replace_one"}
    sigma = privacy.calibrate_noise(GaussianDpEvent, **terms) * math.sqrt(visits)
    return tta.private(tta.Tent(), clip_norm=how.clip_norm, noise_multiplier=sigma)


# --- A client's upload --------------------------------------------------------------------------


def upload(job: Job) -> dict[str, Any]:
    """Uploads bounded, noisy outputs of the public backbone on a client's images and noisy labels,
    once.

    Post-processing by the server, for example `split.adapt`, costs nothing more. Every row is about
    one image, so only the first image of each owner is uploaded.
    """
    if isinstance(job.data.units, Groups):
        print(f"split: only the first image of each {job.data.unit} is uploaded", flush=True)
    how, client = job.config.split, job.data.client
    represent, projection, release = _client_release(job)
    released = split.release_privately(
        job.account(client.name),
        release=release,
        representations=represent(client),
        labels=data.labels(client),
        projection=projection,
        workdir=job.folder,
    )
    save_params(job.folder / "upload.safetensors", released._asdict())
    return {
        "images": len(client),
        "directions": how.directions,
        "bytes": released.features.nbytes + released.labels.nbytes,
        "epsilon": privacy.epsilon(release.event, delta=how.delta, adjacency="replace_one"),
        "delta": how.delta,
    }


def _split_charges(config: Any, parts: Parts) -> Charges:
    return {
        parts.client.name: _private_upload(
            config.split, parts.client.num_classes, clip_norm=1.0
        ).event
    }


def _private_upload(how: Any, num_classes: int, *, clip_norm: float) -> split.PrivateRelease:
    terms = {"epsilon": how.epsilon, "delta": how.delta, "label_share": how.label_share}
    return split.PrivateRelease.calibrated(clip_norm=clip_norm, num_classes=num_classes, **terms)


def _client_release(
    job: Job,
) -> tuple[Callable[[Examples], np.ndarray], split.Projection, split.PrivateRelease]:
    """Returns `represent(source) -> [n, 1, D]`, the public projection, and the release with its
    clip norm.
    """
    public = job.data.public
    network, backbone = _backbone(job)

    def represent(source: Examples) -> np.ndarray:
        return models.logits(network, backbone, source)[:, None]

    projection = split.public_projection(represent(public), job.config.split.directions)
    norms = np.linalg.norm(np.asarray(split.project(projection, represent(public))), axis=1)
    clip_norm = float(np.median(norms))
    return (
        represent,
        projection,
        _private_upload(job.config.split, job.data.client.num_classes, clip_norm=clip_norm),
    )


# --- The model in use ---------------------------------------------------------------------------


def deploy(job: Job) -> dict[str, Any]:
    """Combines released values: the adapted parameters and the recalibrated confidences."""
    network, params = _model(job)
    adapted = load_params(job.before["adapt"].folder / "adapted.safetensors")
    parameters = load_params(job.before["recalibrate"].folder / "confidence.safetensors")
    save_params(job.folder / "deployed.safetensors", {"params": adapted, "confidence": parameters})

    tests = job.data.source_test | job.data.stream_test
    plain, fitted = recalibration.none(), _recalibration(parameters)
    steps = {
        "fine-tuned": (params, plain),
        "only recalibrated": (params, fitted),
        "only adapted": (adapted, plain),
        "deployed": (adapted, fitted),
    }

    def judged(test: Examples) -> dict[str, dict[str, float]]:
        found, first = {}, None
        for name, (model, confidence) in steps.items():
            logits = models.logits(network, model, test)
            right, shown = models.judged(logits, data.labels(test)), confidence.apply(logits)
            first = (shown, right) if first is None else first
            numbers = {"accuracy": float(right.mean()), "ece": _ece(shown, right)}
            found[name] = numbers | _ece_change(first, (shown, right))
        return found

    return {
        "tested": {shift: len(test) for shift, test in tests.items()},
        "models": {shift: judged(test) for shift, test in tests.items()},
    }


def _ece_change(
    first: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
) -> dict[str, float]:
    """Returns a paired bootstrap 95 % interval of how much the ECE of `other` is above that of
    `first`.

    Each is the confidences of a model, and whether it is right, on the same images.
    """
    sides = [
        (np.asarray(equal_width_bin(jnp.asarray(c), 10)), right - c) for c, right in (first, other)
    ]
    draw, size, found = np.random.default_rng(0), len(other[1]), []
    for _ in range(1000):
        rows = draw.integers(size, size=size)
        sums = [np.bincount(bins[rows], weights=gaps[rows], minlength=10) for bins, gaps in sides]
        before, after = (np.abs(gaps).sum() / size for gaps in sums)
        found.append(after - before)
    return dict(zip(("low", "high"), np.quantile(found, [0.025, 0.975]).tolist(), strict=True))


# --- Certified answers --------------------------------------------------------------------------


def predict(job: Job) -> dict[str, Any]:
    """Answers queries about test images by a linear model on the public backbone's outputs, with
    certificates.

    The answers come from a separate linear model. Its training bounds are tight, and the network's
    would be loose.
    """
    how, private, test = job.config.predict, job.data.private, job.data.test
    records = _featurise(job)
    asked = records(test.take(np.arange(how.queries)))  # the test images are in random order
    each = prediction.query_epsilon(how.epsilon, how.delta, how.queries)
    bounds = _certified(
        how, len(job.data.units), private.num_classes, _owned(job, records(private))
    )
    account = job.account(private.name)
    answers = prediction.private_predict(
        bounds, _linear, asked["x"], account=account, epsilon=each, workdir=job.folder
    )
    event = prediction.event(how.queries, epsilon=each)
    return {
        "queries": how.queries,
        "epsilon": privacy.epsilon(event, delta=how.delta, adjacency="add_remove"),
        "delta": how.delta,
        "epsilon_per_query": each,
        "answers": answers.tolist(),
        "accuracy": float(np.mean(answers == asked["y"])),
    }


def _predict_charges(config: Any, parts: Parts) -> Charges:
    how = config.predict
    checks.positive("predict.clip", how.clip, "the per-coordinate bound of a record's gradient")
    checks.positive("predict.learning_rate", how.learning_rate, "the step size")
    checks.distances(how.max_distance)
    each = prediction.query_epsilon(how.epsilon, how.delta, how.queries)
    return {parts.private.name: prediction.event(how.queries, epsilon=each)}


def certificates(job: Job) -> dict[str, Any]:
    """Counts the test images whose answers k changed training images cannot alter, without noise:
    NOT private.
    """
    if not job.config.certificates.show:
        return {}
    how, private, test = job.config.predict, job.data.private, job.data.test
    records = _featurise(job)
    bounds = _certified(
        how, len(job.data.units), private.num_classes, _owned(job, records(private))
    )
    certificates = prediction.certify(bounds, _linear, records(test)["x"])
    distance = np.asarray(certificates.distance)
    shares = [(k, float(np.mean(distance >= k))) for k in range(how.max_distance + 1)]
    return {
        "without_noise": float(np.mean(np.asarray(certificates.label) == data.labels(test))),
        "shares": shares,
    }


def _featurise(job: Job) -> Callable[[Examples], dict[str, np.ndarray]]:
    """Returns `records(source) -> {"x" [n, d], "y" [n]}`: scaled outputs of the public backbone,
    and labels.
    """
    how, public = job.config.predict, job.data.public
    network, backbone = _backbone(job)
    features = FeatureMap.from_public(
        models.logits(network, backbone, public), dimensions=how.dimensions, whiten=how.whiten
    )
    return lambda source: {
        "x": features(models.logits(network, backbone, source)),
        "y": data.labels(source),
    }


def _owned(job: Job, records: dict[str, Any]) -> Any:
    """Returns the records of the training set by unit of privacy."""
    if not isinstance(job.data.units, Groups):
        return records
    return dataclasses.replace(job.data.units, source=from_arrays(**records)).gather(
        np.arange(len(job.data.units))
    )


def _certified(how: Any, units: int, num_classes: int, records: Any) -> prediction.Bounds:
    """Trains with bounds in one step of a full batch. `units` is the public number of images, or of
    their owners.
    """
    group = isinstance(records, Records)
    x = records.records["x"] if group else records["x"]
    return prediction.train_with_bounds(
        _linear_loss,
        jnp.zeros((x.shape[-1], num_classes)),
        records,
        ks=min(how.max_distance, units),
        clip=how.clip,
        learning_rate=how.learning_rate,
        batch_size=units,
        epochs=1,
        group=group,
    )


def _linear(params: Params, x: jax.Array) -> jax.Array:
    return params.T @ x


def _linear_loss(params: Params, record: Mapping[str, jax.Array]) -> jax.Array:
    return losses.softmax_cross_entropy(_linear(params, record["x"]), record["y"])


# --- Audits -------------------------------------------------------------------------------------

_CONFIDENCE = 0.99  # of each audit. Seven audits have a false alarm with probability below 7 %.


def audit_finetune(job: Job) -> dict[str, Any]:
    """Attacks a step of the fine-tuning by public images with wrong labels, and the sampling of its
    batches.
    """
    how, private = job.config.audit_finetune, job.data.private
    network, params = _model(job)
    made = _trainer(job.config, network, job.data)
    images = job.data.public.gather(np.arange(min(how.candidates, len(job.data.public))))
    wrong = (images["label"] + 1) % private.num_classes
    examples: Source = from_arrays(
        image=images["image"], label=wrong, num_classes=private.num_classes
    )
    if isinstance(job.data.units, Groups):  # an owner has as many images as count, all alike
        most = job.data.units.rows.shape[1]
        owners = np.repeat(np.arange(len(wrong)), most)
        examples = by_group(take(examples, owners), owners, max_records=most)
    step = finetune_canaries.audit_step(
        made,
        params,
        examples,
        trials=how.trials,
        delta=job.config.finetune.delta,
        confidence=_CONFIDENCE,
    )
    found = [(step, f"one step of fine-tuning, if the {job.data.unit} is in its batch")]
    if made.sampler.sampling_probability < 1:
        batches = finetune_canaries.audit_sampling(made, trials=how.trials, confidence=_CONFIDENCE)
        found.append((batches, f"which {job.data.unit}s are in a batch of fine-tuning"))
    return _audited(found, [private.name])


def audit_recalibrate(job: Job) -> dict[str, Any]:
    """Attacks the answers of one source by a record that changes them most. The other records are
    test images.
    """
    network, params = _model(job)
    (test,) = job.data.source_test.values()
    others = test.take(np.arange(min(20, len(test))))
    found = recalibration_canaries.audit_source(
        recalibration.LogisticBinning(),
        models.logits(network, params, others),
        data.labels(others),
        epsilon=job.config.recalibrate.epsilon,
        trials=job.config.audit_recalibrate.trials,
        confidence=_CONFIDENCE,
    )
    return _audited([(found, "recalibration")], [source.name for source in job.data.sources])


def audit_adapt(job: Job) -> dict[str, Any]:
    """Attacks an update of the adaptation by the test images that move it most."""
    how, test = job.config.audit_adapt, next(iter(job.data.stream_test.values()))
    network, params = _model(job)
    size = job.config.adapt.batch_size
    rows = [np.arange(size) % len(test), np.arange(size, size + how.candidates) % len(test)]
    images, candidates = (test.gather(part)["image"] for part in rows)
    method = _private(job.config.adapt, job.before["adapt"].result["visits"])
    adapter = tta.Adapter(network.apply_fn, params, method, optax.sgd(1.0))
    terms = {"trials": how.trials, "delta": job.config.adapt.delta, "confidence": _CONFIDENCE}
    found = tta_canaries.audit_stream(adapter, images, candidates, **terms)
    return _audited([(found, "adaptation")], ["stream"])


def audit_split(job: Job) -> dict[str, Any]:
    """Attacks features and labels of the client's upload by the public images that differ most."""
    how = job.config.audit_split
    represent, projection, release = _client_release(job)
    public = job.data.public.take(np.arange(min(how.candidates, len(job.data.public))))
    labels = data.labels(public) % release.num_classes
    terms = {"projection": projection, "trials": how.trials, "confidence": _CONFIDENCE}
    attack = functools.partial(
        split_canaries.audit_upload, release, represent(public), labels, **terms
    )
    found = [
        (attack(part="features", delta=job.config.split.delta), "features of the client's upload"),
        (attack(part="labels", delta=0.0), "labels of the client's upload"),
    ]
    return _audited(found, [job.data.client.name])


def audit_predict(job: Job) -> dict[str, Any]:
    """Attacks one answer of a model of a few test images, by the image that changes it most."""
    how, asked, test = job.config.audit_predict, job.config.predict, job.data.test
    records = _featurise(job)(test.take(np.arange(how.images + how.candidates)))
    others = {name: column[: how.images] for name, column in records.items()}
    candidates = {name: column[how.images :] for name, column in records.items()}
    each = prediction.query_epsilon(asked.epsilon, asked.delta, asked.queries)

    def ask(records: Any, queries: Any, **terms: Any) -> np.ndarray:
        bounds = _certified(asked, how.images, test.num_classes, records)
        return prediction.private_predict(bounds, _linear, queries, epsilon=each, **terms)

    found = prediction_canaries.audit_answers(
        ask,
        prediction.event(1, epsilon=each),
        candidates["x"][0],
        others,
        candidates,
        trials=how.trials,
        confidence=_CONFIDENCE,
    )
    return _audited([(found, "one certified answer")], [job.data.private.name])


def _audited(found: Sequence[tuple[audit.Audit, str]], accounts: Sequence[str]) -> dict[str, Any]:
    """Returns the audits for the report, each with the name of its release."""
    return {
        "audits": [
            {
                **dataclasses.asdict(one),
                "verdict": one.verdict,
                "accounts": list(accounts),
                "release": release,
            }
            for one, release in found
        ]
    }


# --- The order ----------------------------------------------------------------------------------

_NETWORK = ("model", "augmentation")

STAGES = (
    Stage("pretrain", pretrain_public, data=("public", "test"), config=(*_NETWORK, "pretrain")),
    Stage(
        "finetune",
        finetune_private,
        after=("pretrain",),
        data=("public", "private", "test"),
        config=(*_NETWORK, "finetune"),
        charges=_finetune_charges,
    ),
    Stage(
        "recalibrate",
        recalibrate,
        after=("finetune",),
        data=("sources", "source_test"),
        config=("model", "recalibrate"),
        charges=_recalibrate_charges,
    ),
    Stage(
        "adapt",
        adapt,
        after=("finetune",),
        data=("stream", "stream_test"),
        config=("model", "adapt"),
        charges=_adapt_charges,
    ),
    Stage(
        "split",
        upload,
        after=("pretrain",),
        data=("public", "client"),
        config=("model", "split"),
        charges=_split_charges,
    ),
    Stage(
        "deploy",
        deploy,
        after=("finetune", "recalibrate", "adapt"),
        data=("source_test", "stream_test"),
        config=("model",),
    ),
    Stage(
        "predict",
        predict,
        after=("pretrain",),
        data=("public", "private", "test"),
        config=("model", "predict"),
        charges=_predict_charges,
    ),
    Stage(
        "certificates",
        certificates,
        after=("pretrain",),
        data=("public", "private", "test"),
        config=("model", "predict", "certificates"),
    ),
    Stage(
        "audit_finetune",
        audit_finetune,
        after=("finetune",),
        data=("public", "private"),
        config=(*_NETWORK, "finetune", "audit_finetune"),
    ),
    Stage(
        "audit_recalibrate",
        audit_recalibrate,
        after=("finetune", "recalibrate"),
        data=("source_test",),
        config=("model", "recalibrate", "audit_recalibrate"),
    ),
    Stage(
        "audit_adapt",
        audit_adapt,
        after=("finetune", "adapt"),
        data=("stream_test",),
        config=("model", "adapt", "audit_adapt"),
    ),
    Stage(
        "audit_split",
        audit_split,
        after=("pretrain", "split"),
        data=("public", "client"),
        config=("model", "split", "audit_split"),
    ),
    Stage(
        "audit_predict",
        audit_predict,
        after=("pretrain", "predict"),
        data=("public", "test"),
        config=("model", "predict", "audit_predict"),
    ),
)
