"""AdpAlloc: schedules against their formulas, what is added and charged in each epoch, and the
calibrated run."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from jaxdp import data, finetune
from jaxdp.finetune.adp_alloc import schedule_event
from jaxdp.privacy import GaussianDpEvent, Ledger, epsilon
from jaxdp.privacy.events import composition
from jaxdp.transforms.noise import PrivatizeState, privatize

N, CLIP = 40, 1.5

# Each schedule with its formula, in float64 and in the order of the docstring of `adp_alloc`.
SCHEDULES = {
    "constant": (finetune.constant_noise(), lambda s, t: s),
    "time": (finetune.time_based_noise(0.0285), lambda s, t: s / (1 + 0.0285 * t)),
    "step": (finetune.step_noise(0.6, 10), lambda s, t: s * np.power(0.6, np.floor(t / 10))),
    "short steps": (finetune.step_noise(0.99, 1), lambda s, t: s * np.power(0.99, t)),
    "exponential": (finetune.exponential_noise(0.01), lambda s, t: s * np.exp(-0.01 * t)),
    "fast": (finetune.exponential_noise(0.03), lambda s, t: s * np.exp(-0.03 * t)),
    "polynomial": (
        finetune.polynomial_noise(2.0, 3.0, 100),
        lambda s, t: (s - 2) * np.maximum(1 - t / 100, 0) ** 3 + 2,
    ),
    "root": (
        finetune.polynomial_noise(0.5, 0.9549, 60),
        lambda s, t: (s - 0.5) * np.maximum(1 - t / 60, 0) ** 0.9549 + 0.5,
    ),
}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def nothing(params, example):
    return 0.0 * params["w"].sum() * example["label"]


def trainer_of(sampler, schedule, noise_multiplier, **kwargs):
    arguments = {"clip_norm": CLIP, "physical_batch_size": 8, "loss_fn": nothing, **kwargs}
    loss_fn = arguments.pop("loss_fn")
    return finetune.adp_alloc(
        loss_fn,
        optax.sgd(1.0),
        sampler=sampler,
        schedule=schedule,
        noise_multiplier=noise_multiplier,
        **arguments,
    )


def gaussians(sigmas, q):
    """The charge of one Poisson-sampled step per noise multiplier, {event: times}."""
    steps = [dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(float(s))) for s in sigmas]
    return composition(dp_event.ComposedDpEvent(steps))


def multipliers(event):
    """{noise multiplier: steps} of a composition of sampled Gaussians."""
    return {step.event.noise_multiplier: count for step, count in composition(event).items()}


@every_schedule
def test_schedules_are_the_formulas(name):
    schedule, formula = SCHEDULES[name]
    epochs = np.arange(200)
    np.testing.assert_allclose(
        [schedule(10.34, int(t)) for t in epochs], formula(10.34, epochs + 0.0), rtol=1e-12
    )
    # DPMLBench's time-based schedule rises.
    assert (np.diff([schedule(10.34, int(t)) for t in epochs]) <= 0).all()


def noise_at(steps, noise_multiplier):
    """Return one noise value per step, as a compiled step adds it; the same normals for every noise
    multiplier."""
    privatizer = privatize(1.0, noise_multiplier=noise_multiplier, divisor=1.0)
    key = jax.random.key(0)
    added = jax.jit(jax.vmap(lambda t: privatizer.update(jnp.zeros(()), PrivatizeState(key, t))[0]))
    return np.asarray(added(jnp.asarray(steps, jnp.int32)), np.float64)


@functools.cache
def normals(steps):
    return noise_at(steps, 1.0)


def claimed(privatizer, step):
    """Return the noise multiplier that a step claims; 0 where float32 has no such noise, and there
    is no event."""
    try:
        return privatizer.event_at(step).noise_multiplier
    except ValueError as error:
        assert "float32 noise needs a standard deviation" in str(error)
        return 0.0


@pytest.mark.slow
@every_schedule
def test_the_noise_added_is_never_less_than_what_is_charged(name):
    schedule, _ = SCHEDULES[name]
    length, epochs = 7, np.concatenate([np.arange(1200), 100 * np.arange(12, 20)])
    trainer = trainer_of(data.PoissonSampler(N, 1 / length), schedule, 10.34)
    steps = epochs * length + length - 1
    charged = np.array([claimed(trainer.privatizer, int(t)) for t in steps])
    added, normal = (
        noise_at(steps, trainer.privatizer.noise_multiplier),
        normals(tuple(steps.tolist())),
    )
    meaningful = charged > 1e-20
    ratio = added[meaningful] / normal[meaningful] / charged[meaningful]
    assert ratio.min() >= 1
    assert ratio.max() < 1 + 3e-5
    assert len(ratio) > 900


def noise_of_epochs(epochs=3, length=3, size=20_000):
    """Return the noise [epochs * length, size] of a run of zero gradients, over what the schedule
    asks for."""
    sampler = data.PoissonSampler(N, 0.35)  # ceil(1 / 0.35) = 3 steps
    trainer = trainer_of(sampler, finetune.exponential_noise(0.5), 3.0)
    state, source = trainer.init({"w": jnp.zeros(size)}), digits_like()
    noises = []
    for step in range(epochs * length):
        before = np.asarray(state.params["w"], np.float64)
        state, _ = trainer.step(state, source)
        sigma = 3.0 * math.exp(-0.5 * (step // length))
        noises.append(
            (before - np.asarray(state.params["w"], np.float64)) * 0.35 * N / (sigma * CLIP)
        )
    return np.stack(noises)


def digits_like():
    return data.from_arrays(
        features=np.zeros((N, 1), np.float32), label=np.arange(N) % 2, num_classes=2
    )


@pytest.mark.slow
def test_the_noise_of_every_epoch_has_its_own_scale_and_wrong_scales_are_rejected():
    # Parameters of size 1 hold the last epoch's noise to 1e-7; failing a right variance has
    # probability below 1e-6.
    def right(sample):
        return abs((sample**2).mean() - 1) < 4.9 * math.sqrt(2 / sample.size)

    noises = noise_of_epochs()
    assert all(map(right, noises))
    assert np.abs(np.corrcoef(noises) - np.eye(len(noises))).max() < 5.2 / math.sqrt(
        noises.shape[1]
    )
    for scale in (0.7, 1.3):
        assert not any(map(right, scale * noises))


@every_schedule
def test_each_step_is_charged_the_noise_of_its_epoch(name):
    schedule, formula = SCHEDULES[name]
    q, steps = 0.3, 4 * 12 + 2  # an epoch is four steps; the last one is cut short
    trainer = trainer_of(data.PoissonSampler(N, q), schedule, 2.5)
    expected = {}
    for step in range(steps):
        sigma = float(formula(2.5, float(step // 4)))
        expected[sigma] = expected.get(sigma, 0) + 1
    for event in (
        trainer.event(0, steps),
        schedule_event(schedule, 2.5, data.PoissonSampler(N, q), steps),
    ):
        found = multipliers(event)
        assert sum(found.values()) == steps
        for sigma, count in expected.items():
            near = sum(c for s, c in found.items() if s == pytest.approx(sigma, rel=1e-12))
            assert (
                near
                == sum(c for s, c in expected.items() if s == pytest.approx(sigma, rel=1e-12))
                >= count
            )
    assert composition(trainer.event(3, 5)) == gaussians([schedule(2.5, 0), schedule(2.5, 1)], q)


@pytest.mark.parametrize("size", [*range(2, 110), 196, 197, 392])
def test_an_epoch_is_the_steps_in_which_every_example_is_expected_once(size):
    # 1 / (1 / 49) is above 49 in float64.
    sampler = data.PoissonSampler(size, 1 / size)
    found = multipliers(schedule_event(finetune.step_noise(0.5, 1), 1.0, sampler, size + 1))
    assert found == {1.0: size, 0.5: 1}


def test_an_epoch_of_a_broken_number_of_steps_is_rounded_up():
    sampler = data.PoissonSampler(50_000, 256 / 50_000)
    assert multipliers(schedule_event(finetune.step_noise(0.5, 1), 1.0, sampler, 197)) == {
        1.0: 196,
        0.5: 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "batch", "steps", "sigma_0", "last", "target", "loss"),
    [
        (50_000, 1000, 5000, 10.34, 3.84, 1.0, 0.914),  # CIFAR-10
    ],
)
def test_known_runs(size, batch, steps, sigma_0, last, target, loss):
    """100 epochs with k = 0.01 at delta 1e-5: sigma_0 by RDP, and the tighter epsilon by PLD."""
    event = schedule_event(
        finetune.exponential_noise(0.01), sigma_0, data.PoissonSampler(size, batch / size), steps
    )
    assert len(multipliers(event)) == 100
    assert min(multipliers(event)) == pytest.approx(last, abs=0.006)
    assert epsilon(event, delta=1e-5, method="rdp") == pytest.approx(target, abs=2e-3)
    assert epsilon(event, delta=1e-5) == pytest.approx(loss, abs=2e-3)


@pytest.mark.slow
def test_a_calibrated_run_meets_its_target_and_less_noise_does_not():
    schedule, q, steps, target = finetune.polynomial_noise(9.0, 2.0, 2), 0.25, 4 * 3, 1.2
    sampler = data.PoissonSampler(N, q)
    sigma_0 = finetune.calibrate_schedule(
        schedule, sampler, steps=steps, epsilon=target, delta=1e-5
    )

    def cost(sigma_0):
        accountant = PLDAccountant()
        for epoch in range(steps // 4):
            sigma = (sigma_0 - 9) * (1 - epoch / 2) ** 2 + 9
            accountant.compose(
                dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma)), 4
            )
        return accountant.get_epsilon(1e-5)

    run = trainer_of(sampler, schedule, sigma_0).event(0, steps)
    assert target * 0.999 < epsilon(run, delta=1e-5) <= target
    assert cost(sigma_0) == pytest.approx(target, rel=2e-3)
    assert cost(0.99 * sigma_0) > target * 1.001


def test_calibration_by_renyi_divergences_asks_for_more_noise():
    sampler, schedule = data.PoissonSampler(N, 1.0), finetune.exponential_noise(0.3)
    arguments = {"steps": 4, "epsilon": 1.0, "delta": 1e-5}
    rdp = finetune.calibrate_schedule(schedule, sampler, method="rdp", **arguments)
    pld = finetune.calibrate_schedule(schedule, sampler, **arguments)
    assert 1.02 * pld < rdp < 1.2 * pld
    other = finetune.calibrate_schedule(schedule, sampler, adjacency="replace_one", **arguments)
    assert other == pytest.approx(2 * pld, rel=1e-3)


# --- What cannot be -----------------------------------------------------------------------------


@pytest.mark.slow
def test_epsilon_below_what_the_schedule_reaches_says_what_it_reaches():
    q, schedule, sampler = 0.2, finetune.polynomial_noise(1.0, 2.0, 2), data.PoissonSampler(N, 0.2)
    arguments = {"steps": 20, "delta": 1e-5}
    with pytest.raises(ValueError, match="is out of reach") as caught:
        finetune.calibrate_schedule(schedule, sampler, epsilon=0.5, **arguments)
    message = str(caught.value)
    reachable = float(re.search(r"costs at least ([\d.]+)", message)[1])
    # Epochs 2 and 3 have noise 1 whatever sigma_0 is, epochs 0 and 1 cost nothing in the limit.
    accountant = PLDAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(1.0)), 10)
    assert reachable == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert "a noise multiplier of 1," in message
    sigma_0 = finetune.calibrate_schedule(schedule, sampler, epsilon=1.01 * reachable, **arguments)
    event = schedule_event(schedule, sigma_0, sampler, 20)
    assert epsilon(event, delta=1e-5) <= 1.01 * reachable


def test_an_error_about_what_else_the_target_pays_does_not_blame_the_schedule():
    arguments = {"epsilon": 1.0, "delta": 1e-5, "steps": 4, "besides": GaussianDpEvent(0.5)}
    with pytest.raises(ValueError, match="Some do not depend on it") as caught:
        finetune.calibrate_schedule(
            finetune.constant_noise(), data.PoissonSampler(N, 0.2), **arguments
        )
    cost = float(re.search(r"still cost ([\d.]+)\.", str(caught.value))[1])
    assert cost == pytest.approx(epsilon(GaussianDpEvent(0.5), delta=1e-5), rel=1e-3)


@pytest.mark.parametrize("truncated", [None, 30])
def test_a_schedule_that_turns_negative_is_no_privacy(truncated):
    def falling(sigma_0, epoch):
        return sigma_0 - 1.0 * epoch

    sampler = data.PoissonSampler(N, 0.5, truncated_batch_size=truncated)
    trainer = trainer_of(sampler, falling, 1.5)
    assert composition(trainer.event(0, 4)) == composition(schedule_event(falling, 1.5, sampler, 4))
    with pytest.raises(ValueError, match=r"noise_multiplier\(4\) must be at least 0, got -0.5"):
        trainer.event(0, 5)
    for steps in (5, 7):
        assert epsilon(schedule_event(falling, 1.5, sampler, steps), delta=1e-5) == math.inf
    # no noise at all
    assert epsilon(schedule_event(falling, 1.0, sampler, 3), delta=1e-5) == math.inf


@pytest.mark.slow
def test_calibration_keeps_noise_in_every_epoch():
    def falling(sigma_0, epoch):
        return sigma_0 - 1.0 * epoch

    sigma_0 = finetune.calibrate_schedule(
        falling, data.PoissonSampler(N, 1.0), steps=3, epsilon=3.0, delta=1e-5, method="rdp"
    )
    assert sigma_0 > 3.3  # 2.77 would do for the first two of the three epochs


@pytest.mark.parametrize(
    "schedule", [lambda s, t: -s, lambda s, t: math.nan * s, lambda s, t: 0.0 * s]
)
def test_a_schedule_without_noise_cannot_be_calibrated(schedule):
    with pytest.raises(ValueError, match="is out of reach"):
        finetune.calibrate_schedule(
            schedule, data.PoissonSampler(N, 0.5), steps=6, epsilon=3.0, delta=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: finetune.time_based_noise(-0.1), "rate must be finite and at least 0.*got -0.1"),
        (lambda: finetune.time_based_noise(math.inf), "rate must be finite"),
        (lambda: finetune.exponential_noise(-1.0), "rate must be finite and at least 0"),
        (lambda: finetune.exponential_noise(math.nan), "rate must be finite"),
        (lambda: finetune.step_noise(1.5, 10), r"factor must be in \(0, 1\].*got 1.5"),
        (lambda: finetune.step_noise(0.0, 10), r"factor must be in \(0, 1\]"),
        (lambda: finetune.step_noise(0.5, 0), "period must be at least 1 epoch, got 0"),
        (lambda: finetune.polynomial_noise(0.0, 1.0, 10), "end must be finite and positive"),
        (
            lambda: finetune.polynomial_noise(-1.0, 1.0, 10),
            "end must be finite and positive.*got -1",
        ),
        (lambda: finetune.polynomial_noise(1.0, 0.0, 10), "power must be in"),
        (lambda: finetune.polynomial_noise(1.0, 1.0, 0), "period must be at least 1 epoch"),
        (
            lambda: trainer_of(data.PoissonSampler(N, 0.5), finetune.constant_noise(), 0.0),
            "noise_multiplier must be",
        ),
        (
            lambda: trainer_of(data.PoissonSampler(N, 0.5), finetune.constant_noise(), -1.0),
            "noise_multiplier must be",
        ),
        (
            lambda: trainer_of(data.PoissonSampler(N, 0.5), finetune.constant_noise(), math.nan),
            "noise_multiplier",
        ),
    ],
)
def test_impossible_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def run_of(noise_multiplier, steps, **options):
    """Runs `fit` on all examples in every step. Returns the trainer, its account and a function
    that starts it."""
    trainer = finetune.dp_sgd(
        nothing,
        optax.sgd(1.0),
        clip_norm=CLIP,
        noise_multiplier=noise_multiplier,
        sampler=data.PoissonSampler(N, 1.0),
        physical_batch_size=8,
    )
    ledger = Ledger.in_memory()
    ledger.register("digits", adjacency="add_remove", unit="example", epsilon=100.0, delta=1e-5)
    account = ledger.account("digits")
    run = functools.partial(
        finetune.fit,
        trainer,
        {"w": jnp.zeros(2)},
        digits_like(),
        steps=steps,
        account=account,
        progress=False,
        **options,
    )
    return trainer, account, run


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([2.0, 2.0, 0.0].__getitem__, r"noise_multiplier\(2\) must be positive, got 0.0"),
        ([2.0, -1.0, 2.0].__getitem__, r"noise_multiplier\(1\) must be at least 0, got -1.0"),
        ([2.0, 2.0, math.inf].__getitem__, r"noise_multiplier\(2\) must be finite, got inf"),
    ],
)
def test_a_run_with_a_step_without_noise_is_refused_before_it_is_paid(schedule, message):
    _, account, run = run_of(schedule, 3)
    with pytest.raises(ValueError, match=message):
        run()
    assert account.epsilon() == 0


@pytest.mark.slow
def test_fit_evaluates_a_schedule_once_for_each_step_of_the_run():
    calls = []

    def schedule(step):
        calls.append(step)
        return [3.0, 2.0, 1.5][step] + len(calls)  # would differ if charge and noise asked twice

    _, account, run = run_of(schedule, 3, checkpoint_every=2)
    run()
    assert calls == [0, 1, 2]
    charged = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(x) for x in (4.0, 4.0, 4.5)])
    assert account.epsilon() == pytest.approx(epsilon(charged, delta=1e-5), rel=1e-6)


@pytest.mark.slow
def test_a_step_far_into_a_schedule_adds_what_is_charged():
    trainer, _, _ = run_of(lambda step: 1 + step**2 / 1e10, 1)  # int32 overflows from step 46,341
    state, size = trainer.init({"w": jnp.zeros(20_000)}), 20_000
    at = jnp.int32(60_000)
    after, _ = trainer.step(
        state._replace(step=at, noise=state.noise._replace(step=at)), digits_like()
    )
    claimed = trainer.privatizer.event_at(60_000).noise_multiplier
    found = np.std(np.asarray(after.params["w"], np.float64)) * N / CLIP
    assert claimed == pytest.approx(1.36) and abs(found / claimed - 1) < 5 / math.sqrt(2 * size)
    with pytest.raises(ValueError, match="step must be below 65536, got 65536"):
        trainer.step(state._replace(step=jnp.int32(2**16)), digits_like())
