"""Public SqueezeNets, ResNets and EfficientNet-Lites: made-up files in the publishers' names
against NumPy in float64.

The tensors are written and computed here under the names in the file, so a table that maps two
names wrongly, a wrong padding, epsilon or order of channels changes the logits. `make parity`
compares with the publishers themselves."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp import models
from jaxdp.models import Preprocessing, load_checkpoint

HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
IMAGES = np.random.default_rng(5).random((2, 33, 33, 3), np.float32)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


class File:
    """Tensors that are drawn when the forward pass first asks for them, and its layers on [B, C, H,
    W] in float64."""

    def __init__(self, seed, epsilon=1e-5, same=False):
        self.tensors, self.random, self.epsilon, self.same = (
            {},
            np.random.default_rng(seed),
            epsilon,
            same,
        )

    def draw(self, name, shape, low, high):
        self.tensors[name] = self.random.uniform(low, high, shape).astype(np.float32)
        return self.tensors[name].astype(np.float64)

    def conv(self, name, x, width, size, stride=1, padding=0, bias=False, groups=1, join="."):
        shape = (width, x.shape[1] // groups, size, size)
        scale = np.sqrt(6 / np.prod(shape[1:]))
        kernel = self.draw(f"{name}{join}weight", shape, -scale, scale)
        pads = [(padding, padding)] * 2
        if self.same and size > 1:
            needed = [
                max(0, (-(-extent // stride) - 1) * stride + size - extent)
                for extent in x.shape[2:]
            ]
            pads = [(total // 2, total - total // 2) for total in needed]
        x = np.pad(x, ((0, 0), (0, 0), *pads))
        windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))[
            :, :, ::stride, ::stride
        ]
        if groups > 1:
            y = np.einsum("bchwij,cij->bchw", windows, kernel[:, 0])
        else:
            y = np.tensordot(windows, kernel, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
        return y + self.draw(f"{name}{join}bias", width, -0.3, 0.3)[:, None, None] if bias else y

    def norm(self, name, x):
        weight, bias, var = (self.draw(f"{name}.{leaf}", x.shape[1], 0.5, 1.5) for leaf in NORM)
        mean = self.draw(f"{name}.running_mean", x.shape[1], -0.5, 0.5)
        self.tensors[f"{name}.num_batches_tracked"] = np.int64(7)
        gain = weight / np.sqrt(var + self.epsilon)
        return x * gain[:, None, None] + (bias - mean * gain)[:, None, None]

    def dense(self, name, x, width):
        weight = self.draw(f"{name}.weight", (width, x.shape[1]), -0.5, 0.5)
        return x @ weight.T + self.draw(f"{name}.bias", width, -0.5, 0.5)


NORM = ("weight", "bias", "running_var")


def pool(x, padding=0, ceil=False):
    counts = [(extent + 2 * padding - 3 + ceil) // 2 + 1 for extent in x.shape[2:]]
    after = [
        max(0, 2 * count + 1 - extent - padding)
        for count, extent in zip(counts, x.shape[2:], strict=True)
    ]
    x = np.pad(x, ((0, 0), (0, 0), *((padding, extra) for extra in after)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))[:, :, ::2, ::2]
    return windows[:, :, : counts[0], : counts[1]].max(axis=(4, 5))


def relu(x, top=np.inf):
    return np.clip(x, 0, top)


def squeezenet(file, x, version, caffe=False):
    """Iandola et al. 2016, table 1, and the change to 1.1. torchvision counts layers, Caffe names
    them."""
    join, parts = ("/", ("squeeze1x1", "expand1x1", "expand3x3")) if caffe else (".", SQUEEZE_PARTS)
    options = {"bias": True, "join": join}
    places, pooled = {
        "1.0": ((3, 4, 5, 7, 8, 9, 10, 12), (2, 5, 9)),
        "1.1": ((3, 4, 6, 7, 9, 10, 11, 12), (2, 4, 6)),
    }[version]
    first = (96, 7) if version == "1.0" else (64, 3)
    x = x[:, ::-1] if caffe else x
    x = relu(file.conv("conv1" if caffe else "features.0", x, *first, stride=2, **options))
    widths = [(16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256)]
    for k, (place, (squeezed, expanded)) in enumerate(zip(places, widths, strict=True), 2):
        x = pool(x, ceil=True) if k in pooled else x
        squeeze, one, three = (
            f"fire{k}/{part}" if caffe else f"features.{place}.{part}" for part in parts
        )
        s = relu(file.conv(squeeze, x, squeezed, 1, **options))
        both = (
            file.conv(one, s, expanded, 1, **options),
            file.conv(three, s, expanded, 3, padding=1, **options),
        )
        x = relu(np.concatenate(both, axis=1))
    name = "conv10" if caffe else "classifier.1"
    return relu(file.conv(name, x, 5, 1, padding=1 if caffe else 0, **options)).mean(axis=(2, 3))


SQUEEZE_PARTS = ("squeeze", "expand1x1", "expand3x3")


def resnet(file, x, bottleneck):
    x = pool(relu(file.norm("bn1", file.conv("conv1", x, 4, 7, stride=2, padding=3))), padding=1)
    for stage, width in enumerate((4, 8, 16, 32), start=1):
        for block in range(2 if stage == 2 else 1):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            wide = 4 * width if bottleneck else width
            layers = [(width, 3, stride), (width, 3, 1)]
            if bottleneck:
                layers = [(width, 1, 1), (width, 3, stride), (wide, 1, 1)]
            y = x
            for k, (channels, size, step) in enumerate(layers, start=1):
                y = file.conv(f"{name}.conv{k}", y, channels, size, stride=step, padding=size // 2)
                y = file.norm(f"{name}.bn{k}", y)
                y = relu(y) if k < len(layers) else y
            if stride > 1 or x.shape[1] != wide:
                x = file.norm(
                    f"{name}.downsample.1",
                    file.conv(f"{name}.downsample.0", x, wide, 1, stride=stride),
                )
            x = relu(x + y)
    return file.dense("fc", x.mean(axis=(2, 3)), 5)


def cifar_resnet(file, x):
    """Two blocks per stage. A shortcut of more channels has zeros around it."""
    x = relu(file.norm("bn1", file.conv("conv1", x, 16, 3, padding=1)))
    for stage, width in enumerate((16, 32, 64), start=1):
        for block in range(2):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = file.conv(f"{name}.conv1", x, width, 3, stride=stride, padding=1)
            y = file.conv(f"{name}.conv2", relu(file.norm(f"{name}.bn1", y)), width, 3, padding=1)
            extra = (width - x.shape[1]) // 2
            x = np.pad(x[:, :, ::stride, ::stride], ((0, 0), (extra, extra), (0, 0), (0, 0)))
            x = relu(x + file.norm(f"{name}.bn2", y))
    return file.dense("linear", x.mean(axis=(2, 3)), 5)


def efficientnet_lite(file, x):
    """The stages of EfficientNet-B0 with 8 channels each, and one block except in the ends, which
    have one anyway."""
    x = relu(file.norm("bn1", file.conv("conv_stem", x, 32, 3, stride=2, padding=1)), 6)
    for stage, (size, stride) in enumerate(
        [(3, 1), (3, 2), (5, 2), (3, 2), (5, 1), (5, 2), (3, 1)]
    ):
        name, y = f"blocks.{stage}.0", x
        if stage == 0:
            y = file.conv(f"{name}.conv_dw", y, 32, size, padding=1, groups=32)
            y = file.norm(
                f"{name}.bn2",
                file.conv(f"{name}.conv_pw", relu(file.norm(f"{name}.bn1", y), 6), 8, 1),
            )
        else:
            y = relu(file.norm(f"{name}.bn1", file.conv(f"{name}.conv_pw", y, 48, 1)), 6)
            y = file.conv(
                f"{name}.conv_dw", y, 48, size, stride=stride, padding=size // 2, groups=48
            )
            y = relu(file.norm(f"{name}.bn2", y), 6)
            y = file.norm(f"{name}.bn3", file.conv(f"{name}.conv_pwl", y, 8, 1))
        x = x + y if stage and stride == 1 else y
    x = relu(file.norm("bn2", file.conv("conv_head", x, 1280, 1)), 6)
    return file.dense("classifier", x.mean(axis=(2, 3)), 5)


RESNET = {"depths": (1, 2, 1, 1), "width": 4}
CIFAR = {"depth": 14, "norm": "frozen_batch"}
LITE = {"width": 0.02, "depth": 0.1}
# Case: (naming, model, attributes, forward pass, arguments of the file)
CASES = {
    "torchvision squeezenet 1.0": (
        "squeezenet1_0",
        "squeezenet1_0",
        {},
        lambda f, x: squeezenet(f, x, "1.0"),
        {},
    ),
    "torchvision squeezenet 1.1": (
        "squeezenet1_1",
        "squeezenet1_1",
        {},
        lambda f, x: squeezenet(f, x, "1.1"),
        {},
    ),
    "caffe squeezenet": (
        *("caffe_squeezenet", "squeezenet1_0", {"head_padding": 1}),
        *(lambda f, x: squeezenet(f, x, "1.0", caffe=True), {}),
    ),
    "cifar resnet": ("cifar_resnet", "resnet20", CIFAR, cifar_resnet, {}),
    "resnet": ("resnet", "resnet18", RESNET, lambda f, x: resnet(f, x, False), {}),
    "resnet bottleneck": ("resnet", "resnet50", RESNET, lambda f, x: resnet(f, x, True), {}),
    "lite of google": (
        "efficientnet_lite",
        "efficientnet_lite0",
        LITE,
        efficientnet_lite,
        {"epsilon": 1e-3},
    ),
    "lite of timm": (
        *(
            "efficientnet_lite",
            "efficientnet_lite0",
            LITE | {"same_padding": False, "norm_epsilon": 1e-5},
        ),
        *(efficientnet_lite, {}),
    ),
}


def written(case, folder, images=IMAGES):
    """Returns the file of a case, its logits on images, and its tensors."""
    _, _, _, forward, options = CASES[case]
    file = File(sorted(CASES).index(case), same=case == "lite of google", **options)
    logits = forward(file, (images.astype(np.float64) * 2 - 1).transpose(0, 3, 1, 2))
    path = folder / "public.npz"
    np.savez(path, **file.tensors)
    return path, logits, file.tensors


def load(case, path, **options):
    naming, name, attributes, _, _ = CASES[case]
    model = models.create(
        name, num_classes=options.pop("classes", 5), **attributes | options.pop("attributes", {})
    )
    given = {"naming": naming, "preprocessing": Preprocessing(size=33, **HALF)}
    return load_checkpoint(path, model=model, **given | options)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_numpy_forward_pass(case, tmp_path):
    path, expected, tensors = written(case, tmp_path)
    pretrained = load(case, path, naming="auto")
    assert expected.std() > 0.05
    found = jax.jit(pretrained.apply_fn)(pretrained.params, IMAGES)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    statistics = {name for name in tensors if "running" in name}
    assert len(jax.tree.leaves(pretrained.constants)) == len(statistics)


@pytest.mark.slow
def test_a_new_head_starts_at_zero_and_the_rest_is_the_file(tmp_path):
    path, _, _ = written("resnet", tmp_path)
    whole, fresh = load("resnet", path), load("resnet", path, classes=7, new_head=True)
    assert {leaf.shape for leaf in jax.tree.leaves(fresh.params["head"])} == {(32, 7), (7,)}
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(fresh.params["head"]))
    for name in set(whole.params) - {"head"}:
        jax.tree.map(np.testing.assert_array_equal, whole.params[name], fresh.params[name])
    with pytest.raises(
        ValueError, match=r"fc\.weight: shape \(5, 32\) does not fit head/kernel \(32, 7\)"
    ):
        load("resnet", path, classes=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "attributes", "message"),
    [
        ("caffe squeezenet", {"head_padding": 0}, "head_padding=1, not 0"),
        ("torchvision squeezenet 1.1", {"version": "1.0"}, "version='1.1', not '1.0'"),
        ("resnet", {"norm": "group", "groups": 2}, "norm='frozen_batch', not 'group'"),
        (
            "cifar resnet",
            {"norm": "group", "shortcut": "conv"},
            "norm='frozen_batch', not 'group'; shortcut='pad', not 'conv'",
        ),
    ],
)
def test_what_the_naming_implies_is_checked(case, attributes, message, tmp_path):
    path, _, _ = written(case, tmp_path)
    with pytest.raises(ValueError, match=f"the checkpoint needs a model with {message}"):
        load(case, path, attributes=attributes)


@pytest.mark.slow
def test_no_two_tensors_could_be_exchanged_unnoticed(tmp_path):
    """On one small image, whose logits take a fraction of the time, once for each pair."""
    images = IMAGES[:1, :8, :8]
    path, expected, _ = written("cifar resnet", tmp_path, images)
    pretrained = load("cifar resnet", path, preprocessing=Preprocessing(size=8, **HALF))

    @jax.jit
    def apply(variables):
        used = dataclasses.replace(pretrained, constants={"batch_stats": variables["batch_stats"]})
        return used.apply_fn(variables["params"], images)

    variables = {"params": pretrained.params, **pretrained.constants}
    assert np.abs(apply(variables) - expected).max() <= 1e-4
    flat = flatten_dict(variables)
    for a, b in itertools.combinations(flat, 2):
        if flat[a].shape == flat[b].shape:
            exchanged = unflatten_dict({**flat, a: flat[b], b: flat[a]})
            # A negative variance gives NaN.
            assert not np.abs(apply(exchanged) - expected).max() <= 2e-4, (a, b)


def test_statistics_are_constants_and_everything_else_is_trained(tmp_path):
    pretrained = load("cifar resnet", written("cifar resnet", tmp_path)[0])
    assert set(pretrained.constants) == {"batch_stats"}
    assert {path[-1] for path in flatten_dict(pretrained.constants)} == {"mean", "var"}
    assert {path[-1] for path in flatten_dict(pretrained.params)} == {"kernel", "scale", "bias"}


def test_every_statistic_that_does_not_fit_is_named(tmp_path):
    path, _, tensors = written("cifar resnet", tmp_path)
    del tensors["layer1.0.bn2.running_mean"]
    wrong = dict.fromkeys(["bn1.running_var", "layer3.1.bn1.running_std"], np.zeros(7, np.float32))
    np.savez(path, **tensors | wrong)
    with pytest.raises(ValueError) as caught:
        load("cifar resnet", path)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "bn1.running_var: shape (7,) does not fit norm/var (16,)",
        "layer1.0.bn2.running_mean: missing, for stage_0_block_0_norm_1/mean (16,)",
        "layer3.1.bn1.running_std: superfluous, shape (7,)",
    ]


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        (8, r"layer3\.1\.conv2\.weight: superfluous"),
        (20, r"layer1\.2\.bn1\.running_mean: missing, for stage_0_block_2_norm_0/mean \(16,\)"),
    ],
)
def test_a_resnet_that_is_not_the_one_in_the_file(depth, message, tmp_path):
    path, _, _ = written("cifar resnet", tmp_path)
    with pytest.raises(ValueError, match=message):
        load("cifar resnet", path, attributes={"depth": depth})


@pytest.mark.slow
def test_max_pool_is_that_of_xla():
    from jaxdp.models import layers

    max_pool = jax.jit(layers.max_pool, static_argnums=(1, 2), static_argnames=("padding", "ceil"))
    x = np.random.default_rng(0).standard_normal((2, 9, 12, 3)).astype(np.float32)
    for padding, after in ((0, 0), (1, 1)):
        pads = ((0, 0), (padding, after), (padding, after), (0, 0))
        expected = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
        np.testing.assert_array_equal(max_pool(jnp.asarray(x), 3, 2, padding=padding), expected)
    # In ceil mode the columns 10 and 11, which a window of width 2 covers, are one more maximum.
    found = max_pool(jnp.asarray(x), 3, 2, ceil=True)
    assert found.shape == (2, 4, 6, 3)
    np.testing.assert_array_equal(
        found[:, :, -1], np.max([x[:, i : i + 7 : 2, 10:].max(axis=2) for i in range(3)], axis=0)
    )


# --- Live comparisons ---------------------------------------------------------------------------

PUBLISHED = {
    "squeezenet1_0": ("torchvision", "squeezenet1_0", {}),
    "squeezenet1_1": ("torchvision", "squeezenet1_1", {}),
    "resnet18": ("timm", "resnet18", {}),
    "resnet50": ("timm", "resnet50", {}),
    "efficientnet_lite0": ("timm", "tf_efficientnet_lite0", {}),
    "efficientnet_lite2": ("timm", "tf_efficientnet_lite2", {}),
    "efficientnet_lite0 of timm": (
        "timm",
        "efficientnet_lite0",
        {"same_padding": False, "norm_epsilon": 1e-5},
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("case", PUBLISHED)
@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_full_size_models_are_those_of_the_publisher(case, tmp_path, record_property):
    """Logits of a network with random weights on 64x64 images."""
    import importlib

    import torch
    from safetensors.torch import save_file

    library, name, attributes = PUBLISHED[case]
    if library == "timm":
        theirs = importlib.import_module("timm").create_model(name, num_classes=11)
    else:
        theirs = getattr(importlib.import_module("torchvision.models"), name)(num_classes=11)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, tensor in theirs.state_dict().items():
            if tensor.ndim == 1:
                tensor.uniform_(0.5, 1.5, generator=generator) if key.endswith(
                    ("weight", "var")
                ) else tensor.uniform_(-0.1, 0.1, generator=generator)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    images = np.random.default_rng(0).random((2, 64, 64, 3), np.float32)
    with torch.no_grad():
        inputs = torch.from_numpy((images * 2 - 1).transpose(0, 3, 1, 2).copy())
        expected = theirs.eval()(inputs).numpy()
    model = models.create(case.split(" ")[0], num_classes=11, **attributes)
    preprocessing = Preprocessing(size=64, **HALF)
    pretrained = load_checkpoint(
        tmp_path / "model.safetensors", model=model, preprocessing=preprocessing
    )
    found = jax.jit(pretrained.apply_fn)(pretrained.params, images)
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    record_property("compared with", library)
    record_property("largest difference", f"{difference:.1e} of the largest logit")
    record_property("allowed", "1e-4")
    assert expected.std() > 0
    assert difference <= 1e-4
