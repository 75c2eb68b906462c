"""The private forms equal an oracle in float64, and are bounded and noised whatever a batch holds.

A test named after a condition shows it of the steps themselves:

    1 no image touches another
    2 weights inside the clip, constant divisor
    3 one clip over what is noised
    4 NaN counts as zero
    5 noise always
    6 no memory of images
    7 fresh noise keys
    12 other images' predictions go through the release only
    13 one release a step
    14 keys of second views apart
"""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special, stats

import jaxdp.tta.step
from jaxdp import tta
from jaxdp.models.layers import FrozenBatchNorm
from jaxdp.privacy import GaussianDpEvent, NonPrivateDpEvent
from jaxdp.transforms.clipping import clipped_grad
from jaxdp.transforms.noise import gaussian
from jaxdp.tta.method import Method, entropy
from jaxdp.tta.private import RULES
from tests.tta import tiny_model as tiny

published = tiny.published
LN = math.log(tiny.CLASSES)
EVERY, LOWER = (0, 1, 2, 3), (0, 1)
SIZE = 6
RATE, SIGMA = 0.1, 0.4
SGD = optax.sgd(RATE, momentum=0.9)
# In place of Gaussian noise: it shows what happens before it and what after, and compiles in no
# time. As the oracle has it, [4, D].
PATTERN = np.random.default_rng(5).normal(size=(4, tiny.WIDTH)).astype(np.float32)
DRAWS = []


def known_noise(key, tree, std, *, number):
    jax.debug.callback(lambda: DRAWS.append(1))
    leaves, structure = jax.tree.flatten(tree)
    # trees are sorted: bias before scale
    values = [jnp.asarray(PATTERN[k]) for k in (1, 0, 3, 2)[: len(leaves)]]
    return jax.tree.unflatten(structure, [std * x for x in values])


@pytest.fixture(autouse=True, scope="module")
def noise_is_known():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxdp.tta.step, "gaussian", known_noise)
        yield


@pytest.fixture
def real_noise(monkeypatch):
    monkeypatch.setattr(jaxdp.tta.step, "gaussian", gaussian)


def apply_fn(params, images):
    """Returns the tiny model's logits. Images with a first value of 99 have their next values as
    logits.

    Such an image has no gradient, whatever is predicted for it.
    """
    marked = images[:, :1, 0, 0] == 99
    return jnp.where(marked, images[:, 1, :, 0], tiny.apply_fn(params, images))


def marked(*logits):
    image = np.zeros((tiny.SIDE, tiny.SIDE, 3), np.float32)
    image[0, 0, 0], image[1, :, 0] = 99, logits
    return image


DEYO = tta.DeYO(
    tiny.CLASSES, entropy_margin=0.8, plpd_margin=0.3, margin=0.7, augmentation=tiny.upside_down
)
FISHER = tta.fisher(tiny.apply_fn, tiny.PARAMS, tiny.stream(9))
METHODS = {
    "Tent": tta.Tent(),
    "EATA": tta.EATA(tiny.CLASSES, margin=0.7, fisher=FISHER, fisher_strength=20.0),
    "SAR": tta.SAR(tiny.CLASSES, margin=0.7, rho=0.3),
    "DeYO": DEYO,
    "COME": tta.COME(tta.Tent(), tiny.CLASSES),
    "DeYO-COME": tta.COME(DEYO, tiny.CLASSES),
}
every_method = pytest.mark.parametrize("name", METHODS)


def adapter_of(name, *, clip_norm=0.03, noise_multiplier=SIGMA, **kwargs):
    """Compiles once for each method and all clip norms."""
    form = tta.private(
        METHODS[name], clip_norm=clip_norm, noise_multiplier=noise_multiplier, **kwargs
    )
    return tta.Adapter(apply_fn, tiny.PARAMS, form, SGD)


def oracle(name, clip_norm, *, filters="remove", kept=1.0):
    """Computes the private form of the paper a second time."""
    weights = {
        "EATA": lambda u, drop: np.exp(0.7 * LN - u),
        "DeYO": lambda u, drop: np.exp(0.7 * LN - u) + np.exp(drop),
    }
    passes = {
        "EATA": lambda u, drop: u < 0.7 * LN,
        "SAR": lambda u, drop: u < 0.7 * LN,
        "DeYO": lambda u, drop: (u < 0.8 * LN) & (drop > 0.3),
    }
    base = name.removesuffix("-COME")
    anchor = {
        "fisher": published.fisher(tiny.MODEL, tiny.THETA, list(tiny.stream(9)), "batch"),
        "strength": 20.0,
    }
    return published.Private(
        tiny.MODEL,
        tiny.THETA,
        rows=LOWER if base in ("SAR", "DeYO") else EVERY,
        uncertainty=published.opinion if "COME" in name else published.entropy,
        clip_norm=clip_norm,
        weight=weights.get(base),
        passes=passes.get(base) if filters == "keep" else None,
        rho=0.3 if name == "SAR" else 0.0,
        kept=kept,
        **(anchor if name == "EATA" else {}),
    )


def release(adapter, state, batch, mask=None):
    """Returns the release of one step, [4, D]: the noisy sum B G, if momentum is zero and nothing
    pulls."""
    new, _ = adapter.step(state, batch, None, mask)
    return SIZE / RATE * (tiny.theta_of(state.params) - tiny.theta_of(new.params))


def clipped_sum(adapter, state, batch, mask=None):
    """Returns the release without its noise."""
    total, rows = release(adapter, state, batch, mask), len(adapter.adapted_paths)
    total[:rows] -= adapter.method.noise_multiplier * adapter.method.clip_norm * PATTERN[:rows]
    return total


# Parameters near 1 move by RATE / B of a release.
ROUNDING = SIZE / RATE * 2 * np.finfo(np.float32).eps


def only(*images):
    return np.isin(np.arange(SIZE), images)


# --- Against the oracle ---------------------------------------------------------------------------

CLIPS = {"Tent": 0.8, "EATA": 0.9, "SAR": 0.4, "DeYO": 1.5, "COME": 0.25, "DeYO-COME": 0.6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sigma", "terms"),
    [(name, SIGMA, {}) for name in METHODS]
    + [("Tent", 0.0, {})]
    + [
        (name, SIGMA, {"filters": "keep", "kept_fraction": 0.5})
        for name in ("EATA", "SAR", "DeYO-COME")
    ],
)
def test_steps_are_the_papers_and_condition_13_release_once(name, sigma, terms):
    adapter = adapter_of(name, clip_norm=CLIPS[name], noise_multiplier=sigma, **terms)
    reference = oracle(
        name, CLIPS[name], filters=terms.get("filters"), kept=terms.get("kept_fraction", 1.0)
    )
    batches = tiny.stream(11)
    masks = np.random.default_rng(0).random((len(batches), SIZE)) < 0.8
    DRAWS.clear()
    states, logits = tiny.run(adapter, batches, masks=masks)
    jax.effects_barrier()
    assert len(DRAWS) == (len(batches) if sigma else 0), "condition 13: one noisy sum leaves a step"
    for t, (state, z) in enumerate(zip(states, logits, strict=True)):
        expected = reference.step(
            batches[t],
            batches[t, :, ::-1] if "DeYO" in name else None,
            masks[t],
            sigma * CLIPS[name] * PATTERN,
        )
        np.testing.assert_allclose(z, expected, atol=2e-5, err_msg=f"logits of step {t}")
        np.testing.assert_allclose(
            tiny.theta_of(state.params), reference.theta, atol=1e-5, err_msg=f"step {t}"
        )
        if name == "SAR":  # e comes from it: noisy, divided by B, before momentum
            released = [state.released["block_0"]["norm"][kind] for kind in ("scale", "bias")]
            np.testing.assert_allclose(np.stack(released), reference.previous[:2], atol=1e-5)
    assert np.abs(reference.theta - tiny.THETA).max() > 0.02


def test_the_oracle_would_notice_a_missing_operator():
    batches = tiny.stream(11)

    def end(name, **changes):
        reference = oracle(name, CLIPS[name])
        vars(reference).update(changes)
        _ = [reference.step(x, x[:, ::-1], None, 0.4 * CLIPS[name] * PATTERN) for x in batches]
        return reference.theta

    for name, change in {
        "EATA": {"strength": 0.0},
        "SAR": {"rho": 0.0},
        "DeYO": {"weight": None},
    }.items():
        assert np.abs(end(name) - end(name, **change)).max() > 1e-3, name
    for name in METHODS:
        assert np.abs(end(name) - end(name, clip_norm=1e9)).max() > 1e-3, name


# --- What one record can do -----------------------------------------------------------------------

X = np.random.default_rng(1).normal(size=(tiny.SIDE, tiny.SIDE, 3)).astype(np.float32)
RECORDS = {
    "NaN": np.full_like(X, np.nan),
    "one NaN": np.where(np.arange(X.size).reshape(X.shape) == 5, np.nan, X),
    "inf": np.full_like(X, np.inf),
    "huge": X * np.float32(1e38),
    "tiny": X * np.float32(1e-38),
    "zero": np.zeros_like(X),
    "antipodal": -X,
    "certain": marked(1e4, 0, 0, 0),
    "uncertain": marked(0, 0, 0, 0),
    "NaN logits": marked(np.nan, 0, 0, 0),
    **{f"random {k}": x for k, x in enumerate(tiny.stream(21, 1, 40)[0])},
}


def movements(adapter, state):
    """Returns the move of the released sum when another record, or padding, replaces record 0 of a
    batch."""
    batch, sums = tiny.stream(20, 1)[0], []
    for record in RECORDS.values():
        batch[0] = record
        sums.append(release(adapter, state, batch).ravel())
    zeroed = np.stack(sums) - release(adapter, state, batch, ~only(0)).ravel()
    replaced = np.stack(sums)[:, None] - np.stack(sums)[None]
    return np.linalg.norm(replaced, axis=-1), np.linalg.norm(zeroed, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "filters"), [(name, "remove") for name in METHODS] + [("DeYO-COME", "keep")]
)
def test_no_record_moves_the_sum_by_more_than_its_sensitivity(name, filters):
    adapter = adapter_of(name, filters=filters)
    state = adapter.init(jax.random.key(0))
    if name == "SAR":  # ascend along an earlier release
        state = state._replace(released=adapter.step(state, tiny.stream(3)[0])[0].released)
    replaced, zeroed = movements(adapter, state)
    rounding = ROUNDING * np.sqrt(24)
    assert replaced.max() <= adapter.method.sensitivity("replace_one") + rounding
    assert zeroed.max() <= adapter.method.sensitivity("zero_out") + rounding
    assert (adapter.method.sensitivity(), adapter.method.sensitivity("zero_out")) == (0.06, 0.03)
    assert replaced.max() > 1.3 * 0.03 and zeroed.max() > 0.99 * 0.03, (
        "the bounds are nearly reached"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Tent", "EATA", "SAR"])
def test_the_published_methods_fail_that_check(name):
    adapter = tta.Adapter(apply_fn, tiny.PARAMS, METHODS[name], SGD)
    replaced, _ = movements(adapter, adapter.init(jax.random.key(0)))
    assert replaced.max() > 10 * 0.06


# --- Conditions of the guarantee ------------------------------------------------------------------


@pytest.mark.parametrize("form", ["published", "private"])
def test_condition_1_models_that_mix_images_are_refused(form):
    def mixing(params, images):
        return tiny.apply_fn(params, images - images.mean(0, keepdims=True))

    method = METHODS["Tent"] if form == "published" else adapter_of("Tent").method
    adapter = tta.Adapter(mixing, tiny.PARAMS, method, SGD)
    with pytest.raises(
        ValueError, match=r"mixes the images of a batch.*BatchNorm in batch mode.*FrozenBatchNorm"
    ):
        adapter.step(adapter.init(), tiny.stream(0)[0])


class Norms(nn.Module):
    frozen: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5)(x.reshape(len(x), -1))
        norm = (
            FrozenBatchNorm(name="norm")
            if self.frozen
            else nn.BatchNorm(use_running_average=False, name="norm")
        )
        return nn.Dense(tiny.CLASSES)(nn.tanh(norm(x)))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_condition_1_batch_norm_only_with_frozen_statistics(frozen):
    model, images = Norms(frozen), tiny.stream(0)[0]
    variables = jax.jit(model.init)(jax.random.key(0), images)

    def apply(params, images):
        return model.apply({**variables, "params": params}, images, mutable=["batch_stats"])[0]

    method = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=0.0)
    adapter = tta.Adapter(apply, variables["params"], method, SGD)
    assert adapter.adapted_paths == ("norm/bias", "norm/scale")
    if frozen:
        state, _ = adapter.step(adapter.init(), images)
        assert not np.array_equal(state.params["norm"]["bias"], variables["params"]["norm"]["bias"])
    else:
        with pytest.raises(ValueError, match="mixes the images"):
            adapter.step(adapter.init(), images)


@pytest.mark.slow
def test_condition_1_a_loss_sees_one_image_even_where_a_model_hides_its_mixing():
    @jax.jit
    def sly(params, images):  # mixes what is brighter than the images of the check
        return tiny.apply_fn(params, images + 9 * jax.nn.relu(images - 1.5).mean(0, keepdims=True))

    method = tta.private(METHODS["Tent"], clip_norm=0.5, noise_multiplier=SIGMA)
    adapter = tta.Adapter(sly, tiny.PARAMS, method, SGD)
    state, batch = adapter.init(jax.random.key(0)), tiny.stream(0)[0]
    assert np.abs(sly(tiny.PARAMS, batch)[0] - sly(tiny.PARAMS, batch[:1])[0]).max() > 0.1
    alone = sum(clipped_sum(adapter, state, batch, only(i)) for i in range(SIZE))
    np.testing.assert_allclose(clipped_sum(adapter, state, batch), alone, atol=5 * ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "filters"), [("EATA", "remove"), ("DeYO-COME", "keep")])
def test_condition_2_the_divisor_is_constant_and_weights_act_inside_the_clip(name, filters):
    # However many images pass and whatever their weights, each counts clip_norm over the same B.
    adapter = adapter_of(name, filters=filters)
    state, batch = adapter.init(jax.random.key(0)), tiny.stream(12)[0]
    alone = [clipped_sum(adapter, state, batch, only(i)) for i in range(SIZE)]
    np.testing.assert_allclose(clipped_sum(adapter, state, batch), sum(alone), atol=5 * ROUNDING)
    sizes = np.array([np.linalg.norm(x) for x in alone])
    passed = sizes > 0.01
    assert passed.all() if filters == "remove" else 0 < passed.sum() < SIZE
    np.testing.assert_allclose(sizes, np.where(passed, 0.03, 0), atol=2e-4)


@pytest.mark.slow
@every_method
def test_condition_3_what_is_not_adapted_neither_moves_nor_gets_noise(name):
    adapter = adapter_of(name)
    lower = name.removesuffix("-COME") in ("SAR", "DeYO")
    states, _ = tiny.run(adapter, tiny.stream(13, 2))
    for path in ["embed", "head"] + ["block_1"] * lower:
        jax.tree.map(np.testing.assert_array_equal, states[-1].params[path], tiny.PARAMS[path])
    moved = (tiny.theta_of(states[-1].params) != tiny.THETA).all(1)
    np.testing.assert_array_equal(moved, [True, True, not lower, not lower])


def test_condition_3_one_clip_over_all_that_adapts():
    adapter, batch = adapter_of("Tent", clip_norm=0.2), tiny.stream(13)[0]
    one = clipped_sum(adapter, adapter.init(jax.random.key(0)), batch, only(2))
    raw = oracle("Tent", 1e9).clipped_sum(batch[2:3])
    np.testing.assert_allclose(one, raw * 0.2 / np.linalg.norm(raw), atol=2 * ROUNDING)


@pytest.mark.slow
@every_method
def test_condition_4_a_record_that_is_not_finite_counts_as_zero(name):
    adapter = adapter_of(name)
    state, batch = adapter.init(jax.random.key(0)), tiny.stream(14)[0]
    expected = release(adapter, state, batch, ~only(3))
    assert np.isfinite(expected).all()
    for record in ("NaN", "one NaN", "inf", "NaN logits"):
        batch[3] = RECORDS[record]
        np.testing.assert_array_equal(release(adapter, state, batch), expected, err_msg=record)


@pytest.mark.parametrize(
    ("name", "filters"), [(name, "remove") for name in METHODS] + [("EATA", "keep")]
)
def test_condition_5_every_step_gets_its_noise_whatever_the_batch_holds(name, filters):
    adapter, quiet = (
        adapter_of(name, clip_norm=2.0, filters=filters, noise_multiplier=s) for s in (3.0, 1e-30)
    )
    state, batch = adapter.init(jax.random.key(4)), tiny.stream(0)[0]
    noise = release(adapter, state, batch, np.zeros(SIZE, bool))
    rows = len(adapter.adapted_paths)
    np.testing.assert_allclose(noise[:rows], 6.0 * PATTERN[:rows], atol=10 * ROUNDING)
    without_weight = np.stack([marked(1e4 * (k % 2), 0, 0, 0) for k in range(SIZE)])
    for empty in (without_weight, np.stack([RECORDS["NaN"]] * SIZE)):
        np.testing.assert_array_equal(release(adapter, state, empty), noise)
    data = release(quiet, state, batch)
    np.testing.assert_allclose(release(adapter, state, batch), noise + data, atol=10 * ROUNDING)


@every_method
def test_condition_6_no_state_knows_more_of_a_record_than_its_clipped_gradient(name):
    # Records whose clipped gradients are all zero, but whose predictions could not differ more.
    outcomes = []
    for record in (marked(1e4, 0, 0, 0), marked(0, 1e4, 0, 0), marked(0, 0, 0, 0), RECORDS["NaN"]):
        batches = tiny.stream(15, 3)
        batches[0, 2] = record
        outcomes.append(tiny.run(adapter_of(name), batches))
    first, first_logits = outcomes[0]
    for states, logits in outcomes[1:]:
        jax.tree.map(same, states, first)
        np.testing.assert_array_equal(logits[1:], first_logits[1:])
    assert first[-1].memory == () and first[-1].pending is None
    assert (first[-1].released is not None) == (name == "SAR")


def same(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_condition_6_resets_follow_the_public_schedule_and_clear_momentum_and_old_gradients():
    scheduled = dataclasses.replace(adapter_of("SAR"), reset_every=3)
    # Losses of 0, which the published SAR would take for a collapse, do not reset; the schedule
    # does.
    quiet = np.stack([marked(1e4, 0, 0, 0)] * SIZE)
    images, nothing = tiny.stream(0)[0], np.zeros(SIZE, bool)
    states, _ = tiny.run(scheduled, [images, quiet, quiet, images])
    for t in range(4):
        if t in (0, 3):
            reference = oracle("SAR", 0.03)
        reference.step(images, mask=nothing if t in (1, 2) else None, noise=SIGMA * 0.03 * PATTERN)
        np.testing.assert_allclose(tiny.theta_of(states[t].params), reference.theta, atol=1e-6)
        momentum = [
            states[t].opt_state[0].trace["block_0"]["norm"][kind] for kind in ("scale", "bias")
        ]
        np.testing.assert_allclose(np.stack(momentum), reference.velocity[:2], atol=1e-6)
        released = [states[t].released["block_0"]["norm"][kind] for kind in ("scale", "bias")]
        np.testing.assert_allclose(np.stack(released), reference.previous[:2], atol=1e-6)
        assert states[t].step == t + 1
    reset = scheduled.reset(states[-1])
    assert reset.step == 4 and not any(
        x.any() for x in jax.tree.leaves((reset.opt_state, reset.released))
    )
    jax.tree.map(same, (reset.params, reset.key), (tiny.PARAMS, states[-1].key))


@pytest.fixture(scope="module")
def real():
    """Returns an adapter with real noise that starts every step from the source model, so that all
    noise shows."""
    method = tta.private(tta.Tent(), clip_norm=2.0, noise_multiplier=0.7)
    return tta.Adapter(apply_fn, tiny.PARAMS, method, SGD, reset_every=1)


def residuals(adapter, batches, key=None, seed=1):
    """Returns the random part of the releases of some batches, [steps, 4, D]."""
    states, _ = tiny.run(adapter, batches, state=adapter.init(jax.random.key(seed)), key=key)
    released = [SIZE / RATE * (tiny.THETA - tiny.theta_of(state.params)) for state in states]
    return np.stack(released) - np.stack([oracle("Tent", 2.0).clipped_sum(x) for x in batches])


def p_values(values, scale):
    """Returns p-values of the law (Kolmogorov-Smirnov) and of the variance (chi-squared,
    two-sided)."""
    square = np.sum((values / scale) ** 2)
    law = stats.chi2(values.size)
    return stats.kstest(values.ravel() / scale, stats.norm.cdf).pvalue, 2 * min(
        law.cdf(square), law.sf(square)
    )


@pytest.mark.slow
def test_condition_7_noise_is_sigma_times_clip_norm_and_fresh_in_every_coordinate_and_step(
    real, real_noise
):
    # With these keys the test is deterministic; over the choice of keys it fails with probability
    # below 1e-5.
    noise = residuals(real, tiny.stream(31, 100))
    assert min(p_values(noise, 0.7 * 2.0)) > 1e-6
    for wrong in (0.7, 1.3, 1 / SIZE, SIZE):
        assert min(p_values(noise, wrong * 0.7 * 2.0)) < 1e-12
    flat = noise.reshape(100, -1)
    assert len(np.unique(flat.round(4))) > 0.9 * flat.size
    for between in (np.corrcoef(flat), np.corrcoef(flat.T)):  # steps, then coordinates
        rows, n = len(between), 100 * 24 // len(between)
        worst = np.abs(between - np.eye(rows)).max()
        assert 2 * special.comb(rows, 2) * stats.norm.sf(np.arctanh(worst) * np.sqrt(n - 3)) > 1e-6


@pytest.mark.slow
def test_condition_7_keys(real, real_noise):
    batches = tiny.stream(32, 3)
    noise = residuals(real, batches)
    injected = residuals(real, batches, key=jax.random.key(9))
    assert np.abs(injected[0] - injected[1]).min() > 0, "one injected key serves all steps"
    np.testing.assert_array_equal(injected, residuals(real, batches, key=jax.random.key(9), seed=2))
    assert (
        np.abs(injected - noise).max() > 0.1
        and np.abs(noise - residuals(real, batches, seed=2)).max() > 0.1
    )
    fresh = [np.asarray(jax.random.key_data(real.init().key)) for _ in range(2)]
    assert not np.array_equal(*fresh) and fresh[0].size == 8, (
        "the default is a key of its own for each state"
    )


@pytest.mark.slow
@pytest.mark.parametrize("predict", ["before", "after"])
def test_condition_12_others_see_a_record_through_the_release_only(predict):
    @jax.jit
    # lets every image see what is bright in the batch, brighter than the images of the check
    def leaky(params, images):
        return apply_fn(params, images) + jax.nn.relu(images[:, 1, :, 0] - 50).mean(
            0, keepdims=True
        )

    method = tta.private(METHODS["Tent"], clip_norm=0.5, noise_multiplier=SIGMA)
    adapter = tta.Adapter(leaky, tiny.PARAMS, method, SGD, predict=predict)
    state, batch = adapter.init(jax.random.key(0)), tiny.stream(16)[0]
    new, logits = adapter.step(state, batch)
    expected, other = (
        leaky(s.params, batch) for s in ((state, new) if predict == "before" else (new, state))
    )
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert np.abs(logits - other).max() > 1e-3
    others = []
    # the same release, other predictions
    for record in (marked(1e4, 0, 0, 0), marked(0, 1e4, 0, 0)):
        batch[0] = record
        others.append(adapter.step(state, batch)[1][1:])
    np.testing.assert_array_equal(*others)
    assert np.abs(leaky(new.params, batch)[1:] - others[1]).max() > 100, "the model does leak"


@pytest.mark.slow
def test_condition_14_second_views_have_keys_of_their_own_that_no_image_changes():
    keys = []

    def spy(key, image):
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        return image[::-1]

    method = tta.private(
        dataclasses.replace(DEYO, augmentation=spy), clip_norm=1.0, noise_multiplier=SIGMA
    )
    adapter = tta.Adapter(apply_fn, tiny.PARAMS, method, SGD)
    seen = []
    for seed in (1, 2):
        tiny.run(adapter, tiny.stream(seed, 2))
        jax.effects_barrier()
        seen.append(sorted(keys))
        keys.clear()
    assert seen[0] == seen[1] and len(set(seen[0])) == 2 * SIZE, "one for each image and step"


# --- What is said about them ----------------------------------------------------------------------


@pytest.mark.slow
def test_exact_noise_is_the_integers_of_the_images_and_the_noise_of_the_key(real_noise):
    """Two batches an update. A twin in floats adds no whole number of steps."""
    batches = tiny.stream(7, 2)

    def pending_and_release(exact):
        form = tta.private(tta.Tent(), clip_norm=2.0, noise_multiplier=0.7, exact=exact)
        adapter = tta.Adapter(apply_fn, tiny.PARAMS, form, optax.sgd(1.0), accumulate=2)
        state = adapter.init(jax.random.key(2))
        first, _ = adapter.step(state, batches[0])
        second, _ = adapter.step(first, batches[1])
        moved = jax.tree.map(lambda x, y: x - y, state.params, second.params)
        return form, jax.tree.leaves(first.pending), jax.tree.leaves(moved)

    form, pending, moved = pending_and_release(exact=True)
    _, in_floats, _ = pending_and_release(exact=False)
    assert form.event == GaussianDpEvent(0.7)
    assert "exact" in form.describe()
    step = form.grid.step
    for integers, floats in zip(pending, in_floats, strict=True):
        assert integers.dtype == jnp.int32
        np.testing.assert_allclose(np.asarray(integers) * step, floats, atol=SIZE * step + 1e-3)
    moved = np.concatenate([np.ravel(x) for x in moved]) * (2 * SIZE) / step
    moved = moved[moved != 0]
    assert len(moved) == 4 * tiny.WIDTH
    assert 0.3 < np.std(moved) / 2**form.grid.bits < 3  # 24 normals
    with pytest.raises(ValueError, match="noise_multiplier must be positive"):
        tta.private(tta.Tent(), clip_norm=2.0, noise_multiplier=0.0, exact=True)


def test_without_noise_there_is_no_guarantee():
    clipped = tta.private(tta.Tent(), clip_norm=0.1, noise_multiplier=0)
    assert clipped.epsilon(delta=1e-6) == math.inf and clipped.event == NonPrivateDpEvent()
    assert "clipped only, no noise: epsilon = inf" in clipped.describe()
    assert tta.private(tta.Tent(), clip_norm=0.1, noise_multiplier=2).event == GaussianDpEvent(2.0)


FATES = {
    "Tent": {"Computes the entropy H": "absorbed"},
    "EATA": {
        "Computes the entropy H": "absorbed",
        "Weighs images by exp(E0 - H)": "absorbed",
        "Keeps images with entropy H": "removed",
        "Adds the Fisher anchor": "moved outside",
        "Updates the moving average m": "removed",
        "Keeps images with diversity": "removed",
    },
    "SAR": {
        "Computes the entropy H": "absorbed",
        "Keeps images with entropy H": "removed",
        "The ascent": "moved outside",
        "Updates the moving average of the loss": "removed",
        "Resets when": "removed",
    },
    "DeYO": {
        "Computes the entropy H": "absorbed",
        "Weighs images by exp(E0 - H) + exp(PLPD)": "absorbed",
        "Destroys the object's shape in a second view": "absorbed",
        "Keeps images with entropy H": "removed",
    },
    "COME": {"Computes COME's entropy": "absorbed"},
    "DeYO-COME": {
        "Computes COME's entropy": "absorbed",
        "Weighs images by exp(E0 - H) + exp(PLPD)": "absorbed",
        "Destroys the object's shape in a second view": "absorbed",
        "Keeps images with entropy H": "removed",
    },
}


@every_method
def test_describe_names_every_operator_and_its_fate(name):
    first, *lines = adapter_of(name).method.describe().splitlines()
    assert first == f"private {type(METHODS[name]).__name__}, clip norm 0.03, noise 0.4 x clip norm"
    *operators, divisor = [line.strip() for line in lines if "no step when" not in line]
    assert (
        divisor
        == "mean over the images that take part: replaced, the divisor is B whatever they hold"
    )
    assert any("every step is made" in line for line in lines) == (name != "SAR")
    assert len(operators) == len(FATES[name])
    for operator, fate in FATES[name].items():
        [line] = [line for line in operators if line.startswith(operator)]
        assert f": {fate}" in line, line


def test_describe_says_what_kept_filters_become():
    text = adapter_of("DeYO", filters="keep", kept_fraction=0.25).method.describe()
    assert (
        "PLPD > tau: absorbed: a factor 0 or 1 inside the clip" in text
        and "the divisor is 0.25 B" in text
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Own(Method):
    radius = 0.05

    def weight(self, sample):
        return 1 - sample.uncertainty


def test_methods_of_ones_own():
    method = Own(uncertainty=lambda logits: -jax.nn.log_softmax(logits).max())
    lines = tta.private(method, clip_norm=1.0, noise_multiplier=1.0).describe().splitlines()
    assert lines[0].startswith("private Own") and len(lines) == 6
    assert lines[1].startswith("  uncertainty: absorbed") and lines[3].startswith(
        "  radius: moved outside"
    )
    assert lines[2] == f"  {Method().explain('weight')}: {RULES['weight']}"


def test_every_hook_has_a_rule():
    hooks = {name for name in vars(Method) if not name.startswith("_") and name != "start"}
    assert hooks - {"overrides", "explain", "lower_blocks_only", "skips_empty"} == set(RULES) | {
        "uncertainty"
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"method": "tent"},
            TypeError,
            "method must be a jaxdp.tta.Method such as Tent.*, got str",
        ),
        (
            {"method": tta.private(tta.Tent(), clip_norm=1, noise_multiplier=1)},
            TypeError,
            "method is private already",
        ),
        ({"clip_norm": 0.0}, ValueError, "clip_norm must be positive and finite, got 0.0"),
        ({"clip_norm": math.inf}, ValueError, "clip_norm must be positive and finite"),
        # not in float32
        ({"clip_norm": 1e39}, ValueError, "clip_norm must be positive and finite"),
        ({"clip_norm": math.nan}, ValueError, "clip_norm must be positive and finite"),
        (
            {"noise_multiplier": -1.0},
            ValueError,
            "noise_multiplier must be finite and not negative, got -1.0",
        ),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be finite"),
        (
            {"clip_norm": 1e-10, "noise_multiplier": 1e-28},
            ValueError,
            "is 1e-38, but float32 noise needs",
        ),
        (
            {"clip_norm": 1e10, "noise_multiplier": 1e27},
            ValueError,
            "e.37, but float32 noise needs",
        ),
        ({"clip_rule": "nonsense"}, ValueError, "clip_rule must be .*'nonsense'"),
        ({"filters": "drop"}, ValueError, "filters must be 'remove' or 'keep', got 'drop'"),
        (
            {"filters": "keep", "kept_fraction": 0.0},
            ValueError,
            r"kept_fraction must be in \(0, 1\]",
        ),
        ({"kept_fraction": 0.5}, ValueError, "and 1 unless filters='keep', got 0.5"),
    ],
)
def test_arguments_of_private_are_checked(changes, error, message):
    with pytest.raises(error, match=message):
        tta.private(**{"method": tta.Tent(), "clip_norm": 1.0, "noise_multiplier": 1.0, **changes})


@pytest.mark.slow
def test_the_clip_rule_reaches_the_gradient():
    batch, params = tiny.stream(17)[0], tiny.PARAMS
    rules = {}
    for rule in ("global", "automatic"):
        form = tta.private(tta.Tent(), clip_norm=0.5, noise_multiplier=0.0, clip_rule=rule)
        assert form.sensitivity("zero_out") == 0.5 and (
            "by the rule 'automatic'" in form.describe()
        ) == (rule != "global")
        adapter = tta.Adapter(apply_fn, params, form, SGD)
        state, _ = adapter.step(adapter.init(jax.random.key(0)), batch)
        clipped = clipped_grad(
            lambda params, image: entropy(tiny.apply_fn(params, image[None])[0]),
            clip_norm=0.5,
            clip_rule=rule,
            trainable=lambda path, leaf: "norm" in path,
        )
        moved = RATE / SIZE * tiny.theta_of(clipped(params, batch).grads)
        rules[rule] = tiny.THETA - tiny.theta_of(state.params)
        np.testing.assert_allclose(rules[rule], moved, atol=1e-6)
    assert np.abs(rules["global"] - rules["automatic"]).max() > 1e-4


@pytest.mark.slow
def test_arguments_of_epsilon_and_sensitivity_are_checked():
    method = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=1.0)
    for call in (method.sensitivity, lambda a: method.epsilon(delta=1e-6, adjacency=a)):
        with pytest.raises(
            ValueError, match="adjacency must be 'replace_one' or 'zero_out', got 'add_remove'"
        ):
            call("add_remove")
    with pytest.raises(ValueError, match="visits must be at least 1, got 0"):
        method.epsilon(delta=1e-6, visits=0)
