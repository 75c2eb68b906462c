"""What the parties tell each other: all that must be told, nothing else, and only if it fits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

from jaxdp.files import Limits, pack, unpack
from jaxdp.models import Preprocessing, Swin, ViT
from jaxdp.privacy import Ledger
from jaxdp.split import exchange
from jaxdp.split.backbone import Backbone
from jaxdp.split.client import represent
from jaxdp.split.copies import Copies, augment_then_noise
from jaxdp.split.exchange import (
    NoisyOnce,
    Private,
    Shipment,
    Uploaded,
    loss_gradients,
    pack_frontend,
    pack_queries,
    pack_upload,
    unpack_frontend,
    unpack_queries,
    unpack_upload,
)
from jaxdp.split.noisy_upload import PrivateRelease, project, public_projection, release_privately
from jaxdp.split.quantization import quantize_frontend, search_scales
from jaxdp.split.server import adapt, adapt_by_client
from jaxdp.transforms import noise

KEY = noise.stream(bytes(range(16)), "test", impl="threefry2x32")
DIRECTIONS, COPIES, PATCHES = 4, 2, 4


@pytest.fixture(scope="module")
def shipment(vit):
    public = np.random.default_rng(0).normal(size=(12, *vit.backbone.tokens))
    return Shipment(
        vit.backbone, vit.quantized(), COPIES, PATCHES, public_projection(public, DIRECTIONS), 2.0
    )


@pytest.fixture(scope="module")
def sent(shipment):
    return pack_frontend(shipment)


@pytest.fixture(scope="module")
def representations(vit, shipment):
    return represent(vit.backbone, shipment.frontend, shipment.frontend.params, vit.images)


@pytest.fixture(scope="module")
def copies(representations):
    return augment_then_noise(
        KEY, representations, laplace_scale=0.5, copies=COPIES, n_patches=PATCHES, prefix_tokens=1
    )


def assert_identical(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def changed(data, kind, fields=None, arrays=None):
    """Returns a package with changed fields and arrays, None for a removed one. Its sum fits."""
    package = unpack(data, kind)
    kept = {name: x for name, x in {**package.arrays, **(arrays or {})}.items() if x is not None}
    return pack(kind, fields={**package.fields, **(fields or {})}, arrays=kept)


# --- The frontend -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_frontend_comes_back_bit_for_bit(vit, shipment, sent):
    got = unpack_frontend(sent)
    assert got.backbone == Backbone(
        vit.backbone.model.clone(num_classes=2), vit.backbone.preprocessing, 2
    )
    assert_identical(got.frontend, shipment.frontend)
    assert_identical(got.projection, shipment.projection)
    assert (got.copies, got.n_patches, got.clip_norm) == (COPIES, PATCHES, 2.0)
    assert got.fingerprint == shipment.fingerprint


@pytest.mark.slow
def test_a_frontend_without_directions_comes_back(shipment):
    plain = shipment._replace(projection=None, clip_norm=None)
    got = unpack_frontend(pack_frontend(plain))
    assert got.projection is None and got.clip_norm is None
    assert got.fingerprint == plain.fingerprint != shipment.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cut"),
    [
        (
            Swin(
                num_classes=3,
                patch_size=2,
                window=2,
                width=8,
                depths=(2, 2),
                num_heads=(2, 4),
                activation=jax.nn.relu,
            ),
            2,
        ),
        (
            ViT(
                num_classes=3,
                patch_size=4,
                width=8,
                depth=3,
                num_heads=2,
                mlp_width=8,
                pool="mean",
                norm_epsilon=1e-5,
            ),
            1,
        ),
    ],
    ids=["swin", "mean"],
)
def test_every_site_that_is_searched_is_in_the_package(model, cut):
    backbone = Backbone(
        model, Preprocessing(size=8, mean=(0.5,) * 3, std=(0.5,) * 3, resize=(9, 10)), cut
    )

    def search():
        images = np.zeros((1, 8, 8, 3), np.float32)
        params = model.init(jax.random.key(0), images)["params"]
        scales = search_scales(
            backbone, params, images, np.zeros(1, int), metric="mse", fractions=(1.0, 2.0, 1)
        )
        return quantize_frontend(backbone.divide(params)[0], scales)

    frontend = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(search))
    got = unpack_frontend(pack_frontend(Shipment(backbone, frontend, 1, 1)))
    assert got.backbone == Backbone(model.clone(num_classes=2), backbone.preprocessing, cut)
    assert_identical(got.frontend, frontend)


def test_the_frontend_holds_no_original_weight_and_nothing_of_the_backend(vit, sent):
    arrays = safetensors.numpy.load(sent[32:])
    weights = {path: np.asarray(leaf) for path, leaf in flatten_dict(vit.params, sep="/").items()}
    for name, array in arrays.items():
        for weight in weights.values():
            assert array.shape != weight.shape or not np.allclose(array, weight)
        if not name.startswith("codes/"):
            assert not np.isin(
                array, np.concatenate([leaf.ravel() for leaf in weights.values()])
            ).any()
            # a scale, or one per channel or head
            assert name.startswith("projection/") or array.size <= 8
    assert {name.removeprefix("codes/") for name, x in arrays.items() if x.dtype == np.int8} == set(
        flatten_dict(vit.front, sep="/")
    )
    assert not any(part in name for name in arrays for part in ("block_2", "head", "codes/norm"))
    assert b"num_classes" not in sent


def test_what_cannot_be_described_is_not_sent(vit, shipment):
    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            pack_frontend(shipment._replace(**changes))

    def with_model(model):
        return Backbone(model, vit.backbone.preprocessing, 2)

    refused(
        "model.dtype must be None",
        backbone=with_model(vit.backbone.model.clone(dtype=jnp.bfloat16)),
    )
    refused(
        "activation must be one of gelu, .* to be sent",
        backbone=with_model(vit.backbone.model.clone(activation=jnp.sin)),
    )

    class Other(ViT):
        pass

    other = Other(
        **{
            name: getattr(vit.backbone.model, name)
            for name in ("num_classes", "patch_size", "depth")
        }
    )
    refused("must be one of ViT, Swin to be sent, got Other", backbone=with_model(other))
    refused(
        "n_patches=17 is more than the 16 patches of a representation. Use at most 16", n_patches=17
    )
    refused("copies must be an integer of at least 0, got -1", copies=-1)
    refused("projection and clip_norm go together", projection=None)
    refused(
        "array 'codes/block_0/.* must be int8 of shape",
        backbone=with_model(vit.backbone.model.clone(mlp_width=5)),
    )
    refused(
        "does not belong there",
        backbone=Backbone(vit.backbone.model, vit.backbone.preprocessing, 1),
    )


def attributes(**changes):
    return lambda fields: {
        "model": {**fields["model"], "attributes": {**fields["model"]["attributes"], **changes}}
    }


def prepared(**changes):
    return lambda fields: {"preprocessing": {**fields["preprocessing"], **changes}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "arrays", "match"),
    [
        (lambda f: {"model": "ViT"}, {}, "model must have the fields 'class' and 'attributes'"),
        (
            lambda f: {"model": {**f["model"], "class": "MLP"}},
            {},
            "must be one of ViT, Swin, got 'MLP'",
        ),
        (
            attributes(secret=1),
            {},
            r"attributes of ViT must be .* Missing or unknown: \['secret'\]",
        ),
        (
            attributes(activation="os.system"),
            {},
            "activation must be one of gelu, .* got 'os.system'",
        ),
        (attributes(activation=[]), {}, r"activation must be one of gelu, .* got \[\]"),
        (attributes(depth=True), {}, "depth must be like 12, got True"),
        (attributes(width=-8), {}, "width must be like 192, got -8"),
        (attributes(patch_size=3), {}, "patch_size must divide the image 8x8, got 3"),
        (attributes(pool="max"), {}, "pool must be 'token', 'mean' or 'token_and_mean', got 'max'"),
        (prepared(size=0), {}, "preprocessing must have positive integer sizes"),
        (
            prepared(mean=0.5),
            {},
            "preprocessing must have positive integer sizes and lists of numbers",
        ),
        (prepared(mean=[], std=[]), {}, "preprocessing must have channels"),
        (prepared(std=[-1.0]), {}, "std must be positive"),
        (lambda f: {"preprocessing": {"size": 8}}, {}, "preprocessing must have the fields"),
        (
            lambda f: attributes(depth=3000)(f) | {"cut": 2999},
            {},
            "the frontend declares 3000 blocks, more than the limit",
        ),
        (
            lambda f: attributes(depth=900)(f) | {"cut": 899},
            {},
            "cut=899 blocks cannot have only .* arrays of codes",
        ),
        (
            attributes(width=10**12),
            {},
            "attribute 'width' of the frontend declares 1000000000000 pixels",
        ),
        (prepared(size=10**6), {}, "preprocessing of the frontend declares 1000000000000 pixels"),
        (
            lambda f: {"copies": 10**9},
            {},
            "the frontend declares 1000000000 copies, more than the limit of 10000",
        ),
        (lambda f: {"cut": 3}, {}, r"cut must be in \[1, 2\] for a model of 3 blocks, got 3"),
        (lambda f: {"bits": 16}, {}, r"bits must be an integer in \[2, 8\], got 16"),
        (lambda f: {"n_patches": 17}, {}, "n_patches=17 is more than the 16 patches"),
        (lambda f: {"clip_norm": None}, {}, "array 'projection/directions' does not belong there"),
        (lambda f: {"clip_norm": -1.0}, {}, "clip_norm must be finite and positive, got -1.0"),
        (None, {"units/embed/kernel": None}, "array 'units/embed/kernel' is missing"),
        (None, {"more": np.zeros(2)}, "array 'more' does not belong there"),
        (
            None,
            {"codes/embed/bias": np.zeros(8, np.int16)},
            "must be int8 of shape .8,., got int16",
        ),
        (
            None,
            {"units/embed/bias": np.zeros(8, np.float32)},
            r"must be float32 of shape \(\), got float32 \(8,\)",
        ),
        (None, {"first/block_1/attention/scores": np.float32([1, 0])}, "scores' must be positive"),
        (
            None,
            {"projection/directions": np.zeros((136, 0), np.float32)},
            "'projection/directions' must be float32",
        ),
    ],
)
def test_what_describes_no_frontend_is_refused(sent, monkeypatch, fields, arrays, match):
    if "declares" in match or "cannot have" in match:  # before anything is traced
        monkeypatch.setattr(exchange, "describe_frontend", None)
    data = changed(
        sent, "frontend", fields(unpack(sent, "frontend").fields) if fields else {}, arrays
    )
    with pytest.raises(
        ValueError,
        match=rf"'frontend' is whole but of no use. Its sender must make another one: .*{match}",
    ):
        unpack_frontend(data)


def test_limits_are_the_readers(sent):
    assert unpack_frontend(sent, limits=Limits(copies=COPIES, blocks=3)).copies == COPIES
    for low in (
        {"copies": COPIES - 1},
        {"blocks": 2},
        {"bytes": 1000},
        {"arrays": 3},
        {"pixels": 63},
    ):
        with pytest.raises(
            ValueError, match=rf"declares \d+ {next(iter(low))}, more than the limit of"
        ):
            unpack_frontend(sent, limits=Limits(**low))


# --- The upload ---------------------------------------------------------------------------------


RELEASE = PrivateRelease(clip_norm=2.0, noise_multiplier=1.5, label_epsilon=1.0, num_classes=3)


def released(vit, shipment, representations, labels):
    with Ledger.in_memory() as ledger:
        ledger.register("images", adjacency="replace_one", unit="image")
        made = release_privately(
            ledger.account("images"),
            release=RELEASE,
            representations=representations,
            labels=labels,
            projection=shipment.projection,
            seed=bytes(16),
        )
    return Private(made, RELEASE)


@pytest.fixture(scope="module")
def uploads(vit, shipment, representations, copies):
    return {
        "published": Uploaded(copies.materialized(), 3),
        "noise_once": NoisyOnce(np.asarray(representations), 3),
        "private": released(vit, shipment, representations, vit.labels),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["published", "noise_once", "private"])
def test_an_upload_comes_back_bit_for_bit(shipment, uploads, mode):
    upload = uploads[mode]
    got = unpack_upload(pack_upload(upload, shipment), shipment)
    assert type(got) is type(upload) and got.num_classes == 3 and exchange.mode_of(got) == mode
    if mode == "private":
        assert got.release == upload.release
        assert_identical(got.released, upload.released)
    else:
        (array,), (sent,) = (
            [x for x in jax.tree.leaves(both) if np.ndim(x)] for both in (got, upload)
        )
        assert_identical(array, sent)


@pytest.mark.slow
def test_materialised_copies_are_those_that_would_be_made(copies, uploads):
    uploaded = uploads["published"]
    images, numbers = copies.index()
    assert_identical(uploaded.index(), (images, numbers))
    np.testing.assert_allclose(
        uploaded.batch(images, numbers), jax.jit(Copies.batch)(copies, images, numbers), rtol=1e-5
    )
    assert uploaded.copies.shape == (1 + COPIES, 9, 17, 8)
    # fresh noise on every number
    assert len(np.unique(uploaded.copies)) > 0.99 * uploaded.copies.size


@pytest.mark.slow
def test_a_private_upload_tells_no_image_and_no_label(vit, shipment, representations):
    count = 900
    rows = np.arange(count) % 9
    labels = vit.labels[rows]
    # Without the shuffling of `release_privately`, so that rows can be compared.
    made = RELEASE.release(
        noise.stream(bytes(16), "test"),
        representations[rows],
        labels=labels,
        projection=shipment.projection,
    )
    _, fields, arrays = unpack(pack_upload(Private(made, RELEASE), shipment), "upload")
    assert set(fields) == {
        "mode",
        "frontend",
        "clip_norm",
        "noise_multiplier",
        "label_epsilon",
        "num_classes",
        "mechanism",
    }
    assert {name: x.shape for name, x in arrays.items()} == {
        "features": (count, DIRECTIONS),
        "labels": (count,),
    }
    exact = np.asarray(project(shipment.projection, representations[rows]))
    clipped = exact * np.minimum(1, 2 / np.linalg.norm(exact, axis=1, keepdims=True))
    for secret in (vit.images, representations, exact):
        assert not np.isin(arrays["features"], secret).any()
    # 3600 times noise of standard deviation 1.5 x 2; five of its own standard deviations either
    # side.
    assert abs(np.std(arrays["features"] - clipped) / 3 - 1) < 5 / np.sqrt(2 * count * DIRECTIONS)
    # Randomised response keeps e / (e + 2) of the labels; five standard deviations either side.
    keeps = np.e / (np.e + 2)
    assert abs((arrays["labels"] == labels).mean() - keeps) < 5 * np.sqrt(
        keeps * (1 - keeps) / count
    )


@pytest.mark.slow
def test_uploads_that_do_not_fit_are_neither_sent_nor_taken(vit, shipment, uploads):
    published, once, private = uploads.values()
    x = once.representations

    def refused(match, upload, to=shipment):
        with pytest.raises(ValueError, match=match):
            pack_upload(upload, to)

    refused(
        "one image has no neighbours, which must give 4 patches of its copies", NoisyOnce(x[:1], 3)
    )
    refused("the client has no image", NoisyOnce(x[:0], 3))
    refused("num_classes must be an integer of at least 2, got 1", NoisyOnce(x, 1))
    refused(
        "the upload declares 1000000000000 num_classes, more than the limit of 1000000",
        NoisyOnce(x, 10**12),
    )
    refused(
        r"'representations' must be float32 of shape \(9, 17, 8\), got float32 \(9, 16, 8\)",
        NoisyOnce(x[:, 1:], 3),
    )
    refused(r"'copies' must be float32 of shape \(3, 9, 17, 8\)", Uploaded(published.copies[1:], 3))
    refused(
        "NaN or infinite values in 'representations'",
        NoisyOnce(np.where(x == x[0, 0, 0], np.nan, x), 3),
    )
    refused(
        "mode='private' needs a frontend with a projection",
        private,
        shipment._replace(projection=None, clip_norm=None),
    )
    outside = private.released._replace(labels=np.full(9, 3, np.int32))
    refused(r"labels must be in \[0, 3\)", Private(outside, private.release))
    exact = PrivateRelease(clip_norm=2.0, noise_multiplier=0.0, label_epsilon=1.0, num_classes=3)
    refused(
        "noise_multiplier of a private upload must be finite and positive, got 0.0",
        Private(private.released, exact),
    )
    wide = dataclasses.replace(RELEASE, num_classes=2**16)
    refused(
        "the label noise of a private upload declares 34359738368 bytes, more than the limit",
        Private(private.released, wide),
    )
    one = pack_upload(NoisyOnce(x[:1], 3), shipment._replace(n_patches=0))  # needs no neighbours
    with pytest.raises(ValueError, match="the package was made with another frontend"):
        unpack_upload(one, shipment)
    # released ones may lack a class
    every = private.released._replace(labels=np.arange(9, dtype=np.int32) % 3)
    sent = pack_upload(Private(every, private.release), shipment)
    for fields in ({"mode": "raw"}, {"num_classes": 2}, {"mechanism": "none"}):
        with pytest.raises(ValueError, match="'upload' is whole but of no use"):
            unpack_upload(changed(sent, "upload", fields), shipment)


def test_queries_come_back_also_if_there_are_none(shipment, representations):
    for x in (representations, representations[:0]):
        np.testing.assert_array_equal(unpack_queries(pack_queries(x, shipment), shipment), x)
    with pytest.raises(ValueError, match="made with another frontend"):
        unpack_queries(pack_queries(representations, shipment), shipment._replace(copies=1))
    with pytest.raises(
        ValueError, match=r"'representations' must be float32 of shape \(9, 17, 8\)"
    ):
        pack_queries(representations[:, 1:], shipment)


# --- The client's loss --------------------------------------------------------------------------


def test_gradients_are_those_of_the_cross_entropy(vit):
    logits, images = np.random.default_rng(0).normal(0, 3, (4, 3)), np.array([0, 8, 3, 3])

    def cross_entropy(moved):
        return np.log(np.exp(moved).sum(1)) - moved[np.arange(4), vit.labels[images]]

    steps = 1e-6 * np.eye(3)
    wanted = [
        (cross_entropy(logits + step) - cross_entropy(logits - step)) / 2e-6 for step in steps
    ]
    got = loss_gradients(vit.labels, 3)(logits.astype(np.float32), images)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.stack(wanted, 1), atol=1e-6)
    # which is why it protects no label
    np.testing.assert_array_equal(got.argmin(1), vit.labels[images])


def test_impossible_questions_are_refused(vit):
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\)"):
        loss_gradients(vit.labels, 2)
    client = loss_gradients(vit.labels, 3)
    with pytest.raises(
        ValueError, match=r"logits must be finite and \[B, 3\], one row per image, got \(2, 4\)"
    ):
        client(np.zeros((2, 4)), np.zeros(2, int))
    with pytest.raises(ValueError, match=r"images must be integers in \[0, 9\)"):
        client(np.zeros((2, 3)), np.array([0, 9]))


OPTIONS = {"num_classes": 3, "learning_rate": 3e-3, "epochs": 2, "batch_size": 6}


@pytest.fixture(scope="module")
def adapted(vit, uploads):
    uploaded = jax.device_put(uploads["published"])
    return adapt(KEY, vit.backbone, vit.back, uploaded, jnp.asarray(vit.labels), **OPTIONS)


def assert_same_model(one, other, representations):
    np.testing.assert_allclose(
        one.logits(representations), other.logits(representations), atol=2e-4
    )
    both = (flatten_dict(x.back, sep="/") for x in (one, other))
    first, second = both
    for path, leaf in first.items():
        # to which softmax is blind: its gradient is rounding, which Adam makes large
        if not path.endswith("key/bias"):
            np.testing.assert_allclose(leaf, second[path], atol=1e-4, err_msg=path)


@pytest.mark.slow
def test_adapting_by_the_client_is_adapting(vit, representations, copies, adapted):
    asked = []

    def gradients(logits, images):
        asked.append(images)
        return loss_gradients(vit.labels, 3)(logits, images)

    stepwise = adapt_by_client(KEY, vit.backbone, vit.back, copies, gradients, **OPTIONS)
    assert_same_model(stepwise, adapted, representations)
    assert [len(rows) for rows in asked] == [
        6
    ] * 10  # 27 copies: five batches in each of two epochs
    assert (
        np.abs(np.asarray(adapted.back["norm"]["scale"] - vit.back["norm"]["scale"])).max() > 1e-2
    )


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [np.zeros((6, 2)), np.full((6, 3), np.nan)], ids=["shape", "nan"])
def test_a_wrong_answer_stops_the_server(vit, copies, wrong):
    with pytest.raises(
        ValueError, match=r"gradients must be finite and \[6, 3\], one row per row of logits"
    ):
        adapt_by_client(
            KEY, vit.backbone, vit.back, copies, lambda logits, images: wrong, **OPTIONS
        )


def test_impossible_steps_are_refused(vit, copies):
    for name, value, bound in (
        ("learning_rate", 0, "positive"),
        ("epochs", 0, "positive"),
        ("batch_size", 0, "positive"),
        ("patience", 1, "0"),  # the server sees no loss
    ):
        with pytest.raises(ValueError, match=f"{name} must be {bound}, got {value}"):
            adapt_by_client(
                KEY,
                vit.backbone,
                vit.back,
                copies,
                lambda logits, images: logits,
                **{**OPTIONS, name: value},
            )
