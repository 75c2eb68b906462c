"""Files as they are: number types, tables and images are read as what they hold, or refused by
name."""

import io
import warnings

import jax
import numpy as np
import PIL.Image
import pytest

from jaxdp.data import (
    check_batch,
    check_source,
    from_arrays,
    from_csv,
    from_folder,
    from_npz,
    resize_images,
)
from tests.data.adapters import arrays, examples, mapped, npz, own, records, torch
from tests.data.real_files import (
    FLOATS,
    GREY_16,
    HEADER,
    IMAGES,
    KEPT,
    REFUSED,
    TABLES,
    TIMES,
    WARNED,
)

# --- Numbers -------------------------------------------------------------------------------------


MAKERS = [arrays, examples, npz, mapped, records, torch, own]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("column", "error", "message"), REFUSED, ids=lambda x: str(getattr(x, "dtype", ""))
)
def test_numbers_that_a_device_would_change_are_refused(tmp_path, make, column, error, message):
    """Broken twin: JAX reads the time 1700000000123 as -807049093."""
    if make is npz and column.dtype.hasobject:
        error, message = ValueError, "holds Python objects"
    elif column.dtype.hasobject and make is mapped:
        pytest.skip("no object can be mapped")
    with pytest.raises(error) as caught:
        check_source(make(tmp_path, {"time": column}))
    text = str(caught.value)
    assert "time" in text or make is npz
    assert (message in text or "dtype" in text) and not any(
        str(abs(value)) in text for value in TIMES
    )


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("column", WARNED, ids=range(len(WARNED)))
def test_digits_that_float32_loses_are_said_by_name(tmp_path, make, column):
    with pytest.warns(
        UserWarning,
        match=r"time.* is float64, and float32 loses its last digits\. Subtract a public",
    ):
        check_source(make(tmp_path, {"time": column}))


@pytest.mark.filterwarnings("ignore:.*hold NaN or an infinity")
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("column", KEPT, ids=lambda column: str(column.dtype))
def test_numbers_that_a_device_has_reach_it(tmp_path, make, column):
    source = make(tmp_path, {"time": column})
    check_source(source)
    read = check_batch(source.gather(np.arange(2)))["time"]
    assert read.dtype == column.dtype.newbyteorder("=") and read.dtype.isnative
    on_device = np.asarray(jax.device_put(read))
    expected = column.astype(np.float32) if column.dtype == np.float64 else column
    np.testing.assert_array_equal(on_device, expected)


def test_wide_numbers_are_kept_where_the_device_has_them():
    with jax.enable_x64(True):
        source = from_arrays(time=TIMES, exact=TIMES.astype(float))
        assert jax.device_put(check_batch(source.gather([0])))["time"].tolist() == [
            1_700_000_000_123
        ]


def test_a_row_that_wraps_is_refused_when_it_is_read(tmp_path):
    """The first and the last record are good, which is all that `check_source` reads."""
    np.save(tmp_path / "x.npy", np.array([1, 2**40, 3]))
    source = from_arrays(time=np.load(tmp_path / "x.npy", mmap_mode="r"), name="scans")
    check_source(source)
    with pytest.raises(
        ValueError, match=r"time of source 'scans' has whole numbers outside of \[-2147483648"
    ):
        source.gather([1])


# --- Tables -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for k in range(2):
        PIL.Image.fromarray(np.full((2, 3), 100 * k, np.uint8)).save(tmp_path / f"{k}.png")
    return tmp_path


@pytest.mark.parametrize(("content", "message"), TABLES, ids=range(len(TABLES)))
def test_tables_that_would_be_read_wrongly_are_refused(folder, content, message):
    """Each error has the file, a line or a column, and what to do. No error has a cell."""
    (folder / "labels.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        from_folder(folder)
    assert "labels.csv" in str(caught.value) and not any(
        cell in str(caught.value) for cell in ("1700", "elderly", "1e60")
    )


def test_a_table_as_programs_write_it(folder):
    """A byte-order mark, carriage returns, quotation marks, empty lines, and blanks around names
    and numbers."""
    rows = 'path, age ,weight,note,label\r\n\r\n0.png, 41 ,"1.5","a, b",0\r\n'
    rows += "1.png,+7,-.25e1,,1\r\n\r\n"
    (folder / "labels.csv").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    source = from_folder(folder, num_classes=2)
    batch = source.gather([0, 1])
    assert sorted(batch) == ["age", "image", "label", "weight"]
    assert batch["age"].tolist() == [41, 7] and batch["weight"].tolist() == [1.5, -2.5]
    assert source.text("note") == ["a, b", ""] and source.text("age") == [" 41 ", "+7"]
    with pytest.raises(
        ValueError, match=r"no column 'note'. It has .*age, image, label, weight.* note is text"
    ):
        check_source(source, "note")
    (folder / "labels.csv").write_text("path,age\n0.png,200001.01\n1.png,200001.02\n")
    with pytest.warns(
        UserWarning, match=r"column 'age' of .*labels\.csv is float64, and float32 loses"
    ):
        from_folder(folder)


def test_a_path_that_leads_out_by_a_link_is_refused(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    PIL.Image.fromarray(np.zeros((2, 3), np.uint8)).save(outside)
    (folder / "2.png").symlink_to(outside)
    (folder / "3.png").symlink_to(folder / "1.png")
    (folder / "labels.csv").write_text("path\n0.png\n3.png\n2.png\n")
    source = from_folder(folder)
    assert len(source.gather([0, 1])["image"]) == 2
    with pytest.raises(ValueError, match=r"2\.png is a link to a file outside of the folder"):
        source.gather([2])


def test_names_that_steer_a_terminal_are_escaped(folder):
    for content in ("\x1b[31mfile,label\n0.png,1\n", "path,\x1b[31m,\x1b[31m\n0.png,1,2\n"):
        (folder / "\x1b[2J.csv").write_text(content)
        with pytest.raises(ValueError) as caught:
            from_folder(folder, "\x1b[2J.csv")
        assert "\x1b" not in str(caught.value) and "\\x1b[2J.csv" in str(caught.value)


# --- Images -------------------------------------------------------------------------------------


def saved(path, kind, mode, pixels, **options):
    """Writes one image. Pillow writes I;16B as it is, and 16-bit PGM from I;16."""
    if mode == "I;16B":
        image = PIL.Image.frombytes("I;16B", pixels.shape[::-1], pixels.astype(">u2").tobytes())
    else:
        image = PIL.Image.fromarray(pixels)
    image.save(path, kind, **({"irreversible": False} if kind == "JPEG2000" else {}), **options)


@pytest.mark.parametrize(("kind", "mode", "pixels", "options", "expected"), IMAGES)
def test_images_load_as_what_they_hold(tmp_path, kind, mode, pixels, options, expected):
    """Broken twin: `convert("L")` of 16 bits, in which all pixels above 255 are white."""
    saved(tmp_path / "0.img", kind, mode, pixels)
    (tmp_path / "labels.csv").write_text("path\n0.img\n")
    source = from_folder(tmp_path, **options)
    image = source.gather([0])["image"]
    assert image.dtype == np.float32 and image.shape == (1, *pixels.shape, 1)
    np.testing.assert_allclose(image[0, ..., 0], expected, atol=1e-7)
    np.testing.assert_array_equal(source.load().gather([0])["image"], image)
    assert source.load().fingerprint == source.fingerprint


def one(tmp_path, name="0.img", **options):
    (tmp_path / "labels.csv").write_text(f"path\n{name}\n")
    return from_folder(tmp_path, **options)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_images_are_turned_as_exif_says(tmp_path, kind, dtype):
    """Orientation 6: a camera held upright. Row 0 of the file is the right column of the
    picture."""
    if (kind, dtype) == ("JPEG", np.uint16):
        pytest.skip("JPEG has 8 bits")
    pixels = (np.arange(16 * 24).reshape(16, 24) // 2).astype(dtype)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(pixels).save(tmp_path / "0.img", kind, exif=exif)
    image = one(tmp_path).gather([0])["image"][0, ..., 0]
    expected = np.rot90(pixels, -1) / np.iinfo(dtype).max
    np.testing.assert_allclose(image, expected, atol=0.03 if kind == "JPEG" else 1e-7)


def test_pixels_without_a_range_are_refused(tmp_path):
    for pixels in (FLOATS, GREY_16.astype(np.int32)):
        saved(tmp_path / "0.img", "TIFF", "F", pixels)
        with pytest.raises(
            ValueError, match=r"0\.img has grey pixels of 32 bits, .*: pixel_range=\(low, high\)"
        ):
            one(tmp_path).gather([0])
    with pytest.raises(ValueError, match=r"pixel_range must be \(low, high\) with low below high"):
        one(tmp_path, pixel_range=(1, 1))


def test_damaged_and_unlike_images_are_refused_by_name(folder):
    """Broken twin: the second file of 16 bits was read beside the first of 8."""
    content = (folder / "1.png").read_bytes()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    frames = [PIL.Image.fromarray(noise), PIL.Image.fromarray(noise // 2)]
    cases = {
        "cut.png": lambda path: PIL.Image.fromarray(noise).save(path),
        "text.png": lambda path: path.write_text("no image"),
        "empty.png": lambda path: path.write_bytes(b""),
        "wide.png": lambda path: PIL.Image.fromarray(np.zeros((2, 3), np.uint16)).save(path),
        "large.png": lambda path: PIL.Image.fromarray(np.zeros((3, 3), np.uint8)).save(path),
        "colour.png": lambda path: PIL.Image.fromarray(np.zeros((2, 3, 3), np.uint8)).save(path),
        "frames.tif": lambda path: frames[0].save(path, save_all=True, append_images=frames[1:]),
    }
    messages = {
        "cut.png": "is damaged: OSError, .*Get the file again, or leave its row out of the table",
        "text.png": "is damaged: UnidentifiedImageError, cannot identify image file. Get the file",
        "empty.png": "is an empty file. Get the file again, or leave its row out of the table",
        "wide.png": "has pixels of 16 bits, and the first image 8",
        "large.png": r"has the shape \(3, 3, 1\), and the first one \(2, 3, 1\)",
        "colour.png": r"has the shape \(2, 3, 3\), and the first one \(2, 3, 1\)",
        "frames.tif": "has 2 images. Store each in a file of its own",
    }
    assert content
    for name, write in cases.items():
        write(folder / name)
        if name == "cut.png":
            (folder / name).write_bytes((folder / name).read_bytes()[:2000])
        (folder / "labels.csv").write_text(f"path\n0.png\n{name}\n")
        with pytest.raises(ValueError, match=rf"image .*{name} {messages[name]}"):
            from_folder(folder).gather([0, 1])


def test_missing_images_wrong_labels_and_what_is_no_folder_are_said_with_a_remedy(folder):
    (folder / "labels.csv").write_text("path\n0.png\n7.png\n")
    with pytest.raises(
        FileNotFoundError, match=r"image .*7\.png does not exist\. Correct its path"
    ):
        from_folder(folder).gather([0, 1])
    (folder / "labels.csv").write_text("path,label\n0.png,1\n1.png,2\n")
    with pytest.raises(ValueError, match=r"line 3 of .*labels\.csv has a label .* in \[0, 2\)"):
        from_folder(folder, num_classes=2)
    with pytest.raises(ValueError, match=r"folder must be a folder, got the file .*labels\.csv"):
        from_folder(folder / "labels.csv")
    with pytest.raises(ValueError, match=r"is a folder, not an \.npz file"):
        from_npz(folder)
    with pytest.raises(ValueError, match=r"is a folder\. Give the path of a CSV file"):
        from_csv(folder)


@pytest.mark.parametrize("make", [arrays, examples, records, own])
def test_the_mask_of_an_array_is_never_lost(tmp_path, make):
    """Broken twin: NumPy returns what is under a mask, such as a missing age of 999."""
    ages = np.ma.masked_array([40.0, 999.0], mask=[False, True])
    assert np.asarray(ages)[1] == 999
    with pytest.raises(TypeError, match=r"masked array, whose mask would be lost.*filled\(0\)"):
        check_source(make(tmp_path, {"age": ages}))
    check_source(make(tmp_path, {"age": ages.filled(0)}))


def test_sixteen_bits_survive_preparation_and_resizing(tmp_path):
    """Neighbouring numbers of 16 bits are one number of 8 bits."""
    pixels = np.array([[1000, 1001], [1002, 1003]], np.uint16)
    saved(tmp_path / "0.img", "PNG", "I;16", pixels)
    prepared = one(tmp_path, prepare=lambda images: np.stack([image[:1] for image in images]))
    np.testing.assert_allclose(
        prepared.gather([0])["image"].ravel() * 65535, [1000, 1001], atol=0.01
    )
    larger = resize_images(one(tmp_path), 4).gather([0])["image"]
    assert np.unique(np.rint(65535 * larger)).tolist() == [1000, 1001, 1002, 1003]
    kept = from_arrays(image=pixels[None]).gather([0])["image"]
    np.testing.assert_allclose(kept.ravel(), pixels.ravel() / 65535, rtol=1e-6)


def test_the_advice_is_true_for_the_file_at_hand(folder):
    """Broken twin: "Restore it from a copy" for a CSV file that was given as an archive of
    NumPy."""
    (folder / "labels.csv").write_bytes(HEADER)
    np.save(folder / "x.npy", np.zeros(2))
    file = io.BytesIO()
    np.savez(file, x=np.zeros(2))
    (folder / "cut.npz").write_bytes(file.getvalue()[:100])
    for name, message in (
        ("labels.csv", r"labels\.csv is not an \.npz file, .* Give a file that numpy\.savez wrote"),
        ("x.npy", r"x\.npy is an \.npy file with one array, .* jaxdp\.data\.from_arrays"),
        (
            "cut.npz",
            r"cut\.npz is damaged: .* Give a file that numpy\.savez wrote, and get it again",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            from_npz(folder / name)
        assert "Restore" not in str(caught.value)
    for name, message in (
        ("x.npy", r"x\.npy is an \.npy file of NumPy\. .* jaxdp\.data\.from_arrays"),
        ("cut.npz", r"cut\.npz is a zip archive .* jaxdp\.data\.from_npz"),
    ):
        with pytest.raises(ValueError, match=message):
            from_csv(folder / name)


def test_no_adapter_warns_about_ordinary_features():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_arrays(
            features=np.random.default_rng(0).normal(size=(50, 3)),
            label=np.arange(50) % 2,
            num_classes=2,
        )
