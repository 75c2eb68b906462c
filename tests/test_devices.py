"""Every engine, method and stage on a GPU: what it computes there is what it computes on the CPU of
the same machine.

`pytest tests/test_devices.py` runs all of it where JAX finds a GPU. Elsewhere the cheap ones run on
the CPU, so that they do not rot. Noise is drawn from known keys, so equal bits of noise are part of
what is compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import models, prediction, pretrain, recalibration, split, tta
from jaxdp.split import baselines
from jaxdp.transforms import losses, noise
from tests.finetune import test_methods as finetuning

SEED = bytes(range(16))
KEY = jax.random.key(3, impl="threefry2x32")


def images(n, side=8, channels=1, seed=0):
    drawn = np.random.default_rng(seed).random((n, side, side, channels))
    return jax.device_put(drawn.astype(np.float32))


@functools.cache
def initial(name, **options):
    model = models.create(name, num_classes=4, **options)
    return model, jax.device_get(jax.jit(model.init)(jax.random.key(0), images(1))["params"])


def network(name, **options):
    """A model, and parameters that are the same on every device."""
    model, params = initial(name, **options)
    return model, jax.device_put(params)


TRANSFORMER = {"patch_size": 4, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}


def engine(name, dtype=None):
    """Clipped gradients of convolutions, or of a language model with LoRA in a scan and a tied
    embedding."""
    if dtype is None:
        model, params = network("cnn", widths=(4,), dense=0)
        batch = {"x": images(5), "label": jnp.arange(5) % 4}

        def loss(params, example):
            return losses.softmax_cross_entropy(
                model.apply({"params": params}, example["x"][None])[0], example["label"]
            )
    else:
        sizes = {"positions": 8, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
        model = models.create("lm_tiny", num_classes=11, dtype=dtype, remat=True, **sizes)
        public = models.Pretrained(
            model, model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"], None
        )
        tuned = models.with_lora(public, rank=2, seed=0)
        params, batch = (
            tuned.params,
            jnp.asarray(np.random.default_rng(1).integers(11, size=(5, 9)), jnp.int32),
        )

        def loss(params, row):
            return losses.next_token(tuned.apply_fn(params, row[None, :-1])[0], row[1:])

    out = jaxdp.clipped_grad(loss, clip_norm=0.1, engine=name)(params, batch)
    return out.grads, out.norms


def finetuned(name):
    trainer = finetuning.trainer_of(name, engine="auto")
    state, _ = trainer.step(finetuning.keyed(trainer), finetuning.source_of())
    return state.params


def pretrained(name):
    model, params = network("mlp", hidden=(6,))

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["image"])
        return jax.vmap(losses.softmax_cross_entropy)(logits, batch["label"]).mean()

    trainer = pretrain.METHODS[name](loss, optax.sgd(0.1))
    batch = {"image": images(8), "label": jnp.arange(8) % 4}
    state = trainer.init(params)
    return trainer.step(state, batch, batch)[0].params


def adapted(name):
    model, params = network("vit_tiny", **TRANSFORMER)
    made = {"Tent": lambda: tta.Tent(), "COME": lambda: tta.COME(tta.Tent(), 4)}
    method = tta.private(
        made.get(name, lambda: tta.METHODS[name](4))(), clip_norm=1.0, noise_multiplier=1.0
    )
    adapter = tta.Adapter(
        lambda p, x: model.apply({"params": p}, x), params, method, optax.sgd(0.1)
    )
    state, logits = adapter.step(adapter.init(noise.stream(SEED, "test")), images(6))
    return state.params, logits


@functools.cache
def records():
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.float32)}


def answered(name):
    """Answers of a mechanism on certificates of a logistic regression, which are sound on both
    devices."""

    def loss(params, record):
        return losses.sigmoid_cross_entropy(record["x"] @ params, record["y"])

    ks = 4 if prediction.METHODS[name].certified else 1
    how = {"ks": ks, "clip": 0.5, "learning_rate": 0.5, "batch_size": 24, "epochs": 2}
    bounds = prediction.train_with_bounds(loss, jnp.zeros(3), records(), **how)
    ledger = jaxdp.Ledger.in_memory()
    ledger.register("rows", adjacency="add_remove", unit="row", delta=1e-5)
    ask = {"account": ledger.account("rows"), "epsilon": 1.0, "mechanism": name, "seed": SEED}
    if prediction.METHODS[name].kind == "values":
        return prediction.private_values(
            bounds, lambda p, x: x @ p, records()["x"], output_range=(-3.0, 3.0), **ask
        )
    return prediction.private_predict(bounds, lambda p, x: (x @ p)[None], records()["x"], **ask)


def recalibrated(name):
    rng = np.random.default_rng(0)
    sources = [
        (rng.normal(size=(9, 3)).astype(np.float32), rng.integers(3, size=9)) for _ in range(3)
    ]
    method = recalibration.METHODS[name]()
    return recalibration.recalibrate(
        method, sources, epsilon=1.0, key=noise.stream(SEED, "test")
    ).apply(sources[0][0])


def divided(name):
    # offsite tuning drops a block
    model, params = network("vit_tiny", **{**TRANSFORMER, "depth": 3})
    backbone = split.Backbone(model, models.Preprocessing(size=8, mean=(0.3,), std=(0.4,)), cut=1)
    front, _ = backbone.divide(params)
    own, labels = images(6), np.arange(6) % 4
    if name in baselines.BASELINES:
        how = {"num_classes": 4, "learning_rate": 1e-2, "epochs": 1, "key": KEY}
        return baselines.adapt(
            baselines.BASELINES[name], backbone, params, own, labels, **how
        ).params
    represented = jax.jit(backbone.front)(front, own)
    if name == "sa_private":
        ledger = jaxdp.Ledger.in_memory()
        ledger.register("images", adjacency="replace_one", unit="image", delta=1e-5)
        projection = split.public_projection(jax.jit(backbone.front)(front, images(12, seed=1)), 3)
        release = split.PrivateRelease.calibrated(
            epsilon=8.0, delta=1e-5, clip_norm=4.0, num_classes=4
        )
        data = {"representations": represented, "labels": labels, "projection": projection}
        return split.release_privately(
            ledger.account("images"), release=release, **data, seed=SEED
        ).features
    copies = split.METHODS[name](
        KEY, represented, laplace_scale=1.0, copies=2, n_patches=0, prefix_tokens=1
    )
    return copies.batch(*copies.index())


def bounded():
    """Bounds of a network over a box of parameters. They hold the points that the CPU computes."""
    model, params = initial("mlp", hidden=(6,))
    box = jax.tree.map(lambda x: jaxdp.Interval(x - 0.01, x + 0.01), params)
    bounds_of = jax.jit(jaxdp.interval(lambda p, x: model.apply({"params": p}, x)))
    found = bounds_of(box, images(2))
    return found.lower, found.upper


def drawn(draw):
    kind = jnp.int32 if draw is noise.discrete_laplace else jnp.float32
    return draw(noise.stream(SEED, "test"), jnp.zeros(1000, kind), 3.0)


CHECKS = {
    **{
        f"engine {name}": functools.partial(engine, name)
        for name in ("auto", "bookkeeping", "vmap")
    },
    **{
        f"engine {name}, LoRA": functools.partial(engine, name, jnp.float32)
        for name in ("auto", "bookkeeping")
    },
    **{f"finetune {name}": functools.partial(finetuned, name) for name in finetuning.METHODS},
    **{f"pretrain {name}": functools.partial(pretrained, name) for name in pretrain.METHODS},
    **{f"tta {name}": functools.partial(adapted, name) for name in tta.METHODS},
    **{f"prediction {name}": functools.partial(answered, name) for name in prediction.METHODS},
    **{
        f"recalibration {name}": functools.partial(recalibrated, name)
        for name in recalibration.METHODS
    },
    **{f"split {name}": functools.partial(divided, name) for name in split.METHODS},
    "intervals": bounded,
    **{
        f"noise {draw.__name__}": functools.partial(drawn, draw)
        for draw in (noise.gaussian, noise.laplace)
    },
    **{
        f"noise {draw.__name__}": functools.partial(drawn, draw)
        for draw in (noise.discrete_laplace, noise.cauchy)
    },
}
# Checks that take little time elsewhere.
HERE = (
    "engine auto",
    "finetune dp_sgd",
    "pretrain sam",
    "prediction global_laplace",
    "intervals",
    "noise gaussian",
)


def on(kind, compute):
    with (
        jax.default_device(jax.local_devices(backend=kind)[0]),
        jax.default_matmul_precision("highest"),
    ):
        return jax.device_get(compute())


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_the_checks_run(name):
    found = [np.asarray(x) for x in jax.tree.leaves(on("cpu", CHECKS[name]))]
    assert found and all(np.isfinite(x).all() for x in found) and any(np.ptp(x) > 0 for x in found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_computes_what_the_cpu_does(name):
    ours, theirs = on("gpu", CHECKS[name]), on("cpu", CHECKS[name])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "bookkeeping", "vmap"])
def test_sums_are_float32_and_clipped_in_bfloat16_on_a_gpu(name):
    grads, norms = on("gpu", functools.partial(engine, name, jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves((grads, norms))} == {np.dtype("float32")}
    total = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(grads)))
    assert 0 < total <= 5 * 0.1 * (1 + 1e-4)


def test_every_stage_is_checked():
    stages = {
        "engine",
        "finetune",
        "pretrain",
        "tta",
        "prediction",
        "recalibration",
        "split",
        "intervals",
        "noise",
    }
    assert {name.split()[0] for name in CHECKS} == stages and set(HERE) < set(CHECKS)
