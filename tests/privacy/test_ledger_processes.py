"""Real processes: kill -9 at chosen and at random instants, races on one budget, forks, and the
launcher."""

import json
import signal
import sqlite3

import pytest

from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.privacy import epsilon as epsilon_at
from jaxdp.privacy.events import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SelfComposedDpEvent,
)
from tests import forked


def run(code, *arguments, check=True):
    """Runs Python code in a process of its own; sys.argv[1:] are the arguments."""
    done = forked.run(code, *arguments, modules=forked.LEDGERS)
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.register("data", adjacency="add_remove", unit="example", epsilon=10.0, delta=0.0)
    return path


def table(path):
    """Returns ({status: spends}, the running total) and checks that they and the file agree."""
    with sqlite3.connect(path) as db:
        statuses = dict(
            db.execute("SELECT status, count(*) FROM spends GROUP BY status").fetchall()
        )
        total = db.execute("SELECT coalesce(sum(spends), 0) FROM totals").fetchone()[0]
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    assert sum(statuses.values()) == total
    return statuses, total


DIE_AT = """
import functools, json, os, signal, sqlite3, sys
from jaxdp.privacy import Ledger, PureDpEvent
path, names, instant = sys.argv[1], *map(json.loads, sys.argv[2:])
def reach(step):
    if step.startswith(instant[0]):
        instant.pop(0)
        instant or os.kill(os.getpid(), signal.SIGKILL)
class Dying(sqlite3.Connection):
    def execute(self, text, *values):
        reach(text)
        return super().execute(text, *values)
    def executemany(self, text, rows):
        reach(text)
        return super().executemany(text, rows)
sqlite3.connect = functools.partial(sqlite3.connect, factory=Dying)
ledger = Ledger(path)
os.pwrite = lambda *args: reach("write the head")
with ledger.spend_all([(name, PureDpEvent(1.0)) for name in names], label="doomed", token="step 1"):
    reach("body")
"""
# The steps after which the program dies. It dies before the last of them.
INSTANTS = {
    "between two reservations": ["INSERT INTO spends", "INSERT INTO spends"],
    "before the reservation commits": ["INSERT INTO totals", "COMMIT"],
    "before the head is written": ["write the head"],
    "in the body": ["body"],
    "before the commit is recorded": ["UPDATE spends SET status"],
}


def die_at(instant, path, *names):
    done = run(DIE_AT, path, json.dumps(names), json.dumps(INSTANTS[instant]), check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instant", "statuses"),
    [
        ("before the reservation commits", {}),  # Nothing ran, so nothing is charged.
        ("before the head is written", {"reserved": 1}),
        ("in the body", {"reserved": 1}),
        ("before the commit is recorded", {"reserved": 1}),
    ],
)
def test_kill_at_a_chosen_instant(path, instant, statuses):
    die_at(instant, path, "data")
    assert table(path) == (statuses, len(statuses))
    with Ledger(path) as ledger:
        assert ledger.epsilon("data") == float(len(statuses))
        assert [row["label"] for row in ledger.report()["datasets"][0]["open"]] == ["doomed"] * len(
            statuses
        )
        with ledger.spend("data", PureDpEvent(1.0), token="step 1") as record:
            assert record.replay == bool(statuses)
        assert ledger.epsilon("data") == 1.0
    assert table(path) == ({"committed": 1}, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instant", "statuses"),
    [
        ("between two reservations", {}),  # All of them or none.
        ("in the body", {"reserved": 2}),
        ("before the commit is recorded", {"reserved": 2}),
    ],
)
def test_kill_while_several_accounts_pay(path, instant, statuses):
    with Ledger(path) as ledger:
        ledger.register("more", adjacency="add_remove", unit="example", epsilon=10.0, delta=0.0)
    die_at(instant, path, "data", "more")
    assert table(path) == (statuses, sum(statuses.values()))
    with Ledger(path) as ledger:
        assert ledger.epsilon("data") == ledger.epsilon("more") == (1.0 if statuses else 0.0)


# One driver forks its workers, so that many processes cost one import.
RANDOM_KILLS = """
import os, random, signal, sys, time
from jaxdp.privacy import Ledger, PureDpEvent
path, released = sys.argv[1:]

def worker():
    ledger = Ledger(path)
    output = os.open(released, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        with ledger.spend("data", PureDpEvent(1e-6)):
            os.write(output, b"r")

def start():
    pid = os.fork()
    if pid == 0:
        try:
            worker()
        finally:
            os._exit(1)
    return pid

random.seed(0)
survivor = start()
for _ in range(12):
    victim = start()
    time.sleep(random.uniform(0.01, 0.15))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
assert os.waitpid(survivor, os.WNOHANG) == (0, 0), "the other process stumbled over a kill"
os.kill(survivor, signal.SIGKILL)
os.waitpid(survivor, 0)
"""


@pytest.mark.slow
def test_kill_at_random_instants_while_another_process_spends(path, tmp_path):
    released = tmp_path / "released"
    run(RANDOM_KILLS, path, released)
    statuses, total = table(path)
    ran = released.stat().st_size
    assert ran >= 20
    # Whatever ran was charged; each kill strands one reservation at most.
    assert ran <= total <= ran + 13
    assert statuses.get("reserved", 0) <= 13
    with Ledger(path) as ledger:
        assert ledger.epsilon("data") == pytest.approx(total * 1e-6)
        with ledger.spend("data", PureDpEvent(1e-6)):
            pass


LOCKED = """
import os, sys, threading
from jaxdp.privacy import Ledger, PureDpEvent
ledger, held, forked = Ledger(sys.argv[1]), threading.Event(), threading.Event()

def hold():
    with ledger._store.transaction("DEFERRED"):
        held.set()
        forked.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    with ledger.spend("data", PureDpEvent(0.5)):
        os._exit(0)
forked.set()
thread.join()
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_fork_while_a_thread_reads_the_ledger_does_not_hang(path):
    run(LOCKED, path)
    with Ledger(path) as ledger:
        assert ledger.epsilon("data") == 0.5


RACE = """
import os, sys
from jaxdp.privacy import BudgetExceeded, GaussianDpEvent, Ledger, PoissonSampledDpEvent, PureDpEvent
path, dataset, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
step = PureDpEvent(0.1) if dataset == "data" else PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
parent_ledger = Ledger(path)  # Forked children must not touch this connection.
terms = {"adjacency": "add_remove", "unit": "example"}
pids = []
for index in range(workers):
    pid = os.fork()
    if pid == 0:
        spent = 0
        try:
            ledger = parent_ledger if index % 2 else Ledger(path)
            while True:
                with ledger.spend(dataset, step, label=f"worker {index}"):
                    spent += 1
        except BudgetExceeded:
            os.write(1, b"%d\\n" % spent)  # at once, whole lines
            os._exit(0)
        finally:
            os._exit(1)
    pids.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
"""  # noqa: E501


@pytest.mark.slow
def test_a_race_spends_the_budget_exactly(path):
    counts = list(map(int, run(RACE, path, "data", 4).stdout.split()))
    assert sum(counts) == 100
    assert table(path) == ({"committed": 100}, 100)
    with Ledger(path) as ledger:
        assert ledger.epsilon("data") == pytest.approx(10.0)


@pytest.mark.slow
def test_a_race_near_a_pld_budget(path):
    budget = 0.9
    with Ledger(path) as ledger:
        ledger.register("sgd", adjacency="add_remove", unit="example", epsilon=budget, delta=1e-5)
    counts = list(map(int, run(RACE, path, "sgd", 2).stdout.split()))
    step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    assert epsilon_at(SelfComposedDpEvent(step, sum(counts)), delta=1e-5) <= budget
    assert epsilon_at(SelfComposedDpEvent(step, sum(counts) + 1), delta=1e-5) > budget


HOLD = """
import os, signal, sys
from jaxdp.privacy import Ledger, PureDpEvent, SelfComposedDpEvent, holds
path, instant = sys.argv[1:]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
hold = Ledger(path).account("data").hold(SelfComposedDpEvent(PureDpEvent(1.0), 9), key="job")
account = hold.account("data")
if instant == "while it takes":
    take = holds.take
    holds.take = lambda *args: (take(*args), die())
for number in range(3):
    account.spend(PureDpEvent(1.0), token=f"step {number}")
die()
"""

TAKE_OVER = """
import sys
from jaxdp.privacy import Ledger, PureDpEvent, SelfComposedDpEvent
path = sys.argv[1]
ledger = Ledger(path)
account = ledger.account("data")
unpaid = sum(not account.paid(f"step {number}") for number in range(9))
with account.hold(SelfComposedDpEvent(PureDpEvent(1.0), unpaid), key="job") as hold:
    replays = 0
    for number in range(9):
        with hold.account(account).spend(PureDpEvent(1.0), token=f"step {number}") as spend:
            replays += spend.replay
print(unpaid, replays)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("instant", "paid"), [("after three spends", 3), ("while it takes", 0)])
def test_a_program_that_was_killed_takes_its_hold_over(path, instant, paid):
    """Meanwhile its room is kept, and what it spent is not counted twice."""
    assert run(HOLD, path, instant, check=False).returncode == -signal.SIGKILL
    assert table(path)[1] == paid  # The spend and what it takes from the hold are one transaction.
    with Ledger(path) as ledger:
        (held,) = ledger.report()["datasets"][0]["holds"]
        assert (held["key"], held["description"]) == ("job", f"Pure(1) x {9 - paid}")
        ledger.spend("data", PureDpEvent(1.0))
        with pytest.raises(BudgetExceeded) as error:
            ledger.spend("data", PureDpEvent(1.0))
        assert error.value.held == pytest.approx(9.0 - paid)
    assert run(TAKE_OVER, path).stdout.split() == [str(9 - paid), str(paid)]
    with Ledger(path) as ledger:
        assert ledger.epsilon("data") == pytest.approx(10.0)
        assert ledger.report()["datasets"][0]["holds"] == []


# Three workers hold room for four and spend them one by one; the first takes whatever it can get.
HOLDERS = """
import contextlib, os, sys
from jaxdp.privacy import BudgetExceeded, Ledger, PureDpEvent, SelfComposedDpEvent
path = sys.argv[1]
step = PureDpEvent(0.1)
parent_ledger = Ledger(path)

def in_fours(account):
    with account.hold(SelfComposedDpEvent(step, 4)) as hold:
        for _ in range(4):
            try:
                hold.account(account).spend(step)
            except BudgetExceeded:
                os._exit(2)  # somebody took what was held
    return 4

def one_by_one(account):
    account.spend(step)
    return 1

pids = []
for index in range(4):
    pid = os.fork()
    if pid == 0:
        try:
            account = (parent_ledger if index % 2 else Ledger(path)).account("data")
            spent = 0
            with contextlib.suppress(BudgetExceeded):
                while True:
                    spent += in_fours(account) if index else one_by_one(account)
            os.write(1, b"%d\\n" % spent)
            os._exit(0)
        finally:
            os._exit(1)
    pids.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
"""


@pytest.mark.slow
def test_other_processes_do_not_take_what_is_held(path):
    counts = list(map(int, run(HOLDERS, path).stdout.split()))
    # Three may be left: too few for those who want four, after the first has gone.
    assert 97 <= sum(counts) <= 100
    assert table(path)[1] == sum(counts)


CREATE = """
import os, sys
from jaxdp.privacy import Ledger, PureDpEvent
for path in sys.argv[1:]:
    pids = []
    for index in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                with Ledger(path) as ledger:
                    ledger.register("data", adjacency="add_remove", unit="example", epsilon=1.0, delta=0.0)
                    with ledger.spend("data", PureDpEvent(0.1)):
                        pass
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
"""  # noqa: E501


@pytest.mark.slow
def test_many_processes_create_one_ledger(tmp_path):
    paths = [tmp_path / f"{index}.sqlite" for index in range(12)]
    run(CREATE, *paths)
    for path in paths:
        assert table(path) == ({"committed": 8}, 8)


def launch(*arguments):
    return run(
        "import runpy; runpy.run_module('launch.ledger', run_name='__main__')",
        *arguments,
        check=False,
    )


@pytest.mark.slow
def test_launcher_prints_text_and_json(path):
    with Ledger(path) as ledger, ledger.spend("data", PureDpEvent(0.5), label="first"):
        pass
    text = launch(path)
    assert text.returncode == 0, text.stderr
    assert "adjacency    add_remove, unit example" in text.stdout and "Pure(0.5)" in text.stdout
    done = launch(path, "--json")
    report = json.loads(done.stdout)
    assert report["datasets"][0]["headline"] == "0.5"


@pytest.mark.slow
def test_launcher_refuses_what_is_not_a_ledger(tmp_path):
    missing = tmp_path / "missing.sqlite"
    done = launch(missing)
    assert (
        done.returncode == 2 and "is not a file" in done.stderr and "Traceback" not in done.stderr
    )
    assert not missing.exists()
    other = tmp_path / "notes.txt"
    other.write_text("not a ledger\n" * 1000)
    done = launch(other)
    assert (
        done.returncode == 2
        and "cannot be opened as a ledger" in done.stderr
        and "Traceback" not in done.stderr
    )
