"""What real files hold: identifiers, number types, image modes and tables. Property tests and
audits draw from here."""

import datetime

import numpy as np

from launch.audits.inputs import PEOPLE

# One text of each person, as a table has it.
TEXTS = [spellings[0] for spellings in PEOPLE if isinstance(spellings[0], str)]

# What is no identifier.
NO_PEOPLE = [
    (None, ValueError, "lacks a value"),
    ("", ValueError, "lacks a value"),
    (" \u00a0", ValueError, "lacks a value"),
    (float("nan"), ValueError, "lacks a value"),
    ((), ValueError, "lacks a value"),
    (("site", None), ValueError, "lacks a value"),
    (b"\xff", ValueError, "not UTF-8"),
    ("\ud800", ValueError, "surrogate"),
    (1.0, TypeError, "got float"),
    (np.float32(200001.01), TypeError, "got float32"),
    (True, TypeError, "got bool"),
    (np.bool_(True), TypeError, "got bool"),
    (datetime.datetime(2026, 1, 2), TypeError, "got datetime"),
    (np.datetime64("2026-01-02"), TypeError, "got datetime64"),
    ([1], TypeError, "got list"),
    (1j, TypeError, "got complex"),
]
# Arrays that merge people before anybody can tell.
NO_COLUMNS = [
    np.array([200001.01, 200001.02]),
    np.array([1.0, np.nan], np.float32),
    np.array([True, False]),
    np.array(["2026-01-02", "2026-01-03"], "M8[ns]"),
    np.array([1, 2], "m8[s]"),
]

TIMES = np.array([1_700_000_000_123, 1_700_000_000_124])

# Columns that a device would change: (array, error, message).
REFUSED = [
    (TIMES, ValueError, "whole numbers outside of"),
    (-TIMES, ValueError, "whole numbers outside of"),
    (TIMES.astype(">i8"), ValueError, "whole numbers outside of"),
    (np.array([0, 2**32], np.uint64), ValueError, "whole numbers outside of"),
    (np.array([0, 2**31]), ValueError, "whole numbers outside of"),
    (np.array([1e300, 0.0]), ValueError, "infinite in float32"),
    (np.zeros(2, np.longdouble), TypeError, "no device has"),
    (np.zeros(2, np.clongdouble), TypeError, "no device has"),
    (np.zeros(2, [("a", "f4")]), TypeError, "must be an array"),
    (np.zeros(2, "M8[s]"), TypeError, "must be an array"),
    (np.array([None, 1]), TypeError, "must be an array"),
]
# float64 columns whose digits float32 loses: a warning.
WARNED = [
    TIMES.astype(float),
    np.array([2.0**24 + 1, 0.0]),
    np.array([200001.01, 200001.02]),
    np.array([[1e6 + 0.001, 0.0], [1e6 + 0.002, 1.0]]),
]
# Columns that are kept, with the same numbers.
KEPT = [
    np.array([True, False]),
    np.array([-(2**31), 2**31 - 1]),
    np.array([0, 2**32 - 1], np.uint64),
    np.array([0, 2**32 - 1], np.uint32),
    np.array([1, 2], ">i2"),
    np.array([0.5, -0.25], ">f4"),
    np.array([0.1, 1e-3]),
    np.array([0.1, np.nan]),
    np.array([2.0**24, 0.0]),
    np.zeros(2, np.float16),
    np.zeros((2, 0)),
]

HEADER = b"path,label,age\n"
HAS_TEXT, INSIDE = ".* has text in the column 'age'", ".* must have a path inside of the folder"
OF_AGE = "column 'age' of .* has "
HAS_MARK = ".* has a decimal comma or a mark of thousands in the column 'age'"
# Tables that are refused: (bytes, message).
TABLES = [
    (b"", "must have rows, and a header with 'path'"),
    (HEADER, "must have rows, and a header with 'path'"),
    (b"file,label\n0.png,1\n", r"must have rows, and a header with 'path'\. It has file, label"),
    (HEADER + b"0.png,0,1\n1.png,1\n", r"line 3 of .* has 2 cells, and the header 3"),
    (HEADER + b"0.png,0,1,9\n", r"line 2 of .* has 4 cells, and the header 3"),
    (b"path;label;age\n0.png;0;1,5\n", r"line 1 of .* has semicolons between its columns"),
    (b"path\tlabel\n0.png\t0\n", r"line 1 of .* has tabs between its columns"),
    ((HEADER + b"0.png,0,1\n").decode().encode("utf-16"), "is not UTF-8, but UTF-16"),
    ((HEADER + b"0.png,0,1\n").decode().encode("utf-16-le"), "is not UTF-8, but UTF-16"),
    (HEADER + b"0.png,0,\xe9\n", r"line 2 of .* is not UTF-8, but perhaps Latin-1"),
    (b"path,age,age\n0.png,1,2\n", "has two columns 'age'"),
    (b"path,age, age\n0.png,1,2\n", "has two columns 'age'"),
    (b",path\n0,0.png\n", "column 1 of .* has no name"),
    (HEADER + b'0.png,0,"1\n', r"line 2 of .* is no line of a CSV file"),
    (HEADER + b"0.png,0,1\n1.png,0,\n", r"line 3 of .* has nothing in the column 'age'"),
    (HEADER + b"0.png,0,1\n1.png,0,elderly\n", f"line 3 of {HAS_TEXT}"),
    (HEADER + b"0.png,0,1\n1.png,0,nan\n", f"line 3 of {HAS_TEXT}"),
    (HEADER + b"0.png,0,12\n1.png,0,1_23\n", rf"line 3 of {HAS_TEXT}.* texts=\('age',\)"),
    (HEADER + "0.png,0,1\n1.png,0,\u0663\n".encode(), f"line 3 of {HAS_TEXT}"),
    (HEADER + b'0.png,0,"1,5"\n1.png,0,"2,5"\n', f"line 2 of {HAS_MARK}.* texts="),
    (HEADER + b'0.png,0,"1,500.5"\n1.png,0,12\'500\n', f"line 2 of {HAS_MARK}"),
    (HEADER + b"0.png,0,1700000000123\n", OF_AGE + "whole numbers outside of"),
    (
        HEADER + b"0.png,0,12345678901234567890\n",
        "line 2 of .* has a whole number of more than 64 bits",
    ),
    (HEADER + b"0.png,0,1e60\n1.png,0,1.5\n", OF_AGE + "numbers that are infinite in float32"),
    (b"path,image\n0.png,0\n", "has a column 'image'"),
    (HEADER + b"../0.png,0,1\n", f"line 2 of {INSIDE}"),
    (
        HEADER + b"0.png,0,1\n/etc/0.png,0,1\n",
        f"line 3 of {INSIDE}",
    ),
    (HEADER + b"a/../../0.png,0,1\n", f"line 2 of {INSIDE}"),
    (HEADER + b"a\\..\\0.png,0,1\n", f"line 2 of {INSIDE}"),
    (HEADER + b"C:\\0.png,0,1\n", f"line 2 of {INSIDE}"),
    (HEADER + b",0,1\n", f"line 2 of {INSIDE}"),
]

GREY_16 = np.array([[0, 255, 256, 4095], [40000, 65535, 1, 2]], np.uint16)
FLOATS = np.array([[-1000.0, 0.5], [3000.0, 12.25]], np.float32)
# Image files: (format, mode of Pillow, pixels [H, W], options of from_folder, pixels in [0, 1]).
IMAGES = [
    ("PNG", "L", (GREY_16 // 257).astype(np.uint8), {}, (GREY_16 // 257) / 255),
    ("PNG", "1", GREY_16 > 300, {}, (GREY_16 > 300) * 1.0),
    ("PNG", "I;16", GREY_16, {}, GREY_16 / 65535),
    ("TIFF", "I;16", GREY_16, {}, GREY_16 / 65535),
    ("TIFF", "I;16B", GREY_16, {}, GREY_16 / 65535),
    ("PPM", "I;16", GREY_16, {}, GREY_16 / 65535),
    ("JPEG2000", "I;16", GREY_16, {}, GREY_16 / 65535),
    ("PNG", "I;16", GREY_16, {"pixel_range": (0, 4095)}, np.minimum(GREY_16 / 4095, 1)),
    ("TIFF", "I", GREY_16.astype(np.int32) * 1000, {"pixel_range": (0, 65535000)}, GREY_16 / 65535),
    ("TIFF", "F", FLOATS, {"pixel_range": (-1000, 3000)}, (FLOATS + 1000) / 4000),
]
