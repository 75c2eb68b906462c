"""SlaClip: slots of the slack, the clip norm that follows them, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import data, finetune
from jaxdp.finetune.sla_clip import slots_of
from jaxdp.privacy import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

CLIP, K, N, Q = 0.8, 5, 24, 0.5
_random = np.random.default_rng(5)
DIRECTIONS = _random.normal(size=(N, 3))
DIRECTIONS /= np.linalg.norm(DIRECTIONS, axis=1, keepdims=True)
NORMS = np.concatenate([[0.0, CLIP, 100.0], np.linspace(0.01, 1.5, N - 3)])
X = DIRECTIONS * NORMS[:, None]


def source_of(x=X):
    return data.from_arrays(features=x.astype(np.float32))


def loss(params, example):
    return jnp.vdot(params["w"], example["features"])


def trainer_of(**options):
    given = {"clip_norm": CLIP, "noise_multiplier": 1.0, "slots": K, "physical_batch_size": 8}
    given["sampler"] = data.PoissonSampler(N, Q)
    return finetune.sla_clip(loss, optax.sgd(0.1), **given | options)


TRAINER = trainer_of()


@pytest.fixture(scope="module")
def state():
    return TRAINER.init({"w": jnp.zeros(3)})


def slots64(norms):
    """Equations 7 and 8 by a loop, over C: whole slots first, then the rest."""
    rows = []
    for norm in norms:
        capacity = CLIP / math.sqrt(K)
        scaled = math.sqrt(K) * max(CLIP - norm, 0)
        whole = min(K, math.floor(scaled / capacity + 1e-12))
        rest = [scaled - whole * capacity] if whole < K else []
        rows.append(([capacity] * whole + rest + [0] * K)[:K])
    return np.array(rows) / CLIP


def test_sums_equal_float64(state):
    total = TRAINER.sums(state, source_of(), np.arange(N))
    np.testing.assert_allclose(total.slots, slots64(NORMS).sum(0), atol=1e-4)
    scale = np.minimum(1, CLIP / np.maximum(NORMS, 1e-30))[:, None]
    np.testing.assert_allclose(total.grads["w"], (X * scale / CLIP).sum(0), atol=1e-5)
    # Seven rows are padding here, and an empty batch is nothing.
    one = TRAINER.sums(state, source_of(), np.array([0]))
    np.testing.assert_allclose(one.slots, np.full(K, 1 / math.sqrt(K)), rtol=1e-6)
    nothing = TRAINER.zeros(state.params)
    assert not any(np.abs(leaf).max() for leaf in jax.tree.leaves(nothing))


def test_no_example_contributes_more_than_one_norm(state):
    lengths = []
    for row in range(N):
        total = TRAINER.sums(state, source_of(), np.array([row]))
        lengths.append(math.hypot(np.linalg.norm(total.grads["w"]), np.linalg.norm(total.slots)))
    assert max(lengths) <= 1 + 1e-6
    assert lengths[:3] == pytest.approx([1, 1, 1], rel=1e-5)
    # A broken twin: slots as large as the clip norm.
    large = np.hypot(
        np.minimum(NORMS / CLIP, 1), math.sqrt(K) * np.linalg.norm(slots64(NORMS), axis=1)
    )
    assert large.max() > 2


def test_the_clip_norm_follows_the_published_rule(state):
    for shares in ([0.2, 0, 0, 0, 0.4], [0.9, 0.8, 0.5, 0.2, -0.3], [9.0] * K, [-90.0] * K):
        mean = TRAINER.zeros(state.params)
        mean = mean._replace(slots=jnp.asarray(shares) / math.sqrt(K))
        _, updated, metrics = TRAINER.query.read(state.params, state.carried, mean)
        near_zero = min(1, max(0, shares[-1] / CLIP))
        target = 1 - (1 - near_zero) / 2
        expected = CLIP * math.exp(0.5 * (target - shares[0]))
        assert float(updated) == pytest.approx(min(50.0, max(0.1, expected)), rel=1e-5)
        assert float(metrics["clip_norm"]) == pytest.approx(CLIP)


def test_slots_hold_the_noise_of_the_step(state):
    """Over many keys: every slot has the deviation z, and not 0.7 or 1.3 of it."""
    zeros = TRAINER.zeros(state.params)
    keys = jax.random.split(jax.random.key(0), 400)

    def slots(key):
        noisy, _ = TRAINER.privatizer.update(zeros, state.noise._replace(key=key))
        return noisy.slots * TRAINER.privatizer.divisor

    drawn = np.stack([slots(key) for key in _typed(keys, state)])
    variance = drawn.var()
    error = math.sqrt(2 / drawn.size)
    assert abs(variance - 1) < 5 * error
    assert abs(variance - 0.7**2) > 5 * error < abs(variance - 1.3**2)


def _typed(keys, state):
    data_of = jax.random.key_data(state.noise.key)
    impl = jax.random.key_impl(state.noise.key)
    rng = np.random.default_rng(1)
    words = rng.integers(2**32, size=(len(keys), *data_of.shape), dtype=np.uint32)
    return [jax.random.wrap_key_data(jnp.asarray(word), impl=impl) for word in words]


def test_a_step_costs_what_dp_sgd_costs():
    step = PoissonSampledDpEvent(Q, GaussianDpEvent(1.0))
    assert TRAINER.event(0, 7) == SelfComposedDpEvent(step, 7)
    found = [slots_of(batch, 1.0) for batch in (128, 256, 512, 1024, 2048)]
    assert found == [8, 13, 21, 34, 54]  # as the authors' program has them
    assert slots_of(1, 5.0) == 1
    assert trainer_of(slots=None).query.slots == slots_of(N * Q, 1.0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"clip_norm": 60.0}, r"clip_norm must be in clip_range=\(0.1, 50.0\), got 60"),
        ({"clip_range": (1.0, 0.5)}, "clip_norm must be in clip_range"),
        ({"clip_range": (0.0, 5.0)}, r"clip_range\[0\] must be between"),
        ({"clip_learning_rate": 0.0}, r"clip_learning_rate must be in \(0, 100\]"),
        ({"slots": 0}, "slots must be at least 1"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be positive"),
        ({"clip_rule": "automatic"}, "clip_rule must be 'global' for SlaClip"),
    ],
)
def test_wrong_options_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        trainer_of(**options)


def test_parts_are_refused():
    with pytest.raises(TypeError, match="clip_norm must be one number, got dict"):
        trainer_of(clip_norm={"w": 1.0})
