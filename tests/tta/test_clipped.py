"""The clip-only form of every method follows the published trajectory with clipped gradients, and
is not private.

Each case runs beside an oracle in float64 and beside a broken twin that differs by one operator.
"""

import dataclasses
import math

import numpy as np
import optax
import pytest

from jaxdp import Ledger, tta
from jaxdp.data import from_arrays
from jaxdp.privacy import NonPrivateDpEvent
from tests.tta import tiny_model as tiny

published = tiny.published
K, LN, STEPS = tiny.CLASSES, math.log(tiny.CLASSES), 8
EVERY, LOWER = (0, 1, 2, 3), (0, 1)
SGD = optax.sgd(0.1, momentum=0.9)
CLIP = 0.1  # of the other tests
# some gradients are clipped, not all
CLIPS = {"Tent": 0.5, "COME": 0.3, "EATA": 1.0, "SAR": 0.3, "DeYO": 1.0}


FISHER = [x[None] for x in tiny.stream(9)[:, 0]]
ANCHOR = dict(fisher=published.fisher(tiny.MODEL, tiny.THETA, FISHER, "batch"), strength=50.0)
EATA = tta.EATA(K, margin=1.1 / LN, diversity=0.7, fisher_strength=50.0)
EATA_O = {"threshold": 1.1, "diversity": 0.7, **ANCHOR}
SAR = tta.SAR(K, margin=0.8 / LN, rho=0.2, reset_below=0.65)
SAR_O = {"threshold": 0.8, "rho": 0.2, "reset_below": 0.65}
DEYO = tta.DeYO(
    K, entropy_margin=1.2 / LN, plpd_margin=0.3, margin=1.0 / LN, augmentation=tiny.upside_down
)
DEYO_O = {"entropy_threshold": 1.2, "threshold": 1.0, "plpd_margin": 0.3}
# The method, the oracle and its constants, and constants of twins: the same with an operator
# removed.
CASES = {
    "Tent": (tta.Tent(), "Tent", EVERY, {}, {}),
    "COME": (
        tta.COME(tta.Tent(), K),
        "Tent",
        EVERY,
        {"uncertainty": published.opinion},
        {"no COME": {}},
    ),
    "EATA": (
        EATA,
        "EATA",
        EVERY,
        EATA_O,
        {
            "no filter": EATA_O | {"threshold": 9.0},
            "no memory": EATA_O | {"diversity": 2.0},
            "no anchor": EATA_O | {"strength": 0.0},
        },
    ),
    "SAR": (
        SAR,
        "SAR",
        LOWER,
        SAR_O,
        {
            "no filter": SAR_O | {"threshold": 9.0},
            "one pass": SAR_O | {"rho": 0},
            "no reset": SAR_O | {"reset_below": 0},
        },
    ),
    "DeYO": (
        DEYO,
        "DeYO",
        LOWER,
        DEYO_O,
        {
            "no PLPD filter": DEYO_O | {"plpd_margin": -2.0},
            "no entropy filter": DEYO_O | {"entropy_threshold": 9.0},
        },
    ),
}


def oracle(name, rows, constants, clip_norm):
    options = {
        "uncertainty": published.entropy,
        "learning_rate": 0.1,
        "clip_norm": clip_norm,
        **constants,
    }
    return getattr(published, name)(tiny.MODEL, tiny.THETA, rows=rows, **options)


def trajectory(reference, batches):
    """Returns the parameters after every batch, [T, 4, D]."""
    views = [(x[:, ::-1],) if isinstance(reference, published.DeYO) else () for x in batches]
    found = []
    for x, view in zip(batches, views, strict=True):
        reference.step(x, *view)
        found.append(reference.theta)
    return np.array(found)


@pytest.mark.parametrize(
    ("name", "unit"), [*((name, "image") for name in CASES), ("EATA", "batch"), ("SAR", "batch")]
)
def test_only_the_clip_is_added(name, unit):
    method, kind, rows, constants, twins = CASES[name]
    if name == "EATA":
        method = dataclasses.replace(method, fisher=tta.fisher(tiny.apply_fn, tiny.PARAMS, FISHER))
    batches, clip = tiny.stream(4, STEPS), CLIPS[name]

    def clipping(unit, constants):
        reference = oracle(kind, rows, constants, clip)
        return reference if unit == "image" else clipping_the_mean(reference, clip)

    reference = clipping(unit, constants)
    expected = trajectory(reference, batches)
    assert reference.closest > 1e-4 and 0 < np.mean(reference.clips) < 1
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, tta.clipped(method, clip, unit=unit), SGD)
    states, _ = tiny.run(adapter, batches)
    found = np.array([tiny.theta_of(state.params) for state in states])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    broken = {twin: clipping(unit, changed) for twin, changed in twins.items()}
    broken["no clip"] = oracle(kind, rows, constants, math.inf)
    broken["the other clip"] = clipping("batch" if unit == "image" else "image", constants)
    for twin, other in broken.items():
        assert np.abs(trajectory(other, batches) - expected).max() > 1e-3, twin
    if name == "SAR":
        assert reference.resets


def clipping_the_mean(reference, clip):
    """Returns an oracle that clips the mean gradient instead of each image's."""

    def mean(gradients):
        whole = gradients.mean(0)
        reference.clips.append(np.linalg.norm(whole) > clip)
        return whole * min(1.0, clip / max(np.linalg.norm(whole), 1e-30))

    reference.clipped_mean = mean
    return reference


@pytest.mark.parametrize("unit", ["image", "batch"])
def test_it_is_never_reported_as_private(unit):
    form = tta.clipped(tta.Tent(), CLIP, unit=unit)
    assert (
        not isinstance(form, tta.Private)
        and not hasattr(form, "epsilon")
        and not hasattr(form, "event")
    )
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, form, SGD)
    image = np.zeros((12, tiny.SIDE, tiny.SIDE, 3), np.float32)
    stream = tta.Stream(
        {"site": from_arrays(image=image, label=np.zeros(12, int), num_classes=K)},
        batch_size=6,
        seed=0,
    )
    ledger = Ledger.in_memory()
    ledger.register("site", adjacency="replace_one", unit="image")
    account = tta.StreamAccount(
        ledger.account("site"), event=tta.private(tta.Tent(), clip_norm=1, noise_multiplier=1).event
    )
    with pytest.raises(ValueError, match="the method has NonPrivateDpEvent"):
        tta.serve(adapter, stream, account=account)
    tta.serve(
        adapter,
        stream,
        account=tta.StreamAccount(ledger.account("site"), event=NonPrivateDpEvent()),
    )
    assert ledger.epsilon("site", delta=1e-6) == math.inf
    with pytest.raises(TypeError, match="got Clipped"):
        tta.private(form, clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(TypeError, match="got Clipped"):
        tta.COME(form, K)
    with pytest.raises(ValueError, match="1 for a method that is not private"):
        tta.Adapter(tiny.apply_fn, tiny.PARAMS, form, SGD, accumulate=2)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan])
def test_clip_norms_out_of_range(clip_norm):
    with pytest.raises(ValueError, match="clip_norm must be positive and finite"):
        tta.clipped(tta.Tent(), clip_norm)


def test_an_unknown_unit():
    with pytest.raises(ValueError, match="unit must be 'image' or 'batch', got 'stream'"):
        tta.clipped(tta.Tent(), 1.0, unit="stream")


def test_only_methods_are_clipped():
    with pytest.raises(TypeError, match="such as Tent"):
        tta.clipped(tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=1.0), 1.0)
