"""Streams with correlated noise: rows of C^-1 Z in float64, one charge a period, and recovery."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax_privacy.matrix_factorization.buffered_toeplitz import BufferedToeplitz

import jaxdp
from jaxdp import tta
from jaxdp.data import from_arrays
from jaxdp.privacy import GaussianDpEvent, Ledger, NoOpDpEvent, calibrate_noise
from jaxdp.privacy.events import composition
from tests.tta import tiny_model as tiny

SEED = bytes(range(16))
SIGMA = 3.0
PERIOD = 4
BANDS = np.array([1.0, 0.5, 0.375])
NOISE = jaxdp.correlated(BANDS, steps=PERIOD)
EVENT = NOISE.event(SIGMA)
SGD = optax.sgd(1.0)
TENT = tta.Tent()
# Gradients of this norm vanish beside the noise.
NOTHING = 1e-6


class Died(Exception):
    """Stands for the death of the process."""


class Dying:
    """An adapter that dies in a step."""

    def __init__(self, adapter, left):
        self.adapter = adapter
        self.left = left
        self.moved = []

    def __getattr__(self, name):
        return getattr(self.adapter, name)

    def step(self, state, images, key=None, mask=None):
        new, logits = self.adapter.step(state, images, key=key, mask=mask)
        self.moved.append(tiny.theta_of(new.params))
        self.left -= 1
        if self.left < 0:
            raise Died
        return new, logits


def source(count, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.uniform(size=(count, tiny.SIDE, tiny.SIDE, 3)).astype(np.float32)
    label = rng.integers(0, tiny.CLASSES, count)
    return from_arrays(image=image, label=label, num_classes=tiny.CLASSES)


def stream_of(*sizes, **terms):
    domains = {f"d{k}": source(n, k) for k, n in enumerate(sizes)}
    return tta.Stream(domains, batch_size=4, seed=0, **terms)


def adapter_of(noise=NOISE, *, clip_norm=1.0, sigma=SIGMA, optimizer=SGD, **terms):
    method = tta.private(TENT, clip_norm=clip_norm, noise_multiplier=sigma, noise=noise)
    return tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, optimizer, **terms)


@pytest.fixture(scope="module")
def adapter():
    return adapter_of()


def new_ledger():
    ledger = Ledger.in_memory()
    ledger.register("stream", adjacency="replace_one", unit="photograph")
    return ledger


def account_of(ledger, **terms):
    return tta.StreamAccount(ledger.account("stream"), event=EVENT, **terms)


def periods(ledger):
    """Returns the number of periods that the ledger was charged."""
    spent = composition(ledger.events("stream").get(None, NoOpDpEvent()))
    one = EVENT.noise_multiplier**2
    return sum(n * one / event.noise_multiplier**2 for event, n in spent.items())


def noises(noise, rounds):
    """Returns the noise of the updates of many runs, over its standard deviation per row of Z.

    It is float64 [runs, rounds, values]. Gradients are too small to see.
    """
    adapter = adapter_of(noise, clip_norm=NOTHING, optimizer=optax.sgd(1 / NOTHING))
    image = np.zeros((1, tiny.SIDE, tiny.SIDE, 3), np.float32)
    padding = np.zeros(1, bool)
    adapter.prepare(image)

    def step(state, _):
        state, _ = adapter.step(state, image, mask=padding)
        norms = [state.params[block]["norm"]["scale"] for block in ("block_0", "block_1")]
        return state, jnp.concatenate(norms)

    def run(key):
        _, moved = jax.lax.scan(step, adapter.init(key), length=rounds)
        return moved

    keys = jax.random.split(jax.random.key(7), 400)
    moved = np.asarray(jax.jit(jax.vmap(run))(keys), np.float64)
    start = [tiny.PARAMS[block]["norm"]["scale"] for block in ("block_0", "block_1")]
    first = np.broadcast_to(np.concatenate(start), moved[:, :1].shape)
    # theta_{t+1} = theta_t - G_t / NOTHING, and G_t is noise of standard deviation SIGMA NOTHING.
    return -np.diff(np.concatenate([first, moved], axis=1), axis=1) / SIGMA


STRATEGIES = {
    "banded": (NOISE, [1.0, 0.5, 0.375, 0.0]),
    "buffered": (
        jaxdp.correlated(BufferedToeplitz.build([0.9], [0.3], dtype=np.float32), steps=PERIOD),
        [1.0, 0.3, 0.27, 0.243],
    ),
}


def covariance(column):
    """Returns the covariance of the rows of C^-1 Z over a period and one update of the next."""
    matrix = np.zeros((PERIOD, PERIOD))
    for lag, value in enumerate(column):
        matrix += value * np.eye(PERIOD, k=-lag)
    inverse = np.zeros((PERIOD + 1, PERIOD + 1))
    inverse[:PERIOD, :PERIOD] = np.linalg.inv(matrix)
    inverse[PERIOD, PERIOD] = 1 / column[0]
    return inverse @ inverse.T


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_updates_of_a_period_have_the_rows_of_c_inverse_z_and_the_next_begins_anew(name):
    noise, column = STRATEGIES[name]
    rows = noises(noise, PERIOD + 1)
    count = len(rows) * rows.shape[2]
    expected = covariance(column)

    def farthest(scale):
        flat = scale * np.moveaxis(rows, 1, 0).reshape(PERIOD + 1, -1)
        seen = flat @ flat.T / count
        # Of the covariance of Gaussians (Isserlis).
        variances = np.diag(expected)
        deviation = np.sqrt((expected**2 + np.outer(variances, variances)) / count)
        return (np.abs(seen - expected) / deviation).max()

    # 15 entries, each beyond 6.5 deviations with a probability below 1e-10.
    assert farthest(1.0) < 6.5
    assert farthest(0.7) > 6.5 and farthest(1.3) > 6.5
    # A twin that does not correlate, and one that goes on over the end of a period.
    rows = np.random.default_rng(1).normal(size=rows.shape)
    assert farthest(1.0) > 6.5
    rows[:, 1:] -= 0.5 * rows[:, :-1]
    assert farthest(1.0) > 6.5


def test_a_stream_costs_one_period_however_long_it_is(adapter):
    ledger = new_ledger()
    stream = stream_of(40)
    assert len(stream) == 2.5 * PERIOD
    served = tta.serve(adapter, stream, account=account_of(ledger))
    assert ledger.events("stream") == {None: EVENT}
    assert served.state.rows.number == 2
    method = adapter.method
    assert method.epsilon(delta=1e-6) == pytest.approx(ledger.epsilon("stream", delta=1e-6))
    # Every record is in one row of C: the largest norm of a column is that of the first.
    assert EVENT.noise_multiplier == pytest.approx(SIGMA / np.linalg.norm(BANDS), rel=1e-6)


def test_units_that_come_back_pay_for_every_period_and_for_pairs_in_one(adapter):
    # Five domains of two batches: photographs are in rows 0, 2 of the periods 0, 1 and 2.
    ledger = new_ledger()
    account = account_of(ledger)
    stream = stream_of(8, 8, 8, 8, 8)
    tta.serve(adapter, stream, account=account)
    # Twice in one period moves C G by at most twice as much, which is four visits.
    assert periods(ledger) == pytest.approx(account.worst) and account.worst == 4 + 4 + 1
    expected = tta.event(EVENT, stream, updates=PERIOD)
    assert expected == ledger.events("stream")[None]
    # A reset of the stream begins a period.
    apart = new_ledger()
    domains = stream_of(8, 8, 8, 8, 8, reset="domain")
    served = tta.serve(adapter, domains, account=account_of(apart))
    assert periods(apart) == pytest.approx(5) and served.state.rows.number == 2
    assert tta.event(EVENT, domains, updates=PERIOD) == apart.events("stream")[None]
    assert tta.event(EVENT, iter(domains), updates=PERIOD) == apart.events("stream")[None]


@pytest.fixture(scope="module")
def resetting():
    """An adapter with periods 0-3, 4-5, 6-9 and 10-11 in 12 batches."""
    return adapter_of(reset_every=6)


@pytest.mark.slow
def test_a_reset_of_the_adapter_begins_a_period_for_serve_a_plan_and_a_loop(resetting):
    batches = list(stream_of(48))
    for number in (7, 8):
        units = ("twice", *batches[number].units[1:])
        batches[number] = dataclasses.replace(batches[number], units=units)
    ledger = new_ledger()
    tta.serve(resetting, batches, account=account_of(ledger))
    assert periods(ledger) == pytest.approx(4)
    planned = functools.partial(tta.event, EVENT, batches, updates=PERIOD)
    assert planned(reset_every=6) == ledger.events("stream")[None]

    def looped(name):
        loop = new_ledger()
        account = account_of(loop)
        state = resetting.init()
        names = []
        for batch in batches:
            names.append(name(state))
            with account.spend(batch.units, release=names[-1]):
                state, _ = resetting.step(state, batch.images)
        return names, loop.events("stream")[None]

    names, charged = looped(resetting.release_name)
    assert names == [0] * 4 + [4] * 2 + [6] * 4 + [10] * 2
    assert charged == ledger.events("stream")[None]
    # A twin by the number of the batch, and a plan without the resets, pay for two of four visits.
    _, too_little = looped(lambda state: int(state.step) // PERIOD)
    assert too_little == planned() != charged


@pytest.mark.slow
def test_names_of_sums_count_updates_and_begin_anew_at_a_reset():
    adapter = adapter_of(accumulate=2)
    images = stream_of(4).batch(0).images
    state = adapter.init()
    names = []
    for number in range(12):
        if number == 6:
            state = adapter.reset(state)
        names.append(adapter.release_name(state))
        state, _ = adapter.step(state, images)
    assert names == [0] * 6 + [3] * 6
    independent = adapter_of(None, accumulate=2)
    assert independent.release_name(independent.init()._replace(step=jnp.int32(5))) == 2


def test_a_stream_that_ends_where_a_reset_is_due_leaves_no_noise(tmp_path, resetting):
    stream = stream_of(24)
    # Without a workdir the state keeps the buffers of the second row of the second period.
    plain = tta.serve(resetting, stream, account=None).state.rows
    assert plain.number == 2 and np.any(jax.tree.leaves(plain.buffers)[0])
    served = tta.serve(resetting, stream, account=account_of(new_ledger()), workdir=tmp_path)
    assert not any(np.any(x) for x in jax.tree.leaves(served.state.rows))
    [stored] = tmp_path.glob("*.safetensors")
    held = safetensors.numpy.load_file(stored).values()
    buffers = [x.shape for x in jax.tree.leaves(plain.buffers)]
    secret = [array for array in held if array.shape in buffers]
    assert len(secret) == len(buffers) and not any(map(np.any, secret))


@pytest.mark.slow
def test_a_stream_that_died_goes_on_bit_for_bit_for_one_charge(tmp_path):
    adapter = adapter_of(accumulate=2)
    stream = stream_of(12, 12)
    secret = {"seed": SEED}
    plain = account_of(new_ledger())
    whole = tta.serve(adapter, stream, account=plain, workdir=tmp_path / "whole", **secret)
    ledger = new_ledger()
    terms = {"workdir": tmp_path / "run", **secret}
    interrupted = None
    for _ in range(5):
        dying = Dying(adapter, 1)
        with pytest.raises(Died):
            tta.serve(dying, stream, account=account_of(ledger), **terms)
        if interrupted is not None:
            np.testing.assert_array_equal(interrupted, dying.moved[0])
        interrupted = dying.moved[-1]
    account = account_of(ledger)
    served = tta.serve(adapter, stream, account=account, **terms)
    jax.tree.map(np.testing.assert_array_equal, served.state[:-1], whole.state[:-1])
    # Six batches are three updates of one period, and every photograph is in two of them.
    assert periods(ledger) == pytest.approx(4) and account.worst == 4
    # Nothing secret is left, and a longer stream begins a period.
    assert not any(np.any(x) for x in jax.tree.leaves(served.state.rows))
    tta.serve(adapter, [*stream, *stream_of(8)], account=account_of(ledger), **terms)
    assert periods(ledger) == pytest.approx(5)


@pytest.mark.slow
def test_a_batch_that_differs_when_it_is_repeated_pays_for_its_period_again(tmp_path, adapter):
    ledger = new_ledger()
    stream = stream_of(24)
    with pytest.raises(Died):
        tta.serve(Dying(adapter, 2), stream, account=account_of(ledger), workdir=tmp_path)
    assert periods(ledger) == pytest.approx(1)
    changed = list(stream)
    changed[2].images[0] += 1
    account = account_of(ledger)
    tta.serve(adapter, changed, account=account, workdir=tmp_path)
    early = [unit for batch in changed[:3] for unit in batch.units]
    cost = {unit: sum(releases.values()) for unit, releases in account.visits.counts.items()}
    # The third batch is in two rows of Z that share the buffers of the first two.
    assert cost == {str(unit): 2 if unit in early else 1 for unit in range(24)}
    assert periods(ledger) == pytest.approx(2)
    resumed = account_of(ledger)
    tta.serve(adapter, changed, account=resumed, workdir=tmp_path)
    assert resumed.visits == account.visits and periods(ledger) == pytest.approx(2)


def test_a_state_in_the_middle_of_a_period_stays_with_its_account(adapter):
    first, second, third, *_ = stream_of(24)
    ledger = new_ledger()
    account = account_of(ledger)
    state = tta.serve(adapter, [first], account=account).state
    refused = pytest.raises(ValueError, match="state is in the middle of a period of correlated")
    with refused:
        tta.serve(adapter, [second], account=account_of(new_ledger()), state=state)
    with refused:
        tta.serve(adapter_of(clip_norm=0.5), [second], account=account, state=state)
    newest = tta.serve(adapter, [second], account=account, state=state).state
    with refused:
        tta.serve(adapter, [third], account=account, state=state)
    tta.serve(adapter, [third], account=account, state=newest)
    assert account.worst == 1 and periods(ledger) == pytest.approx(1)
    tta.serve(adapter, [second], account=account, state=adapter.reset(state))
    assert account.worst == 2
    other = adapter_of(None)
    with pytest.raises(ValueError, match="other noise"):
        other.step(state, first.images)


def test_a_workdir_keeps_its_strategy_and_clip_norm(tmp_path, adapter):
    stream = stream_of(12)
    with pytest.raises(Died):
        tta.serve(Dying(adapter, 1), stream, account=None, workdir=tmp_path)
    # The same event, by other coefficients.
    other = jaxdp.correlated(BANDS * 2, steps=PERIOD)
    same_event = adapter_of(other, sigma=2 * SIGMA)
    assert same_event.method.event == EVENT
    with pytest.raises(ValueError, match="another event"):
        tta.serve(same_event, stream, account=None, workdir=tmp_path)
    with pytest.raises(ValueError, match="another clip_norm"):
        tta.serve(adapter_of(clip_norm=0.5), stream, account=None, workdir=tmp_path)


def test_noise_that_does_not_fit_a_stream_is_refused_by_name():
    twice = jaxdp.correlated(BANDS, steps=PERIOD, participations=2)
    terms = {"clip_norm": 1.0, "noise_multiplier": SIGMA}
    with pytest.raises(ValueError, match="participations=1, got 2"):
        tta.private(tta.Tent(), **terms, noise=twice)
    with pytest.raises(TypeError, match=r"noise must be jaxdp\.correlated"):
        tta.private(tta.Tent(), **terms, noise=BANDS)
    with pytest.raises(ValueError, match="noise_multiplier must be positive"):
        tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=0.0, noise=NOISE)
    with pytest.raises(ValueError, match="exact must be False"):
        tta.private(tta.Tent(), **terms, noise=NOISE, exact=True)
    described = tta.private(tta.Tent(), **terms, noise=NOISE).describe()
    assert "correlated over periods of 4 updates" in described


def test_a_target_chooses_the_noise_of_the_rows():
    target = {"epsilon": 4.0, "delta": 1e-6, "adjacency": "replace_one"}
    sigma = calibrate_noise(NOISE.event, **target)
    independent = calibrate_noise(GaussianDpEvent, **target)
    assert sigma == pytest.approx(independent * NOISE.sensitivity, rel=1e-4)
    method = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=sigma, noise=NOISE)
    assert 3.9 < method.epsilon(delta=1e-6) <= 4.0
