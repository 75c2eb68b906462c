"""What launch.split compares with Split Adaptation beside its baselines: another model's backend,
emulators of random layers, and amplitude exchange."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdp.models import ViT
from jaxdp.split import baselines
from launch import frame, split, split_augmentations, split_runs
from launch.split_augmentations import AUGMENTATIONS, Augmentation
from tests.launch import tiny
from tests.models import test_dinov2


def bench(root, **changes):
    return split_runs.Bench(tiny.split(**changes), root)


# --- Offsite tuning -----------------------------------------------------------------------------


def emulator(whole, params, seed, method=split_runs.OT_RANDOM):
    """Returns the blocks that a client trains with. Nothing is computed."""
    client = split_runs.Client(whole.client, {}, seed)
    baseline = whole._baseline(method, client)
    recipes = []

    def begin(params):
        recipe, _ = baseline(whole.backbone, params, num_classes=3, key=jax.random.key(0))
        recipes.append(recipe)

    jax.eval_shape(begin, params)
    last = recipes[0].training[-1].backbone.model.num_blocks
    return [k for piece in recipes[0].training for k in range(last)[piece.start : piece.stop]]


@pytest.mark.slow
def test_random_emulators_have_public_seeds(tmp_path):
    whole = bench(tmp_path, model__options__depth=8, auxiliary__model__options__depth=8)
    key, images = jax.random.key(0), jnp.zeros((1, 8, 8, 1))
    params = jax.eval_shape(whole.backbone.model.init, key, images)["params"]
    by_seed = [emulator(whole, params, seed) for seed in (2, 3, 4)]
    assert len({tuple(blocks) for blocks in by_seed}) > 1
    assert all(blocks[:2] == [0, 1] and blocks[-2:] == [6, 7] for blocks in by_seed)
    assert {len(blocks) for blocks in by_seed} == {6}
    whole.config.baselines.drop_seed = 1
    assert [emulator(whole, params, seed) for seed in (2, 3)] == by_seed[1:]
    # The even form has one emulator for all.
    assert emulator(whole, params, 0, "Offsite tuning") == [0, 1, 2, 5, 6, 7]


# --- Another model's backend --------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """A config whose second public model is a DINOv2 without a head, given by its path."""
    path = tmp_path_factory.mktemp("second") / "model.safetensors"
    save_file(test_dinov2.tensors("", head=False), path)
    config = tiny.split(stolen=("Quantised frontend", split_runs.AUXILIARY), train__steps=1)
    preprocessing = {"size": 6, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    options = {**test_dinov2.SIZES, "mlp_width": test_dinov2.HIDDEN}
    config.auxiliary.model = {
        **{"name": "dinov2_s14", "num_classes": 7, "options": options, "checkpoint": str(path)},
        **{"naming": "auto", "preprocessing": preprocessing},
    }
    return config


@pytest.mark.slow
def test_the_last_third_of_a_public_model_is_behind_the_frontend(second, tmp_path, monkeypatch):
    whole = split_runs.Bench(second, tmp_path)
    client = split.client_of(whole.client, 3, 1, rate=1e-2)
    whole.server = lambda variant: whole._server("untuned")
    results = []

    def adapt(*args, **options):
        results.append(adapt_baseline(*args, **options))
        return results[0]

    adapt_baseline = baselines.adapt
    monkeypatch.setattr(baselines, "adapt", adapt)
    assert 0 <= whole.accuracy(split_runs.AUXILIARY, client)["accuracy"] <= 1
    # Two of three blocks are before the cut. The file's block 2 is used, and not trained.
    params = results[0].params
    assert {name for name in params if name.startswith("block")} == {"block_2"}
    file = test_dinov2.tensors("", head=False)["encoder.layer.2.layer_scale1.lambda1"]
    np.testing.assert_array_equal(params["block_2"]["layer_scale_0"], file)
    assert results[0].recipe.trained == {"head/kernel", "head/bias"}


def test_a_missing_second_model_is_noticed_at_the_beginning(second, tmp_path):
    config = second.copy_and_resolve_references()
    config.auxiliary.model.checkpoint = str(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        split_runs.Bench(config, tmp_path)
    config.stolen = ("Quantised frontend",)
    split_runs.Bench(config, tmp_path)


def test_the_second_model_may_have_images_of_its_own(tmp_path):
    auxiliary = {"data__auxiliary__name": "digits", "data__auxiliary__classes": (0, 1)}
    own, shared = bench(tmp_path, **auxiliary), bench(tmp_path)
    assert own._auxiliary_images.num_classes == 2
    assert shared._auxiliary_images is shared._pretraining
    with pytest.raises(ValueError, match=r"config\.auxiliary\.model\.checkpoint must be given"):
        split_runs._second_network(tiny.split(), None)


# --- Amplitude exchange -------------------------------------------------------------------------


def test_amplitude_exchange_takes_the_place_of_hilbert_augmentation(tmp_path, monkeypatch):
    calls = []

    def calibrate(key, backbone, params, images, labels, **options):
        calls.append(images)
        return ("frontend",)

    whole = bench(tmp_path)
    monkeypatch.setattr(split_runs.split, "calibrate_frontends", calibrate)
    monkeypatch.setattr(split_runs.split, "tune_backend", lambda *args, **options: None)
    monkeypatch.setattr(split_runs.Bench, "params", None)
    for variant in ("full", "amplitude", "without Hilbert"):
        whole.server(variant)
    hilbert, exchanged, originals = calls
    count = len(originals)
    assert len(hilbert) == len(exchanged) == 2 * count
    for images in (hilbert, exchanged):
        np.testing.assert_array_equal(images[:count], originals)
    assert np.abs(exchanged[count:] - hilbert[count:]).max() > 0.1


MODEL = ViT(num_classes=5, patch_size=4, width=4, depth=2, num_heads=1, mlp_width=4)


@pytest.mark.slow
def test_augmentations_are_scored_against_the_originals(tmp_path):
    whole = bench(tmp_path)
    params = jax.jit(MODEL.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]
    backbone = split_runs.split.Backbone(MODEL, whole.backbone.preprocessing, 1)
    public = {name: array[:40] for name, array in whole.public.items()}
    images = public["image"]
    score = functools.partial(split_augmentations.scores, backbone, params, public)
    same = score(images)
    assert same["distance"] == 0 and same["ssim"] == pytest.approx(1)
    logits = jax.jit(MODEL.apply)({"params": params}, (images - 0.3) / 0.4)
    right = np.argmax(logits, axis=1) == public["label"]
    assert same["accuracy"] == pytest.approx(right.mean())
    # Another image in the place of the original is further away, and has another label.
    moved = score(images[::-1])
    expected = np.sqrt(np.mean((images - images[::-1]) ** 2, axis=(1, 2, 3))).mean()
    assert moved["distance"] == pytest.approx(expected, rel=1e-5) and moved["ssim"] < 0.9

    work = types.SimpleNamespace(
        shared=types.SimpleNamespace(public=public, backbone=backbone, params=params),
        config=tiny.split(),
        root=tmp_path,
        folder=lambda cell: frame_folder(tmp_path, cell),
    )
    rows = []
    for cell in split_augmentations.cells(augmentations_of(*AUGMENTATIONS)):
        rows.append({**cell._asdict(), **split_augmentations.run(cell, work)})
    assert [row["name"] for row in rows] == list(AUGMENTATIONS)
    assert all(row["distance"] > 0.05 for row in rows[1:])
    assert split_augmentations.table(rows)[0]["SSIM to the original"] == "1"
    split_augmentations.draw(rows, work)
    assert (tmp_path / "augmentations.png").stat().st_size > 10_000


def frame_folder(root, cell):
    folder = root / frame.file_name(cell.name)
    folder.mkdir(exist_ok=True)
    return folder


def augmentations_of(*names):
    return tiny.split(augmentations=names)


def test_the_study_has_a_cell_for_each_augmentation():
    cells = list(split.STUDY.cells(augmentations_of(*AUGMENTATIONS)))
    assert [c.name for c in cells if isinstance(c, Augmentation)] == list(AUGMENTATIONS)
