"""The till: nothing is computed before it is paid, nothing is paid twice, no noise falls on two
values."""

import contextlib
import dataclasses
import signal
import stat
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.privacy import (
    BudgetExceeded,
    GaussianDpEvent,
    Head,
    Ledger,
    LedgerDamaged,
    PureDpEvent,
    Reservation,
    store,
)
from jaxdp.privacy.events import composition
from jaxdp.release import Release, Till, identity, kept_arrays, notes, program, secrets, stream
from jaxdp.report import MetricsWriter
from tests import forked

EVENT = PureDpEvent(0.5)


class Crash(Exception):
    pass


def new_ledger(path=None, names=("data",), **budget):
    ledger = Ledger(path) if path else Ledger.in_memory()
    for name in names:
        ledger.register(name, adjacency="add_remove", unit="example", **budget)
    return ledger


def charged(ledger, name="data"):
    """How many times EVENT is on an account."""
    found = composition(ledger.events(name)[None]) if ledger.events(name) else {}
    assert set(found) <= {EVENT}
    return found.get(EVENT, 0)


def release_of(ledger, *, fail=False, seen=None, names=("data",), data=3.0, **fields):
    """A noisy sum, which writes its secrets to `seen`."""

    def compute(secret):
        if seen is not None:
            seen.append(secret)
        if fail:
            raise Crash
        return {"answer": np.asarray(data + jax.random.normal(stream(secret, "noise")))}

    charges = [(ledger.account(name), EVENT) for name in names]
    return Release(
        **{"label": "sum", "charges": charges, "facts": lambda: [data], "compute": compute} | fields
    )


@pytest.mark.parametrize("workdir", [True, False])
def test_a_forked_process_releases_nothing_and_deletes_nothing(tmp_path, monkeypatch, workdir):
    ledger = new_ledger()
    with Till(tmp_path if workdir else None, forget="run") as till:
        till.release(release_of(ledger))
        other, paid, seed = release_of(ledger, data=4.0), charged(ledger), till._seed()
        monkeypatch.setattr("os.getpid", lambda: -1)
        for use in (
            lambda: till.release(other),
            lambda: till.once(other),
            lambda: till.kept(other),
            lambda: till.stream("noise"),
            lambda: till.notes(),
        ):
            with pytest.raises(
                RuntimeError, match=r"the run.* belongs to the process from which this"
            ):
                use()
        till.close()
        monkeypatch.undo()
        assert charged(ledger) == paid == 1 and till._seed() == seed


def crash(ledger, workdir, **fields):
    """Pays, and dies before there is a value; returns the secret."""
    seen = []
    with pytest.raises(Crash), Till(workdir) as till:
        till.once(release_of(ledger, fail=True, seen=seen, **fields))
    return seen[0]


# --- Paying -------------------------------------------------------------------------------------


def test_everything_is_paid_before_anything_is_computed(tmp_path):
    ledger = new_ledger(names=("a", "b"))
    at_compute = []

    def compute(secret):
        rows = notes(tmp_path)
        at_compute.append([charged(ledger, "a"), charged(ledger, "b"), len(rows[0]["charges"])])
        return {}

    with Till(tmp_path) as till:
        till.release(release_of(ledger, names=("a", "b"), compute=compute))
    assert at_compute == [[1, 1, 2]]
    assert [entry["open"] for entry in ledger.report()["datasets"]] == [[], []]


def test_all_accounts_pay_or_none_and_nothing_is_computed(tmp_path):
    ledger = new_ledger(names=("rich",))
    ledger.register("poor", adjacency="add_remove", unit="example", epsilon=0.1, delta=0.0)
    seen = []
    with pytest.raises(BudgetExceeded, match="poor"), Till(tmp_path) as till:
        till.release(release_of(ledger, names=("rich", "poor"), seen=seen))
    assert seen == [] and charged(ledger, "rich") == charged(ledger, "poor") == 0
    assert notes(tmp_path) == [] and not (tmp_path / "secret_seed").exists()


def test_accounts_of_two_ledgers_are_refused():
    one, other = new_ledger(), new_ledger()
    charges = [(one.account("data"), EVENT), (other.account("data"), EVENT)]
    with pytest.raises(ValueError, match="must be of one ledger"):
        Till().release(release_of(one, charges=charges))
    assert charged(one) == charged(other) == 0


def test_a_release_of_public_data_needs_no_account():
    assert Till().release(release_of(new_ledger(), names=(), compute=lambda secret: 7)) == 7


# --- Again after a crash ------------------------------------------------------------------------


def test_the_same_release_after_a_crash_is_the_same_and_is_free(tmp_path):
    ledger, seen = new_ledger(), []
    secret = crash(ledger, tmp_path)
    with Till(tmp_path) as till:
        till.once(release_of(ledger, seen=seen))
    assert seen == [secret] and charged(ledger) == 1


CHANGES = {
    "data": {"data": np.nextafter(3.0, 4.0)},
    "settings": {"facts": lambda: [3.0, "other"]},
    "program": {"programs": lambda: ["module @jit_other"]},
    "event": {"charges": None},
    "kind": {"label": "mean"},
}
ELSEWHERE = ["flags", "variables", "devices", "versions", "host", "library"]


@pytest.mark.slow
@pytest.mark.parametrize("change", [*CHANGES, *ELSEWHERE])
def test_whatever_is_different_after_a_crash_draws_fresh_noise_and_pays_again(
    tmp_path, monkeypatch, change
):
    ledger, seen = new_ledger(), []
    secret = crash(ledger, tmp_path)
    fields = dict(CHANGES.get(change, {}))
    if change == "event":
        fields["charges"] = [(ledger.account("data"), GaussianDpEvent(1.0))]
    if change in ELSEWHERE:
        moved = {**identity.environment(), change: "moved"}
        monkeypatch.setattr(identity, "environment", lambda: moved)
    with Till(tmp_path) as till:
        till.once(release_of(ledger, seen=seen, **fields))
    assert seen != [secret]
    assert sum(composition(ledger.events("data")[None]).values()) == 2


def test_a_till_that_hashes_too_little_is_caught(tmp_path, monkeypatch):
    """The broken twin of the test above: a token without the environment repeats the noise
    elsewhere."""
    monkeypatch.setattr(identity, "environment", dict)
    ledger, seen = new_ledger(), []
    secret = crash(ledger, tmp_path)
    with Till(tmp_path) as till:
        till.once(release_of(ledger, seen=seen))
    assert seen == [secret]


def test_what_calls_back_to_python_is_never_repeated(tmp_path):
    def text():
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return [program(jax.jit(lambda x: jax.pure_callback(np.sin, scalar, x)), jnp.float32(1))]

    ledger, seen = new_ledger(), []
    secret = crash(ledger, tmp_path, programs=text)
    with Till(tmp_path) as till:
        till.release(release_of(ledger, seen=seen, programs=text))
    assert seen != [secret] and charged(ledger) == 2


def test_what_a_gpu_may_compute_otherwise_is_never_repeated(tmp_path, monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", device_kind="H100", client=jax.devices()[0].client)
    monkeypatch.setattr(identity, "devices", lambda: [gpu])
    for flags, charges in (("", 2), ("--xla_gpu_deterministic_ops=true", 1)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        ledger, seen, workdir = new_ledger(), [], tmp_path / f"run{charges}"
        secret = crash(ledger, workdir)
        with Till(workdir) as till:
            till.release(release_of(ledger, seen=seen))
        assert (seen == [secret]) == (charges == 1) and charged(ledger) == charges


def test_texts_without_constants_are_refused_before_anything_is_paid(tmp_path):
    """JAX can make arguments of the arrays that a function closes over. Two such functions have one
    text then, and would share a token and its noise."""
    flag = "jax_use_simplified_jaxpr_constants"
    if flag not in jax.config.values:
        pytest.skip("this JAX has no such flag")
    ledger, seen = new_ledger(), []
    before = jax.config.values[flag]
    jax.config.update(flag, True)
    try:
        with Till(tmp_path) as till, pytest.raises(RuntimeError, match="Nothing is spent"):
            till.release(release_of(ledger, seen=seen, programs=lambda: ["a program"]))
    finally:
        jax.config.update(flag, before)
    assert not seen and charged(ledger) == 0


def test_without_a_workdir_every_call_is_a_release_of_its_own():
    ledger, seen = new_ledger(), []
    for _ in range(3):
        Till().release(
            release_of(ledger, seen=seen, facts=lambda: pytest.fail("nothing needs to be hashed"))
        )
    assert len(set(seen)) == charged(ledger) == 3


def test_a_given_seed_reproduces_a_release_which_is_paid_once():
    ledger, seen = new_ledger(), []
    for data in (3.0, 3.0, 4.0):
        Till(seed=bytes(16)).release(release_of(ledger, seen=seen, data=data))
    assert seen[0] == seen[1] != seen[2] and charged(ledger) == 2


def test_a_ledger_that_lost_what_a_workdir_knows_is_refused(tmp_path):
    """A restored older copy: the head beside it agrees, and the head in the workdir's notes does
    not."""
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    with Ledger(path) as ledger:
        ledger.register("data", adjacency="add_remove", unit="record", epsilon=10.0, delta=0.0)
        ledger.backup(copy)
        with Till(tmp_path / "run") as till:
            kept = till.once(release_of(ledger))
        assert Head(*till.notes()[-1]["head"]) == ledger.head
    with Ledger(copy) as older, Till(tmp_path / "run") as till:
        with pytest.raises(
            LedgerDamaged, match=r"has lost history: a run was charged as spend 1.*ledger accept"
        ):
            till.once(release_of(older))
        assert charged(older) == 0
    store.accept(copy)
    with Ledger(copy) as older, Till(tmp_path / "run") as till:
        assert till.once(release_of(older)) == kept
        assert charged(older) == 1


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["ctrl-c", "full"]
)
@pytest.mark.parametrize(
    ("place", "reserved"),
    [
        ((secrets, "stored"), 0),
        ((store.Store, "append"), 0),
        ((MetricsWriter, "write"), 1),
        ((kept_arrays, "write_durably"), 1),
        ((Reservation, "__exit__"), 1),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_release_that_stops_anywhere_is_the_same_later_and_paid_once(
    tmp_path, monkeypatch, error, place, reserved
):
    ledger, seen = new_ledger(), []

    def stop(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*place, stop)
        with pytest.raises(type(error)) as raised, Till(tmp_path) as till:
            till.once(release_of(ledger, seen=seen))
        assert raised.value is error
    assert charged(ledger) == reserved == len(ledger.report()["datasets"][0]["open"])
    with Till(tmp_path) as till:
        till.once(release_of(ledger, seen=seen))
    assert len(set(seen)) == charged(ledger) == 1 and ledger.report()["datasets"][0]["open"] == []
    assert not (tmp_path / "secret_seed").exists()


KILLED = """
import sys, os, signal, pathlib
import numpy as np, jax
from jaxdp.privacy import Ledger, PureDpEvent, Reservation
from jaxdp.release import Release, Till, stream
from jaxdp.release import kept_arrays, secrets, till as module
place, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
def before(owner, name):
    setattr(owner, name, die)
{"paid": lambda: before(module.MetricsWriter, "write"), "noted": lambda: before(secrets, "derive"),
 "kept": lambda: before(Reservation, "__exit__"), "committed": lambda: before(secrets, "forget"),
 "renamed": lambda: before(kept_arrays, "write_durably"), "": lambda: None}[place]()
def compute(secret):
    with (folder / "seen").open("a") as file:
        file.write(secret.hex() + chr(10))
    return {"answer": np.asarray(3.0 + jax.random.normal(stream(secret, "noise")))}
with Ledger(folder / "ledger.sqlite") as ledger:
    ledger.register("data", adjacency="add_remove", unit="example")
    with Till(folder / "run") as till:
        what = Release(label="sum", charges=[(ledger.account("data"), PureDpEvent(0.5))], facts=lambda: [3.0],
                       compute=compute)
        print(repr(float(till.once(what)["answer"])))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("place", ["paid", "noted", "renamed", "kept", "committed"])
def test_a_process_that_is_killed_pays_once_and_releases_one_value(tmp_path, place):
    def run(place):
        return forked.run(KILLED, place, tmp_path, modules=forked.STAGES)

    assert run(place).returncode == -signal.SIGKILL
    assert (tmp_path / "run" / "secret_seed").exists()
    values = [run("") for _ in range(2)]
    assert all(process.returncode == 0 for process in values), values[0].stderr
    assert values[0].stdout == values[1].stdout
    assert len(set((tmp_path / "seen").read_text().split())) == 1
    assert charged(Ledger(tmp_path / "ledger.sqlite")) == 1
    assert not (tmp_path / "run" / "secret_seed").exists()


# --- The secret ---------------------------------------------------------------------------------


def test_the_secret_is_deleted_after_the_release_and_kept_while_it_is_unfinished(tmp_path):
    ledger, path = new_ledger(), tmp_path / "secret_seed"

    def keep(value):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(bytes.fromhex(path.read_text())) == 16

    with Till(tmp_path) as till:
        till.release(release_of(ledger, keep=keep))
        assert not path.exists()
    crash(ledger, tmp_path)
    seed = path.read_text()
    with Till(tmp_path) as till:
        till.once(release_of(ledger, data=4.0))
    kept = [p.read_bytes() for p in tmp_path.iterdir() if p.is_file()]
    assert kept and not any(seed.encode() in text or bytes.fromhex(seed) in text for text in kept)


def test_a_process_that_is_refused_keeps_the_secret_of_an_unfinished_release(tmp_path):
    path = tmp_path / "secret_seed"
    crash(new_ledger(), tmp_path)
    seed = path.read_text()
    with pytest.raises(ValueError, match="refused"), Till(tmp_path):
        raise ValueError("refused before it paid")
    assert path.read_text() == seed
    with Till(tmp_path):
        pass
    assert not path.exists()


def test_releases_of_a_run_may_share_a_secret_until_it_ends(tmp_path):
    ledger, path = new_ledger(), tmp_path / "secret_seed"

    def words(till):
        return jax.random.key_data(till.stream("frontend")).tolist()

    with pytest.raises(Crash), Till(tmp_path, forget="run") as till:
        first = words(till)
        till.release(release_of(ledger))
        raise Crash
    assert path.exists()
    with Till(tmp_path, forget="run") as till:
        assert words(till) == first
    assert not path.exists()
    with Till(tmp_path, forget="run") as till:
        assert words(till) != first


def test_a_damaged_or_another_seed_is_refused(tmp_path):
    ledger = new_ledger()
    crash(ledger, tmp_path)
    with pytest.raises(ValueError, match="seed differs from the one of the unfinished release"):
        Till(tmp_path, seed=bytes(16))
    for text in ("", "00", "zz" * 16, "00" * 17):
        (tmp_path / "secret_seed").write_text(text)
        with pytest.raises(ValueError, match="does not hold a seed of 16 bytes"):
            Till(tmp_path)
    for seed, error in ((b"short", ValueError), ("0" * 16, TypeError)):
        with pytest.raises(error, match="seed must be 16 bytes"):
            Till(seed=seed)


def test_one_workdir_has_one_till(tmp_path):
    with Till(tmp_path), pytest.raises(ValueError, match="another process is running in"):
        Till(tmp_path)
    Till(tmp_path).close()


# --- What is kept -------------------------------------------------------------------------------


def test_what_is_kept_is_neither_made_nor_paid_again(tmp_path):
    ledger, seen = new_ledger(), []
    answers = []
    for _ in range(3):
        with Till(tmp_path) as till:
            answers.append(till.once(release_of(ledger, seen=seen))["answer"])
    assert len(seen) == charged(ledger) == 1
    assert (
        answers[0] == answers[1] == answers[2]
        and answers[0].shape == ()
        and answers[0].dtype == np.float32
    )
    for change in ("data", "settings", "program", "kind"):
        with pytest.raises(ValueError, match="keeps another release"), Till(tmp_path) as till:
            till.once(release_of(ledger, **CHANGES[change]))
    assert charged(ledger) == 1


def test_what_is_kept_was_paid_by_the_charges_of_the_call(tmp_path):
    """Notes are settled as they are. They lack what other accounts or events owe."""
    first, second = new_ledger(names=("a", "b")), new_ledger(names=("a", "b", "c"))

    def once(folder, what):
        with Till(tmp_path / folder) as till:
            return till.once(what)["answer"]

    free = once("free", release_of(first, names=()))
    both = once("both", release_of(first, names=("a", "b")))
    twice = [(second.account("a"), PureDpEvent(1.0))]
    for folder, what in [
        ("free", release_of(second, names=("a",))),
        ("both", release_of(second, names=("a", "c"))),
        ("both", release_of(second, names=(), charges=twice)),
    ]:
        with pytest.raises(ValueError, match="keeps this release, but has no note that Pure"):
            once(folder, what)
    assert [charged(second, name) for name in "abc"] == [0, 0, 0]
    # Another ledger is charged for the same accounts, and a call without accounts reads the value.
    assert once("both", release_of(second, names=("b", "a"))) == both
    assert [charged(second, name) for name in "abc"] == [1, 1, 0]
    assert once("free", release_of(first, names=())) == free


def test_a_damaged_value_is_named_and_not_made_again(tmp_path):
    ledger, path = new_ledger(), tmp_path / "released.safetensors"
    with Till(tmp_path) as till:
        till.once(release_of(ledger))
    path.write_bytes(path.read_bytes()[:40])
    with (
        pytest.raises(ValueError, match=r"released\.safetensors is damaged: .*charged once more"),
        Till(tmp_path) as till,
    ):
        till.once(release_of(ledger))
    assert charged(ledger) == 1


def test_a_shared_secret_needs_a_till_that_keeps_it(tmp_path):
    with Till(tmp_path) as till, pytest.raises(ValueError, match="needs Till"):
        till.stream("frontend")


def test_a_value_that_cannot_be_written_is_made_again_as_it_was(tmp_path, monkeypatch):
    ledger, seen = new_ledger(), []
    with monkeypatch.context() as patch:
        patch.setattr(
            kept_arrays,
            "write_durably",
            lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")),
        )
        with pytest.raises(OSError), Till(tmp_path) as till:
            till.once(release_of(ledger, seen=seen))
    with Till(tmp_path) as till:
        till.once(release_of(ledger, seen=seen))
    assert len(seen) == 2 and len(set(seen)) == 1 and charged(ledger) == 1


# --- Another ledger -----------------------------------------------------------------------------


def test_a_ledger_that_does_not_know_of_a_charge_is_told(tmp_path):
    first, second = new_ledger(), new_ledger()
    for data in (1.0, 2.0):
        with Till(tmp_path) as till:
            till.release(release_of(first, data=data))
    with Till(tmp_path) as till:
        till.release(release_of(second, data=3.0))
    assert charged(first) == 2 and charged(second) == 3
    with Till(tmp_path) as till:
        till.settle([second.account("data")])
    assert charged(second) == 3


def test_a_ledger_without_room_for_what_was_released_refuses(tmp_path):
    with Till(tmp_path) as till:
        till.release(release_of(new_ledger()))
    small = new_ledger(epsilon=0.1, delta=0.0)
    with pytest.raises(BudgetExceeded), Till(tmp_path) as till:
        till.release(release_of(small))


def test_a_ledger_that_lacks_a_payment_for_a_part_is_charged_for_the_part(tmp_path):
    first, second = new_ledger(), new_ledger()
    with Till(tmp_path) as till:
        for data, part in enumerate(("a", "b")):
            till.release(release_of(first, data=data, partition=part))
    with Till(tmp_path) as till:
        till.settle([second.account("data")])
    assert set(second.events("data")) == {"a", "b"}
    assert second.events("data") == first.events("data")


def test_a_payment_pays_for_no_release_that_a_workdir_keeps(tmp_path):
    """What a Payment reserved cannot be charged to another ledger."""

    class Later:
        @contextlib.contextmanager
        def reserve(self, *, label, token):
            with account.spend(PureDpEvent(0.5), label=label, token=token):
                yield [(account, PureDpEvent(0.5))]

    account = new_ledger().account("data")
    what = dataclasses.replace(
        release_of(account.ledger), charges=Later(), compute=lambda secret: {"answer": np.ones(1)}
    )
    with Till(tmp_path) as till, pytest.raises(TypeError, match=r"pairs.*got Later"):
        till.once(what)
    assert charged(account.ledger) == 0
    with Till(tmp_path) as till:
        till.release(what)
    with Till() as till:
        till.once(what)
    assert charged(account.ledger) == 2


def test_notes_of_the_first_release_are_read(tmp_path):
    (tmp_path / "charges.jsonl").write_text(
        '{"step": 0, "time": 1.0, "token": "t0", '
        '"event": "{\\"epsilon\\":0.5,\\"type\\":\\"Pure\\"}"}\n'
    )
    ledger = new_ledger()
    with Till(tmp_path) as till:
        till.settle([ledger.account("data")])
    assert charged(ledger) == 1


def test_an_account_is_not_charged_for_the_releases_of_another_one_in_the_same_workdir(tmp_path):
    first = new_ledger(names=("images", "queries"))
    with Till(tmp_path, forget="run") as till:
        for name in ("images", "queries"):
            till.release(release_of(first, names=(name,), label=name))
    second = new_ledger(names=("images", "queries"))
    with Till(tmp_path, forget="run") as till:
        till.settle([second.account("images")])
        assert (charged(second, "images"), charged(second, "queries")) == (1, 0)
        till.settle([second.account("queries")])
    assert (charged(second, "images"), charged(second, "queries")) == (1, 1)


@pytest.mark.slow
def test_a_release_that_is_counted_twice_is_paid_in_each_count():
    """What a visit costs depends on the visits before it, so a replay is free among the same visits
    only."""
    ledger, seen = new_ledger(), []
    for count in ("one", "one", "other"):
        Till(seed=bytes(16)).release(release_of(ledger, seen=seen, once_in=count))
    assert len(set(seen)) == 1 and charged(ledger) == 2


def test_a_program_may_change_its_folder_during_a_release(tmp_path, monkeypatch):
    """The seed of a relative workdir is deleted where it lies."""
    ledger = new_ledger()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    what = release_of(ledger)

    def moving(secret):
        assert (tmp_path / "run" / secrets.FILE).exists()
        monkeypatch.chdir(elsewhere)
        return what.compute(secret)

    with Till("run") as till:
        name = till.name
        till.release(dataclasses.replace(what, compute=moving))
        assert till.name == name
    assert not (tmp_path / "run" / secrets.FILE).exists()
    assert not list((elsewhere / "run").iterdir())
