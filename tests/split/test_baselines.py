"""What each baseline trains, what it runs, and what comes out; tiny ViTs on real digits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.data import bundled
from jaxdp.models import Preprocessing, ViT
from jaxdp.models.swin import Swin
from jaxdp.split.backbone import Backbone
from jaxdp.split.baselines import (
    BASELINES,
    accuracy,
    adapt,
    offsite_tuning,
    run,
)
from jaxdp.split.quantization import Scales, quantize_frontend, quantized_front
from launch.frontend_attacks import (
    probe_auxiliary_backend,
    probe_original_frontend,
    probe_quantized_frontend,
    tune_quantized_frontend,
)

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
VIT = ViT(num_classes=10, patch_size=4, width=12, depth=2, num_heads=2, mlp_width=16)
BACKBONE = Backbone(VIT, Preprocessing(size=8, mean=(0.3,), std=(0.4,)), 1)
# For offsite tuning, which needs blocks to drop and to keep.
DEEP = dataclasses.replace(BACKBONE, model=VIT.clone(depth=4))
FRONT = {"embed", "class_token", "positions", "block_0"}
# Random baselines run the same programs as others.
NAMES = [name for name in BASELINES if name != "ot_random"]
# A step that is lost in rounding: nothing is trained.
NO_STEP = 1e-30


def backbone_of(name):
    return DEEP if name == "ot" else BACKBONE


@pytest.fixture(scope="module")
def deep():
    """Parameters of an untrained model, none of which is zero or one."""
    shapes = jax.eval_shape(DEEP.model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]
    rng = np.random.default_rng(0)
    flat = {
        path: jnp.asarray(path.endswith("scale") + 0.3 * rng.normal(size=leaf.shape), jnp.float32)
        for path, leaf in flatten_dict(shapes, sep="/").items()
    }
    return unflatten_dict(flat, sep="/")


@pytest.fixture(scope="module")
def params(deep):
    return {name: leaf for name, leaf in deep.items() if name not in ("block_2", "block_3")}


@pytest.fixture(scope="module")
def digits():
    """Zeros and ones: 20 to train with, 60 to test."""
    source = bundled("digits").of_classes([0, 1])
    examples = source.gather(np.arange(80))
    images, labels = examples["image"], examples["label"]
    return (images[:20], labels[:20]), (images[20:], labels[20:])


@pytest.fixture(scope="module")
def frontend(params):
    weights = [f"block_0/attention/{site}" for site in ("query", "key", "value", "out")] + [
        "block_0/mlp_0"
    ]
    scales = {site: jnp.float32(0.02) for site in (*weights, "block_0/mlp_1")}
    scales |= {f"block_0/attention/{site}": jnp.full(2, 0.02) for site in ("scores", "mixture")}
    scales["embed"] = jnp.full(12, 0.02)
    return quantize_frontend(BACKBONE.divide(params)[0], Scales(scales, scales, jnp.float32(0.04)))


@functools.partial(jax.jit, static_argnames=("model", "start", "stop"))
def apply(params, x, model=VIT, start=0, stop=None):
    x = x if start else (x - 0.3) / 0.4
    return model.apply({"params": params}, x, start, stop)


def adapted(
    baseline,
    start,
    data,
    *,
    backbone=BACKBONE,
    learning_rate=1e-2,
    epochs=1,
    key=KEY,
    batch_size=20,
    patience=0,
):
    given = {
        "num_classes": 2,
        "learning_rate": learning_rate,
        "epochs": epochs,
        "batch_size": batch_size,
        "patience": patience,
        "key": key,
    }
    return adapt(baseline, backbone, start, *data, **given)


def logits(found, images):
    return found.logits(images, batch_size=20)


def moved(before, after):
    """Paths of the parameters of `before` that are others in `after`."""
    before, after = (flatten_dict(x, sep="/") for x in (before, after))
    same = {
        path
        for path, x in before.items()
        if x.shape == after[path].shape and np.array_equal(x, after[path])
    }
    return set(before) - same


def without_key_biases(paths):
    """Removes the paths of key biases, which cancel in the softmax up to rounding."""
    return {path for path in paths if not path.endswith("attention/key/bias")}


# --- Which parameters are trained ---------------------------------------------------------------

NORMS = {
    f"{norm}/{leaf}"
    for norm in ("block_0/norm_0", "block_0/norm_1", "block_1/norm_0", "block_1/norm_1", "norm")
    for leaf in ("scale", "bias")
}
HEAD = {"head/kernel", "head/bias"}


def expected(baseline, paths):
    if baseline == "lp":
        return HEAD
    if baseline == "ft":
        return set(paths)
    if baseline == "ln":
        return NORMS | HEAD
    if baseline == "sl":
        return {path for path in paths if path.split("/")[0] in FRONT} | HEAD
    return {path for path in paths if path.split("/")[0] in ("block_0", "block_3")} | HEAD


@pytest.fixture(scope="module")
def public(params, deep):
    """Returns the initial parameters of each baseline."""
    return {name: deep if name == "ot" else params for name in NAMES}


@pytest.fixture(scope="module")
def trained(public, digits):
    """Returns the results of each baseline without a step and after one epoch."""
    return {
        name: tuple(
            adapted(
                BASELINES[name],
                public[name],
                digits[0],
                backbone=backbone_of(name),
                learning_rate=rate,
            )
            for rate in (NO_STEP, 1e-2)
        )
        for name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_named_parameters_move(trained, public, name):
    start, end = trained[name]
    paths = set(flatten_dict(start.params, sep="/"))
    assert paths == set(flatten_dict(public[name], sep="/"))
    # a new head
    assert moved(public[name], start.params) == HEAD and start.params["head"]["kernel"].shape == (
        12,
        2,
    )
    wanted = expected(name, paths)
    assert start.recipe.trained == wanted
    changed = moved(start.params, end.params)
    assert without_key_biases(changed) == without_key_biases(wanted) and changed <= wanted


@pytest.mark.parametrize("name", NAMES)
def test_without_a_step_all_baselines_are_the_public_model_with_a_new_head(trained, digits, name):
    start, _ = trained[name]
    _, (images, _) = digits
    whole = apply(start.params, images, backbone_of(name).model.clone(num_classes=2))
    np.testing.assert_allclose(logits(start, images), whole, atol=2e-5)


# --- Linear probing is logistic regression ------------------------------------------------------


def logistic_regression(features, labels, kernel, bias, learning_rate, steps):
    """Runs full-batch Adam in float64."""
    features, parameters = (
        np.asarray(features, np.float64),
        [np.asarray(x, np.float64) for x in (kernel, bias)],
    )
    first, second = ([np.zeros_like(p) for p in parameters] for _ in range(2))
    for t in range(1, steps + 1):
        logits = features @ parameters[0] + parameters[1]
        p = np.exp(logits - logits.max(1, keepdims=True))
        error = (p / p.sum(1, keepdims=True) - np.eye(p.shape[1])[labels]) / len(labels)
        gradients = [features.T @ error, error.sum(0)]
        for i, g in enumerate(gradients):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            m, v = first[i] / (1 - 0.9**t), second[i] / (1 - 0.999**t)
            parameters[i] = parameters[i] - learning_rate * m / (np.sqrt(v) + 1e-8)
    return parameters


def test_linear_probing_is_logistic_regression(trained, params, digits):
    (images, labels), _ = digits
    # With the identity as its head, the public model returns the features.
    identity = {**params, "head": {"kernel": jnp.eye(12), "bias": jnp.zeros(12)}}
    features = apply(identity, images, VIT.clone(num_classes=12))
    start = trained["lp"][0].params["head"]
    end = adapted(BASELINES["lp"], params, (images, labels), epochs=5).params["head"]
    kernel, bias = logistic_regression(features, labels, start["kernel"], start["bias"], 1e-2, 5)
    np.testing.assert_allclose(end["kernel"], kernel, atol=2e-5)
    np.testing.assert_allclose(end["bias"], bias, atol=2e-5)
    assert np.abs(kernel - start["kernel"]).mean() > 0.03  # five steps of about 0.01


# --- Accuracy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_told_from_ones_and_other_learning_rates_keys_and_epochs_compile_nothing(
    trained, public, digits, name, nothing_compiles
):
    train, test = digits
    other = {"learning_rate": 2e-2, "key": jax.random.key(9), "epochs": 100 if name == "lp" else 15}
    # small programs that depend on the number of epochs
    list(jax.random.split(jax.random.key(0), other["epochs"]))
    with nothing_compiles():
        found = adapted(BASELINES[name], public[name], train, backbone=backbone_of(name), **other)
        steady = adapted(
            BASELINES[name],
            public[name],
            train,
            backbone=backbone_of(name),
            **{**other, "learning_rate": NO_STEP},
            patience=1,
        )
    assert accuracy(found, *test, batch_size=20) > 0.8  # of 60, half by chance
    # The rule of epochs: a loss that does not decrease ends the training.
    assert steady.epochs < found.epochs == other["epochs"]


def test_accuracy_is_the_share_of_largest_logits_whatever_the_batches(trained, digits):
    _, (images, labels) = digits
    found = trained["ft"][1]
    every = apply(found.params, images, VIT.clone(num_classes=2))
    share = np.mean(np.asarray(every).argmax(1) == labels)
    for wanted, given in ((share, labels), (1 - share, 1 - labels)):
        assert accuracy(found, images, given, batch_size=20) == pytest.approx(wanted)
    assert share > 0
    np.testing.assert_allclose(logits(found, images[:31]), every[:31], atol=2e-5)


def test_a_head_that_reads_all_tokens_gets_all_of_them(deep, digits):
    """Linear probing of a DINOv2 head, which reads the class token and the mean of the patches."""
    train, (images, _) = digits
    both = dataclasses.replace(BACKBONE, model=VIT.clone(pool="token_and_mean"))
    start = {name: leaf for name, leaf in deep.items() if name in ("norm", *FRONT, "block_1")}
    found = adapted(BASELINES["lp"], start, train, backbone=both)
    end = {**start, "head": found.params["head"]}
    assert end["head"]["kernel"].shape == (24, 2)
    expected = apply(end, images, VIT.clone(num_classes=2, pool="token_and_mean"))
    np.testing.assert_allclose(logits(found, images), expected, atol=1e-4)
    assert (both.head_tokens, BACKBONE.head_tokens, BACKBONE.prefix_tokens) == (0, 1, 1)


# --- Offsite tuning -----------------------------------------------------------------------------


def test_the_emulator_has_half_of_the_middle_and_evaluation_all_of_the_model(trained, deep, digits):
    (images, _), _ = digits
    start, end = trained["ot"]
    # The blocks 0 and 3 are adapters; of the two between them the second is kept.
    model = DEEP.model.clone(num_classes=2)
    kept = apply(start.params, apply(start.params, images, model, 0, 1), model, 2)
    emulated = jax.jit(run, static_argnums=0)(start.recipe.training, start.params, images)
    np.testing.assert_allclose(emulated, kept, atol=2e-5)
    assert np.abs(emulated - logits(start, images)).max() > 1e-2
    np.testing.assert_allclose(logits(end, images), apply(end.params, images, model), atol=2e-5)
    absent = {path for path in flatten_dict(deep, sep="/") if path.startswith("block_1/")}
    assert start.recipe.client == set(flatten_dict(deep, sep="/")) - absent


@functools.cache
def shapes_of(model):
    return jax.eval_shape(model.init, KEY, jnp.zeros((2, 8, 8, 1)))["params"]


def recipe_of(model, **options):
    backbone = Backbone(model, Preprocessing(size=8, mean=(0.0,), std=(1.0,)), 1)
    recipes = []

    def begin(params):
        recipe, _ = offsite_tuning(backbone, params, num_classes=3, key=KEY, **options)
        recipes.append(recipe)

    jax.eval_shape(begin, shapes_of(model))
    return recipes[0]


def blocks_of(recipe):
    """Blocks that are run in training, one after the other."""
    last = recipe.training[-1].backbone.model.num_blocks
    return [k for piece in recipe.training for k in range(last)[piece.start : piece.stop]]


def some_vit(depth):
    return ViT(num_classes=2, patch_size=4, width=4, depth=depth, num_heads=1, mlp_width=4)


def test_blocks_are_dropped_evenly_or_at_random():
    # Of 2, ..., 7 those at round(5 i / 2) are kept; of 1, 2, 3 one.
    assert blocks_of(recipe_of(some_vit(10))) == [0, 1, 2, 4, 7, 8, 9]
    assert blocks_of(recipe_of(some_vit(5))) == [0, 2, 4]
    draws = [blocks_of(recipe_of(some_vit(4), drop="random", seed=seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] and {tuple(draw) for draw in draws} == {(0, 1, 3), (0, 2, 3)}


def test_blocks_that_merge_patches_stay():
    swin = Swin(
        num_classes=2, patch_size=2, window=2, width=4, depths=(2, 2, 4), num_heads=(1, 1, 1)
    )
    recipe = recipe_of(swin)  # Of 2, ..., 5 the block 3 merges; of the others one is kept.
    assert blocks_of(recipe) == [0, 1, 3, 4, 6, 7]
    names = {path.split("/")[0] for path in recipe.trained}
    assert names == {f"stage_{s}_block_{k}" for s, k in [(0, 0), (0, 1), (2, 2), (2, 3)]} | {
        "stage_1_merge",
        "head",
    }


def test_a_model_without_a_middle_is_refused():
    with pytest.raises(
        ValueError, match=r"a block to drop between 1 first and 1 last ones\. The model has only 2"
    ):
        recipe_of(some_vit(2))
    with pytest.raises(ValueError, match="drop must be 'uniform' or 'random', got 'even'"):
        recipe_of(some_vit(3), drop="even")


# --- What a client can make of a frontend -------------------------------------------------------


def normalised(x):
    x = np.asarray(x, np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


quantized = jax.jit(quantized_front, static_argnums=0)


def test_a_head_on_a_frontend_reads_the_normalised_class_token(frontend, digits):
    train, (images, _) = digits
    found = adapted(probe_quantized_frontend, frontend, train)
    head = found.params["head"]
    tokens = normalised(quantized(BACKBONE, frontend, images)[:, 0])
    expected = tokens @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
    np.testing.assert_allclose(logits(found, images), expected, atol=1e-4)
    assert found.recipe.trained == HEAD and head["kernel"].shape == (12, 2)


def test_it_reads_the_mean_token_where_there_is_no_class_token(params, digits):
    train, (images, _) = digits
    model = VIT.clone(pool="mean")
    params = {**params, "positions": params["positions"][:, 1:]}
    found = adapted(
        probe_original_frontend, params, train, backbone=dataclasses.replace(BACKBONE, model=model)
    )
    head = found.params["head"]
    front = {name: params[name] for name in ("embed", "positions", "block_0")}
    tokens = normalised(apply(front, images, model, stop=1)).mean(1)
    expected = tokens @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
    np.testing.assert_allclose(logits(found, images), expected, atol=1e-4)
    assert found.recipe.trained == HEAD and moved(front, found.params) == set()


def test_a_thief_tunes_the_whole_frontend(frontend, digits):
    train, test = digits
    end = adapted(tune_quantized_frontend, frontend, train, epochs=20)
    paths = set(flatten_dict(end.params, sep="/"))
    assert {path.split("/")[0] for path in paths} == FRONT | {
        "head"
    } and end.recipe.trained == paths
    assert without_key_biases(moved(frontend.params, end.params)) == without_key_biases(
        paths - HEAD
    )
    assert accuracy(end, *test, batch_size=20) > 0.9
    start = adapted(tune_quantized_frontend, frontend, train, learning_rate=NO_STEP)
    for path, x in flatten_dict(frontend.params, sep="/").items():
        np.testing.assert_allclose(flatten_dict(start.params, sep="/")[path], x, atol=1e-20, rtol=0)


def test_the_last_blocks_of_another_model_go_behind_the_frontend(params, frontend, digits):
    train, (images, _) = digits
    other = Backbone(VIT, BACKBONE.preprocessing, 1)
    theirs = jax.tree.map(lambda leaf: 0.7 * leaf, params)
    found = adapted(probe_auxiliary_backend(other, theirs), frontend, train)
    end = {**theirs, "head": found.params["head"]}
    expected = apply(end, quantized(BACKBONE, frontend, images), VIT.clone(num_classes=2), start=1)
    np.testing.assert_allclose(logits(found, images), expected, atol=1e-4)
    assert found.recipe.trained == HEAD and not FRONT & set(found.params)

    wide = Backbone(VIT.clone(width=16), BACKBONE.preprocessing, 1)
    with pytest.raises(
        ValueError, match=r"tokens of width 12 with 1 in front .* got width 16 with 1"
    ):
        adapted(probe_auxiliary_backend(wide, params), frontend, train)


def test_parameters_in_place_of_a_frontend_are_refused(params, digits):
    for baseline in (probe_quantized_frontend, tune_quantized_frontend):
        with pytest.raises(
            ValueError, match="params must be the client's QuantizedFrontend, got dict"
        ):
            adapted(baseline, params, digits[0])


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y + 1), r"labels must be in \[0, 2\)"),
        (lambda x, y: (x, y.astype(float)), "labels must be integers, got dtype float64"),
        (lambda x, y: (x, y[:-1]), r"labels must be \[n\]"),
        (
            lambda x, y: (x[:, :4], y),
            r"images must be \[n, 8, 8, 1\] with n >= 1, got \[20, 4, 8, 1\]",
        ),
        (lambda x, y: (x[:0], y[:0]), r"images must be .* with n >= 1, got \[0, 8, 8, 1\]"),
        (lambda x, y: (255 * x, y), r"images must be in \[0, 1\]"),
    ],
)
def test_bad_data_is_refused(params, digits, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        adapted(BASELINES["ft"], params, change(*digits[0]))


def test_bad_numbers_are_refused(params, digits, trained):
    train, (images, labels) = digits
    with pytest.raises(ValueError, match="learning_rate must be positive, got 0"):
        adapted(BASELINES["ft"], params, train, learning_rate=0.0)
    for name in ("lp", "ft"):
        with pytest.raises(ValueError, match="batch_size must be"):
            adapted(BASELINES[name], params, train, batch_size=0)
    with pytest.raises(ValueError, match="patience must be at least 0, got -1"):
        adapted(BASELINES["lp"], params, train, patience=-1)
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        adapt(
            BASELINES["lp"],
            BACKBONE,
            params,
            train[0],
            0 * train[1],
            num_classes=1,
            learning_rate=1.0,
            key=KEY,
        )
    for few in (labels[:3], labels[:, None]):
        with pytest.raises(ValueError, match=r"labels must be \[n\]"):
            accuracy(trained["lp"][0], images, few)
    with pytest.raises(ValueError, match="images must not be empty"):
        accuracy(trained["lp"][0], images[:0], labels[:0])
