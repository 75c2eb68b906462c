"""The audit of a charged accuracy. It attacks the form of the data in which an example moves the
estimate most.

Forms of labels and logits come from `inputs`, the table of the property tests. A form that the
count refuses releases nothing. In one kind of data a quarter of the answers is right, so that
clipping hides no noise. In the other kind nobody but the canary is right.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import Audit
from jaxdp.audit import accuracy as auditing
from jaxdp.data import Examples, from_arrays, take
from jaxdp.privacy import GaussianDpEvent
from jaxdp.release import claim

from . import case, inputs
from .case import Case, Run, held, patched, standard_twins

SIGMA = 1.0
DELTA = 1e-5
COUNT = 40  # of examples
CLAIMED = claim(GaussianDpEvent(SIGMA), adjacency="add_remove", delta=DELTA)
# Class 0 is the answer to all.
FEATURES = np.tile(np.array([[1.0, 0.0, -1.0]], np.float32), (COUNT, 1))
QUARTER = np.minimum(np.arange(COUNT) % 4, 1).astype(np.int32)
ALONE = (np.arange(COUNT) > 0).astype(np.int32)
ROWS = [0, 1]  # a right answer, and a wrong one


class Attack(NamedTuple):
    """A model and data, each of one form."""

    predict: Callable[[Any, jax.Array], jax.Array]
    source: Examples


def _model(make: Callable[[Any], Any]) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns a model whose logits are the features, in a form."""
    return lambda params, features: make(features)


# Each is made once, so that all audits share its compiled counts.
MODELS = {name: _model(form.make) for name, form in inputs.LOGITS.items()}
PLAIN = MODELS["float32 [B, K]"]


def attacks() -> Iterator[Attack]:
    """Yields the data in every form of labels, and in every form of logits, that a source can
    hold.
    """
    for labels in (QUARTER, ALONE):
        for form in inputs.LABELS.values():
            column = np.asarray(form.make(labels))
            if column.shape[:1] == (COUNT,):
                yield Attack(PLAIN, from_arrays(features=FEATURES, label=column))
        source = from_arrays(features=FEATURES, label=labels)
        for model in MODELS.values():
            yield Attack(model, source)


def moves(attack: Attack) -> float:
    """Returns how far an example moves the estimate, in examples. It is 0 if the count refuses the
    form.
    """

    def count(source: Any) -> Any:
        right = auditing.count_correct(attack.predict, None, source)
        return np.clip(right, 0, COUNT)

    try:
        whole = count(attack.source)
        others = [count(take(attack.source, np.delete(np.arange(COUNT), row))) for row in ROWS]
    except (TypeError, ValueError):
        return 0.0
    return max(abs(whole - other) for other in others)


def estimates(sigma: float = SIGMA, patch: Callable[[], Any] = contextlib.nullcontext) -> Run:
    """Returns the audit of an accuracy under the honest claim, with something patched."""

    def seen(**options: Any) -> Audit:
        with patch():
            worst = max(attacks(), key=moves)
            return auditing.audit_accuracy(worst.predict, None, worst.source, **options)

    run = case.run_of(seen, rows=ROWS, noise_multiplier=sigma, delta=DELTA)
    return held(run, CLAIMED)


def count_twice(*args: Any, whole: Callable[..., int] = auditing.count_correct) -> int:
    """Counts every example twice."""
    return 2 * whole(*args)


def broadcast(predict: Callable[..., Any], params: Any, source: Examples) -> int:
    """Counts as version 0.1 did, where labels [n, 1] are compared with all answers."""
    batch = source.gather(np.arange(len(source)))
    return inputs.broadcasting_count(
        predict(params, jnp.asarray(batch["features"])), batch["label"]
    )


def with_one_key(
    key: jax.Array, *args: Any, whole: Callable[..., Any] = auditing.noisy_fraction
) -> np.ndarray:
    """Draws the noise of all estimates from one key."""
    return whole(case.one_key(key), *args)


TWINS = standard_twins(
    half_the_noise=estimates(SIGMA / 2),
    no_clipping="an example adds 0 or 1 to the count: there is no clip",
    sensitivity_off_by_two=estimates(patch=patched(auditing, "count_correct", count_twice)),
    reused_key=estimates(patch=patched(auditing, "noisy_fraction", with_one_key)),
    add_remove_for_replace_one="a replaced example moves the count by at most 1, as an added one "
    "does",
)
TWINS["labels of another shape that broadcast"] = estimates(
    patch=patched(auditing, "count_correct", broadcast)
)

CASES = (
    Case(
        "charged accuracy",
        f"an estimate: a Gaussian of multiplier {SIGMA:g}, add/remove",
        "one example moves the count by at most 1; Balle and Wang 2018; "
        "`jaxdp.finetune.charged_accuracy`",
        estimates(),
        TWINS,
    ),
)
