"""What every method of the package promises: one conformance suite, in the manner of optax."""

import collections
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import dp_event

from jaxdp import data, finetune
from jaxdp.privacy import Ledger, epsilon
from jaxdp.privacy.events import composition
from jaxdp.release import digest
from jaxdp.transforms import losses, noise
from tests.compilations import text_of
from tests.finetune.batches import flat
from tests.finetune.own_options import own_options

N, FEATURES, CLASSES, PHYSICAL, Q, Z = 30, 5, 3, 4, 0.25, 0.9


def examples(n, seed):
    rng = np.random.default_rng(seed)
    return {
        "features": rng.normal(size=(n, FEATURES)).astype(np.float32),
        "label": rng.integers(CLASSES, size=n),
    }


def source_of(**changes):
    return data.from_arrays(**{**examples(N, 0), **changes}, num_classes=CLASSES)


def params_of():
    rng = np.random.default_rng(1)
    return {
        "kernel": jnp.asarray(rng.normal(size=(FEATURES, CLASSES)), jnp.float32),
        "bias": jnp.zeros(CLASSES),
    }


def loss(params, example):
    return losses.softmax_cross_entropy(
        example["features"] @ params["kernel"] + params["bias"], example["label"]
    )


ANCHORS = {
    "features": examples(9, 7)["features"],
    "label": np.arange(9, dtype=np.int32) % CLASSES,
}
OWN = own_options(ANCHORS)
FURTHER = {
    "dp_sgd with ascent": ("dp_sgd", {"ascent_radius": 0.1}),
    "adp_clip, published": ("adp_clip", {"unit_norm": False, "ascent_radius": 0.1}),
    "gep, basis kept": ("gep", {"basis_every": 3}),
    "gep without residual": ("gep", {"residual_share": 0.0, "ascent_radius": 0.1}),
}
METHODS = {name: (finetune.METHODS[name], OWN[name]) for name in OWN if name != "gep"}
for name, (method, options) in FURTHER.items():
    METHODS[name] = finetune.METHODS[method], OWN[method] | options
every_method = pytest.mark.parametrize("name", METHODS)


def trainer_of(name, loss_fn=loss, **kwargs):
    method, options = METHODS[name]
    defaults = {
        "sampler": data.PoissonSampler(N, Q),
        "clip_norm": 0.8,
        "noise_multiplier": Z,
        "physical_batch_size": PHYSICAL,
        "ema_decay": 0.9,
        "engine": "vmap",
    }
    optimizer = kwargs.pop("optimizer", optax.sgd(0.3, momentum=0.9))
    return method(loss_fn, optimizer, **{**defaults, **options, **kwargs})


@functools.cache
def compiled(name):
    """Return one trainer per method for all tests that do not count how often it compiles."""
    return trainer_of(name)


def keyed(trainer, number=0):
    """Return a first state with known keys."""
    state = trainer.init(params_of())
    key = noise.stream(bytes([number] * 16), "test")
    return state._replace(
        noise=state.noise._replace(key=key), key=jax.random.key(number, impl="threefry2x32")
    )


def arrays(state):
    """Return everything that a state holds but its keys."""
    return [np.asarray(x) for x in jax.tree.leaves(state._replace(noise=None, key=None))]


def assert_same(one, other):
    for a, b in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(a, b)


def ledger_of():
    ledger = Ledger.in_memory()
    ledger.register("data", adjacency="add_remove", unit="example", delta=1e-5)
    return ledger


def fit(trainer, ledger, steps=7, **kwargs):
    return finetune.fit(
        trainer,
        params_of(),
        source_of(),
        steps=steps,
        account=ledger.account("data"),
        checkpoint_every=2,
        seed=bytes(range(16)),
        progress=False,
        **kwargs,
    )


@every_method
def test_truncated_batches_have_their_event(name):
    most = 5
    trainer = trainer_of(name, sampler=data.PoissonSampler(N, Q, truncated_batch_size=most))
    state = keyed(compiled(name))  # The batch depends on its key and step only.
    sizes = [len(trainer.drawn(state._replace(step=jnp.int32(step)))) for step in range(20)]
    assert max(sizes) == most < max(np.random.default_rng(0).binomial(N, Q, 20))
    events = composition(trainer.event(0, 3))
    assert sum(events.values()) == 3
    for event in events:
        assert isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent)
        assert (event.dataset_size, event.sampling_probability, event.truncated_batch_size) == (
            N,
            Q,
            most,
        )


@pytest.mark.slow
@every_method
def test_what_fit_gives_to_a_step_is_used_in_place(name):
    trainer, source = compiled(name), source_of()
    params = params_of()
    state = trainer.init(params)
    kept, _ = trainer.step(state, source)
    calls = []
    after, _ = trainer.step(
        state, source, meanwhile=lambda: calls.append(state.params["kernel"].is_deleted())
    )
    assert calls == [False]  # Evaluation and callbacks read the state before it is written over.
    assert all(
        leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state, state.ema))
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert_same(kept, after)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        trainer.step(state, source)
    function, arguments = trainer.programs(after, source)["update"]
    in_place = function.lower(*arguments).compile().memory_analysis().alias_size_in_bytes
    assert in_place >= sum(
        x.nbytes for x in jax.tree.leaves((after.params, after.opt_state, after.ema))
    )


@jax.numpy_rank_promotion("allow")  # as by default
def test_an_optimizer_keeps_the_shapes_of_parameters():
    """Without the assertion, an update of another shape would broadcast into the parameters."""
    wider = optax.stateless(lambda updates, _: jax.tree.map(lambda u: u[None], updates))
    trainer = trainer_of("dp_sgd", loss, optimizer=wider)
    with pytest.raises(AssertionError, match="optimizer must keep the shapes of params"):
        trainer.step(keyed(trainer), source_of())


@pytest.mark.slow
@every_method
def test_steps_compile_once_transfer_nothing_by_accident_and_keep_shapes_and_dtypes(name):
    traces = collections.Counter()

    def counted(params, example):
        traces["loss"] += 1
        return loss(params, example)

    @chex.assert_max_traces(n=1)
    def update(updates, state, params=None):
        return jax.tree.map(lambda u: -0.1 * u, updates), state

    chex.clear_trace_counter()
    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    trainer = trainer_of(name, counted, optimizer=optimizer)
    state, source = keyed(trainer), source_of()
    shapes, after_first = jax.tree.map(lambda x: (x.shape, x.dtype), state), None
    for step in range(5):
        with jax.transfer_guard("disallow" if step else "allow"):
            state, metrics = trainer.step(state, source)
        after_first = after_first or dict(traces)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
        assert np.isfinite(list(jax.device_get(metrics).values())).all()
    assert dict(traces) == after_first
    assert int(state.step) == int(state.noise.step) == 5


AWKWARD = np.stack(
    [
        np.zeros(FEATURES),
        np.full(FEATURES, np.nan),
        np.array([np.inf, 0, 0, 0, 0]),
        np.array([1, 1, 1, 1, -np.inf]),
        *(10.0**k * np.array([1.0, -2, 3, 0, 1e-3]) for k in (-42, -20, -8, -3, 0, 3, 8, 17, 30)),
    ]
).astype(np.float32)


@pytest.mark.slow
@every_method
def test_an_example_moves_the_sum_by_at_most_the_sensitivity(name):
    """Alone and beside others, whatever its size. One that is not finite moves at most a count."""
    trainer, features = compiled(name), source_of().arrays["features"].copy()
    features[: len(AWKWARD)] = AWKWARD
    source, state = source_of(features=features), trainer.refreshed(keyed(trainer))
    most = trainer.query.sensitivity("add_remove") * (1 + 1e-5)
    others = np.arange(len(AWKWARD), len(AWKWARD) + PHYSICAL - 1)
    rest, lengths = trainer.sums(state, source, others), []
    for row, example in enumerate(AWKWARD):
        alone = trainer.sums(state, source, np.array([row]))
        beside = trainer.sums(state, source, np.append(others, row))
        moved = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, beside, rest)
        lengths.append([float(np.linalg.norm(flat(tree))) for tree in (alone, moved)])
        assert max(lengths[-1]) <= most, example
        if not np.isfinite(example).all():
            counted = alone._replace(below=0) if hasattr(alone, "below") else alone
            assert not flat(counted).any(), example
    assert np.max(lengths) > 0.9 * most
    assert not flat(trainer.sums(state, source, np.zeros(0, np.int64))).any()


@pytest.mark.slow
@every_method
def test_numbers_of_numpy_and_jax_are_numbers(name):
    floats = trainer_of(name, clip_norm=0.5, noise_multiplier=1.0)
    others = trainer_of(name, clip_norm=np.float32(0.5), noise_multiplier=jnp.float32(1.0))
    assert floats.event(0, 3) == others.event(0, 3)
    one, other = (t.planned(3).step(keyed(t), source_of())[0] for t in (floats, others))
    np.testing.assert_allclose(flat(one.params), flat(other.params), rtol=1e-5)


@pytest.mark.parametrize("number", [np.float16, jnp.bfloat16])
def test_own_numbers_of_16_bits_do_not_round_the_weights(number):
    """Otherwise the norm of a contribution would exceed 1, or its place on the exact grid be 0."""
    share = {"residual_share": number(0.3), "residual_clip_norm": np.float16(2.1)}
    clip = trainer_of("adp_clip", noise_multiplier=1.0, count_noise=number(0.6)).query
    embedding = trainer_of("gep, basis kept", **share).query
    for weights in (clip.count_weight, clip.gradient_weight), embedding.weights:
        assert all(type(weight) is float for weight in weights)
        assert sum(weight**2 for weight in weights) == pytest.approx(1, abs=1e-12)
    assert type(embedding.residual_clip_norm) is float


@pytest.mark.slow
@every_method
def test_an_empty_batch_is_a_step_with_noise(name, monkeypatch):
    monkeypatch.setattr(
        finetune.PrivateTrainer, "drawn", lambda trainer, state: np.zeros(0, np.int64)
    )
    trainer, changes = compiled(name), []
    for number in (0, 1):
        state, _ = trainer.step(keyed(trainer, number), source_of())
        changes.append(np.asarray(state.params["kernel"]) - np.asarray(params_of()["kernel"]))
        assert np.isfinite(changes[-1]).all()
    assert all((change != 0).all() for change in [*changes, changes[0] - changes[1]])


@pytest.mark.slow
@every_method
def test_the_state_is_a_function_of_what_was_released(name):
    """Examples of two data sets differ, their sums do not: masked examples, and ones that are not
    finite."""
    trainer = compiled(name)
    features, label = (source_of().arrays[key].copy() for key in ("features", "label"))
    features[4] = np.nan
    one = other = keyed(trainer, 2)
    for _ in range(4):  # examples that are drawn must agree, and the rest may be anything
        assert trainer.drawn(one).size
        outside = np.setdiff1d(np.arange(N), [*trainer.drawn(one), 0])
        changed, classes = features.copy(), label.copy()
        changed[outside] = 1e3 * (1 + changed[outside])
        classes[outside] = 0
        changed[4] = np.inf
        one, metrics = trainer.step(one, source_of(features=features, label=label))
        other, same = trainer.step(other, source_of(features=changed, label=classes))
        assert_same(one, other)
        assert jax.device_get(metrics) == jax.device_get(same)


@pytest.mark.slow
@every_method
def test_an_example_that_is_not_finite_and_garbage_in_masked_rows_leave_everything_finite(
    name, monkeypatch
):
    monkeypatch.setattr(
        finetune.PrivateTrainer, "drawn", lambda trainer, state: np.array([1, 0, 2, 3, 11, 12])
    )
    trainer = compiled(name)
    features = source_of().arrays["features"].copy()
    features[:4] = [[np.nan], [np.inf], [1e38], [-np.inf]]  # example 0 is what padding repeats
    state = keyed(trainer)
    for _ in range(3):
        state, metrics = trainer.step(state, source_of(features=features))
        assert all(
            np.isfinite(x).all() for x in [*arrays(state), *jax.device_get(metrics).values()]
        )


@every_method
def test_events_compose_and_are_sampled_gaussians(name):
    trainer = compiled(name)
    whole = composition(trainer.event(0, 9))
    parts = dp_event.ComposedDpEvent(
        [trainer.event(0, 4), trainer.event(4, 5), trainer.event(5, 9)]
    )
    assert composition(parts) == whole
    assert sum(whole.values()) == 9
    for step, event in enumerate(trainer.event(t, t + 1) for t in range(9)):
        sigma = Z * np.exp(-0.2 * (step // 4)) if name == "adp_alloc" else Z
        ((single, count),) = composition(event).items()
        assert isinstance(single, dp_event.PoissonSampledDpEvent)
        assert (single.sampling_probability, count) == (Q, 1)
        assert single.event.noise_multiplier == pytest.approx(sigma, rel=1e-12)
    assert composition(trainer.event(3, 3)) == {}
    for first, last in [(-1, 2), (3, 2)]:
        with pytest.raises(ValueError, match="0 <= first <= last"):
            trainer.event(first, last)


class Crash(Exception):
    pass


@pytest.mark.slow
@every_method
def test_a_run_that_is_interrupted_ends_like_one_that_was_not_and_both_pay_once(
    name, tmp_path, monkeypatch
):
    trainer, ledger = compiled(name), ledger_of()
    whole = fit(trainer, ledger)
    assert composition(ledger.events("data")[None]) == composition(trainer.event(0, 7))
    assert ledger.epsilon("data") == pytest.approx(
        epsilon(trainer.event(0, 7), delta=1e-5), rel=1e-6
    )

    step, ledger = finetune.PrivateTrainer.step, ledger_of()
    for crash in (1, 4, 3):  # in the first chunk, at the second's end, and in the third
        count = itertools.count(1)

        def crashing(*args, count=count, crash=crash):
            result = step(*args)
            if next(count) == crash:
                raise Crash
            return result

        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(finetune.PrivateTrainer, "step", crashing)
            fit(trainer, ledger, workdir=tmp_path)
    resumed = fit(trainer, ledger, workdir=tmp_path)
    assert_same(resumed, whole)
    assert composition(ledger.events("data")[None]) == composition(trainer.event(0, 7))
    again = fit(trainer, ledger, workdir=tmp_path)  # nothing is left to do, nor to pay
    assert_same(again, whole)
    assert composition(ledger.events("data")[None]) == composition(trainer.event(0, 7))


@pytest.mark.slow
def test_what_a_token_hashes_tells_methods_apart():
    source = source_of()

    def identity(trainer):
        return digest([text_of(trainer, keyed(trainer), source), trainer.query.public])

    identities = [identity(compiled(name)) for name in METHODS]
    assert len(set(identities)) == len(METHODS)
    assert identity(trainer_of("gep, basis kept")) in identities


@pytest.mark.slow
@every_method
def test_unknown_and_missing_arguments_are_refused(name):
    with pytest.raises(TypeError, match="learning_rat"):
        trainer_of(name, learning_rat=0.1)
    method, options = METHODS[name]
    with pytest.raises(TypeError, match="sampler"):
        method(
            loss,
            optax.sgd(0.1),
            physical_batch_size=4,
            clip_norm=1.0,
            noise_multiplier=Z,
            **options,
        )
