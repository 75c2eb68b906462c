"""Audits of private training: what keeps its promise passes, halved noise and a forgotten clip do not.

Runs have fixed seeds. Over the choice of a seed, a healthy trainer fails with probability below 0.001, the confidence
of its bounds; that broken ones are caught and that much is found fails with probability of about 0.01.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxdp import data, finetune
from jaxdp.audit import finetune as canaries
from jaxdp.finetune.dp_sgd import GradientSum
from jaxdp.privacy import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, epsilon
from jaxdp.transforms import noise

pytestmark = pytest.mark.usefixtures("quick_compilation")
SEED = bytes(range(16))
CLIP, MANY = 0.5, 3000
FULL = epsilon(GaussianDpEvent(1.0), delta=1e-5)


def trainer_of(count, *, sigma=1.0, probability=1.0, loss=canaries.loss, optimizer=None, **options):
    return finetune.dp_sgd(
        loss,
        optimizer or optax.sgd(1.0),
        sampler=data.PoissonSampler(count, probability),
        clip_norm=CLIP,
        noise_multiplier=sigma,
        physical_batch_size=min(count, 500),
        **options,
    )


def one_run(trainer, *, confidence=0.999, steps=1, delta=1e-5, **options):
    params, source = canaries.worst_case(MANY, norm=10 * CLIP)
    terms = {"steps": steps, "delta": delta, "confidence": confidence, "seed": SEED, **options}
    return canaries.one_run(trainer, params, source, **terms)


def multi_run(trainer, *, trials=240, steps=1, delta=1e-5, **options):
    params, source = canaries.worst_case(2, norm=10 * CLIP)
    terms = {"steps": steps, "trials": trials, "delta": delta, "confidence": 0.999, "seed": SEED, **options}
    return canaries.multi_run(trainer, params, source, **terms)


class Unclipped(GradientSum):
    """Sums raw gradients, but says that they are clipped."""

    def sums(self, params, carried, batch, mask, key):
        return jax.tree.map(lambda g: g.sum(0), self.gradient.per_example(params, batch, mask).grads)


def without_clip(trainer):
    return dataclasses.replace(trainer, query=Unclipped(gradient=trainer.query.gradient))


@pytest.fixture
def half_the_noise(monkeypatch):
    monkeypatch.setattr(noise, "gaussian", lambda key, tree, std, draw=noise.gaussian: draw(key, tree, std / 2))


def test_worst_case_gradients_are_orthogonal_and_of_the_norm():
    params, source = canaries.worst_case(3, norm=2.5)
    grads = jax.vmap(jax.grad(canaries.loss), (None, 0))(params, source.gather(np.arange(3)))
    np.testing.assert_array_equal(grads["direction"], 2.5 * np.eye(3))


def test_one_run_passes_and_finds_much_of_epsilon():
    audit = one_run(trainer_of(MANY), claim="gaussian")
    assert audit.upper == pytest.approx(FULL)
    assert 0.3 * audit.upper < audit.lower <= audit.upper
    assert audit.trials == MANY and not audit.violated


def test_one_run_catches_half_the_noise(half_the_noise):
    audit = one_run(trainer_of(MANY), confidence=0.95, claim="gaussian")
    assert audit.violated and audit.upper == pytest.approx(FULL)


@pytest.mark.parametrize("broken", [False, True])
def test_one_run_of_sampled_steps_and_its_forgotten_clip(broken):
    trainer = trainer_of(MANY, probability=0.2)
    audit = one_run(without_clip(trainer) if broken else trainer, steps=4, delta=1e-6, confidence=0.95)
    event = SelfComposedDpEvent(PoissonSampledDpEvent(0.2, GaussianDpEvent(1.0)), 4)
    assert audit.upper == pytest.approx(epsilon(event, delta=1e-6))
    assert audit.lower > 0 and audit.violated == broken


def test_multi_run_passes_and_finds_most_of_epsilon():
    audit = multi_run(trainer_of(2, optimizer=optax.sgd(0.1, momentum=0.9), sigma=0.5), claim="gaussian")
    assert 0.35 * audit.upper < audit.lower <= audit.upper
    assert audit.trials == 480 and audit.upper == pytest.approx(epsilon(GaussianDpEvent(0.5), delta=1e-5))


def test_multi_run_catches_half_the_noise(half_the_noise):
    audit = multi_run(trainer_of(2, sigma=0.5), claim="gaussian")
    assert audit.violated and audit.upper == pytest.approx(epsilon(GaussianDpEvent(0.5), delta=1e-5))


def test_multi_run_of_sampled_steps_catches_a_forgotten_clip():
    audit = multi_run(without_clip(trainer_of(2, probability=0.5)), steps=2, delta=0.01, confidence=0.95)
    event = SelfComposedDpEvent(PoissonSampledDpEvent(0.5, GaussianDpEvent(1.0)), 2)
    assert audit.violated and audit.upper == pytest.approx(epsilon(event, delta=0.01))


def recording(released):
    """Plain gradient descent that keeps what it is given."""

    def update(gradient, state, params=None):
        jax.debug.callback(lambda g: released.append(np.array(g)), gradient["direction"])
        return jax.tree.map(lambda g: -g, gradient), state

    return optax.GradientTransformation(lambda params: (), update)


def test_canaries_among_other_examples():
    """Rows name the canaries; the others are in every run, and are not scored."""
    released = []
    params, source = canaries.worst_case(400, norm=0.9 * CLIP)
    trainer = trainer_of(400, sigma=0.05, optimizer=recording(released))
    rows = np.arange(0, 400, 2)
    audit = canaries.one_run(trainer, params, source, rows=rows, steps=1, delta=1e-5, seed=SEED)
    jax.effects_barrier()
    there = released[0] * 400 > 0.45 * CLIP
    assert there[1::2].all() and 70 < there[::2].sum() < 130
    assert audit.trials == 200 and 1 < audit.lower <= audit.upper


def test_runs_have_noise_and_batches_of_their_own():
    released = []
    multi_run(trainer_of(2, optimizer=recording(released)), trials=5, delta=0.1)
    jax.effects_barrier()
    assert len({g.tobytes() for g in released}) == len(released) == 10


def test_bad_arguments_are_refused_before_anything_runs():
    trainer = trainer_of(2)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        multi_run(trainer, steps=0)
    with pytest.raises(ValueError, match="trials must be an integer >= 2, got 1"):
        multi_run(trainer, trials=1)
    with pytest.raises(ValueError, match="trainer must not be stochastic"):
        multi_run(trainer_of(2, loss=lambda params, example, key: 0.0, stochastic=True))
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\)"):
        one_run(trainer, delta=1.0)
    with pytest.raises(ValueError, match=r"confidence must be in \(0.5, 1\), got 0.4"):
        one_run(trainer, confidence=0.4)
    with pytest.raises(ValueError, match="claim='gaussian' needs noise and a sampling probability of 1"):
        one_run(trainer_of(2, probability=0.5), claim="gaussian")
