"""Sources from arrays, files and other libraries: what all of them do, what is read, when, and what
is refused."""

import csv
import sys
import tracemalloc

import jax
import numpy as np
import PIL.Image
import pytest

from jaxdp.data import (
    Examples,
    Source,
    by_group,
    by_owners,
    check_source,
    from_arrays,
    from_csv,
    from_folder,
    from_grain,
    from_hf,
    from_npz,
    from_texts,
    from_torch,
    read_column,
    take,
)
from jaxdp.files import Limits
from tests.data import adapters

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 100, (10, 5)).astype(np.int32)
LABEL = np.arange(10) % 2


# --- What is the same for every adapter ---------------------------------------------------------

N = 6
PATIENTS = ["7", "007", " 7", "a;b", "b", "a"]


def given(is_edited=False):
    """Returns columns of several dtypes, the first record edited or not."""
    columns = {
        "tokens": np.arange(3 * N, dtype=np.uint16).reshape(N, 3),
        "mask": np.arange(3 * N).reshape(N, 3) > 4,
        "scan": np.linspace(0, 1, 8 * N).reshape(N, 2, 2, 2).astype(np.float16),
        "label": np.arange(N, dtype=np.int32) % 2,
    }
    if is_edited:
        columns["tokens"][0, -1] += 1
    return columns


def of_a_folder(folder, is_edited=False):
    """A folder of images with a table, and what its examples are."""
    pixels = np.arange(20 * N, dtype=np.uint8).reshape(N, 4, 5)
    pixels[0, -1, -1] += is_edited
    for k, image in enumerate(pixels):
        PIL.Image.fromarray(image).save(folder / f"{k}.png")
    rows = [f"{k}.png,{40 + k},{k / 2},{patient}" for k, patient in enumerate(PATIENTS)]
    (folder / "labels.csv").write_text("\n".join(["path,age,weight,patient", *rows]))
    ages = np.arange(40, 40 + N, dtype=np.int32)
    weights = np.arange(N, dtype=np.float32) / 2
    columns = {"image": np.float32(pixels[..., None]) / np.float32(255), "age": ages}
    return from_folder(folder, texts=("patient",)), {**columns, "weight": weights}


def of_a_table(folder, is_edited=False):
    ages = np.arange(40, 40 + N, dtype=np.float32)
    ages[0] += is_edited
    rows = [f"{age},{k % 2},{PATIENTS[k]}" for k, age in enumerate(ages)]
    (folder / "x.csv").write_text("\n".join(["age,y,patient", *rows]))
    source = from_csv(folder / "x.csv", label="y", num_classes=2, group="patient")
    return source, {"features": ages[:, None], "label": np.arange(N, dtype=np.int32) % 2}


def of_texts(folder, is_edited=False):
    words = ["abc", "d", "", "ef", "g", "hijk"]
    if is_edited:
        words[0] = "abd"
    tokens = np.full((N, 6), -1, np.int32)
    for row, word in zip(tokens, words, strict=True):
        row[: len(word) + 2] = [0, *word.encode(), 0]
    return from_texts(words, length=6), {"tokens": tokens}


SOURCES = {
    **{
        name: lambda folder, is_edited=False, adapter=adapter: (
            adapter(folder, given(is_edited), {"patient": PATIENTS}),
            given(is_edited),
        )
        for name, adapter in adapters.ADAPTERS.items()
    },
    "folder": of_a_folder,
    "table": of_a_table,
    "texts": of_texts,
}
every_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
# What `Examples` has besides the three members of a source.
OF_THIS_LIBRARY = {name: make for name, make in SOURCES.items() if name != "own"}
every_source_of_this_library = pytest.mark.parametrize(
    "make", OF_THIS_LIBRARY.values(), ids=OF_THIS_LIBRARY
)


def assert_rows(batch, columns, rows):
    """Checks that a batch has these rows of all columns, with their dtypes."""
    assert batch.keys() == columns.keys()
    for name, column in columns.items():
        assert type(batch[name]) is np.ndarray and batch[name].dtype == column.dtype, name
        np.testing.assert_array_equal(batch[name], column[rows], name)


@every_source
def test_examples_are_the_records_at_their_positions(tmp_path, make):
    source, columns = make(tmp_path)
    assert isinstance(source, Source) and len(source) == N
    structure = check_source(source, *columns)
    for name, column in columns.items():
        assert structure[name] == jax.ShapeDtypeStruct(column.shape[1:], column.dtype)
    # In any order, with repetitions, none at all, and a second time.
    for rows in ([4, 0, 4], list(range(N)), [], [4, 0, 4]):
        assert_rows(source.gather(np.array(rows, np.int64)), columns, np.array(rows, np.int64))


@every_source
def test_parts_and_columns_have_the_same_records(tmp_path, make):
    source, columns = make(tmp_path)
    part = take(source, np.array([5, 2, 0]))
    assert len(part) == 3 and check_source(part) == check_source(source)
    assert_rows(part.gather(np.array([2, 1])), columns, [0, 2])
    assert_rows(take(part, np.array([1])).gather(np.array([0])), columns, [2])
    # Pixels are read as they are stored.
    for name, column in columns.items():
        if name == "image":
            continue
        np.testing.assert_array_equal(read_column(source, name), column)
        np.testing.assert_array_equal(read_column(part, name), column[[5, 2, 0]])
    with pytest.raises(ValueError, match="no column 'target'"):
        read_column(source, "target")
    with pytest.raises(ValueError, match="source has no column 'target'"):
        check_source(source, "target")


@every_source
def test_the_fingerprint_names_the_records_in_their_order(tmp_path, make):
    (tmp_path / "again").mkdir()
    source, _ = make(tmp_path)
    first = source.fingerprint
    source.gather(np.arange(N))
    assert source.fingerprint == first == make(tmp_path / "again")[0].fingerprint
    parts = [take(source, np.array(rows)) for rows in ([0, 1], [1, 0], [0, 1, 2])]
    assert len({first, *(part.fingerprint for part in parts)}) == 4
    if not isinstance(source, Examples):
        return
    assert len(first) == 64 and source.take(np.arange(N)).fingerprint == first
    if not source.declared:
        assert make(tmp_path / "again", is_edited=True)[0].fingerprint != first


@every_source_of_this_library
def test_examples_are_indexed_taken_loaded_and_split(tmp_path, make):
    source, columns = make(tmp_path)
    one, loaded = source[3], source.take([5, 3]).load()
    for name, column in columns.items():
        np.testing.assert_array_equal(one[name], column[3])
    assert len(list(source)) == N and len(source.take([])) == 0
    assert_rows(loaded.gather([0, 1]), columns, [5, 3])
    assert loaded.fingerprint == source.take([5, 3]).load().fingerprint
    halves = source.split([0.5, 0.5], seed=1)
    assert sorted(np.concatenate([half.positions for half in halves])) == list(range(N))
    for index in (-1, N, np.array([0, N]), np.array([-1])):
        with pytest.raises(IndexError, match=r"indices must be in \[0, 6\) for source '"):
            source[index]
    for index in (0.5, np.ones(N, bool), np.zeros((2, 2), int)):
        with pytest.raises(TypeError, match="indices must be"):
            source[index]


@every_source_of_this_library
def test_owners_are_told_apart_by_their_texts(tmp_path, make):
    source, columns = make(tmp_path)
    if "patient" not in source.text_names:
        assert make is of_texts
        return
    people = by_group(source, "patient", max_records=2)
    assert people.rows.tolist() == [[0, 2], [1, -1], [3, -1], [4, -1], [5, -1]]
    batch = people.gather(np.array([0, 1]))
    assert_rows(jax.tree.map(lambda x: x[0], batch.records), columns, [0, 2])
    assert batch.present.tolist() == [[True, True], [True, False]]
    shared = by_owners(source, "patient", max_records=1)
    assert shared.owners == 4 and max(shared.records_of) == 1
    cells = [cell.strip() for cell in read_column(source, "patient")]
    assert cells == [patient.strip() for patient in PATIENTS]
    people = by_group(source.load(), "patient", max_records=2)
    assert people.rows[0].tolist() == [0, 2]


# --- Files of NumPy -----------------------------------------------------------------------------


def test_npz(tmp_path):
    np.savez(tmp_path / "reviews.npz", ids=TOKENS, y=LABEL)
    source = from_npz(
        tmp_path / "reviews.npz", columns={"tokens": "ids", "label": "y"}, num_classes=2
    )
    assert (source.name, source.num_classes) == ("reviews", 2)
    np.testing.assert_array_equal(source.gather([3])["tokens"], TOKENS[[3]])
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


@pytest.mark.parametrize("outside", [-0.02, 1.02])
def test_what_prepare_makes_never_wraps_around(folder, outside):
    def prepare(images):
        pixels = np.stack([i[:2, :2, :1] for i in images]) / 255
        pixels[:, 0, 0] = outside
        return pixels

    overshoots = from_folder(folder, classes=("well", "ill"), prepare=prepare)
    with pytest.raises(ValueError, match=r"prepare must return floats in \[0, 1\], but some are"):
        overshoots.gather([0])

    loses_one = from_folder(
        folder, classes=("well", "ill"), prepare=lambda images: np.zeros((1, 2, 2, 1))
    )
    with pytest.raises(ValueError, match=r"one image of the shape \(2, 2, 1\) for each of 2, got"):
        loses_one.gather([0, 1])


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


DIFFERS = "record 1 differs from record 0 in the shape or dtype of"
NO_RECORDS = r"records must have len\(\) and records\[i\], but list_iterator has not"
OF_TEXT = "column 'text' has the dtype <U6. Encode it as numbers in prepare="


@pytest.mark.parametrize(
    ("records", "error", "message"),
    [
        ([{"x": [1, 2]}, {"x": [1, 2, 3]}], ValueError, f"{DIFFERS} x"),
        ([{"x": 1}, {"x": 1.5}], ValueError, f"{DIFFERS} x"),
        ([{"x": 1}, {"x": 1, "y": 2}], ValueError, f"{DIFFERS} y"),
        ([{"x": [[1], [1, 2]]}], ValueError, "record 0 has a list of several lengths"),
        ([{"text": "secret"}], TypeError, OF_TEXT),
        ([{"x": None}], TypeError, "column 'x' has the dtype object"),
        (iter([1]), TypeError, NO_RECORDS),
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


def test_a_dataset_may_fill_the_same_array_for_every_record():
    """A batch would have one record in all its rows, which would count as often in a sum."""
    images = np.arange(12, dtype=np.float32).reshape(4, 3)

    class Reusing:
        def __init__(self):
            self.place = np.zeros(3, np.float32)

        def __len__(self):
            return len(images)

        def __getitem__(self, row):
            self.place[:] = images[row]
            return {"x": self.place, "label": row}

    source = from_torch(Reusing(), num_classes=4)
    for _ in range(2):  # before and after the fingerprint
        np.testing.assert_array_equal(source.gather([2, 0, 3])["x"], images[[2, 0, 3]])
        assert len(source.fingerprint) == 64
