"""The published methods against a step-by-step oracle in float64: selections, updates, memories and
resets; and what every row of `tta.METHODS` must satisfy (`conforms`).

Inputs are such that nothing the oracle compares with a threshold comes closer to it than float32
rounding by far, so both select the same images."""

import dataclasses
import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import Ledger, tta
from jaxdp.data import from_arrays
from jaxdp.transforms import noise
from jaxdp.tta.come import opinion_entropy
from jaxdp.tta.method import Method, entropy
from tests.tta import tiny_model as tiny

published = tiny.published
LN = math.log(tiny.CLASSES)
EVERY, LOWER = (0, 1, 2, 3), (0, 1)
RATE, MOMENTUM = 0.1, 0.9


@functools.cache  # equal methods share a compiled step only with one optimizer
def sgd(rate=RATE):
    return optax.sgd(rate, momentum=MOMENTUM)


def oracle(name, *, rows, come=False, rate=RATE, **constants):
    uncertainty = published.opinion if come else published.entropy
    kind = getattr(published, name)
    return kind(
        tiny.MODEL, tiny.THETA, rows=rows, uncertainty=uncertainty, learning_rate=rate, **constants
    )


def agree(adapter, reference, batches, views=None, **kwargs):
    """Runs both over the batches and compares parameters, momentum and logits after each. Returns
    the states."""
    states, logits = tiny.run(adapter, batches, **kwargs)
    for t, (state, z) in enumerate(zip(states, logits, strict=True)):
        expected = (
            reference.step(batches[t]) if views is None else reference.step(batches[t], views[t])
        )
        np.testing.assert_allclose(z, expected, atol=2e-5, err_msg=f"logits of step {t}")
        np.testing.assert_allclose(
            tiny.theta_of(state.params), reference.theta, atol=1e-5, err_msg=f"step {t}"
        )
        velocity = reference.velocity.copy()
        trace = jax.tree.leaves(state.opt_state)
        np.testing.assert_allclose(
            np.concatenate(trace), _in_tree_order(velocity, len(trace)), atol=1e-5
        )
    assert reference.closest > 1e-4, (
        "an image is so close to a threshold that float32 may select it or not"
    )
    return states


def _in_tree_order(velocity, leaves):
    # Trees are sorted by key, so bias comes before scale; without the upper block there are two
    # leaves only.
    return np.concatenate([velocity[k] for k in (1, 0, 3, 2)[:leaves]])


def moved(reference):
    return np.abs(reference.theta - reference.source).max()


# --- Every row of METHODS -------------------------------------------------------------------------

GIVEN = {"num_classes": tiny.CLASSES, "base_method": tta.Tent()}
HOOKS = (
    "uncertainty",
    "weight",
    "reliable",
    "augment",
    "radius",
    "pull",
    "novel",
    "remember",
    "lost",
)


@functools.cache
def built(name):
    """Returns the method of a row of METHODS, made from the arguments that its constructor
    needs."""
    parameters = inspect.signature(tta.METHODS[name]).parameters
    return tta.METHODS[name](**{key: value for key, value in GIVEN.items() if key in parameters})


def conforms(name):
    """Holds the method of a row of METHODS to what `Adapter`, `private` and `serve` expect of every
    method."""
    method = built(name)
    assert isinstance(method, tta.Method)
    hooks_are_functions_of_one_image(method)
    published_steps_keep_the_state_s_form(method)
    form = tta.private(method, clip_norm=CLIP, noise_multiplier=2.0)
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, form, optax.sgd(1.0))  # one program for both
    private_form_bounds_what_a_record_can_do(method, adapter)
    served_streams_are_paid_for_once(adapter)


def hooks_are_functions_of_one_image(method):
    logits = jnp.array(
        [[1.0, 2.0, -jnp.inf, 0.5], [200.0, -200, 0, 0], [0.0] * 4, [1.0, 3.0, -2.0, 0.1]]
    )
    images, keys = (
        tiny.stream(0)[0, :4],
        jax.random.split(jax.random.key(0, impl="threefry2x32"), 4),
    )

    @jax.jit
    def batched(memory):
        views = jax.vmap(method.augment, (0, None, 0))(keys, keys[0], jnp.asarray(images))
        again = None if views is None else tiny.apply_fn(tiny.PARAMS, views)
        samples = jax.vmap(method)(logits, again)
        weights, reliable = jax.vmap(method.weight)(samples), jax.vmap(method.reliable)(samples)
        novel = jax.vmap(method.novel, (None, 0))(memory, samples)
        slopes = jax.vmap(jax.grad(lambda z: method(z).uncertainty))(logits)
        remembered = method.remember(memory, samples, reliable & novel)
        return (
            views,
            again,
            samples,
            weights,
            reliable,
            novel,
            slopes,
            remembered,
            method.lost(memory),
        )

    @jax.jit
    def single(logits, again):
        sample = method(logits, again)
        return sample.uncertainty, method.weight(sample)

    memory = method.start()
    views, again, samples, weights, reliable, novel, slopes, remembered, lost = batched(memory)
    assert views is None or (views.shape, views.dtype) == (images.shape, images.dtype)
    for values, dtype in (
        (samples.uncertainty, jnp.float32),
        (weights, jnp.float32),
        (reliable, bool),
        (novel, bool),
    ):
        assert values.shape == (4,) and values.dtype == dtype and np.isfinite(values).all()
    for one in range(4):
        uncertainty, weight = single(
            np.asarray(logits)[one], None if again is None else np.asarray(again)[one]
        )
        np.testing.assert_allclose(uncertainty, samples.uncertainty[one], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(weight, weights[one], rtol=1e-5)
    assert np.isfinite(slopes).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)),
        memory,
        remembered,
    )
    assert lost.shape == () and not lost, "a method that has seen nothing is not lost"
    assert 0 <= method.radius < math.inf


def published_steps_keep_the_state_s_form(method):
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd())
    batches, mask = tiny.stream(3, 3), np.arange(6) < 4
    batches[:, 4:] = np.nan
    start = adapter.init(jax.random.key(0))
    states, logits = tiny.run(adapter, batches, state=start, masks=[mask] * 3)
    before = len(tiny.CALLS)
    states += tiny.run(adapter, batches, state=states[-1], masks=[mask] * 3)[0]
    assert len(tiny.CALLS) == before, "the second step must not compile again"
    for state in states:
        jax.tree.map(
            lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)),
            state,
            start,
        )
        assert np.isfinite(tiny.theta_of(state.params)).all()
        jax.tree.map(
            np.testing.assert_array_equal, [state.params["embed"], state.params["head"]], [*FROZEN]
        )
    np.testing.assert_allclose(
        logits[0][:4], jax.jit(tiny.apply_fn)(tiny.PARAMS, batches[0][:4]), atol=1e-5
    )
    jax.tree.map(np.testing.assert_array_equal, adapter.reset(states[-1])[1:5], start[1:5])


FROZEN = (tiny.PARAMS["embed"], tiny.PARAMS["head"])
CLIP = 0.03


def private_form_bounds_what_a_record_can_do(method, adapter):
    form = adapter.method
    said = form.describe()
    assert all(
        method.explain(hook) in said
        for hook in HOOKS
        if hook == "uncertainty" or method.overrides(hook)
    )
    key = noise.stream(bytes(16), "conformance")  # a key like those of `serve`
    start, batch, everybody = adapter.init(key), tiny.stream(20)[0], np.ones(6, bool)

    def clipped_sum(images, mask=everybody):  # plus the noise of `start`, which is the same for all
        state, _ = adapter.step(start, images, None, mask)
        assert state.memory == ()
        return 6 * (tiny.THETA - tiny.theta_of(state.params))

    without = clipped_sum(batch, everybody & (np.arange(6) != 2))
    others = [np.roll(batch, k, 0)[2] for k in range(1, 4)] + [0 * batch[2], 1e3 * batch[2]]
    sums = [clipped_sum(np.concatenate([batch[:2], [record], batch[3:]])) for record in others]
    moved = [np.linalg.norm(x - without) for x in sums]
    assert max(moved) <= form.sensitivity("zero_out") + 1e-5 and max(moved) > 0.5 * CLIP
    assert (
        max(np.linalg.norm(x - y) for x in sums for y in sums)
        <= form.sensitivity("replace_one") + 1e-5
    )
    np.testing.assert_array_equal(
        clipped_sum(np.where(np.arange(6)[:, None, None, None] == 2, np.nan, batch)), without
    )


def served_streams_are_paid_for_once(adapter):
    rng, form = np.random.default_rng(0), adapter.method
    image = rng.uniform(size=(18, tiny.SIDE, tiny.SIDE, 3)).astype(np.float32)
    source = from_arrays(
        image=image, label=rng.integers(0, tiny.CLASSES, 18), num_classes=tiny.CLASSES
    )
    stream = tta.Stream({"site": source}, batch_size=6, seed=0)
    ledger = Ledger.in_memory()
    ledger.register("site", adjacency="replace_one", unit="image")
    served = tta.serve(
        adapter, stream, account=tta.StreamAccount(ledger.account("site"), event=form.event)
    )
    assert ledger.events("site")[None] == tta.event(form.event, stream) == form.event
    assert served.count.tolist() == [6, 6, 6] and served.state.step == 3
    assert np.abs(tiny.theta_of(served.state.params) - tiny.THETA).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", tta.METHODS)
def test_every_method_conforms(name):
    conforms(name)


# --- The oracle itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("uncertainty", [published.entropy, published.opinion])
def test_the_oracles_gradients_are_those_of_its_losses(uncertainty):
    x = tiny.stream(0)[0]
    frozen_norm = np.linalg.norm(tiny.MODEL.logits(tiny.THETA, x), axis=1, keepdims=True)

    # COME's gradient equals the gradient of the loss of logits scaled back to their length
    def loss(
        theta,
    ):
        z = tiny.MODEL.logits(theta, x)
        if uncertainty is published.opinion:
            z = z / np.linalg.norm(z, axis=1, keepdims=True) * frozen_norm
        return uncertainty(z)[0]

    by_hand = tiny.MODEL.gradients(tiny.THETA, x, uncertainty(tiny.MODEL.logits(tiny.THETA, x))[1])
    for k in np.ndindex(tiny.THETA.shape):
        step = np.zeros_like(tiny.THETA)
        step[k] = 1e-5
        numeric = (loss(tiny.THETA + step) - loss(tiny.THETA - step)) / 2e-5
        np.testing.assert_allclose(by_hand[:, *k], numeric, atol=1e-9)


# --- Tent -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("come", [False, True])
def test_tent(come):
    method = built("COME" if come else "Tent")
    reference = oracle("Tent", rows=EVERY, come=come)
    agree(tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd()), reference, tiny.stream(0))
    assert moved(reference) > 0.05


# --- EATA -----------------------------------------------------------------------------------------

EATA = {"num_classes": tiny.CLASSES, "margin": 1.1 / LN, "diversity": 0.7}


def eata(**changes):
    """Returns (jaxdp's method, the oracle's constants)."""
    constants = {**EATA, **changes}
    threshold = constants["margin"] * LN
    return tta.EATA(**constants), {"threshold": threshold, "diversity": constants["diversity"]}


def same_mean(state, reference):
    mean, started = state.memory
    assert bool(started) == (reference.mean is not None)
    if reference.mean is not None:
        np.testing.assert_allclose(mean, reference.mean, atol=1e-5)


@functools.cache
def importances(kind, lower=False):
    adapted = tta.lower_blocks(tiny.PARAMS) if lower else None
    return tta.fisher(tiny.apply_fn, tiny.PARAMS, tiny.stream(9), adapted, gradients=kind)


@pytest.mark.slow
@pytest.mark.parametrize(("come", "anchored"), [(False, False), (False, True), (True, True)])
def test_eata(come, anchored):
    method, constants = eata(**({"margin": 1.3 / LN} if come else {}))
    if anchored:
        method = dataclasses.replace(method, fisher=importances("batch"), fisher_strength=50.0)
        known = published.fisher(tiny.MODEL, tiny.THETA, list(tiny.stream(9)), "batch")
        constants |= {"fisher": known, "strength": 50.0}
    if come:
        method = tta.COME(method, tiny.CLASSES)
    reference = oracle("EATA", rows=EVERY, come=come, **constants)
    states = agree(
        tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd()), reference, tiny.stream(4, 8)
    )
    same_mean(states[-1], reference)
    entropy_only = oracle("EATA", rows=EVERY, come=come, **{**constants, "diversity": 2.0})
    _ = [entropy_only.step(x) for x in tiny.stream(4, 8)]
    assert sum(reference.selected) < sum(entropy_only.selected) < 8 * 6, (
        "both filters must be at work"
    )
    if anchored:
        free = oracle("EATA", rows=EVERY, come=come, **{**constants, "strength": 0.0})
        _ = [free.step(x) for x in tiny.stream(4, 8)]
        assert np.abs(free.theta - reference.theta).max() > 1e-3, "the anchor must be at work"


def test_eata_with_nothing_certain_makes_no_step_until_something_is():
    method, constants = eata(margin=0.5 / LN, diversity=2.0)
    batches = tiny.stream(4, 8)
    reference = oracle("EATA", rows=EVERY, **constants)
    states = agree(tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd()), reference, batches)
    first = next(t for t, n in enumerate(reference.selected) if n)
    assert first > 0 and 0 in reference.selected[first:], reference.selected
    for t in range(first):
        assert not states[t].memory[1]
        np.testing.assert_array_equal(tiny.theta_of(states[t].params), tiny.THETA)
    for t in range(first + 1, 8):
        if reference.selected[t] == 0:  # neither the momentum nor the memory moves
            jax.tree.map(
                np.testing.assert_array_equal,
                (states[t].params, states[t].opt_state, states[t].memory),
                (states[t - 1].params, states[t - 1].opt_state, states[t - 1].memory),
            )
    same_mean(states[-1], reference)


def test_eata_with_nothing_new_after_the_first_batch_makes_one_step():
    method, constants = eata(diversity=1e-6)
    method = dataclasses.replace(method, fisher=importances("batch"))  # not even the anchor pulls
    reference = oracle("EATA", rows=EVERY, **constants)
    agree(tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd()), reference, tiny.stream(4))
    assert reference.selected[0] > 0 and sum(reference.selected[1:]) == 0


@pytest.mark.parametrize("kind", ["batch", "example"])
def test_fisher(kind):
    computed = importances(kind)
    expected = published.fisher(tiny.MODEL, tiny.THETA, list(tiny.stream(9)), kind)
    assert computed["embed"] is None and computed["head"] is None
    np.testing.assert_allclose(tiny.theta_of(computed), expected, rtol=1e-4, atol=1e-9)


def test_fisher_of_the_lower_blocks():
    lower = importances("batch", lower=True)
    assert lower["block_1"]["norm"] == {"scale": None, "bias": None}
    np.testing.assert_allclose(
        lower["block_0"]["norm"]["scale"],
        importances("batch")["block_0"]["norm"]["scale"],
        rtol=1e-5,
    )


def test_fisher_errors():
    with pytest.raises(ValueError, match="batches is empty"):
        tta.fisher(tiny.apply_fn, tiny.PARAMS, [])
    with pytest.raises(ValueError, match="gradients must be"):
        tta.fisher(tiny.apply_fn, tiny.PARAMS, tiny.stream(9), gradients="sample")


# --- SAR ------------------------------------------------------------------------------------------


@functools.cache  # three tests share a method, and so its compiled step
def sar(come, **changes):
    threshold = changes.pop("threshold", 1.3 if come else 0.8)
    constants = {"rho": 0.2, "reset_below": 0.0 if come else 0.65, **changes}
    method = tta.SAR(tiny.CLASSES, margin=threshold / LN, **constants)
    return tta.COME(method, tiny.CLASSES) if come else method, {"threshold": threshold, **constants}


def same_average(state, reference):
    average, started = state.memory
    assert bool(started) == (reference.average is not None)
    if reference.average is not None:
        np.testing.assert_allclose(average, reference.average, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("come", [False, True])
def test_sar(come):
    method, constants = sar(come)
    batches = tiny.stream(5 if come else 45, 8)
    reference = oracle("SAR", rows=LOWER, come=come, **constants)
    states = agree(tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd()), reference, batches)
    same_average(states[-1], reference)
    flat = oracle("SAR", rows=LOWER, come=come, **{**constants, "rho": 0.0})
    _ = [flat.step(x) for x in batches]
    assert not reference.resets
    assert np.abs(flat.theta - reference.theta).max() > 1e-3, "the ascent must be at work"


def test_sar_filters_again_at_the_ascended_point():
    method, constants = sar(False, threshold=1.0, rho=1.5, reset_below=0.0)
    batches = tiny.stream(5, 8)
    reference = oracle("SAR", rows=LOWER, **constants)
    agree(
        tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd(0.02)),
        reference := _slower(reference),
        batches,
    )
    once = [(published.entropy(tiny.MODEL.logits(tiny.THETA, x))[0] < 1.0).sum() for x in batches]
    assert sum(reference.selected) < sum(once)


def _slower(reference):
    reference.learning_rate = 0.02
    return reference


def test_sar_with_nothing_selected_goes_on_by_momentum():
    method, constants = sar(False)
    reference = oracle("SAR", rows=LOWER, **constants)
    states = agree(
        tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd()), reference, tiny.stream(1, 8)
    )
    assert not reference.resets
    idle = [t for t in range(1, 8) if reference.selected[t] == 0 and any(reference.selected[:t])]
    assert idle
    for t in idle:
        assert (
            np.abs(tiny.theta_of(states[t].params) - tiny.theta_of(states[t - 1].params)).max()
            > 1e-6
        )
        jax.tree.map(np.testing.assert_array_equal, states[t].memory, states[t - 1].memory)


@pytest.mark.slow
def test_sar_resets_parameters_momentum_and_average_when_the_loss_is_low():
    method, constants = sar(False)
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd())
    reference = oracle("SAR", rows=LOWER, **constants)
    states = agree(adapter, reference, tiny.stream(4, 12))
    assert 1 <= len(reference.resets) < 10 and reference.resets[0] > 0, reference.resets
    for t in reference.resets:
        np.testing.assert_array_equal(tiny.theta_of(states[t].params), tiny.THETA)
        assert all(not x.any() for x in jax.tree.leaves(states[t].opt_state))
        assert not states[t].memory[1] and states[t].step == t + 1
    same_average(states[-1], reference)


# --- DeYO -----------------------------------------------------------------------------------------


@functools.cache
def deyo(augmentation, come=False, **changes):
    constants = {
        "entropy_threshold": 1.38 if come else 1.2,
        "threshold": 1.0,
        "plpd_margin": 0.3,
        **changes,
    }
    method = tta.DeYO(
        tiny.CLASSES,
        entropy_margin=constants["entropy_threshold"] / LN,
        plpd_margin=constants["plpd_margin"],
        margin=constants["threshold"] / LN,
        augmentation=augmentation,
        patches=2,
    )
    return tta.COME(method, tiny.CLASSES) if come else method, constants


class Spy:
    """The tiny model, which also writes down the images it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, params, images):
        jax.debug.callback(lambda x: self.seen.append(np.asarray(x)), images)
        return tiny.apply_fn(params, images)

    def views(self, batches):
        """Returns for each batch the images shown beside it."""
        jax.effects_barrier()
        seen = [
            x
            for x in self.seen
            if x.shape == batches[0].shape and not any(np.array_equal(x, b) for b in batches)
        ]
        self.seen = []
        return seen


SPY = Spy()


@pytest.mark.slow
@pytest.mark.parametrize("come", [False, True])
def test_deyo_by_any_augmentation(come):
    method, constants = deyo(tiny.upside_down, come)
    batches = tiny.stream(6)
    reference = oracle("DeYO", rows=LOWER, come=come, **constants)
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd())
    agree(adapter, reference, batches, batches[:, :, ::-1])
    first = [
        (
            reference.uncertainty(tiny.MODEL.logits(tiny.THETA, x))[0]
            < constants["entropy_threshold"]
        ).sum()
        for x in batches
    ]
    assert 0 < sum(reference.selected) < sum(first) < 36, "both filters must be at work"


def test_deyo_by_occlusion():
    method, constants = deyo("occlusion", plpd_margin=0.05)
    batches = tiny.stream(6)
    views = batches.copy()
    views[:, :, 1:3, 1:3] = batches.mean((2, 3))[:, :, None, None]
    reference = oracle("DeYO", rows=LOWER, **constants)
    agree(tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd()), reference, batches, views)
    assert sum(reference.selected) > 5


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", ["patch", "pixel"])
def test_deyo_by_permutation(augmentation):
    spy = SPY
    method, constants = deyo(augmentation)
    batches = tiny.stream(6)
    adapter = tta.Adapter(spy, tiny.PARAMS, method, sgd())
    tiny.run(adapter, batches)
    views = spy.views(batches)
    assert len(views) == len(batches)
    reference = oracle("DeYO", rows=LOWER, **constants)
    agree(adapter, reference, batches, views)  # the same key draws the same permutations
    assert sum(reference.selected) > 5

    orders = np.array(
        [
            [_order(augmentation, image, view) for image, view in zip(*p, strict=True)]
            for p in zip(batches, views, strict=True)
        ]
    )
    assert len({tuple(o) for o in orders[:, 0]}) > 1, "each step draws its own permutation"
    alike = [len({tuple(o) for o in of_batch}) == 1 for of_batch in orders]
    assert all(alike) if augmentation == "pixel" else not any(alike)
    tiny.run(adapter, batches, key=jax.random.key(77))
    assert not np.array_equal(spy.views(batches), views)


def _order(augmentation, image, view):
    """Returns the piece of the image that each piece of its view is. Checks that each piece occurs
    once."""
    side = 2 if augmentation == "patch" else 1
    pieces = [
        [
            x[r : r + side, c : c + side].tobytes()
            for r in range(0, 4, side)
            for c in range(0, 4, side)
        ]
        for x in (image, view)
    ]
    assert sorted(pieces[0]) == sorted(pieces[1])
    return [pieces[0].index(piece) for piece in pieces[1]]


@pytest.mark.slow
def test_patches_of_images_that_do_not_divide():
    method = tta.DeYO(tiny.CLASSES, patches=4)
    key = jax.random.key(0)
    augment = jax.jit(method.augment)
    ramp = np.broadcast_to(np.arange(10, dtype=np.float32)[:, None, None], (10, 9, 3))
    view = np.asarray(augment(key, key, ramp))
    assert (
        view.shape == ramp.shape
        and view.min() >= 0
        and view.max() <= 9
        and not np.array_equal(view, ramp)
    )
    flat = np.full((10, 9, 3), 0.3, np.float32)
    np.testing.assert_allclose(augment(key, key, flat), flat, rtol=1e-6)
    with pytest.raises(ValueError, match="patches=4 does not fit an image of 3x9"):
        method.augment(key, key, ramp[:3])


@pytest.mark.parametrize("augmentation", ["patch", "pixel", "occlusion"])
def test_channels_of_destroyed_images_stay_where_they_are(augmentation):
    kind = functools.partial(tta.DeYO, tiny.CLASSES, augmentation=augmentation)
    last, first = kind(), kind(channel_axis=0)
    image, key = tiny.stream(0)[0, 0], jax.random.key(0)
    both = jax.jit(
        lambda x: (last.augment(key, key, x), first.augment(key, key, x.transpose(2, 0, 1)))
    )
    expected, other = map(np.asarray, both(image))
    np.testing.assert_array_equal(other, expected.transpose(2, 0, 1))
    assert not np.array_equal(expected, image)
    with pytest.raises(
        ValueError, match=r"channel_axis=-1 does not suit images of shape \(3, 4, 4\)"
    ):
        last.augment(key, key, image.transpose(2, 0, 1))
    with pytest.raises(
        ValueError, match=r"channel_axis=0 does not suit images of shape \(4, 4, 3\)"
    ):
        first.augment(key, key, image)
    with pytest.raises(ValueError, match="does not suit images of shape"):
        last.augment(key, key, image.reshape(4, -1))
    with pytest.raises(ValueError, match="channel_axis must be -1"):
        kind(channel_axis=1)


@pytest.mark.slow
def test_deyo_with_nothing_selected_makes_no_step():
    """Batches of images that one filter leaves out, and a twin of images that it does not."""
    method, constants = deyo(tiny.upside_down, False)
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd())
    start = tiny.run(adapter, tiny.stream(6, 2))[0][-1]
    assert any(x.any() for x in jax.tree.leaves(start.opt_state))
    (images,) = tiny.stream(7, 1, 400)
    theta, every = tiny.theta_of(start.params), np.arange(400)
    logits, seen = tiny.MODEL.logits(theta, images), tiny.MODEL.logits(theta, images[:, ::-1])
    entropies, _ = published.entropy(logits)
    classes = logits.argmax(1)
    drops = published.softmax(logits)[every, classes] - published.softmax(seen)[every, classes]
    unsure = entropies - constants["entropy_threshold"]
    structured = drops - constants["plpd_margin"]
    for chosen, is_left_out in (
        ((unsure > 0.01) & (structured > 0.01), True),
        ((unsure < -0.01) & (structured < -0.01), True),
        ((unsure < -0.01) & (structured > 0.01), False),
    ):
        batches = images[chosen][:12].reshape(2, 6, *images.shape[1:])
        states, _ = tiny.run(adapter, batches, state=start)
        assert states[-1].step == 4
        # parameters and momentum
        pairs = zip(*map(jax.tree.leaves, (states[-1][1:3], start[1:3])), strict=True)
        assert all(np.array_equal(*pair) for pair in pairs) == is_left_out


# --- COME -----------------------------------------------------------------------------------------


def naive_opinion(f, num_classes=1000):
    """Computes COME's loss in the public code's form, in float32."""
    f = np.asarray(f, np.float32)
    with np.errstate(all="ignore"):
        e = np.exp(f / np.linalg.norm(f) * np.linalg.norm(f))
        b, u = e / (e.sum() + num_classes), num_classes / (e.sum() + num_classes)
        return -(b * np.log(b + 1e-7)).sum() - u * np.log(u + 1e-7)


@functools.cache
def gradients_of(uncertainty):
    return jax.jit(jax.vmap(jax.value_and_grad(uncertainty)))


def opinion_entropy_4(logits):
    return opinion_entropy(logits, num_classes=4)


def test_come_is_finite_where_the_naive_form_is_not():
    logits = [[89.0, 1, -3, 0], [200.0, 199, -200, 0], [0.0] * 4, [1e15, 0, 0, 0], [-1e4] * 4]
    value, slope = gradients_of(opinion_entropy_4)(jnp.array(logits, jnp.float32))
    assert np.isfinite(value).all() and np.isfinite(slope).all()
    assert not np.isfinite([naive_opinion(z) for z in logits[:4]]).any()


def test_comes_value_and_gradient():
    z = np.random.default_rng(3).normal(size=(50, 4)) * 3
    value, slope = gradients_of(opinion_entropy_4)(jnp.asarray(z, jnp.float32))
    expected_value, expected_slope = published.opinion(z)
    np.testing.assert_allclose(value, expected_value, atol=2e-6)
    np.testing.assert_allclose(slope, expected_slope, atol=2e-6)
    cosine = (np.asarray(slope, np.float64) * z).sum(1) / np.linalg.norm(z, axis=1)
    np.testing.assert_allclose(cosine, 0, atol=2e-7)


@pytest.mark.parametrize("num_classes", [4, 100])
def test_comes_prior_is_the_number_of_classes(num_classes):
    value = jax.jit(functools.partial(opinion_entropy, num_classes=num_classes))(
        jnp.zeros(num_classes)
    )
    # half of the mass is uncertainty: b = 1 / 2K, u = 1/2
    uniform = np.log(2 * num_classes) / 2 + np.log(2) / 2
    np.testing.assert_allclose(value, uniform, rtol=2e-3)


def test_come_keeps_the_method_it_is_put_over():
    base = tta.DeYO(tiny.CLASSES, plpd_margin=0.1)
    method = tta.COME(base, tiny.CLASSES)
    assert isinstance(method, tta.DeYO) and method.plpd_margin == 0.1 and method.lower_blocks_only
    assert base.uncertainty is entropy
    with pytest.raises(ValueError, match="num_classes=10, but base_method has num_classes=4"):
        tta.COME(base, 10)
    with pytest.raises(ValueError, match="at least 2"):
        tta.COME(tta.Tent(), 1)


# --- The rest -------------------------------------------------------------------------------------


def test_masked_classes_count_nothing_and_large_logits_are_finite():
    z = np.array([[1.0, 2.0, 0.5]])
    logits = jnp.array([[1.0, 2.0, -jnp.inf, 0.5], [200.0, -200, 0, 0]])
    value, slope = gradients_of(entropy)(logits)
    expected, expected_slope = published.entropy(z)
    np.testing.assert_allclose(value, [expected[0], 0], rtol=1e-6)
    np.testing.assert_allclose(slope, [np.insert(expected_slope[0], 2, 0), np.zeros(4)], atol=1e-6)
    value, slope = gradients_of(functools.partial(opinion_entropy, num_classes=3))(logits[:1])
    expected, expected_slope = published.opinion(z)
    np.testing.assert_allclose(value, expected, atol=1e-5)
    np.testing.assert_allclose(slope[0], np.insert(expected_slope[0], 2, 0), atol=1e-6)


def test_hooks_do_nothing_by_default():
    method = Method()
    sample = method(jnp.array([1.0, 2.0]))
    assert (
        sample.drop == 0
        and method.weight(sample) == 1
        and method.reliable(sample)
        and method.novel((), sample)
    )
    assert method.pull({"a": 1}) is None and method.start() == () and not method.lost(())
    assert not any(
        method.overrides(hook)
        for hook in ("weight", "reliable", "radius", "pull", "lost", "augment")
    )
    assert not tta.EATA(4).overrides("pull") and tta.EATA(4, fisher={}).overrides("pull")


@pytest.mark.parametrize("method", [tta.EATA(5), tta.SAR(5), tta.DeYO(5), tta.COME(tta.EATA(5), 5)])
def test_the_number_of_classes_is_checked(method):
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, sgd())
    with pytest.raises(ValueError, match="num_classes=5, but apply_fn returns 4 logits"):
        adapter.step(adapter.init(), tiny.stream(0)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tta.EATA(1), "num_classes must be at least 2, got 1"),
        (
            lambda: tta.EATA(10, margin=2.76),
            r"margin is a fraction .* got 2.76. Choose t / ln\(num_classes\)",
        ),
        (lambda: tta.EATA(10, diversity=0.0), "diversity must be positive, got 0.0"),
        (
            lambda: tta.EATA(10, fisher_strength=-1.0),
            "fisher_strength must not be negative, got -1.0",
        ),
        (lambda: tta.SAR(10, margin=0.0), "margin is a fraction"),
        (lambda: tta.SAR(10, rho=-0.1), "rho must be finite and not negative, got -0.1"),
        (lambda: tta.SAR(10, rho=math.inf), "rho must be finite"),
        (lambda: tta.DeYO(10, entropy_margin=1.5), "entropy_margin is a fraction"),
        (lambda: tta.DeYO(10, margin=-1), "margin is a fraction"),
        (lambda: tta.DeYO(10, augmentation="occ"), "augmentation must be .* got 'occ'"),
        (lambda: tta.DeYO(10, patches=1), "patches must be at least 2, got 1"),
    ],
)
def test_constants_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
