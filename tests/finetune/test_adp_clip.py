"""AdpClip: one example's contribution, steps in float64, noise on both parts, the quantile, and the
charge."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import dp_event

from jaxdp import data, finetune
from jaxdp.privacy import epsilon
from jaxdp.privacy.events import composition
from jaxdp.transforms import noise
from tests.finetune.batches import flat, has_std, of_many_parts_or_none, with_batches

N, FEATURES, PHYSICAL = 40, 5, 4


def source_of(features):
    return data.from_arrays(
        features=np.asarray(features, np.float32), label=np.zeros(len(features), int), num_classes=2
    )


def features_of(n=N, seed=0):
    """Return features whose norms spread over two orders of magnitude."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, FEATURES)) * np.exp(rng.normal(size=(n, 1)))


def linear(params, example):
    """Return a loss whose gradient is the example's features."""
    return example["features"][:3] @ params["head"] + example["features"][3:] @ params["tail"]


def params_of():
    return {"head": jnp.ones(3), "tail": jnp.zeros(2)}


def trainer_of(sampler, loss_fn=linear, optimizer=None, **kwargs):
    defaults = {
        "clip_norm": 1.5,
        "noise_multiplier": 0.7,
        "physical_batch_size": PHYSICAL,
        "engine": "vmap",
    }
    return finetune.adp_clip(
        loss_fn, optimizer or optax.sgd(0.5), sampler=sampler, **{**defaults, **kwargs}
    )


def keyed(state, number=0):
    return state._replace(
        noise=state.noise._replace(key=noise.stream(bytes([number] * 16), "test"))
    )


# --- Sensitivity --------------------------------------------------------------------------------

AWKWARD = [
    np.zeros(FEATURES),
    np.full(FEATURES, np.nan),
    np.array([np.inf, 0, 0, 0, 0]),
    np.array([1, 1, 1, 1, -np.inf]),
    *(
        10.0**k * np.array([1.0, -2, 3, 0, 1e-3])
        for k in (-42, -30, -20, -12, -8, -3, 0, 3, 8, 17, 18, 19, 20, 30, 38)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("count_noise", [0.351, 2.0, 1e6])
def test_one_example_contributes_at_most_a_vector_of_norm_one(count_noise):
    query = trainer_of(data.PoissonSampler(N, 0.2), count_noise=count_noise).query
    sums = jax.jit(query.sums)
    rng = np.random.default_rng(0)
    examples = [*AWKWARD, *features_of(20, seed=1)]
    norms = []
    for clip_norm in (1e-8, 1e-3, 1.5, 1e4, 1e8):
        for number, example in enumerate(examples):
            # Its companions are masked, and as bad as examples get.
            batch = np.stack([AWKWARD[rng.integers(len(AWKWARD))] for _ in range(PHYSICAL)]).astype(
                np.float32
            )
            batch[number % PHYSICAL] = example
            mask = np.arange(PHYSICAL) == number % PHYSICAL
            out = sums(params_of(), jnp.float32(clip_norm), {"features": batch}, mask, None).total
            norm = np.linalg.norm(flat(out))
            assert norm <= 1 + 1e-5, (clip_norm, example)
            norms.append(norm)
            below = np.linalg.norm(example) <= clip_norm
            assert float(out.below) == pytest.approx(
                (1 if below else -1) * query.count_weight, rel=1e-6
            )
    assert max(norms) > 1 - 1e-5  # and nothing is wasted


PARTS = {"head": 1.5, "tail": 0.25}


@pytest.mark.slow
def test_parts_contribute_at_most_a_vector_of_norm_one_and_each_follows_its_quantile():
    z, sigma_b, rate, quantile = 0.7, 1.1, 0.3, 0.6
    query = trainer_of(
        data.PoissonSampler(N, 0.2),
        clip_norm=PARTS,
        noise_multiplier=z,
        count_noise=sigma_b,
        quantile=quantile,
        clip_learning_rate=rate,
        unit_norm=False,
    ).query
    compiled = jax.jit(query.sums)
    sums = lambda *arguments: compiled(*arguments).total  # noqa: E731
    carried = query.init(params_of())
    norms = []
    for example in [*AWKWARD, *features_of(20, seed=1)]:
        batch = np.stack([example] * PHYSICAL).astype(np.float32)
        one = np.arange(PHYSICAL) == 1
        norms.append(
            np.linalg.norm(flat(sums(params_of(), carried, {"features": batch}, one, None)))
        )
        assert norms[-1] <= 1 + 1e-5, example
    assert max(norms) > 1 - 1e-5

    features = features_of(PHYSICAL)
    out = sums(params_of(), carried, {"features": features}, np.ones(PHYSICAL, bool), None)
    mean = jax.tree.map(lambda x: x / PHYSICAL, out)
    gradient, after, metrics = query.read(params_of(), carried, mean)
    cuts = {"head": features[:, :3], "tail": features[:, 3:]}
    for number, (part, clip) in enumerate(PARTS.items()):
        lengths = np.linalg.norm(cuts[part], axis=1)
        expected = (cuts[part] * np.minimum(1, clip / lengths)[:, None]).mean(0)
        np.testing.assert_allclose(gradient[part], expected, rtol=1e-5)
        fraction = (lengths <= clip).mean()
        np.testing.assert_allclose(
            after[number], clip * np.exp(-rate * (fraction - quantile)), rtol=1e-5
        )
        np.testing.assert_allclose(metrics[f"fraction_below {part}"], fraction, rtol=1e-5)
    # What a twin that pays for one count only would contribute.
    unpaid = math.sqrt(1 - query.count_weight**2) ** 2 + 2 * query.count_weight**2
    assert unpaid > 1.05


def test_counts_that_use_up_the_budget_are_refused():
    sampler = data.PoissonSampler(N, 0.2)
    with pytest.raises(ValueError, match="2 counts alone use up"):
        trainer_of(sampler, clip_norm=PARTS, noise_multiplier=1.0, count_noise=0.6)
    trainer_of(sampler, noise_multiplier=1.0, count_noise=0.6)


# --- Steps --------------------------------------------------------------------------------------


@pytest.mark.slow
# Several physical batches, and batches that are often empty.
@pytest.mark.parametrize(("probability", "unit_norm"), [(0.35, True), (0.35, False), (0.03, True)])
def test_steps_equal_float64(probability, unit_norm):
    z, sigma_b, quantile, rate, lr = 0.7, 1.1, 0.6, 0.3, 0.5
    features = features_of()
    features[3], features[7] = np.nan, np.inf
    trainer = trainer_of(
        data.PoissonSampler(N, probability),
        noise_multiplier=z,
        count_noise=sigma_b,
        quantile=quantile,
        clip_learning_rate=rate,
        unit_norm=unit_norm,
        optimizer=optax.sgd(lr),
    )

    suits = of_many_parts_or_none(probability, PHYSICAL)
    state = with_batches(trainer, trainer.init(params_of()), 8, suits)
    source, expected_batch = source_of(features), probability * N
    z_delta = (z**-2 - (2 * sigma_b) ** -2) ** -0.5
    clip_norm, params, taken = 1.5, flat(state.params), []
    for step in range(8):
        key, indices = state.noise.key, trainer.drawn(state)
        state, metrics = trainer.step(state, source)
        taken.append(indices)
        # The noise that the trainer draws, which has standard deviation z on contributions of norm
        # 1.
        shapes = (params_of(), jnp.float32(0))
        drawn, count_drawn = noise.gaussian(key, shapes, 1.0, number=step)
        total, below = z_delta * clip_norm * flat(drawn), sigma_b * float(count_drawn)
        for i in indices:
            norm = np.linalg.norm(features[i])
            if np.isfinite(norm):
                total += features[i] * min(1, clip_norm / norm)
            below += (norm <= clip_norm) - 0.5
        fraction = min(max(below / expected_batch + 0.5, 0), 1)
        params = params - lr * total / expected_batch / (clip_norm if unit_norm else 1)
        assert float(metrics["clip_norm"]) == pytest.approx(clip_norm, rel=1e-5)
        assert float(metrics["fraction_below"]) == pytest.approx(fraction, rel=1e-4, abs=1e-5)
        clip_norm *= math.exp(-rate * (fraction - quantile))  # from the next step on
        assert float(state.carried) == pytest.approx(clip_norm, rel=1e-5)
        np.testing.assert_allclose(flat(state.params), params, rtol=1e-4, atol=1e-5)
    assert suits(taken)


@pytest.mark.slow
def test_with_unit_norm_the_scale_of_the_loss_is_no_learning_rate():
    factor = 10.0

    def steps(scale, unit_norm):
        def loss(params, example):
            return scale * linear(params, example)

        trainer = trainer_of(
            data.PoissonSampler(N, 0.3), loss, clip_norm=1.5 * scale, unit_norm=unit_norm
        )
        state, updates = keyed(trainer.init(params_of())), []
        for _ in range(4):
            before = flat(state.params)
            state, _ = trainer.step(state, source_of(features_of()))
            updates.append(flat(state.params) - before)
        return np.stack(updates), float(state.carried)

    (plain, clip_norm), (scaled, scaled_norm) = steps(1.0, True), steps(factor, True)
    np.testing.assert_allclose(scaled, plain, rtol=1e-3, atol=1e-5)
    assert scaled_norm == pytest.approx(factor * clip_norm, rel=1e-4)
    published, _ = steps(factor, False)
    np.testing.assert_allclose(
        published, factor * steps(1.0, False)[0], rtol=1e-3, atol=1e-5 * factor
    )


@pytest.mark.slow
@pytest.mark.parametrize(("quantile", "start"), [(0.5, 50.0), (0.8, 0.05)])
def test_the_clip_norm_finds_the_quantile_through_the_noise(quantile, start):
    n, steps = 400, 70
    features = features_of(n)
    norms = np.linalg.norm(features, axis=1)
    trainer = trainer_of(
        data.PoissonSampler(n, 0.5),
        clip_norm=start,
        quantile=quantile,
        clip_learning_rate=0.3,
        noise_multiplier=3.0,
        count_noise=10.0,  # one twentieth of 200, as Andrew et al.
        physical_batch_size=256,
    )
    state, source, tail = keyed(trainer.init(params_of()), 1), source_of(features), []
    for step in range(steps):
        state, _ = trainer.step(state, source)
        if step >= 45:
            tail.append(math.log(float(state.carried)))
    found = (norms <= math.exp(np.mean(tail))).mean()
    assert found == pytest.approx(quantile, abs=0.04)
    assert np.std(tail) > 1e-3  # it is the noisy count that it follows


@pytest.mark.slow
def test_the_clip_norm_stays_where_float32_can_divide_by_it():
    source, lost = source_of(1e6 * features_of()), source_of(0 * features_of())
    for start, examples, quantile, end in ((1e7, source, 1.0, 1e8), (1e-7, lost, 0.0, 1e-8)):
        kwargs = {
            "clip_norm": start,
            "clip_learning_rate": 100.0,
            "quantile": quantile,
            "count_noise": 1.0,
        }
        trainer = trainer_of(data.PoissonSampler(N, 0.2), **kwargs)
        state = keyed(trainer.init(params_of()))
        for _ in range(6):
            state, metrics = trainer.step(state, examples)
            assert 1e-8 * (1 - 1e-6) <= float(state.carried) <= 1e8
            assert np.isfinite(flat((state.params, metrics))).all()
        assert float(state.carried) == pytest.approx(end, rel=1e-6)


# --- Noise and charge ---------------------------------------------------------------------------


def noises(z, draws=20_000, **kwargs):
    """Return ([draws, 5] gradient noise, [draws] noise of the fraction) of steps whose batch is
    empty."""
    trainer = trainer_of(
        data.PoissonSampler(N, 0.5), optimizer=optax.sgd(1.0), noise_multiplier=z, **kwargs
    )
    state = keyed(trainer.init(params_of()))

    def step(key):
        after, metrics = trainer.update(
            state._replace(noise=state.noise._replace(key=key)), trainer.zeros(params_of())
        )
        change = jax.tree.map(lambda old, new: old - new, state.params, after.params)
        return jnp.concatenate(jax.tree.leaves(change)), metrics["fraction_below"] - 0.5

    gradient, fraction = jax.jit(jax.vmap(step))(jax.random.split(state.noise.key, draws))
    return np.asarray(gradient, np.float64), np.asarray(fraction, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("unit_norm", "z"), [(True, 1.3), (False, 0.9)])
def test_both_parts_have_the_noise_of_the_formula_and_wrong_scales_are_rejected(unit_norm, z):
    sigma_b, clip_norm, batch = 0.9, 2.5, 0.5 * N
    kwargs = {"count_noise": sigma_b, "unit_norm": unit_norm, "clip_norm": clip_norm}
    z_delta = z / math.sqrt(1 - (z / 1.8) ** 2)
    assert z**-2 == pytest.approx(z_delta**-2 + (2 * sigma_b) ** -2)
    gradient_std = z_delta * (1 if unit_norm else clip_norm) / batch
    gradient, fraction = noises(z, **kwargs)
    assert has_std(gradient, gradient_std)
    assert has_std(fraction, sigma_b / batch)
    both = np.corrcoef(np.concatenate([gradient, fraction[:, None]], axis=1).T)
    assert np.abs(both - np.eye(6)).max() < 5.2 / math.sqrt(len(gradient))
    for scale in (0.7, 1.3):
        assert not has_std(scale * gradient, gradient_std)
        assert not has_std(scale * fraction, sigma_b / batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "z", "inflation", "uncentred"),
    [
        (256, 1.02, 0.0008, None),
        (256, 2.77, 0.0059, None),
        (64, 2.45, 0.082, 2.04),
        (32, 2.45, 0.55, 1.48),
    ],
)
def test_gradient_and_count_together_are_charged_the_multiplier_that_was_asked_for(
    batch, z, inflation, uncentred
):
    """The default count noise B / 20; two public implementations charge or add something else."""
    n = 10 * batch
    trainer = trainer_of(
        data.PoissonSampler(n, 0.1), noise_multiplier=z, physical_batch_size=1, unit_norm=False
    )
    query, clip_norm, sigma_b = trainer.query, 1.5, batch / 20
    z_delta = z / query.gradient_weight
    assert z_delta == pytest.approx((1 + inflation) * z, rel=0.004)
    assert composition(trainer.event(0, 7)) == {
        dp_event.PoissonSampledDpEvent(
            0.1, dp_event.GaussianDpEvent(z)
        ): 7  # not the z_delta of Opacus before 1.6
    }
    # What one example moves, in the units in which it is released, over the noise there.
    batch = {"features": np.full((1, FEATURES), 9, np.float32)}
    out = query.sums(params_of(), jnp.float32(clip_norm), batch, jnp.array([True]), None).total
    gradient, count = np.linalg.norm(flat(out.grads)), abs(float(out.below))
    released, fraction = (
        clip_norm * gradient / query.gradient_weight,
        count / (2 * query.count_weight),
    )
    assert released == pytest.approx(clip_norm, rel=1e-5)
    assert fraction == pytest.approx(0.5, rel=1e-5)
    privacy = (released / (z_delta * clip_norm)) ** 2 + (fraction / sigma_b) ** 2
    assert privacy**-0.5 == pytest.approx(z, rel=1e-5)
    if uncentred is not None:  # the same noise with an indicator that moves the count by one
        assert (z_delta**-2 + sigma_b**-2) ** -0.5 == pytest.approx(uncentred, abs=0.006)


def test_charging_the_noise_of_the_gradient_would_promise_too_much():
    trainer = trainer_of(data.PoissonSampler(320, 0.1), noise_multiplier=2.45)
    larger = dp_event.PoissonSampledDpEvent(
        0.1, dp_event.GaussianDpEvent(2.45 / trainer.query.gradient_weight)
    )
    right = epsilon(trainer.event(0, 100), delta=1e-5, method="rdp")
    assert right > 1.5 * epsilon(
        dp_event.SelfComposedDpEvent(larger, 100), delta=1e-5, method="rdp"
    )


# --- What cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"noise_multiplier": 0.8},
            r"above noise_multiplier / 2 = 0.4, got 0.4: .*above 8 \(now 8\)",
        ),
        ({"noise_multiplier": 5.0, "count_noise": 2.5}, "uses up the budget of a step"),
        ({"noise_multiplier": 5.0, "count_noise": 2.0}, "Raise count_noise"),
        ({"count_noise": math.inf}, r"count_noise must be finite .* got inf"),
        ({"count_noise": math.nan}, r"count_noise must be finite .* got nan"),
        ({"count_noise": -1.0}, r"count_noise must be finite .* got -1"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be positive and finite"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be positive and finite"),
        ({"noise_multiplier": lambda step: 1.0}, "noise_multiplier must be positive and finite"),
        ({"clip_norm": 0.0}, "clip_norm must be between"),
        ({"clip_norm": 1e-40}, "clip_norm must be between 1e-08 and 1e.08"),
        ({"clip_norm": 1e300}, "clip_norm must be between"),
        ({"clip_norm": math.nan}, "clip_norm must be between"),
        ({"quantile": 1.1}, r"quantile must be in \[0, 1\], got 1.1"),
        ({"quantile": math.nan}, "quantile must be"),
        ({"clip_learning_rate": 0.0}, "clip_learning_rate must be"),
        ({"clip_learning_rate": 1e300}, r"clip_learning_rate must be in \(0, 100\]"),
        ({"physical_batch_size": 0}, "physical_batch_size must be at least 1"),
    ],
)
def test_impossible_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(data.PoissonSampler(N, 0.2), **{"noise_multiplier": 0.5, **change})


@pytest.mark.slow
def test_what_the_refusal_asks_for_is_enough():
    trainer_of(data.PoissonSampler(N, 0.2), noise_multiplier=5.0, count_noise=2.51)
    trainer_of(data.PoissonSampler(N, 0.21), noise_multiplier=0.8)
