"""What is the same for every stage: what leaves private data is paid first, once, and by name.

The rows of tests/stages.py are the functions that take an account and a workdir. A check that a
stage shares with all others stands here. Each check has a broken twin.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.privacy.events import composition
from jaxdp.release import Release, identity
from tests import stages
from tests.compilations import compilations
from tests.test_package import STAGES

SEED = bytes(range(16))


class PowerCut(Exception):
    """In place of a crash."""


def account_of(row, **terms):
    ledger = Ledger.in_memory()
    ledger.register("private", **row.terms | terms)
    return ledger.account("private")


def charged(account):
    """Returns {event: count}, the largest counts of the parts of the data that pay apart."""
    parts = account.ledger.events(account.name).values()
    return functools.reduce(operator.or_, map(composition, parts), collections.Counter())


def times(row, count):
    return {event: count * number for event, number in composition(row.event).items()}


def payments(row, account):
    """Returns how often an account has paid, for this row or a change of it."""
    return sum(charged(account).values()) / sum(composition(row.event).values())


def bits(value):
    """Returns the bytes, dtypes and shapes of a pytree."""
    arrays = []
    for leaf in jax.tree.leaves(value):
        is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        )
        arrays.append(np.asarray(jax.random.key_data(leaf) if is_key else leaf))
    return [(str(x.dtype), x.shape, x.tobytes()) for x in arrays]


@dataclasses.dataclass
class Watch:
    """The secrets and values of releases, and what the account had paid when they were computed.

    The release number `dies_at` dies once it has its value.
    """

    account: Any = None
    dies_at: int = 0
    value: Callable[[Any], Any] = lambda value: value
    secrets: list = dataclasses.field(default_factory=list)
    values: list = dataclasses.field(default_factory=list)
    paid: list = dataclasses.field(default_factory=list)

    def note(self):
        if self.account is not None:
            self.paid.append(charged(self.account))


@pytest.fixture
def watch(monkeypatch):
    seen, initial = Watch(), Release.__init__

    def watched(self, *, compute, **fields):
        def watching(secret):
            seen.note()
            value = compute(secret)
            seen.secrets.append(secret)
            seen.values.append(bits(seen.value(value)))
            if len(seen.values) == seen.dies_at:
                raise PowerCut
            return value

        initial(self, compute=watching, **fields)

    monkeypatch.setattr(Release, "__init__", watched)
    return seen


def spy(row, watch, monkeypatch):
    """Watches the function of the stage that works on private data, too."""
    if row.work is None:
        return
    owner, name = stages.spied(row)
    function = getattr(owner, name)

    def spying(*args, **kwargs):
        watch.note()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, spying)


def is_fresh(row, watch, before):
    """Tells whether the releases before and after number `before` have noise of their own."""
    return watch.secrets[before - 1] != watch.secrets[before] and (
        row.coarse or watch.values[before - 1] != watch.values[before]
    )


def interrupted(row, watch, account, workdir, release=1, **changes):
    """Makes a call that dies between the value of a release and the place where that is kept.

    Returns the number of releases so far.
    """
    watch.value = row.value
    watch.dies_at = len(watch.values) + release
    with pytest.raises(PowerCut):
        row(account, workdir=workdir, **changes)
    return len(watch.values)


# --- The checks ----------------------------------------------------------------------------------


def paid_first(row, watch, monkeypatch, folder):
    """Everything is paid, by the event that the stage states, before anything is computed."""
    account = watch.account = account_of(row)
    spy(row, watch, monkeypatch)
    row(account, workdir=folder)
    assert len(watch.values) == row.releases
    assert len(watch.paid) >= row.releases * (1 + (row.work is not None))
    assert all(paid == times(row, 1) for paid in [*watch.paid, charged(account)])
    entries = account.ledger.report()["datasets"][0]
    assert {spend["first_label"] for spend in entries["spends"]} == {row.label}
    assert not entries["open"]


def refused_budget(row, watch, monkeypatch, folder):
    """A budget without room computes and spends nothing."""
    account = watch.account = account_of(row, epsilon=0.01, delta=1e-9)
    spy(row, watch, monkeypatch)
    with pytest.raises(BudgetExceeded, match="'private'"):
        row(account, workdir=folder)
    assert not watch.paid and not charged(account)
    assert not account.ledger.report()["datasets"][0]["open"]


def failed(row, watch, monkeypatch, folder):
    """What fails once it is paid stays charged, and without a workdir is charged again."""
    account = account_of(row)
    before = interrupted(row, watch, account, None, row.releases)
    assert charged(account) == times(row, 1)
    statuses = [spend["status"] for spend in account.ledger.report()["datasets"][0]["open"]]
    assert statuses == ["failed"]
    row(account)
    assert charged(account) == times(row, 2) and is_fresh(row, watch, before)


def replayed(row, watch, monkeypatch, folder):
    """After a crash the same call gives the same bits and is free; then it is kept."""
    account = account_of(row)
    before = interrupted(row, watch, account, folder, row.releases)
    assert [path.stat().st_mode & 0o777 for path in folder.rglob("secret_seed")] == [0o600]
    found = row(account, workdir=folder)
    kept = row(account, workdir=folder)
    assert watch.secrets[before - 1 :] == [watch.secrets[-1]] * 2
    assert watch.values[before - 1 :] == [watch.values[-1]] * 2
    assert bits(kept) == bits(found)
    assert charged(account) == times(row, 1)
    assert not list(folder.rglob("secret_seed"))
    if row.keeps:
        for name, change in row.changes.items():
            with pytest.raises(ValueError, match="keeps another release"):
                row(account, workdir=folder, **change)
            assert charged(account) == times(row, 1), name


def changed(row, watch, monkeypatch, folder):
    """What differs after a crash, or runs on another machine, has fresh noise and pays again."""
    for name, change in row.changes.items():
        account = account_of(row)
        before = interrupted(row, watch, account, folder / name)
        row(account, workdir=folder / name, **change)
        assert is_fresh(row, watch, before) and payments(row, account) == 2, name
        assert not list(folder.rglob("secret_seed"))
    account = account_of(row)
    before = interrupted(row, watch, account, folder / "machine")
    elsewhere = identity.environment() | {"flags": {}}
    with monkeypatch.context() as patch:
        patch.setattr(identity, "environment", lambda: elsewhere)
        row(account, workdir=folder / "machine")
    assert is_fresh(row, watch, before) and charged(account) == times(row, 2)


def seeded(row, watch, monkeypatch, folder):
    """A seed repeats a release, which is paid once. Another seed, other data or none pay again."""
    account = account_of(row)
    first, again = (row(account, seed=SEED) for _ in range(2))
    assert bits(first) == bits(again) and charged(account) == times(row, 1)
    others = [{"seed": SEED[::-1]}, {"seed": SEED} | row.changes["data"], {}, {}]
    values = [first, *(row(account, **options) for options in others)]
    assert row.coarse or len({str(bits(value)) for value in values}) == 5
    assert len(set(watch.secrets)) == 5 * row.releases and payments(row, account) == 5


def mistaken(row, watch, monkeypatch, folder):
    """Wrong arguments are refused by name before anything is computed or spent."""
    account = watch.account = account_of(row)
    spy(row, watch, monkeypatch)
    for change, words in row.mistakes:
        with pytest.raises((TypeError, ValueError), match=words):
            row(account, workdir=folder, **change)
        assert not watch.paid and not charged(account), change


def misfitting(row, watch, monkeypatch, folder):
    """An account of another relation or unit is refused before anything is computed or spent."""
    for terms, words in row.accounts:
        account = watch.account = account_of(row, **terms)
        with pytest.raises(ValueError, match=words):
            row(account, workdir=folder)
        assert not watch.values and not charged(account), terms


def empty(row, watch, monkeypatch, folder):
    """A selection of nothing costs nothing."""
    change, words = row.empty
    account = account_of(row)
    if words is None:
        assert all(np.size(leaf) == 0 for leaf in jax.tree.leaves(row(account, **change)))
    else:
        with pytest.raises(ValueError, match=words):
            row(account, **change)
    assert not watch.values and not charged(account)


def compiled_once(row, watch, monkeypatch, folder):
    """A second call with other data and another account compiles nothing."""
    row(account_of(row))
    with compilations() as programs:
        row(account_of(row), **row.changes["data"])
    assert not programs


def called_back(row, watch, monkeypatch, folder):
    """A program that calls back to Python cannot be repeated, so it is paid again after a crash."""
    account = account_of(row)
    before = interrupted(row, watch, account, folder, **row.calling)
    found = row(account, workdir=folder, **row.calling)
    assert is_fresh(row, watch, before) and charged(account) == times(row, 2)
    assert bits(row(account, workdir=folder, **row.calling)) == bits(found)
    assert charged(account) == times(row, 2)


CHECKS = [
    paid_first,
    refused_budget,
    failed,
    replayed,
    changed,
    seeded,
    mistaken,
    misfitting,
    empty,
    compiled_once,
    called_back,
]


def applies(check, row):
    if check is empty:
        return row.empty is not None
    if check is called_back:
        return row.calling is not None
    return check is not compiled_once or not row.compiles


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", stages.ROWS)
def test_a_stage_conforms(name, check, watch, monkeypatch, tmp_path):
    row = stages.ROWS[name]()
    if applies(check, row):
        check(row, watch, monkeypatch, tmp_path)


TWINS = {
    "works first": [paid_first, refused_budget, mistaken],
    "checks late": [mistaken, misfitting],
    "pays a half": [paid_first],
    "labels data": [paid_first],
    "forgets its data": [changed, seeded],
    "draws no noise": [failed, changed, seeded],
    "keeps nothing": [replayed],
    "compiles": [compiled_once],
}


@pytest.mark.parametrize(
    ("flaw", "check"), [(flaw, check) for flaw, checks in TWINS.items() for check in checks]
)
def test_every_check_can_fail(flaw, check, watch, monkeypatch, tmp_path):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(stages.toy(flaw), watch, monkeypatch, tmp_path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_stage_without_a_flaw_conforms(check, watch, monkeypatch, tmp_path):
    row = stages.toy()
    if applies(check, row):
        check(row, watch, monkeypatch, tmp_path)


# --- Names ---------------------------------------------------------------------------------------


def test_every_stage_has_rows():
    """Pre-training is public: it has no account."""
    assert {name.partition(":")[0] for name in stages.ROWS} == STAGES - {"pretrain"}


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_every_stage_names_its_methods_and_says_what_a_use_will_cost(stage):
    """Pre-training is public: it costs nothing."""
    package = getattr(jaxdp, stage)
    assert stage in jaxdp.__all__
    assert {"METHODS"} <= set(package.__all__) and package.METHODS
    assert all(
        isinstance(name, str) and callable(getattr(row, "answer", row))
        for name, row in package.METHODS.items()
    )
    assert ("event" in package.__all__) == (stage != "pretrain")
