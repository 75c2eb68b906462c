"""Runs that would drop many examples, or all, spend nothing."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import data, finetune
from jaxdp.privacy import Ledger

N = 120
SAMPLER = data.PoissonSampler(N, 0.2)


def linear(params, example):
    return jnp.vdot(params["w"], example["x"]) ** 2 / 2 - params["w"].sum()


@functools.cache  # Each compiles its own programs.
def trainer_of(loss, rate):
    return finetune.dp_sgd(
        loss,
        optax.sgd(rate),
        sampler=SAMPLER,
        clip_norm=1.0,
        noise_multiplier=2.0,
        physical_batch_size=N,
    )


def fit(bad, loss=linear, steps=2, rate=0.1, **options):
    """Returns the epsilon of a run on N records, of which `bad` hold NaN, or its error."""
    x = np.ones((N, 2), np.float32)
    x[:bad, 1] = np.nan
    source = data.from_arrays(x=x, y=np.zeros(N, np.int32))
    ledger = Ledger.in_memory()
    ledger.register("a", adjacency="add_remove", unit="example", delta=1e-5)
    trainer = trainer_of(loss, rate)
    error = None
    try:
        params = {"w": jnp.ones(2)}
        account = ledger.account("a")
        finetune.fit(
            trainer, params, source, steps=steps, account=account, progress=False, **options
        )
    except ValueError as raised:
        error = str(raised)
    return ledger.epsilon("a"), error


# The warning of the counts by column comes first.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "options", "starts"),
    [(12, {}, True), (13, {}, False), (13, {"allow_nonfinite": True}, True)],
)
def test_a_run_that_drops_more_than_a_tenth_needs_a_word(bad, options, starts):
    with pytest.warns(UserWarning, match=f"{bad} of the first 120 examples") as warned:
        epsilon, error = fit(bad, **options)
    assert f"({bad} in 'x')" in str(warned[0].message)
    assert (epsilon > 0) == starts == (error is None) == (len(warned) == 2)
    if not starts:
        assert "13 of the first 120" in error and "allow_nonfinite=True" in error


@pytest.mark.slow
def test_a_loss_that_is_never_finite_never_spends():
    def loss(params, example):
        return jnp.log(-1 - jnp.square(params["w"]).sum()) + example["x"].sum()

    epsilon, error = fit(0, loss, allow_nonfinite=True)
    assert epsilon == 0 and "any of the first 120 examples" in error
    assert fit(0)[0] > 0


@pytest.mark.slow
def test_parameters_that_diverge_stop_the_next_chunk():
    once, _ = fit(0, steps=1)
    epsilon, error = fit(0, steps=3, rate=np.inf, checkpoint_every=1)
    assert epsilon == pytest.approx(once) and "params after step 1" in error
    assert "smaller learning rate" in error


def test_counts_are_those_of_the_columns():
    x = np.zeros((1500, 2, 2))
    x[[3, 1200], 0, 1] = np.nan
    y = np.zeros(1500, np.float32)
    y[[3, 4, 5]] = np.inf
    source = data.from_arrays(x=x, y=y, z=np.arange(1500))
    assert data.count_not_finite(source) == (1000, 3, {"x": 1, "y": 3})
    assert data.count_not_finite(source.take(np.arange(6, 900))).examples == 0
    owners = data.by_group(source, np.arange(1500) // 2, max_records=2)
    assert data.count_not_finite(owners) == (750, 3, {"x": 2, "y": 2})
    with pytest.warns(UserWarning, match="1 in 'x', 3 in 'y'"):
        data.check_source(source)


def test_images_of_integers_are_not_decoded():
    class Images:
        reads = 0

        def __len__(self):
            return 50

        def __getitem__(self, row):
            self.reads += 1
            return {"image": np.zeros((4, 4), np.uint8), "label": 0}

    images = Images()
    data.check_source(data.from_grain(images))
    assert images.reads <= 4
