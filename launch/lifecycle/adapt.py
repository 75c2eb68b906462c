"""The stage of adaptation: the model follows a private stream under drift."""

import math
from typing import Any

import numpy as np
import optax

from jaxdp import finetune, privacy, tta
from jaxdp.audit import tta as canaries
from jaxdp.data.selection import held
from jaxdp.models import save_params
from jaxdp.privacy import GaussianDpEvent
from jaxdp.privacy.events import composition

from .. import models, results
from .networks import tuned
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

_ACCOUNT = "stream"
# The largest attacked batch. The attacker knows its other images, so more of them add time only.
_ATTACKED = 64


def adapt(job: Job) -> dict[str, Any]:
    """Adapts the model's normalisation layers to a stream, batch by batch. Every image comes once.

    The noise is for all images of an owner together.
    """
    options = job.config.adapt
    tests = job.data.stream_test
    model, params = tuned(job)
    batches = batches_of(job.config, job.data)
    visits = _visits(batches)
    method = _method(options, visits)
    adapter = tta.Adapter(model.apply_fn, params, method, optimizer_of(options))

    def evaluate(batch: tta.Batch, params: Any) -> dict[str, float]:
        test = tests[batch.domains[0]]
        return {"accuracy": finetune.accuracy(model.apply_fn, params, test)}

    served = tta.serve(
        adapter,
        batches,
        account=tta.StreamAccount(job.account(_ACCOUNT), event=method.event),
        workdir=job.folder,
        evaluate=evaluate,
    )
    adapted = served.state.params
    save_params(job.folder / "adapted.safetensors", adapted)

    before = {shift: models.right(model, params, test) for shift, test in tests.items()}
    after = {shift: models.right(model, adapted, test) for shift, test in tests.items()}
    curves: dict[str, list[tuple[int, float]]] = {"adapted": [], "not adapted": []}
    images = 0
    for batch, row in zip(batches, served.evaluated, strict=True):
        images += options.batch_size
        unadapted = before[batch.domains[0]]
        curves["adapted"].append((images, row["accuracy"]))
        curves["not adapted"].append((images, float(unadapted.mean())))
    return {
        "images": len(batches) * options.batch_size,
        "epsilon": method.epsilon(visits=visits, delta=options.delta),
        "delta": options.delta,
        "noise_multiplier": method.noise_multiplier,
        "visits": visits,
        "method": method.describe(),
        "tested": {shift: len(test) for shift, test in tests.items()},
        "accuracy": {shift: results.changes(before[shift], after[shift]) for shift in tests},
        "stream": curves,
    }


def _accounts(config: Any) -> Accounts:
    return {_ACCOUNT: terms(config, "replace_one", config.budgets.stream)}


def _charges(config: Any, parts: Parts) -> Charges:
    batches = batches_of(config, parts)
    method = _method(config.adapt, _visits(batches))
    return {_ACCOUNT: tta.event(method.event, batches)}


def optimizer_of(options: Any) -> optax.GradientTransformation:
    """Returns the optimizer of a stream. A config from before the field `momentum` has 0.9."""
    momentum = options.get("momentum", 0.9)
    return optax.sgd(options.learning_rate, momentum=momentum or None)


def batches_of(config: Any, parts: Parts) -> tta.Stream:
    """Returns the private stream. Every image comes once."""
    domains, units = {}, {}
    for domain, source in parts.stream.items():  # no owner has images in two domains
        domains[domain], owners = held(source)
        units[domain] = [(domain, owner) for owner in owners.tolist()]
    return tta.Stream(
        domains, batch_size=config.adapt.batch_size, seed=config.adapt.seed, units=units
    )


def _visits(batches: tta.Stream) -> int:
    """Returns the visits of the unit that comes most often, as `tta.StreamAccount` counts them."""
    counts = composition(tta.event(GaussianDpEvent(1.0), batches))
    # v visits with noise 1 are one Gaussian with noise 1 / sqrt(v).
    visits = 0.0
    for event, count in counts.items():
        visits += count / event.noise_multiplier**2
    return round(visits)


def _method(options: Any, visits: int) -> tta.Private:
    """Returns the method with the noise for all visits of a unit together."""
    one_visit = privacy.calibrate_noise(
        GaussianDpEvent, epsilon=options.epsilon, delta=options.delta, adjacency="replace_one"
    )
    noise_multiplier = one_visit * math.sqrt(visits)
    return tta.private(
        tta.Tent(),
        clip_norm=options.clip_norm,
        noise_multiplier=noise_multiplier,
        exact=options.get("exact", False),
    )


def audit(job: Job) -> dict[str, Any]:
    """Attacks an update of the adaptation by the test images that move it most."""
    options = job.config.audit_adapt
    test = next(iter(job.data.stream_test.values()))
    model, params = tuned(job)
    size = min(job.config.adapt.batch_size, _ATTACKED)
    rows = np.arange(size + options.candidates) % len(test)
    images = test.gather(rows)["image"]
    adapted = job.before["adapt"].result
    method = _method(job.config.adapt, adapted["visits"])
    adapter = tta.Adapter(model.apply_fn, params, method, optax.sgd(1.0))
    attack = canaries.audit_stream(
        adapter,
        images[:size],
        images[size:],
        trials=options.trials,
        delta=job.config.adapt.delta,
        confidence=CONFIDENCE,
    )
    return audited([(attack, "adaptation")], [_ACCOUNT])


ADAPT = Stage(
    "adapt",
    adapt,
    after=("finetune",),
    data=("stream", "stream_test"),
    config=("model", "adapt"),
    charges=_charges,
    accounts=_accounts,
    shape={
        "images": int,
        "epsilon": float,
        "delta": float,
        "tested": {str: int},
        "accuracy": {str: CHANGE},
        "stream": {"adapted": CURVE, "not adapted": CURVE},
    },
    released={"adapted.safetensors": "adapted model"},
    title="Adaptation to a private stream",
    page="life_adapt.html.jinja",
)
AUDIT = attack_on(ADAPT, audit, data=("stream_test",))
STAGES = (ADAPT, AUDIT)
