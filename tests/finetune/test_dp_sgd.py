"""DP-SGD steps against an independent float64 computation, their noise, their events, and what is
compiled."""

import collections
import concurrent.futures
import dataclasses
import math
import re
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from flax import nnx

from jaxdp import data, finetune
from jaxdp.data.physical import FIRST_STEPS
from jaxdp.finetune import batches as dp_batches
from jaxdp.finetune import programs as dp_programs
from jaxdp.finetune import step as dp_step
from jaxdp.privacy import Ledger, epsilon
from jaxdp.privacy.events import composition
from jaxdp.transforms import forms, losses, noise
from tests.compilations import text_of
from tests.finetune.batches import with_batches

N, FEATURES, CLASSES = 40, 6, 3
CLIP, SIGMA, RATE, MOMENTUM = 1.5, 0.7, 0.5, 0.9


def source_of(n=N, seed=0, scale=1.0):
    """Return n random examples whose features [0] is the example's number, which no model here
    reads."""
    rng = np.random.default_rng(seed)
    features = scale * rng.normal(size=(n, FEATURES + 1)).astype(np.float32)
    features[:, 0] = np.arange(n)
    return data.from_arrays(
        features=features, label=rng.integers(CLASSES, size=n), num_classes=CLASSES
    )


def params_of(seed=1):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(size=(FEATURES, CLASSES)), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=CLASSES), jnp.float32),
    }


def loss(params, example):
    logits = example["features"][1:] @ params["kernel"] + params["bias"]
    return losses.softmax_cross_entropy(logits, example["label"])


def gradient64(params, features, label):
    """The gradient of `loss` at one example, by hand in float64."""
    x = features[1:].astype(np.float64)
    logits = x @ params["kernel"] + params["bias"]
    error = np.exp(logits - logits.max())
    error /= error.sum()
    error[label] -= 1
    return {"kernel": np.outer(x, error), "bias": error}


def norm64(tree):
    return math.sqrt(sum((x**2).sum() for x in tree.values()))


def released64(gradients, probability, key, step):
    """The mean that a step releases: clipped gradients of examples, and the noise of its key."""
    drawn = noise.gaussian(key, params_of(), SIGMA * CLIP, number=step)
    total = float64(drawn)
    for gradient in gradients:
        factor = min(1.0, CLIP / norm64(gradient))
        total = {name: x + factor * gradient[name] for name, x in total.items()}
    return {name: x / (probability * N) for name, x in total.items()}


def float64(tree):
    return {name: np.asarray(x, np.float64) for name, x in tree.items()}


def trainer_of(sampler, **kwargs):
    defaults = {"clip_norm": CLIP, "noise_multiplier": SIGMA, "physical_batch_size": 4}
    optimizer = kwargs.pop("optimizer", optax.sgd(RATE, momentum=MOMENTUM))
    return finetune.dp_sgd(
        kwargs.pop("loss_fn", loss), optimizer, sampler=sampler, **{**defaults, **kwargs}
    )


def state_without_example_0(trainer, steps, suits=lambda sizes: True):
    """An initial state with known keys whose first batches leave out example 0, which padding
    repeats."""

    def leaves_out(batches):
        return not any(0 in batch for batch in batches) and suits([len(batch) for batch in batches])

    return with_batches(trainer, trainer.init(params_of()), steps, leaves_out)


def assert_close(tree, expected):
    for name in expected:
        np.testing.assert_allclose(np.asarray(tree[name]), expected[name], rtol=2e-5, atol=2e-6)


# Batches of several physical batches; and batches that are often empty.
@pytest.mark.slow
@pytest.mark.parametrize(("probability", "augmult"), [(0.35, None), (0.35, 3), (0.03, None)])
def test_steps_equal_float64(probability, augmult):
    seen = collections.defaultdict(list)

    def record(number, view):
        seen[int(number)].append(np.array(view))

    def augment(key, example):
        view = example["features"].at[1:].add(jax.random.normal(key, (FEATURES,)))
        jax.debug.callback(record, example["features"][0], view)
        return {**example, "features": view}

    views = {} if augmult is None else {"augment": augment, "augmult": augmult}
    trainer, source = (
        trainer_of(data.PoissonSampler(N, probability), ema_decay=0.25, **views),
        source_of(),
    )

    def suits(sizes):
        return max(sizes) > 8 if probability > 0.1 else min(sizes) == 0

    state = state_without_example_0(trainer, steps=6, suits=suits)
    params, ema, trace = float64(state.params), float64(state.params), None
    sizes = []
    for step in range(6):
        key, indices = state.noise.key, trainer.drawn(state)
        sizes.append(len(indices))
        seen.clear()
        state, metrics = trainer.step(state, source)
        jax.effects_barrier()

        gradients = []
        for i in indices:
            example = source[int(i)]
            inputs = [example["features"]] if augmult is None else seen[int(i)]
            assert len({x.tobytes() for x in inputs}) == len(inputs) == (augmult or 1)
            each = [gradient64(params, x, example["label"]) for x in inputs]
            gradients.append({name: np.mean([g[name] for g in each], 0) for name in params})
        mean = released64(gradients, probability, key, step)
        trace = (
            mean
            if trace is None
            else {name: mean[name] + MOMENTUM * trace[name] for name in params}
        )
        params = {name: params[name] - RATE * trace[name] for name in params}
        decay = min(0.25, (1 + step) / (10 + step))
        ema = {name: decay * ema[name] + (1 - decay) * params[name] for name in params}
        assert_close(state.params, params)
        assert_close(state.ema, ema)
        assert float(metrics["released_gradient_norm"]) == pytest.approx(norm64(mean), rel=1e-4)
        assert int(state.step) == int(state.noise.step) == step + 1
    assert suits(sizes)


def test_clipping_is_active_and_inactive_in_the_comparison_above():
    params, source = float64(params_of()), source_of()
    norms = [
        norm64(gradient64(params, source[i]["features"], source[i]["label"])) for i in range(N)
    ]
    assert min(norms) < CLIP < max(norms)


@pytest.mark.slow
def test_views_differ_between_examples_steps_and_parts():
    keys = []

    def augment(key, example):
        jax.debug.callback(lambda k: keys.append(np.array(k).tobytes()), jax.random.key_data(key))
        return example

    trainer = trainer_of(data.PoissonSampler(N, 0.5, seed=bytes(16)), augment=augment, augmult=2)
    state, source = trainer.init(params_of()), source_of()
    for _ in range(3):
        state, _ = trainer.step(state, source)
    jax.effects_barrier()
    assert len(keys) >= 3 * 3 * 4 * 2
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_stochastic_loss_has_one_key_per_example_and_step():
    sampler = data.PoissonSampler(N, 0.4)
    used = collections.defaultdict(list)

    def record(number, kept):
        used[int(number)].append(np.array(kept))

    def dropout(params, example, *, key):
        kept = jax.random.bernoulli(key, 0.5, (FEATURES,))
        jax.debug.callback(record, example["features"][0], kept)
        return loss(params, {**example, "features": example["features"].at[1:].multiply(kept)})

    # The vmap engine calls the loss once per example, so that every recorded mask is one that was
    # used.
    trainer, source = (
        trainer_of(sampler, loss_fn=dropout, stochastic=True, engine="vmap"),
        source_of(),
    )
    state = state_without_example_0(trainer, steps=2)
    masks = []
    for step in range(2):
        used.clear()
        before, key, indices = float64(state.params), state.noise.key, trainer.drawn(state)
        state, metrics = trainer.step(state, source)
        jax.effects_barrier()
        gradients = []
        for i in indices:
            (kept,) = {x.tobytes(): x for x in used[int(i)]}.values()
            masks.append((step, int(i), kept.tobytes()))
            example = source[int(i)]
            features = example["features"] * np.concatenate([[1], kept])
            gradients.append(gradient64(before, features, example["label"]))
        norm = norm64(released64(gradients, 0.4, key, step))
        assert float(metrics["released_gradient_norm"]) == pytest.approx(norm, rel=1e-4)
    # 2^6 masks and about 32 draws: equal keys for all examples of a part, or for both steps, would
    # leave few.
    assert len({mask for _, _, mask in masks}) > 15
    first, second = ({i: mask for step, i, mask in masks if step == s} for s in (0, 1))
    both = first.keys() & second.keys()
    assert sum(first[i] == second[i] for i in both) < len(both) / 2


@pytest.mark.slow
def test_frozen_leaves_stay_bit_identical_and_have_no_optimizer_state():
    def two_layers(params, example):
        hidden = jnp.tanh(example["features"][1:] @ params["backbone"])
        return losses.softmax_cross_entropy(
            hidden @ params["head"] + params["scale"], example["label"]
        )

    rng = np.random.default_rng(0)
    params = {
        "backbone": jnp.asarray(rng.normal(size=(FEATURES, 5)), jnp.float32),
        "head": jnp.asarray(rng.normal(size=(5, CLASSES)), jnp.float32),
        "scale": jnp.asarray(0.1, jnp.bfloat16),
        "count": jnp.asarray(3, jnp.int32),
    }
    trainer = trainer_of(
        data.PoissonSampler(N, 0.3),
        loss_fn=two_layers,
        optimizer=optax.adam(0.01),
        ema_decay=0.9,
        trainable=lambda path, leaf: path == "head",
    )
    state = trainer.init(params)
    assert sorted(np.shape(x) for x in jax.tree.leaves(state.opt_state)) == [
        (),
        (5, CLASSES),
        (5, CLASSES),
    ]
    source = source_of()
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(5):
            state, _ = trainer.step(state, source)
    for now in (state.params, state.ema):
        for name in ("backbone", "scale", "count"):
            assert np.array_equal(np.asarray(now[name]), np.asarray(params[name])), name
        assert (np.asarray(now["head"]) != np.asarray(params["head"])).all()


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.35, 0.03])
def test_with_ascent_gradients_are_taken_uphill_of_the_last_release(probability):
    radius = 0.8
    trainer, source = (
        trainer_of(data.PoissonSampler(N, probability), ascent_radius=radius),
        source_of(),
    )
    state = state_without_example_0(trainer, steps=5)
    params, trace = float64(state.params), {name: 0.0 for name in state.params}
    released = {name: np.zeros(p.shape) for name, p in params.items()}
    for step in range(5):
        key, indices = state.noise.key, trainer.drawn(state)
        state, _ = trainer.step(state, source)
        length = norm64(released) or 1
        # Unperturbed at first; from then on at a distance of the radius.
        at = {name: p + radius * released[name] / length for name, p in params.items()}
        examples = (source[int(i)] for i in indices)
        gradients = [gradient64(at, each["features"], each["label"]) for each in examples]
        released = released64(gradients, probability, key, step)
        trace = {name: released[name] + MOMENTUM * trace[name] for name in params}
        # the step starts where it was
        params = {name: params[name] - RATE * trace[name] for name in params}
        assert_close(state.released, released)
        assert_close(state.params, params)


@pytest.mark.slow
def test_ascent_of_no_radius_is_dp_sgd_to_the_bit_and_another_is_not():
    sampler, source, ends = data.PoissonSampler(N, 0.3), source_of(), []
    trainers = [
        trainer_of(sampler),
        *(trainer_of(sampler, ascent_radius=radius) for radius in (0.0, 0.5)),
    ]
    first = trainers[0].init(params_of())
    for trainer in trainers:
        state = trainer.init(params_of())._replace(noise=first.noise, key=first.key)
        states = [state := trainer.step(state, source)[0] for _ in range(3)]
        ends.append(
            [np.concatenate([np.asarray(x).ravel() for x in s.params.values()]) for s in states]
        )
        assert (state.released is None) == (trainer.ascent_radius == 0)
        assert trainer.event(0, 3) == trainers[0].event(0, 3)
    np.testing.assert_array_equal(ends[0], ends[1])
    np.testing.assert_allclose(ends[2][0], ends[0][0], rtol=1e-6)
    assert (ends[2][1] != ends[0][1]).any()


@pytest.mark.slow
def test_ascent_leaves_frozen_parameters_where_they_are():
    seen = []

    def watching(params, example):
        jax.debug.callback(
            lambda *x: seen.append([np.array(v) for v in x]), params["bias"], params["count"]
        )
        return loss(params, example)

    params = {**params_of(), "count": jnp.int32(3)}
    trainer = trainer_of(
        data.PoissonSampler(N, 0.9),
        loss_fn=watching,
        ascent_radius=0.5,
        trainable=lambda path, leaf: path == "kernel",
    )
    state, source = trainer.init(params), source_of()
    for _ in range(2):
        state, _ = trainer.step(state, source)
    jax.effects_barrier()
    assert jax.tree.map(jnp.shape, state.released) == {
        "kernel": (FEATURES, CLASSES),
        "bias": None,
        "count": None,
    }
    for bias, count in seen:
        np.testing.assert_array_equal(bias, params["bias"])
        assert count == 3


@pytest.mark.slow
def test_noise_schedule_and_its_events():
    def schedule(step):
        return 1.0 + 0.5 * step

    trainer = trainer_of(
        data.PoissonSampler(N, 0.25),
        loss_fn=lambda p, e: 0.0 * loss(p, e),
        noise_multiplier=schedule,
    )
    wide = {
        "kernel": jnp.zeros((FEATURES, CLASSES)),
        "bias": jnp.zeros(CLASSES),
        "unused": jnp.zeros(200_000),
    }
    state, source = trainer.init(wide), source_of()
    for step in range(3):
        before = state.opt_state[0].trace
        state, _ = trainer.step(state, source)
        mean = np.asarray(state.opt_state[0].trace["unused"]) - MOMENTUM * np.asarray(
            before["unused"]
        )
        # The standard error of a standard deviation from 2e5 values is 0.16 %.
        assert mean.std() * 0.25 * N / CLIP == pytest.approx(schedule(step), rel=0.01)
    singles = [
        dp_event.PoissonSampledDpEvent(0.25, dp_event.GaussianDpEvent(schedule(t)))
        for t in range(4)
    ]
    assert composition(trainer.event(1, 4)) == composition(dp_event.ComposedDpEvent(singles[1:]))
    assert composition(trainer.event(2, 2)) == {}


@pytest.mark.slow
def test_events_cost_what_dp_accounting_says_and_chunks_compose_to_the_run():
    def sigma(step):
        return 2 + 0.25 * step

    trainer = trainer_of(data.PoissonSampler(N, 0.25), noise_multiplier=sigma)
    independent = PLDAccountant()
    for step in range(3):
        independent.compose(
            dp_event.PoissonSampledDpEvent(0.25, dp_event.GaussianDpEvent(sigma(step)))
        )
    expected = independent.get_epsilon(1e-5)
    assert epsilon(trainer.event(0, 3), delta=1e-5) == pytest.approx(expected, rel=1e-3)
    ledger = Ledger.in_memory()
    ledger.register("data", adjacency="add_remove", unit="example", delta=1e-5)
    for first, last in [(0, 2), (2, 3)]:
        with ledger.spend("data", trainer.event(first, last)):
            pass
    assert ledger.epsilon("data") == pytest.approx(expected, rel=1e-3)
    assert expected > 0.5


@pytest.mark.slow
def test_an_example_with_nan_or_inf_changes_nothing_but_its_own_contribution():
    sampler, params = data.PoissonSampler(N, 1.0, seed=bytes(16)), params_of()
    bad = source_of().arrays["features"].copy()
    bad[3, 2], bad[5, 1] = np.nan, np.inf
    label = source_of().arrays["label"]
    keep = np.delete(np.arange(N), [3, 5])
    whole = data.from_arrays(features=bad, label=label, num_classes=CLASSES)
    trainer = trainer_of(sampler, physical_batch_size=N)
    without = trainer_of(data.PoissonSampler(N - 2, 1.0), physical_batch_size=N - 2)
    state = trainer.init(params)
    batch, mask = jax.device_put((whole.gather(np.arange(N)), np.ones(N, bool)))
    fewer, fewer_mask = jax.device_put((whole.gather(keep), np.ones(N - 2, bool)))
    sums = trainer.part_sum(state, batch, mask, np.uint32(0))
    expected = without.part_sum(state, fewer, fewer_mask, np.uint32(0))
    assert_close(sums.total, float64(expected.total))
    assert np.flatnonzero(sums.dropped).tolist() == [3, 5] and not expected.dropped.any()
    state, _ = trainer.step(state, whole)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize("size", [N - 1, N + 1])
def test_a_step_on_another_number_of_examples_is_refused(size):
    trainer = trainer_of(data.PoissonSampler(N, 0.5))
    with pytest.raises(
        ValueError, match=f"source has {size} examples, but the sampler draws from {N}. Its event"
    ):
        trainer.step(trainer.init(params_of()), source_of(size))


@pytest.mark.slow
def test_physical_batch_larger_than_the_data():
    sampler = data.PoissonSampler(N, 0.3, seed=bytes(16))
    small, large = (trainer_of(sampler, physical_batch_size=size) for size in (4, 3 * N))
    state, source = small.init(params_of()), source_of()
    one, other = small.step(state, source)[0], large.step(state, source)[0]
    assert_close(one.params, float64(other.params))


# --- Noise, through the whole trainer -----------------------------------------------------------


def noise_of_run(steps=4, size=50_000):
    """Return the noise [steps, size] that a run of `fit` with zero gradients added, over what it
    should be."""
    seen = []

    def nothing(params, example):
        return 0.0 * params["w"].sum() * example["label"]

    sampler = data.PoissonSampler(N, 0.05)
    trainer = trainer_of(sampler, loss_fn=nothing, optimizer=optax.sgd(1.0))
    ledger = Ledger.in_memory()
    ledger.register("data", adjacency="add_remove", unit="example", delta=1e-5)

    def evaluate(params):
        seen.append(np.asarray(params["w"], np.float64))
        return {}

    finetune.fit(
        trainer,
        {"w": jnp.zeros(size)},
        source_of(),
        steps=steps,
        account=ledger.account("data"),
        checkpoint_every=2,  # noise within a chunk and of two chunks
        evaluate=evaluate,
        seed=bytes(range(16)),
        progress=False,
    )
    # `evaluate` is tried with the first parameters, before anything is charged.
    per_chunk = -np.diff(np.stack(seen), axis=0)
    return per_chunk * (0.05 * N) / (SIGMA * CLIP * math.sqrt(2))


def is_standard_normal(sample):
    """Two-sided tests of variance, mean and shape, each failing a right sample with probability
    below 1e-6."""
    n, z = sample.size, 4.9
    shape = (sample**4).mean() / (sample**2).mean() ** 2
    return (
        abs((sample**2).mean() - 1) < z * math.sqrt(2 / n)
        and abs(sample.mean()) < z / math.sqrt(n)
        and abs(shape - 3) < z * math.sqrt(24 / n)
    )


@pytest.mark.slow
def test_noise_of_a_run_has_the_right_scale_and_wrong_scales_are_rejected():
    right = noise_of_run()
    assert all(is_standard_normal(chunk) for chunk in right)
    assert abs(np.corrcoef(right)[0, 1]) < 4.9 / math.sqrt(right.shape[1])
    assert not any(is_standard_normal(scale * chunk) for scale in (0.7, 1.3) for chunk in right)


# --- Compilation and transfers ------------------------------------------------------------------


@pytest.mark.slow
def test_no_recompilation_and_no_implicit_transfers_whatever_the_batch_sizes():
    traces = collections.Counter()

    def augment(key, example):
        traces["accumulate"] += 1
        return example

    def update(updates, state, params=None):
        traces["update"] += 1
        return jax.tree.map(lambda u: -0.1 * u, updates), state

    trainer = trainer_of(
        data.PoissonSampler(N, 0.08, seed=bytes(16)),
        optimizer=optax.GradientTransformation(lambda params: optax.EmptyState(), update),
        augment=augment,
        ema_decay=0.9,
    )
    # Weakly typed and NumPy parameters must not make the second step another program than the
    # first.
    params = {"kernel": np.zeros((FEATURES, CLASSES)), "bias": jnp.full((CLASSES,), 1.0)}
    state, source = trainer.init(params), source_of()
    # known keys with which empty batches and batches of two parts come after the first of two
    for k in range(100):
        state = state._replace(
            noise=state.noise._replace(key=noise.stream(bytes([k] * 16), "test"))
        )
        sizes = [-(-len(trainer.drawn(state._replace(step=jnp.int32(t)))) // 4) for t in range(30)]
        if 2 in sizes and {0, 1, 2} <= set(sizes[sizes.index(2) + 1 :]):
            break
    for step in range(30):
        with jax.transfer_guard("disallow" if step > sizes.index(2) else "allow"):
            state, _ = trainer.step(state, source, meanwhile=bool)  # as `fit` takes it
    assert {0, 1, 2} <= set(sizes[sizes.index(2) + 1 :])
    assert traces["update"] == 1
    assert traces["accumulate"] == 1
    text_of(trainer, state, source)
    assert traces["update"] == 1
    assert traces["accumulate"] == 1


@pytest.mark.slow
def test_chosen_sizes_and_batches_read_ahead_take_the_same_steps():
    steps = FIRST_STEPS + 4  # the first ones take one size

    def run(trainer, ahead):
        source = source_of()
        state = trainer.init(params_of())
        state = state._replace(noise=state.noise._replace(key=noise.stream(bytes(16), "test")))
        if not ahead:
            for _ in range(steps):
                state, _ = trainer.step(state, source)
            return state
        with trainer.batches(state, source, steps) as batches:
            for batch in batches:
                state, _ = trainer.step(state, source, batch)
        return state

    sampler = data.PoissonSampler(N, 0.35)
    fixed = run(trainer_of(sampler), ahead=False)
    chosen = trainer_of(sampler, physical_batch_size=None)
    now, later = (run(chosen, ahead) for ahead in (False, True))
    assert len(chosen.physical(now, source_of()).sizes) > 1
    assert_close(now.params, float64(fixed.params))
    for name in fixed.params:  # the same physical batches give the same bits
        np.testing.assert_array_equal(now.params[name], later.params[name])
    first, *others = (f"sum {size}" for size in chosen.physical(now, source_of()).sizes)
    assert [*chosen.programs(now, source_of())] == [first, "add", "update", *others]


@pytest.mark.slow
def test_a_run_starts_before_all_its_programs_are_compiled(caplog):
    steps = FIRST_STEPS + 4

    def run(ahead):
        """Returns the number of programs that each step itself compiled, and the names of those of
        the first steps."""
        trainer, source = (
            trainer_of(data.PoissonSampler(N, 0.5), physical_batch_size=None),
            source_of(),
        )
        state, counts = trainer.init(params_of()), []
        with trainer.compile(source) as programs:
            for step in range(steps):
                if ahead:
                    programs.start(state, range(steps))
                    programs.wait(step)
                caplog.clear()
                with jax.log_compiles():  # of this thread alone
                    state, _ = trainer.step(state, source, meanwhile=bool)  # as `fit` takes it
                counts.append(
                    len(
                        re.findall(
                            r"Finished XLA compilation of jit\((?:_part_sum|_update_in_p)",
                            caplog.text,
                        )
                    )
                )
        return (
            counts,
            [*trainer.programs(state, source, FIRST_STEPS)],
            [*trainer.programs(state, source)],
        )

    counts, first, every = run(ahead=True)
    assert counts == [0] * steps
    assert first == every[:3] and first[1:] == ["add", "update"] and len(every) > 3
    counts, *_ = run(ahead=False)
    assert counts[0] == 2 and sum(counts[:FIRST_STEPS]) == 2 < sum(counts)


@pytest.mark.parametrize("cached", [True, False])
def test_other_sizes_are_traced_while_the_first_is_compiled_or_after_its_step(monkeypatch, cached):
    class Compiler(concurrent.futures.ThreadPoolExecutor):
        """Has the program at once, as from a cache, or once another one is traced."""

        def submit(self, function, *args):
            if not cached:
                return super().submit(lambda: traced.wait(60))
            found = concurrent.futures.Future()
            found.set_result(None)
            return found

    def lowered(*args):
        for name, program in original(*args):
            names.append(name)
            if len(names) > 3:
                traced.set()
            yield name, program

    original, names, traced = dp_programs.lowered, [], threading.Event()
    monkeypatch.setattr(dp_programs, "lowered", lowered)
    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", Compiler)
    trainer, source = trainer_of(data.PoissonSampler(N, 0.5), physical_batch_size=None), source_of()
    state = trainer.init(params_of())
    every = [*trainer.programs(state, source)]
    with trainer.compile(source) as programs:
        programs.start(state, range(FIRST_STEPS + 1))
        text = programs.text
        assert names == every[:3]
        programs.wait(0)
        assert names == every[:3] if cached else names[3] == every[3]
        # deletes the arrays of the first state
        state, _ = trainer.step(state, source, meanwhile=bool)
        programs.wait(1)
        assert names == every and programs.text == text == text_of(trainer, state, source)


def sizes_of(sampler, width):
    """The physical batches of a network with 1000 parameters and 1000 x `width` activations."""

    def wide(params, example):
        return jnp.sum(jnp.outer(params["w"], jnp.ones(width)) * example["features"][0])

    trainer = trainer_of(sampler, loss_fn=wide, physical_batch_size=None)
    return trainer.physical(trainer.init({"w": jnp.ones(1000)}), source_of())


def test_an_accelerator_takes_most_batches_in_one_call():
    sampler = data.PoissonSampler(10_000, 0.0064)

    def calls():
        chosen = sizes_of(sampler, 1000)
        return np.mean([len(chosen.cut(np.arange(rows))) for rows in range(48, 81)])

    assert calls() > 2
    with forms.traced_for("cuda"):
        assert calls() < 1.1


def test_sizes_for_an_accelerator_that_is_not_there():
    """They depend on its memory, and this process keeps its own sizes."""
    sampler = data.PoissonSampler(10_000, 0.064)

    def wide(params, example):
        return jnp.sum(jnp.outer(params["w"], jnp.ones(1000)) * example["features"][0])

    trainer = trainer_of(sampler, loss_fn=wide, physical_batch_size=None)
    state = trainer.init({"w": jnp.ones(1000)})
    here = trainer.physical(state, source_of()).sizes
    large, small = (
        trainer.physical(state, source_of(), memory=size).sizes for size in (2**40, 2**30)
    )
    assert max(large) >= 640 > max(small)
    assert trainer.physical(state, source_of()).sizes == here != large
    names = trainer.programs(state, source_of(), memory=2**30)
    assert {f"sum {size}" for size in small} == names.keys() - {"add", "update"}


def test_memory_bounds_the_chosen_sizes():
    def sizes(width):
        return sizes_of(data.PoissonSampler(N, 1.0), width).sizes

    assert max(sizes(10)) == N
    # Some arrays of 1000 x 30,000 float32 values per example, each counted twice, fit into 2 GiB.
    assert 2 <= max(sizes(30_000)) <= 2**31 // (2 * 4 * 30_000_000)
    assert max(sizes(60_000)) == max(sizes(30_000)) // 2


def test_sizes_are_those_of_the_source_whatever_source_came_before():
    def loss_of_rows(params, example):
        return jnp.square(params["w"][example["ids"]]).sum()

    def sizes(trainer, length):
        source = data.from_arrays(ids=np.zeros((100, length), np.int32))
        return trainer.physical(trainer.init({"w": jnp.ones((5, 1000))}), source).sizes

    def make():
        sampler = data.PoissonSampler(100, 1.0)
        return trainer_of(sampler, loss_fn=loss_of_rows, physical_batch_size=None)

    trainer = make()
    short, long, again = (sizes(trainer, length) for length in (1, 10_000, 1))
    assert short == again == sizes(make(), 1)
    assert long == sizes(make(), 10_000)
    assert max(long) < max(short)


def test_a_source_that_fails_while_it_is_read_ahead_stops_the_run():
    class Failing(data.Examples):
        def gather(self, indices):
            raise OSError("the disk is gone")

    trainer, source = trainer_of(data.PoissonSampler(N, 0.35)), source_of()
    state, failing = trainer.init(params_of()), Failing(source.arrays)
    with (
        pytest.raises(OSError, match="the disk is gone"),
        trainer.batches(state, failing, 2) as batches,
    ):
        next(batches)


def test_a_source_may_fill_the_same_arrays_in_every_call():
    """JAX shares an array of NumPy that begins at a multiple of 64 bytes. An example of the last
    physical batch would count in the sum as often as there are physical batches."""
    memory = {}

    class Reusing(data.Examples):
        def gather(self, indices):
            batch = super().gather(indices)
            for name, array in batch.items():
                room = memory.setdefault(name, np.zeros(array.nbytes + 64, np.uint8))
                start = -room.ctypes.data % 64
                place = room[start : start + array.nbytes].view(array.dtype)
                batch[name] = place.reshape(array.shape)
                batch[name][...] = array
            return batch

    trainer, source = trainer_of(data.PoissonSampler(N, 1.0)), source_of()
    state = trainer.init(params_of())
    # All batches are read before the first one is summed.
    expected, found = (
        trainer.sums(state, each, np.arange(N)) for each in (source, Reusing(source.arrays))
    )
    assert_close(found, float64(expected))


@pytest.mark.parametrize("most", [2**24, 1])
def test_only_small_batches_are_read_several_at_once(monkeypatch, most):
    read = threading.Semaphore(0)

    class Counting(data.Examples):
        def gather(self, indices):
            read.release()
            return super().gather(indices)

    monkeypatch.setattr(dp_batches, "_BYTES_AHEAD", most)
    trainer, source = trainer_of(data.PoissonSampler(N, 0.35), physical_batch_size=N), source_of()
    state = trainer.init(params_of())
    with trainer.batches(state, Counting(source.arrays), 100) as batches:
        for _ in range(3):  # the sizes of batches are known after the first
            next(batches)
        found = 0
        while read.acquire(timeout=0.2):
            found += 1
    assert found == (18 if most > 1 else 4)


def test_an_update_in_place_copies_no_array():
    """Each new array takes the buffer of its old one. In the order of names, parameters take those
    of the optimizer."""
    trainer = trainer_of(data.PoissonSampler(N, 0.35))
    state = trainer.init(params_of())
    large, rest = dp_step.apart(state)
    shapes = {
        re.escape(f"f32[{','.join(map(str, x.shape))}]")
        for x in state.params.values()
        if x.ndim == 2
    }

    def copies(update, large):
        text = update.lower(large, rest, trainer.zeros(state.params)).compile().as_text()
        return [line for shape in shapes for line in re.findall(rf"= {shape}\S* copy\(.*", text)]

    by_name = dp_step.repeatable(
        lambda large, rest, sums: trainer._update(rest._replace(**large), sums),
        platform="cpu",
        donate=(0,),
        cpu_options=noise.CPU_OPTIONS,
    )
    assert shapes
    assert not copies(trainer.update_in_place, large)
    assert copies(by_name, large._asdict())


# --- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"physical_batch_size": 0}, "physical_batch_size must be at least 1, got 0"),
        ({"augmult": 2}, "augmult must be at least 1, and 1 without augment, got 2"),
        (
            {"augmult": 0, "augment": lambda key, example: example},
            "augmult must be at least 1.*got 0",
        ),
        ({"ema_decay": 1.0}, r"ema_decay must be in \[0, 1\)"),
        ({"ema_decay": math.nan}, r"ema_decay must be in \[0, 1\)"),
        ({"clip_norm": math.inf}, "clip_norm must be between"),
        ({"clip_norm": math.nan}, "clip_norm must be between"),
        ({"clip_norm": -1.0}, "clip_norm must be between"),
        ({"clip_norm": 0.0}, "clip_norm must be between"),
        ({"clip_norm": 1e-300}, "clip_norm must be between"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"engine": "magic"}, "engine must be"),
        ({"ascent_radius": -0.1}, "ascent_radius must be at least 0 and finite, got -0.1"),
        ({"ascent_radius": math.nan}, "ascent_radius must be"),
        ({"ascent_radius": math.inf}, "ascent_radius must be"),
    ],
)
def test_impossible_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(data.PoissonSampler(N, 0.1), **change)


def test_models_in_place_of_params_are_refused_with_the_line_that_makes_params():
    trainer = trainer_of(data.PoissonSampler(N, 0.5))
    for model, message in [
        (
            nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
            r"got an NNX module, Linear.*nnx\.split\(model, nnx\.Param, \.\.\.\)",
        ),
        (
            eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0)),
            r"custom_jvp at 'activation'.*eqx\.partition\(model, eqx\.",
        ),
        ({"w": 1.0}, r"got float at 'w'. Convert a number that is trained with jnp\.asarray"),
    ]:
        with pytest.raises(TypeError, match=message):
            trainer.init(model)


def test_a_loss_that_cannot_be_called_is_refused_with_its_remedy_at_every_batch_size():
    """The sizes are chosen from the program of the loss, which was traced without its checks."""
    rngs = nnx.Rngs(0)
    dropout = nnx.Sequential(nnx.Linear(FEATURES, CLASSES, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    graph, weights, rest = nnx.split(dropout, nnx.Param, ...)

    def shared(params, example):  # without copy=True
        logits = nnx.merge(graph, params, rest)(example["features"][1:])
        return losses.softmax_cross_entropy(logits, example["label"])

    def keyed(params, example, *, key):
        return loss(params, example)

    source, sampler = source_of(), data.PoissonSampler(N, 0.5)
    for size in (8, None):
        for function, params, error, message in [
            (keyed, params_of(), TypeError, "'key'.*stochastic=True in jaxdp.finetune"),
            (lambda p, x, y: 0.0, params_of(), TypeError, r"loss_fn\(params, \(x, y\)\)"),
            (shared, weights, ValueError, "copy=True.*nnx.reseed"),
        ]:
            trainer = trainer_of(sampler, loss_fn=function, physical_batch_size=size)
            with pytest.raises(error, match=message):
                trainer.step(trainer.init(params), source)


def test_a_loss_that_reads_a_column_of_text_learns_which_columns_there_are():
    source = data.from_arrays(features=source_of().arrays["features"], label=["well", "ill"] * 20)
    trainer = trainer_of(data.PoissonSampler(N, 0.5), physical_batch_size=None)
    with pytest.raises(KeyError) as caught:
        trainer.step(trainer.init(params_of()), source)
    assert caught.value.__notes__[0].startswith("The example has 'features'. Text is in no example")


def test_no_noise_is_no_privacy():
    event = trainer_of(data.PoissonSampler(N, 0.1), noise_multiplier=0.0).event(0, 1)
    assert epsilon(event, delta=1e-5) == math.inf


@pytest.mark.slow
def test_the_sampler_keeps_its_seed_out_of_sight():
    trainer = trainer_of(data.PoissonSampler(N, 0.1, seed=b"0123456789abcdef"))
    assert "0123456789" not in repr(trainer)
    assert dataclasses.replace(trainer.sampler).seed == b"0123456789abcdef"
