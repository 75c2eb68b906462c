"""Accuracy on public or held-out data at no cost, and on private data as a charged release."""

import fractions
import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import Owners, Source
from jaxdp.data.labels import (
    Counts,
    Judged,
    check_examples,
    check_logits,
    count,
    judge,
    labelled_batches,
    refuse_unlabelled,
    warn_if_not_finite,
)
from jaxdp.data.protocol import inputs_of
from jaxdp.finetune.units import check_unit
from jaxdp.privacy import Account, DpEvent, GaussianDpEvent
from jaxdp.release import Release, Till, program, stream
from jaxdp.report import progress_bar
from jaxdp.transforms import noise
from jaxdp.transforms.grids import MOST_BITS
from jaxdp.transforms.parameters import check_finite

Predict = Callable[[Any, jax.Array], jax.Array]

# More records in one release are unlikely. With the steps of an answer, sums stay below 2^62.
_MOST_EXAMPLES = 2**24
_MOST_STEPS = 2**37


class Tally(NamedTuple):
    """The answers about the examples of a public source.

    Attributes:
      correct: The number of right answers.
      not_finite: The number of examples with a NaN or infinite logit. They count as wrong.
      total: The number of examples.
    """

    correct: int
    not_finite: int
    total: int


def tally(
    predict: Predict,
    params: Any,
    source: Source,
    *,
    batch_size: int = 500,
) -> Tally:
    """Counts right answers, and answers with a logit that is not finite, without privacy.

    Arguments and errors are as in `accuracy`.
    """
    check_examples(source, batch_size)
    counts = _counts(predict, params, source, batch_size, each_alone=False)
    refuse_unlabelled(counts.unlabelled, source)
    return Tally(counts.correct, counts.not_finite, len(source))


def accuracy(
    predict: Predict,
    params: Any,
    source: Source,
    *,
    batch_size: int = 500,
) -> float:
    """Returns the fraction of examples whose largest logit is at their label.

    Nothing is charged. `source` must be public or held out. Held-out data must not take part in
    training or selection that claims to be private. For private data use `charged_accuracy`.
    `jaxdp.data.labels` has the rules for one logit, ties and NaN. An example with a logit that is
    not finite is wrong. A warning tells how many there are.

    Args:
      predict: `predict(params, inputs [B, ...]) -> logits [B, K]`, floating point. One logit [B, 1]
        answers class 1 if it is positive. The inputs are the column "image", or else "features", or
        else the dict of all columns but "label".
      params: The parameters for `predict`.
      source: Examples with a column "label" of integers [] in [0, K).
      batch_size: The number of examples per call.

    Raises:
      TypeError, ValueError: source is empty, or not as `jaxdp.data.check_source(source, "label")`
        demands. Or labels or logits have another shape, dtype or range.
    """
    answers = tally(predict, params, source, batch_size=batch_size)
    warn_if_not_finite(answers.not_finite, answers.total)
    return answers.correct / answers.total


def noisy_fraction(
    key: jax.Array,
    count: int,
    total: int,
    noise_multiplier: float,
) -> np.ndarray:
    """Returns (count + noise) / total, clipped to [0, 1], float64 [...] for keys [...].

    It is what `charged_accuracy` releases. A right answer adds `each` <= 2^24 / sigma steps and the
    noise is round(2^24 Z), both integers. So their sum is a rounded Gaussian of multiplier sigma or
    more, and its last digits tell nothing else of the count.
    """
    std = 2**MOST_BITS
    # In rational numbers, so that no rounding lengthens it. Below the minimum sums of 64 bits hold.
    each = min(_MOST_STEPS, math.floor(std / fractions.Fraction(float(noise_multiplier))))
    steps = np.asarray(jax.vmap(_noise_of_count)(key.reshape(-1)), np.int64).reshape(key.shape)
    # What follows is post-processing. Noise of more than 2^24 answers leaves nothing of the count.
    noisy_count = (each * count + steps) / max(1, each)
    return np.clip(noisy_count / total, 0.0, 1.0)


def _noise_of_count(key: jax.Array) -> jax.Array:
    noise_in_steps: jax.Array = noise.rounded_gaussian(key, jnp.float32(0), MOST_BITS)
    return noise_in_steps


def count_correct(
    predict: Predict,
    params: Any,
    source: Source,
    *,
    batch_size: int = 500,
) -> int:
    """Returns the number of right answers, to which `charged_accuracy` adds noise.

    The number is private, and for audits. Arguments are as in `charged_accuracy`.

    Formal guarantees:
      Adding, removing, zeroing out or replacing one example changes the count by at most 1, for all
      labels, inputs and parameters, and whatever `predict` returns. Proof: the count is the sum
      over examples i of c_i = 1[answer i is right]. Every example is in one batch at one place
      where the mask is True, and padding has c = 0 by the mask. c_i is a boolean [] by `judge`,
      which demands logits [B, K] and labels [B] and broadcasts nothing. It reads row i of the
      logits and label i only. Row i is `predict` of example i alone, as a batch of one under
      `jax.vmap`, so it does not depend on other examples even if `predict` mixes its batch. NaN,
      infinities and labels out of range give c_i = 0 and no error. Shapes and dtypes raise before
      any example but the first and last is read. Sums are exact integers below 2^24. The proof
      takes arithmetic as the same at all places of a batch.
    """
    check_count(source, batch_size)
    return _counts(predict, params, source, batch_size, each_alone=True).correct


# Nine arguments, none of which decides another: what is judged on which records (4), who pays how
# much for one of what (3), and where the estimate is kept (2).
def charged_accuracy(
    predict: Predict,
    params: Any,
    source: Source,
    *,
    account: Account,
    noise_multiplier: float,
    batch_size: int = 500,
    unit: str = "example",
    workdir: str | os.PathLike[str] | None = None,
    seed: bytes | None = None,
) -> float:
    """Estimates the accuracy on private data.

    The estimate is a noisy count of right answers over the public number of examples. An example
    with a logit that is not finite, or with a label outside [0, K), is wrong. Their number is
    private and is not released. `tally` on public data tells whether a model makes such logits.

    Args:
      predict, source, batch_size: As in `accuracy`. `predict` is called for each example alone, as
        a batch of one under `jax.vmap`. So a layer that mixes a batch has no effect on other
        examples. The source has at most 2^24 examples.
      params: The parameters for `predict`, public or released, all finite.
      account: The account that is charged, `ledger.account(name)` of the data set.
      noise_multiplier: The standard deviation of the noise on the count. One example changes the
          count by at most 1.
      unit: What one record is, in the words of the ledger: "patient" says that every patient has
          one record. For `jaxdp.data.by_owners` it is what one owner is.
      workdir: A folder for this release only. It keeps the estimate, so a repeated call is free.
          None keeps nothing.
      seed: 16 secret bytes for tests. The default is OS entropy.

    Returns:
      The estimate, clipped to [0, 1]. Before clipping its standard deviation is noise_multiplier /
      len(source), and less than noise_multiplier 2^-23 of it more. It is at least 2^-13 /
      len(source).

    Raises:
      BudgetExceeded: The account cannot pay. Only the first and last examples are read, for a
          check.
      TypeError, ValueError: noise_multiplier is not positive and finite or is noise that float32
        loses, params are not finite, the source is empty or too large, or shapes or dtypes are not
        as in `accuracy`. The account has another unit. The source is of `jaxdp.data.by_owners`, and
        the adjacency of the account is not "zero_out". Nothing is spent. No error depends on an
        example.

    Formal guarantees:
      GaussianDpEvent(noise_multiplier), charged before the count is computed. For a source of
      `jaxdp.data.by_owners` it is GaussianDpEvent(noise_multiplier / max_records), for one owner.
      `count_correct` has the proof that the count has sensitivity 1 for every input. Clipping is
      post-processing. The number of examples is taken to be public. Count and noise are integers,
      so that the guarantee covers the last digits too: delta grows by at most
      (1 + e^epsilon) 2^-94.
    """
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be positive and finite, got {noise_multiplier}. Use "
            "accuracy() on public data."
        )
    noise.check_product("noise_multiplier", noise_multiplier, 1.0)
    # The checks of parameters and logits are before the charge: an error after it would cost budget
    # and depend on private records.
    check_finite(params)
    shapes = check_predict(predict, params, source, batch_size)
    charge = charge_of_count(account, source, noise_multiplier, unit)

    def estimate(secret: bytes) -> dict[str, np.ndarray]:
        exact = count_correct(predict, params, source, batch_size=batch_size)
        key = stream(secret, "accuracy")
        return {"accuracy": noisy_fraction(key, exact, len(source), noise_multiplier)}

    release = Release(
        label="accuracy",
        charges=[charge],
        facts=lambda: [params, source.fingerprint, noise_multiplier, batch_size],
        programs=lambda: [program_of_count(predict, params, shapes)],
        compute=estimate,
    )
    with Till(workdir, seed=seed) as till:
        return float(till.once(release)["accuracy"])


def charge_of_count(
    account: Account, source: Source, noise_multiplier: float, unit: str
) -> tuple[Account, DpEvent]:
    """Returns what a noisy count of right answers costs: the account and the event.

    Raises:
      ValueError: The account has another unit. Or the source is `Owners`, and the adjacency of the
        account is not "zero_out".
    """
    has_owners = isinstance(source, Owners)
    # All records of an owner may be right or wrong together.
    most = source.max_records if isinstance(source, Owners) else 1
    if has_owners and account.adjacency != "zero_out":
        # An owner who leaves frees places of others, so any number of records may change.
        raise ValueError(
            "adjacency must be 'zero_out' for records of jaxdp.data.by_owners, where who owns what "
            f"is public, but account {account.name!r} is registered with {account.adjacency!r}."
        )
    what = "owner" if has_owners else "record"
    check_unit(
        account,
        unit,
        what=what,
        has_owners=has_owners,
        remedy=(
            f"Give unit={account.unit!r} if every {account.unit} is one {what}. Where one has "
            "several records, count one record of each, or take jaxdp.data.by_owners."
        ),
    )
    return account, GaussianDpEvent(float(noise_multiplier) / most)


def check_predict(
    predict: Predict, params: Any, source: Source, batch_size: int
) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Raises before a charge for logits of another shape. Returns the structure of a batch."""
    example = check_count(source, batch_size)
    shapes = _batch_shapes(example, min(batch_size, len(source)))
    _batch_counts.eval_shape(predict, True, params, *shapes)
    return shapes


def program_of_count(
    predict: Predict, params: Any, shapes: tuple[Any, jax.ShapeDtypeStruct]
) -> str:
    """Returns the program that counts right answers, of which `predict` is a part, as text.

    `shapes` are those of `check_predict`.
    """
    return program(_batch_counts, predict, True, params, *shapes)


def check_count(source: Source, batch_size: int) -> Any:
    """Returns the structure of an example of a source that is not too large to be counted."""
    example = check_examples(source, batch_size)
    if len(source) > _MOST_EXAMPLES:
        raise ValueError(
            f"source has {len(source)} examples, and charged_accuracy counts at most "
            f"{_MOST_EXAMPLES}. Take a part of the source."
        )
    return example


def _batch_shapes(example: Any, size: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Returns the structure of a batch of `labelled_batches` from that of an example."""

    def column(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct((size, *x.shape), dtype)

    batch = jax.tree.map(column, example)
    batch["label"] = jax.ShapeDtypeStruct((size,), np.int32)
    return batch, jax.ShapeDtypeStruct((size,), np.bool_)


def _counts(
    predict: Predict,
    params: Any,
    source: Source,
    batch_size: int,
    *,
    each_alone: bool,
) -> Counts:
    """Judges all examples of a source, each alone or a batch at once."""
    batches = labelled_batches(source, batch_size)
    total = -(-len(source) // min(batch_size, len(source)))
    counts = np.zeros(3, np.int64)
    for batch in progress_bar(batches, label="accuracy", unit="batch", total=total):
        counts += np.asarray(_batch_counts(predict, each_alone, params, *batch))
    return Counts(*counts.tolist())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batch_counts(
    predict: Predict,
    each_alone: bool,
    params: Any,
    batch: Any,
    mask: jax.Array,
) -> jax.Array:
    return jnp.stack(count(_answers(predict, each_alone, params, batch), mask))


def _answers(
    predict: Predict,
    each_alone: bool,
    params: Any,
    batch: Any,
) -> Judged:
    """Judges a batch at once, or each example as a batch of one."""
    inputs = inputs_of(batch)
    labels = batch["label"]
    name = "predict(params, inputs)"
    if not each_alone:
        logits = predict(params, inputs)
        check_logits(logits, name=name, count=len(labels))
        return judge(logits, labels)  # as a batch, which is faster and public

    # A prediction that mixed examples of a batch would let one record change many answers, and the
    # count would move by more than 1.
    def one(example: Any) -> jax.Array:
        logits = predict(params, jax.tree.map(lambda x: x[None], example))
        check_logits(logits, name=name, count=1)
        return logits[0]

    return judge(jax.vmap(one)(inputs), labels)
