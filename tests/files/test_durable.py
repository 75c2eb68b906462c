"""Files appear whole or not at all, and are on the disk before their name is."""

import errno
import os
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.files import DiskFull, explained_if_full, read_json, write_durably, write_json


def test_file_and_folder_are_on_the_disk_around_the_rename(tmp_path, monkeypatch):
    done = []

    def watch(name):
        original = getattr(os, name)

        def wrapped(first, *rest):
            where = (
                os.readlink(f"/proc/self/fd/{first}")
                if isinstance(first, int)
                else os.fspath(first)
            )
            done.append((name, "folder" if where == str(tmp_path) else "file"))
            return original(first, *rest)

        monkeypatch.setattr(os, name, wrapped)

    watch("fsync")
    watch("replace")
    write_durably(tmp_path / "a", b"content")
    assert done == [("fsync", "file"), ("replace", "file"), ("fsync", "folder")]
    write_durably(tmp_path / "b", lambda file: np.save(file, np.arange(3)))
    assert done[3:] == done[:3]
    assert (tmp_path / "a").read_bytes() == b"content" and np.load(tmp_path / "b").tolist() == [
        0,
        1,
        2,
    ]


def test_numbers_of_numpy_and_jax_are_written_as_numbers(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"steps": np.int64(3), "rates": [np.float32(0.5), jnp.float32(2.0)]})
    assert read_json(path) == {"steps": 3, "rates": [0.5, 2.0]}
    for other in (np.arange(2), object()):
        with pytest.raises(TypeError, match="JSON has no"):
            write_json(path, {"steps": other})
    assert read_json(path)["steps"] == 3


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_alone(tmp_path, monkeypatch, place):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})

    def full(*given):
        raise OSError(28, "No space left on device")

    words = (
        f"{path} cannot be written: No space left on device, with [0-9]+ bytes free .*Free space"
    )
    with monkeypatch.context() as patch, pytest.raises(DiskFull, match=words):
        patch.setattr(os, place, full)
        write_json(path, {"step": 2})
    assert read_json(path) == {"step": 1} and list(tmp_path.iterdir()) == [path]


def test_the_mode_is_that_of_the_new_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_durably(path, b"new", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_with_one_stem_do_not_meet(tmp_path):
    def both(file):
        write_durably(tmp_path / "stage.png", b"picture")
        file.write(b"{}")

    write_durably(tmp_path / "stage.json", both)
    assert (tmp_path / "stage.json").read_bytes() == b"{}" and (
        tmp_path / "stage.png"
    ).read_bytes() == b"picture"


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"a": 1', b"\xff\xfe", b"[" * 10**5, b"[1]", b'{"b": 1}']
)
def test_damaged_json_is_named_with_the_remedy(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(
        ValueError,
        match=rf"{re.escape(str(path))} is damaged: .*The same command then makes it again",
    ):
        read_json(path, keys=["a"])
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "other.json"))):
        read_json(tmp_path / "other.json")


@pytest.mark.slow
def test_what_a_process_that_died_left_is_replaced(tmp_path):
    path = tmp_path / "state.json"
    (tmp_path / "state.json.tmp").write_bytes(b"half of the st")
    write_json(path, {"step": 1})
    assert read_json(path) == {"step": 1} and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "-"), True),
        (OSError(errno.EDQUOT, "-"), True),
        (OSError(errno.EFBIG, "-"), True),
        (ValueError("RESOURCE_EXHAUSTED: write [OS error 28: No space left on device]"), True),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (OSError(errno.EIO, "-", "/No space left on device"), False),
        (ValueError("RESOURCE_EXHAUSTED: out of memory"), False),
    ],
)
def test_only_a_full_disk_is_called_full(tmp_path, error, is_full):
    path = tmp_path / "no" / "file"
    kind = DiskFull if is_full else type(error)
    with pytest.raises(kind) as raised, explained_if_full(path):
        raise error
    assert (raised.value is error) is not is_full
    if is_full:
        assert str(raised.value).startswith(f"{path} cannot be written: ")
        assert raised.value.__cause__ is error
