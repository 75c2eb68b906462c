"""Files of other writers, damaged at random: nothing runs, nothing stalls, and the error names the
file.

The environment variable JAXDP_FAULTS is the number of damaged files of all kinds together.
"""

import io
import os
import resource
import sys
import time
import tracemalloc
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxdp import models
from jaxdp.files import (
    Limits,
    check_image,
    pack,
    read_json,
    read_npz,
    read_package,
    unpack,
    write_json,
)
from jaxdp.models import Preprocessing, create, load_checkpoint
from jaxdp.models.vit import ViT
from jaxdp.report import MetricsWriter, read_metrics
from jaxdp.split.backbone import Backbone
from jaxdp.split.exchange import Shipment, pack_frontend, unpack_frontend
from jaxdp.split.quantization import quantize_frontend, search_scales

FILES = int(os.environ.get("JAXDP_FAULTS", "96"))
LIMITS = Limits(bytes=2**24, pixels=2**20)
SECONDS, BYTES = 5.0, 2**27
# What only a reader that runs code would do.
EXECUTED = {
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "pickle.find_class",
    "os.fork",
}


def good_npz(path):
    np.savez(path, image=np.zeros((8, 4, 4), np.uint8), label=np.arange(8))


def good_tensors(path):
    models.save_params(path, {"dense": {"kernel": jnp.ones((8, 8)), "bias": jnp.zeros(8)}})


def good_json(path):
    write_json(path, {"result": {"accuracy": 0.5, "rows": [1, 2, {"a": "b"}]}, "content": "abc"})


def good_metrics(path):
    with MetricsWriter(path) as metrics:
        for step in range(4):
            metrics.write(step, loss=0.5, parts=[{"name": "a", "value": float("nan")}])


def good_image(path):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (28, 28, 3)).astype(np.uint8)).save(
        path, "PNG"
    )


def good_package(path):
    arrays = {f"layer/{k}": np.arange(64, dtype=np.float32).reshape(8, 8) for k in range(3)}
    path.write_bytes(pack("upload", fields={"num_classes": 3, "mode": "published"}, arrays=arrays))


def good_frontend(path):
    model = ViT(num_classes=3, patch_size=4, width=8, depth=3, num_heads=2, mlp_width=8)
    backbone = Backbone(model, Preprocessing(size=8, mean=(0.5,) * 3, std=(0.5,) * 3), 1)

    def search():
        images = np.zeros((1, 8, 8, 3), np.float32)
        params = model.init(jax.random.key(0), images)["params"]
        scales = search_scales(
            backbone, params, images, np.zeros(1, int), metric="mse", fractions=(1.0, 2.0, 1)
        )
        return quantize_frontend(backbone.divide(params)[0], scales)

    frontend = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(search))
    path.write_bytes(pack_frontend(Shipment(backbone, frontend, 1, 1)))


def read_upload(path):
    return unpack(read_package(path, limits=LIMITS), "upload", limits=LIMITS, name=str(path))


def read_frontend(path):
    try:
        return unpack_frontend(read_package(path, limits=LIMITS), limits=LIMITS)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_image(path):
    data = path.read_bytes()
    check_image(data, shape=(28, 28, 3), what=str(path), limits=LIMITS)


def checkpoint(path):
    load_checkpoint(
        path,
        model=create("vit_tiny", num_classes=3),
        naming="auto",
        preprocessing=Preprocessing(size=8, mean=(0.5,) * 3, std=(0.5,) * 3),
        limits=LIMITS,
    )


KINDS = {
    "arrays.npz": (good_npz, lambda path: read_npz(path, ["image", "label"], limits=LIMITS)),
    "params.safetensors": (good_tensors, lambda path: models.load_params(path, limits=LIMITS)),
    "checkpoint.safetensors": (good_tensors, checkpoint),
    "row.json": (good_json, lambda path: read_json(path, keys=["result", "content"])),
    "metrics.jsonl": (good_metrics, read_metrics),
    "image.png": (good_image, read_image),
    "package": (good_package, read_upload),
    "frontend": (good_frontend, read_frontend),
}


def damaged(content, rng):
    """Returns the content of a file, damaged in one of eight ways."""
    place = int(rng.integers(len(content) or 1))
    match int(rng.integers(8)):
        case 0:
            return content[:place]
        case 1:
            return (
                content[:place]
                + bytes([content[place] ^ 1 << int(rng.integers(8))])
                + content[place + 1 :]
            )
        case 2:  # a run of the largest numbers, where a length may be
            return content[:place] + b"\xff" * 8 + content[place + 8 :]
        case 3:
            return content[:place] + rng.bytes(int(rng.integers(1, 64))) + content[place:]
        case 4:
            return content[:place] + content[place + int(rng.integers(1, 64)) :]
        case 5:  # what a reader would follow by recursion
            return content[:place] + b'[{"a":' * 10**4 + content[place:]
        case 6:  # what a terminal would obey
            return content[:place] + b"\x1b[31m" + content[place + 5 :]
        case _:
            return rng.bytes(int(rng.integers(0, 256)))


@pytest.fixture
def watched():
    """Records what was executed while the test ran."""
    seen, on = [], [True]

    def hook(event, arguments):
        if on[0] and (event in EXECUTED or (event == "compile" and arguments[1] is None)):
            seen.append((event, str(arguments)[:80]))

    sys.addaudithook(hook)  # stays for good, so it is switched off
    yield seen
    on[0] = False


def lying(content, rng):
    """Returns a package with a right sum and one false field."""
    kind, fields, arrays = unpack(content, "frontend")
    places = [(fields, key) for key in fields]
    for outer in (fields["model"]["attributes"], fields["preprocessing"]):
        places += [(outer, key) for key in outer]
    holder, key = places[rng.integers(len(places))]
    others = [
        0,
        -1,
        3000,
        10**12,
        2**63,
        10**400,
        1e308,
        2.0,
        True,
        None,
        "x" * 99,
        "\x1b[31m",
        [],
        [10**9] * 4,
        {"a": 1},
    ]
    holder[key] = others[rng.integers(len(others))]
    return pack(kind, fields=fields, arrays=arrays)


def refused(read, path):
    """Reads a file. Returns whether it was refused, after a check of the error."""
    start = time.perf_counter()
    tracemalloc.start()
    try:
        read(path)
        return False
    except (ValueError, OSError) as error:
        assert str(path) in str(error), f"the error does not name the file: {error!r}"
        assert str(error).isprintable(), repr(error)
        return True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert time.perf_counter() - start < SECONDS and peak < BYTES


@pytest.mark.slow
def test_every_damaged_file_is_read_or_named(tmp_path, watched, record_property):
    rng, count = np.random.default_rng(0), 0
    originals = {}
    for name, (make, _) in KINDS.items():
        make(tmp_path / name)
        originals[name] = (tmp_path / name).read_bytes()
    watched.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(FILES):
        name = list(KINDS)[number % len(KINDS)]
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        spoil = lying if name == "frontend" and rng.integers(3) else damaged
        path.write_bytes(spoil(originals[name], rng))
        count += refused(KINDS[name][1], path)
    assert not watched
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**29
    record_property("damaged", FILES)
    record_property("refused", count)
    assert count > FILES / 2


@pytest.mark.slow
def test_whole_files_are_read(tmp_path):
    for name in set(KINDS) - {"checkpoint.safetensors"}:  # which has the names of no model
        make, read = KINDS[name]
        make(tmp_path / name)
        assert not refused(read, tmp_path / name)


# --- Files that are whole, and lie about their size ---------------------------------------------


def zipped(path, name, header, size):
    """Returns an .npz file with one array of `size` zero bytes behind a header."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(name, "w", force_zip64=True) as member,
    ):
        member.write(file.getvalue())
        for start in range(0, size, 2**20):
            member.write(bytes(min(2**20, size - start)))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["label"], ["bomb"]])
def test_a_small_npz_of_large_arrays_is_not_decompressed(tmp_path, names):
    path, size = tmp_path / "bomb.npz", 2**28
    zipped(path, "bomb.npy", {"descr": "|u1", "fortran_order": False, "shape": (size,)}, size)
    assert path.stat().st_size < size / 500
    with pytest.raises(
        ValueError,
        match="declares 268435456 bytes, more than" if names == ["bomb"] else "has no array",
    ):
        read_npz(path, names, limits=LIMITS)
    assert refused(lambda path: read_npz(path, names, limits=LIMITS), path)


@pytest.mark.parametrize("descr", ["|O", "<f8"])
def test_an_npz_with_objects_or_another_size_is_refused(tmp_path, descr):
    path = tmp_path / "objects.npz"
    zipped(path, "image.npy", {"descr": descr, "fortran_order": False, "shape": (2**40,)}, 64)
    assert refused(lambda path: read_npz(path, limits=LIMITS), path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    for number, value in enumerate((np.nan, np.inf)):
        path = tmp_path / f"{number}.safetensors"
        models.save_params(
            path, {"a": {"kernel": jnp.full((2, 2), value, jnp.bfloat16)}, "n": jnp.arange(3)}
        )
        with pytest.raises(
            ValueError, match=r"safetensors has NaN or infinite values in 'a/kernel'\. Restore"
        ):
            models.load_params(path)
        np.savez(tmp_path / f"{number}.npz", kernel=np.full(2, value))
        with pytest.raises(
            ValueError, match=r"npz has NaN or infinite values in 'kernel'\. Get it"
        ):
            checkpoint(tmp_path / f"{number}.npz")


@pytest.mark.slow
def test_limits_are_positive_integers():
    for value in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="limits need a positive integer for bytes"):
            Limits(bytes=value)
