"""Label differential privacy: noisy labels of records whose features are public, paid once.

    ledger.register("survey", adjacency="replace_label", unit="respondent", epsilon=2.0, delta=0.0)
    noisy = release_labels(records, account=ledger.account("survey"), epsilon=2.0)
    # `noisy` is a source like `records`. All that is trained on it costs nothing more.

The guarantee is for the replacement of ONE LABEL. Features, and who is in the data, are not
protected: they count as public. Where the features tell the label, nothing is hidden. So the
account has the adjacency "replace_label", which no claim for whole examples shares.

The labels are answered by RRWithPrior (`jaxdp.transforms.responses`). A prior makes more answers
right at the same epsilon. It is public: it comes from public data, from `release_label_prior`,
which is charged, or from a model that was trained on the noisy labels of other records:
`release_labels_in_stages`, which is LP-MST of Ghazi et al. 2021, arXiv:2102.06062, Algorithm 4.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from jaxdp.data import Groups, Owners, Source, check_source, read_column
from jaxdp.privacy import Account, LabelDpEvent
from jaxdp.release import Release, Till, stream
from jaxdp.transforms.responses import Response, numbers, with_prior

_PUBLIC_COLUMNS = ("image", "features")
_ROWS_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class PublicColumns:
    """The columns of a source that count as public: a `Source` without labels.

    Attributes:
      whole: The records.
      columns: The names of the public columns.
      num_classes, name: Those of the records.
    """

    whole: Source = dataclasses.field(repr=False)
    columns: tuple[str, ...]
    num_classes: int
    name: str

    def __len__(self) -> int:
        return len(self.whole)

    def gather(self, indices: np.ndarray) -> dict[str, Any]:
        """Returns the public columns of the records at `indices`."""
        batch = self.whole.gather(np.asarray(indices, np.int64))
        return {column: batch[column] for column in self.columns}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of what `gather` returns. It does not depend on a true label."""
        digest = hashlib.sha256(repr((type(self).__name__, len(self), self.num_classes)).encode())
        for start in range(0, len(self), _ROWS_AT_ONCE):
            stop = min(len(self), start + _ROWS_AT_ONCE)
            batch = self.gather(np.arange(start, stop))
            for column in sorted(batch):
                array = np.asarray(batch[column])
                digest.update(repr((column, array.dtype.str, array.shape)).encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyLabels(PublicColumns):
    """Records with released labels, a `Source` that may be published with its features.

    Attributes:
      labels: int32 [n], the released labels, in the order of the records.
      response: How each was drawn. All of it is public.
      is_corrected: Whether examples have the column "likelihood", see `corrected`.
    """

    labels: np.ndarray = dataclasses.field(repr=False)
    response: Response = dataclasses.field(repr=False)
    is_corrected: bool = False

    def gather(self, indices: np.ndarray) -> dict[str, Any]:
        """Returns the public columns and the noisy labels of the records at `indices`."""
        rows = np.asarray(indices, np.int64)
        batch = super().gather(rows) | {"label": self.labels[rows]}
        if self.is_corrected:
            batch["likelihood"] = self.likelihoods(rows)
        return batch

    def likelihoods(self, indices: np.ndarray) -> np.ndarray:
        """Returns P(released label | true label c) for every class c, float32 [m, K]."""
        rows = np.asarray(indices, np.int64)
        some = of_rows(self.response, rows)
        return some.likelihood(self.labels[rows])

    def corrected(self) -> Self:
        """Returns the source with a column "likelihood" for forward correction of a loss.

        `jaxdp.losses.corrected_cross_entropy(logits, likelihood)` reads the column in place of the
        label (Patrini et al. 2017, arXiv:1609.03683, Theorem 2).
        """
        return dataclasses.replace(self, is_corrected=True)


def of_rows(response: Response, rows: np.ndarray) -> Response:
    """Returns the response of some labels."""
    if len(response.order) == 1:
        return response
    return response._replace(order=response.order[rows], sizes=response.sizes[rows])


def release_labels(
    source: Source,
    *,
    account: Account,
    epsilon: float,
    num_classes: int = 0,
    prior: Any = None,
    columns: Sequence[str] = (),
    workdir: str | os.PathLike[str] | None = None,
    seed: bytes | None = None,
) -> NoisyLabels:
    """Pays for noisy labels of all records, and draws them by RRWithPrior.

    Args:
      source: Records with an integer column "label" [].
      account: The account of the records, registered with adjacency="replace_label". Its unit is a
        record: owners with several records would need an epsilon for all their labels.
      epsilon: The epsilon of one label, finite and > 0.
      num_classes: K in [2, 2**16], a public declaration. 0 takes that of the source.
      prior: PUBLIC probabilities of the classes, [K] for all records or [n, K] for each. None
        answers with all classes, by K-ary randomised response.
      columns: The other columns of the result, which this call declares public. The default is
        "image" and "features", whichever there are.
      workdir: A folder for this release only. It keeps the labels, which are then not drawn or paid
        for again.
      seed: 16 secret bytes, to reproduce a release in a test. The default is OS entropy.

    Returns:
      The records with the noisy labels, in the order of `source`.

    Raises:
      BudgetExceeded: Nothing is spent, nothing is released.
      TypeError, ValueError: The adjacency is not "replace_label", or an argument is out of range or
        of another shape. Nothing is spent. No error depends on a label.

    Formal guarantees:
      `LabelDpEvent(epsilon)`: the labels are (epsilon, 0)-DP for the replacement of one label by
      any integer, for all records together, if `prior` and `columns` do not depend on the labels.
      Each label is answered once, with bits of its own, so the answers to all other labels cancel
      from the ratio. `Response.answer` has the proof for one label. A label that is no class counts
      as one outside of the answers. A call with a workdir that is interrupted and made again gives
      the same labels and pays once (`jaxdp.release`).
    """
    public = public_columns(source, num_classes, columns)
    return released(public, prior, account, epsilon, workdir=workdir, seed=seed)


def public_columns(source: Source, num_classes: int, columns: Sequence[str]) -> PublicColumns:
    """Returns the public columns of records with labels. Raises the errors of `release_labels`."""
    if isinstance(source, Groups | Owners):
        raise TypeError(
            f"source must be records, got jaxdp.data.{type(source).__name__}. The epsilon of one "
            "label does not cover all labels of an owner. Give one record of each owner."
        )
    example = check_source(source, "label", values=False)
    label = example["label"]
    if label.shape != () or not jnp.issubdtype(label.dtype, jnp.integer):
        raise ValueError(
            "label of source must be one integer for each record, got shape "
            f"{list(label.shape)} and dtype {label.dtype}."
        )
    names = tuple(columns) or tuple(name for name in _PUBLIC_COLUMNS if name in example)
    unknown = [name for name in names if name not in example or name == "label"]
    if not names or unknown:
        raise ValueError(
            f"columns must name public columns besides 'label' among {sorted(example)}, got "
            f"{list(names)}."
        )
    classes = num_classes or getattr(source, "num_classes", 0)
    return PublicColumns(source, names, classes, getattr(source, "name", "records"))


def released(
    public: PublicColumns,
    prior: Any,
    account: Account,
    epsilon: float,
    *,
    partition: str | None = None,
    workdir: str | os.PathLike[str] | None,
    seed: bytes | None,
) -> NoisyLabels:
    """Pays for labels and draws them. `partition` is the part of the records that pays."""
    response = with_prior(prior, num_classes=public.num_classes, epsilon=epsilon)
    check_account(account)
    rows = len(response.order)
    if rows not in (1, len(public)):
        raise ValueError(
            f"prior must be [K] or [n, K] with a row for each record, got {rows} rows for another "
            "number of records."
        )

    def compute(secret: bytes) -> dict[str, Any]:
        true = read_column(public.whole, "label")
        drawn = numbers(stream(secret, "labels"), len(true))
        return {"labels": response.answer(drawn, true)}

    def facts() -> list[Any]:
        return [public.whole.fingerprint, public.num_classes, *response]

    what = Release(
        label="labels",
        charges=[(account, LabelDpEvent(float(epsilon)))],
        facts=facts,
        compute=compute,
        partition=partition,
    )
    with Till(workdir, seed=seed) as till:
        labels = till.once(what)["labels"]
    fields = {field.name: getattr(public, field.name) for field in dataclasses.fields(public)}
    return NoisyLabels(**fields, labels=labels, response=response)


def check_account(account: Account) -> None:
    """Raises ValueError unless an account is for labels only."""
    if account.adjacency != "replace_label":
        raise ValueError(
            f"account {account.name!r} has the adjacency {account.adjacency!r}, a claim for whole "
            "examples, and a release of labels is a claim for labels only: it shows the features. "
            "Register the records with adjacency='replace_label'."
        )
