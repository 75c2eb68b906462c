"""A private search: paid once, secret until its end, and equal again after a crash."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import math
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from jaxdp import data, finetune, recalibration
from jaxdp.finetune import ChargedScore, PublicScore, RandomRuns, with_hyperparams
from jaxdp.privacy import (
    BudgetExceeded,
    ComposedDpEvent,
    GaussianDpEvent,
    Ledger,
    OneOfDpEvent,
    UnprovenDpEvent,
)
from jaxdp.privacy.events import compose, composition
from jaxdp.release import Till
from tests.compilations import compilations

module = importlib.import_module("jaxdp.finetune.tune")

SEED = bytes(range(16))
RECORDS = data.bundled("blobs").take(np.arange(120))
STEPS = 3
PARAMS = {"w": jnp.zeros((2, 4))}
RUNS = RandomRuns(6.0)
PURE = recalibration.event(0.5)


def predict(params, inputs):
    return inputs @ params["w"]


def loss(params, example):
    return jaxdp.losses.softmax_cross_entropy(example["features"] @ params["w"], example["label"])


def trainer_of(loss_fn=loss, **options):
    given = {"sampler": data.PoissonSampler(120, 0.2), "physical_batch_size": 40, **options}
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    return finetune.dp_sgd(loss_fn, optimizer, clip_norm=1.0, noise_multiplier=4.0, **given)


trainer = functools.cache(trainer_of)


@functools.cache
def candidates():
    rates = (0.01, 0.1, 1.0)
    return {f"{rate:g}": with_hyperparams(trainer(), {"learning_rate": rate}) for rate in rates}


@pytest.fixture
def account():
    ledger = Ledger.in_memory()
    terms = {"unit": "example", "epsilon": 8.0, "delta": 1e-5}
    ledger.register("blobs", adjacency="add_remove", **terms)
    ledger.register("holdout", adjacency="add_remove", **terms)
    return ledger.account("blobs")


def secrets(count):
    return [hashlib.sha256(bytes([n % 256, n // 256])).digest()[:16] for n in range(count)]


def fake_fit(trainer, params, source, *, steps, account, seed, **options):
    """Stands for a training: pays for it, and returns parameters from the seed."""
    with account.spend(trainer.event(0, steps)):
        pass
    noise = np.frombuffer(seed[:8], np.uint8).reshape(2, 4) / 256
    return types.SimpleNamespace(params={"w": jnp.asarray(noise, jnp.float32)}, ema=None)


def total(params):
    return float(np.sum(params["w"]))


TOTAL = PublicScore(total, facts=["sum"])


def search(account, score=TOTAL, **options):
    terms = {"steps": STEPS, "runs": RUNS, **options}
    trainers = terms.pop("trainers", candidates())
    return jaxdp.tune(trainers, account, PARAMS, RECORDS, score=score, **terms)


def search_of(account, score, **changes):
    """Returns the same search before it runs."""
    terms = {"account": account, "params": PARAMS, "source": RECORDS, "steps": STEPS, "runs": RUNS}
    terms |= {"workdir": None, "checkpoint_every": 1}
    return module.Search(score=score, **terms | changes)


def choose(candidate, account, score, **options):
    """Searches among one procedure."""
    terms = {"runs": RUNS, "score": score, **options}
    return jaxdp.tune({"a": candidate}, account, terms.pop("params", PARAMS), None, **terms)


# --- The number of runs and the candidates ------------------------------------------------------


def reference(mean, eta, most):
    """Returns the exact probabilities of 0..most runs by scipy."""
    k = np.arange(most + 1)
    if eta == math.inf:
        return stats.poisson.pmf(k, mean)
    gammas = np.linspace(1e-4, 1, 200_001)[:-1]
    if eta == 0:
        means = (1 / gammas - 1) / np.log(1 / gammas)
        gamma = gammas[np.abs(means - mean).argmin()]
        return stats.logser.pmf(k, 1 - gamma)
    means = eta * (1 - gammas) / (gammas * (1 - gammas**eta))
    gamma = gammas[np.abs(means - mean).argmin()]
    return np.where(k > 0, stats.nbinom.pmf(k, eta, gamma), 0) / (1 - gamma**eta)


@pytest.mark.parametrize(("mean", "eta"), [(4.0, 0.0), (4.0, 1.0), (6.0, 2.5), (5.0, math.inf)])
def test_the_number_of_runs_has_its_distribution(mean, eta):
    runs = RandomRuns(mean, eta)
    drawn = np.array([runs.draw(secret) for secret in secrets(2000)])
    most = 8

    def p_value(expected):
        shares = np.append(expected[:most], 1 - expected[:most].sum())
        counts = np.bincount(np.minimum(drawn, most), minlength=most + 1)
        seen = shares > 1e-12
        if counts[~seen].any():
            return 0.0
        return stats.chisquare(counts[seen], 2000 * shares[seen] / shares[seen].sum()).pvalue

    assert p_value(reference(mean, eta, most)) > 1e-6
    for twin in ((mean * 1.3, eta), (mean, 1.0 if eta != 1 else 0.0)):
        assert p_value(reference(*twin, most)) < 1e-6
    assert (drawn <= runs.quantile(0.9)).mean() > 0.85
    assert runs.draw(b"\xff" * 16) > runs.quantile(0.999)
    assert runs.draw(bytes(16)) == (0 if eta == math.inf else 1)


@pytest.mark.parametrize("eta", [0, 1, 2.5, math.inf])
def test_numbers_of_numpy_have_the_distribution_that_is_charged(eta):
    run = GaussianDpEvent(1.0)
    for kind in (np.float32, np.int64 if eta in (0, 1) else np.float64):
        runs, of_numpy = RandomRuns(6, eta), RandomRuns(kind(6), kind(eta))
        assert of_numpy.event(run) == runs.event(run)
        for seed in (bytes(16), SEED, b"\xff" * 16):
            assert of_numpy.draw(seed) == runs.draw(seed)
        assert of_numpy.quantile(0.95) == runs.quantile(0.95)


def test_candidates_are_drawn_uniformly():
    drawn = [module.drawn(secret, 7) for secret in secrets(2000)]
    counts = np.bincount(drawn, minlength=7)
    assert stats.chisquare(counts).pvalue > 1e-6
    twin = np.bincount(np.minimum(drawn, 5), minlength=7)  # the last candidate never
    assert stats.chisquare(twin).pvalue < 1e-6
    assert module.drawn(b"\xff" * 16, 7) == 6


def test_distributions_without_a_proof_are_refused(account):
    for wrong in (
        {"mean": 1.0},
        {"mean": 1e9},
        {"mean": math.nan},
        {"mean": 5.0, "eta": -0.5},
        {"mean": 5.0, "eta": math.nan},
        {"mean": 5.0, "eta": 1e-80},  # 1 - gamma^-eta vanishes in the digits of the draw
        {"mean": 2.0, "eta": 1e17},  # gamma is 1
        {"mean": 1 + 1e-15, "eta": 1e9},
    ):
        with pytest.raises(ValueError, match="must be"):
            RandomRuns(**wrong)
    for mean, eta in ((2.0, 1e-9), (2.0, 1e9), (2.0, 1e15), (10_000.0, 1e9), (1 + 1e-15, 1.0)):
        assert RandomRuns(mean, eta).draw(bytes(16)) == 1
    with pytest.raises(ValueError, match="16 bytes"):
        RUNS.draw(b"short")
    with pytest.raises(TypeError, match="fixed number of runs"):
        search(account, runs=10)


@pytest.fixture
def five_runs(monkeypatch):
    """Fixes the number of runs, which depends on the source of jaxdp as every token does."""
    monkeypatch.setattr(RandomRuns, "draw", lambda runs, secret: 5)


# --- The search ---------------------------------------------------------------------------------


def test_a_search_is_one_event_and_its_best_run(account, monkeypatch, five_runs):
    monkeypatch.setattr(module, "fit", fake_fit)
    scores = []

    def score(params):
        scores.append(total(params))
        # Only the score of the first parameters, a check, comes before the payment.
        assert (len(scores) > 1) == bool(account.ledger.events("blobs"))
        return scores[-1]

    best = search(account, PublicScore(score), seed=SEED)
    assert len(scores) == 1 + 5 and best.score == max(scores) == total(best.params)
    assert best.name in candidates()
    [event] = account.ledger.events("blobs").values()
    assert event == RUNS.event(compose(composition(trainer().event(0, STEPS))))
    # Broken twin: the account of one run.
    one_run = Ledger.in_memory()
    one_run.register("blobs", adjacency="add_remove", unit="example")
    assert account.epsilon() > 1.3 * one_run.would_cost(
        "blobs", trainer().event(0, STEPS), delta=1e-5
    )


def test_a_charged_score_is_paid_with_every_run(account, monkeypatch):
    monkeypatch.setattr(module, "fit", fake_fit)
    terms = {"predict": predict, "source": RECORDS, "noise_multiplier": 5.0}
    best = search(account, ChargedScore(**terms), seed=SEED, steps={"0.01": 3, "0.1": 3, "1": 5})
    assert 0 <= best.score <= 1
    events = [ComposedDpEvent([trainer().event(0, n), GaussianDpEvent(5.0)]) for n in (3, 5)]
    whole = RUNS.event(OneOfDpEvent(tuple(events)))
    assert composition(account.ledger.events("blobs")[None]) == composition(whole)
    # Other records have an account of their own.
    other = account.ledger.account("holdout")
    search(account, ChargedScore(**terms, account=other), seed=SEED)
    assert account.ledger.events("holdout") == {None: RUNS.event(GaussianDpEvent(5.0))}


class Killed(BaseException):
    """Stands for the death of the process."""


def test_a_killed_search_goes_on_and_pays_once(account, monkeypatch, tmp_path, five_runs):
    monkeypatch.setattr(module, "fit", fake_fit)
    scored = []

    def score(params):
        if params is PARAMS:  # the check before the payment
            return 0.0
        scored.append(total(params))
        if len(scored) == die_at:
            raise Killed
        return scored[-1]

    die_at = 0
    judge = PublicScore(score, facts=["sum"])
    whole = search(account, judge, seed=SEED, workdir=tmp_path / "whole")
    expected = scored.copy()
    assert len(expected) == 5
    scored.clear()
    die_at = 3
    go_on = functools.partial(search, account, judge, workdir=tmp_path / "killed")
    with pytest.raises(Killed):
        go_on(seed=SEED)
    secret = tmp_path / "killed" / "secret_search"
    assert list(secret.glob("*/best.safetensors")) and secret.stat().st_mode & 0o77 == 0
    spends = account.epsilon()
    die_at = 0
    resumed = go_on()
    assert scored[:3] + scored[3:] == [*expected[:3], *expected[2:]]  # the third run again
    assert account.epsilon() == spends
    assert (resumed.name, resumed.score) == (whole.name, whole.score)
    # Nothing of the losing runs is left, and the kept result costs nothing.
    left = {path.name for path in (tmp_path / "killed").rglob("*")}
    assert left == {"lock", "charges.jsonl", "released.safetensors"}
    again = go_on()
    np.testing.assert_array_equal(again.params["w"], whole.params["w"])
    assert len(scored) == 6 and account.epsilon() == spends


def test_a_run_without_finite_parameters_loses_without_an_error(account, monkeypatch):
    calls = []

    def diverging(*args, **options):
        calls.append(1)
        state = fake_fit(*args, **options)
        if len(calls) == 1:
            return types.SimpleNamespace(params={"w": state.params["w"] * jnp.nan}, ema=None)
        if len(calls) == 2:
            raise module.Diverged("params after step 1 has NaN")
        return state

    monkeypatch.setattr(module, "fit", diverging)
    monkeypatch.setattr(RandomRuns, "draw", lambda runs, secret: 4)
    best = search(account, seed=SEED)
    assert len(calls) == 4 and math.isfinite(best.score) and np.isfinite(best.params["w"]).all()
    calls.clear()
    monkeypatch.setattr(RandomRuns, "draw", lambda runs, secret: 2)
    best = search(account, seed=SEED)
    assert best.score == -math.inf and not best.params["w"].any()
    monkeypatch.setattr(RandomRuns, "draw", lambda runs, secret: 0)
    best = search(account, seed=SEED, runs=RandomRuns(2.0, math.inf))
    assert best.name is None and math.isnan(best.score) and not best.params["w"].any()


def test_nothing_is_spent_on_a_search_that_is_refused(account, monkeypatch):
    charged = ChargedScore(predict=predict, source=RECORDS, noise_multiplier=5.0)
    for error, match, options in (
        (TypeError, "score must say whether its data is public", {"score": total}),
        (ValueError, "steps must have a number for '0.1'", {"steps": {"0.01": 3}}),
        (TypeError, "trainers must be a dict", {"trainers": {}}),
        (TypeError, "trainers of jaxdp.finetune.dp_sgd", {"trainers": {"a": loss}}),
        (TypeError, "trainers of jaxdp.finetune.dp_sgd", {"trainers": {0.1: trainer()}}),
        (TypeError, "score must be a number", {"score": PublicScore(lambda params: "good")}),
        (TypeError, "no argument 'workdirs'", {"workdirs": "x"}),
        (BudgetExceeded, "budget epsilon 8", {"steps": 100_000}),
    ):
        with pytest.raises(error, match=match):
            search(account, **options)
    unproven = types.SimpleNamespace(
        check=lambda source: None,
        privatizer=None,
        group=True,
        mesh=None,
        sampler=None,
        unit="example",
        event=lambda first, last: UnprovenDpEvent("no proof"),
    )
    one = search_of(account, charged, trainers={"a": unproven})
    monkeypatch.setattr(module, "check_account", lambda *args: None)
    with pytest.raises(ValueError, match="protects one record"):
        one.check()
    unproven.group = False
    with pytest.raises(ValueError, match="has no bound"):
        one.check()
    with pytest.raises(ValueError, match="without noise is for public data"):
        ChargedScore(predict=predict, source=RECORDS, noise_multiplier=0.0)
    with pytest.raises(ValueError, match="no hyperparameter"):
        with_hyperparams(trainer(), {"momentum": 0.5}).init(PARAMS)
    assert account.epsilon() == 0


# --- Owners of several records ------------------------------------------------------------------

PEOPLE = np.arange(120) // 10
SHARED = data.by_owners(RECORDS, PEOPLE, max_records=10)
GROUPED = data.by_group(RECORDS, PEOPLE, max_records=10)


def procedure(params=PARAMS, facts=None):
    """Returns a candidate that spends, and releases the first parameters or others."""

    def run(account, seed):
        with account.spend(PURE):
            pass
        return params

    return finetune.Procedure(event=PURE, run=run, facts=facts)


@pytest.fixture
def people():
    ledger = Ledger.in_memory()
    for name in ("search", "accuracy"):
        ledger.register(name, adjacency="zero_out", unit="person", delta=1e-5)
    return ledger


PART = data.take(SHARED, np.arange(0, 120, 2))


@pytest.mark.parametrize(
    ("source", "sigma"),
    [(RECORDS, 20.0), (SHARED, 2.0), (PART, 2.0)],
    ids=["plain", "owners", "part of owners"],
)
def test_a_score_costs_what_the_accuracy_costs(source, sigma, people, monkeypatch):
    terms = {"noise_multiplier": 20.0, "unit": "person"}
    score = ChargedScore(predict=predict, source=source, **terms)
    account = people.account("search")
    accuracy = people.account("accuracy")
    finetune.charged_accuracy(predict, PARAMS, source, account=accuracy, **terms)
    assert people.events("accuracy") == {None: GaussianDpEvent(sigma)}
    assert score.charges(account) == [(account, GaussianDpEvent(sigma))]
    monkeypatch.setattr(RandomRuns, "draw", lambda runs, secret: 1)
    choose(procedure(), account, score, seed=SEED)
    whole = RUNS.event(OneOfDpEvent((ComposedDpEvent([PURE, GaussianDpEvent(sigma)]),)))
    assert composition(people.events("search")[None]) == composition(whole)
    # Broken twin: each record pays for itself.
    scores = importlib.import_module("jaxdp.finetune.scores")
    alone = lambda account, source, noise, unit: (account, GaussianDpEvent(noise))  # noqa: E731
    monkeypatch.setattr(scores, "charge_of_count", alone)
    [(_, twin)] = score.charges(account)
    assert (twin == GaussianDpEvent(sigma)) == (source is RECORDS)


def test_owners_who_may_leave_have_no_charged_count(account):
    score = ChargedScore(predict=predict, source=SHARED, noise_multiplier=20.0)
    with pytest.raises(ValueError, match="adjacency must be 'zero_out'"):
        finetune.charged_accuracy(predict, PARAMS, SHARED, account=account, noise_multiplier=20.0)
    with pytest.raises(ValueError, match="adjacency must be 'zero_out'"):
        choose(procedure(), account, score)
    assert account.epsilon() == 0


def test_groups_have_no_charged_score(people):
    def whole(params, example):
        each = jax.vmap(loss, (None, 0))(params, example.records)
        return jnp.where(example.present, each, 0).sum()

    sampler = data.PoissonSampler(len(GROUPED), 0.2)
    alone = trainer_of(whole, sampler=sampler, physical_batch_size=None, unit="person")
    account = people.account("search")
    charged = ChargedScore(predict=predict, source=RECORDS, noise_multiplier=20.0)
    part = data.take(GROUPED, np.arange(len(GROUPED))[::-1])
    for candidate, source in ((alone, GROUPED), (procedure(), GROUPED), (alone, part)):
        search = search_of(account, charged, trainers={"a": candidate}, source=source)
        with pytest.raises(ValueError, match=r"'a'.* protects one person with several records"):
            search.check()
        # Twin: public records are no charge, and pass.
        dataclasses.replace(search, score=TOTAL).check()
    # Groups themselves are no records with labels, for either count.
    with pytest.raises(ValueError, match="no column 'label'"):
        ChargedScore(predict=predict, source=GROUPED, noise_multiplier=20.0)
    with pytest.raises(ValueError, match="no column 'label'"):
        finetune.charged_accuracy(predict, PARAMS, GROUPED, account=account, noise_multiplier=20.0)
    assert people.events("search") == {}


def test_a_count_of_records_needs_an_account_of_records(people, monkeypatch):
    # Ten records of each person, which one person may all make right or wrong.
    score = ChargedScore(predict=predict, source=RECORDS, noise_multiplier=20.0)
    match = "unit must be that of account '.*', 'person', .* record of source is, got 'example'"
    with pytest.raises(ValueError, match=match):
        choose(procedure(), people.account("search"), score)
    for source, words in ((RECORDS, {}), (RECORDS, {"unit": "scan"}), (SHARED, {})):
        with pytest.raises(ValueError, match="unit must be that of account 'accuracy', 'person'"):
            finetune.charged_accuracy(
                predict,
                PARAMS,
                source,
                account=people.account("accuracy"),
                noise_multiplier=20.0,
                **words,
            )
    assert people.events("search") == people.events("accuracy") == {}


# --- What a token has ---------------------------------------------------------------------------


def token_of(account, score=TOTAL, **changes):
    """Returns the token of a search under a given seed."""
    terms = {"trainers": {"a": procedure(facts=["a"])}, "source": None}
    with Till(seed=SEED) as till:
        return till.token(search_of(account, score, **terms | changes).release())


def charged(predict):
    return ChargedScore(predict=predict, source=RECORDS, noise_multiplier=5.0)


def scaled(factor):
    weights = np.array([[1, factor]], np.float32)
    return lambda params, x: (x * weights) @ params["w"]


def asks_python(params, x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: x, like, x, vmap_method="sequential") @ params["w"]


@pytest.mark.slow
def test_a_token_has_the_score_and_the_procedures(account, people):
    known = [
        {},
        {"score": PublicScore(total, facts=["another"])},
        {"score": PublicScore(total, facts=[])},
        {"score": charged(predict)},
        {"score": charged(lambda params, x: -predict(params, x))},
        {"score": charged(scaled(2.0))},
        {"score": charged(scaled(3.0))},  # differs in a closed-over array only
        {"trainers": {"a": procedure(facts=["b"])}},
        {"trainers": {"a": procedure(facts=["a"]), "b": procedure(facts=["b"])}},
        {"account": people.account("search")},  # whose terms a run may read
    ]
    tokens = [token_of(**{"account": account, **changes}) for changes in known]
    assert len(set(tokens)) == len(tokens)
    assert tokens == [token_of(**{"account": account, **changes}) for changes in known]
    unknown = (
        {"score": PublicScore(total)},
        {"trainers": {"a": procedure()}},
        {"score": charged(asks_python)},
    )
    for changes in unknown:  # they are never repeated
        assert token_of(account, **changes) != token_of(account, **changes)
    for wrong in ("text", 3):
        with pytest.raises(TypeError, match="facts must be a list"):
            PublicScore(total, facts=wrong)


def noisy(facts=None):
    """Returns a candidate with noise of its seed on a private number."""

    def run(account, seed):
        with account.spend(PURE):
            pass
        return {"w": np.frombuffer(seed[:8], np.uint8).reshape(2, 4) / np.float32(256)}

    return finetune.Procedure(event=PURE, run=run, facts=facts)


@pytest.mark.parametrize("facts", [None, ["sum"]])
def test_copies_of_a_killed_search_release_one_result_a_charge(account, tmp_path, five_runs, facts):
    spends = lambda: len(account.ledger.history("blobs"))  # noqa: E731
    start = {"w": np.zeros((2, 4), np.float32)}
    chosen = functools.partial(choose, noisy(["noise"]), account, params=start)
    calls = []

    def dies(params):
        calls.append(1)
        if len(calls) > 2:  # after the check and the first run
            raise Killed
        return 0.0

    def go(name, function):
        score = PublicScore(function, facts=facts)
        # Who has no facts hears it before the crash.
        warned = pytest.warns(UserWarning, match="facts are None for score")
        with warned if facts is None else contextlib.nullcontext():
            return chosen(score, workdir=tmp_path / name)

    with pytest.raises(Killed):
        go("first", dies)
    assert spends() == 1
    names = ["first", "second", "third"]
    for name in names[1:]:
        shutil.copytree(tmp_path / "first", tmp_path / name)
    if facts:  # the caller's word that it is one score, so all copies have one result
        results = [go(name, total) for name in names]
        assert len({result.score for result in results}) == 1 and spends() == 1
        with pytest.raises(ValueError, match="keeps another release"):
            facts = ["another"]
            go("first", total)
        return
    for name, function in zip(
        names, (total, lambda p: -total(p), lambda p: p["w"][0, 0]), strict=True
    ):
        go(name, function)
    assert spends() == 1 + len(names)
    # What nobody can compare is not given as the result of another score.
    with pytest.raises(ValueError, match=r"keeps the result of a search .* None for score"):
        chosen(PublicScore(lambda params: -100.0), workdir=tmp_path / "first")
    assert spends() == 1 + len(names)


def test_what_can_be_checked_is_checked_before_the_charge(account):
    cyclic = trainer_of(sampler=data.CyclicPoissonSampler(120, 0.2, cycle_length=7))
    words = r"checkpoint_every must be a multiple of .*cycle_length=7"
    with pytest.raises(ValueError, match=words):
        search(account, trainers={"a": cyclic}, steps=21, checkpoint_every=10)

    def broken(params, example):
        raise RuntimeError("a loss that cannot be traced")

    with pytest.raises(RuntimeError, match="cannot be traced"):
        search(account, trainers={"a": trainer(), "b": trainer_of(broken)})
    assert account.ledger.history("blobs") == []


@pytest.mark.parametrize("returned", [{**PARAMS, "b": PARAMS["w"]}, {"v": PARAMS["w"]}, None])
def test_a_procedure_that_returns_another_structure_is_named(account, returned):
    with pytest.raises(ValueError, match=r"trainers\['a'\] must return arrays in the structure of"):
        choose(procedure(returned), account, TOTAL)


# --- Other releases -----------------------------------------------------------------------------


def recalibrated(name):
    """Returns a candidate that recalibrates one hospital by a method, in a search of two rounds."""
    method = getattr(recalibration, name)
    random = np.random.default_rng(0)
    logits = 4 * random.normal(size=(40, 3)).astype(np.float32)
    labels = logits.argmax(1)

    def run(account, seed):
        hospital = recalibration.Party(logits, labels, account=account)
        key = jaxdp.release.stream(seed, "noise")
        found = method([hospital], epsilon=0.5, key=key, iterations=2)
        return {"temperature": np.float32(found.temperature)}

    return finetune.Procedure(event=PURE, run=run, facts=[logits, labels, name])


@pytest.mark.slow
def test_a_recalibration_is_a_candidate_that_pays_once(account, monkeypatch, five_runs, tmp_path):
    start = {"temperature": np.float32(1.0)}
    score = PublicScore(lambda params: -abs(float(params["temperature"]) - 2.0), facts=["near 2"])
    tune = functools.partial(
        jaxdp.tune,
        {name: recalibrated(name) for name in ("acc_t", "nll_t")},
        account,
        start,
        None,
        runs=RUNS,
        score=score,
        workdir=tmp_path / "run",
    )
    best = tune(seed=SEED)
    assert best.name in ("acc_t", "nll_t") and best.score == score.function(best.params)
    assert account.ledger.events("blobs") == {None: RUNS.event(PURE)}
    assert account.epsilon(delta=0.0) == pytest.approx(3 * 0.5)  # 2 + eta runs
    assert tune() == best and account.epsilon(delta=0.0) == pytest.approx(3 * 0.5)


def test_a_procedure_spends_what_it_says(account):
    seen = []

    def spends(*charges):
        def run(account, seed):
            seen.append((account.adjacency, account.unit, len(seed)))
            for event, part in charges:
                with account.spend(event, partition=part):
                    pass
            return PARAMS

        return finetune.Procedure(event=PURE, run=run)

    half = recalibration.event(0.25)
    for charges in ([(PURE, None)], [(PURE, "a"), (PURE, "b")]):
        assert spends(*charges).release(account, SEED) is PARAMS
    assert seen == [("add_remove", "example", 16)] * 2
    # Twins: nothing, too much, other events, and a part that the whole comes on top of.
    for charges in (
        [],
        [(PURE, None)] * 2,
        [(half, None)] * 2,
        [(PURE, "a"), (PURE, None)],
        [(PURE, "a"), (half, "b")],
    ):
        with pytest.raises(RuntimeError, match="Nothing is released"):
            spends(*charges).release(account, SEED)
    unbounded = finetune.Procedure(event=UnprovenDpEvent("none"), run=lambda account, seed: PARAMS)
    with pytest.raises(ValueError, match="has no bound"):
        choose(unbounded, account, TOTAL)
    with pytest.raises(TypeError, match="run must be a function"):
        finetune.Procedure(event=PURE, run=3)
    assert account.epsilon() == 0


@pytest.mark.slow
def test_a_real_search_compiles_its_candidates_once_and_logs_no_run(
    account, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(RandomRuns, "draw", lambda runs, secret: 2)
    caplog.set_level("INFO", "jaxdp.events")
    two = {name: candidates()[name] for name in ("0.1", "1")}
    score = PublicScore(lambda params: finetune.accuracy(predict, params, RECORDS), facts=["v1"])
    best = search(account, score, trainers=two, workdir=tmp_path / "run")
    assert best.score == finetune.accuracy(predict, best.params, RECORDS) > 0
    # The events of the log are the payment, and none of a run.
    assert [record.args[0] for record in caplog.records] == ["payment"]
    assert not (tmp_path / "run" / module.SECRET).exists()
    states = [candidate.init(PARAMS) for candidate in two.values()]
    assert two["0.1"].part_sum is two["1"].part_sum and two["0.1"].update is two["1"].update
    rates = [float(state.opt_state.hyperparams["learning_rate"]) for state in states]
    assert rates == pytest.approx([0.1, 1.0])
    with compilations() as compiled:
        search(account, score, trainers=two)
    assert not compiled
