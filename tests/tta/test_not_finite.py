"""A record without a finite loss contributes nothing, to any method in any form, and stops
nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import tta
from tests.tta import tiny_model as tiny

SGD = optax.sgd(0.1, momentum=0.9)
X = tiny.stream(1)[0, 0]
BAD = {
    "NaN": np.full_like(X, np.nan),
    "one NaN": np.where(np.arange(X.size).reshape(X.shape) == 5, np.nan, X),
    "infinite": np.full_like(X, np.inf),
    "overflow": np.sign(X) * np.float32(3e38),  # finite, but not what the model computes from it
}


METHODS = {
    "Tent": tta.Tent(),
    "EATA": tta.EATA(4, margin=0.9, diversity=1.1),
    "SAR": tta.SAR(4, margin=0.9, reset_below=0.01),
    "DeYO": tta.DeYO(4, entropy_margin=1.0, plpd_margin=-1.0, augmentation=tiny.upside_down),
    "COME": tta.COME(tta.Tent(), 4),
    "clipped SAR": tta.clipped(tta.SAR(4, margin=0.9, reset_below=0.01), 0.5),
    "private DeYO": tta.private(
        tta.DeYO(4, augmentation=tiny.upside_down), clip_norm=1.0, noise_multiplier=0.5
    ),
    "private SAR": tta.private(tta.SAR(4), clip_norm=1.0, noise_multiplier=0.5, filters="keep"),
}


def adapter_of(method, apply_fn=tiny.apply_fn, params=tiny.PARAMS, **settings):
    return tta.Adapter(apply_fn, params, method, SGD, **settings)


def close(state, other, **tolerance):
    """Asserts that two states are equal up to rounding and finite."""
    leaves = (jax.tree.leaves(s._replace(key=None)) for s in (state, other))
    for one, two in zip(*leaves, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, two, **({"rtol": 2e-5, "atol": 2e-6} | tolerance))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_record_without_a_loss_is_a_masked_record(name):
    adapter, steps = adapter_of(METHODS[name]), tiny.stream(2, steps=len(BAD))
    damaged = steps.copy()
    damaged[np.arange(len(BAD)), 2] = list(BAD.values())
    mask = np.ones((len(BAD), 6), bool)
    mask[:, 2] = False
    states, logits = tiny.run(adapter, damaged)
    masked, expected = tiny.run(adapter, steps, masks=mask)
    for one, two in zip(states, masked, strict=True):
        close(one, two)
    assert np.abs(tiny.theta_of(states[-1].params) - tiny.THETA).max() > 1e-3
    assert not np.isfinite(np.array(logits)[:, 2]).all(-1).any(), "the rows of such records say so"
    np.testing.assert_allclose(
        np.delete(logits, 2, axis=1), np.delete(expected, 2, axis=1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if "private" not in name])
def test_a_batch_without_a_loss_changes_nothing(name):
    adapter, images = adapter_of(METHODS[name]), tiny.stream(2, steps=2)
    images[1] = np.stack([*BAD.values(), BAD["NaN"], BAD["NaN"]])
    (before, after), _ = tiny.run(adapter, images)
    assert after.step == 2
    close(after._replace(step=before.step), before, rtol=0, atol=0)


@pytest.mark.slow
def test_padding_beside_records_without_a_loss():
    adapter, images = adapter_of(tta.Tent()), tiny.stream(2)[0]
    images[:3], mask = np.nan, np.array([False, True, False, True, True, True])
    state, _ = adapter.step(adapter.init(jax.random.key(1)), images, mask=mask)
    mask[:3] = False
    other, _ = adapter.step(adapter.init(jax.random.key(1)), tiny.stream(2)[0], mask=mask)
    close(state, other)


@pytest.mark.slow
def test_a_second_view_without_logits_leaves_its_record_out():
    def erase(key, image):
        return jnp.where(image[0, 0, 0] > 100, jnp.nan, image[::-1])

    method = tta.DeYO(4, entropy_margin=1.0, plpd_margin=-1.0, augmentation=erase)
    adapter, images = adapter_of(method), tiny.stream(2)[0]
    images[1, 0, 0, 0] = 101
    state, logits = adapter.step(adapter.init(jax.random.key(1)), images)
    other, _ = adapter.step(adapter.init(jax.random.key(1)), images, mask=np.arange(6) != 1)
    close(state, other)
    assert np.isfinite(logits).all()


@jax.custom_jvp
def _steep(x):
    return x


# The derivative is infinite where the value is large.
_steep.defjvp(lambda x, t: (x[0], t[0] * jnp.where(jnp.abs(x[0]) > 50, jnp.inf, 1.0)))


def steep(params, images):
    marks = images[:, 0, 0, 0]
    outlier = jnp.where(marks > 100, 60.0, 0.0)[:, None] * jnp.array([[1.0, 0, 0, 0]])
    return _steep(tiny.apply_fn(params, images) + outlier)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_makes_no_step_and_no_clipped_contribution():
    images = tiny.stream(2, steps=2)
    images[1, 1, 0, 0, 0] = 101
    adapter = adapter_of(tta.Tent(), apply_fn=steep)
    (before, after), _ = tiny.run(adapter, images)
    close(after._replace(step=before.step), before, rtol=0, atol=0)
    adapter = adapter_of(tta.clipped(tta.Tent(), 0.5), apply_fn=steep)
    (state, _), _ = tiny.run(adapter, images[::-1])
    (other, _), _ = tiny.run(adapter, images[::-1], masks=[np.arange(6) != 1, np.ones(6, bool)])
    close(state, other)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["batch", "example"])
def test_fisher_without_such_images(gradients):
    images = tiny.stream(2)[0]
    damaged = np.concatenate([images, BAD["NaN"][None], BAD["overflow"][None]])
    every = [damaged, np.full_like(images, np.nan)]
    with pytest.warns(UserWarning, match="8 of 14 images have no finite prediction or gradient"):
        found = tta.fisher(tiny.apply_fn, tiny.PARAMS, every, gradients=gradients)
    expected = tta.fisher(tiny.apply_fn, tiny.PARAMS, [images], gradients=gradients)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-9)
    with pytest.raises(ValueError, match="no image with a finite prediction"):
        tta.fisher(tiny.apply_fn, tiny.PARAMS, every[1:], gradients=gradients)


# --- One logit ---


def one_logit(params, images):
    return tiny.apply_fn(params, images)[:, :1]


@pytest.mark.parametrize("form", [tta.Tent(), tta.clipped(tta.Tent(), 1.0), METHODS["private SAR"]])
def test_one_logit_is_refused_before_a_batch_is_seen(form):
    for use in (
        lambda a: a.prepare(tiny.stream(0)[0]),
        lambda a: a.step(a.init(), tiny.stream(0)[0]),
    ):
        with pytest.raises(
            ValueError, match=r"at least two logits, got 1|num_classes=4, but apply_fn returns 1"
        ):
            use(adapter_of(form, apply_fn=one_logit))
    with pytest.raises(ValueError, match=r"at least two logits, got 1.*Return jnp.concatenate"):
        tta.fisher(one_logit, tiny.PARAMS, [tiny.stream(0)[0]])
