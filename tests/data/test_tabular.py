"""Tables as features: what is declared becomes a number, and all else is refused by line."""

import csv
import datetime

import numpy as np
import pytest

from jaxdp.data import by_group, check_source, from_csv, read_column, record_digests
from jaxdp.data import tabular as stage

TABLE = """patient;outcome;age;sex;admitted;note
007;ill;40,5;f;01.02.2020;"a;
b"
7;well;;m; 03.02.2020 12;
7;ill;150;NA;01.01.2016;c
"""
OPTIONS = {
    "label": "outcome",
    "classes": ("well", "ill"),
    "group": "patient",
    "delimiter": ";",
    "decimal": ",",
    "texts": ("note",),
    "ranges": {"age": (0, 120), "admitted": (0, 3650)},
    "categories": {"sex": ("f", "m", "unknown")},
    "dates": {"admitted": ("%d.%m.%Y", "2016-01-01")},
    "missing": {"age": 60, "sex": "unknown"},
    "indicators": ("age",),
    "missing_marks": ("NA", "."),
}


def written(tmp_path, content, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_table_as_a_clinic_exports_it(tmp_path):
    """The features equal an independent computation in float64, in the order of the file."""
    path = written(tmp_path, TABLE.replace(" 12;", ";"))
    source = from_csv(path, **OPTIONS)
    names = ("age", "age is missing", "sex=f", "sex=m", "sex=unknown", "admitted")
    assert (source.feature_names, source.num_classes, source.name) == (names, 2, "t")
    days = [
        (datetime.date(*day) - datetime.date(2016, 1, 1)).days
        for day in ((2020, 2, 1), (2020, 2, 3), (2016, 1, 1))
    ]
    expected = [
        [40.5 / 120, 0, 1, 0, 0, days[0] / 3650],
        [60 / 120, 1, 0, 1, 0, days[1] / 3650],
        [1, 0, 0, 0, 1, days[2] / 3650],
    ]
    batch = source.gather([0, 1, 2])
    np.testing.assert_allclose(batch["features"], expected, rtol=1e-6)
    assert batch["features"].dtype == np.float32 and batch["label"].tolist() == [1, 0, 1]
    assert check_source(source)["features"].shape == (6,)
    assert read_column(source, "patient").tolist() == ["007", "7", "7"]
    assert read_column(source, "note").tolist() == ["a;\nb", "", "c"]
    assert by_group(source, "patient", max_records=2).rows.tolist() == [[0, -1], [1, 2]]
    assert len(record_digests(source, key=bytes(16))) == 3
    first, second = source.split([0.5, 0.5], seed=0)
    assert len(first) + len(second) == 3 and first.feature_names == names
    assert from_csv(path, **OPTIONS).fingerprint == source.fingerprint
    path.write_text(TABLE.replace(" 12;", ";").replace("007", "008"))
    assert from_csv(path, **OPTIONS).fingerprint != source.fingerprint


@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp1252", "latin-1", "utf-16", "utf-16-le"])
def test_encodings_are_declared_and_wrong_ones_are_named(tmp_path, encoding):
    text = "größe,y\r\n1,é\r\n\r\n2,ü\r\n"
    path = written(tmp_path, text.encode(encoding))
    source = from_csv(path, label="y", classes=("é", "ü"), encoding=encoding)
    assert source.gather([0, 1])["label"].tolist() == [0, 1]
    for wrong in {"utf-8", "latin-1"} - {encoding}:
        if (encoding, wrong) in (("utf-8-sig", "utf-8"), ("cp1252", "latin-1")):
            continue  # both read it
        if wrong == "latin-1" and encoding == "utf-16-le":
            continue  # the header then lacks the label
        with pytest.raises(ValueError, match=r"encoding=|must have rows") as caught:
            from_csv(path, label="y", classes=("é", "ü"), encoding=wrong)
        assert "t.csv" in str(caught.value)


SECRET = "4711"  # a cell of each table below, which no error may have
HEAD = "y,age,sex\n"
REFUSED = [
    (HEAD + "0,4711,f\n1,,f\n", {}, r"2 rows and missing cells: 1 in 'age' .*line 3"),
    (HEAD + "0,4711,f\n1,NA,f\n", {}, r"line 3 of .* has text in the column 'age'.*missing_marks="),
    (HEAD + "0,4711,f\n1,NA,f\n", {"missing_marks": ("NA",)}, r"1 in 'age'.*missing=.*drop="),
    (HEAD + "0,4711,f\n1,2,\n", {}, r"1 in 'sex' \(the first in line 3\)"),
    (HEAD + "0,4711,f\n,2,f\n", {}, r"1 in 'y' \(the first in line 3\)"),
    (HEAD + "0,4711,f\n,2,f\n", {}, r"line 3\)\. Complete the rows without 'y', or leave them"),
    (HEAD + "0,4711,f\n1,,f\n,2,f\n", {}, r"missing=\{'age': 0\}.* the rows without 'y', or"),
    (HEAD + f"0,4711,f\n1,{'4711' * 1500},f\n", {}, r"line 3 of .* more than 64 bits"),
    ("y,sex,sex=f\n0,f,4711\n1,f,1\n", {}, r"'sex=f' of .* makes the feature sex=f, which anoth"),
    (HEAD + "0,4711,f\n", {"dates": {"age": ("%Y-%Y", "2020-01-01")}}, "each directive once"),
    (HEAD + "0,4711,f\n", {"delimiter": ";;"}, "delimiter must be one character.* got ';;'"),
    (HEAD + "0,4711,f\n1,2,m\n", {}, r"line 3 of .* one of the categories f in the column 'sex'"),
    (HEAD + "0,4711,f\n1,nan,f\n", {}, r"line 3 of .* has text in the column 'age'"),
    (HEAD + "0,4711,f\n1,inf,f\n", {}, r"line 3 of .* has text in the column 'age'"),
    (HEAD + "0,4711,f\n1,1e999,f\n", {}, r"line 3 of .* infinite in float64"),
    (HEAD + "0,4711,f\n1,1e60,f\n", {}, r"column 'age' of .* infinite in float32"),
    (HEAD + '0,4711,f\n1,"1,5",f\n', {}, r"line 3 of .* has text in the column 'age'.*decimal=','"),
    (HEAD + '0,4711,f\n1,"1,500.0",f\n', {}, r"line 3 of .* has text .*thousands"),
    (HEAD + "0,4711,f\n1,1.5,f\n", {"decimal": ","}, r"has text .*decimal='\.' if a point is"),
    (HEAD + "0,47.11,f\n1,4711.5,f\n", {"decimal": ","}, r"is text\. .*decimal='\.' if a point"),
    (HEAD + "0,4711,f\n1,0012,f\n", {}, r"line 3 of .* leading zero in the column 'age'.*texts="),
    (HEAD + "0,4711000000000,f\n1,2,f\n", {}, r"'age' of .* whole numbers outside of"),
    (
        HEAD + "0,4711,f\n1,2,f\n",
        {"categories": {}},
        r"column 'sex' of .* is text\. Declare it for 'sex': ",
    ),
    (HEAD + "0,true,4711\n1,false,4711\n", {"categories": {}}, r"column 'age' of .* is text"),
    (HEAD + "0,4711,f\n1,2\n", {}, r"line 3 of .* has 2 cells, and the header 3"),
    (HEAD + '0,4711,f\n1,2,"f\n', {}, r"line 3 of .* is no line of a CSV file"),
    (HEAD + '0,"4711"x,f\n', {}, r"line 2 of .* is no line of a CSV file"),
    ("y,age,age\n0,4711,2\n", {}, "has two columns 'age'"),
    ("y;age;sex\n0;4711;f\n", {}, r"line 1 of .* has semicolons .* Give delimiter=';'"),
    ("y\tage\tsex\n0\t4711\tf\n", {}, r"line 1 of .* has tabs .* Give delimiter='\\t'"),
    ("y,age,sex\n0,4711,f\n", {"delimiter": ";"}, r"has commas .* Give delimiter=','"),
    ("y,age,sex\n0,4711,f\n", {"label": "z"}, r"header with 'z'\. It has y, age, sex"),
    (HEAD + "0,4711,f\n", {"ranges": {"agee": (0, 1)}}, r"ranges= names 'agee', .* y|age, sex"),
    (HEAD + "0,4711,f\n", {"dates": {"age": ("%Y-%m", "2020-01-01")}}, r"line 2 .* no date of"),
    (HEAD + "0,4711,f\n", {"dates": {"age": ("%Y", "soon")}}, r"dates must have a day"),
    (HEAD + "1,4711,f\n7,2,f\n", {}, r"line 3 of .* label in the column 'y' .* in \[0, 2\)"),
    (b"\x1f\x8b4711", {}, r"t\.csv is a gzip file\. Unpack it"),
    (b"PK\x03\x044711", {}, r"t\.csv is a zip archive or a workbook of Excel"),
    (b"", {}, "must have rows, and a header with 'y'"),
    (HEAD.encode(), {}, "must have rows, and a header with 'y'"),
    (HEAD.encode() + b"0,4711,f\n", {"encoding": "utf9"}, "encoding must be a codec of Python"),
    (HEAD + "0,4711,f\n1,,f\n", {"missing": {"age": "none"}}, "missing must be a number for 'age'"),
    (HEAD + "0,4711,f\n", {"missing": {"sex": "x"}}, "one of the categories of 'sex', got 'x'"),
    (HEAD.encode() + b"0,4711,f\n", {"drop": ("age",), "categories": {}}, "'sex' of .* is text"),
]


@pytest.mark.parametrize(("content", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_be_read_wrongly_is_refused(tmp_path, content, options, message):
    """Each error has the file or an argument, a line or a column, and a remedy. None has a cell."""
    path = written(tmp_path, content)
    options = {"label": "y", "num_classes": 2, "categories": {"sex": ("f",)}} | options
    with pytest.raises(ValueError, match=message) as caught:
        from_csv(path, **options)
    error: BaseException | None = caught.value
    while error is not None:  # a traceback shows the causes too
        assert SECRET not in str(error)
        error = error.__cause__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "sex"}, "'sex' is declared twice"),
        ({"drop": ("y",)}, "'y' is declared twice"),
        ({"ranges": {"age": (1, 1)}}, "ranges must have low < high for 'age'"),
        ({"drop": "age"}, r"drop must be several texts, such as \('age',\), got 'age'"),
        ({"missing_marks": "NA"}, "missing_marks must be several texts"),
        ({"indicators": ("age",)}, "indicators must be columns of missing="),
        ({"classes": "01"}, "classes must be different texts"),
        ({"classes": (0, 1)}, r"classes must be different texts, got \(0, 1\)"),
        ({"categories": {"sex": (0, 1)}}, "categories of 'sex' must be different texts"),
        ({"categories": {"sex": ("f", "f")}}, "categories of 'sex' must be different"),
        ({"decimal": "'"}, "decimal must be"),
        ({"thousands": "."}, "thousands must be one of .* not the decimal mark '.', got '.'"),
        ({"thousands": "_"}, "thousands must be one of"),
        ({"ranges": {"age": 5}}, "ranges must have low < high for 'age'"),
        ({"ranges": {"age": ("a", "b")}}, "ranges must have low < high for 'age'"),
        ({"dates": {"age": "%Y"}}, "dates must have a format and a day for 'age'"),
    ],
)
def test_declarations_that_contradict_are_refused_before_the_file_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        from_csv("nowhere.csv", **{"label": "y", "categories": {"sex": ("f",)}} | options)


def test_an_address_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is an address\. Download the file"):
        from_csv("https://example.org/t.csv")
    with pytest.raises(FileNotFoundError, match=r"does not exist\. Give the path of a table"):
        from_csv(tmp_path / "none.csv")


def test_a_row_has_features_of_itself_alone(tmp_path, monkeypatch):
    """The guarantee. Broken twin: a scaler that is fitted to the rows."""

    def first_row_stays():
        features = []
        for last in (b"50", b"90"):
            path = written(tmp_path, b"age,bmi\n40,20\n" + last + b",30\n")
            features.append(from_csv(path, ranges={"age": (0, 120)}).gather([0])["features"])
        return np.array_equal(*features)

    assert first_row_stays()

    def fitted(self, column, numbers):
        return (numbers / numbers.max()).astype(np.float32)

    monkeypatch.setattr(stage._Columns, "_scaled", fitted)
    assert not first_row_stays()


@pytest.mark.parametrize(
    ("thousands", "decimal", "cells"),
    [
        (",", ".", ("12,500", "-1,234,567.25", "7.5", "1500")),
        (".", ",", ("12.500", "-1.234.567,25", "7,5", "1500")),
        (" ", ",", ("12\u202f500", "-1 234\u00a0567,25", "7,5", "1500")),
        ("'", ".", ("12'500", "-1'234'567.25", "7.5", "1500")),
        ("’", ".", ("12’500", "-1’234’567.25", "7.5", "1500")),
    ],
)
def test_marks_of_thousands_are_declared(tmp_path, thousands, decimal, cells):
    """A mark at another place is refused, and so is every mark that is not declared."""
    path = written(tmp_path, "\n".join(["a;b", *(f"{cell};0" for cell in cells)]))
    options = {"delimiter": ";", "decimal": decimal, "thousands": thousands}
    numbers = from_csv(path, **options).gather([0, 1, 2, 3])["features"][:, 0]
    assert numbers.tolist() == [12500, -1234567.25, 7.5, 1500]
    with pytest.raises(ValueError, match=r"line 2 of .* thousands=|column 'a' of .* is text"):
        from_csv(path, **options | {"thousands": ""})
    for wrong in ("12{0}50", "1{0}2345", "-{0}500", "1{0}500{0}0", "1{0}{0}500", "1234{0}567"):
        bad = wrong.format(thousands)
        path.write_text(f"a;b\n1;0\n{bad};0\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"line 3 of .* has text in the column 'a'"):
            from_csv(path, **options)


def test_a_constant_is_a_number_or_a_text_as_the_column_has_it(tmp_path):
    path = written(tmp_path, "a;b\n1.500,5;0\n;0\n")
    options = {"delimiter": ";", "decimal": ",", "thousands": "."}
    for constant in (2500.5, "2.500,5", "2500,5"):
        source = from_csv(path, missing={"a": constant}, **options)
        assert source.gather([0, 1])["features"][:, 0].tolist() == [1500.5, 2500.5]
    with pytest.raises(ValueError, match=r"missing must be a number for 'a', got '2500\.5'"):
        from_csv(path, missing={"a": "2500.5"}, **options)


def test_a_label_without_classes_is_a_number(tmp_path):
    path = written(tmp_path, "cost,age\n1.5,40\n2,50\n")
    label = from_csv(path, label="cost").gather([0, 1])["label"]
    assert label.dtype == np.float32 and label.tolist() == [1.5, 2.0]
    with (tmp_path / "w.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["cost", "age"], ["low", 1]])
    with pytest.raises(ValueError, match=r"'cost' of .* is text\. Declare its texts: classes="):
        from_csv(tmp_path / "w.csv", label="cost")
