"""Means and standard deviations of the columns of a table, as a charged release.

    scaler = jaxdp.finetune.charged_scaler(
        patients, {"age": (0, 120), "bmi": (10, 60)}, account=account, noise_multiplier=10.0
    )
    train = scaler.apply(patients)  # mean 0 and deviation 1, and a missing cell is at the mean

A scaler or an imputer that is fitted to private rows is a release. This one is a single Gaussian:

    1. u = cell, cut to its public range, from [low, high] to [-1, 1]
    2. v = (u, u^2 - 1/2) of a column, and (u, u^2 - 1/2, 1/2) if its missing cells are known;
       a missing cell or NaN then has (0, 0, -1/2), and NaN of the first kind 0     `contributions`
    3. S = sum over rows of v, or over owners of the mean of v over their rows, each in steps and
       rounded towards 0                                                            `column_sums`
    4. S + z C N(0, I), with C = sqrt(5/4 a + 3/2 b) for a columns of the first kind and b of the
       second, in steps and rounded                                                 `sensitivity`
    5. mean and deviation of u by the public number n, or by the noisy number of cells `_fitted`

**Proof.** Step 2 has ||v||^2 = u^2 + (u^2 - 1/2)^2 = u^4 + 1/4 <= 5/4, or 1/4 more with the third
number, and at most 1/4 for a missing cell. So all columns of a row together have a norm of at most
C. The mean of vectors in a ball is in the ball, so the same holds for an owner. A row or owner that
joins, leaves or is zeroed moves S by at most C, and one that is replaced by at most 2 C: steps 3
and 4 are one Gaussian of multiplier z. Steps 5 and after are post-processing. The shift by 1/2
makes C smaller: without it, C^2 would be 2 a + 3 b.

**In integers.** A step is z C 2^-24, and the noise is 2^24 N(0, 1), rounded to integers and drawn
by integers (`jaxdp.transforms.noise.rounded`). An integer plus such noise is the rounding of the
integer plus the normal, so what is released is post-processing of step 4. To round v towards 0
makes it no longer, and C (1 - 2^-30) stands for C there, which is more than the rounding of
float64. Noise in floats has a coarser grid than a sum in float64. The last digits of their total
would be those of the sum, whatever the noise.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import Examples, Groups, Owners, Source, check_source
from jaxdp.data.groups import Records
from jaxdp.data.tabular import indicator_of, is_range
from jaxdp.files import read_json, write_json
from jaxdp.finetune.query import is_floating
from jaxdp.finetune.units import check_unit
from jaxdp.privacy import Account, GaussianDpEvent
from jaxdp.release import Release, Till, digest, stream
from jaxdp.transforms import noise
from jaxdp.transforms.grids import MOST_BITS

_ROWS_AT_ONCE = 4096
_STD = 2.0**MOST_BITS  # of the noise, in steps
_MOST_SUM = 2.0**62
# The room for the rounding of float64, in v and in its mean over the rows of an owner.
_ROOM = 1 - 2.0**-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaler:
    """What `charged_scaler` releases: a function of the features of one row.

    Attributes:
      columns: The positions of the k scaled columns among the features.
      missing: For each, the position of the feature that says which of its cells were missing, or
        -1.
      low, high: The public range of each, to which cells are cut.
      mean, std: What is subtracted from each, and its divisor.
    """

    columns: tuple[int, ...]
    missing: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, tuple(getattr(self, field.name)))

    def normalise(self, features: jax.Array) -> jax.Array:
        """Returns features [..., d] with the columns scaled. A missing cell and NaN become 0.

        Features that are integers become float32.
        """
        features = jnp.asarray(features)
        if not is_floating(features):  # Integers would cut the means to integers.
            features = features.astype(jnp.float32)
        cells = features[..., list(self.columns)]

        def of_columns(numbers: Sequence[float]) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(numbers, features.dtype), cells.shape)

        # The same cut as in the fit: a cell out of its public range has the value of the bound.
        inside = jnp.clip(cells, of_columns(self.low), of_columns(self.high))
        scaled = (inside - of_columns(self.mean)) / of_columns(self.std)
        has_count = jnp.broadcast_to(np.array(self.missing) >= 0, cells.shape)  # -1 without
        is_missing = (features[..., list(self.missing)] == 1) & has_count
        filled = jnp.where(is_missing | jnp.isnan(cells), 0, scaled)  # the mean
        return features.at[..., list(self.columns)].set(filled)

    def apply(self, source: Examples) -> Examples:
        """Returns a source with the column "features" scaled, float32 [d] each."""
        features = jnp.asarray(source.column("features"), jnp.float32)
        arrays = {**source.arrays, "features": np.asarray(self.normalise(features))}
        return source.changed(f"scaled {digest(dataclasses.asdict(self))}", arrays=arrays)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file."""
        write_json(pathlib.Path(path), dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file of `save`."""
        fields = [field.name for field in dataclasses.fields(cls)]
        content = read_json(pathlib.Path(path), keys=fields)
        return cls(**{name: content[name] for name in fields})


class Columns(NamedTuple):
    """The columns of a table that are measured. The fields are those of `Scaler`."""

    columns: Sequence[int]
    missing: Sequence[int]
    low: np.ndarray
    high: np.ndarray

    @property
    def has_count(self) -> np.ndarray:
        """Whether missing cells are known, bool [k]."""
        return np.asarray(self.missing) >= 0

    @property
    def middle(self) -> np.ndarray:
        """The middle of each range, float64 [k]."""
        return (self.low + self.high) / 2

    @property
    def half(self) -> np.ndarray:
        """Half the width of each range, float64 [k]."""
        return (self.high - self.low) / 2


def contributions(features: np.ndarray, measured: Columns) -> np.ndarray:
    """Returns the vectors v of rows, float64 [..., 3, k], from features [..., d].

    The third number of a column without a count is 0.
    """
    cells = features[..., list(measured.columns)].astype(np.float64)
    is_number = np.isfinite(cells)
    has_count = measured.has_count
    is_missing = (features[..., list(measured.missing)] == 1) & has_count
    is_read = is_number & ~is_missing
    middle = measured.middle
    filled = np.where(is_read, cells, middle)
    inside = np.clip(filled, measured.low, measured.high)
    u = np.clip((inside - middle) / measured.half, -1, 1)  # rounding may leave [-1, 1]
    first = np.where(is_read, u, 0)
    second = np.where(is_read, u**2 - 1 / 2, 0)
    counted = np.where(is_read, 1 / 2, -1 / 2)
    third = np.where(has_count, counted, 0)
    return np.stack([first, second, third], axis=-2)


def column_sums(source: Source, measured: Columns, step: float) -> np.ndarray:
    """Returns the sums S in steps, int64 [3, k]. They are private, and for audits."""
    sums = np.zeros((3, len(measured.columns)), np.int64)
    for start in range(0, len(source), _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, len(source))
        rows = np.arange(start, end)
        batch = source.gather(rows)
        if isinstance(batch, Records):
            of_records = contributions(np.asarray(batch.records["features"]), measured)
            present = batch.present[:, :, None, None]
            totals = (of_records * present).sum(axis=1)
            # The mean over the rows of an owner, so that an owner counts as one, of norm <= C.
            each = totals / present.sum(axis=1)
        else:
            each = contributions(np.asarray(batch["features"]), measured)
        sums += rounded(each, step).sum(axis=0)
    return sums


def rounded(vectors: np.ndarray, step: float) -> np.ndarray:
    """Returns vectors in steps, rounded towards 0, which makes none longer. int64."""
    return np.trunc(vectors * (_ROOM / step)).astype(np.int64)


def sensitivity(measured: Columns) -> float:
    """Returns C, how far a row or owner that joins or leaves moves the sums."""
    counted = int(measured.has_count.sum())
    others = len(measured.columns) - counted
    return math.sqrt(5 / 4 * others + 3 / 2 * counted)


def step_of(measured: Columns, noise_multiplier: float, total: int) -> float:
    """Returns the public step of the sums of `total` rows or owners.

    Raises:
      ValueError: noise_multiplier is so small that the sums could overflow, or so large or small
        that float32 has no such noise.
    """
    noise.check_product("noise_multiplier", noise_multiplier, sensitivity(measured))
    # No coordinate of a row exceeds C.
    if total * (_STD / noise_multiplier) > _MOST_SUM:
        least = total * (_STD / _MOST_SUM)
        raise ValueError(
            f"noise_multiplier must be at least {least:.2g} for {total} rows, whose sums are "
            f"integers of 64 bits, got {noise_multiplier!r}. Such an epsilon protects nobody: "
            "compute a scaler of public rows with NumPy."
        )
    return noise_multiplier * sensitivity(measured) / _STD


def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws the noise of the sums in steps, int32."""
    return noise.rounded_gaussian(key, jnp.zeros(shape, jnp.float32), MOST_BITS)


def charged_scaler(
    source: Examples | Groups,
    ranges: Mapping[str, tuple[float, float]],
    *,
    account: Account,
    noise_multiplier: float,
    unit: str = "example",
    workdir: str | os.PathLike[str] | None = None,
    seed: bytes | None = None,
) -> Scaler:
    """Releases the means and standard deviations of columns of private rows.

    The mean of a column is over its cells that are not missing. Where `source` has the feature "age
    is missing" (`indicators=` of `jaxdp.data.from_csv`), the rows with 1 there do not count for
    "age", and their number is part of the release. The constant of `missing=` then plays no role.
    For owners with several rows, the mean over owners of the mean over their rows is released.

    Args:
      source: The private rows, with the column "features" float [d] and with `feature_names`, or
        `by_group` of such rows. Without names, columns are called "0", "1" and so on.
      ranges: {column: (low, high)}, public numbers in the units of the feature. Cells outside are
        cut to them. The narrower a range, the smaller is the error. A column with `ranges=` of
        `from_csv` has (0, 1). Other columns stay as they are.
      account: The account that is charged, `ledger.account(name)` of the data set.
      noise_multiplier: z, the standard deviation of the noise over C. The error of a mean is about
        z C / n half ranges, where C = sqrt(5/4 k) for k columns whose missing cells are unknown,
        and at most sqrt(3/2 k).
      unit: What one row is, or one owner for `by_group`, in the words of the ledger. For rows,
        "patient" says that every patient has one row.
      workdir: A folder for this release only. It keeps the estimates, so a repeated call is free.
        None keeps nothing.
      seed: 16 secret bytes for tests. The default is OS entropy.

    Returns:
      The scaler. A deviation is at least sqrt(z C / n) half ranges, below which it would be noise.

    Raises:
      BudgetExceeded: The account cannot pay. Only the first and last rows are read, for a check.
      ValueError: noise_multiplier is not positive and finite, or below 2^-38 for each row, or a
        range is none, or a name is no feature, or the account has another unit. Nothing is spent.
      TypeError: source is no `Source`, or its rows have several owners (`by_owners`).

    Formal guarantees:
      GaussianDpEvent(noise_multiplier), charged before the rows are read. The module has the proof
      for add/remove, zero-out and replace-one, for rows and for owners with several rows, and for
      every content of the cells. The number of rows or owners is taken to be public. Sums and noise
      are integers, so that the guarantee covers the last digits too: delta grows by at most
      (1 + e^epsilon) 2^-94 for each sum.
    """
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be positive and finite, got {noise_multiplier}. A scaler of "
            "public rows needs no ledger: compute it with NumPy."
        )
    if isinstance(source, Owners):
        raise TypeError(
            "source must be rows or jaxdp.data.by_group, got jaxdp.data.Owners. The proof is for "
            "one owner of a row. Give public ranges to from_csv, and train without a scaler."
        )
    is_owner = isinstance(source, Groups)
    check_unit(
        account,
        unit,
        what="owner of several rows" if is_owner else "row",
        has_owners=is_owner,
        remedy="Rows of one patient need jaxdp.data.by_group.",
    )
    measured = columns_of(source, ranges)
    noise_multiplier = float(noise_multiplier)  # 16 bits do not hold the step
    step = step_of(measured, noise_multiplier, len(source))

    def estimate(secret: bytes) -> dict[str, np.ndarray]:
        exact = column_sums(source, measured, step)
        noisy = exact + np.asarray(draw(stream(secret, "scaler"), exact.shape), np.int64)
        # To read the integers as floats is post-processing.
        return {"sums": noisy * step}

    release = Release(
        label="scaler",
        charges=[(account, GaussianDpEvent(noise_multiplier))],
        facts=lambda: [source.fingerprint, *measured, noise_multiplier, step],
        compute=estimate,
    )
    with Till(workdir, seed=seed) as till:
        sums = till.once(release)["sums"]
    return _fitted(sums, measured, len(source), std=step * _STD)


def columns_of(source: Examples | Groups, ranges: Mapping[str, tuple[float, float]]) -> Columns:
    """Returns the columns of `ranges` and of their missing cells among the features of a source.

    Raises:
      ValueError: A name is no feature, or a range is none.
    """
    rows: Any = source.source if isinstance(source, Groups) else source
    example = check_source(rows, "features", values=False)  # NaN is a missing cell
    width = int(np.prod(example["features"].shape))
    names = list(getattr(rows, "feature_names", ())) or [str(place) for place in range(width)]
    if not ranges:
        raise ValueError("ranges must name a column, got none.")
    for name, limits in ranges.items():
        if name not in names:
            raise ValueError(
                f"ranges must name features of the source, got {name!r}. It has {', '.join(names)}."
            )
        if not is_range(limits):
            raise ValueError(f"ranges must have low < high for {name!r}, got {limits!r}.")
        if not _has_width(limits):
            raise ValueError(
                f"ranges must have a middle and a width that float64 holds for {name!r}, got "
                f"{limits!r}."
            )
    low, high = np.array(list(ranges.values()), np.float64).T
    columns, missing = [], []
    for name in ranges:
        columns.append(names.index(name))
        indicator = indicator_of(name)
        missing.append(names.index(indicator) if indicator in names else -1)
    return Columns(columns, missing, low, high)


def _has_width(limits: tuple[float, float]) -> bool:
    """Returns whether float64 holds the middle of a range and half of its width, a divisor."""
    low, high = map(float, limits)  # two large integers may be one float
    half = (high - low) / 2
    return half > 0 and math.isfinite(half) and math.isfinite(low + high)


def _fitted(sums: np.ndarray, measured: Columns, total: int, std: float) -> Scaler:
    """Returns the scaler of noisy sums [3, k] of `total` rows or owners. It is post-processing."""
    first, second, third = sums
    # The third numbers of a column add up to its cells less half of the rows.
    counts = np.where(measured.has_count, third + total / 2, total)
    counts = np.clip(counts, 1, total)  # noise may leave [1, n], and the next line divides
    mean = np.clip(first / counts, -1, 1)
    square = np.clip(second / counts + 1 / 2, 0, 1)  # undoes the shift
    # A variance below the noise of the squares is noise, and its inverse would be huge.
    least = min(1.0, std / total)
    variance = np.maximum(square - mean**2, least)
    deviation = np.sqrt(variance)
    half = measured.half
    return Scaler(
        columns=tuple(measured.columns),
        missing=tuple(measured.missing),
        low=measured.low.tolist(),
        high=measured.high.tolist(),
        mean=(measured.middle + half * mean).tolist(),
        std=(half * deviation).tolist(),
    )
