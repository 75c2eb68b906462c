"""Texts of other writers: strict JSON, and messages without control characters."""

import json
import math
import pathlib

import numpy as np
import pytest

import jaxdp
from jaxdp.files import Limits, check_finite, parse_json, read_json, read_npz, shown, understood
from jaxdp.files.text import down, up

HOSTILE = "a\x1b[31mb\x07\x9b2J\u202e\n\x7fc"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -7,
        1.5,
        1e308,
        5e-324,
        10**300,
        "ü\u0000",
        [],
        {},
        {"a": [{"b": {"a": 1}}, 2]},
    ],
)
def test_what_json_writes_is_read(value):
    text = json.dumps(value, allow_nan=False)
    assert parse_json(text) == parse_json(text.encode()) == parse_json(text, finite=False) == value


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("1 2", "Extra data"),
        ('{"a": 1,}', "Expecting property name|Illegal trailing comma"),
        (b"\xff", "codec can't decode"),
        ("\ufeff1", "BOM"),
        ('{"a": 1, "b": 2, "a": 1}', "an object has the key 'a' twice"),
        ('{"a": {"x": 1, "\\u0078": 2}}', "an object has the key 'x' twice"),
        ("NaN", "NaN is not a number of JSON"),
        ("[Infinity]", "Infinity is not a number of JSON"),
        ("-1e400", "the number -1e400 is beyond float64"),
        ("9" * 5000, "Exceeds the limit"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ('{"a":' * 101 + "0" + "}" * 101, "nested more than 100 deep"),
        ("[" * 10**6, "nested more than 100 deep"),
    ],
)
def test_what_is_not_strict_json_is_a_value_error(text, match):
    with pytest.raises(ValueError, match=match) as error:
        parse_json(text)
    assert "Recursion" not in type(error.value).__name__


def test_numbers_that_are_not_finite_are_read_on_request():
    assert parse_json("[NaN, Infinity, 1e400]", finite=False)[1:] == [np.inf, np.inf]
    with pytest.raises(ValueError, match="has the key 'a' twice"):
        parse_json('{"a": NaN, "a": 1}', finite=False)


def test_depth_is_counted_in_values_and_not_in_brackets():
    assert len(parse_json("[" + ",".join(["[]"] * 500) + "]")) == 500
    assert parse_json('"' + "[" * 500 + '"') == "[" * 500
    assert parse_json("[" * 100 + "]" * 100)


def test_only_printable_characters_are_shown():
    assert shown("plain text, ü, 数") == "plain text, ü, 数"
    assert shown(HOSTILE) == r"a\x1b[31mb\x07\x9b2J\u202e\n\x7fc"
    assert shown(pathlib.Path("x\x1b")) == r"x\x1b" and shown(ValueError("\r")) == r"\r"


def _npz(path):
    with path.open("wb") as file:  # a path would get a suffix
        np.savez(file, **{HOSTILE: np.zeros(1)})
    return lambda: read_npz(path, ["label"])


def _json(path):
    path.write_text("{")
    return lambda: read_json(path)


def _library(path):
    def read():
        with understood(path, "Get it again."):
            raise KeyboardError(HOSTILE)

    return read


class KeyboardError(Exception):
    """An error of another library, whose message holds a text of the file."""


MESSAGES = {
    "the arrays of a file": _npz,
    "a file that is not JSON": _json,
    "another library's message": _library,
    "a limit": lambda path: lambda: Limits(bytes=1).check("bytes", 2, str(path)),
    "not finite": lambda path: (
        lambda: check_finite({HOSTILE: np.full(1, np.nan)}, path, "Get it again.")
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_names_hostile_texts_without_their_control_characters(name, tmp_path):
    path = tmp_path / HOSTILE.replace("\n", "")
    read = MESSAGES[name](path)
    with pytest.raises(ValueError, match=r"a\\x1b\[31mb") as error:
        read()
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [
        (3.0000049, "3.00001", "3"),
        (3 * 0.1, "0.3", "0.3"),
        (1e-5, "1e-05", "1e-05"),
        (8.0, "8", "8"),
        (0.0, "0", "0"),
        (123456789.5, "1.23457e+08", "1.23456e+08"),
        (9.9999999, "10", "9.99999"),
        (-1.0000049, "-1", "-1.00001"),
        (math.inf, "inf", "inf"),
        (math.nan, "nan", "nan"),
    ],
)
def test_numbers_are_rounded_to_the_safe_side(value, above, below):
    assert (up(value), down(value)) == (above, below)


def test_what_a_ledger_says_is_never_below_its_epsilon():
    """3.0000049 is 3 in the format "g", which is less than what was released."""
    with jaxdp.Ledger.in_memory() as ledger:
        ledger.register("x", adjacency="add_remove", unit="record", epsilon=9.0, delta=0.0)
        with ledger.spend("x", jaxdp.privacy.PureDpEvent(3.0000049)):
            pass
        (entry,) = ledger.report()["datasets"]
        assert float(entry["headline"]) >= ledger.epsilon("x")
        said = ledger.report_text()
        assert "epsilon      3.00001 at" in said and "remaining 5.99999" in said
        assert "epsilon 3.00001 at" in ledger.explain("x").text()
        assert ledger.group_privacy("x", [2]).text().split()[-2] == "6.00001"
        with pytest.raises(jaxdp.BudgetExceeded, match=r"3.00001 is spent .* make it 9.00001"):
            ledger.spend("x", jaxdp.privacy.PureDpEvent(6.0))
