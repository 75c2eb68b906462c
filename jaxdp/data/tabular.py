"""A CSV file as features. What a column means is declared, never computed from its cells.

| column | becomes |
|---|---|
| with `categories` | one feature for each category, 1 where a cell has it, else 0 |
| with `dates` | one feature: days since a public date |
| any other | one feature: its numbers, without a leading zero |
| with `ranges`, also of dates | the same, from a public range to [0, 1], and cut there |
| of `missing` and `indicators` | after its own features: 1 where a cell was missing, else 0 |
| of `texts`, and `group` | text, no feature |
| of `drop` | nothing |

A mean, a deviation, a list of the categories that occur or a fitted imputer would be computed from
private rows, and is a release that no ledger knows. So ranges, categories and constants are public:
write them from the manual of the device, from the code book, or from published studies.
`jaxdp.finetune.charged_scaler` pays for means and deviations, and puts missing cells at the mean.
"""

import collections
import dataclasses
import datetime
import math
import numbers
import os
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp.data.arrays import from_arrays
from jaxdp.data.numbers import check_digits
from jaxdp.data.sources import Examples
from jaxdp.data.tables import (
    Table,
    check_classes,
    has_leading_zero,
    number_column,
    other_than_numbers,
    places,
    read_table,
    real,
)
from jaxdp.files import shown

Texts = Sequence[str]
Ranges = Mapping[str, tuple[float, float]]
Categories = Mapping[str, Texts]
Dates = Mapping[str, tuple[str, str]]
Constants = Mapping[str, float | str]

_NOTHING: Any = types.MappingProxyType({})
_COMMA_AND_POINT = str.maketrans(",.", ".,")
# Patterns of the marks of thousands. A blank may be one of those that do not break a line.
_THOUSANDS = {",": ",", ".": r"\.", "'": "'", "’": "’", " ": "[    ]"}
_DAY = datetime.timedelta(days=1)
_MOST_NAMES = 5  # of columns in an error


def from_csv(
    path: str | os.PathLike[str],
    *,
    label: str = "",
    classes: Texts | None = None,
    num_classes: int = 0,
    group: str = "",
    texts: Texts = (),
    drop: Texts = (),
    ranges: Ranges = _NOTHING,
    categories: Categories = _NOTHING,
    dates: Dates = _NOTHING,
    missing: Constants = _NOTHING,
    indicators: Texts = (),
    missing_marks: Texts = (),
    delimiter: str = ",",
    encoding: str = "utf-8",
    decimal: str = ".",
    thousands: str = "",
    name: str = "",
) -> Examples:  # Eighteen arguments, since each says what a file cannot say about itself.
    """Reads a table into memory, as the column "features" and the column "label".

        patients = jaxdp.data.from_csv(
            "patients.csv",
            label="outcome",
            classes=("well", "ill"),
            group="patient",
            ranges={"age": (0, 120), "admitted": (0, 3650)},
            categories={"sex": ("f", "m", "unknown")},
            dates={"admitted": ("%d.%m.%Y", "2016-01-01")},
            missing={"age": 60, "sex": "unknown"},
            indicators=("age",),
        )

    The features are in the order of the file: `source.feature_names` has "age", "age is missing",
    "sex=f" and so on. The same arguments, without those of the label, read new rows for a trained
    model. Blanks around a cell do not count. `jaxdp.data.tabular` has the table of what a column
    becomes.

    Args:
      path: The file: a header, and rows of as many cells. Empty lines are left out.
      label: The column with the class. "" has none. Without classes and num_classes it has numbers:
        whole ones as int32, others as float32.
      classes: The texts of the classes, in the order of their numbers. A public declaration.
      num_classes: If the label has the numbers of the classes. A public declaration.
      group: The column with the owner of each row, such as a patient, for `by_group`, or with its
        owners, such as "anna;ben", for `by_owners`. It is text and no feature.
      texts: More columns that are text and no features.
      drop: Columns that are not read.
      ranges: {column: (low, high)}, two public numbers that become 0 and 1. Numbers outside are cut
        to them. Other columns keep their numbers.
      categories: {column: its categories}, texts. A public declaration.
      dates: {column: (format, since)}: the format of `datetime.strptime`, and the public day in ISO
        8601 from which days are counted.
      missing: {column: a public constant}, which a missing cell has. It is a number, or a text as
        the column has it.
      indicators: Columns of missing with a feature that says which cells were missing.
      missing_marks: Texts of missing cells besides blank ones, such as ("NA", "n/a", "-").
      delimiter: The separator of the cells, such as ";" or a tab.
      encoding: A codec of Python, such as "cp1252" (Windows) or "utf-16". A byte order mark is
        dropped.
      decimal: The decimal mark, "." or ",".
      thousands: The mark between groups of three digits, as in "12,500": one of ",", ".", "'", "’"
        and " ", which is any blank. "" has none. Numbers without marks are read too. A mark at any
        other place is refused.
      name: The name of the source. The default is the file's.

    Returns:
      A source with the columns "features", float32 [n, d], and "label", and with the texts.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The arguments contradict each other or the header. Or the file is no such table: a
        row is short, cells are missing, or a cell is not of its column's kind. The message has the
        file, the line and the remedy, and no cell. For missing cells it has their number in each
        column. It is for the owner who loads the data, and is not a release.

    Formal guarantees:
      The features and the label of a row are a function of that row and of the arguments. No
      statistic of the rows is computed, except for the numbers of missing cells in an error.
    """
    _refuse_text(texts=texts, drop=drop, indicators=indicators, missing_marks=missing_marks)
    columns = _Columns(
        label=label,
        classes=classes,
        group=group,
        texts=texts,
        drop=drop,
        ranges=dict(ranges),
        categories=dict(categories),
        dates=dict(dates),
        missing=dict(missing),
        indicators=indicators,
        marks=frozenset({"", *missing_marks}),
        decimal=decimal,
        thousands=thousands,
    )
    needed = [column for column in (label, group) if column]
    table = read_table(path, needed=needed, delimiter=delimiter, encoding=encoding)
    columns.check_header(table)
    cells = {column: columns.read(table, column) for column in columns.typed(table)}
    _refuse_missing(table, cells, columns.features(table))
    features = columns.all_features(table, cells)
    every = list(features.values())
    arrays: dict[str, Any] = {"features": np.stack(every, axis=1)}
    if label:
        arrays["label"] = columns.label_of(table, cells[label])
    if classes is not None:
        num_classes = len(classes)
    if label and num_classes:
        check_classes(table, label, arrays["label"], num_classes)
    title = name or table.path.stem
    source = from_arrays(**arrays, num_classes=num_classes, name=title)
    cells_of_texts = {column: table.columns[column] for column in columns.all_texts}
    names = tuple(features)
    return dataclasses.replace(source, texts=cells_of_texts, feature_names=names)


def _refuse_text(**arguments: Texts) -> None:
    """Raises ValueError for one text, whose letters would pass as several."""
    for name, value in arguments.items():
        if isinstance(value, str):
            raise ValueError(f"{name} must be several texts, such as ({value!r},), got {value!r}.")


class _Cells(NamedTuple):
    """The cells of a column, without outer blanks, and with the constants of missing ones."""

    texts: Texts
    missing: Sequence[int]  # rows
    filled: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Columns:
    """What is declared about the columns. The fields are the arguments of `from_csv`."""

    label: str
    classes: Texts | None
    group: str
    texts: Texts
    drop: Texts
    ranges: Ranges
    categories: Categories
    dates: Dates
    missing: Constants
    indicators: Texts
    marks: frozenset[str]
    decimal: str
    thousands: str

    def __post_init__(self) -> None:
        if self.decimal not in (".", ","):
            raise ValueError(f"decimal must be '.' or ',', got {self.decimal!r}.")
        if self.thousands not in ("", *_THOUSANDS) or self.thousands == self.decimal:
            raise ValueError(
                f"thousands must be one of {', '.join(map(repr, _THOUSANDS))} and not the decimal "
                f"mark {self.decimal!r}, got {self.thousands!r}."
            )
        # A label and a column of dates may have a range too, which is no second use.
        of_numbers = {*self.dates, *self.ranges} - {self.label}
        declared = [*self.all_texts, *self.drop, *self.categories, *of_numbers]
        if self.label:
            declared.append(self.label)
        uses = collections.Counter(declared)
        if several := [column for column, count in uses.items() if count > 1]:
            raise ValueError(
                f"column {several[0]!r} is declared twice. A column has one of label=, group=, "
                "texts=, drop=, categories=, or of ranges= and dates=."
            )
        if reserved := {"features", "label"}.intersection(self.all_texts):
            raise ValueError(
                f"texts= and group= must not have {min(reserved)!r}, the name of a column of "
                "numbers. Rename it in the file."
            )
        categories = self._categories
        categories["classes"] = self.classes or ()
        for argument, values in categories.items():
            are_texts = all(isinstance(value, str) for value in values)
            if isinstance(values, str) or not are_texts or len(set(values)) < len(values):
                raise ValueError(f"{argument} must be different texts, got {values!r}.")
        for column, limits in self.ranges.items():
            if not is_range(limits):
                raise ValueError(f"ranges must have low < high for {column!r}, got {limits!r}.")
        for column, date in self.dates.items():
            if isinstance(date, str) or len(date) != 2:
                raise ValueError(
                    f"dates must have a format and a day for {column!r}, such as ('%d.%m.%Y', "
                    f"'2020-01-01'), got {date!r}."
                )
        if unfilled := set(self.indicators) - set(self.missing):
            raise ValueError(
                f"indicators must be columns of missing=, which has no {min(unfilled)!r}."
            )

    @property
    def _categories(self) -> dict[str, Texts]:
        """The categories by what an error calls them."""
        return {f"categories of {column!r}": values for column, values in self.categories.items()}

    @property
    def all_texts(self) -> list[str]:
        """The columns that are kept as text."""
        texts = [*self.texts]
        if self.group and self.group not in texts:
            texts.append(self.group)
        return texts

    def features(self, table: Table) -> list[str]:
        """Returns the columns that become features, in the order of the file."""
        others = {self.label, *self.all_texts, *self.drop}
        return [column for column in table.columns if column not in others]

    def typed(self, table: Table) -> list[str]:
        """Returns the columns in which no cell may be missing."""
        others = {self.group, self.label} - {""}
        return [*self.features(table), *sorted(others)]

    def check_header(self, table: Table) -> None:
        """Raises ValueError if a declared column is not in the file, or nothing is a feature."""
        where = shown(os.fspath(table.path))
        features = self.features(table)
        declared = {
            "texts": (self.texts, table.columns),
            "drop": (self.drop, table.columns),
            "ranges": (self.ranges, [*features, self.label]),
            "categories": (self.categories, features),
            "dates": (self.dates, features),
            "missing": (self.missing, features),
        }
        for argument, (columns, known) in declared.items():
            if unknown := [column for column in columns if column not in known]:
                has = shown(", ".join(known))
                raise ValueError(
                    f"{argument}= names {unknown[0]!r}, which is none of the columns of {where}: "
                    f"{has}."
                )
        if not features:
            raise ValueError(f"{where} has no column for features. Drop fewer columns.")

    def read(self, table: Table, column: str) -> _Cells:
        """Returns the cells of a column, with the constant of `missing` where they lack."""
        texts = [cell.strip() for cell in table.columns[column]]
        declared = self.categories.get(column, ())
        if column == self.label:
            declared = self.classes or ()
        # A category may be spelled like a mark of a missing cell, such as "NA" or "".
        marks = self.marks.difference(declared)
        missing = [row for row, text in enumerate(texts) if text in marks]
        # Commas and points in categories and dates are no marks of numbers.
        is_number = not declared and column not in self.dates
        if is_number:
            texts = [self._with_point(text) for text in texts]
        filled = column in self.missing
        if filled:
            given = self.missing[column]
            constant = str(given)
            # A text is written as the cells are, and a number is not.
            if is_number and isinstance(given, str):
                constant = self._with_point(given)
            if declared and constant not in declared:
                raise ValueError(
                    f"missing must be one of the categories of {column!r}, got {constant!r}."
                )
            if is_number and other_than_numbers([constant]):
                raise ValueError(f"missing must be a number for {column!r}, got {given!r}.")
            for row in missing:
                texts[row] = constant
        return _Cells(texts, missing, filled)

    def _with_point(self, text: str) -> str:
        """Returns a number with a decimal point and no other marks. Other texts stay so."""
        # First the marks of thousands: in "1.234,5" the points go, then the comma becomes one.
        if self.thousands:
            text = self._without_marks(text)
        return text.translate(_COMMA_AND_POINT) if self.decimal == "," else text

    def _without_marks(self, text: str) -> str:
        """Returns a number without its marks of thousands. Other texts stay as they are."""
        mark = _THOUSANDS[self.thousands]
        grouped = rf"([+-]?[0-9]{{1,3}})((?:{mark}[0-9]{{3}})+)({re.escape(self.decimal)}[0-9]*)?"
        groups = re.fullmatch(grouped, text)
        if groups is None:
            return text
        first, others, fraction = groups.groups(default="")
        return first + re.sub(mark, "", others) + fraction

    def all_features(self, table: Table, cells: Mapping[str, _Cells]) -> dict[str, np.ndarray]:
        """Returns the features of all columns by name, in the order of the file."""
        features: dict[str, np.ndarray] = {}
        for column in self.features(table):
            own = self.features_of(table, column, cells[column])
            if both := sorted(features.keys() & own):
                raise ValueError(
                    f"{table.where(column)} makes the feature {shown(both[0])}, which another "
                    "column makes too. Rename one of the two columns in the file."
                )
            features |= own
        return features

    def features_of(self, table: Table, column: str, cells: _Cells) -> dict[str, np.ndarray]:
        """Returns the features of a column by name, each float32 [n]."""
        features = {}
        if column in self.categories:
            categories = self.categories[column]
            numbers = places(table, column, cells.texts, categories, kind="categories")
            for number, category in enumerate(categories):
                features[f"{column}={category}"] = (numbers == number).astype(np.float32)
        else:
            features[column] = self._number(table, column, cells)
        if column in self.indicators:
            is_missing = np.zeros(len(table), np.float32)
            is_missing[np.array(cells.missing, int)] = 1
            features[indicator_of(column)] = is_missing
        return features

    def label_of(self, table: Table, cells: _Cells) -> np.ndarray:
        """Returns the label, integers or float32 [n]."""
        if self.classes is not None:
            return places(table, self.label, cells.texts, self.classes, kind="classes")
        self._check_numbers(table, self.label, cells, "Declare its texts: classes=(...).")
        if self.label in self.ranges:
            return self._scaled(self.label, real(table, self.label, cells.texts))
        numbers = number_column(table, self.label, cells.texts)
        assert numbers is not None
        return numbers

    def _check_numbers(self, table: Table, column: str, cells: _Cells, remedy: str) -> None:
        """Raises ValueError unless all cells are numbers, none of them with a leading zero."""
        others = other_than_numbers(cells.texts)
        mark = "decimal=',' if a comma is its decimal mark"
        if self.decimal == ",":
            mark = "decimal='.' if a point is its decimal mark"
        if len(others) == len(table):
            raise ValueError(f"{table.where(column)} is text. {remedy} Or give {mark}.")
        if others:
            raise table.error(
                f"has text in the column {column!r}, whose other cells are numbers. Correct the "
                f"cell, or say what it is: missing_marks= if it stands for a missing cell, {mark}, "
                "thousands=',' if commas divide groups of three digits. If the column is text: "
                f"{remedy}",
                others[0],
            )
        for row, text in enumerate(cells.texts):
            if has_leading_zero(text):
                raise table.error(
                    f"has a number with a leading zero in the column {column!r}. If it is an "
                    f"identifier, give texts=({column!r},) or group=, or drop the column. "
                    "Otherwise remove the zero.",
                    row,
                )

    def _number(self, table: Table, column: str, cells: _Cells) -> np.ndarray:
        """Returns the numbers of a column, or its days, float32 [n]."""
        if column in self.dates:
            days = _days(table, column, cells.texts, *self.dates[column])
            return self._scaled(column, days)
        remedy = (
            f"Declare it for {column!r}: categories={{name: (...)}}, dates={{name: (format, "
            "since)}, texts=(name,), drop=(name,), or group= if it says whose row it is."
        )
        self._check_numbers(table, column, cells, remedy)
        if column in self.ranges:
            return self._scaled(column, real(table, column, cells.texts))
        numbers = number_column(table, column, cells.texts)
        assert numbers is not None
        # int32 has more digits than float32.
        digits = numbers.astype(np.float64)
        check_digits(digits, table.where(column))
        return numbers.astype(np.float32)

    def _scaled(self, column: str, numbers: np.ndarray) -> np.ndarray:
        """Returns numbers from their public range to [0, 1], float32."""
        if column in self.ranges:
            low, high = self.ranges[column]
            inside = np.clip(numbers, low, high)
            numbers = (inside - low) / (high - low)
        return numbers.astype(np.float32)


def indicator_of(column: str) -> str:
    """Returns the name of the feature that says which cells of a column were missing."""
    return f"{column} is missing"


def is_range(limits: Any) -> bool:
    """Returns whether an object is two finite numbers, the first below the second."""
    if not isinstance(limits, Sequence) or len(limits) != 2:
        return False
    low, high = limits
    are_numbers = isinstance(low, numbers.Real) and isinstance(high, numbers.Real)
    return are_numbers and -math.inf < low < high < math.inf


def _refuse_missing(table: Table, cells: Mapping[str, _Cells], features: Texts) -> None:
    """Raises ValueError if a cell is missing in a column without a constant."""
    counts = []
    lacking = []
    for column, read in cells.items():
        if read.filled or not read.missing:
            continue
        line = table.lines[read.missing[0]]
        lacking.append(column)
        counts.append(f"{len(read.missing)} in {column!r} (the first in line {line})")
    if not counts:
        return
    where = shown(os.fspath(table.path))
    named = ", ".join(counts[:_MOST_NAMES])
    unnamed = len(counts) - _MOST_NAMES
    if unnamed > 0:
        named += f" and in {unnamed} more columns"
    remedies = []
    if of_features := [column for column in lacking if column in features]:
        first = of_features[0]
        remedies.append(
            f"Declare a public constant, such as missing={{{first!r}: 0}}, and "
            f"indicators=({first!r},) for a feature that says where it was put. Or leave the "
            f"column out: drop=({first!r},). Or complete the rows in the file, or declare the mark "
            "as a category of its own. A mean of the rows is no public constant: "
            "jaxdp.finetune.charged_scaler pays for it."
        )
    if others := [column for column in lacking if column not in features]:
        remedies.append(
            f"Complete the rows without {' or '.join(map(repr, others))}, or leave them out of the "
            "file."
        )
    raise ValueError(
        f"{where} has {len(table)} rows and missing cells: {named}. {' '.join(remedies)} "
        "Keep this message to yourself: it counts private cells."
    )


def _days(table: Table, column: str, texts: Texts, form: str, since: str) -> np.ndarray:
    """Returns the days from a date to the dates of a column, float64 [n]."""
    try:
        start = datetime.datetime.fromisoformat(since)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"dates must have a day such as '2020-01-01' for {column!r}, got {since!r}."
        ) from error
    if start.tzinfo or "%z" in form.lower():
        raise ValueError(
            f"dates must have no time zone for {column!r}, got {form!r}. Write all times of the "
            "column in one zone."
        )
    try:
        datetime.datetime.strptime("", form)
    except re.error as error:
        raise ValueError(
            f"dates must have each directive once for {column!r}, got the format {form!r}."
        ) from error
    except ValueError:
        pass  # "" is no date
    days = np.empty(len(texts))
    for row, text in enumerate(texts):
        try:
            days[row] = (datetime.datetime.strptime(text, form) - start) / _DAY
        except ValueError:
            # The error of strptime has the cell.
            raise table.error(
                f"has no date of the format {form!r} in the column {column!r}. Correct the cell "
                "or the format.",
                row,
            ) from None
    return days
