"""Every config and every variant that it documents builds, and its network has shapes."""

import ast
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import pytest
from ml_collections import ConfigDict

from jaxdp.models import create
from jaxdp.models.checkpoints import blank_inputs
from launch import catalogue, frame, models, studies
from launch.settings import check_values

ROOT = Path(__file__).resolve().parents[2]
CLASSES = 10  # where the data would say it
# By network and shape of its inputs, which many configs share.
SIZES: dict[tuple[nn.Module, tuple[int, ...]], int] = {}


def documented() -> list[str]:
    """Returns each config, and each variant that its docstring names as ":variant"."""
    names = []
    for path in sorted((ROOT / "configs").rglob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        if "launch." not in doc:
            continue  # no experiment, but options that several experiments share
        name = path.relative_to(ROOT).as_posix()
        variants = set(re.findall(rf"{re.escape(name)}:(\w+(?:,\w+)*)", doc))
        variants |= set(re.findall(r'":(\w+(?:,\w+)*)"', doc))
        names += [name, *(f"{name}:{variant}" for variant in sorted(variants))]
    return names


def shapes(model: ConfigDict) -> int:
    """Returns the number of parameters of the `model` part of a config. Nothing is computed."""
    model = model.copy_and_resolve_references()
    with model.unlocked():
        model.checkpoint = ""  # the file is not there, and it does not decide the shapes
        if model.preprocessing == ConfigDict():  # the file would say it
            model.preprocessing = {"size": 224, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    made = models.network(model, model.get("num_classes", 0) or CLASSES)
    inputs = blank_inputs(made.preprocessing)
    key = made.model, inputs.shape
    if key not in SIZES:
        params = jax.eval_shape(made.model.init, jax.random.key(0), inputs)
        SIZES[key] = sum(leaf.size for leaf in jax.tree.leaves(params))
    return SIZES[key]


def test_the_documented_variants_are_found():
    names = documented()
    assert len(names) > 45
    some = {"imagenet_c.py:convnext_episodic", "imagenet_r.py:convnext", "usps_shift.py:ablations"}
    assert {"configs/digits_dpsgd.py", *(f"configs/tta/{name}" for name in some)} <= set(names)


@pytest.mark.parametrize("name", [n for n in documented() if ":" not in n])
def test_a_config_has_numbers_in_range_and_its_clip_norm_can_be_divided_among_parts(name):
    config = catalogue.load(name)
    check_values(config)
    if "method_options import" not in (ROOT / name).read_text():
        return
    for part in ("private", "finetune"):
        if "clip_norm" in config.get(part, {}):
            assert config[part].clip_parts == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", documented())
def test_a_config_builds_and_its_network_has_shapes(name):
    config = catalogue.load(name)
    check_values(config)
    if "model" in config and "name" in config.model:
        assert shapes(config.model) > 0


def test_another_model_needs_no_other_options():
    """Fails if the options of a config are those of its first model only."""
    for name in ("configs/tta/imagenet_c.py", "configs/recalibration/imagenet.py"):
        config = catalogue.load(name)
        config.model.name = "resnet50"
        assert shapes(config.model) > 20_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("configs/recalibration/cifar10.py:wrn", 36.5e6),
        ("configs/recalibration/cifar10.py:wrn_cifar100", 36.5e6),
        ("configs/recalibration/imagenet.py:resnet50", 25.6e6),
    ],
)
def test_the_networks_of_the_recalibration_paper_have_their_size(name, size):
    """Zagoruyko and Komodakis 2016, table 5: 36.5 million. He et al. 2016: 25.6 million."""
    assert name in documented()
    assert shapes(catalogue.load(name).model) == pytest.approx(size, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_l.py", "deit_b.py", "backends.py", "backends.py:digits"])
def test_an_auxiliary_backend_takes_the_tokens_of_the_frontend(name):
    """Table 3 of Split Adaptation: the widths of the two models agree, at the paper's size too."""
    config = catalogue.load(f"configs/split/{name}")
    assert "Auxiliary backend" in config.stolen
    assert shapes(config.auxiliary.model) > 0
    first, second = (network_of(model) for model in (config.model, config.auxiliary.model))
    fits = [(model.width, model.prefix_tokens) for model in (first, second)]
    assert fits[0] == fits[1] and second.layer_scale and not first.layer_scale
    # The paper drops layers at random. "backends.py" without a variant does not compare it.
    assert ("Offsite tuning, random layers" in config.methods) == (name != "backends.py")
    assert "amplitude exchange for Hilbert" in config.ablation.rows


def network_of(model: ConfigDict) -> Any:
    return create(model.name, num_classes=CLASSES, **dict(model.options))


def test_an_option_that_a_model_lacks_fails():
    config = catalogue.load("configs/tta/imagenet_c.py")
    with config.model.unlocked():
        config.model.update(name="convnext_tiny", options={"norm_epsilon": 1e-6})
    with pytest.raises(TypeError, match="norm_epsilon"):
        shapes(config.model)


# The variant of these is a file, a number, or a method that the study checks.
OTHER_VARIANTS = {"finetune/csv.py", "predict/csv.py", "tta/cifar10_batch_one.py"}
OTHER_VARIANTS |= {"pretrain/digits.py", "pretrain/cifar100.py"}


def declared(name: str) -> list[str]:
    """Returns the variants that a config names when it refuses one. [] if it takes none."""
    try:
        catalogue.load(f"{name}:no_such_variant")
    except TypeError:  # get_config takes no argument
        return []
    except ValueError as error:
        named = re.search(r"(?:be|takes) (?:one of )?(.*?),? got 'no_such_variant'", str(error))
        assert named, str(error)
        text = named[1].removesuffix(" after the colon")
        return re.findall(r"'(\w+)'", text) or re.findall(r"\w+", text)
    raise AssertionError(f"{name} takes any variant")


@pytest.mark.parametrize("name", [n for n in documented() if ":" not in n])
def test_an_unknown_variant_is_refused_by_the_names_of_the_others_and_these_build(name):
    if name.removeprefix("configs/") in OTHER_VARIANTS:
        return
    variants = declared(name)
    assert {f"{name}:{variant}" for variant in variants} >= {
        other for other in documented() if other.startswith(f"{name}:")
    }
    for variant in variants:
        assert catalogue.load(f"{name}:{variant}"), variant


MISSING = [
    ("cifar10_dpsgd.py:cpu", "data set 'cifar10' is not prepared"),
    ("fashion_mnist_dpsgd.py", "data set 'fashion_mnist' is not prepared"),
    ("finetune/cifar10_squeezenet.py", "'cifar10.*' is not prepared"),
    ("predict/pneumonia.py", "data set 'pneumonia_mnist' is not prepared"),
    (
        "predict/sst2.py",
        "File '' does not exist. An .npz file with the arrays words, vectors, counts",
    ),
    ("predict/imdb.py", "arrays words, vectors, counts"),
    ("predict/imdb.py:embeddings", "arrays train_features, .*, public_features"),
    (
        "predict/octmnist.py",
        "arrays val_images, val_labels .*--config.data.path=..., or run the config of the digits",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "missing"), MISSING)
def test_without_data_the_error_says_what_to_do_and_nothing_is_written(tmp_path, name, missing):
    config = catalogue.load(f"configs/{name}")
    if "data_dir" in config.data:
        config.data.data_dir = str(tmp_path / "nowhere")
    if "public_benchmark" in config:
        config.public_benchmark = True
    (listed,) = studies.recognised(config)
    module, _, attribute = listed.place.partition(":")
    with pytest.raises(FileNotFoundError, match=missing):
        frame.run(getattr(studies.module(module), attribute), config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
