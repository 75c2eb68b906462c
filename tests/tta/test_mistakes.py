"""What a user may get wrong, and the error that says so before anything private is touched."""

import jax
import numpy as np
import optax
import pytest

from jaxdp import tta
from tests.tta import tiny_model as tiny

SGD = optax.sgd(0.1)
TENT = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=1.0)


def adapter_of(method=TENT, apply_fn=tiny.apply_fn, optimizer=SGD, **settings):
    return tta.Adapter(apply_fn, tiny.PARAMS, method, optimizer, **settings)


def test_condition_7_tracing_bakes_in_no_key():
    adapter = adapter_of()
    with pytest.raises(ValueError, match="Call init outside jit, or pass key"):
        jax.jit(adapter.init)()
    assert jax.jit(adapter.init)(jax.random.key(0)).step == 0
    # Under vmap all models would share one key.
    models = jax.tree.map(lambda x: np.stack([x, x]), tiny.PARAMS)
    with pytest.raises(ValueError, match="Call init outside jit, or pass key"):
        jax.vmap(lambda params: tta.Adapter(tiny.apply_fn, params, TENT, SGD).init())(models)


@pytest.mark.parametrize("key", [0, np.zeros(2, np.uint32)])
def test_keys_are_typed(key):
    adapter = adapter_of()
    for use in (adapter.init, lambda key: adapter.step(adapter.init(), tiny.stream(0)[0], key)):
        with pytest.raises(TypeError, match="key must be a typed key such as"):
            use(key)


@pytest.mark.parametrize("method", [TENT, tta.Tent()], ids=["private", "published"])
def test_a_batch_has_a_size(method):
    adapter, images = adapter_of(method), tiny.stream(0)[0]
    for batch in (images[:0], images[0, 0, 0, 0]):
        with pytest.raises(ValueError, match=r"batch must be images \[B, ...\] with B at least 1"):
            adapter.step(adapter.init(), batch)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"accumulate": 2, "reset_every": 3},
            ValueError,
            "reset_every must be a multiple of accumulate",
        ),
        (
            {"optimizer": 0.1},
            TypeError,
            r"optimizer must be one of optax, such as optax.sgd\(1e-3\), got float",
        ),
    ],
)
def test_settings(settings, error, message):
    with pytest.raises(error, match=message):
        adapter_of(**settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"apply_fn": lambda params, images: (tiny.apply_fn(params, images), {})},
            "must return logits",
        ),
        (
            {"apply_fn": lambda params, images: tiny.apply_fn(params, images).sum(-1)},
            r"but returned \(2,\) for a batch of 2",
        ),
        ({"method": tta.COME(tta.Tent(), 10)}, "num_classes=10, but apply_fn returns 4 logits"),
        (
            {"method": tta.EATA(4, fisher={**tiny.PARAMS, "head": None})},
            "fisher holds other parameters than the adapter adapts",
        ),
    ],
)
def test_what_does_not_fit_the_model(changes, message):
    adapter = adapter_of(**changes)
    with pytest.raises(ValueError, match=message):
        adapter.step(adapter.init(), tiny.stream(0)[0])


@pytest.mark.parametrize("base", [TENT, tta.Tent])
def test_come_is_over_a_method(base):
    with pytest.raises(TypeError, match="base_method must be a method such as"):
        tta.COME(base, 4)


def test_a_state_in_a_log_tells_no_secrets():
    state = adapter_of(accumulate=2).init(jax.random.key(0))
    assert repr(state) == f"{state}" == "AdaptState(step=0, ...)"


@pytest.mark.slow
def test_condition_6_no_private_step_goes_on_from_a_raw_memory():
    eata, images = tta.EATA(tiny.CLASSES), tiny.stream(0)[0]
    published = adapter_of(eata)
    adapter = adapter_of(tta.private(eata, clip_norm=1.0, noise_multiplier=1.0))
    state, _ = published.step(published.init(), images)
    with pytest.raises(ValueError, match="It holds a memory of raw images"):
        adapter.step(state, images)
    state, _ = adapter.step(adapter.reset(state), images)
    assert state.memory == ()
