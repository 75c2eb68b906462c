"""Clips at both ends of the range of floats, under options of XLA that are allowed, and options
that are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import data, finetune, pretrain, split
from jaxdp.release import Till
from jaxdp.transforms import compiler, exact_scaling, noise
from tests import forked, ranges

# All options of XLA's CPU backend that loosen its arithmetic, but still know NaN and infinity.
FAST = (
    "--xla_cpu_enable_fast_math=true",
    "--xla_cpu_fast_math_honor_division=false",
    "--xla_cpu_fast_math_honor_functions=false",
    "--xla_cpu_enable_fast_min_max=true",
)
# JAX has read the variable of this option when it was imported, before the fork.
OPTIMISED = """
import jax, runpy
jax.config.update("jax_disable_most_optimizations", False)
runpy.run_module("tests.ranges", run_name="__main__")
"""
# The others run under fast arithmetic only, and their own tests under the usual one.
QUICK = [name for name in ranges.CLIPS if name.startswith(("rule", "representation"))]


@pytest.mark.parametrize("name", [*QUICK, pytest.param("upload, 1", marks=pytest.mark.slow)])
def test_no_row_exceeds_the_bound_of_a_clip(name):
    assert ranges.excess(*ranges.CLIPS[name]()) == []


@pytest.mark.parametrize("name", ranges.TWINS)
def test_the_table_finds_clips_that_fail_at_an_end_of_the_range(name):
    assert len(ranges.excess(*ranges.TWINS[name]())) > 50


@pytest.mark.slow
def test_clips_and_noise_hold_under_fast_arithmetic():
    environment = {"XLA_FLAGS": " ".join(FAST)}
    process = forked.run(OPTIMISED, modules=forked.STAGES, env=environment)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["noise"] == []
    assert {name for name, rows in found["clips"].items() if rows} == set(ranges.TWINS)


@pytest.mark.slow
def test_noise_of_another_scale_is_found():
    assert list(ranges.wrong_noise()) == []
    for factor in (0.7, 1.3):
        assert len(list(ranges.wrong_noise(factor))) == 9


BROKEN = "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false"


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("", False),
        (" ".join(FAST), False),
        ("--xla_cpu_fast_math_honor_nans=false", False),
        (f"{BROKEN} --xla_cpu_enable_fast_math=false", False),
        (f"{BROKEN} --xla_cpu_fast_math_honor_nans", False),
        (BROKEN, True),
        ("--xla_cpu_enable_fast_math --xla_cpu_fast_math_honor_infs=0", True),
        ("--xla_cpu_enable_fast_math=True   '--xla_cpu_fast_math_honor_infs=False'", True),
    ],
)
def test_options_without_nan_or_infinity_are_refused(monkeypatch, tmp_path, flags, refused):
    file = tmp_path / "flags"
    file.write_text(flags)
    for text in (flags, str(file)):
        monkeypatch.setenv("XLA_FLAGS", text)
        if refused:
            with pytest.raises(
                RuntimeError, match=r"XLA_FLAGS has --xla_cpu_enable_fast_math=true and .*Remove"
            ):
                compiler.check_options()
        else:
            compiler.check_options()


def test_nothing_is_clipped_drawn_or_released_under_refused_options(monkeypatch):
    key = noise.stream(bytes(16), "test")
    calls = [
        lambda: jaxdp.clipped_grad(ranges.loss, clip_norm=1.0)(ranges.PARAMS, ranges.ROWS),
        lambda: split.clip_representation(ranges.ROWS, 1.0),
        lambda: noise.laplace(key, jnp.zeros(3), 1.0),
        Till,
    ]
    monkeypatch.setenv("XLA_FLAGS", BROKEN)
    for call in calls:
        with pytest.raises(RuntimeError, match="XLA_FLAGS"):
            call()


@pytest.mark.parametrize("multiplier", [1e-38, 1e38])
def test_an_accuracy_whose_noise_float32_loses_is_not_paid(multiplier):
    ledger = jaxdp.Ledger.in_memory()
    ledger.register("digits", adjacency="add_remove", unit="example", epsilon=1.0, delta=1e-5)
    source = data.from_arrays(
        features=np.zeros((2, 1), np.float32), label=np.zeros(2, int), num_classes=2
    )
    predict = lambda params, inputs: inputs  # noqa: E731
    with pytest.raises(ValueError, match="float32 noise needs a standard deviation"):
        finetune.charged_accuracy(
            predict, {}, source, account=ledger.account("digits"), noise_multiplier=multiplier
        )
    assert ledger.epsilon("digits") == 0


# --- Units of a power of two --------------------------------------------------------------------


@pytest.mark.slow
def test_units_and_powers_give_the_row_back():
    units, powers = exact_scaling.in_units(ranges.ROWS, 1)
    rows = np.where(np.abs(ranges.ROWS) < 2.0**-126, 0, np.float64(ranges.ROWS))
    normal = ranges.FINITE & (np.abs(rows).max(1) > 0)
    largest = np.abs(units)[normal].max(1)
    assert ((largest >= 1) & (largest < 2)).all()
    # What is below the smallest normal float in units of the largest is zero.
    exact = (np.float64(units) * 2.0 ** np.float64(powers))[normal]
    error = np.abs(exact - rows[normal]) / np.abs(rows[normal]).max(1, keepdims=True)
    assert error.max() <= 2.0**-126
    assert (np.asarray(exact_scaling.finite(ranges.ROWS)) == np.isfinite(ranges.ROWS)).all()


@pytest.mark.slow
def test_a_power_of_two_is_exact_and_ends_at_zero_and_infinity():
    values = np.unique(ranges.ROWS[ranges.FINITE])
    for power in (-300, -127, -1, 0, 1, 127, 300):
        exact = np.where(np.abs(values) < 2.0**-126, 0, np.float64(values)) * 2.0**power
        exact = np.where(np.abs(exact) < 2.0**-126, 0, exact)
        with np.errstate(over="ignore"):
            expected = exact.astype(np.float32)
        np.testing.assert_array_equal(
            exact_scaling.times_power(jnp.asarray(values), jnp.int32(power)), expected
        )


DIRECTION = {"a": np.array([3.0, 0.0], np.float32), "b": np.array([-4.0], np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "ball", "norms"), [("project", "global", (5, 5)), ("normalise", "per_tensor", (3, 4))]
)
def test_the_ascent_of_public_training_ends_in_its_ball(rule, ball, norms):
    trainer = pretrain.dpadapter(
        lambda params, batch: 0.0, optax.sgd(1.0), gamma=1.0, rule=rule, ball=ball
    )
    for size in (1e-30, 1.0, 1e30):
        gradient = jax.tree.map(lambda x, size=size: np.float32(size) * x, DIRECTION)
        moved, _ = trainer.ascend(jax.tree.map(jnp.zeros_like, gradient), gradient)
        for name, norm in zip(DIRECTION, norms, strict=True):
            factor = size if rule == "project" and size < 1 else 1 / norm
            np.testing.assert_allclose(moved[name], DIRECTION[name] * factor, rtol=1e-6)


@pytest.mark.slow
def test_dp_sat_ascends_by_its_radius_along_a_direction_of_any_length():
    sampler = data.PoissonSampler(2, 0.5)
    settings = {
        "clip_norm": 1e8,
        "noise_multiplier": 1.0,
        "ascent_radius": 1.0,
        "physical_batch_size": 1,
    }

    def half_a_square(params, example):
        return 0.5 * sum(jnp.vdot(x, x) for x in jax.tree.leaves(params))

    trainer = finetune.dp_sgd(half_a_square, optax.sgd(1.0), sampler=sampler, **settings)
    source = data.from_arrays(
        features=np.zeros((2, 1), np.float32), label=np.zeros(2, int), num_classes=2
    )
    state = trainer.init(jax.tree.map(jnp.zeros_like, DIRECTION))
    for size in (1e-30, 1.0, 1e30):
        released = jax.tree.map(lambda x, size=size: jnp.float32(size) * x, DIRECTION)
        gradient = trainer.sums(state._replace(released=released), source, np.array([0]))
        jax.tree.map(
            lambda g, x: np.testing.assert_allclose(g, x / 5, rtol=1e-6), gradient, DIRECTION
        )


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-36, 1e38])
def test_neighbors_do_not_depend_on_a_common_factor(size):
    tokens = np.array([[1, 0, 0], [0.9, 0.1, 0], [0, 1, 0.2], [0, 0.8, 0.3]], np.float32)[:, None]
    assert split.retrieve_neighbors(tokens * np.float32(size)).tolist() == [[1, 0, 3, 2]]
