"""Audits of private test-time adaptation: how much they find, and by which scores.

`tests/launch/test_audit.py` has broken twins of every method.

Runs have fixed seeds. Over the choice of a seed, a healthy adapter fails with probability below
0.001, the confidence of the bounds; that broken ones are caught and that much is found fails with
probability of about 0.01."""

import dataclasses
import importlib.util
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp.tta.step
from jaxdp import tta
from jaxdp.audit import tta as canaries
from jaxdp.privacy import GaussianDpEvent, epsilon
from jaxdp.transforms.clipping import clipped_grad
from jaxdp.tta.method import entropy

_spec = importlib.util.spec_from_file_location(
    "tiny_model", pathlib.Path(__file__).parents[1] / "tta" / "tiny_model.py"
)
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

SEED, DELTA, SIGMA = bytes(range(16)), 1e-5, 0.5
MARGIN = 0.6
IMAGES = tiny.stream(0, steps=1, size=60)[0]
ENTROPY = np.asarray(jax.vmap(entropy)(tiny.apply_fn(tiny.PARAMS, jnp.asarray(IMAGES))))
RELIABLE = MARGIN * math.log(tiny.CLASSES) > ENTROPY
BATCH, CANDIDATES = (
    IMAGES[~RELIABLE][:4],
    np.concatenate([IMAGES[RELIABLE][:4], IMAGES[~RELIABLE][4:8]]),
)


SGD, TENT = optax.sgd(1.0), tta.Tent()


def adapter_of(*, sigma=SIGMA):
    """With the same method and optimizer, the same compiled steps."""
    method = tta.private(TENT, clip_norm=0.01, noise_multiplier=sigma)
    return tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, SGD)


# One call of the audit has 257 trials. With as many at most, all tests share its program.
def audit(adapter, *, trials=257, adjacency="zero_out", **options):
    options = {"delta": DELTA, "confidence": 0.999, "seed": SEED, **options}
    return canaries.audit_stream(
        adapter, BATCH, CANDIDATES, trials=trials, adjacency=adjacency, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_a_private_stream_passes_and_most_of_epsilon_is_found(adjacency):
    sigma = {"zero_out": SIGMA, "replace_one": 2 * SIGMA}[adjacency]
    found = audit(adapter_of(sigma=sigma), adjacency=adjacency)
    assert found.upper == pytest.approx(epsilon(GaussianDpEvent(SIGMA), delta=DELTA))
    assert 0.35 * found.upper < found.lower <= found.upper
    assert found.trials == 514 and not found.violated


EATA = tta.EATA(tiny.CLASSES, margin=MARGIN)


@pytest.mark.slow
def test_a_filter_outside_of_the_clip_is_caught(monkeypatch):
    """As published, the mean is over the images that the filter lets pass: their number tells about
    each of them. `launch.audits.tta` has the filter inside of the clip."""

    def mean_over_the_kept(loss, **options):
        inside = clipped_grad(loss, **options)

        def grads_of(params, examples, mask):
            result = inside(params, examples, mask)
            kept = mask & (jax.vmap(entropy)(result.aux) < MARGIN * math.log(tiny.CLASSES))
            scale = len(mask) / jnp.maximum(kept.sum(), 1)
            return dataclasses.replace(
                result, grads=jax.tree.map(lambda g: g * scale, result.grads)
            )

        return grads_of

    monkeypatch.setattr(jaxdp.tta.step, "clipped_grad", mean_over_the_kept)
    method = tta.private(EATA, clip_norm=0.01, noise_multiplier=SIGMA, filters="keep")
    found = audit(tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, optax.sgd(1.0)))
    assert found.violated


@pytest.mark.slow
def test_updates_of_one_call_are_those_of_single_calls_each_with_noise_of_its_own():
    """The claim is of one update; a call makes many, and fills up its last part."""
    adapter, keys = adapter_of(), jax.random.split(jax.random.key(0), 3)

    def end(key):
        state, _ = adapter.step(adapter.init(key), jnp.asarray(BATCH))
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(state.params)])

    np.testing.assert_allclose(jax.vmap(end)(keys), [end(key) for key in keys], rtol=1e-5)


def scores_of(monkeypatch, *args, **kwargs):
    heard = []
    monkeypatch.setattr(canaries.bounds, "multi_run", lambda *scores, **terms: heard.extend(scores))
    audit(*args, **kwargs)
    return heard


@pytest.mark.slow
@pytest.mark.parametrize("trials", [2, 257, 300])
def test_every_trial_has_noise_of_its_own(trials, monkeypatch):
    scores = scores_of(monkeypatch, adapter_of(), trials=trials)
    assert [len(kind) for kind in scores] == [trials, trials]
    assert len(np.unique(scores)) == 2 * trials


@pytest.mark.slow
def test_scores_have_the_noise_of_the_method_and_other_scales_are_rejected(monkeypatch):
    present, absent = scores_of(monkeypatch, adapter_of(), trials=600)
    # The canary moves the update by at most C / B along the score's direction, the noise is sigma C
    # / B.
    moved = present.mean() - absent.mean()
    noise = np.concatenate([present - present.mean(), absent - absent.mean()]) / (moved * SIGMA)

    def accepted(sample):
        return abs((sample**2).mean() - 1) < 4.9 * np.sqrt(2 / len(sample)) + 0.05

    assert accepted(noise) and not accepted(0.7 * noise) and not accepted(1.4 * noise)


@pytest.mark.slow
def test_arguments_are_checked():
    with pytest.raises(
        TypeError, match=r"adapter must have a private method, got Tent. Use tta.private\(\)"
    ):
        audit(tta.Adapter(tiny.apply_fn, tiny.PARAMS, tta.Tent(), optax.sgd(1.0)))
    adapter = adapter_of()
    with pytest.raises(ValueError, match="batch and candidates must be images of one shape"):
        canaries.audit_stream(adapter, BATCH, IMAGES[:, :2], trials=2, delta=DELTA)
    with pytest.raises(
        ValueError, match="candidates must hold at least 2 images under 'replace_one', got 1"
    ):
        canaries.audit_stream(adapter, BATCH, IMAGES[:1], trials=2, delta=DELTA)
    with pytest.raises(ValueError, match="candidates must hold an image that changes the update"):
        canaries.audit_stream(adapter, BATCH, IMAGES[[0, 0]], trials=2, delta=DELTA)
    with pytest.raises(ValueError, match="trials must be at least 2, got 1"):
        audit(adapter, trials=1)
    with pytest.raises(
        ValueError, match="got 'add_remove', which a stream of batches cannot satisfy"
    ):
        audit(adapter, adjacency="add_remove")
