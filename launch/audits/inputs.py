"""Forms of labelled logits, right and wrong, and identifiers, that audits and property tests share.

A form is a function of plain arrays: labels int32 [n], or float32 logits [B, K]. Every consumer of
(logits, labels) must accept the forms that fit and refuse the others before it counts or spends
anything. `VALUES` are records of the right form with unusual numbers.
"""

import datetime
from collections.abc import Callable, Mapping
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


def _one_hot(labels: np.ndarray) -> np.ndarray:
    return np.eye(CLASSES, dtype=np.int32)[np.clip(labels, 0, CLASSES - 1)]


# The labels as a column of a table, as a one-hot row, as read from a file of floats, ...
LABELS: Mapping[str, Form] = {
    "int32 [n]": Form(lambda y: y, True),
    "int8 [n]": Form(lambda y: y.astype(np.int8), True),
    "uint8 [n]": Form(lambda y: y.astype(np.uint8), True),
    "int64 [n]": Form(lambda y: y.astype(np.int64), True),
    "uint64 [n]": Form(lambda y: y.astype(np.uint64), True),
    "int32 [n, 1]": Form(lambda y: y[:, None]),
    "int32 [1, n]": Form(lambda y: y[None]),
    "int32 []": Form(lambda y: y[0]),
    "one-hot [n, K]": Form(_one_hot),
    "one label fewer": Form(lambda y: y[1:]),
    "bool [n]": Form(lambda y: y > 0),
    "float32 [n]": Form(lambda y: y.astype(np.float32)),
}


# Each is one object, so that consumers that compile it do so once.
LOGITS: Mapping[str, Form] = {
    "float32 [B, K]": Form(lambda z: z, True),
    "bfloat16 [B, K]": Form(lambda z: jnp.asarray(z, jnp.bfloat16), True),
    "float16 [B, K]": Form(lambda z: z.astype(np.float16), True),
    "float32 [B, 1, K]": Form(lambda z: z[:, None]),
    "float32 [B, K, 1]": Form(lambda z: z[..., None]),
    "float32 [K, B]": Form(lambda z: z.T),
    "float32 [B]": Form(lambda z: z[:, 0]),
    "float32 []": Form(lambda z: z.sum()),
    "float32 [B, 0]": Form(lambda z: z[:, :0]),
    "classes int32 [B]": Form(lambda z: z.argmax(-1)),
    "classes int32 [B, 1]": Form(lambda z: z.argmax(-1)[:, None]),
    "int32 [B, K]": Form(lambda z: z.astype(np.int32)),
    "bool [B, K]": Form(lambda z: z > 0),
    "complex64 [B, K]": Form(lambda z: z.astype(np.complex64)),
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
    logits, fine = PLAIN_LOGITS.copy(), np.arange(len(RIGHT)) != record
    logits[record] = row
    return Values(logits, PLAIN_LABELS, RIGHT & fine, fine, np.ones_like(fine))


def _with_label(record: int, label: int, dtype: Any) -> Values:
    """Returns the plain records with another label of one record, which is no class."""
    labels, fine = PLAIN_LABELS.astype(dtype), np.arange(len(RIGHT)) != record
    labels[record] = label
    return Values(PLAIN_LOGITS, labels, RIGHT & fine, np.ones_like(fine), fine)


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

# Each row is one person, in all spellings that are this person.
PEOPLE = [
    ("1_23",),
    ("12_3",),
    ("123", " 123", "123\t", 123, np.int64(123), b"123"),
    ("007", b"007", "007 "),
    ("7", 7, np.uint8(7), "\u00a07"),
    ("+7",),
    ("7.0",),
    ("-0",),
    ("0", 0),
    ("12345678901234567890", 12345678901234567890),
    ("12345678901234567891", 12345678901234567891),
    ("200001.01",),
    ("200001.02",),
    ("200001.03",),
    ("200001.04",),
    ("16777216", 16777216),
    ("16777217", 16777217),
    ("1e3",),
    ("1000", 1000),
    ("P1", "P1\n"),
    ("p1",),
    ("Zo\u00eb", "Zoe\u0308", "Zo\u00eb".encode()),
    ("Zoe",),
    ("\ufb01", "\ufb01 "),  # a ligature, which NFKC would make "fi"
    ("fi",),
    ("\u0663",),  # the Arabic digit three, which int() reads as 3
    ("3", 3),
    ("NA",),
    ("nan",),
    ("None",),
    ("0x1f",),
    ("2026-01-02", datetime.date(2026, 1, 2)),
    (("site 1", "4"), ("site 1 ", 4)),
    (("site 1", "04"),),
]
