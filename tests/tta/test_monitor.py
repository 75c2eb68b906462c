"""The collapse monitor: agreement, entropy and drift against plain NumPy; thresholds; one
compilation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jaxdp.tta.monitor import CollapseMonitor, CollapseReport

CLASSES = 4
TRACES = []


def apply_fn(params, images):
    TRACES.append(images.shape)
    flat = images.reshape(len(images), -1) * params["norm"]["scale"][None, :]
    return flat @ params["head"] + params["norm"]["bias"][None, :]


@pytest.fixture
def model():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(40, 2, 3, 1)).astype(np.float32)
    params = {
        "head": 3 * rng.normal(size=(6, CLASSES)).astype(np.float32),
        "norm": {"scale": np.ones(6, np.float32), "bias": np.zeros(CLASSES, np.float32)},
    }
    return params, images


def moved(params, **norm):
    return {**params, "norm": {**params["norm"], **norm}}


def expected(params, source, images):
    logits, before = (np.asarray(apply_fn(p, images), np.float64) for p in (params, source))
    agreement = np.mean(logits.argmax(-1) == before.argmax(-1))
    entropy = stats.entropy(special.softmax(logits, axis=-1).mean(axis=0)) / np.log(CLASSES)
    return agreement, entropy


def test_reports_against_numpy(model):
    params, images = model
    monitor = CollapseMonitor(apply_fn, params, images)
    rng = np.random.default_rng(1)
    for size in (0.1, 1.0, 5.0):
        scale = 1 + size * rng.normal(size=6).astype(np.float32)
        report = monitor(moved(params, scale=scale))
        agreement, entropy = expected(moved(params, scale=scale), params, images)
        assert report.agreement == pytest.approx(agreement, abs=1e-6)
        assert report.entropy == pytest.approx(entropy, rel=1e-5)
        # Over what changed: neither the head nor the bias dilutes it.
        assert report.drift == pytest.approx(np.linalg.norm(scale - 1) / np.sqrt(6), rel=1e-5)


def test_the_source_model_has_not_collapsed(model):
    monitor = CollapseMonitor(apply_fn, *model)
    assert monitor.source == monitor(model[0])
    assert (monitor.source.agreement, monitor.source.drift, monitor.source.collapsed) == (
        1.0,
        0.0,
        False,
    )
    assert monitor.source.entropy > 0.5


def test_collapse_into_one_class_is_seen(model):
    params, images = model
    monitor = CollapseMonitor(apply_fn, params, images)
    everything_is_class_2 = moved(params, bias=np.array([0, 0, 100, 0], np.float32))
    report = monitor(everything_is_class_2)
    assert report.collapsed and report.entropy < 1e-6 and report.agreement < 0.5
    relaxed = CollapseMonitor(apply_fn, params, images, min_agreement=0.0, min_entropy=0.0)
    assert not relaxed(everything_is_class_2).collapsed
    # Classes exchanged: the entropy sees nothing, the agreement does.
    exchanged = {**params, "head": np.roll(params["head"], 1, axis=1)}
    report = monitor(exchanged)
    assert report.entropy == pytest.approx(monitor.source.entropy, rel=1e-5)
    assert report.collapsed and report.agreement < 0.25


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_no_numbers_have_collapsed(model, value):
    params, images = model
    broken = moved(params, scale=np.full(6, value, np.float32))
    assert CollapseMonitor(apply_fn, params, images, min_agreement=0.0, min_entropy=0.0)(
        broken
    ).collapsed


def test_one_compilation(model):
    params, images = model
    monitor = CollapseMonitor(apply_fn, params, images)
    before = len(TRACES)
    for size in (0.5, 2.0, 3.0):
        monitor(moved(params, scale=jnp.full(6, size, jnp.float32)))
    assert len(TRACES) == before


def test_impossible_arguments(model):
    params, images = model
    for name in ("min_agreement", "min_entropy"):
        with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\], got 1.5"):
            CollapseMonitor(apply_fn, params, images, **{name: 1.5})
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        CollapseMonitor(apply_fn, params, images, every=0)
    with pytest.raises(ValueError, match="at least one image"):
        CollapseMonitor(apply_fn, params, images[:0])
    confident = moved(params, scale=np.full(6, 1e3, np.float32))
    with pytest.raises(ValueError, match="Use a probe with more classes, or a lower threshold"):
        CollapseMonitor(apply_fn, confident, images[:1])


@pytest.mark.slow
def test_reports_are_plain_numbers(model):
    report = CollapseMonitor(apply_fn, *model).source
    assert [type(value) for value in dataclasses.astuple(report)] == [
        float,
        float,
        float,
        bool,
        int,
    ]
    assert isinstance(report, CollapseReport)
