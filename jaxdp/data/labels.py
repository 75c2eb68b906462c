"""Labelled logits: the one place that checks their shapes and decides which answers are right.

Every consumer of (logits, labels) in this library calls these functions: accuracies, private
counts, calibration and the serving loop. They accept arrays of NumPy and of JAX, also under
`jax.jit` and `jax.vmap`.

    logits [n, K]   floating point. One logit [n, 1] answers class 1 if it is positive, else 0.
    labels [n]      integers in [0, K), or in [0, 2) for one logit.

| a record with                            | counts as                       |
|------------------------------------------|---------------------------------|
| a NaN or infinite logit                  | wrong, and not `finite`         |
| a label outside of the range, such as -1 | wrong, and not `labelled`       |
| several largest logits                   | an answer for the first of them |

A shape that broadcasts is not a shape that fits: [n] answers against [n, 1] labels would compare
n^2 pairs. So all shapes must be as above, and nothing is reshaped. Errors about shapes and dtypes
may occur in a mechanism. They show no number of records, which may be private. Errors about values
are in `check_range` and `refuse_unlabelled`, for data whose owner sees the error. A mechanism
counts instead.
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.numbers import check_batch
from jaxdp.data.physical import pad_to_physical
from jaxdp.data.protocol import Source, check_source

_INT32 = np.iinfo(np.int32)


class Judged(NamedTuple):
    """What `judge` says about n records, arrays of NumPy or of JAX.

    Attributes:
      correct: bool [n], whether the answer is the label. False if the record is not `finite` or not
          `labelled`.
      finite: bool [n], whether all logits are finite.
      labelled: bool [n], whether the label is a class of the logits.
    """

    correct: Any
    finite: Any
    labelled: Any


def check_logits(
    logits: Any,
    *,
    name: str = "logits",
    count: int | None = None,
    least: int = 1,
) -> None:
    """Raises ValueError or TypeError unless logits are floating point [n, K].

    It reads shape and dtype only.

    Args:
      logits: An array, or anything with a shape and a dtype.
      name: The name of the logits in errors.
      count: The number n of records. None allows any.
      least: The smallest number K of classes.
    """
    _check_array(logits, name)
    shape = tuple(logits.shape)
    if len(shape) != 2 or shape[1] < least or count not in (None, shape[0]):
        raise ValueError(
            f"{name} must be [n, K], one row of K >= {least} logits for each record, got "
            f"{_shown(shape, count)}. Add a batch axis, or remove axes of length 1. Give logits, "
            "not classes."
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be floating point, got dtype {logits.dtype}. Give the logits of all "
            "classes, not classes."
        )


def check_labels(labels: Any, count: int, *, name: str = "labels") -> None:
    """Raises ValueError or TypeError unless labels are integers [count].

    It reads shape and dtype only.
    """
    _check_array(labels, name)
    shape = tuple(labels.shape)
    if shape != (count,):
        raise ValueError(
            f"{name} must be [n], one class number for each record, got {_shown(shape, count)}. "
            "Remove axes of length 1. Take argmax over one-hot labels."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be integers, got dtype {labels.dtype}. Cast whole numbers, for example "
            "with labels.astype(numpy.int32)."
        )


def check_labelled(
    logits: Any,
    labels: Any,
    *,
    names: tuple[str, str] = ("logits", "labels"),
    least: int = 1,
) -> None:
    """Raises ValueError or TypeError unless logits are floats [n, K] and labels integers [n].

    `names` are the names of both in errors, and `least` is the smallest K. It reads shapes and
    dtypes only.
    """
    check_logits(logits, name=names[0], least=least)
    check_labels(labels, logits.shape[0], name=names[1])


def check_range(labels: Any, num_classes: int, *, name: str = "labels") -> None:
    """Raises ValueError unless all labels are in [0, num_classes). The error shows no label.

    It depends on the labels. So it is for their owner, and for public data, and never inside of a
    mechanism.
    """
    labels = np.asarray(labels)
    if not np.all(_inside(labels, num_classes)):
        raise ValueError(
            f"{name} must be in [0, {num_classes}), the classes. Some labels are outside. Correct "
            "the labels, or count all possible classes, not only observed ones."
        )


def classes_of(logits: Any) -> int:
    """Returns the number of classes of logits [n, K]: K, or 2 for one logit."""
    return max(int(logits.shape[1]), 2)


def narrow(labels: Any) -> np.ndarray:
    """Returns integer labels as int32, and -1 for a label that int32 cannot hold.

    JAX without x64 would wrap it: 2**32 + 3 would become class 3.
    """
    labels = np.asarray(labels)
    return np.where(_inside(labels, _INT32.max), labels, -1).astype(np.int32)


def predicted(logits: Any) -> Any:
    """Returns the class of the (first) largest logit of each record [n, K], int32 [n].

    It is -1 if a logit is not finite.
    """
    check_logits(logits)
    xp: Any = np if isinstance(logits, np.ndarray) else jnp
    if logits.dtype.itemsize < 4:
        logits = logits.astype(np.float32)
    best = logits.argmax(axis=1) if logits.shape[1] > 1 else logits[:, 0] > 0
    is_finite = xp.isfinite(logits).all(axis=1)
    return xp.where(is_finite, best, -1).astype(np.int32)


def judge(logits: Any, labels: Any) -> Judged:
    """Compares the answers of logits [n, K] with labels [n].

    The result is of JAX if one argument is, otherwise of NumPy.

    Raises:
      TypeError, ValueError: Shapes or dtypes are not as at the top of this page.

    Formal guarantees:
      Every entry is a function of its own row of the logits and its own label. So replacing one
      record changes one entry of `correct` by at most 1, whatever numbers the record holds.
    """
    check_labelled(logits, labels)
    answers = predicted(logits)
    labelled = _inside(labels, classes_of(logits))
    xp: Any = np if isinstance(labels, np.ndarray) else jnp
    truth = xp.where(labelled, labels, -2).astype(np.int32)  # equals no answer
    return Judged(answers == truth, answers >= 0, labelled)


# --- Counts over a source -----------------------------------------------------------------------


class Counts(NamedTuple):
    """Numbers of right answers, of answers with a logit that is not finite, of labels out of range.

    The numbers are int32 [] on the device, and integers or int64 arrays after sums on the host.
    """

    correct: Any
    not_finite: Any
    unlabelled: Any


def count(judged: Judged, mask: jax.Array) -> Counts:
    """Counts the records where the mask, bool [n], is True."""
    not_finite = ~judged.finite
    unlabelled = ~judged.labelled
    return Counts(
        correct=(judged.correct & mask).sum(),
        not_finite=(not_finite & mask).sum(),
        unlabelled=(unlabelled & mask).sum(),
    )


def check_examples(source: Source, batch_size: int) -> Any:
    """Returns the structure of an example, as `check_source`, if it has an integer label [].

    Errors show shapes and dtypes only.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    # `labelled_batches` converts labels, and an error must not tell of one.
    example = check_source(source, "label", values=False)
    label = example["label"]
    column = jax.ShapeDtypeStruct((len(source), *label.shape), label.dtype)
    check_labels(column, len(source), name=f"label of source {_name(source)!r}")
    if not len(source):
        raise ValueError(f"source {_name(source)!r} has no examples. Accuracy needs at least one.")
    return example


def labelled_batches(source: Source, batch_size: int) -> Iterator[tuple[Any, jax.Array]]:
    """Yields the batches of a source on the device, labels as int32, each with its mask."""
    size = min(batch_size, len(source))
    physical, masks = pad_to_physical(np.arange(len(source)), size)
    for rows, mask in zip(physical, masks, strict=True):
        batch = source.gather(rows)
        # A label that no int32 holds is wrong, and no error.
        labelled = check_batch({**batch, "label": narrow(batch["label"])})
        yield jax.device_put((labelled, mask))


def refuse_unlabelled(unlabelled: int, source: Source) -> None:
    """Raises ValueError if a PUBLIC source has labels out of range."""
    if unlabelled:
        raise ValueError(
            f"label of source {_name(source)!r} must be in [0, K), the classes of the logits, but "
            f"{unlabelled} of {len(source)} are outside. Correct the labels, or give a model with "
            "more classes."
        )


def _name(source: Source) -> str:
    return getattr(source, "name", "")


def warn_if_not_finite(count: int, total: int, *, stacklevel: int = 3) -> None:
    """Warns that `count` of `total` answers about PUBLIC data had a logit that is not finite."""
    if count:
        warnings.warn(
            f"{count} of {total} answers have a logit that is NaN or infinite, and count as "
            "wrong. Check the parameters and the inputs.",
            stacklevel=stacklevel,
        )


def _check_array(value: Any, name: str) -> None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            f"{name} must be an array, got {type(value).__name__}. Return one array of logits or "
            "labels."
        )


def _shown(shape: tuple[int, ...], count: int | None) -> str:
    """Returns a shape in words, without the number of records.

    Example: (20, 3) becomes "shape [n, 3]", with " of another n" if 20 is not `count`.
    """
    if not shape:
        return "shape []"
    axes = ", ".join(["n", *map(str, shape[1:])])
    is_other = count not in (None, shape[0])
    return f"shape [{axes}]{' of another n' if is_other else ''}"


def _inside(labels: Any, end: int) -> Any:
    """Returns whether labels are in [0, end), computed in a dtype that holds both."""
    if labels.dtype.itemsize < 4:
        labels = labels.astype(np.int32)
    return (labels >= 0) & (labels < end)
