import hashlib
import json
import os
import re
import shutil
import stat

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdp.split.package import package_bytes, read_package, write_package

FIELDS = {"cut": 2, "scale": 0.1, "classes": ["cat", "dog"], "nested": {"ü": None, "on": True}}
ARRAYS = {
    "blocks/0/kernel": np.arange(6, dtype=np.int8).reshape(2, 3),
    "blocks/0/scale": np.float32(0.25),
    "empty": np.zeros((0, 4), np.float64),
    "../../labels": np.array([1, 0, 2]),
}


@pytest.fixture
def folder(tmp_path):
    """Returns a package, alone in its folder."""
    target = tmp_path / "sent" / "frontend"
    write_package(target, "frontend", fields=FIELDS, arrays=ARRAYS)
    return target


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def rewrite(folder, *, seal=True, **changes):
    """Changes entries of the manifest as a forger would. With `seal` its sum fits again."""
    manifest = {**manifest_of(folder), **changes}
    if seal:
        rest = {name: value for name, value in manifest.items() if name != "sha256"}
        manifest["sha256"] = sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def entries_with(folder, index, **changes):
    entries = manifest_of(folder)["arrays"]
    entries[index] = {**entries[index], **changes}
    return entries


def replace_array(folder, index, write):
    """Puts another file in the place of an array and makes its sum fit."""
    path = folder / f"{index:04d}.npy"
    write(path)
    rewrite(folder, arrays=entries_with(folder, index, sha256=sha256(path.read_bytes())))


def refused(folder, match, error=ValueError, **kwargs):
    with pytest.raises(error, match=match):
        read_package(folder, "frontend", **kwargs)


# --- What is written is what is read ----------------------------------------------------------------------------------


def test_fields_and_arrays_come_back(folder):
    got = read_package(folder, "frontend", fields=["cut", "nested"], arrays=["empty"])
    assert got.fields == FIELDS and list(got.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert got.arrays[name].dtype == array.dtype and got.arrays[name].shape == array.shape
        np.testing.assert_array_equal(got.arrays[name], array)
        assert got.arrays[name].flags.writeable


def test_numpy_alone_reads_the_files(folder):
    for entry, array in zip(manifest_of(folder)["arrays"], ARRAYS.values(), strict=True):
        np.testing.assert_array_equal(np.load(folder / entry["file"], allow_pickle=False), array)
        assert (entry["dtype"], tuple(entry["shape"])) == (array.dtype.str, array.shape)


numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
trees = st.recursive(numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
plain = st.sampled_from(["bool", "i1", "u1", "<i8", ">i2", "<u4", "<f2", ">f4", "<f8"])


@pytest.mark.slow
@hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    fields=st.dictionaries(st.text(min_size=1), trees, max_size=3),
    dtypes=st.dictionaries(st.text(min_size=1), plain, max_size=3),
    shape=st.lists(st.integers(0, 3), max_size=3),
    order=st.sampled_from("CF"),
)
def test_anything_plain_comes_back(tmp_path, fields, dtypes, shape, order):
    rng = np.random.default_rng(0)
    arrays = {name: np.asarray(rng.integers(0, 2, shape), dtype, order=order) for name, dtype in dtypes.items()}
    write_package(tmp_path / "p", "any", fields=fields, arrays=arrays)
    got = read_package(tmp_path / "p", "any")
    shutil.rmtree(tmp_path / "p")
    assert got.fields == fields and repr(got.fields) == repr(fields)
    assert {name: (x.dtype, x.tolist()) for name, x in got.arrays.items()} == {
        name: (x.dtype, x.tolist()) for name, x in arrays.items()
    }


def test_jax_arrays_are_written_and_tuples_become_lists(tmp_path):
    write_package(tmp_path / "p", "any", fields={"shape": (1, 2)}, arrays={"x": jnp.arange(3.0)})
    got = read_package(tmp_path / "p", "any")
    assert got.fields == {"shape": [1, 2]} and got.arrays["x"].tolist() == [0.0, 1.0, 2.0]


def test_bytes_to_send_are_those_of_all_files(folder, tmp_path):
    assert package_bytes(folder) == sum(os.path.getsize(folder / name) for name in os.listdir(folder)) > 500
    with pytest.raises(FileNotFoundError, match=r"nothing/manifest.json does not exist.* send it again"):
        package_bytes(tmp_path / "nothing")


# --- Whole or not at all ----------------------------------------------------------------------------------------------


def test_an_existing_folder_is_left_alone(tmp_path, folder):
    before = manifest_of(folder)
    with pytest.raises(FileExistsError, match=r"frontend exists already.*Choose another folder"):
        write_package(folder, "frontend", fields={}, arrays={})
    assert manifest_of(folder) == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "dangling"):
        with pytest.raises(FileExistsError, match=name):
            write_package(tmp_path / name, "frontend", fields={}, arrays={})


@pytest.mark.parametrize("fails", ["rename", "fsync"])
def test_nothing_is_left_of_a_package_that_could_not_be_written(tmp_path, monkeypatch, fails):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="disk full"):
        write_package(tmp_path / "p", "frontend", fields=FIELDS, arrays=ARRAYS)
    assert os.listdir(tmp_path) == []


def test_all_files_are_on_the_disk_before_the_folder_appears(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append("rename"), rename(a, b)))
    target = tmp_path / "p"
    write_package(target, "frontend", fields=FIELDS, arrays=ARRAYS)
    before = calls[: calls.index("rename")]
    assert set(before) == {path.stat().st_ino for path in (target, *target.iterdir())}
    assert calls[len(before) + 1 :] == [tmp_path.stat().st_ino]
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"kind": ""}, ValueError, "kind must be a non-empty string, got ''"),
        ({"fields": {3: 1}}, ValueError, "every name in fields must be a non-empty string, got 3"),
        ({"fields": {"x": {1, 2}}}, ValueError, "fields must be JSON-able .* set"),
        ({"fields": {"x": np.float32(1)}}, ValueError, "fields must be JSON-able .* float32"),
        ({"fields": {"x": float("nan")}}, ValueError, "fields must be JSON-able .* not JSON compliant"),
        ({"arrays": {"": np.zeros(2)}}, ValueError, "every name in arrays must be a non-empty string"),
        ({"arrays": {"x": np.array([{}])}}, TypeError, r"array 'x' has dtype object. .*astype\(np.float32\)"),
        ({"arrays": {"x": np.array(["a"])}}, TypeError, "array 'x' has dtype <U1"),
        ({"arrays": {"x": np.zeros(2, ml_dtypes.bfloat16)}}, TypeError, "array 'x' has dtype bfloat16"),
        ({"arrays": {"x": np.zeros(2, complex)}}, TypeError, "complex128"),
        ({"arrays": {"x": np.zeros(2, np.longdouble)}}, TypeError, "array 'x' has dtype"),
        ({"arrays": {"x": np.zeros(2, "i4,f4")}}, TypeError, "array 'x' has dtype"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_anything_is_written(tmp_path, change, error, match):
    with pytest.raises(error, match=match):
        write_package(**{"folder": tmp_path / "p", "kind": "any", "fields": {}, "arrays": {}, **change})
    assert os.listdir(tmp_path) == []


# --- Accidents --------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_an_array_is_noticed(folder):
    path = folder / "0001.npy"
    data = path.read_bytes()
    for index in range(len(data)):
        path.write_bytes(data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :])
        refused(folder, r"0001.npy does not have the SHA-256.* damaged. Send it again")
    for wrong in (data[:-1], data + b"\0", b""):
        path.write_bytes(wrong)
        refused(folder, r"0001.npy does not have the SHA-256.* Send it again")


def test_no_flipped_bit_of_the_manifest_changes_what_is_read(folder):
    path = folder / "manifest.json"
    data = path.read_bytes()
    same = 0
    for index in range(0, len(data), 3):
        path.write_bytes(data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :])
        try:
            got = read_package(folder, "frontend")
        except ValueError as error:
            assert re.search(r"manifest.json .*(Send it again|Upgrade jaxdp)", str(error))
            continue
        same += 1
        assert got.fields == FIELDS and got.arrays["../../labels"].tolist() == [1, 0, 2]
    assert same < 0.1 * len(data)  # white space


def test_changed_fields_are_noticed(folder):
    rewrite(folder, seal=False, fields={**FIELDS, "cut": 3})
    refused(folder, r"manifest.json does not have the SHA-256 that it states.*Send it again")


def test_lost_and_added_files_are_noticed(folder):
    (folder / "notes.txt").write_text("hello")
    refused(folder, r"notes.txt is not in the package's manifest. Remove it")
    (folder / "notes.txt").unlink()
    (folder / "0004.npy").mkdir()
    refused(folder, r"0004.npy is not in the package's manifest")
    (folder / "0004.npy").rmdir()
    read_package(folder, "frontend")
    (folder / "0002.npy").unlink()
    refused(folder, r"0002.npy is missing from the package. Send it again", FileNotFoundError)
    (folder / "manifest.json").unlink()
    refused(folder, r"manifest.json does not exist.* send it again", FileNotFoundError)
    shutil.rmtree(folder)
    refused(folder, r"manifest.json does not exist.* send it again", FileNotFoundError)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", "[" * 100_000, '{"format": 1e999}', "\xff"])
def test_a_manifest_that_is_none_is_refused(folder, text):
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    refused(folder, r"manifest.json is not (JSON|a manifest)\. The package is damaged. Send it again")


# --- Other packages than the one that is asked for --------------------------------------------------------------------


def test_another_kind_is_refused(folder):
    with pytest.raises(ValueError, match=r"manifest.json is of kind 'frontend', not 'release'. Give a folder of kind"):
        read_package(folder, "release")


def test_a_future_format_is_refused_whatever_else_it_has(folder):
    rewrite(folder, seal=False, format=2, arrays="elsewhere")
    refused(folder, r"manifest.json has format 2, but this jaxdp reads formats up to 1. Upgrade jaxdp")


def test_what_the_reader_needs_must_be_there(folder):
    refused(
        folder,
        r"whole, but a package of kind 'frontend' needs the field 'bits', 'mean'.*make it again",
        fields=["mean", "cut", "bits"],
    )
    refused(folder, r"needs the array 'kernel'", arrays=["empty", "kernel"])


# --- Hostile packages, whose sums fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "../secret.npy"},
        {"file": "/etc/passwd"},
        {"file": "manifest.json"},
        {"file": "0001.npy"},
        {"shape": [2, -3]},
        {"shape": [2, 3.0]},
        {"shape": [2, True]},
        {"shape": "23"},
        {"dtype": "|O"},
        {"dtype": "O"},
        {"dtype": "i1"},
        {"dtype": "<f4,<f4"},
        {"dtype": "("},
        {"name": 3},
        {"sha256": None},
        {"more": 1},
    ],
)
def test_impossible_entries_are_refused(folder, changes):
    np.save(folder.parent / "secret.npy", ARRAYS["blocks/0/kernel"])
    rewrite(folder, arrays=entries_with(folder, 0, **changes))
    refused(folder, r"manifest.json does not describe a package.*Send it again")


def test_impossible_manifests_are_refused(folder):
    for changes in ({"arrays": {}}, {"arrays": [3]}, {"fields": []}, {"more": 1}, {"format": 0}):
        original = manifest_of(folder)
        rewrite(folder, **changes)
        refused(folder, r"manifest.json does not describe a package.*Send it again")
        (folder / "manifest.json").write_text(json.dumps(original))
    rewrite(folder, arrays=entries_with(folder, 1, name="empty"))
    refused(folder, r"manifest.json names an array twice")


def test_links_are_not_followed(folder, tmp_path):
    for name in ("0000.npy", "manifest.json"):
        shutil.move(folder / name, tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        refused(folder, rf"{name} is not a plain file.*Send it again")
        (folder / name).unlink()
        shutil.move(tmp_path / name, folder / name)
    read_package(folder, "frontend")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("pickle-was-loaded",)


def test_pickled_arrays_are_not_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bomb = np.empty((2, 3), object)
    bomb[:] = Bomb()
    replace_array(folder, 0, lambda path: np.save(path, bomb, allow_pickle=True))
    refused(folder, r"0000.npy is not the int8 array of shape \(2, 3\) that the manifest states.*Send it again")
    replace_array(folder, 0, lambda path: path.write_bytes(bomb.dumps()))
    refused(folder, r"0000.npy is not the int8 array")
    assert not os.path.exists("pickle-was-loaded")


@pytest.mark.slow
def test_other_arrays_than_stated_are_refused(folder):
    def archive(path):
        with path.open("wb") as file:
            np.savez(file, x=ARRAYS["blocks/0/kernel"])

    def huge(path):
        header = {"descr": "|i1", "fortran_order": False, "shape": (2**60, 3)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)

    def text(path):
        path.write_bytes(np.lib.format.magic(1, 0) + b"\x20\x00" + b"{'descr': (((, 'shape': !! }    ")

    def longer(path):
        np.save(path, kernel)
        path.write_bytes(path.read_bytes() + b"more")

    def save(array):
        return lambda path: np.save(path, array)

    kernel = ARRAYS["blocks/0/kernel"]
    others = [archive, huge, text, longer, save(kernel.astype(np.uint8)), save(kernel.T), save(kernel[:1])]
    others += [lambda path, n=n: path.write_bytes(b"\x93NUMPY\x01\x00"[:n]) for n in (0, 3, 8)]
    for write in others:
        replace_array(folder, 0, write)
        refused(folder, r"0000.npy is not the int8 array of shape \(2, 3\)")
    replace_array(folder, 0, save(np.asfortranarray(kernel)))
    np.testing.assert_array_equal(read_package(folder, "frontend").arrays["blocks/0/kernel"], kernel)
