"""Training on records of several owners: sums, sampling, the account and what a run says."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from jaxdp import data, finetune
from jaxdp.privacy import GaussianDpEvent, Ledger, OwnedGaussianDpEvent, SelfComposedDpEvent

CLIP, Q, K, N = 0.5, 0.3, 3, 40
_random = np.random.default_rng(3)
OWNERS = [_random.choice(14, size=_random.integers(1, 4), replace=False) for _ in range(N)]
X = _random.normal(size=(N, 3)) * np.geomspace(0.1, 8, N)[:, None]


def mails(x=X):
    source = data.from_arrays(features=x.astype(np.float32))
    return data.by_owners(source, OWNERS, max_records=K)


def loss(params, example):
    return jnp.vdot(params["w"], example["features"])


def trainer_of(**options):
    given = {"sampler": mails().sampler(Q), "clip_norm": CLIP, "noise_multiplier": 4.0}
    given |= {"unit": "person", "physical_batch_size": 8}
    return finetune.dp_sgd(loss, optax.sgd(0.1), **given | options)


TRAINER = trainer_of()


@pytest.fixture(scope="module")
def state():
    return TRAINER.init({"w": jnp.zeros(3)})


def of_owner(source, owner):
    """The positions of an owner's records among those that count."""
    return np.flatnonzero([owner in OWNERS[row] for row in source.rows])


def test_the_records_of_one_owner_move_a_sum_by_at_most_k_norms(state):
    """Neighbours: the records of the owner are zeros. All records are in the batch."""
    source = mails()
    rows = np.arange(len(source))
    whole = np.asarray(TRAINER.sums(state, source, rows)["w"])
    for owner in range(14):
        mine = of_owner(source, owner)
        assert len(mine) <= K
        blank = X.copy()
        blank[source.rows[mine]] = 0
        moved = whole - np.asarray(TRAINER.sums(state, mails(blank), rows)["w"])
        norms = np.linalg.norm(X[source.rows[mine]], axis=1, keepdims=True)
        expected = (X[source.rows[mine]] * np.minimum(1, CLIP / norms)).sum(0)
        np.testing.assert_allclose(moved, expected, atol=2e-6)
        assert np.linalg.norm(moved) <= K * CLIP * (1 + 1e-6)
    # The bound is reached by equal records, and one norm is not enough.
    alike = np.ones_like(X)
    largest = max(range(14), key=lambda owner: len(of_owner(source, owner)))
    moved = TRAINER.sums(state, mails(alike), of_owner(source, largest))["w"]
    assert np.linalg.norm(moved) == pytest.approx(K * CLIP, rel=1e-5)


@pytest.mark.slow
def test_the_number_of_an_owners_records_in_a_batch_is_binomial(state):
    source = mails()
    owner = next(owner for owner in range(14) if len(of_owner(source, owner)) == K)
    mine = of_owner(source, owner)
    sampler = dataclasses.replace(TRAINER.sampler, seed=bytes(range(16)))
    batches = [sampler.batch(step) for step in range(2000)]
    counts = np.bincount([np.isin(mine, batch).sum() for batch in batches], minlength=K + 1)
    expected = 2000 * stats.binom.pmf(np.arange(K + 1), K, Q)
    assert stats.chisquare(counts, expected).pvalue > 1e-6
    # Broken twins: another probability, and records that join together.
    other = 2000 * stats.binom.pmf(np.arange(K + 1), K, 1.1 * Q)
    assert stats.chisquare(counts, other).pvalue < 1e-6
    together = 2000 * np.array([1 - Q, 1e-3, 1e-3, Q]) / (1 + 2e-3)
    assert stats.chisquare(counts, together, sum_check=False).pvalue < 1e-6


def test_the_event_is_that_of_one_owner():
    event = SelfComposedDpEvent(OwnedGaussianDpEvent(Q, 4.0, K), 5)
    assert TRAINER.event(0, 5) == event
    target = {"noise_multiplier": None, "epsilon": 4.0, "delta": 1e-3, "steps": 5}
    planned = trainer_of(adjacency="zero_out", **target)
    with Ledger.in_memory() as ledger:
        ledger.register("mails", adjacency="zero_out", unit="person", delta=1e-3)
        ledger.spend("mails", planned.event(0, 5))
        assert 3.99 < ledger.epsilon("mails") <= 4.0
    with pytest.raises(ValueError, match="adjacency must be 'zero_out'"):
        trainer_of(**target)


@pytest.mark.slow
def test_a_run_pays_for_owners_and_says_what_each_of_them_loses(tmp_path):
    source = mails()
    terms = {"unit": "person", "delta": 1e-3, "records": source.owners}
    options = {"steps": 2, "progress": False, "workdir": tmp_path / "run"}
    start = {"w": jnp.zeros(3)}
    with Ledger.in_memory() as ledger:
        ledger.register("wrong", adjacency="add_remove", **terms)
        with pytest.raises(ValueError, match="who owns which record is public"):
            finetune.fit(TRAINER, start, source, account=ledger.account("wrong"), **options)
        assert ledger.epsilon("wrong") == 0
        ledger.register("mails", adjacency="zero_out", **terms)
        account = ledger.account("mails")
        finetune.fit(TRAINER, start, source, account=account, **options)
        cost = account.epsilon()
        assert "who owns which record counts as public" in ledger.report_text()
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["owners"].startswith("14 people, each with at most 3 records that count")
    assert settings["people with up to 3 records that count"].endswith(
        f"epsilon {cost:.4g} at delta 0.001 for each"
    )


@pytest.mark.parametrize(
    ("source", "sampler", "error"),
    [
        (mails(), data.PoissonSampler(len(mails()), Q), "records_per_owner must be 3 for this"),
        (
            data.from_arrays(features=X.astype(np.float32)),
            data.PoissonSampler(N, Q, records_per_owner=K),
            "records_per_owner must be None for this",
        ),
    ],
)
def test_sampler_and_source_must_agree(source, sampler, error):
    with pytest.raises(ValueError, match=error):
        trainer_of(sampler=sampler).check(source)


def test_the_accuracy_on_shared_records_pays_for_all_of_an_owner():
    source = data.from_arrays(features=X.astype(np.float32), label=np.arange(N) % 2, num_classes=2)
    shared = data.by_owners(source, OWNERS, max_records=K)
    with Ledger.in_memory() as ledger:
        ledger.register("mails", adjacency="zero_out", unit="person")
        account = ledger.account("mails")

        def predict(params, x):
            return x[:, :2] * params["w"][None, :2]

        finetune.charged_accuracy(
            predict,
            {"w": jnp.ones(3)},
            shared,
            account=account,
            noise_multiplier=30.0,
            unit="person",
        )
        assert ledger.events("mails") == {None: GaussianDpEvent(30.0 / K)}


def test_wrong_units_and_options_are_refused():
    with pytest.raises(ValueError, match="unit must name an owner of records"):
        trainer_of(unit="example")
    with pytest.raises(ValueError, match="unit must name an owner of records"):
        trainer_of(group=True)
    with pytest.raises(ValueError, match="truncated_batch_size must be None"):
        data.PoissonSampler(5, Q, records_per_owner=2, truncated_batch_size=3)
    with pytest.raises(ValueError, match="records_per_owner must be at least 1"):
        data.PoissonSampler(5, Q, records_per_owner=0)
    rows = data.by_owners(data.from_arrays(features=X), OWNERS, max_records=1)
    with Ledger.in_memory() as ledger:
        ledger.register("rows", adjacency="zero_out", unit="person")
        with pytest.raises(TypeError, match=r"got jaxdp\.data\.Owners"):
            finetune.charged_scaler(
                rows,
                {"0": (0, 1)},
                account=ledger.account("rows"),
                noise_multiplier=1.0,
                unit="person",
            )
