"""Sources from files and from other libraries: what is read, when, and what is refused."""

import csv
import sys
import tracemalloc

import numpy as np
import PIL.Image
import pytest

from jaxdp.data import (
    check_source,
    from_arrays,
    from_folder,
    from_grain,
    from_hf,
    from_npz,
    from_torch,
)
from jaxdp.files import Limits

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 100, (10, 5)).astype(np.int32)
LABEL = np.arange(10) % 2


# --- Files of NumPy -----------------------------------------------------------------------------


def test_npz(tmp_path):
    np.savez(tmp_path / "reviews.npz", ids=TOKENS, y=LABEL)
    source = from_npz(
        tmp_path / "reviews.npz", columns={"tokens": "ids", "label": "y"}, num_classes=2
    )
    assert (source.name, source.num_classes) == ("reviews", 2)
    np.testing.assert_array_equal(source.gather([3])["tokens"], TOKENS[[3]])
    assert from_npz(tmp_path / "reviews.npz").gather([0])["ids"].dtype == np.int32
    with pytest.raises(ValueError, match=r"has no array z\. It has ids, y"):
        from_npz(tmp_path / "reviews.npz", columns={"z": "z"})


def test_a_memory_mapped_array_larger_than_memory(tmp_path):
    """The file is sparse: 256 GiB are mapped and a few pages are read. A copy or a scan of values
    would not end."""
    scans = np.memmap(tmp_path / "scans.bin", np.float32, "w+", shape=(2**20, 64, 32, 32))
    scans[7], scans[2**20 - 1] = 1.0, 2.0
    tracemalloc.start()
    source = from_arrays(scan=scans, label=np.zeros(2**20, np.int64), num_classes=2, name="scans")
    check_source(source)
    public, private = source.split([0.1, 0.9], seed=0)
    assert len(public) + len(private) == 2**20
    assert [scan.max() for scan in source.gather([7, 8, 2**20 - 1])["scan"]] == [1.0, 0.0, 2.0]
    assert type(source.gather([7])["scan"]) is np.ndarray
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e8


def test_the_fingerprint_of_a_mapped_array_is_of_its_content_in_bounded_memory(tmp_path):
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (1000, 8192))
    mapped[:] = np.arange(1000)[:, None]
    source = from_arrays(x=np.load(tmp_path / "x.npy", mmap_mode="r"))
    tracemalloc.start()
    found = source.fingerprint
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3e7 < mapped.nbytes
    assert found == from_arrays(x=np.asarray(mapped)).fingerprint
    mapped[-1, -1] = -1
    mapped.flush()
    assert found != from_arrays(x=np.load(tmp_path / "x.npy", mmap_mode="r")).fingerprint


# --- A folder of images -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "age", "weight", "patient"])
        for k in range(6):
            PIL.Image.fromarray(np.full((4, 5), 10 * k, np.uint8)).save(tmp_path / f"{k}.png")
            rows.writerow([f"{k}.png", ("well", "ill")[k % 2], 40 + k, 60.5, f"P{k}"])
    return tmp_path


def test_images_of_a_folder_are_read_on_demand(folder):
    source = from_folder(folder, classes=("well", "ill"))
    batch = source.gather([3, 1])
    assert (len(source), source.num_classes, source.name) == (6, 2, "labels")
    assert batch["image"].shape == (2, 4, 5, 1) and batch["image"].dtype == np.float32
    np.testing.assert_array_equal(np.rint(255 * batch["image"][:, 0, 0, 0]), [30, 10])
    np.testing.assert_array_equal(batch["label"], [1, 1])
    assert (
        batch["age"].dtype == np.int32
        and batch["weight"].dtype == np.float32
        and "patient" not in batch
    )
    (folder / "5.png").unlink()
    part = source.take([0, 4])
    # the missing image is in another part
    assert part.gather([1])["age"] == 44 and len(part.fingerprint) == 64
    assert part.load().fingerprint == part.fingerprint
    with pytest.raises(FileNotFoundError, match=r"5\.png"):
        source.gather([5])


def test_images_of_differing_sizes_need_one_shape(folder):
    PIL.Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(folder / "2.png")
    with pytest.raises(
        ValueError,
        match=r"2\.png has the shape \(9, 9, 3\), and the first one \(4, 5, 1\). Give all",
    ):
        from_folder(folder, classes=("well", "ill")).gather([2])
    cut = from_folder(
        folder,
        classes=("well", "ill"),
        prepare=lambda images: np.stack([i[:2, :2, :1] for i in images]) / 255,
    )
    np.testing.assert_array_equal(np.rint(255 * cut.gather([2, 1])["image"][:, 0, 0, 0]), [0, 10])
    assert cut.arrays["image"].shape == (6, 2, 2, 1)


def test_folders_that_cannot_be_are_refused(folder):
    with pytest.raises(
        ValueError, match=r"line 3 of .*labels\.csv must have one of the classes well, sick"
    ):
        from_folder(folder, classes=("well", "sick"))
    with pytest.raises(
        ValueError,
        match="must have a column 'label' of integers, or of names that classes= declares",
    ):
        from_folder(folder, num_classes=2)
    with pytest.raises(ValueError, match="declares 20 pixels, more than the limit of 10"):
        from_folder(folder, limits=Limits(pixels=10)).gather([0])
    (folder / "none.csv").write_text("file,label\na,1\n")
    with pytest.raises(ValueError, match=r"none\.csv must have rows, and a header with 'path'"):
        from_folder(folder, "none.csv")


# --- Other libraries ----------------------------------------------------------------------------


def test_records_of_any_object_with_random_access():
    """A list of records stands for a source of Grain. Lists of numbers are arrays, dicts and tuples
    are nestings."""
    read = []

    class Counted(list):
        def __getitem__(self, k):
            read.append(k)
            return super().__getitem__(k)

    records = Counted(
        {"tokens": row.tolist(), "pair": (np.float16(k), {"y": k % 2 == 0})}
        for k, row in enumerate(TOKENS)
    )
    source = from_grain(records, name="made")
    part = source.take([9, 4]).take([1])
    assert not read
    batch = part.gather([0, 0])
    assert set(read) == {0, 4}
    np.testing.assert_array_equal(batch["tokens"], TOKENS[[4, 4]])
    assert batch["pair"][0].dtype == np.float16 and batch["pair"][1]["y"].dtype == bool
    assert source.gather([])["tokens"].shape == (0, 5)
    assert source[3]["tokens"].shape == (5,)
    changed = [*records]
    changed[9] = {**changed[9], "pair": (np.float16(8), {"y": False})}
    prints = {source.fingerprint, part.fingerprint, from_grain(changed).fingerprint}
    assert len(prints) == 3 and from_grain(list(records)).fingerprint == source.fingerprint


@pytest.mark.parametrize(
    ("records", "error", "message"),
    [
        (
            [{"x": [1, 2]}, {"x": [1, 2, 3]}],
            ValueError,
            "record 1 differs from record 0 in the shape or dtype of x",
        ),
        (
            [{"x": 1}, {"x": 1.5}],
            ValueError,
            "record 1 differs from record 0 in the shape or dtype of x",
        ),
        (
            [{"x": 1}, {"x": 1, "y": 2}],
            ValueError,
            "record 1 differs from record 0 in the shape or dtype of y",
        ),
        ([{"x": [[1], [1, 2]]}], ValueError, "record 0 has a list of several lengths"),
        (
            [{"text": "secret"}],
            TypeError,
            "column 'text' has the dtype <U6. Encode it as numbers in prepare=",
        ),
        ([{"x": None}], TypeError, "column 'x' has the dtype object"),
        (
            iter([1]),
            TypeError,
            r"records must have len\(\) and records\[i\], but list_iterator has not",
        ),
    ],
)
def test_records_that_differ_are_refused(records, error, message):
    with pytest.raises(error, match=message) as caught:
        check_source(from_grain(records))
    assert "secret" not in str(caught.value)


def test_grain():
    import grain

    dataset = grain.MapDataset.source(TOKENS).map(
        lambda row: {"tokens": row, "label": row.sum() % 2}
    )
    source = from_grain(dataset, num_classes=2)
    np.testing.assert_array_equal(source.gather([3, 1])["tokens"], TOKENS[[3, 1]])
    with pytest.raises(TypeError, match="Private sampling needs random access"):
        from_grain(dataset.to_iter_dataset())


@pytest.fixture
def hf():
    import datasets

    features = {
        "ids": datasets.Sequence(datasets.Value("int32")),
        "label": datasets.ClassLabel(names=["bad", "good"]),
        "text": datasets.Value("string"),
    }
    columns = {"ids": TOKENS.tolist(), "label": LABEL.tolist(), "text": 10 * ["a"]}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


@pytest.mark.parity
def test_hugging_face(hf, tmp_path):
    """Records of a data set of Hugging Face, in memory and on disk."""
    import datasets

    source = from_hf(hf, columns={"tokens": "ids", "label": "label"})
    batch = source.gather([3, 1])
    np.testing.assert_array_equal(batch["tokens"], TOKENS[[3, 1]])
    np.testing.assert_array_equal(batch["label"], LABEL[[3, 1]])
    assert batch["tokens"].dtype == np.int32  # the library's own default is int64
    assert source.num_classes == 2 and set(batch) == {"tokens", "label"}
    encoded = from_hf(hf, prepare=lambda record: {"length": np.int32(len(record["text"]))})
    assert encoded.gather([0])["length"] == 1
    own = hf.with_transform(
        lambda rows: {"ids": rows["ids"], "twice": [[2 * k for k in ids] for ids in rows["ids"]]}
    )
    np.testing.assert_array_equal(
        from_hf(own, columns={"x": "twice"}).gather([2])["x"], 2 * TOKENS[[2]]
    )
    with pytest.raises(TypeError, match="column 'text' has the dtype"):
        check_source(from_hf(hf))
    with pytest.raises(TypeError, match="Private sampling needs random access"):
        from_hf(hf.to_iterable_dataset())
    hf.save_to_disk(tmp_path / "saved")
    assert (
        from_hf(tmp_path / "saved", columns={"tokens": "ids"}).fingerprint
        == source_of(hf).fingerprint
    )
    datasets.DatasetDict({"train": hf}).save_to_disk(tmp_path / "splits")
    assert len(from_hf(tmp_path / "splits", "train")) == 10
    with pytest.raises(ValueError, match="dataset has the splits train"):
        from_hf(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"dataset has no column z\. It has ids, label, text"):
        from_hf(hf, columns={"z": "z"})


def source_of(hf):
    return from_hf(hf, columns={"tokens": "ids"})


@pytest.mark.parity
def test_images_of_hugging_face(hf):
    """Images of a data set of Hugging Face."""
    import datasets

    pictures = [PIL.Image.fromarray(np.full((4, 4, 3), 51 * k, np.uint8)) for k in range(2)]
    dataset = datasets.Dataset.from_dict({"img": pictures}).cast_column("img", datasets.Image())
    np.testing.assert_allclose(from_hf(dataset, columns={"image": "img"}).gather([1])["image"], 0.2)


def test_a_missing_library_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[hf\]"'):
        from_hf(str(tmp_path))


@pytest.mark.parity
def test_torch():
    """Records of a map-style data set of torch."""
    import torch

    class Pictures(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, k):
            return torch.full((3, 4, 5), float(k), requires_grad=True), k % 2

    def prepare(pair):
        return {"image": pair[0].permute(1, 2, 0) / 6, "label": pair[1]}

    source = from_torch(Pictures(), prepare=prepare, num_classes=2)
    batch = source.gather([5, 2])
    assert batch["image"].shape == (2, 4, 5, 3) and batch["label"].tolist() == [1, 0]
    table = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    assert [column.tolist() for column in from_torch(table).gather([2])] == [[[4.0, 5.0]], [2]]

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(TypeError, match="Private sampling needs random access"):
        from_torch(Endless())
