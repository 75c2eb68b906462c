"""Public checkpoints against the libraries that publish them: stored logits here, live ones in
`make parity`."""

import functools
import importlib.util
import itertools
import json
import os
import shutil
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from jaxdp import models
from jaxdp.models import Preprocessing, load_checkpoint, namings
from jaxdp.models.namings import NAMINGS
from jaxdp.models.preprocessing import from_hugging_face, from_timm
from tests.models import test_public_convnets

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location(
    "make_checkpoints", ROOT / "golden" / "make_checkpoints.py"
)
make_checkpoints = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_checkpoints)

VIT = {"patch_size": 4, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
CONVNEXT = {"widths": make_checkpoints.WIDTHS, "depths": make_checkpoints.DEPTHS}
SWIN = {"patch_size": 2, "window": 4, "width": 4, "mlp_ratio": 2} | {
    "depths": make_checkpoints.SWIN_DEPTHS,
    "num_heads": make_checkpoints.SWIN_HEADS,
}
# Case: (naming, model of ours, its attributes). The epsilons are those of the libraries.
CASES = {
    "hf_vit": ("hf_vit", "vit_ti16", VIT | {"norm_epsilon": 1e-12}),
    "hf_deit": (
        "hf_deit",
        "deit_ti16_distilled",
        VIT | {"norm_epsilon": 1e-12, "distilled_head": False},
    ),
    "hf_deit_teacher": ("hf_deit_teacher", "deit_ti16_distilled", VIT | {"norm_epsilon": 1e-12}),
    "hf_convnext": ("hf_convnext", "convnext_tiny", CONVNEXT),
    "hf_swin": ("hf_swin", "swin_tiny", SWIN),
    "timm_vit": ("timm_vit", "deit_ti16", VIT),
    "timm_vit_distilled": ("timm_vit", "deit_ti16_distilled", VIT),
    "timm_convnext": ("timm_convnext", "convnext_tiny", CONVNEXT),
    "timm_swin": ("timm_swin", "swin_tiny", SWIN),
    "augreg": ("augreg", "vit_ti16", VIT),
    "torch_encoder": (
        "torch_encoder",
        "vit_ti16",
        VIT | {"norm_order": "post", "norm_epsilon": 1e-5, "activation": nn.relu},
    ),
}
FILES = {path.stem: path for path in make_checkpoints.FOLDER.iterdir() if path.stem != "logits"}
LOGITS = dict(np.load(make_checkpoints.FOLDER / "logits.npz"))


@pytest.fixture(autouse=True)
def full_precision():
    """On accelerators a matrix product of float32 is rounded to fewer bits unless asked
    otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


def kind_of(case):
    return next((kind for kind in ("convnext", "swin") if kind in case), "vit")


def size_of(case):
    return make_checkpoints.SIZES[kind_of(case)]


def normalised_by(value, case):
    return Preprocessing(size=size_of(case), mean=(value,) * 3, std=(value,) * 3)


def build(case, **attributes):
    _, name, known = CASES[case]
    return models.create(name, num_classes=3, **{**known, **attributes})


def load(case, path=None, **kwargs):
    kwargs = {"model": build(case), "preprocessing": normalised_by(0.5, case)} | kwargs
    return load_checkpoint(path or FILES[case], **kwargs)


def images_of(case):
    """The images of the golden files, taken back to before a normalisation by 0.5 and 0.5."""
    return make_checkpoints.images(kind_of(case)) * np.float32(0.5) + np.float32(0.5)


def changed(case, folder, change):
    """A copy of a golden checkpoint whose dict of tensors went through `change`."""
    path = folder / FILES[case].name
    npz = path.suffix == ".npz"
    tensors = dict(np.load(FILES[case])) if npz else load_file(FILES[case])
    change(tensors)
    np.savez(path, **tensors) if npz else save_file(tensors, path)
    return path


def test_the_cases_cover_every_naming():
    # tested in test_language.py and in test_dinov2.py
    others = {"gpt2", "hf_gpt2", "hf_llama", "hf_dinov2", "hf_dinov2_backbone"}
    others |= {naming for naming, *_ in test_public_convnets.CASES.values()}
    assert {naming for naming, _, _ in CASES.values()} == set(NAMINGS) - others
    assert set(CASES) == set(FILES) == set(LOGITS) == set(make_checkpoints.BUILDERS)


@functools.cache
def compiled(case):
    pretrained = load(case)
    return pretrained, jax.jit(pretrained.apply_fn)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_publishing_library(case):
    pretrained, apply = compiled(case)
    logits, expected = apply(pretrained.params, images_of(case)), LOGITS[case]
    assert logits.dtype == jnp.float32
    assert expected.std() > 0.1
    assert np.abs(logits - expected).max() <= 1e-4
    jax.tree.map(
        np.testing.assert_array_equal, load(case, naming=CASES[case][0]).params, pretrained.params
    )


@pytest.mark.slow
def test_attributes_of_a_model_may_be_lists():
    lists = build("hf_convnext", **{name: list(values) for name, values in CONVNEXT.items()})
    with pytest.raises(TypeError, match="unhashable"):
        hash(lists)
    found = load("hf_convnext", model=lists).params
    jax.tree.map(np.testing.assert_array_equal, found, load("hf_convnext").params)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_two_tensors_could_be_exchanged_unnoticed(case):
    """The parity above can fail: any two parameters of one shape, exchanged, move the logits well
    over its bound."""
    pretrained, apply = compiled(case)
    images, flat = images_of(case), flatten_dict(pretrained.params, sep="/")
    for a, b in itertools.combinations(flat, 2):
        # Softmax does not see a shift that all keys share, and the mean of two heads adds their
        # biases.
        unseen = all(
            path.endswith("key/bias") or path in ("head/bias", "head_distilled/bias")
            for path in (a, b)
        )
        if flat[a].shape == flat[b].shape and not unseen:
            exchanged = unflatten_dict({**flat, a: flat[b], b: flat[a]}, sep="/")
            assert np.abs(apply(exchanged, images) - LOGITS[case]).max() > 2e-4, (a, b)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_missing_superfluous_or_misshapen_tensor_is_named(case, tmp_path):
    required = sorted(
        dict(np.load(FILES[case]))
        if case in ("augreg", "torch_encoder")
        else load_file(FILES[case])
    )
    gone, grown = required[0], required[-1]
    wrong = dict.fromkeys([grown, "surprise.weight", "surprise.bias"], np.zeros((7, 5), np.float32))

    def spoil(tensors):
        del tensors[gone]
        tensors.update(wrong)

    with pytest.raises(ValueError) as caught:
        load(case, changed(case, tmp_path, spoil), naming=CASES[case][0])
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert {
        "surprise.bias: superfluous, shape (7, 5)",
        "surprise.weight: superfluous, shape (7, 5)",
    } <= set(lines)
    assert any(line.startswith(f"{gone}: missing, for ") for line in lines)
    assert any(line.startswith(f"{grown}: shape (7, 5) does not fit ") for line in lines)
    assert {line.split(":")[0] for line in lines} == {gone, *wrong}


@pytest.mark.slow
def test_the_message_names_both_sides_of_a_mismatch():
    with pytest.raises(ValueError) as caught:
        load("timm_vit", model=build("timm_vit", depth=3, mlp_width=13))
    text = str(caught.value)
    assert (
        "blocks.0.mlp.fc1.weight: shape (12, 8) does not fit block_0/mlp_0/kernel (8, 13)" in text
    )
    assert "blocks.2.attn.qkv.weight: missing, for block_2/attention/key/kernel (8, 8)" in text
    with pytest.raises(ValueError, match=r"blocks\.1\.norm1\.bias: superfluous, shape \(8,\)"):
        load("timm_vit", model=build("timm_vit", depth=1))
    with pytest.raises(ValueError, match=r"dist_token: superfluous, shape \(1, 1, 8\)"):
        load("timm_vit_distilled", model=build("timm_vit"))
    with pytest.raises(ValueError, match="stem/kernel of the model: not in the naming 'timm_vit'"):
        load("timm_vit", model=build("timm_convnext"), preprocessing=normalised_by(0.5, "convnext"))
    with pytest.raises(
        ValueError,
        match=r"are not interpolated\):\n  pos_embed: shape \(1, 5, 8\) does not fit positions",
    ):
        load("timm_vit", preprocessing=Preprocessing(size=16, mean=(0.5,) * 3, std=(0.5,) * 3))


@pytest.mark.slow
def test_a_pooler_is_ignored_and_nothing_else(tmp_path):
    extra = {"vit.pooler.dense.weight": np.zeros((8, 8), np.float32)}
    path = changed("hf_vit", tmp_path, lambda tensors: tensors.update(extra))
    np.testing.assert_array_equal(
        load("hf_vit", path).params["norm"]["scale"], load("hf_vit").params["norm"]["scale"]
    )
    path = changed(
        "hf_vit",
        tmp_path,
        lambda tensors: tensors.update({"vit.pooler.weight": np.zeros(8, np.float32)}),
    )
    with pytest.raises(ValueError, match=r"vit\.pooler\.weight: superfluous"):
        load("hf_vit", path)


@pytest.mark.slow
def test_half_precision_becomes_float32_and_integers_are_refused(tmp_path):
    def halve(tensors):
        tensors.update({name: array.astype(jnp.bfloat16) for name, array in tensors.items()})

    params = load("timm_vit", changed("timm_vit", tmp_path, halve)).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(
        params["norm"]["scale"], load("timm_vit").params["norm"]["scale"], rtol=2**-8
    )
    path = changed(
        "timm_vit", tmp_path, lambda tensors: tensors.update(cls_token=np.zeros((1, 1, 8), np.int8))
    )
    with pytest.raises(ValueError, match="cls_token: dtype int8 is not floating point"):
        load("timm_vit", path)


def test_a_section_of_namings_has_no_unknown_key():
    section = {"signature": "a.weight", "names": {"head": "a"}}
    assert namings.naming_of(section).find("head/kernel").name == "a.weight"
    with pytest.raises(TypeError, match="conversion"):
        namings.naming_of({**section, "conversion": "torch"})


def test_files_and_namings_that_are_not_known(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        load("timm_vit", tmp_path / "missing.npz")
    (tmp_path / "model.bin").touch()
    with pytest.raises(
        ValueError, match=r"path must end in \.safetensors or \.npz, got 'model\.bin'"
    ):
        load("timm_vit", tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"unknown naming 'keras'\. There are auto, hf_vit"):
        load("timm_vit", naming="keras")
    save_file({"conv1.weight": np.zeros(1, np.float32)}, tmp_path / "resnet.safetensors")
    with pytest.raises(
        ValueError, match=r"has names such as conv1\.weight. Give a checkpoint in one of them"
    ):
        load("timm_vit", tmp_path / "resnet.safetensors")
    with pytest.raises(
        ValueError, match=r"vit\.embeddings\.cls_token: missing, for class_token \(1, 1, 8\)"
    ):
        load("timm_vit", naming="hf_vit")
    with pytest.raises(ValueError, match=r"cls: missing, for class_token \(1, 1, 8\)"):
        load("timm_vit", naming="augreg")
    with pytest.raises(ValueError, match="norm/mean of the model: not in the naming 'timm_vit'"):
        load("timm_vit", model=models.create("resnet20", num_classes=3, norm="frozen_batch"))


@pytest.mark.parametrize(
    ("case", "attributes", "message"),
    [
        ("augreg", {"num_heads": 4}, "num_heads=2, not 4"),
        ("augreg", {"norm_epsilon": 1e-5}, "norm_epsilon=1e-06, not 1e-05"),
        (
            "timm_vit",
            {"norm_order": "post", "norm_epsilon": 1e-5},
            "norm_order='pre', not 'post'; norm_epsilon=1e-06",
        ),
        ("hf_vit", {"norm_epsilon": 1e-6}, "norm_epsilon=1e-12, not 1e-06"),
        ("hf_vit", {"num_heads": 4}, "num_heads=2, not 4"),
    ],
)
def test_what_the_file_says_about_the_model_is_checked(case, attributes, message, tmp_path):
    path = Path(shutil.copy(FILES[case], tmp_path))
    if case == "hf_vit":
        (tmp_path / "config.json").write_text(
            json.dumps({"num_attention_heads": 2, "layer_norm_eps": 1e-12})
        )
    load(case, path)
    with pytest.raises(ValueError, match=f"the checkpoint needs a model with {message}"):
        load(case, path, model=build(case, **attributes))


def test_augreg_files_are_normalised_by_a_half_and_say_their_size():
    pretrained = load("augreg", preprocessing=None)
    assert pretrained.preprocessing == Preprocessing(
        size=8, mean=(0.5,) * 3, std=(0.5,) * 3, resize=8
    )
    with pytest.raises(
        ValueError, match=r"has mean=\(0\.485, .* but the checkpoint was trained with mean=\(0\.5, "
    ):
        load(
            "augreg",
            preprocessing=Preprocessing(size=8, mean=models.IMAGENET_MEAN, std=models.IMAGENET_STD),
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "augreg"])
def test_a_file_that_does_not_say_its_normalisation_needs_it(case):
    with pytest.raises(
        ValueError,
        match=r"(?s)preprocessing must be given.*0\.5, 0\.5, 0\.5.*0\.485, 0\.456, 0\.406",
    ):
        load(case, preprocessing=None)


IMAGENET = {"mean": models.IMAGENET_MEAN, "std": models.IMAGENET_STD}
HUGGING_FACE_IMAGENET = {
    "image_mean": list(models.IMAGENET_MEAN),
    "image_std": list(models.IMAGENET_STD),
}
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.mark.parametrize(
    ("file", "config", "expected"),
    [
        (  # google/vit-base-patch16-224
            "preprocessor_config.json",
            {
                "image_processor_type": "ViTImageProcessor",
                "size": {"height": 8, "width": 8},
                "resample": 2,
            }
            | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
            Preprocessing(size=8, **HALF, resize=(8, 8), interpolation="bilinear"),
        ),
        (  # facebook/deit-*
            "preprocessor_config.json",
            {
                "feature_extractor_type": "DeiTFeatureExtractor",
                "do_center_crop": True,
                "crop_size": 8,
                "size": 9,
            }
            | {"resample": 3, **HUGGING_FACE_IMAGENET},
            Preprocessing(size=8, **IMAGENET, resize=(9, 9)),
        ),
        (  # facebook/convnext-*-224
            "preprocessor_config.json",
            {
                "feature_extractor_type": "ConvNextFeatureExtractor",
                "crop_pct": 0.875,
                "size": {"shortest_edge": 8},
            }
            | HUGGING_FACE_IMAGENET,
            Preprocessing(size=8, **IMAGENET, resize=9),
        ),
        (  # timm/*
            "config.json",
            {"architecture": "vit", "pretrained_cfg": {"input_size": [3, 8, 8], "crop_pct": 0.8}}
            | {"num_classes": 3},
            Preprocessing(size=8, **HALF, resize=10),
        ),
        (
            "config.json",
            {"pretrained_cfg": {"input_size": [3, 8, 8], "crop_pct": 1.0, "crop_mode": "squash"}},
            Preprocessing(size=8, **HALF, resize=(8, 8)),
        ),
    ],
)
def test_preprocessing_beside_the_file_is_read(file, config, expected, tmp_path):
    path = Path(shutil.copy(FILES["timm_vit"], tmp_path))
    if "pretrained_cfg" in config:
        config["pretrained_cfg"] |= {
            "mean": [0.5] * 3,
            "std": [0.5] * 3,
            "interpolation": "bicubic",
        }
    (tmp_path / file).write_text(json.dumps(config))
    assert load("timm_vit", path, preprocessing=None).preprocessing == expected
    with pytest.raises(ValueError, match=r"preprocessing has mean=\(0\.7, 0\.7, 0\.7\)"):
        load("timm_vit", path, preprocessing=normalised_by(0.7, "timm_vit"))


@pytest.mark.parametrize(
    ("file", "config", "message"),
    [
        (
            "config.json",
            {"pretrained_cfg": {"input_size": [3, 8, 8], "crop_pct": 1.0, "crop_mode": "border"}},
            "crop_mode must be 'center' or 'squash', got 'border'",
        ),
        ("config.json", {"pretrained_cfg": {"input_size": [3, 8, 8]}}, "'crop_pct'"),
        (
            "preprocessor_config.json",
            {"size": 8, "do_normalize": False},
            "do_normalize must be true, got False",
        ),
    ],
)
def test_preprocessing_that_cannot_be_read_must_be_given(file, config, message, tmp_path):
    path = Path(shutil.copy(FILES["timm_vit"], tmp_path))
    (tmp_path / file).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"preprocessing must be given, .*{message}"):
        load("timm_vit", path, preprocessing=None)
    assert load("timm_vit", path).preprocessing == normalised_by(0.5, "timm_vit")


def test_a_public_backbone_gets_a_new_head():
    pretrained = load("augreg")
    model = models.create("vit_ti16", num_classes=5, **VIT)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]
    fresh = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    merged = models.merge_pretrained(fresh, pretrained.params)
    np.testing.assert_array_equal(
        merged["block_1"]["mlp_0"]["kernel"], pretrained.params["block_1"]["mlp_0"]["kernel"]
    )
    assert merged["head"]["kernel"].shape == (8, 5)


# Live comparisons: `make parity` runs them and writes docs/results/parity.md
# ------------------------------------------

PUBLISHERS = {"hf": "transformers", "timm": "timm", "augreg": "timm", "torch": "torch"}


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_live_parity(case, tmp_path, record_property):
    """Logits of a network with random weights, loaded from the file that the publisher writes."""
    path, expected = make_checkpoints.write(case, tmp_path, seed=1234)
    pretrained = load(case, path)
    logits = pretrained.apply_fn(pretrained.params, images_of(case))
    difference = np.abs(logits - expected).max()
    record_property("compared with", PUBLISHERS[case.split("_")[0]])
    record_property("largest difference", f"{difference:.1e}")
    record_property("allowed", "1e-4")
    assert difference <= 1e-4
    assert np.abs(expected - LOGITS[case]).max() > 0.01


def public_model(name):
    """A full-size model of transformers or timm, without memory for its weights."""
    import timm
    import torch
    import transformers

    with torch.device("meta"):
        if name == "hf_vit":
            return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
        if name == "hf_convnext":
            return transformers.ConvNextForImageClassification(
                transformers.ConvNextConfig(num_labels=1000)
            )
        if name == "hf_swin":
            return transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=1000))
        return timm.create_model(name)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("hf_vit", "vit_b16"),
        ("hf_convnext", "convnext_tiny"),
        ("hf_swin", "swin_tiny"),
        ("vit_tiny_patch16_224", "vit_ti16"),
        ("vit_small_patch16_224", "vit_s16"),
        ("vit_base_patch16_224", "vit_b16"),
        ("vit_large_patch16_224", "vit_l16"),
        ("deit_base_patch16_224", "deit_b16"),
        ("deit_base_distilled_patch16_224", "deit_b16_distilled"),
        ("deit_tiny_distilled_patch16_224", "deit_ti16_distilled"),
        ("convnext_tiny", "convnext_tiny"),
        ("convnext_small", "convnext_small"),
        ("convnext_base", "convnext_base"),
        ("convnext_large", "convnext_large"),
        ("swin_tiny_patch4_window7_224", "swin_tiny"),
        ("swin_small_patch4_window7_224", "swin_small"),
        ("swin_base_patch4_window7_224", "swin_base"),
        ("swin_large_patch4_window7_224", "swin_large"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_full_size_models_have_the_public_shapes(theirs, ours, record_property):
    """Shapes of all parameters of a full-size network."""
    record_property("compared with", "transformers" if theirs.startswith("hf") else "timm")

    def shapes(parameters):
        """Sizes with the axes sorted; ours has query, key and value apart, theirs may have them
        stacked."""
        return sorted(
            tuple(sorted(part))
            for name, shape in parameters
            for part in ([(shape[0] // 3, *shape[1:])] * 3 if "qkv" in name else [shape])
        )

    public = [
        (name, tuple(parameter.shape))
        for name, parameter in public_model(theirs).named_parameters()
    ]
    model = models.create(ours, num_classes=1000)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))["params"]
    assert shapes(
        (path, leaf.shape) for path, leaf in flatten_dict(params, sep="/").items()
    ) == shapes(public)


def timm_transform(image, name):
    """(configuration, image as the model sees it) of a timm checkpoint."""
    import timm
    from PIL import Image

    config = timm.models.get_pretrained_cfg(name).to_dict()
    keys = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    transform = timm.data.create_transform(**{key: config[key] for key in keys})
    return config, transform(Image.fromarray(image)).numpy()


def hugging_face_transform(image, name, **settings):
    """The same with an image processor of transformers."""
    import transformers

    processor = getattr(transformers, name)(**settings)
    return processor.to_dict(), processor(image, return_tensors="np")["pixel_values"][0]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("read", "transform", "name", "settings"),
    [
        (from_timm, timm_transform, "vit_base_patch16_224", {}),
        (from_timm, timm_transform, "vit_base_patch16_384", {}),
        (from_timm, timm_transform, "deit_small_patch16_224", {}),
        (from_timm, timm_transform, "convnext_tiny.fb_in1k", {}),
        (from_timm, timm_transform, "swin_tiny_patch4_window7_224", {}),
        (from_hugging_face, hugging_face_transform, "ViTImageProcessor", {}),
        (
            from_hugging_face,
            hugging_face_transform,
            "ViTImageProcessor",
            {"resample": 3, **HUGGING_FACE_IMAGENET},
        ),
        (from_hugging_face, hugging_face_transform, "DeiTImageProcessor", HUGGING_FACE_IMAGENET),
        (
            from_hugging_face,
            hugging_face_transform,
            "ConvNextImageProcessor",
            {"size": {"shortest_edge": 224}},
        ),
        (
            from_hugging_face,
            hugging_face_transform,
            "ConvNextImageProcessor",
            {"size": {"shortest_edge": 384}},
        ),
    ],
    ids=[
        "vit_base_patch16_224",
        "vit_base_patch16_384",
        "deit_small_patch16_224",
        "convnext_tiny.fb_in1k",
        "swin_tiny_patch4_window7_224",
        "ViTImageProcessor",
        "ViTImageProcessor, bicubic",
        "DeiTImageProcessor",
        "ConvNextImageProcessor, 224",
        "ConvNextImageProcessor, 384",
    ],
)
@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_images_are_prepared_as_the_publisher_does(
    read, transform, name, settings, record_property
):
    """Pixels of a prepared image of 300x401, after normalisation."""
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((401, 300)))
    config, expected = transform(image, name, **settings)
    preprocessing = read(config)
    found = preprocessing.normalise(jnp.asarray(preprocessing.prepare([image])))[0]
    difference = np.abs(found - expected.transpose(1, 2, 0))
    # transformers resizes with torch, which now and then rounds a pixel to the neighbouring byte.
    allowed = 2.01 / 255 / min(preprocessing.std)
    record_property("compared with", "timm" if transform is timm_transform else "transformers")
    record_property("largest difference", f"{difference.max():.1e}")
    record_property("allowed", f"{allowed:.1e}, and 1e-4 on average")
    assert difference.mean() < 1e-4 and difference.max() < allowed


VIT_CIFAR10 = {"width": 128, "depth": 6, "num_heads": 8, "mlp_width": 256} | {
    "norm_order": "post",
    "norm_epsilon": 1e-5,
    "activation": nn.relu,
}


@pytest.mark.slow
@pytest.mark.download
@pytest.mark.parametrize(
    ("file", "name", "attributes", "normalisation", "accuracy"),
    [
        (
            "vit_tiny_patch4_cifar10.npz",
            "vit_tiny",
            VIT_CIFAR10,
            {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)},
            0.7373,
        ),
        ("resnet20_cifar10.npz", "resnet20", {"norm": "frozen_batch"}, IMAGENET, 0.9173),
        (
            "resnet56_cifar10.npz",
            "resnet20",
            {"norm": "frozen_batch", "depth": 56},
            IMAGENET,
            0.9339,
        ),
    ],
)
def test_a_real_checkpoint_reaches_its_published_accuracy(
    file, name, attributes, normalisation, accuracy
):
    """On all of CIFAR-10's test images."""
    folder = os.environ.get("JAXDP_WEIGHTS_DIR")
    if folder is None:
        pytest.skip(f"set JAXDP_WEIGHTS_DIR to a directory with {file}")
    from jaxdp.data import from_tfds

    pretrained = load_checkpoint(
        Path(folder) / file,
        model=models.create(name, num_classes=10, **attributes),
        preprocessing=Preprocessing(size=32, **normalisation),
    )
    source = from_tfds("cifar10", "test", data_dir=os.environ["JAXDP_DATA_DIR"])
    apply = jax.jit(pretrained.apply_fn)
    hits = 0
    for start in range(0, len(source), 500):
        batch = source.gather(np.arange(start, start + 500))
        hits += int(
            (np.argmax(apply(pretrained.params, batch["image"]), axis=-1) == batch["label"]).sum()
        )
    assert hits / len(source) == pytest.approx(accuracy, abs=1e-4)
