"""What trains from public parameters names a leaf that is not finite before it spends or computes
anything."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import finetune, prediction, pretrain, tta
from jaxdp.data import PoissonSampler, from_arrays
from jaxdp.models.training import fit_public
from jaxdp.privacy import Ledger
from jaxdp.transforms.parameters import check_finite, not_finite
from jaxdp.tta.serving import serve
from jaxdp.tta.streams import Batch

N = 8
FEATURES = np.linspace(-1, 1, 3 * N, dtype=np.float32).reshape(N, 3)
SOURCE = from_arrays(features=FEATURES, label=np.arange(N) % 2, num_classes=2)


def params(value):
    return {
        "dense": {"bias": jnp.array([0.0, value]), "kernel": jnp.ones((3, 2))},
        "steps": jnp.int32(0),
    }


def trained(value):
    return {"dense": params(value)["dense"]}


def predict(params, inputs):
    return inputs @ params["dense"]["kernel"] + params["dense"]["bias"][None]


def loss(params, example):
    return jaxdp.losses.softmax_cross_entropy(
        predict(params, example["features"][None])[0], example["label"]
    )


def with_fit(value, account):
    sampler = PoissonSampler(num_examples=N, sampling_probability=0.5)
    trainer = finetune.dp_sgd(
        loss, optax.sgd(0.1), clip_norm=1.0, noise_multiplier=1.0, sampler=sampler, unit="example"
    )
    finetune.fit(trainer, trained(value), SOURCE, steps=1, account=account, progress=False)


def with_charged_accuracy(value, account):
    finetune.charged_accuracy(predict, params(value), SOURCE, account=account, noise_multiplier=1.0)


def with_pretraining(value, account):
    trainer = pretrain.sam(
        lambda params, batch: jax.vmap(loss, (None, 0))(params, batch).mean(), optax.sgd(0.1)
    )
    how = {
        "perturbation_batch_size": 4,
        "update_batch_size": 4,
        "shared_batch": True,
        "seed": bytes(16),
    }
    pretrain.fit(trainer, trained(value), SOURCE, steps=1, progress=False, **how)


def with_public_training(value, account):
    fit_public(loss, trained(value), SOURCE, optax.sgd(0.1), steps=1, batch_size=2, seed=bytes(16))


def with_certified_training(value, account):
    data = {"features": FEATURES, "label": np.arange(N) % 2}
    prediction.train_with_bounds(
        loss, trained(value), data, ks=1, clip=0.1, learning_rate=0.1, batch_size=N, epochs=1
    )


def with_serving(value, account):
    class Adapter:
        accumulate, method = 1, object()

        def init(self):
            return tta.AdaptState(*[None] * len(tta.AdaptState._fields))._replace(
                params=trained(value), step=0
            )

    names = {"domains": ("d",), "positions": np.zeros(1, int), "units": (0,)}
    batch = Batch(
        images=FEATURES[:1], labels=np.zeros(1, int), mask=np.ones(1, bool), reset=False, **names
    )
    serve(Adapter(), [batch], account=None)


RUNS = [
    with_fit,
    with_charged_accuracy,
    with_pretraining,
    with_public_training,
    with_certified_training,
    with_serving,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_leaf_that_is_not_finite_is_named_and_nothing_is_spent(run, value):
    with Ledger.in_memory() as ledger:
        ledger.register("data", adjacency="add_remove", unit="example", delta=1e-3)
        with pytest.raises(
            ValueError,
            match=r"params.* has NaN or infinite values in 'dense/bias'|params leaf dense/bias",
        ):
            run(value, ledger.account("data"))
        assert ledger.events("data") == {}


@pytest.mark.slow
def test_a_check_of_the_model_names_the_leaf():
    found = jaxdp.check(loss, trained(np.nan), SOURCE[0])
    assert not found.ok
    assert any(
        "NaN or infinite values in 'dense/bias'" in finding.message for finding in found.findings
    )


def test_leaves_of_every_kind():
    values = {
        "bfloat16": jnp.array([1.0, jnp.inf], jnp.bfloat16),
        "complex": np.array([1j * np.nan]),
        "float64": np.array([1e300]),
        "integer": np.array([2**31 - 1]),
        "key": jax.random.key(0),
        "setting": 0.5,
        "empty": np.zeros((0, 3)),
    }
    assert not_finite(values) == ["bfloat16", "complex"]
    check_finite({"w": jnp.ones(3)})
    with pytest.raises(
        ValueError,
        match="params of the server has NaN or infinite values in '0', '1', '2' and 2 more",
    ):
        check_finite([jnp.full(2, jnp.nan)] * 5, argument="params of the server")
