"""Optimised strategies of correlated noise, and what a plan says that they gain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.matrix_factorization import toeplitz
from scipy import linalg

import jaxdp
from jaxdp.data import FixedOrderSampler
from jaxdp.finetune import optimal_noise, plan_correlated
from jaxdp.privacy import GaussianDpEvent
from jaxdp.privacy.events import composition
from launch.command import main

# Three epochs of six steps, as in the plan below, which shares the optimised bands.
SAMPLER = FixedOrderSampler(60, 10)
STEPS = 18


@pytest.mark.slow
def test_the_number_of_bands_is_the_best_that_participations_allow():
    best = optimal_noise(SAMPLER, steps=STEPS)
    assert (best.participations, best.min_separation) == (3, 6)
    errors = {
        bands: optimal_noise(SAMPLER, steps=STEPS, bands=bands).error().mean() for bands in (1, 2)
    }
    assert best.error().mean() < errors[2] < errors[1]
    assert best.error().mean() < 0.8 * errors[1]
    assert best.buffers + 1 == 6
    # The number of jax_privacy, for a sensitivity of sqrt(3) times the largest column.
    with jax.enable_x64(True):
        theirs = float(toeplitz.loss(jnp.asarray(best.strategy.bands), STEPS))
    assert best.error().mean() == pytest.approx(3 * theirs, rel=1e-9)


@pytest.mark.slow
def test_the_inverse_square_root_has_its_bands_in_the_inverse():
    noise = optimal_noise(SAMPLER, steps=STEPS, strategy="bisr", bands=3)
    # 1 / sqrt(1 - x) is the generating function of C, sqrt(1 - x) that of its inverse.
    assert noise.strategy.bands == pytest.approx((1.0, -0.5, -0.125))
    assert noise.buffers == 2
    one = optimal_noise(SAMPLER, steps=STEPS, bands=1)
    best = optimal_noise(SAMPLER, steps=STEPS, strategy="bisr")
    assert best.error().mean() < 0.8 * one.error().mean()


@pytest.mark.slow
def test_a_plan_costs_its_target_and_compares_equal_budgets(capsys, monkeypatch):
    steps = STEPS
    target = {"epsilon": 4.0, "delta": 1e-5}
    plan = plan_correlated(records=60, batch_size=10, steps=steps, **target)
    assert 3.99 < jaxdp.privacy.epsilon(plan.event, delta=1e-5) <= 4.0
    # At this epsilon two groups amplify more than they lose by few bands.
    assert (plan.sampler.cycle_length, plan.bands) == (2, 2)
    assert plan.sampler.expected_batch_size == 10
    (sampled,) = composition(plan.event)
    assert sampled.sampling_probability == pytest.approx(1 / 3)
    # The error by hand: rows of C^-1 are summed, and each has the noise multiplier.
    inverse = np.linalg.inv(linalg.toeplitz(plan.noise.column, np.zeros(steps)))
    errors = np.square(np.cumsum(inverse, axis=0)).sum(axis=1)
    assert plan.error == pytest.approx(plan.noise_multiplier * np.sqrt(errors.mean()), rel=1e-6)
    assert plan.error < min(plan.fixed_order_error, plan.dp_sgd_error)
    # k participations of independent rows cost sqrt(k) of one. 1, ..., T have mean (T + 1) / 2.
    multiplier = jaxdp.privacy.calibrate_noise(GaussianDpEvent, **target)
    independent = multiplier * np.sqrt(3) * np.sqrt((steps + 1) / 2)
    assert plan.unamplified_error == pytest.approx(independent, rel=1e-6)
    assert plan.fixed_order_error < plan.unamplified_error
    of_command = {"records": 60, "batch_size": 10, "steps": steps, "adjacency": "add_remove"}

    def planned(**arguments):
        assert arguments == of_command | target
        return plan

    monkeypatch.setattr(jaxdp.finetune, "plan_correlated", planned)
    words = ["--records", "60", "--batch-size", "10", "--steps", "18", "--epsilon", "4"]
    main(["plan", *words, "--delta", "1e-5", "--correlated"])
    printed = capsys.readouterr().out
    assert f"{plan.noise_multiplier:.6g}" in printed and "gain over DP-SGD" in printed
    assert "cyclic Poisson: each of 60 records is in one of 2 groups" in " ".join(printed.split())


def test_what_a_plan_lacks_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--records", "40", "--delta", "1e-5", "--steps", "8", "--correlated"])
    assert "Missing: ['batch-size', 'epsilon']" in capsys.readouterr().err


def test_wrong_strategies():
    with pytest.raises(ValueError, match=r"strategy must be one of \['banded', 'bisr', 'blt'\]"):
        optimal_noise(SAMPLER, steps=STEPS, strategy="dense")
    with pytest.raises(ValueError, match="bands must be at least 1, got 0"):
        optimal_noise(SAMPLER, steps=STEPS, bands=0)
