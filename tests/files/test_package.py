"""Packages: what is packed comes back, accidents are noticed, and a hostile writer gets neither
code nor memory."""

import functools
import hashlib
import json
import math
import os
import re

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxdp.files import Limits, pack, read_package, unpack, write_package

FIELDS = {"cut": 2, "scale": 0.1, "classes": ["cat", "dog"], "nested": {"ü": None, "on": True}}
ARRAYS = {
    "blocks/0/kernel": np.arange(6, dtype=np.int8).reshape(2, 3),
    "blocks/0/scale": np.float32(0.25),
    "empty": np.zeros((0, 4), np.float64),
    "../../labels": np.array([1, 0, 2]),
}
DATA = pack("frontend", fields=FIELDS, arrays=ARRAYS)


def sealed(rest):
    """Returns a package whose sum fits, as a forger makes it."""
    return hashlib.sha256(rest).digest() + rest


def forged(change):
    """Returns `DATA` with a header that `change` has changed, and a right sum."""
    length = int.from_bytes(DATA[32:40], "little")
    header = json.loads(DATA[40 : 40 + length])
    change(header)
    text = json.dumps(header).encode()
    return sealed(len(text).to_bytes(8, "little") + text + DATA[40 + length :])


def refused(data, match, kinds="frontend", **options):
    with pytest.raises(ValueError, match=match):
        unpack(data, kinds, **options)


# --- What is packed is what is read -------------------------------------------------------------


def test_fields_and_arrays_come_back():
    got = unpack(DATA, ["other", "frontend"], fields=["cut", "nested"])
    assert got.kind == "frontend" and got.fields == FIELDS and set(got.arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert got.arrays[name].dtype == array.dtype and got.arrays[name].shape == array.shape
        np.testing.assert_array_equal(got.arrays[name], array)
        assert got.arrays[name].flags.writeable
    assert pack("frontend", fields=FIELDS, arrays=ARRAYS) == DATA


def test_safetensors_alone_reads_the_arrays():
    found = safetensors.numpy.load(DATA[32:])
    np.testing.assert_array_equal(found["../../labels"], ARRAYS["../../labels"])


numbers = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
trees = st.recursive(
    numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
)
plain = st.sampled_from(["bool", "i1", "u1", "<i8", ">i2", "<u4", "<f2", ">f4", "<f8"])


@pytest.mark.slow
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    fields=st.dictionaries(st.text(min_size=1), trees, max_size=3),
    dtypes=st.dictionaries(st.text(min_size=1), plain, max_size=3),
    shape=st.lists(st.integers(0, 3), max_size=3),
    order=st.sampled_from("CF"),
)
def test_anything_plain_comes_back(fields, dtypes, shape, order):
    rng = np.random.default_rng(0)
    arrays = {
        name: np.asarray(rng.integers(0, 2, shape), dtype, order=order)
        for name, dtype in dtypes.items()
    }
    got = unpack(pack("any", fields=fields, arrays=arrays), "any")
    assert got.fields == fields and got.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (
            got.arrays[name].dtype == array.dtype.newbyteorder("<")
            and got.arrays[name].tolist() == array.tolist()
        )


def test_jax_arrays_are_packed_and_tuples_become_lists():
    got = unpack(pack("any", fields={"shape": (1, 2)}, arrays={"x": jnp.arange(3.0)}), "any")
    assert got.fields == {"shape": [1, 2]} and got.arrays["x"].tolist() == [0.0, 1.0, 2.0]


NAME = "must be a non-empty string"
DEEP, NANS = functools.reduce(lambda x, _: [x], range(99), 0), np.full(2, np.nan)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"kind": ""}, ValueError, f"kind {NAME}, got ''"),
        ({"fields": {3: 1}}, ValueError, f"every name in fields {NAME}, got 3"),
        ({"fields": {"x": {1, 2}}}, ValueError, "fields must be JSON-able .* set"),
        ({"fields": {"x": math.nan}}, ValueError, "fields must be JSON-able .* not JSON compliant"),
        ({"fields": {"x": DEEP}}, ValueError, "more than 100 deep"),
        ({"arrays": {"": np.zeros(2)}}, ValueError, f"every name in arrays {NAME}"),
        ({"arrays": {"x": NANS}}, ValueError, "NaN or infinite values in 'x'. Nothing is sent"),
        ({"arrays": {"x": np.array([{}])}}, TypeError, r"object. .*astype\(np.float32\)"),
        ({"arrays": {"x": np.zeros(2, ml_dtypes.bfloat16)}}, TypeError, "bfloat16"),
        ({"arrays": {"x": np.zeros(2, complex)}}, TypeError, "complex128"),
        ({"arrays": {"x": np.zeros(2, np.longdouble)}}, TypeError, ""),
        ({"arrays": {"x": np.zeros(2, "i4,f4")}}, TypeError, ""),
    ],
)
def test_what_cannot_be_packed_is_refused(change, error, match):
    match = f"array 'x' has dtype {match}" if error is TypeError else match
    with pytest.raises(error, match=match):
        pack(**{"kind": "any", "fields": {}, "arrays": {}, **change})


# --- Accidents and hostile writers --------------------------------------------------------------


def test_every_damaged_byte_is_noticed():
    for index in range(0, len(DATA), 7):
        refused(
            DATA[:index] + bytes([DATA[index] ^ 1 << index % 8]) + DATA[index + 1 :],
            r"SHA-256.* Send it again",
        )
    for wrong in (DATA[:-1], DATA + b"\0", b"", DATA[:32], DATA[:39]):
        refused(
            wrong,
            r"the package does not have the SHA-256 that it states\. The package is damaged\. "
            "Send it again",
        )


def test_another_package_than_the_one_asked_for_is_refused():
    refused(
        DATA,
        "the package is of kind 'frontend', not 'a' or 'b'. Give another package",
        kinds={"a", "b"},
    )
    refused(
        DATA,
        "whole, but .* needs the field 'bits', 'mean'.*make it again",
        fields=["mean", "cut", "bits"],
    )


@pytest.mark.parametrize("version", [3, 1, 0, -1, 2.0, True, "2", None, 10**30, [2]])
def test_another_format_is_refused(version):
    def other(header):
        header["__metadata__"]["package"] = json.dumps(
            {"format": version, "kind": "frontend", "fields": {}}
        )

    refused(
        forged(other),
        f"has format {re.escape(repr(version))}, but this jaxdp reads format 2. Upgrade jaxdp, or",
    )


FORMAT = '{"format": 2, "kind": '
FRONTEND = FORMAT + '"frontend", "fields": '
OBJECTS = '{"x":' * 10**5 + "0" + "}" * 10**5


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (FRONTEND + '{"x": NaN}}', "NaN is not a number of JSON"),
        (FRONTEND + '{"x": [-Infinity]}}', "-Infinity is not a number of JSON"),
        (FRONTEND + '{"x": 1e999}}', "the number 1e999 is beyond float64"),
        (FORMAT + '"a", "kind": "frontend", "fields": {}}', "has the key 'kind' twice"),
        (FRONTEND + "[" * 99 + "]" * 99 + "}", "is of kind 'frontend', not"),
        (FRONTEND + "[" * 100 + "]" * 100 + "}", "more than 100 deep"),
        (FRONTEND + OBJECTS + "}", "100 deep"),
        (FRONTEND + '{"x": ' + "9" * 10**4 + "}}", "is damaged: ValueError, Exceeds"),
        (FORMAT + '"\x1b[31mred", "fields": {}}', "is damaged: JSONDecodeError"),
        (FORMAT + r'"\u001b[31mred", "fields": {}}', r"is of kind '\\x1b\[31mred', not 'frontend'"),
    ],
)
def test_fields_that_are_not_strict_json_are_refused(told, match):
    refused(forged(lambda header: header["__metadata__"].update(package=told)), match)


def test_the_header_itself_is_strict_json():
    for text, match in (
        (b'{"x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested more than 100 deep"),
        (b'{"x": 1, "x": 2}', "has the key 'x' twice"),
        (b"\xff{}", "UnicodeDecodeError"),
    ):
        refused(
            sealed(len(text).to_bytes(8, "little") + text), f"is damaged: .*{match}.* Send it again"
        )


def test_a_message_shows_no_control_character():
    name = "\x1b[31m\x07\u202ename"
    header = {
        "layer\x1b[2J": {"dtype": "\x1b[31mF32", "shape": [1], "data_offsets": [0, 4]},
        "__metadata__": {},
    }
    header["__metadata__"]["package"] = json.dumps({"format": 2, "kind": "frontend", "fields": {}})
    text = json.dumps(header, ensure_ascii=False).replace("\x1b", "\\u001b").encode()
    for data in (DATA[:-1], sealed(len(text).to_bytes(8, "little") + text + bytes(4))):
        with pytest.raises(ValueError, match=r"\\x1b\[31m\\x07\\u202ename") as error:
            unpack(data, "frontend", name=name)
        assert str(error.value).isprintable()


def test_limits_come_before_all_else(monkeypatch):
    monkeypatch.setattr(hashlib, "sha256", None)
    refused(DATA, r"declares \d+ bytes, more than the limit of 100", limits=Limits(bytes=100))


def test_the_number_of_arrays_is_limited():
    refused(DATA, "declares 4 arrays, more than the limit of 3", limits=Limits(arrays=3))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("__metadata__"),
        lambda header: header.update(__metadata__={}),
        lambda header: header.update(__metadata__={"package": "[]"}),
        lambda header: header.update(__metadata__={"package": "[" * 100_000}),
        lambda header: header["empty"].update(shape=[2**60, 4]),
        lambda header: header["empty"].update(dtype="BF16"),
        lambda header: header["empty"].update(data_offsets=[0, 2**62]),
        lambda header: header["../../labels"].update(shape=[-3]),
        lambda header: header["../../labels"].update(dtype="O"),
        lambda header: header.update(more={"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}),
    ],
)
def test_headers_that_lie_are_refused(change):
    refused(forged(change), "the package is damaged: .* Send it again")


@pytest.mark.parametrize(
    "rest", [b"\xff" * 8, b"\xff" * 64, bytes(8), (2).to_bytes(8, "little") + b"[]", b"\x01" * 9]
)
def test_what_is_no_package_is_refused(rest):
    refused(sealed(rest), "the package is damaged: .* Send it again")


def test_an_infinity_that_came_is_refused():
    rest = safetensors.numpy.save(
        {"x": np.float32([np.inf])},
        {"package": json.dumps({"format": 2, "kind": "k", "fields": {}})},
    )
    refused(sealed(rest), "NaN or infinite values in 'x'. Its writer must make it again", kinds="k")


# --- Files --------------------------------------------------------------------------------------


def test_a_package_in_a_file(tmp_path):
    path = tmp_path / "new" / "frontend"
    write_package(path, DATA)
    assert read_package(path) == DATA and [file.name for file in path.parent.iterdir()] == [
        "frontend"
    ]
    with pytest.raises(
        ValueError, match=r"frontend declares \d+ bytes, more than the limit of 100"
    ):
        read_package(path, limits=Limits(bytes=100))
    (tmp_path / "link").symlink_to(path)
    for other in (tmp_path / "link", tmp_path):
        with pytest.raises(
            ValueError, match=r"is not a plain file\. The package is damaged\. Send it again"
        ):
            read_package(other)
    with pytest.raises(
        FileNotFoundError, match=r"nothing does not exist\. Give the file of a package"
    ):
        read_package(tmp_path / "nothing")


def test_nothing_is_left_of_a_package_that_could_not_be_written(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_package(tmp_path / "p", DATA)
    assert os.listdir(tmp_path) == []
