"""Audits of private training: what keeps its promise passes, halved noise and a forgotten clip do
not.

Runs have fixed seeds. Over the choice of a seed, a healthy trainer fails with probability below
0.001, the confidence of its bounds; that broken ones are caught and that much is found fails with
probability of about 0.01."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxdp import data, finetune
from jaxdp.audit import finetune as canaries
from jaxdp.finetune.dp_sgd import GradientSum
from jaxdp.finetune.query import QuerySums
from jaxdp.privacy import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, epsilon
from jaxdp.transforms import noise

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
    return canaries.audit_run(trainer, params, source, **terms)


class Unclipped(GradientSum):
    """Sums raw gradients, but says that they are clipped."""

    def sums(self, params, carried, batch, mask, key):
        of_examples = self.gradient.per_example(params, batch, mask)
        total = jax.tree.map(lambda g: g.sum(0), of_examples.grads)
        return QuerySums(total, of_examples.nonfinite)


def without_clip(trainer):
    return dataclasses.replace(trainer, query=Unclipped(gradient=trainer.query.gradient))


@pytest.fixture
def half_the_noise(monkeypatch):
    def half(key, tree, std, draw=noise.gaussian, **where):
        return draw(key, tree, std / 2, **where)

    monkeypatch.setattr(noise.trees, "gaussian", half)


def test_worst_case_gradients_are_orthogonal_and_of_the_norm():
    params, source = canaries.worst_case(3, norm=2.5)
    grads = jax.vmap(jax.grad(canaries.loss), (None, 0))(params, source.gather(np.arange(3)))
    np.testing.assert_array_equal(grads["direction"], 2.5 * np.eye(3))


@pytest.mark.slow
def test_one_run_passes_and_finds_much_of_epsilon():
    audit = one_run(trainer_of(MANY), claim="gaussian")
    assert audit.upper == pytest.approx(FULL)
    assert 0.3 * audit.upper < audit.lower <= audit.upper
    assert audit.trials == MANY and not audit.violated


@pytest.mark.slow
def test_one_run_catches_half_the_noise(half_the_noise):
    audit = one_run(trainer_of(MANY), confidence=0.95, claim="gaussian")
    assert audit.violated and audit.upper == pytest.approx(FULL)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_one_run_of_sampled_steps_and_its_forgotten_clip(broken):
    trainer = trainer_of(MANY, probability=0.2)
    audit = one_run(
        without_clip(trainer) if broken else trainer, steps=4, delta=1e-6, confidence=0.95
    )
    event = SelfComposedDpEvent(PoissonSampledDpEvent(0.2, GaussianDpEvent(1.0)), 4)
    assert audit.upper == pytest.approx(epsilon(event, delta=1e-6))
    assert audit.lower > 0 and audit.violated == broken


def recording(released):
    """Plain gradient descent that keeps what it is given."""

    def update(gradient, state, params=None):
        jax.debug.callback(lambda g: released.append(np.array(g)), gradient["direction"])
        return jax.tree.map(lambda g: -g, gradient), state

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.slow
def test_canaries_among_other_examples():
    """Rows name the canaries; the others are in every run, and are not scored."""
    released = []
    params, source = canaries.worst_case(400, norm=0.9 * CLIP)
    trainer = trainer_of(400, sigma=0.05, optimizer=recording(released))
    rows = np.arange(0, 400, 2)
    audit = canaries.audit_run(trainer, params, source, rows=rows, steps=1, delta=1e-5, seed=SEED)
    jax.effects_barrier()
    there = released[0] * 400 > 0.45 * CLIP
    assert there[1::2].all() and 70 < there[::2].sum() < 130
    assert audit.trials == 200 and 1 < audit.lower <= audit.upper


def test_bad_arguments_are_refused_before_anything_runs():
    trainer = trainer_of(2)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        one_run(trainer, steps=0)
    with pytest.raises(ValueError, match="trainer must not be stochastic"):
        one_run(trainer_of(2, loss=lambda params, example, key: 0.0, stochastic=True))
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\)"):
        one_run(trainer, delta=1.0)
    with pytest.raises(ValueError, match=r"confidence must be in \(0.5, 1\), got 0.4"):
        one_run(trainer, confidence=0.4)
    with pytest.raises(
        ValueError, match="claim='gaussian' needs noise and a sampling probability of 1"
    ):
        one_run(trainer_of(2, probability=0.5), claim="gaussian")


# --- One step -----------------------------------------------------------------------------------


def two_tensors(params, example):
    """A loss whose gradient is the example: its first feature in `one`, the others in `two`."""
    return params["one"] @ example["features"][:1] + params["two"] @ example["features"][1:]


STEP = trainer_of(100, probability=0.1, loss=two_tensors)  # tests share what it compiles
PARAMS = {"one": np.zeros(1, np.float32), "two": np.zeros(3, np.float32)}


def audit_step(trainer, *features, **options):
    """Of candidates with these gradients."""
    label = np.zeros(len(features), int)
    source = data.from_arrays(features=np.asarray(features, np.float32), label=label, num_classes=2)
    terms = {"trials": 500, "delta": 1e-5, "confidence": 0.999, "seed": SEED, **options}
    return canaries.audit_step(trainer, PARAMS, source, **terms)


def silent_in(trainer, name):
    """The trainer whose noise leaves out one tensor."""
    honest = trainer.privatizer

    def update(sums, state, params=None, **where):
        noisy, state = honest.update(sums, state, **where)
        return {**noisy, name: sums[name] / honest.divisor}, state

    broken = noise.Privatizer(honest.init, update)
    broken.__dict__.update(honest.__dict__)
    return dataclasses.replace(trainer, privatizer=broken)


SMALL, LARGE, OTHER = (0.0, 0.01, 0.0, 0.0), (0.0, 0.0, 5.0, 0.0), (0.01, 0.0, 0.0, -5.0)


@pytest.mark.slow
def test_a_step_shows_the_canary_that_changes_it_most():
    audit = audit_step(STEP, SMALL, LARGE)
    assert audit.verdict == "consistent" and audit.trials == 1000
    assert audit.upper == pytest.approx(FULL) and audit.ceiling > 2 * FULL
    assert 0.35 * FULL < audit.lower <= FULL
    assert audit_step(STEP, SMALL).lower < 0.1 * FULL


@pytest.mark.slow
def test_a_step_under_replace_one_is_charged_for_both_records():
    audit = audit_step(STEP, LARGE, SMALL, [-x for x in LARGE], adjacency="replace_one")
    assert audit.upper == pytest.approx(epsilon(GaussianDpEvent(0.5), delta=1e-5))
    assert audit.verdict == "consistent" and audit.lower > FULL


@pytest.mark.slow
def test_a_tensor_without_noise_is_found_by_the_canary_that_hits_it():
    """The two candidates change the sum by the same norm; one of them in the tensor that has no
    noise as well."""
    audit = audit_step(silent_in(STEP, "one"), LARGE, OTHER)
    assert audit.verdict == "VIOLATED" and audit.lower > 0.9 * audit.ceiling


@pytest.mark.slow
def test_others_in_the_batch_and_steps_before_change_nothing():
    trainer = trainer_of(100, probability=0.1, loss=two_tensors, optimizer=optax.adam(0.1))
    audit = audit_step(trainer, LARGE, OTHER, SMALL, rows=[0], others=[1, 2], step=3)
    assert audit.verdict == "consistent" and audit.lower > 0.35 * FULL


@pytest.mark.slow
def test_runs_of_a_step_have_noise_of_their_own_and_repeat_from_a_seed():
    found = [audit_step(STEP, LARGE, seed=seed) for seed in (SEED, SEED, SEED[::-1])]
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_bad_arguments_of_a_step_are_refused():
    with pytest.raises(
        ValueError, match="rows must name at least 2 examples under 'replace_one', got 1"
    ):
        audit_step(STEP, LARGE, adjacency="replace_one")
    with pytest.raises(
        ValueError, match="adjacency must be 'add_remove' or 'replace_one', got 'zero_out'"
    ):
        audit_step(STEP, LARGE, adjacency="zero_out")
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        audit_step(STEP, LARGE, step=0)
    with pytest.raises(ValueError, match="claim='gaussian' needs delta > 0"):
        audit_step(STEP, LARGE, delta=0.0)
    with pytest.raises(ValueError, match="rows must name an example that changes the sum"):
        audit_step(STEP, (0.0, 0.0, 0.0, 0.0))


# --- The batches --------------------------------------------------------------------------------


def test_sampling_is_worth_what_it_says():
    trainer = trainer_of(200, probability=0.1)
    audit = canaries.audit_sampling(trainer, trials=2000, confidence=0.999, seed=SEED)
    assert (audit.verdict, audit.lower, audit.upper, audit.delta, audit.trials) == (
        "consistent",
        0,
        0,
        0.1,
        4000,
    )


def test_sampling_that_is_larger_than_it_says_is_caught():
    class Larger(data.PoissonSampler):
        def batch(self, step):
            return data.PoissonSampler(self.num_examples, 0.15, seed=self.seed).batch(step)

    trainer = dataclasses.replace(trainer_of(200), sampler=Larger(200, 0.1))
    audit = canaries.audit_sampling(trainer, trials=4000, confidence=0.999, seed=SEED)
    assert audit.verdict == "VIOLATED"


def test_bad_arguments_of_sampling_are_refused():
    with pytest.raises(ValueError, match="sampling probability below 1, got 1"):
        canaries.audit_sampling(trainer_of(2), trials=10)
    with pytest.raises(ValueError, match="trials must be at least 2, got 1"):
        canaries.audit_sampling(trainer_of(2, probability=0.5), trials=1)
