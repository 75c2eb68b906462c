"""The adapter: what a step compiles, copies, keeps and resets; masks, keys, accumulation and number
formats."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from scipy import stats

from jaxdp import tta
from tests.tta import tiny_model as tiny

LN = math.log(tiny.CLASSES)
SGD = optax.sgd(0.1, momentum=0.9)
EATA = tta.EATA(tiny.CLASSES, margin=1.1 / LN, diversity=0.7)
SAR = tta.SAR(tiny.CLASSES, margin=1.1 / LN)
DEYO = tta.DeYO(tiny.CLASSES, entropy_margin=1.2 / LN, margin=0.7, augmentation="occlusion")
TENT = tta.Tent()
# Many tests share a compiled step: the same method, optimizer, schedule of resets and batch size.
TUNABLE = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
EVERY_4 = {"optimizer": TUNABLE, "reset_every": 4}


def private(method, clip_norm=0.5, noise_multiplier=0.0, **kwargs):
    return tta.private(method, clip_norm=clip_norm, noise_multiplier=noise_multiplier, **kwargs)


def adapter_of(method, optimizer=SGD, params=tiny.PARAMS, apply_fn=tiny.apply_fn, **kwargs):
    return tta.Adapter(apply_fn, params, method, optimizer, **kwargs)


def same(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(a, b)


def logits_of(params, images):
    """Returns the oracle's logits."""
    return tiny.MODEL.logits(tiny.theta_of(params), images)


def close(a, b, atol=2e-6):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=atol)


# --- Compilation ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [EATA, private(TENT, noise_multiplier=1.0)], ids=["published", "private"]
)
def test_thirty_steps_with_masks_and_resets_compile_once(method):
    adapter = adapter_of(method, **EVERY_4)
    masks = np.random.default_rng(0).random((30, 6)) < 0.7
    state, traces = adapter.init(jax.random.key(0)), []
    for t, batch in enumerate(tiny.stream(0, 30)):
        state = adapter.reset(state) if t % 11 == 0 else state
        state, _ = adapter.step(
            state, batch, jax.random.key(t) if t % 2 else None, masks[t] if t % 3 else None
        )
        traces.append(len(tiny.CALLS))
    assert len({*traces}) == 1 and state.step == 30


@pytest.mark.slow
def test_changed_clip_norm_noise_and_learning_rate_share_a_program():
    adapters = [adapter_of(private(TENT, c, s), **EVERY_4) for c in (0.1, 1.0) for s in (0.5, 2.0)]
    batches, counts = tiny.stream(0, 2), []
    thetas = []
    for adapter in adapters:
        states, _ = tiny.run(adapter, batches)
        counts.append(len(tiny.CALLS))
        thetas.append(tiny.theta_of(states[-1].params))
    state, _ = adapters[0].step(adapters[0].init(jax.random.key(1)), batches[0])
    faster = {"learning_rate": 2 * state.opt_state.hyperparams["learning_rate"]}
    adapters[0].step(
        state._replace(opt_state=state.opt_state._replace(hyperparams=faster)), batches[0]
    )
    assert len({*counts, len(tiny.CALLS)}) == 1
    assert len({theta.tobytes() for theta in thetas}) == 4


# --- The model is left alone ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", [SAR, private(SAR)], ids=["published", "private"])
def test_the_source_model_is_left_alone_and_frozen_parameters_are_not_copied(method):
    source = jax.tree.map(lambda x: x + 0, tiny.PARAMS)
    copy = jax.tree.map(np.array, source)
    adapter = adapter_of(method, params=source)
    assert adapter.adapted_paths == ("block_0/norm/bias", "block_0/norm/scale")
    states, _ = tiny.run(adapter, tiny.stream(0, 2))
    state = adapter.reset(states[-1])
    jax.tree.map(np.testing.assert_array_equal, source, copy)
    jax.tree.map(np.testing.assert_array_equal, state.params, copy)
    for params in (states[-1].params, state.params, adapter.init().params):
        assert params["embed"] is source["embed"] and params["head"] is source["head"]
        assert params["block_1"]["norm"]["scale"] is source["block_1"]["norm"]["scale"]
    assert states[-1].params["block_0"]["norm"]["scale"] is not source["block_0"]["norm"]["scale"]


def test_parameters_may_be_numpy_arrays_and_a_predicate_chooses():
    params = jax.tree.map(np.asarray, tiny.PARAMS)
    adapter = adapter_of(
        TENT, params=params, adapted=lambda path, leaf: path == "head" and leaf.ndim == 2
    )
    state, _ = adapter.step(adapter.init(), tiny.stream(0)[0])
    assert adapter.adapted_paths == ("head",)
    assert not np.array_equal(state.params["head"], params["head"])
    jax.tree.map(same, state.params["block_0"], params["block_0"])


@pytest.mark.slow
def test_any_optimizer():
    adapter = adapter_of(private(TENT), optax.adamw(1e-2))
    states, _ = tiny.run(adapter, tiny.stream(0, 3))
    assert all(x.shape in {(), (tiny.WIDTH,)} for x in jax.tree.leaves(states[-1].opt_state)), (
        "moments of what adapts"
    )
    assert 0 < np.abs(tiny.theta_of(states[-1].params) - tiny.THETA).max() < 0.05


# --- Masks ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [EATA, SAR, tta.clipped(EATA, 0.5)], ids=["EATA", "SAR", "clipped"]
)
def test_padding_is_a_smaller_batch_to_the_published_methods(method):
    batches, mask = tiny.stream(0, 3), np.arange(6) < 4
    padded = np.where(mask[:, None, None, None], batches, 9).astype(np.float32)
    adapter = adapter_of(method)
    states, logits = tiny.run(adapter, padded, masks=[mask] * 3)
    expected, expected_logits = tiny.run(adapter, batches[:, :4])
    close(np.stack(logits)[:, :4], np.stack(expected_logits), 1e-5)
    for state, other in zip(states, expected, strict=True):
        jax.tree.map(close, state[1:4], other[1:4])
    empty, _ = adapter.step(states[-1], batches[0], None, ~(mask | True))
    jax.tree.map(same, empty.memory, states[-1].memory)
    if isinstance(method, tta.Method) and method.skips_empty:
        jax.tree.map(same, empty[1:4], states[-1][1:4])


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [EATA, private(TENT), tta.clipped(EATA, 0.5)],
    ids=["published", "private", "clipped"],
)
@pytest.mark.parametrize("junk", [np.nan, 1e38])
def test_padding_may_hold_anything(method, junk):
    batch, mask = tiny.stream(0)[0], np.arange(6) < 4
    adapter = adapter_of(method)
    expected, _ = adapter.step(adapter.init(jax.random.key(0)), batch, None, mask)
    batch[4:] = junk
    state, _ = adapter.step(adapter.init(jax.random.key(0)), batch, None, mask)
    jax.tree.map(same, state, expected)


# --- Accumulation ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", [TENT, SAR, DEYO], ids=["Tent", "SAR", "DeYO"])
def test_batches_of_one_accumulate_to_a_batch(method):
    batches = tiny.stream(2, 3, 4)
    whole, _ = tiny.run(adapter_of(private(method)), batches)
    singles = batches.reshape(12, 1, *batches.shape[2:])
    states, logits = tiny.run(adapter_of(private(method), accumulate=4), singles)
    for t, state in enumerate(states):
        expected = whole[t // 4] if t % 4 == 3 else whole[t // 4 - 1] if t >= 4 else None
        assert state.step == t + 1
        close(
            tiny.theta_of(state.params),
            tiny.THETA if expected is None else tiny.theta_of(expected.params),
        )
        assert all(x.any() == (t % 4 != 3) for x in jax.tree.leaves(state.pending))
        if expected is not None:
            jax.tree.map(
                close, (state.opt_state, state.released), (expected.opt_state, expected.released)
            )
    before = states[-1]._replace(params=states[6].params)
    close(logits[7], logits_of(before.params, singles[7]), 1e-5)


@pytest.mark.slow
def test_noise_of_accumulated_updates():
    # Fixed keys; over their choice, a correct scale fails with probability below 1e-6.
    accumulate, size, sigma, clip_norm = 3, 2, 0.8, 0.5
    adapter = adapter_of(
        private(TENT, clip_norm, sigma),
        optax.sgd(1.0),
        accumulate=accumulate,
        reset_every=accumulate,
    )
    nothing = np.zeros((accumulate * 150, size), bool)
    batches = np.zeros((len(nothing), size, tiny.SIDE, tiny.SIDE, 3), np.float32)
    states, _ = tiny.run(adapter, batches, masks=nothing)
    noise = np.stack([tiny.theta_of(s.params) - tiny.THETA for s in states])
    assert not noise[0::3].any() and not noise[1::3].any()
    noise = noise[2::3] / (sigma * clip_norm / (accumulate * size))
    assert stats.kstest(noise.ravel(), stats.norm.cdf).pvalue > 1e-6
    for wrong in (0.7, 1.3):
        assert stats.kstest(noise.ravel() / wrong, stats.norm.cdf).pvalue < 1e-9


@pytest.mark.slow
def test_a_reset_forgets_an_unfinished_update():
    adapter = adapter_of(private(TENT), accumulate=4)
    states, _ = tiny.run(adapter, tiny.stream(2, 3, 1))
    reset = adapter.reset(states[-1])
    assert not any(x.any() for x in jax.tree.leaves(reset.pending)) and reset.step == 3


def test_accumulation_is_for_private_methods():
    remedy = r"optax\.MultiSteps\(optimizer, A\)\.gradient_transformation\(\)"
    for method, accumulate in ((TENT, 2), (private(TENT), 0)):
        with pytest.raises(
            ValueError, match=rf"accumulate must be at least 1.*got {accumulate}.*{remedy}"
        ):
            adapter_of(method, accumulate=accumulate)
    # What the error advises: the parameters move after every second batch.
    optimizer = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    states, _ = tiny.run(adapter_of(TENT, optimizer), tiny.stream(2, 2, 1))
    middle, end = (jax.tree.leaves(state.params) for state in states)
    assert all(map(np.array_equal, jax.tree.leaves(tiny.PARAMS), middle))
    assert not all(map(np.array_equal, middle, end))


# --- Resets, predictions --------------------------------------------------------------------------


@pytest.mark.slow
def test_reset_every():
    batches = tiny.stream(4, 6)
    states, logits = tiny.run(adapter_of(EATA, **EVERY_4), batches)
    first, first_logits = tiny.run(adapter_of(EATA, TUNABLE), batches[:4])
    second, second_logits = tiny.run(adapter_of(EATA, TUNABLE), batches[4:])
    for state, expected in zip(states, first + second, strict=True):
        jax.tree.map(close, state[1:2], expected[1:2])
        jax.tree.map(close, state.memory, expected.memory)
    close(np.stack(logits), np.stack(first_logits + second_logits), 1e-5)
    assert [int(s.step) for s in states] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("method", [TENT, private(TENT)], ids=["published", "private"])
def test_predictions_after_adapting(method):
    batches = tiny.stream(5, 3)
    before, earlier = tiny.run(adapter_of(method), batches)
    states, logits = tiny.run(adapter_of(method, predict="after"), batches)
    for t in range(3):
        jax.tree.map(close, states[t].params, before[t].params)
        close(logits[t], logits_of(states[t].params, batches[t]), 1e-5)
        close(
            earlier[t], logits_of(tiny.PARAMS if t == 0 else states[t - 1].params, batches[t]), 1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("method", [EATA, private(SAR)], ids=["published", "private"])
def test_batches_of_one(method):
    adapter = adapter_of(method)
    states, logits = tiny.run(adapter, tiny.stream(6, 4, 1))
    assert (
        logits[0].shape == (1, tiny.CLASSES) and np.isfinite(tiny.theta_of(states[-1].params)).all()
    )
    assert np.abs(tiny.theta_of(states[-1].params) - tiny.THETA).max() > 0


# --- Formats --------------------------------------------------------------------------------------


def bf16_apply(params, images):
    return tiny.apply_fn(params, images).astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "accumulate"),
    [(SAR, 1), (private(SAR), 1), (private(TENT), 2)],
    ids=["published", "private", "accumulated"],
)
def test_bf16_parameters(method, accumulate):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.PARAMS)
    adapter = adapter_of(method, params=params, apply_fn=bf16_apply, accumulate=accumulate)
    state, _ = adapter.step(adapter.init(), tiny.stream(0)[0])
    before = len(tiny.CALLS)
    for batch in tiny.stream(0):
        state, logits = adapter.step(state, batch)
    assert len(tiny.CALLS) == before
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves((state.opt_state, state.released, state.pending))} == {
        jnp.dtype("float32")
    }
    assert (
        np.isfinite(logits).all()
        and np.abs(tiny.theta_of(state.params) - tiny.theta_of(params)).max() > 0
    )


@pytest.mark.slow
def test_images_may_be_bytes():
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3)).astype(np.uint8)

    def from_bytes(params, images):
        return tiny.apply_fn(params, images.astype(jnp.float32) / 128 - 1)

    adapter = adapter_of(private(TENT), apply_fn=from_bytes)
    state, logits = adapter.step(adapter.init(), images)
    expected, expected_logits = tiny.run(
        adapter_of(private(TENT)), [images.astype(np.float32) / 128 - 1]
    )
    close(logits, expected_logits[0], 1e-5)
    close(tiny.theta_of(state.params), tiny.theta_of(expected[0].params))


# --- Keys -----------------------------------------------------------------------------------------


def test_keys():
    adapter, batch = adapter_of(private(TENT, noise_multiplier=1.0), **EVERY_4), tiny.stream(0)[0]
    state = adapter.init(jax.random.key(1))
    jax.tree.map(same, adapter.step(state, batch), adapter.step(state, batch))
    injected, _ = adapter.step(state, batch, jax.random.key(3))
    same(injected.key, state.key)  # an injected key serves its step only


# --- Meshes ---------------------------------------------------------------------------------------


def mesh_of(count=4):
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))


def divided(path, leaf):
    return PartitionSpec("data") if path == "embed" else PartitionSpec()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [EATA, private(DEYO, noise_multiplier=1.0), tta.clipped(EATA, 0.5)],
    ids=["published", "private", "clipped"],
)
def test_a_mesh_shares_padded_batches_and_changes_nothing(method):
    # Six images on four devices. Padding that counted in the divisor, or drew other keys, would
    # change the parameters.
    alone, many = adapter_of(method), adapter_of(method, mesh=mesh_of(), param_sharding=divided)
    one, other, traces = alone.init(jax.random.key(0)), many.init(jax.random.key(0)), []
    for t, batch in enumerate(tiny.stream(0, 3)):
        mask = np.arange(6) != t
        one, want = alone.step(one, batch, None, mask)
        other, got = many.step(other, batch, None, mask)
        close(got, want)
        traces.append(len(tiny.CALLS) if t else None)
    close(tiny.theta_of(other.params), tiny.theta_of(one.params))
    assert traces[1] == traces[2]
    assert other.params["embed"].sharding.spec == PartitionSpec("data")
    # as a resumed stream begins
    again = many.whole(jax.device_get(many.parts(other)), jax.random.key(0))
    assert again.params["embed"].sharding.spec == PartitionSpec("data")
    assert len({a.lowered_text(a.init(), tiny.stream(0)[0]) for a in (alone, many)}) == 2


def test_each_device_gets_its_part_of_a_batch():
    seen = []

    def watched(params, images):
        jax.debug.inspect_array_sharding(images, callback=seen.append)
        return tiny.apply_fn(params, images)

    adapter = adapter_of(TENT, apply_fn=watched, mesh=mesh_of())
    adapter.step(adapter.init(), tiny.stream(0)[0])
    assert any(sharding.shard_shape((8, 4, 4, 3)) == (2, 4, 4, 3) for sharding in seen)


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"method": "tent"},
            TypeError,
            r"method must be a jaxdp.tta.Method, or private\(...\) or clipped\(...\) of one, "
            "got str",
        ),
        ({"reset_every": 0}, ValueError, "reset_every must be at least 1 or None, got 0"),
        ({"predict": "now"}, ValueError, "predict must be 'before' or 'after', got 'now'"),
        ({"mesh": 4}, TypeError, "mesh must be a jax.sharding.Mesh, got int"),
        (
            {"mesh": mesh_of(), "data_axes": ("rows",)},
            ValueError,
            "data_axes must be a tuple of names of mesh axes",
        ),
        (
            {"mesh": mesh_of(5), "param_sharding": divided},
            ValueError,
            "param_sharding gives 'embed' of shape .48, 6.",
        ),
        ({"param_sharding": divided}, ValueError, "param_sharding needs mesh="),
        (
            {"adapted": lambda path, leaf: False},
            ValueError,
            "adapted selects no parameter.*block_0/norm/bias",
        ),
    ],
)
def test_arguments_are_checked(changes, error, message):
    with pytest.raises(error, match=message):
        tta.Adapter(
            **{
                "apply_fn": tiny.apply_fn,
                "params": tiny.PARAMS,
                "method": TENT,
                "optimizer": SGD,
                **changes,
            }
        )


@pytest.mark.parametrize("mask", [np.ones(6), np.ones(5, bool), np.ones((6, 1), bool)])
def test_masks_are_checked(mask):
    adapter = adapter_of(TENT)
    with pytest.raises(ValueError, match=r"mask must be boolean of shape \(6,\), got "):
        adapter.step(adapter.init(), tiny.stream(0)[0], None, mask)


@pytest.mark.slow
def test_an_adapter_can_be_replaced_with_other_settings():
    adapter = dataclasses.replace(adapter_of(TENT), reset_every=3, predict="after")
    assert adapter.reset_every == 3 and adapter.method is TENT
