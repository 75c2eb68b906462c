"""What a user may get wrong, and the error that says so before anything private is touched."""

import importlib.util
import pathlib

import jax
import numpy as np
import optax
import pytest

from jaxdp import tta

_spec = importlib.util.spec_from_file_location("tiny_model", pathlib.Path(__file__).with_name("tiny_model.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

TENT = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=1.0)


def adapter_of(method=TENT, apply_fn=tiny.apply_fn, **settings):
    return tta.Adapter(apply_fn, tiny.PARAMS, method, optax.sgd(0.1), **settings)


def test_condition_7_tracing_bakes_in_no_key():
    adapter = adapter_of()
    with pytest.raises(ValueError, match="call init outside jit, or pass key"):
        jax.jit(adapter.init)()
    assert jax.jit(adapter.init)(jax.random.key(0)).step == 0


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
