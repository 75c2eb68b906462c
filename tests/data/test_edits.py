"""Records that are edited in place: a release that is repeated either reads the same bits, or does
not happen.

The suite has a row for each kind of source, and each view of it. `replayed` releases the sum of all
records twice under one secret, with an edit of record 0 in between. Equal tokens mean equal noise,
so the values must then be equal too."""

import functools

import jax
import numpy as np
import optax
import PIL.Image
import pytest

from jaxdp import data, finetune, losses, prediction, pretrain, tta
from jaxdp.data import storage
from jaxdp.privacy import Ledger
from jaxdp.recalibration import Party
from jaxdp.release import Release, Till, stream
from jaxdp.split import noisy_upload
from tests.data import adapters

N = 6
SEED = bytes(16)


def values(first=None):
    """Returns records, the first of them edited if `first` is given."""
    x = np.linspace(0, 1, 4 * N, dtype=np.float32).reshape(N, 4)
    if first is not None:
        x[0] = first
    return x


def aligned(array):
    """Returns a copy whose memory JAX can share on a CPU."""
    memory = np.zeros(64 + array.nbytes, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


# --- Sources, each with a function that edits record 0 ------------------------------------------


def in_memory(tmp_path):
    x = values()
    return data.from_arrays(x=x), functools.partial(x.__setitem__, 0, 9.0)


def features(tmp_path):
    x = values()
    return data.from_arrays(features=x), functools.partial(x.__setitem__, 0, 9.0)


def pixels(tmp_path):
    x = np.zeros((N, 2, 2, 1), np.uint8)
    return data.from_arrays(image=x), functools.partial(x.__setitem__, 0, 200)


def tokens(tmp_path):
    x = np.arange(4 * N).reshape(N, 4)
    return data.from_arrays(tokens=x), functools.partial(x.__setitem__, 0, 77)


def read_only_view(tmp_path):
    x = values()
    view = x[:]
    view.flags.writeable = False
    return data.from_arrays(x=view), functools.partial(x.__setitem__, 0, 9.0)


def unlocked(tmp_path):
    """An array that was read-only when it was given, and is made writable again."""
    x = values()
    x.flags.writeable = False
    source = data.from_arrays(x=x)

    def edit():
        x.flags.writeable = True
        x[0] = 9.0

    return source, edit


def nested(tmp_path):
    x = values()
    return data.Examples({"a": {"b": (x, np.arange(N))}}), functools.partial(x.__setitem__, 0, 9.0)


def a_list_of_arrays(tmp_path):
    x = [values(), values()]
    return data.Examples(x), functools.partial(x.__setitem__, 0, values(9.0))


def a_dict_inside(tmp_path):
    source = data.Examples({"a": {"b": values()}})
    return source, lambda: source.arrays["a"].update(b=values(9.0))


def mapped(tmp_path, **options):
    columns = adapters.mapped_columns(tmp_path, {"x": values()})
    writer = np.load(tmp_path / "x.npy", mmap_mode="r+")

    def edit():
        writer[0] = 9.0
        writer.flush()

    return data.Examples(columns, **options), edit


def declared(tmp_path):
    return mapped(tmp_path, declared="version 1")


def folder(tmp_path):
    rows = "".join(f"{k}.png,{k}\n" for k in range(N))
    (tmp_path / "labels.csv").write_text(f"path,age\n{rows}")
    for k in range(N):
        PIL.Image.fromarray(np.full((2, 2), 10 * k, np.uint8)).save(tmp_path / f"{k}.png")
    white = PIL.Image.fromarray(np.full((2, 2), 255, np.uint8))
    return data.from_folder(tmp_path), lambda: white.save(tmp_path / "0.png")


def npz(tmp_path):
    source = adapters.npz(tmp_path, {"x": values()})
    return source, lambda: adapters.npz(tmp_path, {"x": values(9.0)})


def table(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + N * "1,2\n")
    return data.from_csv(path), lambda: path.write_text("a,b\n9,9\n" + (N - 1) * "1,2\n")


def of_columns(adapter):
    """Returns a function that makes a source which reads an array of the caller."""

    def make(tmp_path):
        x = values()
        return adapter(tmp_path, {"x": x}), functools.partial(x.__setitem__, 0, 9.0)

    make.__name__ = adapter.__name__  # the name of its tests
    return make


records, torch, column = map(
    of_columns, (adapters.records, adapters.torch, adapters.columns_of_a_library)
)
IN_MEMORY = (
    in_memory,
    features,
    pixels,
    tokens,
    read_only_view,
    unlocked,
    nested,
    a_list_of_arrays,
    a_dict_inside,
    npz,
    table,
)
ON_DEMAND = (mapped, declared, folder, records, torch, column)
OWNERS = ["a", "b", "a", "c", "b", "d"]
VIEWS = {
    "all": lambda source: source,
    "take": lambda source: source.take(np.array([3, 0, 0])),
    "split": lambda source: source.split([1.0], seed=0)[0],
    "groups": lambda source: data.by_group(source, OWNERS, max_records=2),
    "part": lambda source: data.take(
        data.by_group(source, OWNERS, max_records=2), np.array([0, 2])
    ),
}


def released(till, source):
    """Returns the token of a noisy sum of all records, and its value."""

    def compute(secret):
        batch = source.gather(np.arange(len(source)))
        noise = jax.random.normal(stream(secret, "noise"))
        return sum(np.asarray(leaf, np.float64).sum() for leaf in jax.tree.leaves(batch)) + float(
            noise
        )

    what = Release(label="sum", charges=[], facts=lambda: [source.fingerprint], compute=compute)
    return till.token(what), till.release(what)


def replayed(source, edit):
    """Releases, edits and releases again. Returns what happened to the second: "same", "refused" or
    "leak"."""
    with Till(seed=SEED) as till:
        token, value = released(till, source)
        edit()
        try:
            again, other = released(till, source)
        except ValueError as error:
            assert "record 0 of" in str(error) and "Make the source again" in str(error)
            return "refused"
    return "same" if value == other or token != again else "leak"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("make", IN_MEMORY + ON_DEMAND)
def test_a_release_is_not_repeated_on_edited_records(tmp_path, make, view):
    source, edit = make(tmp_path)
    assert replayed(VIEWS[view](source), edit) == ("same" if make in IN_MEMORY else "refused")


AGAIN = {
    mapped: lambda source, path: data.Examples({"x": np.load(path / "x.npy", mmap_mode="r")}),
    folder: lambda source, path: data.from_folder(path),
    records: lambda source, path: data.from_grain(source.arrays.records),
    torch: lambda source, path: data.from_torch(
        source.arrays.records, prepare=source.arrays.prepare
    ),
    column: lambda source, path: data.Examples({"x": source.arrays["x"].column}),
}


@pytest.mark.parametrize("make", AGAIN)
def test_a_source_that_is_made_again_has_another_fingerprint(tmp_path, make):
    source, edit = make(tmp_path)
    first = source.fingerprint
    edit()
    again = AGAIN[make](source, tmp_path)
    assert again.fingerprint != first
    assert replayed(again, lambda: None) == "same"


def test_records_may_change_until_a_fingerprint_names_them(tmp_path):
    """Without a fingerprint no release can be repeated, so nothing is remembered."""
    source, edit = mapped(tmp_path)
    source.gather(np.arange(N))
    edit()
    assert source.gather(np.array([0]))["x"].max() == 9.0


@pytest.mark.parametrize(
    ("make", "part"), [(in_memory, "immutable"), (mapped, "compare"), (records, "compare")]
)
def test_the_suite_finds_a_fingerprint_that_is_only_kept(tmp_path, monkeypatch, make, part):
    """Broken twins: the arrays of the caller are shared, and rows are not compared, under a cached
    fingerprint."""
    if part == "immutable":
        monkeypatch.setattr(storage, "immutable", lambda array: array)
    else:
        monkeypatch.setattr(storage.Seen, "compare", lambda *arguments: None)
    source, edit = make(tmp_path)
    assert replayed(source, edit) == "leak"


def test_the_columns_of_a_source_cannot_be_written():
    source = data.from_arrays(x=values(), tokens=np.arange(N))
    with pytest.raises(ValueError, match="WRITEABLE"):
        source.arrays["x"].flags.writeable = True
    with pytest.raises(TypeError, match="does not support item assignment"):
        source.arrays["x"] = values()
    rows = np.array([1, 2])
    part, whole = source.take(rows), data.take(data.by_group(source, OWNERS, max_records=1), rows)
    prints = part.fingerprint, whole.fingerprint
    rows[0] = 3
    assert (part.gather([0])["tokens"], whole.gather(np.array([0])).records["tokens"].item()) == (
        [1],
        1,
    )
    assert (part.fingerprint, whole.fingerprint) == prints


class Crash(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_is_repeated_does_not_train_on_edited_records(tmp_path):
    """A run fails, a record is repaired in the notebook, and the run is started again in the same
    process."""

    def loss(params, example):
        return (params @ example["x"] - 1.0) ** 2

    sampler = data.PoissonSampler(N, 1.0)
    options = {
        "sampler": sampler,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "physical_batch_size": N,
    }
    trainer = finetune.dp_sgd(loss, optax.sgd(0.1), engine="vmap", **options)

    def fit(source, workdir, evaluate=None):
        ledger = Ledger.in_memory()
        ledger.register("own", adjacency="add_remove", unit="example", delta=1e-5)
        how = {
            "steps": 2,
            "seed": SEED,
            "workdir": workdir,
            "progress": False,
            "evaluate": evaluate,
        }
        return np.asarray(
            finetune.fit(
                trainer, np.zeros(4, np.float32), source, account=ledger.account("own"), **how
            )[1]
        )

    def crash(params):
        raise Crash

    expected = fit(data.from_arrays(x=values()), tmp_path / "whole")
    for make in (in_memory, mapped):
        source, edit = make(tmp_path)
        with pytest.raises(Crash):
            fit(source, tmp_path / make.__name__, crash)
        edit()
        if make is in_memory:
            np.testing.assert_array_equal(fit(source, tmp_path / make.__name__), expected)
        else:
            with pytest.raises(ValueError, match="record 0 of x of source 'records' has changed"):
                fit(source, tmp_path / make.__name__)


# --- What other releases read -------------------------------------------------------------------


def test_a_token_is_of_the_facts_as_they_are():
    """Broken twin: the digest of a release was kept, and named what an array had been."""
    x = values()
    what = Release(label="sum", charges=[], facts=lambda: [x], compute=lambda secret: None)
    with Till(seed=SEED) as till:
        token = till.token(what)
        assert till.token(what) == token
        x[0] = 9.0
        assert till.token(what) != token


def test_parameters_of_a_user_are_copied_to_the_device():
    """Broken twin: `jnp.asarray` shares an aligned array on a CPU, and an edit reached the state of
    a run."""
    x = aligned(np.zeros(1024, np.float32))
    options = {"sampler": data.PoissonSampler(N, 1.0), "clip_norm": 1.0, "noise_multiplier": 1.0}
    trainer = finetune.dp_sgd(lambda p, example: p["w"].sum(), optax.sgd(0.1), **options)
    robust = pretrain.dpadapter(
        lambda p, batch: p["w"].sum(), optax.sgd(0.1), gamma=2.0, ascent_rate=1.0
    )
    states = [trainer.init({"w": x}), robust.init({"w": x}), storage.on_device(x)]
    x[:] = 9.0
    assert all(
        np.max(leaf) < 9.0
        for leaf in jax.tree.leaves([states[0].params, states[1].params, states[2]])
    )


def test_a_batch_of_pretraining_may_be_overwritten_while_its_step_runs():
    """Broken twin: `jax.device_put` shared the batch, and a later microbatch read the next one."""
    x = aligned(np.ones(1024, np.float32))

    def overwrite():
        x[:] = 9.0
        return np.zeros((), np.float32)

    def loss(params, batch):
        zero = jax.pure_callback(overwrite, jax.ShapeDtypeStruct((), np.float32))
        return params["w"] * batch["x"].mean() + zero

    trainer = pretrain.dpadapter(
        loss, optax.sgd(0.1), gamma=0.0, ascent_rate=1.0, microbatch_size=512
    )
    _, metrics = trainer.step(trainer.init({"w": np.float32(1.0)}), None, {"x": x})
    assert x[0] == 9.0 and metrics["loss"] == 1.0


def test_probe_images_and_frozen_parameters_are_copied():
    """Broken twin: the bounds of a box held the caller's own frozen array."""
    probe = aligned(np.ones((64, 4), np.float32))
    params = {"w": aligned(np.eye(4, dtype=np.float32)), "bias": aligned(np.zeros(4, np.float32))}

    def logits(params, x):
        return x @ params["w"] + params["bias"][None]

    monitor = tta.CollapseMonitor(logits, params, probe)
    before = monitor(params)
    examples = {"x": values(), "label": np.arange(N) % 4}
    bounds = prediction.train_with_bounds(
        lambda p, example: losses.softmax_cross_entropy(
            logits(p, example["x"][None])[0], example["label"]
        ),
        params,
        examples,
        ks=1,
        epochs=1,
        batch_size=N,
        learning_rate=0.1,
        clip=1.0,
        trainable=lambda path, leaf: path == "bias",
    )
    kept = params["w"].copy()
    probe[:, 0] = 9.0
    assert monitor(params) == before
    params["w"][:] = 9.0
    assert monitor({**params, "w": kept}) == before
    np.testing.assert_array_equal(bounds.params["w"], kept)
    np.testing.assert_array_equal(bounds.upper["w"], np.stack([kept, kept]))


def test_a_party_answers_about_the_records_it_was_given(tmp_path):
    logits, labels, group = values(), np.arange(N) % 4, np.arange(N)
    party = Party(logits, labels, group=group)
    kept = [party.logits.copy(), party.labels.copy(), party.group.copy()]
    for array in (logits, labels, group):
        array[:] = 1
    for array, expected in zip((party.logits, party.labels, party.group), kept, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert not array.flags.writeable


@pytest.mark.slow
def test_a_planned_upload_is_of_the_images_it_was_given():
    """A plan may be released long after it was made, and again after a failure.

    Broken twin: `jax.device_put(x, may_alias=False)` shares an aligned array on a CPU."""
    ledger = Ledger.in_memory()
    ledger.register("clinic", adjacency="replace_one", unit="image")
    x, labels = aligned(values().reshape(N, 2, 2)), np.arange(N) % 2
    settings = noisy_upload.PrivateRelease(
        clip_norm=1.0, noise_multiplier=1.0, label_epsilon=1.0, num_classes=2
    )
    projection = noisy_upload.Projection(
        aligned(np.zeros((2, 2), np.float32)), np.eye(4, 2, dtype=np.float32)
    )
    plan = functools.partial(noisy_upload.plan_release, ledger.account("clinic"), release=settings)
    what = plan(representations=x, labels=labels, projection=projection)
    with Till(seed=SEED) as till:
        token, first = till.token(what), till.release(what)
        x[0], labels[0], projection.mean[:] = 9.0, 1, 5.0
        assert till.token(what) == token
        second = till.release(what)
    np.testing.assert_array_equal(first["features"], second["features"])
    np.testing.assert_array_equal(first["labels"], second["labels"])
