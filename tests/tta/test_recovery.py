"""Serving that dies and goes on: what is repeated, what is charged again, what is kept and what is
refused."""

import dataclasses
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import tta
from jaxdp.data import from_arrays
from jaxdp.privacy import BudgetExceeded, GaussianDpEvent, Ledger, NoOpDpEvent
from jaxdp.privacy.events import composition
from jaxdp.release import notes
from jaxdp.tta.monitor import CollapseMonitor
from tests import forked
from tests.tta import tiny_model as tiny

SEED, SIGMA = bytes(range(16)), 2.0
EVENT = GaussianDpEvent(SIGMA)
SGD, TENT = optax.sgd(0.1, momentum=0.9), tta.Tent()


class Died(Exception):
    """Stands for the death of the process."""


class Watched:
    """An adapter that keeps the norms it returned, and dies after so many steps."""

    def __init__(self, adapter, steps=None):
        self.adapter, self.left, self.moved = adapter, steps, []

    def __getattr__(self, name):
        return getattr(self.adapter, name)

    def step(self, state, images, key=None, mask=None):
        new, logits = self.adapter.step(state, images, key=key, mask=mask)
        self.moved.append(tiny.theta_of(new.params))
        if self.left is not None and len(self.moved) > self.left:
            raise Died
        return new, logits


def source(count, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.uniform(size=(count, tiny.SIDE, tiny.SIDE, 3)).astype(np.float32)
    return from_arrays(
        image=image, label=rng.integers(0, tiny.CLASSES, count), num_classes=tiny.CLASSES
    )


def stream_of(*sizes, batch_size=4, **terms):
    return tta.Stream(
        {f"d{k}": source(n, k) for k, n in enumerate(sizes)}, batch_size=batch_size, seed=0, **terms
    )


def adapter_of(clip_norm=1.0, optimizer=SGD, sigma=SIGMA, apply_fn=tiny.apply_fn, **terms):
    method = tta.private(TENT, clip_norm=clip_norm, noise_multiplier=sigma)
    return tta.Adapter(apply_fn, tiny.PARAMS, method, optimizer, **terms)


def new_ledger(path=None, unit="photograph", **budget):
    ledger = Ledger.in_memory() if path is None else Ledger(path)
    ledger.register("stream", adjacency="replace_one", unit=unit, **budget)
    return ledger


def account_of(ledger=None, **terms):
    return tta.StreamAccount((ledger or new_ledger()).account("stream"), event=EVENT, **terms)


def charged(ledger):
    """Returns the number of single visits that the ledger was charged."""
    counts = composition(ledger.events("stream").get(None, NoOpDpEvent()))
    return sum(n * SIGMA**2 / event.noise_multiplier**2 for event, n in counts.items())


def died(adapter, stream, steps, **arguments):
    """Returns the releases of a process that was killed in step `steps` before it kept the last
    one."""
    watched = Watched(adapter, steps)
    with pytest.raises(Died):
        tta.serve(watched, stream, **arguments)
    return watched.moved


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def same_served(one, other):
    same(one.state[:-1], other.state[:-1])
    assert (one.accuracy, one.resets, one.reports) == (other.accuracy, other.resets, other.reports)
    same((one.correct, one.count), (other.correct, other.count))


# --- Repetition -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_process_that_died_goes_on_bit_for_bit_and_is_charged_once(tmp_path, accumulate):
    adapter, stream = adapter_of(accumulate=accumulate), stream_of(12, 12, reset="domain")
    assert len(stream) == 6
    plain = new_ledger()
    whole = tta.serve(
        adapter, stream, account=account_of(plain), workdir=tmp_path / "whole", seed=SEED
    )
    ledger = new_ledger()
    moved = died(adapter, stream, 0, account=account_of(ledger), workdir=tmp_path / "run")
    for _ in range(5):  # repeats the batch that was interrupted, and dies in the next
        assert (tmp_path / "run" / "secret_seed").exists()
        repeated, *after = died(
            adapter, stream, 1, account=account_of(ledger), workdir=tmp_path / "run"
        )
        same(moved[-1], repeated)
        moved = after
    served = tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path / "run")
    assert charged(ledger) == charged(plain) == 2 and ledger.events("stream") == plain.events(
        "stream"
    )
    assert served.accuracy.keys() == whole.accuracy.keys() and served.resets == whole.resets == (
        0,
        3,
    )
    assert not list(tmp_path.rglob("secret_seed"))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("again", ["the same account", "another process"])
def test_an_interrupted_stream_ends_as_one_that_was_not(tmp_path, accumulate, again):
    adapter, stream = adapter_of(accumulate=accumulate), stream_of(14, 13, remainder="pad")
    monitor = CollapseMonitor(
        tiny.apply_fn, tiny.PARAMS, source(20, 9).arrays["image"], min_entropy=0.0, every=2
    )
    settings = {"seed": SEED, "monitor": monitor}
    whole = tta.serve(adapter, stream, account=account_of(), workdir=tmp_path / "whole", **settings)
    memory = tta.serve(adapter, stream, account=account_of(), **settings)
    ledger = new_ledger()
    account = account_of(ledger)
    for steps in (2, 0, 2, 1):
        died(adapter, stream, steps, account=account, workdir=tmp_path / "run", **settings)
        account = account if again == "the same account" else account_of(ledger)
    served = tta.serve(adapter, stream, account=account, workdir=tmp_path / "run", **settings)
    same_served(served, whole)
    if accumulate == 1:
        same_served(memory, whole)
    assert len(served.reports) == 4 and charged(ledger) == account.worst == 2
    assert account.epsilons(delta=1e-6).unit == pytest.approx(
        ledger.epsilon("stream", delta=1e-6), rel=1e-6
    )


@pytest.mark.slow
def test_a_second_call_returns_what_was_kept_and_pays_nothing(tmp_path):
    adapter, stream, ledger = adapter_of(), stream_of(12), new_ledger()
    first = tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path)
    watched, delivered = Watched(adapter), []
    second = tta.serve(
        watched,
        stream,
        account=account_of(ledger),
        workdir=tmp_path,
        deliver=lambda *given: delivered.append(given),
    )
    same_served(first, second)
    assert not watched.moved and not delivered and charged(ledger) == 1
    longer = [*stream, *stream_of(12)]  # everybody comes once more
    account = account_of(ledger)
    third = tta.serve(watched, longer, account=account, workdir=tmp_path)
    assert (
        len(watched.moved) == 3
        and charged(ledger) == account.worst == 2
        and third.count.sum() == 24
    )


KILLED = """
import os, pathlib, signal, sys
import numpy as np, optax
from jaxdp import Ledger, tta
from jaxdp.data import from_arrays
from tests.tta import tiny_model as tiny

root, kill = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
image = rng.uniform(size=(24, tiny.SIDE, tiny.SIDE, 3)).astype(np.float32)
data = from_arrays(image=image, label=np.zeros(24, int), num_classes=tiny.CLASSES)
method = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=2.0)
options = {"accumulate": 2, "predict": "after"}
adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, method, optax.sgd(0.5), **options)
ledger = Ledger(root / "ledger.sqlite")
ledger.register("stream", adjacency="replace_one", unit="photograph")

def deliver(batch, logits):
    number = len(list(root.glob("logits_*")))
    np.save(root / f"logits_{number}.npy", logits)
    if number == kill:
        os.kill(os.getpid(), signal.SIGKILL)

account = tta.StreamAccount(ledger.account("stream"), event=method.event)
stream = tta.Stream({"d": data}, batch_size=4, seed=0)
tta.serve(adapter, stream, account=account, workdir=root / "run", deliver=deliver)
"""


@pytest.mark.slow
def test_a_process_that_was_killed_is_charged_once_and_repeats_what_it_delivered(tmp_path):
    def start(kill):
        return forked.run(KILLED, tmp_path, kill, modules=forked.STAGES)

    for kill in (3, 5):  # the second batch of the second update, and the first of the third
        process = start(kill)
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert (tmp_path / "run" / "secret_seed").exists()
    process = start(-1)
    assert process.returncode == 0, process.stderr
    logits = [np.load(tmp_path / f"logits_{number}.npy") for number in range(8)]
    same(logits[3], logits[4])  # with the noise of the update in it
    same(logits[5], logits[6])
    assert not np.array_equal(logits[2], logits[3])
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert charged(ledger) == 1
    assert not (tmp_path / "run" / "secret_seed").exists()


# --- What is charged again ------------------------------------------------------------------------


def with_other_image(stream, index):
    batches = list(stream)
    batches[index].images[0] += 1
    return batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("settings", "another process"),
        ("cost", "the same account"),
        ("cost", "another process"),
    ],
)
def test_whatever_is_different_gets_fresh_noise_and_is_charged_again(tmp_path, changed, again):
    """tests/test_stages.py has other data, another program and another machine."""
    adapter, stream, ledger = adapter_of(), stream_of(12), new_ledger()
    account = account_of(ledger)
    (_, moved) = died(adapter, stream, 1, account=account, workdir=tmp_path)
    assert charged(ledger) == 1  # the second batch is of other people
    account = account if again == "the same account" else account_of(ledger)
    if changed == "settings":
        adapter = adapter_of(optimizer=optax.sgd(0.11, momentum=0.9))
    else:
        (one, two, three) = stream
        stream = [one, tta.Batch(**{**vars(two), "units": ("a", "b", "c", "d")}), three]
    watched = Watched(adapter)
    tta.serve(watched, stream, account=account, workdir=tmp_path)
    # Who came in the interrupted batch has come twice. People of other names have not: their old
    # names have.
    assert charged(ledger) == account.worst == (1 if changed == "cost" else 2)
    # Two noises differ by about 0.35 = 0.1 * SIGMA / 4 * sqrt(2 * 24), and by less than 0.13 once
    # in four million: chi-squared of 24 degrees below 3.4. Under one noise equal images move the
    # parameters equally, and 0.01 more of the learning rate moves them by less than 0.07, also at
    # five deviations.
    assert np.linalg.norm(watched.moved[0] - moved) > 0.13


@pytest.mark.slow
def test_an_interrupted_update_of_several_batches_is_charged_again_with_all_of_them(tmp_path):
    """Its pending sum is in two noisy sums."""
    adapter, stream, ledger = adapter_of(accumulate=3), stream_of(24), new_ledger()
    died(adapter, stream, 2, account=account_of(ledger), workdir=tmp_path)
    account = account_of(ledger)
    tta.serve(adapter, with_other_image(stream, 2), account=account, workdir=tmp_path)
    pending = [unit for index in (0, 1, 2) for unit in stream.batch(index).units]
    cost = {
        unit: sum(n**2 for n in releases.values())
        for unit, releases in account.visits.counts.items()
    }
    assert cost == {str(unit): 2 if unit in pending else 1 for unit in range(24)}
    assert charged(ledger) == 2
    resumed = account_of(ledger)  # and the next process counts the same
    tta.serve(adapter, with_other_image(stream, 2), account=resumed, workdir=tmp_path)
    assert resumed.visits == account.visits and charged(ledger) == 2


def test_another_ledger_is_charged_in_full(tmp_path):
    adapter, stream, ledger = adapter_of(), stream_of(12, 12), new_ledger()
    died(adapter, stream, 4, account=account_of(ledger), workdir=tmp_path)
    other = new_ledger()
    account = account_of(other)
    tta.serve(adapter, stream, account=account, workdir=tmp_path)
    assert charged(other) == account.worst == 2 and other.events("stream")[None] == tta.event(
        EVENT, stream
    )
    small = new_ledger(epsilon=1.0, delta=1e-6)
    with pytest.raises(BudgetExceeded) as refused:
        tta.serve(adapter, stream, account=account_of(small), workdir=tmp_path)
    assert refused.value.served.count.sum() == 24 and not small.events("stream")


def test_a_seed_repeats_a_stream_and_one_account_pays_for_it_once():
    adapter, stream, ledger = adapter_of(), stream_of(12), new_ledger()
    account = account_of(ledger)
    one, two = (tta.serve(adapter, stream, account=account, seed=SEED) for _ in range(2))
    same(one.state[:-1], two.state[:-1])
    assert account.worst == charged(ledger) == 1
    third = tta.serve(adapter, with_other_image(stream, 1), account=account, seed=SEED)
    assert not np.array_equal(tiny.theta_of(third.state.params), tiny.theta_of(one.state.params))
    assert account.worst == charged(ledger) == 2
    # An account that knows nothing of those visits pays for its own, or its other batches would be
    # free.
    tta.serve(adapter, stream, account=account_of(ledger), seed=SEED)
    assert charged(ledger) == 3


@pytest.mark.slow
def test_a_repeated_pending_sum_in_another_update_is_charged_again():
    adapter, stream, ledger = adapter_of(accumulate=2), stream_of(8), new_ledger()
    account = account_of(ledger)
    tta.serve(adapter, stream, account=account, seed=SEED)
    tta.serve(adapter, stream, account=account, seed=SEED)
    assert account.worst == 1
    tta.serve(adapter, with_other_image(stream, 1), account=account, seed=SEED)
    cost = {
        unit: sum(n**2 for n in releases.values())
        for unit, releases in account.visits.counts.items()
    }
    assert cost == dict.fromkeys(map(str, range(8)), 2) and charged(ledger) == 2


# --- States are used once -------------------------------------------------------------------------


def test_one_state_under_two_accounts_gets_two_noises():
    adapter, stream = adapter_of(), stream_of(4)
    start = adapter.init()
    one, two = (
        tta.serve(adapter, stream, account=account_of(), state=start).state for _ in range(2)
    )
    gap = tiny.theta_of(one.params) - tiny.theta_of(two.params)
    # the distance of the noises is 0.1 * sqrt(2) * SIGMA / 4 = 0.07 on average
    assert np.all(gap != 0)
    assert 0.01 < np.std(gap) < 0.3


def test_a_state_in_the_middle_of_an_update_stays_with_its_account():
    adapter, stream = adapter_of(accumulate=3), stream_of(16)
    first, second, third, other = stream
    account = account_of()
    start = adapter.init()
    state = tta.serve(adapter, [first], account=account, state=start).state
    refused = pytest.raises(
        ValueError, match="state is in the middle of an update, but it is not the newest"
    )
    with refused:
        tta.serve(adapter, [second], account=account_of(), state=state)
    with refused:  # records that were clipped to another norm need other noise
        tta.serve(adapter_of(accumulate=3, clip_norm=0.1), [second], account=account, state=state)
    with pytest.raises(ValueError, match="state has been served before"):
        tta.serve(adapter, [first], account=account, state=start)
    later = account_of(account.ledger, visits=account.visits)
    newest = tta.serve(adapter, [second], account=later, state=state).state
    with refused:
        tta.serve(adapter, [other], account=later, state=state)
    tta.serve(adapter, [third], account=later, state=newest)
    with refused:  # the update is made
        tta.serve(adapter, [other], account=later, state=newest)
    assert later.worst == 1
    public = tta.serve(adapter, [second], account=None, state=state).state
    with refused:  # the second batch is not paid for
        tta.serve(adapter, [third], account=account, state=public)
    stepped, _ = adapter.step(state, second.images)
    with refused:  # nor for one that somebody else let in
        tta.serve(adapter, [third], account=account, state=stepped)
    # Without its pending sum it holds released parameters only.
    tta.serve(adapter, [second], account=account_of(), state=adapter.reset(state))


def test_an_overspend_in_the_middle_of_an_update_returns_a_state_to_go_on_from():
    adapter, stream = adapter_of(accumulate=2), stream_of(4, 4, 4)
    account = account_of(new_ledger(epsilon=6.0, delta=1e-6))
    with pytest.raises(BudgetExceeded) as refused:
        tta.serve(adapter, [*stream, *stream], account=account)
    served = refused.value.served
    assert served.state.step % 2 == 1
    stranger = tta.Batch(**{**vars(stream.batch(0)), "units": tuple("abcd")})
    assert (
        tta.serve(adapter, [stranger], account=account, state=served.state).state.step
        == served.state.step + 1
    )


# --- What is kept, and refused --------------------------------------------------------------------


@pytest.mark.slow
def test_only_the_owner_may_read_the_state_and_no_pending_sum_stays(tmp_path):
    adapter, stream = adapter_of(accumulate=3), stream_of(20)
    account = account_of()
    modes = []
    run = tmp_path / "run"

    def deliver(batch, logits):
        modes.extend(
            oct((run / name).stat().st_mode & 0o777)
            for name in ("state.safetensors", "served.jsonl")
        )

    served = tta.serve(adapter, stream, account=account, workdir=run, deliver=deliver)
    assert set(modes) == {"0o600"} and run.stat().st_mode & 0o777 == 0o700
    memory = tta.serve(adapter, stream, account=account_of()).state
    assert served.state.step == memory.step == 5
    assert all(np.any(leaf) for leaf in jax.tree.leaves(memory.pending))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(served.state.pending))
    kept = tta.serve(adapter, stream, account=account_of(account.ledger), workdir=run).state
    same(kept[:-1], served.state[:-1])
    assert sorted(path.name for path in run.iterdir()) == [
        "charges.jsonl",
        "lock",
        "served.jsonl",
        "state.safetensors",
    ]


def test_what_is_not_the_same_stream_is_refused(tmp_path):
    adapter, stream, ledger = adapter_of(), stream_of(12), new_ledger()
    served = tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path)
    batches = list(stream)
    renamed = [*batches[:1], tta.Batch(**{**vars(batches[1]), "domains": ("fog",) * 4}), batches[2]]
    for other in (renamed, [batches[0], batches[2], batches[1]]):
        with pytest.raises(
            ValueError,
            match="batch 1 of stream differs in units or domains from the batch that was served in",
        ):
            tta.serve(adapter, other, account=account_of(ledger), workdir=tmp_path)
    with pytest.raises(ValueError, match="stream has 2 batches, but 3 were served in"):
        tta.serve(adapter, batches[:2], account=account_of(ledger), workdir=tmp_path)
    samples = account_of(new_ledger(unit="sample"), unit="sample")
    with pytest.raises(ValueError, match="holds a stream with another unit"):
        tta.serve(adapter, stream, account=samples, workdir=tmp_path)
    with pytest.raises(ValueError, match="holds a stream with another event"):
        tta.serve(adapter_of(sigma=1.0), stream, account=None, workdir=tmp_path)
    with pytest.raises(ValueError, match="holds the state of another adapter"):
        tta.serve(
            adapter_of(optimizer=optax.sgd(0.1)),
            stream,
            account=account_of(ledger),
            workdir=tmp_path,
        )
    assert charged(ledger) == 1
    same_served(tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path), served)
    (tmp_path / "state.safetensors").unlink()
    with pytest.raises(ValueError, match="holds notes of a stream, but its state is missing"):
        tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path)


def test_a_clip_norm_does_not_change_in_the_middle_of_an_update(tmp_path):
    stream = stream_of(12)
    died(adapter_of(accumulate=2), stream, 1, account=account_of(), workdir=tmp_path / "middle")
    with pytest.raises(ValueError, match="another clip_norm"):
        tta.serve(
            adapter_of(0.1, accumulate=2), stream, account=account_of(), workdir=tmp_path / "middle"
        )
    died(adapter_of(accumulate=2), stream, 2, account=account_of(), workdir=tmp_path / "between")
    tta.serve(
        adapter_of(0.1, accumulate=2), stream, account=account_of(), workdir=tmp_path / "between"
    )


def test_units_must_be_such_as_the_notes_can_hold(tmp_path):
    adapter, ledger = adapter_of(), new_ledger()
    batch = next(iter(stream_of(8)))
    for number, unit in enumerate((1.5, True, ("ward", frozenset()))):
        stream = [dataclasses.replace(batch, units=(unit,) * 4)]
        with pytest.raises(
            TypeError, match="units must have identifiers, which are texts or whole numbers"
        ):
            tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path / str(number))
    assert not ledger.events("stream")
    units = ["NaN", ("ward", 3, ("bed", "Ä")), np.int64(7), 7, "7", -1, b"id", "id"]
    stream = stream_of(8, units=units)
    account = account_of(ledger)
    tta.serve(adapter, stream, account=account, workdir=tmp_path / "run")
    again = account_of(ledger)
    tta.serve(adapter, stream, account=again, workdir=tmp_path / "run")
    assert again.visits == account.visits
    assert set(again.visits.counts) == {"NaN", ("ward", "3", ("bed", "Ä")), "7", "-1", "id"}
    assert "ward" in json.dumps(notes(tmp_path / "run"))


def test_an_account_with_a_workdir_is_for_that_workdir_only(tmp_path):
    adapter, one, two = (
        adapter_of(),
        stream_of(8),
        stream_of(8, units=[f"stranger {k}" for k in range(8)]),
    )
    account, refused = (
        account_of(),
        pytest.raises(ValueError, match="Make one StreamAccount for each workdir"),
    )
    tta.serve(adapter, one, account=account, workdir=tmp_path / "one")
    for elsewhere in ({"workdir": tmp_path / "two"}, {}):
        with refused:
            tta.serve(adapter, two, account=account, **elsewhere)
    with refused, account.spend(["a"], release=0):
        pytest.fail("the batch was touched")
    with refused:
        tta.serve(adapter, two, account=account_of(account.ledger, visits=account.visits))
    memory = account_of()
    tta.serve(adapter, one, account=memory)
    with refused:
        tta.serve(adapter, two, account=memory, workdir=tmp_path / "three")
    assert account.worst == memory.worst == 1


def test_a_workdir_is_used_by_one_process_at_a_time(tmp_path):
    adapter, stream = adapter_of(), stream_of(8)

    def deliver(batch, logits):
        with pytest.raises(ValueError, match="another process is running in"):
            tta.serve(adapter, stream, account=None, workdir=tmp_path)

    tta.serve(adapter, stream, account=None, workdir=tmp_path, deliver=deliver)


@pytest.mark.slow
@pytest.mark.parametrize("method", [tta.SAR, tta.EATA], ids=["SAR", "EATA"])
def test_every_part_of_a_state_is_kept(tmp_path, method):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.PARAMS)
    optimizer = optax.adam(1e-2)
    for name, chosen in (
        ("published", method(tiny.CLASSES)),
        ("private", tta.private(method(tiny.CLASSES), clip_norm=1.0, noise_multiplier=1.0)),
    ):
        adapter = tta.Adapter(tiny.apply_fn, params, chosen, optimizer)
        stream = stream_of(12)
        whole = tta.serve(
            adapter, stream, account=None, workdir=tmp_path / name / "whole", seed=SEED
        )
        died(adapter, stream, 1, account=None, workdir=tmp_path / name / "run", seed=SEED)
        served = tta.serve(
            adapter, stream, account=None, workdir=tmp_path / name / "run", seed=SEED
        )
        same_served(served, whole)
        assert served.state.params["block_0"]["norm"]["scale"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_step_is_lowered_once_for_every_kind_of_batch(tmp_path, monkeypatch):
    lowered = []
    plain = tta.adapter.program_text
    monkeypatch.setattr(
        tta.adapter, "program_text", lambda *args: lowered.append(1) or plain(*args)
    )
    adapter = adapter_of(accumulate=2)
    for workdir in ("one", "two"):
        tta.serve(
            adapter,
            stream_of(42, remainder="pad", reset="domain"),
            account=None,
            workdir=tmp_path / workdir,
        )
    assert len(lowered) == 1
    tta.serve(adapter, stream_of(42, batch_size=6), account=None, workdir=tmp_path / "three")
    assert len(lowered) == 2


# --- Planning -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("unit", ["photograph", "sample"])
def test_an_event_is_what_serving_charges_and_a_hold_for_it_is_used_up(accumulate, unit):
    units = [k % 5 for k in range(24)]
    stream = stream_of(24, 24, 16, units=units, order="mixed")
    cost = tta.event(EVENT, stream, unit=unit, accumulate=accumulate)
    assert cost == tta.event(EVENT, list(stream), unit=unit, accumulate=accumulate)
    ledger = new_ledger(unit=unit)
    with ledger.account("stream").hold(cost) as hold:
        account = tta.StreamAccount(hold.account("stream"), event=EVENT, unit=unit)
        tta.serve(adapter_of(accumulate=accumulate), stream, account=account)
        assert hold.left("stream") == NoOpDpEvent()
    assert ledger.events("stream")[None] == cost
    counts = composition(cost)
    total = sum(n * SIGMA**2 / event.noise_multiplier**2 for event, n in counts.items())
    assert total == pytest.approx(account.worst)


@pytest.mark.slow
def test_an_event_reads_no_image(monkeypatch):
    stream, batches = stream_of(12), list(stream_of(12))
    monkeypatch.setattr(type(stream.domains["d0"]), "gather", None)
    assert tta.event(EVENT, stream) == EVENT
    assert tta.event(EVENT, []) == NoOpDpEvent()
    for given in (stream, batches):
        with pytest.raises(
            ValueError, match="unit must be 'photograph' or 'sample', got 'patient'"
        ):
            tta.event(EVENT, given, unit="patient")


# --- Damage ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_workdir_is_named_and_charges_nothing(tmp_path):
    """Bits and lengths of the state and of the rows, each in turn."""
    adapter, stream, ledger = adapter_of(), stream_of(8, 8), new_ledger()
    expected = tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path, seed=SEED)
    before, rng = charged(ledger), np.random.default_rng(0)
    for name in ("state.safetensors", "served.jsonl") * 8:
        path = tmp_path / name
        content = path.read_bytes()
        place = int(rng.integers(len(content)))
        flipped = (
            content[:place]
            + bytes([content[place] ^ 1 << int(rng.integers(7))])
            + content[place + 1 :]
        )
        path.write_bytes(content[:place] if rng.integers(2) or name == "served.jsonl" else flipped)
        with pytest.raises(
            ValueError, match=rf"{tmp_path}.* (is damaged|not a metrics line|holds a stream)"
        ):
            tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path, seed=SEED)
        path.write_bytes(content)
    path = tmp_path / "state.safetensors"
    content = path.read_bytes()
    # one bit: the file seems to have no digest
    path.write_bytes(content.replace(b'"digest"', b'"digesu"'))
    with pytest.raises(ValueError, match="is damaged"):
        tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path, seed=SEED)
    path.write_bytes(content)
    assert charged(ledger) == before
    same_served(
        tta.serve(adapter, stream, account=account_of(ledger), workdir=tmp_path, seed=SEED),
        expected,
    )
