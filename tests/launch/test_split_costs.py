"""Costs against numbers worked out by hand, for a tiny ViT and for the paper's ViT-L, and against
XLA's own."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdp.models import Preprocessing, ViT, create
from jaxdp.split.backbone import Backbone
from launch.measure import measure
from launch.split_costs import cost, count_macs


def backbone_of(model, size, channels, cut):
    return Backbone(
        model, Preprocessing(size=size, mean=(0.5,) * channels, std=(0.5,) * channels), cut
    )


# Tokens 5 = 4 patches of 4 x 4 x 1 and the class token.
TOKENS, WIDTH, HIDDEN, CLASSES, IMAGES, EPOCHS = 5, 12, 16, 3, 20, 7
TINY = backbone_of(
    ViT(num_classes=10, patch_size=4, width=WIDTH, depth=4, num_heads=2, mlp_width=HIDDEN), 8, 1, 3
)
JOB = {"images": IMAGES, "num_classes": CLASSES, "epochs": EPOCHS, "batch_size": 5}


@functools.cache
def tiny(method):
    return cost(method, TINY, copies=8, directions=6, **JOB)


# Multiplications per image: the embedding, weights and attention products of a block, the head.
EMBED = 4 * 16 * WIDTH
WEIGHTS = TOKENS * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN)
PRODUCTS = 2 * TOKENS**2 * WIDTH
HEAD = WIDTH * CLASSES
# Parameters of the same, and of the last LayerNorm.
P_EMBED = 16 * WIDTH + WIDTH + WIDTH + TOKENS * WIDTH
P_BLOCK = 4 * (WIDTH**2 + WIDTH) + 2 * WIDTH * HIDDEN + HIDDEN + WIDTH + 4 * WIDTH
P_NORM = 2 * WIDTH
P_HEAD = WIDTH * CLASSES + CLASSES


def forward(blocks):
    return EMBED + blocks * (WEIGHTS + PRODUCTS)


def backward(blocks, trained):
    """Gradients by the inputs of all blocks, and by the weights of some; both operands of a product
    are inputs."""
    return blocks * (WEIGHTS + 2 * PRODUCTS) + trained * WEIGHTS


P_ALL, P_THREE = P_EMBED + 4 * P_BLOCK + P_NORM + P_HEAD, P_EMBED + 3 * P_BLOCK
ONCE = forward(4) + HEAD
EXPECTED = {
    # method: parameters, forward and training multiplications per image
    "lp": (P_ALL, ONCE, 2 * HEAD),
    "ft": (P_ALL, ONCE, forward(4) + backward(4, 4) + EMBED + 3 * HEAD),
    "ln": (P_ALL, ONCE, forward(4) + backward(4, 0) + 3 * HEAD),
    "sl": (P_THREE + P_HEAD, forward(3), forward(3) + backward(3, 3) + EMBED + 3 * HEAD),
    # First and last block are trained; of the two between them one is there.
    "ot": (P_THREE + P_NORM + P_HEAD, forward(3) + HEAD, forward(3) + backward(3, 2) + 3 * HEAD),
    "sa": (P_THREE, forward(3), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", EXPECTED)
def test_parameters_and_flops_are_those_worked_out_by_hand(method):
    found = tiny(method)
    parameters, once, training = EXPECTED[method]
    assert (found.parameters, found.forward_flops, found.training_flops) == (
        parameters,
        2 * once,
        2 * training,
    )
    assert found.parameter_bytes == parameters * (1 if method == "sa" else 4)
    total = 2 * IMAGES * EPOCHS * training
    if method == "lp":
        total += 2 * IMAGES * forward(4)  # the features, once
    if method == "sa":
        total = 2 * IMAGES * forward(3) + 2 * TOKENS * IMAGES**2 * WIDTH  # and the retrieval
    assert found.total_flops == total


@pytest.mark.slow
def test_what_is_sent_is_what_was_worked_out_by_hand():
    model = 4 * (P_EMBED + 4 * P_BLOCK + P_NORM)
    for method in ("lp", "ft", "ln"):
        found = tiny(method)
        assert (found.upload, found.download) == (0, model)
    # Representation up, its gradient down; what the head reads down, the gradient by it up.
    each_way = 4 * EPOCHS * IMAGES * (TOKENS * WIDTH + WIDTH)
    found = tiny("sl")
    assert (found.upload, found.download) == (each_way, 4 * (P_EMBED + 3 * P_BLOCK) + each_way)
    found = tiny("ot")
    assert (found.upload, found.download) == (4 * (2 * P_BLOCK + P_HEAD), model - 4 * P_BLOCK)

    frontend = P_EMBED + 3 * P_BLOCK  # one byte each
    exchanged = 4 * EPOCHS * 9 * IMAGES * CLASSES
    for method, sent in (("sa", 9), ("sa_noise_once", 1)):
        found = tiny(method)
        assert found.upload == 4 * sent * IMAGES * TOKENS * WIDTH + exchanged
        assert found.download == frontend + exchanged
    assert found.total_flops == 2 * IMAGES * forward(3)  # the server retrieves
    found = tiny("sa_private")
    assert found.upload == 4 * IMAGES * (6 + 1)
    assert found.download == frontend + 4 * TOKENS * WIDTH * (6 + 1)
    assert found.total_flops == 2 * IMAGES * (forward(3) + TOKENS * WIDTH * 6)


@pytest.mark.slow
def test_two_layers_of_a_head_are_counted():
    two = Backbone(TINY.model, TINY.preprocessing, 3, head_hidden=9)
    found, plain = cost("lp", two, **JOB), tiny("lp")
    assert found.parameters - plain.parameters == (WIDTH * 9 + 9) + (9 * CLASSES + CLASSES) - P_HEAD
    # no gradient by the features
    assert found.training_flops == 2 * (2 * WIDTH * 9 + 3 * 9 * CLASSES)


@pytest.mark.slow
def test_the_papers_model():
    vit = backbone_of(create("vit_l16", num_classes=1000), 224, 3, 16)
    found = cost("sa", vit, images=500, num_classes=100, batch_size=1)
    tokens, width = 197, 1024
    embed = 196 * 768 * width
    block = tokens * (4 * width**2 + 8 * width**2) + 2 * tokens**2 * width
    assert found.forward_flops == 2 * (embed + 16 * block)
    assert found.forward_flops == pytest.approx(2 * 41.1e9, rel=1e-3)
    assert found.parameters == pytest.approx(202.5e6, rel=1e-3)
    logits = 4 * 100 * 65 * 500 * 100
    assert found.upload == 500 * 65 * 4 * tokens * width + logits
    assert found.upload - logits == pytest.approx(500 * 52.4e6, rel=1e-3)
    assert logits == pytest.approx(1.3e9, rel=1e-3)
    whole = cost("lp", vit, images=500, num_classes=100, batch_size=1)
    assert whole.parameters - 102500 == pytest.approx(303.3e6, rel=1e-3)
    assert whole.forward_flops == 2 * (embed + 24 * block + 100 * width)
    assert whole.forward_flops == pytest.approx(2 * 61.6e9, rel=1e-3)


# --- The walker ---------------------------------------------------------------------------------


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_products_are_counted_wherever_they_are():
    a, b = shape(2, 3), shape(3, 5)
    assert count_macs(lambda a, b: a @ b, a, b) == 30
    assert count_macs(lambda a, b: jax.jit(jax.nn.relu)(jax.checkpoint(jnp.dot)(a, b)), a, b) == 30
    assert count_macs(lambda a, b: jnp.sin(a).sum() + b.sum(), a, b) == 0
    assert (
        count_macs(
            lambda a: lax.scan(lambda c, _: (c @ c, None), a, None, length=7)[0], shape(4, 4)
        )
        == 7 * 64
    )
    branches = (lambda a, b: (a @ b).sum(), lambda a, b: (a @ b @ b.T @ b).sum())
    assert count_macs(lambda a, b: lax.cond(a.sum() > 0, *branches, a, b), a, b) == 30 + 30 + 30
    assert count_macs(jnp.multiply, a, a) == 0
    assert (
        count_macs(lambda a, b: jnp.einsum("nij,njk->nik", a, b), shape(7, 2, 3), shape(7, 3, 5))
        == 7 * 30
    )
    # forward, and one operand's
    assert count_macs(jax.grad(lambda a, b: jnp.sum((a @ b) ** 2)), a, b) == 30 + 30

    def loop(a):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, a)

    with pytest.raises(ValueError, match=r"a while_loop has an unknown number of steps.* Use scan"):
        count_macs(loop, shape(4, 4))
    assert (
        count_macs(lambda a: lax.while_loop(lambda c: c.sum() < 9, lambda c: 2 * c, a), shape(4, 4))
        == 0
    )


def test_convolutions_are_counted():
    x, kernel = shape(2, 8, 8, 6), shape(4, 4, 6, 5)

    def convolve(x, kernel, groups=1):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (4, 4), "VALID", dimension_numbers=layout, feature_group_count=groups
        )

    macs = 2 * 2 * 2 * 5 * 4 * 4 * 6
    assert count_macs(convolve, x, kernel) == macs
    assert count_macs(lambda x, k: convolve(x, k, 6), x, shape(4, 4, 1, 12)) == 2 * 2 * 2 * 12 * 16
    assert count_macs(jax.grad(lambda k, x: jnp.sum(convolve(x, k) ** 2)), kernel, x) == 2 * macs


@pytest.mark.slow
def test_xla_counts_a_little_more_and_knows_the_memory():
    """Compares counts. XLA's adds softmax, LayerNorm and GELU, which are few in a wide model."""
    wide = backbone_of(
        ViT(num_classes=2, patch_size=4, width=128, depth=2, num_heads=2, mlp_width=512), 16, 1, 1
    )
    job = {"images": 8, "num_classes": 5, "batch_size": 8}
    tuned, probed, extracted = (cost(method, wide, **job) for method in ("ft", "lp", "sa"))
    measured = measure(tuned.programs, 8, timed=True)
    assert tuned.forward_flops < measured.forward_flops < 1.1 * tuned.forward_flops
    assert tuned.training_flops < measured.training_flops < 1.1 * tuned.training_flops
    assert 0 < measured.seconds < 600
    # Parameters and Adam's two moments go in and come out, and gradients are between them.
    assert 7 * tuned.parameter_bytes < measured.peak_bytes < 14 * tuned.parameter_bytes
    probing, extracting = (measure(found.programs, 8, timed=False) for found in (probed, extracted))
    assert probed.parameter_bytes < probing.peak_bytes < 2 * probed.parameter_bytes
    assert 4 * extracted.parameters < extracting.peak_bytes < probing.peak_bytes
    assert extracting.training_flops == 0 and extracting.seconds is None


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": "lora"},
            "method must be one of lp, ft, ln, sl, ot, ot_random, sa, .* got 'lora'",
        ),
        ({"images": 0}, "images must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": -1}, "batch_size must be at least 1, got -1"),
        ({"directions": 0}, "directions must be at least 1, got 0"),
        ({"copies": -1}, "copies must be at least 0, got -1"),
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
    ],
)
def test_bad_numbers_are_refused(change, message):
    given = {"method": "sa", **JOB, **change}
    with pytest.raises(ValueError, match=message):
        cost(given.pop("method"), TINY, **given)
