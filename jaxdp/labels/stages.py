"""Noisy labels in several stages: the labels of one part give the prior of the next.

It is LP-MST of Ghazi et al. 2021, arXiv:2102.06062, Algorithm 4. Two stages are LP-2ST.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp.data import Source, take
from jaxdp.data.order import shuffled
from jaxdp.labels.noisy import (
    NoisyLabels,
    PublicColumns,
    check_account,
    of_rows,
    public_columns,
    released,
)
from jaxdp.privacy import Account
from jaxdp.transforms.responses import Response

Prior = Callable[[NoisyLabels, PublicColumns], Any]


def release_labels_in_stages(
    source: Source,
    prior_from: Prior,
    *,
    account: Account,
    epsilon: float,
    stages: int = 2,
    split_seed: int = 0,
    num_classes: int = 0,
    prior: Any = None,
    columns: Sequence[str] = (),
    workdir: str | os.PathLike[str] | None = None,
    seed: bytes | None = None,
) -> NoisyLabels:
    """Pays for noisy labels whose prior is a model that was trained on the labels of other records.

    The records are divided at random into parts of equal size. The labels of a part are released
    with the prior that the labels of the parts before it gave (LP-MST).

    Args:
      source, account, epsilon, num_classes, columns, seed: As in `release_labels`.
      prior_from: `prior_from(noisy, records)` returns probabilities [m, K] for m records without
        labels, from the noisy labels released so far. It may train a model. It must not read the
        true labels.
      stages: The number of parts, at least 2.
      split_seed: The public seed of the division.
      prior: The PUBLIC prior of the first part: None, [K], or `prior(records)` that returns [m, K]
        for the m records of the part, without labels.
      workdir: A folder for these releases only, with a folder for each part. A call that is made
        again after a crash takes the parts that are kept. `prior_from` must then give the same
        numbers as before.

    Returns:
      All records with noisy labels, in the order of `source`.

    Raises:
      BudgetExceeded, TypeError, ValueError: As in `release_labels`. Also ValueError if the account
        holds charges for parts of another division.

    Formal guarantees:
      `LabelDpEvent(epsilon)` for all records together. The division does not depend on labels, and
      each label is answered once. Given the answers of the parts before, a part is as in
      `release_labels`, and later parts read none of its true labels: a replaced label changes the
      answers of one part only. The ledger takes the maximum over parts.
    """
    if stages < 2 or stages > len(source):
        raise ValueError(
            f"stages must be at least 2 and at most the number of records, got {stages}. "
            "release_labels has one stage."
        )
    public = public_columns(source, num_classes, columns)
    check_account(account)
    order = shuffled(len(source), seed=split_seed)
    division = f"labels in {stages} parts, division {split_seed} of {len(source)} records: "
    _check_division(account, division)
    so_far: NoisyLabels | None = None
    for stage, rows in enumerate(np.array_split(order, stages)):
        part = dataclasses.replace(public, whole=take(source, rows))
        if so_far is not None:
            beliefs = prior_from(so_far, part)
        else:
            beliefs = prior(part) if callable(prior) else prior
        partition = f"{division}part {stage + 1}"
        folder = None if workdir is None else pathlib.Path(workdir) / f"part_{stage + 1}"
        noisy = released(
            part, beliefs, account, epsilon, partition=partition, workdir=folder, seed=seed
        )
        so_far = noisy if so_far is None else _joined(so_far, noisy, public, order)
    assert so_far is not None
    return _in_order(so_far, public, order)


def _check_division(account: Account, division: str) -> None:
    """Raises ValueError if parts of another division have paid.

    Their maximum would say too little about a record that lies in a part of each.
    """
    partitions = account.ledger.events(account.name)
    others = [name for name in partitions if name and not name.startswith(division)]
    if others:
        raise ValueError(
            f"account {account.name!r} holds charges for parts of another division, such as "
            f"{others[0]!r}. Use its split_seed and stages, or release_labels for all records."
        )


def _joined(
    first: NoisyLabels, second: NoisyLabels, public: PublicColumns, order: np.ndarray
) -> NoisyLabels:
    """Returns the noisy labels of two parts that follow each other in `order`."""
    count = len(first) + len(second)
    return dataclasses.replace(
        first,
        whole=take(public.whole, order[:count]),
        labels=np.concatenate([first.labels, second.labels]),
        response=_stacked([first, second]),
    )


def _stacked(parts: Sequence[NoisyLabels]) -> Response:
    """Returns one response with a row for each record of several parts."""
    orders, sizes = [], []
    for part in parts:
        order = part.response.order
        orders.append(np.broadcast_to(order, (len(part), order.shape[1])))
        sizes.append(np.broadcast_to(part.response.sizes, (len(part),)))
    return parts[0].response._replace(order=np.concatenate(orders), sizes=np.concatenate(sizes))


def _in_order(noisy: NoisyLabels, public: PublicColumns, order: np.ndarray) -> NoisyLabels:
    """Returns noisy labels of records in `order` in the order of the records."""
    places = np.argsort(order)
    return dataclasses.replace(
        noisy,
        whole=public.whole,
        labels=noisy.labels[places],
        response=of_rows(noisy.response, places),
    )
