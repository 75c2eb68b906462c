"""Arrays of .npz files whose headers lie about their size."""

import io
import zipfile

import numpy as np
import pytest

from jaxdp.files import Limits, npz_names, read_npz, shown, shown_lines


def written(path, name, header):
    """Writes an .npz file with one array without bytes behind a header."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, file.getvalue())


@pytest.mark.parametrize(
    ("descr", "shape", "message"),
    [
        ("|V0", (10**13,), "entries have no bytes"),
        ("<U0", (10**13,), "entries have no bytes"),
        ("|S0", (10**13,), "entries have no bytes"),
        ("|S0", (0,), "entries have no bytes"),
        ([("a", "|S0")], (10**13,), "entries have no bytes"),
        ("<f4", (10**13, 0), "declares 40000000000000 bytes, more than the limit"),
    ],
)
def test_arrays_without_bytes_are_refused(tmp_path, descr, shape, message):
    """10^13 rows of no bytes pass each limit on bytes, and are counted by whoever reads them."""
    written(tmp_path / "x.npz", "x.npy", {"descr": descr, "fortran_order": False, "shape": shape})
    with pytest.raises(ValueError, match=message) as caught:
        read_npz(tmp_path / "x.npz")
    assert "x.npz" in str(caught.value)


def test_arrays_without_rows_are_read(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((0, 3)), y=np.zeros((3, 0)))
    assert read_npz(tmp_path / "x.npz")["y"].shape == (3, 0) and npz_names(tmp_path / "x.npz") == [
        "x",
        "y",
    ]


def test_names_that_steer_a_terminal_are_escaped(tmp_path):
    path = tmp_path / "\x1b[2J.npz"
    written(path, "\x1b[31mred.npy", {"descr": "<f4", "fortran_order": False, "shape": (1,)})
    with pytest.raises(ValueError, match=r"has no array missing. It has \\x1b\[31mred") as caught:
        read_npz(path, ["missing"])
    assert "\x1b" not in str(caught.value)
    for read in (lambda: read_npz(path), lambda: read_npz(path, limits=Limits(arrays=1, bytes=1))):
        with pytest.raises(ValueError) as caught:
            read()
        assert "\x1b" not in str(caught.value)
    assert shown("a\x1b\n") == "a\\x1b\\n" and shown_lines("a\x1b\nb") == "a\\x1b\nb"
