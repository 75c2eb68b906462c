"""Forms of labelled logits, right and wrong, and identifiers, that audits and property tests share.

A form is a function of plain arrays: labels int32 [n], or float32 logits [B, K]. Every consumer of
(logits, labels) must accept the forms that fit and refuse the others before it counts or spends
anything. `VALUES` are records of the right form with unusual numbers.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

CLASSES = 3


class Form(NamedTuple):
    """A form of an array.

    Attributes:
        make: The function of the plain array.
        fits: Whether consumers must accept it. They must give the same answers as for the plain
            array.
    """

    make: Callable[[Any], Any]
    fits: bool = False


def _cast(dtype: Any, fits: bool = False) -> Form:
    """Returns the form of another dtype."""
    return Form(lambda array: array.astype(dtype), fits)


def _one_hot(labels: np.ndarray) -> np.ndarray:
    known = np.clip(labels, 0, CLASSES - 1)
    return np.eye(CLASSES, dtype=np.int32)[known]


# The labels as a column of a table, as a one-hot row, as read from a file of floats, ...
LABELS: Mapping[str, Form] = {
    "int32 [n]": Form(lambda y: y, True),
    "int8 [n]": _cast("int8", True),
    "uint8 [n]": _cast("uint8", True),
    "int64 [n]": _cast("int64", True),
    "uint64 [n]": _cast("uint64", True),
    "int32 [n, 1]": Form(lambda y: y[:, None]),
    "int32 [1, n]": Form(lambda y: y[None]),
    "int32 []": Form(lambda y: y[0]),
    "one-hot [n, K]": Form(_one_hot),
    "one label fewer": Form(lambda y: y[1:]),
    "bool [n]": Form(lambda y: y > 0),
    "float32 [n]": _cast("float32"),
}


# Each is one object, so that consumers that compile it do so once.
LOGITS: Mapping[str, Form] = {
    "float32 [B, K]": Form(lambda z: z, True),
    "bfloat16 [B, K]": Form(lambda z: jnp.asarray(z, jnp.bfloat16), True),
    "float16 [B, K]": _cast("float16", True),
    "float32 [B, 1, K]": Form(lambda z: z[:, None]),
    "float32 [B, K, 1]": Form(lambda z: z[..., None]),
    "float32 [K, B]": Form(lambda z: z.T),
    "float32 [B]": Form(lambda z: z[:, 0]),
    "float32 []": Form(lambda z: z.sum()),
    "float32 [B, 0]": Form(lambda z: z[:, :0]),
    "classes int32 [B]": Form(lambda z: z.argmax(-1)),
    "classes int32 [B, 1]": Form(lambda z: z.argmax(-1)[:, None]),
    "int32 [B, K]": _cast("int32"),
    "bool [B, K]": Form(lambda z: z > 0),
    "complex64 [B, K]": _cast("complex64"),
}


class Values(NamedTuple):
    """Records of the right form, and what is right to say about each.

    Attributes:
        logits: float32 [n, K].
        labels: Integers [n].
        correct, finite, labelled: bool [n], as in `jaxdp.data.labels.Judged`.
    """

    logits: np.ndarray
    labels: np.ndarray
    correct: np.ndarray
    finite: np.ndarray
    labelled: np.ndarray


ANSWERS = np.array([0, 1, 2, 0, 1, 2])
PLAIN_LOGITS = np.where(ANSWERS[:, None] == np.arange(CLASSES), 1.0, -1.0).astype(np.float32)
PLAIN_LABELS = np.array([0, 1, 2, 1, 1, 0], np.int32)
RIGHT = np.array([True, True, True, False, True, False])


def _with_logits(record: int, row: list[float]) -> Values:
    """Returns the plain records with other logits of one record, of which a logit is not finite."""
    values = _but_one(record)
    values.logits[record] = row
    values.finite[record] = False
    return values


def _with_label(record: int, label: int, dtype: Any) -> Values:
    """Returns the plain records with another label of one record, which is no class."""
    values = _but_one(record)
    labels = PLAIN_LABELS.astype(dtype)
    labels[record] = label
    values.labelled[record] = False
    return values._replace(labels=labels)


def _but_one(record: int) -> Values:
    """Returns copies of the plain records, of which one is not right."""
    values = Values(*map(np.copy, _plain()))
    values.correct[record] = False
    return values


def _plain() -> Values:
    every = np.ones_like(RIGHT)
    return Values(PLAIN_LOGITS, PLAIN_LABELS, RIGHT, every, every)


VALUES: Mapping[str, Values] = {
    "plain": _plain(),
    "all NaN, label 0": _with_logits(0, [np.nan] * CLASSES),
    "NaN beside the largest": _with_logits(1, [np.nan, 1, -1]),
    "an infinite logit at the label": _with_logits(2, [-1, -1, np.inf]),
    "minus infinity beside the largest": _with_logits(4, [-np.inf, 1, -1]),
    "label -1": _with_label(0, -1, np.int32),
    "label K": _with_label(0, CLASSES, np.int32),
    "label 255 of uint8": _with_label(1, 255, np.uint8),
    "label that int32 would wrap to a class": _with_label(1, 2**32 + 1, np.int64),
    "label that int64 would wrap to a class": _with_label(0, 2**64 - 2**32, np.uint64),
}


def broadcasting_count(logits: Any, labels: Any) -> int:
    """Returns the count of right answers as version 0.1 made it: shapes broadcast, and the largest
    of NaN is class 0.

    It is the broken twin of `jaxdp.data.labels.judge`.
    """
    return int((np.asarray(logits).argmax(-1) == np.asarray(labels)).sum())


# --- Identifiers --------------------------------------------------------------------------------

# Each row is one person, in all spellings that are this person. `people.toml` has those of text,
# integers and dates. A list there is an identifier of several columns.
_TABLE = Path(__file__).with_name("people.toml").read_text(encoding="utf-8")
# Bytes as of a file that was not decoded, numbers of NumPy, and integers of more than 64 bits.
_MORE: Mapping[Any, tuple[Any, ...]] = {
    "123": (np.int64(123), b"123"),
    "007": (b"007",),
    "7": (np.uint8(7),),
    "12345678901234567890": (12345678901234567890,),
    "12345678901234567891": (12345678901234567891,),
    "Zo\u00eb": ("Zo\u00eb".encode(),),
}
PEOPLE: list[tuple[Any, ...]] = []
for _spellings in tomllib.loads(_TABLE)["people"]:
    _person = [tuple(one) if isinstance(one, list) else one for one in _spellings]
    PEOPLE.append((*_person, *_MORE.get(_person[0], ())))
