"""Training that protects users: the sums against float64, their sensitivity, the events and the
account's unit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import data, finetune
from jaxdp.audit import finetune as canaries
from jaxdp.finetune.dp_sgd import GradientSum
from jaxdp.finetune.query import QuerySums
from jaxdp.privacy import GaussianDpEvent, Ledger, PoissonSampledDpEvent, SelfComposedDpEvent
from tests.finetune.own_options import own_options

FEATURES, USERS, K, CLIP, Q = 4, 9, 3, 0.8, 0.5
_counts = np.array([1, 2, 3, 5, 1, 3, 2, 4, 1])
_random = np.random.default_rng(0)
OWNERS = _random.permutation(np.repeat(np.arange(USERS), _counts))
X = _random.normal(size=(len(OWNERS), FEATURES)) * np.geomspace(0.05, 5, USERS)[OWNERS, None]
Y = _random.normal(size=len(OWNERS))
W = np.linspace(-1, 1, FEATURES)


def users(x=X, y=Y, owners=OWNERS, k=K):
    source = data.from_arrays(features=x.astype(np.float32), target=y.astype(np.float32))
    return data.by_group(source, owners, max_records=k)


def loss(params, example):
    return 0.5 * jnp.square(example["features"] @ params["w"] - example["target"])


ANCHORS = {
    "features": _random.normal(size=(6, FEATURES)).astype(np.float32),
    "target": np.ones(6, np.float32),
}
METHODS = own_options(ANCHORS)
METHODS["gep"]["basis_size"] = 2
every_method = pytest.mark.parametrize("name", METHODS)


def trainer_of(name="dp_sgd", n=USERS, **options):
    method, own = finetune.METHODS[name], METHODS[name]
    given = {
        "clip_norm": CLIP,
        "noise_multiplier": 1.0,
        "physical_batch_size": 4,
        "group": True,
        "unit": "patient",
    }
    return method(
        options.pop("loss_fn", loss),
        optax.sgd(0.1),
        sampler=data.PoissonSampler(n, Q),
        **{**given, **own, **options},
    )


compiled = functools.cache(trainer_of)


def started(trainer):
    return trainer.refreshed(trainer.init({"w": jnp.asarray(W, jnp.float32)}))


def gradients64(x=X, y=Y, owners=OWNERS, k=K):
    """The gradient of each user's mean loss over its first k records, by hand, [users,
    FEATURES]."""
    each = (x @ W - y)[:, None] * x
    return np.stack([each[owners == user][:k].mean(0) for user in dict.fromkeys(owners.tolist())])


def clipped64(rows, norm):
    return rows * np.minimum(1, norm / np.linalg.norm(rows, axis=1, keepdims=True))


def expected64(trainer, state):
    """What the query of a method must return for all users."""
    g, query = gradients64(), trainer.query
    if hasattr(query, "quantile"):
        below = np.linalg.norm(g, axis=1) <= CLIP
        grads = query.gradient_weight / CLIP * clipped64(g, CLIP).sum(0)
        return [grads, 2 * query.count_weight * (below - 0.5).sum()]
    if hasattr(query, "slots"):
        slack = 3 * np.maximum(1 - np.linalg.norm(g, axis=1) / CLIP, 0)
        slots = np.clip(slack[:, None] - np.arange(3), 0, 1) / np.sqrt(3)
        return [clipped64(g, CLIP).sum(0) / CLIP, slots.sum(0)]
    if hasattr(query, "residual_clip_norm"):
        (basis,), (a, b) = state.carried, query.weights
        basis = np.asarray(basis, np.float64)
        w, r = g @ basis, g - g @ basis @ basis.T
        return [a / CLIP * clipped64(w, CLIP).sum(0), b / 0.5 * clipped64(r, 0.5).sum(0)]
    return [clipped64(g, CLIP).sum(0)]


@every_method
def test_sums_equal_float64(name):
    """A user counts once: the gradient of its mean loss over its first records is clipped as a
    whole."""
    trainer = compiled(name)
    state = started(trainer)
    found = jax.tree.leaves(trainer.sums(state, users(), np.arange(USERS)))
    for one, other in zip(found, expected64(trainer, state), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_clipping_is_active_and_inactive_in_the_comparison_above():
    norms = np.linalg.norm(gradients64(), axis=1)
    assert norms.min() < CLIP < norms.max() and _counts.min() < K < _counts.max()


def augment(key, example):
    features = example["features"] + 0.5 * jax.random.normal(key, (FEATURES,))
    return {**example, "features": features}


def gradients_of_views(state, broken=False):
    """The gradient of each user's mean loss over its records and two views of each, [users,
    FEATURES], by hand. The broken twin pairs views with the mask of another user."""
    seen = users().gather(np.arange(USERS))
    key = jax.random.fold_in(jax.random.fold_in(state.key, 0), 0)
    keys = jax.random.split(jax.random.split(key)[0], USERS)
    views = jax.vmap(
        lambda key: jax.vmap(lambda one: jax.random.split(one, 2))(jax.random.split(key, K))
    )(keys)
    x = jax.vmap(jax.vmap(jax.vmap(augment, (0, None))))(views, seen.records)["features"]
    x, y = np.asarray(x, np.float64), np.asarray(seen.records["target"], np.float64)[..., None]
    each = ((x @ W - y)[..., None] * x).mean(2)
    present = np.roll(seen.present, 1, 0) if broken else seen.present
    return (each * present[..., None]).sum(1) / present.sum(1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_views_of_all_records_are_averaged_before_the_clip(broken):
    trainer = trainer_of(augment=augment, augmult=2, physical_batch_size=USERS)
    state = started(trainer)
    g = gradients_of_views(state, broken)
    (total,) = jax.tree.leaves(trainer.sums(state, users(), np.arange(USERS)))
    assert np.allclose(total, clipped64(g, CLIP).sum(0), rtol=1e-4, atol=1e-5) != broken


PART_NORMS = {"first": 0.5, "second": 0.1}


def loss_of_parts(params, example):
    return loss({"w": jnp.concatenate([params["first"], params["second"]])}, example)


@pytest.mark.slow
@pytest.mark.parametrize("augmult", [1, 2])
def test_each_part_of_a_user_is_clipped_to_its_norm(augmult):
    """Without views, the users are in three physical batches. The twin clips the whole gradient to
    the same sensitivity."""
    views = {"augment": augment, "physical_batch_size": USERS} if augmult > 1 else {}
    trainer = trainer_of(loss_fn=loss_of_parts, clip_norm=PART_NORMS, augmult=augmult, **views)
    first, second = jnp.split(jnp.asarray(W, jnp.float32), 2)
    state = trainer.refreshed(trainer.init({"first": first, "second": second}))
    total = trainer.sums(state, users(), np.arange(USERS))
    g = gradients_of_views(state) if augmult > 1 else gradients64()
    of_whole = np.split(clipped64(g, trainer.query.sensitivity("add_remove")).sum(0), 2)
    of_parts = np.split(g, 2, axis=1)
    for part, rows, twin in zip(PART_NORMS, of_parts, of_whole, strict=True):
        expected = clipped64(rows, PART_NORMS[part]).sum(0)
        np.testing.assert_allclose(total[part], expected, rtol=1e-4, atol=1e-5)
        assert not np.allclose(twin, expected, rtol=1e-2)


class PerRecord(GradientSum):
    """A broken twin: it clips every record of a user, and sums them."""

    def sums(self, params, carried, batch, mask, key):
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        by_record = dataclasses.replace(self.gradient, group=False)
        out = by_record(params, flat, mask.reshape(-1), key=key)
        return QuerySums.of(out.grads, out)


@pytest.mark.parametrize("name", [*METHODS, "clipped per record"])
def test_a_user_with_many_records_moves_the_sum_by_at_most_the_sensitivity(name):
    """Random users with up to k records join the others. The twin with a clip per record moves the
    sum by more."""
    trainer = compiled(name if name in METHODS else "dp_sgd")
    if name not in METHODS:
        trainer = dataclasses.replace(trainer, query=PerRecord(gradient=trainer.query.gradient))
    state, rng, moved = started(trainer), np.random.default_rng(1), []
    for _ in range(20):
        count = rng.integers(1, 2 * K)
        direction, size = rng.normal(size=FEATURES), 10.0 ** rng.integers(-2, 3)
        x = np.concatenate([X, size * (direction + 0.1 * rng.normal(size=(count, FEATURES)))])
        y, owners = (
            np.append(Y, np.full(count, 10 * size)),
            np.append(OWNERS, np.full(count, USERS)),
        )
        given = users(x, y, owners)
        sums = [
            jax.tree.leaves(trainer.sums(state, given, np.arange(n))) for n in (USERS, USERS + 1)
        ]
        moved.append(
            np.sqrt(sum(np.square(np.float64(a) - b).sum() for a, b in zip(*sums, strict=True)))
        )
    bound = trainer.query.sensitivity("add_remove")
    assert max(moved) > 0.9 * bound
    assert (max(moved) <= bound * (1 + 1e-4)) == (name in METHODS)


def test_a_record_that_is_not_finite_removes_its_user():
    x, owner = X.copy(), OWNERS[0]
    x[0] = np.nan
    (found,) = jax.tree.leaves(
        compiled("dp_sgd").sums(started(compiled("dp_sgd")), users(x), np.arange(USERS))
    )
    rest = owner != OWNERS
    np.testing.assert_allclose(
        found, clipped64(gradients64(X[rest], Y[rest], OWNERS[rest]), CLIP).sum(0), rtol=1e-5
    )


@pytest.mark.parametrize("name", ["dp_sgd", "adp_clip", "gep"])
def test_a_step_is_a_gaussian_on_a_poisson_sample_of_users(name):
    event = SelfComposedDpEvent(PoissonSampledDpEvent(Q, GaussianDpEvent(1.0)), 5)
    assert compiled(name).event(0, 5) == event
    assert compiled(name).privatizer.divisor == Q * USERS


def ledger_of(unit):
    ledger = Ledger.in_memory()
    ledger.register("scans", adjacency="add_remove", unit=unit, records=USERS, delta=1e-5)
    return ledger


def fit(trainer, source, unit):
    with ledger_of(unit) as ledger:
        account = ledger.account("scans")
        try:
            params = {"w": jnp.asarray(W, jnp.float32)}
            state = finetune.fit(
                trainer, params, source, steps=2, account=account, seed=bytes(16), progress=False
            )
        except Exception:
            assert ledger.events("scans") == {} or not sum(
                map(len, ledger.events("scans").values())
            )
            raise
        return state, ledger.epsilon("scans")


def test_a_run_charges_an_account_of_the_same_unit_and_no_other():
    state, spent = fit(compiled("dp_sgd"), users(), "patient")
    assert int(state.step) == 2 and spent > 0
    single = data.from_arrays(
        features=X.astype(np.float32)[:USERS], target=Y.astype(np.float32)[:USERS]
    )
    by_record = trainer_of(group=False, unit="example")
    for trainer, source, unit in [
        (compiled("dp_sgd"), users(), "example"),
        (by_record, single, "patient"),
    ]:
        with pytest.raises(
            ValueError,
            match=f"trainer protects one '{trainer.unit}'.* registered with unit='{unit}'",
        ):
            fit(trainer, source, unit)
    # declared: every patient has one record
    assert fit(trainer_of(group=False), single, "patient")[1] > 0


def test_a_run_does_not_go_on_for_another_unit(tmp_path):
    """Its earlier charges are for an example. An account of patients must not settle them."""
    single = data.from_arrays(
        features=X.astype(np.float32)[:USERS], target=Y.astype(np.float32)[:USERS]
    )
    by_record = trainer_of(group=False, unit="example")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("records", adjacency="add_remove", unit="example", delta=1e-5)
        ledger.register("scans", adjacency="add_remove", unit="patient", delta=1e-5)

        def go_on(trainer, source, name, steps):
            params = {"w": jnp.asarray(W, jnp.float32)}
            words = {"workdir": tmp_path / "run", "progress": False}
            account = ledger.account(name)
            return finetune.fit(trainer, params, source, steps=steps, account=account, **words)

        go_on(by_record, single, "records", 1)
        with pytest.raises(ValueError, match="holds a run that protects one 'example', but the tr"):
            go_on(compiled("dp_sgd"), users(), "scans", 2)
        assert not ledger.events("scans")
        assert int(go_on(by_record, single, "records", 2).step) == 2


def test_groups_that_are_not_there_are_refused_before_anything_is_spent():
    with pytest.raises(ValueError, match="unit must name what group=True protects"):
        trainer_of(unit="example")
    single = data.from_arrays(
        features=X.astype(np.float32)[:USERS], target=Y.astype(np.float32)[:USERS]
    )
    with pytest.raises(
        ValueError,
        match=r"source must be of jaxdp.data.by_group, because the trainer has group=True",
    ):
        fit(compiled("dp_sgd"), single, "patient")
    with pytest.raises(
        ValueError,
        match=r"source is of jaxdp.data.by_group, but the trainer protects one 'example'",
    ):
        fit(trainer_of(group=False, unit="example"), users(), "example")


def test_a_loss_over_all_records_of_a_user_needs_no_group():
    """With group=False an example is the user's `Records`, for a loss that is no mean over
    records."""

    def whole(params, example):
        each = jax.vmap(loss, (None, 0))(params, example.records)
        return jnp.where(example.present, each, 0).sum() / example.present.sum()

    # The size of the physical batches is chosen by a trace of the loss.
    options = {"noise_multiplier": 1.0, "clip_norm": CLIP, "unit": "patient"}
    trainer = finetune.dp_sgd(
        whole, optax.sgd(0.1), sampler=data.PoissonSampler(USERS, Q), **options
    )
    (found,) = jax.tree.leaves(trainer.sums(started(trainer), users(), np.arange(USERS)))
    np.testing.assert_allclose(found, expected64(compiled("dp_sgd"), None)[0], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_one_run_audits_users():
    """`audit_run` scores a canary by its user's mean loss."""
    count = 3000  # all of 60 simulated audits find more than 0.3 of epsilon
    params, records = canaries.worst_case(count, norm=10 * CLIP)
    given = data.by_group(
        data.take(records, np.repeat(np.arange(count), 2)),
        np.repeat(np.arange(count), 2),
        max_records=2,
    )
    options = {
        "noise_multiplier": 1.0,
        "clip_norm": CLIP,
        "physical_batch_size": 500,
        "group": True,
        "unit": "user",
    }
    trainer = finetune.dp_sgd(
        canaries.loss, optax.sgd(1.0), sampler=data.PoissonSampler(count, 1.0), **options
    )
    terms = {
        "steps": 1,
        "delta": 1e-5,
        "confidence": 0.95,
        "seed": bytes(range(16)),
    }
    audit = canaries.audit_run(trainer, params, given, **terms)
    assert 0.3 * audit.upper < audit.lower <= audit.upper
