"""Private answers: the ledger comes first, nothing but answers comes back, adjacencies match;
planning; the student.

Certificates are fakes with chosen labels and distances, so that what is tested is what happens to
them."""

import dataclasses
import functools
import logging
import math
import os
import signal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from jaxdp import prediction
from jaxdp.prediction import METHODS, agt, ensembles, mechanisms
from jaxdp.prediction import answers as answering
from jaxdp.privacy import PureDpEvent, SelfComposedDpEvent
from jaxdp.privacy import epsilon as epsilon_at
from jaxdp.privacy.events import composition
from tests import forked

SEED = bytes(range(16))
ACCEPT, REJECT = 1e-6, 1e-9


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Bounds:
    """A fake result of `train_with_bounds`. `certify` returns its `label` and `distance` [Q]."""

    label: object = 0
    distance: object = 0
    threat: str = dataclasses.field(default="add_remove", metadata={"static": True})
    ks: tuple[int, ...] = dataclasses.field(default=tuple(range(10)), metadata={"static": True})
    product: str = dataclasses.field(default="tight", metadata={"static": True})
    params: object = None
    lower: object = None
    upper: object = None
    trainable: tuple[bool, ...] = dataclasses.field(default=(True,), metadata={"static": True})

    def __post_init__(self):
        if not isinstance(self.params, dict):
            self.params = {
                "w": jnp.float32(np.mean(self.label) if self.params is None else self.params)
            }


class Ends(NamedTuple):
    lower: object
    upper: object


def one_logit(params, query):
    return (params["w"] - 0.5) * jnp.ones(()) + 0 * query["x"].sum()


def watched(apply_fn):
    """Returns a list, and `apply_fn` that appends to it when it runs, but not when it is traced."""
    seen = []

    def watched(params, query):
        jax.debug.callback(lambda: seen.append("ran"))
        return apply_fn(params, query)

    return seen, watched


def three_logits(params, query):
    return jnp.array([0.0, 1.0, 0.5]) * params["w"] + 0 * query["x"].sum()


@pytest.fixture
def certified(monkeypatch):
    """Fakes `certify` and counts its calls that see values."""
    calls = []

    def certify(bounds, apply_fn, queries):
        del apply_fn
        if not isinstance(bounds.distance, jax.core.Tracer):
            calls.append(bounds)
        n = len(queries["x"])
        return agt.Certificates(
            label=jnp.broadcast_to(jnp.asarray(bounds.label, jnp.int32), (n,)),
            distance=jnp.broadcast_to(jnp.asarray(bounds.distance, jnp.int32), (n,)),
            logits=Ends(bounds.lower, bounds.upper),
        )

    monkeypatch.setattr(answering, "certify", certify)
    return calls


def queries(n):
    return {"x": np.zeros((n, 2), np.float32)}


def ledger_for(adjacency="add_remove", epsilon=None, delta=1e-5):
    ledger = jaxdp.Ledger.in_memory()
    ledger.register("data", adjacency=adjacency, unit="example", epsilon=epsilon, delta=delta)
    return ledger


def predict(bounds, n=50, ledger=None, apply_fn=one_logit, **arguments):
    arguments = {
        "epsilon": 0.5,
        "seed": SEED,
        **({"epsilon": None} if "total" in arguments else {}),
        **arguments,
    }
    return prediction.private_predict(
        bounds, apply_fn, queries(n), account=account(ledger), **arguments
    )


def account(ledger=None):
    return (ledger or ledger_for()).account("data")


# --- planning -----------------------------------------------------------------------------------


def paper_query_epsilon(epsilon, delta, queries):
    """Returns the epsilon by zero-concentrated DP, or the even share."""
    log_delta = math.log(1 / delta)
    concentrated = math.sqrt(2 / queries) * (math.sqrt(log_delta + epsilon) - math.sqrt(log_delta))
    return max(epsilon / queries, concentrated)


@pytest.mark.slow
@pytest.mark.parametrize("queries_", [1, 10, 100, 1000])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_planned_queries_cost_the_total_and_no_more(queries_, adjacency):
    each = prediction.query_epsilon(10.0, 1e-5, queries_, adjacency=adjacency)
    assert each >= paper_query_epsilon(10.0, 1e-5, queries_) * (1 - 1e-12)

    def total(epsilon):
        event = SelfComposedDpEvent(PureDpEvent(epsilon), queries_)
        return epsilon_at(event, delta=1e-5, adjacency=adjacency)

    assert total(each) <= 10.0 * (1 + 1e-12) and total(each * 1.001) > 10.0


def test_planned_queries_of_known_totals():
    got = [prediction.query_epsilon(10.0, 1e-5, q) for q in (10, 100, 1000)]
    assert got == pytest.approx([1.0, 0.204, 0.0634], rel=2e-3)
    paper = [paper_query_epsilon(10.0, 1e-5, q) for q in (10, 100, 1000)]
    assert paper == pytest.approx([1.0, 0.1761, 0.05568], rel=1e-3)
    assert prediction.query_epsilon(3.0, 0.0, 7) == 3.0 / 7


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0.0, 1e-5, 10), "epsilon must be"),
        ((math.inf, 1e-5, 10), "epsilon must be"),
        ((1.0, 1.0, 10), "delta must be"),
        ((1.0, 1e-5, 0), "queries must be"),
        ((1.0, 1e-5, 2.0), "queries must be"),
    ],
)
def test_planning_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        prediction.query_epsilon(*arguments)


# --- answers ------------------------------------------------------------------------------------


def test_every_query_is_charged_once(certified):
    ledger = ledger_for()
    answers = predict(Bounds(1, 100), 50, ledger, epsilon=0.2)
    assert (
        type(answers) is np.ndarray and answers.dtype == np.int32 and answers.tolist() == [1] * 50
    )
    assert ledger.events("data") == {None: SelfComposedDpEvent(PureDpEvent(0.2), 50)}
    predict(Bounds(1, 100), 50, ledger, epsilon=0.2, seed=None)
    assert ledger.events("data") == {None: SelfComposedDpEvent(PureDpEvent(0.2), 100)}
    assert len(certified) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", METHODS)
def test_the_event_of_answers_is_known_before_there_is_a_model(certified, mechanism):
    event = prediction.event(7, epsilon=0.2, mechanism=mechanism)
    assert event == SelfComposedDpEvent(PureDpEvent(0.2), 7)
    ledger = ledger_for()
    if METHODS[mechanism].kind == "labels":
        predict(Bounds(1, 3), 7, ledger, epsilon=0.2, mechanism=mechanism)
    else:
        ask = {
            "account": account(ledger),
            "output_range": (0.0, 9.0),
            "epsilon": 0.2,
            "mechanism": mechanism,
        }
        prediction.private_values(value_bounds(7, (0, 1)), value_of, queries(7), **ask)
    assert ledger.events("data") == {None: event}


def test_the_event_of_a_total_is_that_of_its_plan():
    each = prediction.query_epsilon(3.0, 1e-5, 40)
    assert prediction.event(40, total=(3.0, 1e-5)) == SelfComposedDpEvent(PureDpEvent(each), 40)
    for arguments, match in [
        ({"count": 0, "epsilon": 1.0}, "count must be an integer >= 1, got 0"),
        ({"count": True, "epsilon": 1.0}, "count must be an integer >= 1, got True"),
        ({"count": 5}, "either epsilon"),
        ({"count": 5, "epsilon": math.inf}, "epsilon must be finite"),
        ({"count": 5, "epsilon": 1.0, "mechanism": "none"}, "mechanism must be one of"),
    ]:
        with pytest.raises(ValueError, match=match):
            prediction.event(**arguments)


def test_a_total_is_planned_for_all_queries_of_the_call(certified):
    ledger = ledger_for(epsilon=10.0)
    predict(Bounds(0, 5), 100, ledger, total=(10.0, 1e-5))
    assert ledger.epsilon("data") == pytest.approx(10.0, rel=1e-3)
    with pytest.raises(jaxdp.BudgetExceeded):
        predict(Bounds(0, 5), 10, ledger, epsilon=0.2)


@pytest.mark.parametrize(
    "mechanism", [name for name, row in METHODS.items() if row.kind == "labels"]
)
@pytest.mark.parametrize("members", [1, 3])
def test_a_refused_call_computes_nothing_and_charges_nothing(certified, mechanism, members):
    ledger = ledger_for(epsilon=1.0)
    seen, apply_fn = watched(one_logit)
    with pytest.raises(jaxdp.BudgetExceeded):
        predict([Bounds(0, 5)] * members, 1000, ledger, apply_fn, epsilon=0.5, mechanism=mechanism)
    jax.effects_barrier()
    assert certified == [] and seen == [] and ledger.epsilon("data") == 0


def test_the_spend_is_on_the_books_before_certifying_and_stays_if_that_fails(monkeypatch):
    ledger = ledger_for()

    def fail(*args):
        assert ledger.epsilon("data", delta=0.0) == pytest.approx(5.0)
        raise RuntimeError("no memory")

    monkeypatch.setattr(answering, "certify", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        predict(Bounds(0, 5), 10, ledger, epsilon=0.5, seed=None)
    assert ledger.epsilon("data", delta=0.0) == pytest.approx(5.0)


def test_the_ledger_shows_nothing_private(certified):
    """Two models that differ in everything private leave the same entries."""
    texts = []
    for bounds in (Bounds(0, 3), Bounds(1, 987)):
        ledger = ledger_for()
        predict(bounds, 20, ledger, total=(1.0, 1e-5))
        report = ledger.report()
        spend = report["datasets"][0]["spends"][0]
        texts.append({name: value for name, value in spend.items() if not name.endswith("_at")})
        assert "987" not in str(spend["event"]) + spend["first_label"]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_answers_flip_with_the_probability_of_their_distance(certified, distance):
    n, epsilon = 20_000, 0.6
    wrong = int((predict(Bounds(1, distance), n, epsilon=epsilon) != 1).sum())
    p = float(mechanisms.flip_probability(distance, epsilon=epsilon))
    assert stats.binomtest(wrong, n, p).pvalue > ACCEPT
    assert (
        stats.binomtest(wrong, n, 0.7 * p).pvalue < REJECT
        and stats.binomtest(wrong, n, 1.3 * p).pvalue < REJECT
    )


@pytest.mark.slow
def test_a_seed_reproduces_a_release_and_two_releases_never_share_noise(certified):
    bounds, ledger = Bounds(0, 0), ledger_for()
    first = predict(bounds, 200, ledger)
    assert (predict(bounds, 200, ledger) == first).all() and (predict(bounds, 200) == first).all()
    # one release, paid once
    assert ledger.events("data") == {None: SelfComposedDpEvent(PureDpEvent(0.5), 200)}
    others = [
        predict(Bounds(0, 0, lower=np.float32(1)), 200, ledger),  # in nothing that the answers show
        predict(bounds, 200, ledger, mechanism="global_response"),
        predict(bounds, 200, ledger, apply_fn=lambda params, query: 2 * one_logit(params, query)),
        predict([bounds] * 3, 200, ledger, mechanism="global_response"),
        predict(bounds, 200, ledger, seed=None),
        predict(bounds, 200, ledger, seed=None),
    ]
    assert len({answers.tobytes() for answers in [first, *others]}) == 7
    assert ledger.events("data") == {None: SelfComposedDpEvent(PureDpEvent(0.5), 1400)}


def test_many_classes(certified):
    answers = predict(Bounds(2, 0, params=1.0), 3000, apply_fn=three_logits, epsilon=0.1)
    assert set(answers.tolist()) == {0, 1, 2}
    assert (predict(Bounds(2, 500, params=1.0), apply_fn=three_logits) == 2).all()
    with pytest.raises(ValueError, match="answers two classes, not 3"):
        predict(Bounds(2, 0), apply_fn=three_logits, mechanism="smooth_cauchy")
    with pytest.raises(ValueError, match="answers two classes, not 3"):
        predict(Bounds(2, 0), apply_fn=three_logits, mechanism="global_laplace")


@pytest.mark.parametrize("mechanism", ["global_laplace", "global_response"])
def test_global_mechanisms_need_no_certificates(certified, mechanism):
    n = 20_000
    answers = predict(Bounds(1, 10**6), n, epsilon=1.0, mechanism=mechanism)
    assert certified == []
    p = math.exp(-0.5) / 2 if mechanism == "global_laplace" else 1 / (1 + math.e)
    assert stats.binomtest(int((answers == 0).sum()), n, p).pvalue > ACCEPT
    apart = predict(
        Bounds(1, 0, params=1.0),
        500,
        apply_fn=three_logits,
        mechanism="global_response",
        epsilon=20.0,
    )
    assert (apart == 1).all()  # The largest of three logits.


def test_no_queries_cost_nothing(certified):
    ledger = ledger_for()
    answers = predict(Bounds(), 0, ledger)
    assert answers.shape == (0,) and answers.dtype == np.int32 and ledger.events("data") == {}


# --- adjacency ----------------------------------------------------------------------------------


def observed_distance(monkeypatch, bounds, registered, **arguments):
    seen = []

    def record(key, labels, distances, *, epsilon, num_classes):
        seen.append(int(np.unique(distances)[0]))
        return np.zeros(len(labels), np.int32)

    monkeypatch.setitem(METHODS, "randomised_response", prediction.Mechanism("labels", record))
    predict(bounds, 4, ledger_for(registered), **arguments)
    return seen[0]


@pytest.mark.parametrize(
    ("kind", "registered", "distance"),
    [
        ("add_remove", "add_remove", 7),
        ("add_remove", "zero_out", 7),
        ("add_remove", "replace_one", 3),
        ("replace_one", "replace_one", 7),
    ],
)
def test_distances_count_changes_of_the_registered_relation(
    certified, monkeypatch, kind, registered, distance
):
    assert observed_distance(monkeypatch, Bounds(0, 7, threat=kind), registered) == distance


@pytest.mark.parametrize(
    ("kind", "registered"),
    [
        ("replace_one", "add_remove"),
        ("replace_per_batch", "add_remove"),
        ("replace_per_batch", "replace_one"),
        ("replace_one", "zero_out"),
        ("replace_per_batch", "zero_out"),
        ("something", "add_remove"),
    ],
)
def test_other_relations_are_refused_before_spending(certified, kind, registered):
    ledger = ledger_for(registered)
    with pytest.raises(
        ValueError, match=f"threat='{kind}' cover .*, but dataset 'data' is registered with"
    ):
        predict(Bounds(0, 7, threat=kind), 4, ledger)
    assert ledger.events("data") == {} and certified == []


def test_an_ensemble_votes_and_a_replacement_may_touch_two_members(certified, monkeypatch):
    members = [Bounds(1, 4), Bounds(1, 6), Bounds(1, 9), Bounds(0, 9)]  # n = 1: K = 4.
    assert observed_distance(monkeypatch, members, "add_remove") == 4
    assert observed_distance(monkeypatch, members, "replace_one") == 2
    fixed = [Bounds(1, 4, threat="replace_one"), Bounds(1, 6, threat="replace_one")]
    assert observed_distance(monkeypatch, fixed, "replace_one", fixed_parts=True) == 4
    with pytest.raises(ValueError, match="fixed_parts=True"):
        predict(fixed, 4, ledger_for("replace_one"))
    with pytest.raises(ValueError, match="one threat"):
        predict([members[0], fixed[0]], 4, ledger_for("replace_one"))


@pytest.mark.slow
def test_laplace_noise_on_votes_is_doubled_for_replacement(certified):
    n, members = 20_000, [Bounds(1)] * 9 + [Bounds(0)] * 5
    for registered, scale in (("add_remove", 2.5), ("replace_one", 5.0)):
        answers = predict(
            members, n, ledger_for(registered), epsilon=0.8, mechanism="global_laplace"
        )
        p = math.exp(-4 / scale) * (0.5 + 4 / scale / 4)
        assert stats.binomtest(int((answers == 0).sum()), n, p).pvalue > ACCEPT
    assert certified == []


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"total": (1.0, 1e-5), "epsilon": 1.0}, "either epsilon"),
        ({"epsilon": None}, "either epsilon"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"mechanism": "smooth_laplace"}, "mechanism must be one of"),
        ({"apply_fn": lambda params, query: jnp.zeros((2, 2))}, "ONE query"),
        ({"bounds": []}, "bounds is empty"),
        ({"mechanism": "cauchy_values"}, "mechanism must be one of"),
    ],
)
def test_bad_arguments_are_refused_before_spending(certified, arguments, match):
    ledger = ledger_for()
    with pytest.raises(ValueError, match=match):
        predict(**{"bounds": Bounds(0, 1), "ledger": ledger, **arguments})
    assert ledger.events("data") == {} and certified == []


def test_unknown_data_sets_and_ragged_queries_are_refused():
    with pytest.raises(ValueError, match="'other' is not registered"):
        prediction.private_predict(
            Bounds(), one_logit, queries(2), account=ledger_for().account("other"), epsilon=1.0
        )
    with pytest.raises(ValueError, match="queries must be a pytree"):
        prediction.private_predict(
            Bounds(),
            one_logit,
            {"x": np.zeros(3), "y": np.zeros(2)},
            account=account(),
            epsilon=1.0,
        )


# --- values -------------------------------------------------------------------------------------


def test_bounds_without_distance_zero_are_refused_before_spending():
    ledger = ledger_for()
    with pytest.raises(ValueError, match="ks of the bounds must start at 0"):
        predict(Bounds(0, 7, ks=(1, 2, 3)), 4, ledger)
    assert ledger.events("data") == {}


def test_bounds_by_midpoints_and_radii_are_refused_before_spending():
    ledger = ledger_for()
    with pytest.raises(ValueError, match="product='tight'"):
        predict(Bounds(0, 7, product="rump"), 4, ledger)
    assert ledger.events("data") == {}


def test_queries_that_are_not_finite_are_refused_before_spending(certified):
    ledger = ledger_for()
    asked = {"x": np.full((4, 2), np.nan, np.float32)}
    with pytest.raises(ValueError, match="queries leaf x has NaN"):
        prediction.private_predict(
            Bounds(0, 7), one_logit, asked, account=account(ledger), epsilon=0.1
        )
    assert ledger.events("data") == {} and certified == []


def value_bounds(n, ks):
    """Returns bounds of a model whose output 3 moves by at most k / 4 at distance k."""
    radius = np.broadcast_to(np.array(ks, np.float32)[:, None, None] / 4, (len(ks), n, 1))
    return Bounds(params=3.0, ks=ks, lower=3 - radius, upper=3 + radius)


def value_of(params, query):
    return params["w"] + 0 * query["x"].sum()


@pytest.mark.parametrize(
    ("ks", "registered", "rows"),
    [
        ((0, 1, 2, 3, 4, 5), "add_remove", [1, 2, 3, 4, 5]),
        ((0, 1, 2, 3, 4, 5), "replace_one", [2, 4]),
        ((0, 2, 5, 9), "add_remove", [2, 5, 9]),
        ((0, 3, 8), "zero_out", [3, 8]),
    ],
)
def test_values_use_the_certified_boxes_of_the_registered_relation(
    certified, monkeypatch, ks, registered, rows
):
    seen = {}

    def record(key, values, lower, upper, *, epsilon, output_range):
        seen.update(
            values=values, lower=lower, upper=upper, epsilon=epsilon, output_range=output_range
        )
        return np.zeros(len(values), np.float32)

    monkeypatch.setitem(METHODS, "cauchy_values", prediction.Mechanism("values", record))
    ledger = ledger_for(registered)
    prediction.private_values(
        value_bounds(4, ks),
        value_of,
        queries(4),
        account=account(ledger),
        output_range=(0.0, 9.0),
        epsilon=0.3,
    )
    np.testing.assert_allclose(seen["upper"][:, 0], 3 + np.array(rows) / 4)
    np.testing.assert_allclose(seen["lower"][:, 0], 3 - np.array(rows) / 4)
    assert seen["values"].tolist() == [3.0] * 4 and seen["output_range"] == (0.0, 9.0)
    assert ledger.events("data") == {None: SelfComposedDpEvent(PureDpEvent(0.3), 4)}


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["cauchy_values", "laplace_values"])
def test_values_come_back_noisy_and_refused_calls_compute_nothing(certified, mechanism):
    ask = {"output_range": (0.0, 9.0), "mechanism": mechanism, "seed": SEED}
    bounds = value_bounds(400, tuple(range(60)))
    answers = prediction.private_values(
        bounds, value_of, queries(400), account=account(), epsilon=2.0, **ask
    )
    assert answers.dtype == np.float32 and answers.shape == (400,)
    assert abs(np.median(answers) - 3) < 1.0 and answers.std() > 0.1
    before = len(certified)
    with pytest.raises(jaxdp.BudgetExceeded):
        prediction.private_values(
            bounds,
            value_of,
            queries(400),
            account=account(ledger_for(epsilon=1.0)),
            epsilon=2.0,
            **ask,
        )
    assert len(certified) == before
    with pytest.raises(ValueError, match="bounds must be of one model"):
        prediction.private_values(
            [bounds], value_of, queries(4), account=account(), epsilon=2.0, **ask
        )
    with pytest.raises(ValueError, match="output_range must be"):
        prediction.private_values(
            bounds,
            value_of,
            queries(4),
            account=account(),
            epsilon=2.0,
            **{**ask, "output_range": (1.0, 0.0)},
        )
    for outputs in (three_logits, lambda params, query: three_logits(params, query)[:2]):
        with pytest.raises(ValueError, match="one value"):
            prediction.private_values(
                bounds, outputs, queries(4), account=account(), epsilon=2.0, **ask
            )
    with pytest.raises(
        ValueError, match=r"mechanism must be one of \['cauchy_values', 'laplace_values'\]"
    ):
        ask["mechanism"] = "randomised_response"
        prediction.private_values(
            bounds, value_of, queries(4), account=account(), epsilon=2.0, **ask
        )


def test_a_mechanism_from_outside_is_one_row(certified, monkeypatch):
    """It is offered by its door, charged by its own event, and uses no certificate unless it says
    so."""

    def zeros(key, labels, distances, *, epsilon, num_classes):
        assert not distances.any()
        return np.zeros(len(labels), np.int32)

    def event(epsilon):
        return PureDpEvent(epsilon / 2)

    monkeypatch.setitem(
        METHODS, "zeros", prediction.Mechanism("labels", zeros, certified=False, event=event)
    )
    ledger = ledger_for()
    assert predict(Bounds(1, 5), 7, ledger, epsilon=0.2, mechanism="zeros").tolist() == [0] * 7
    assert (
        ledger.events("data") == {None: SelfComposedDpEvent(PureDpEvent(0.1), 7)}
        and certified == []
    )
    assert prediction.event(7, epsilon=0.2, mechanism="zeros") == SelfComposedDpEvent(
        PureDpEvent(0.1), 7
    )


# --- PATE ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pate_charges_its_plan_and_answers_where_members_agree():
    mechanism = ensembles.ConfidentGNMax(threshold=8.0, sigma_threshold=0.5, sigma_votes=0.5)
    members = [{"w": jnp.float32(1.0)}] * 9 + [{"w": jnp.float32(0.0)}]
    ledger = ledger_for()
    ask = {"mechanism": mechanism, "max_answers": 30, "seed": SEED}
    answers = prediction.pate_predict(
        members, one_logit, queries(40), account=account(ledger), **ask
    )
    assert answers.dtype == np.int32 and (answers == 1).sum() == 30 and (answers == -1).sum() == 10
    assert ledger.epsilon("data") == pytest.approx(
        epsilon_at(mechanism.event(40, max_answers=30), delta=1e-5)
    )
    # A zeroed record may change two members, which the ledger does not double by itself.
    zeroed = ledger_for("zero_out")
    prediction.pate_predict(members, one_logit, queries(40), account=account(zeroed), **ask)
    two = mechanism.event(40, max_answers=30, adjacency="zero_out")
    assert composition(zeroed.events("data")[None]) == composition(two)
    half = prediction.pate_predict(
        members[4:] + members[-1:] * 4, one_logit, queries(40), account=account(), **ask
    )
    assert (half == -1).all()
    with pytest.raises(ValueError, match="members is empty"):
        prediction.pate_predict([], one_logit, queries(40), account=account(), **ask)
    with pytest.raises(TypeError, match="mechanism must be a ConfidentGNMax, got Louder"):
        louder = type("Louder", (ensembles.ConfidentGNMax,), {})(8.0, 0.5, 0.5)
        prediction.pate_predict(
            members, one_logit, queries(40), account=account(), **ask | {"mechanism": louder}
        )
    seen, apply_fn = watched(one_logit)
    with pytest.raises(jaxdp.BudgetExceeded):
        prediction.pate_predict(
            members, apply_fn, queries(40), account=account(ledger_for(epsilon=1.0)), **ask
        )
    jax.effects_barrier()
    assert seen == []
    prediction.pate_predict(members, apply_fn, queries(40), account=account(), **ask)
    jax.effects_barrier()
    assert len(seen) == len(members)


# --- what a crash leaves ------------------------------------------------------------------------


class PowerCut(Exception):
    """In place of a crash."""


@pytest.fixture
def dying(monkeypatch):
    """Makes the first call die once it has its answers, which it writes down."""
    heard = []

    def dies(answer):
        def answers(*args, **kwargs):
            heard.append(answer(*args, **kwargs))
            if len(heard) == 1:
                raise PowerCut
            return heard[-1]

        return answers

    for name, row in METHODS.items():
        monkeypatch.setitem(METHODS, name, dataclasses.replace(row, answer=dies(row.answer)))
    monkeypatch.setattr(ensembles.ConfidentGNMax, "answer", dies(ensembles.ConfidentGNMax.answer))
    return heard


PATE = ensembles.ConfidentGNMax(threshold=2.0, sigma_threshold=2.0, sigma_votes=2.0)
DOORS = {
    "one model": lambda **given: prediction.private_predict(
        Bounds(1, 0), one_logit, queries(60), epsilon=0.3, **given
    ),
    "ensemble": lambda **given: prediction.private_predict(
        [Bounds(1, 0), Bounds(0, 0)], one_logit, queries(60), epsilon=0.3, **given
    ),
    "values": lambda **given: prediction.private_values(
        value_bounds(60, (0, 1)),
        value_of,
        queries(60),
        epsilon=0.3,
        output_range=(0.0, 9.0),
        **given,
    ),
    "PATE": lambda **given: prediction.pate_predict(
        [{"w": jnp.float32(w)} for w in (0, 0, 1, 1)],
        one_logit,
        queries(60),
        mechanism=PATE,
        max_answers=40,
        **given,
    ),
}
ONCE = {"PATE": PATE.event(60, max_answers=40)}


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_what_is_asked_again_after_a_crash_is_the_same_and_is_charged_once(
    certified, dying, tmp_path, door
):
    ledger, ask = ledger_for(), DOORS[door]
    with pytest.raises(PowerCut):
        ask(account=account(ledger), workdir=tmp_path)
    assert (tmp_path / "secret_seed").exists()
    found, again = (ask(account=account(ledger), workdir=tmp_path) for _ in range(2))
    assert len(dying) == 2 and (dying[0] == dying[1]).all()  # the third call computes nothing
    assert (found == dying[0]).all() and (again == found).all() and again.dtype == found.dtype
    once = composition(ONCE.get(door, prediction.event(60, epsilon=0.3)))
    assert composition(ledger.events("data")[None]) == once
    assert not list(tmp_path.rglob("secret_seed"))
    # Without the workdir, asked again is charged again.
    ask(account=account(ledger))
    assert composition(ledger.events("data")[None]) == {
        event: 2 * count for event, count in once.items()
    }


def scaled(factor):
    return lambda params, query: factor * one_logit(params, query)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "pays"),
    [
        ({}, 1),
        ({"bounds": Bounds(1, 0, params=0.9999)}, 2),
        ({"bounds": Bounds(1, 0, upper=np.float32(1))}, 2),
        ({"bounds": Bounds(1, 0, ks=(0, 1))}, 2),
        ({"bounds": [Bounds(1, 0)] * 2}, 2),
        ({"queries": {"x": np.ones((60, 2), np.float32)}}, 2),
        ({"apply_fn": scaled(1.5)}, 2),
        ({"epsilon": 0.25}, 2),
        ({"mechanism": "smooth_cauchy"}, 2),
        ({"flags": " --xla_cpu_enable_fast_math=true"}, 2),
    ],
)
def test_what_is_changed_after_a_crash_draws_fresh_noise_and_pays_again(
    certified, dying, tmp_path, monkeypatch, change, pays
):
    ledger = ledger_for()
    given = {
        "bounds": Bounds(1, 0),
        "apply_fn": scaled(1.0),
        "queries": queries(60),
        "epsilon": 0.3,
    }
    given |= {"account": account(ledger), "workdir": tmp_path}
    with pytest.raises(PowerCut):
        prediction.private_predict(**given)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + change.get("flags", ""))
    prediction.private_predict(
        **given | {name: value for name, value in change.items() if name != "flags"}
    )
    assert (dying[0] == dying[1]).all() == (pays == 1)
    assert sum(composition(ledger.events("data")[None]).values()) == 60 * pays
    assert not list(tmp_path.rglob("secret_seed"))


def test_kept_answers_belong_to_one_call(certified, tmp_path):
    ledger = ledger_for()
    predict(Bounds(1, 0), 9, ledger, workdir=tmp_path)
    for change in (
        {"n": 10},
        {"epsilon": 0.4},
        {"bounds": Bounds(1, 0, params=0.5)},
        {"mechanism": "global_response"},
    ):
        with pytest.raises(ValueError, match="keeps another release"):
            predict(
                **{"bounds": Bounds(1, 0), "n": 9, "ledger": ledger, "workdir": tmp_path} | change
            )
    assert sum(composition(ledger.events("data")[None]).values()) == 9


@pytest.mark.slow
@pytest.mark.parametrize("door", ["one model", "PATE"])
def test_a_model_that_calls_back_to_python_is_charged_again_after_a_crash(
    certified, dying, tmp_path, door
):
    def calling(params, query):
        logit = one_logit(params, query)
        return jax.pure_callback(
            lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), logit, vmap_method="sequential"
        )

    ledger = ledger_for()
    ask = {
        "one model": lambda: prediction.private_predict(
            Bounds(1, 0),
            calling,
            queries(60),
            epsilon=0.3,
            account=account(ledger),
            workdir=tmp_path,
        ),
        "PATE": lambda: prediction.pate_predict(
            [{"w": jnp.float32(1)}] * 4,
            calling,
            queries(60),
            mechanism=PATE,
            max_answers=40,
            account=account(ledger),
            workdir=tmp_path,
        ),
    }[door]
    with pytest.raises(PowerCut):
        ask()
    found = ask()
    assert (dying[0] != dying[1]).any() and (ask() == found).all() and len(dying) == 2
    once = composition(ONCE.get(door, prediction.event(60, epsilon=0.3)))
    assert composition(ledger.events("data")[None]) == {
        event: 2 * count for event, count in once.items()
    }


CHILD = """
import os, signal, sys
import jax.numpy as jnp
import numpy as np
import jaxdp
from jaxdp.prediction import METHODS, Mechanism, mechanisms, private_predict, train_with_bounds

path, workdir, dies = sys.argv[1], sys.argv[2], sys.argv[3] == "dies"
answer = mechanisms.randomised_response

def answers(*args, **kwargs):
    found = answer(*args, **kwargs)
    print("".join(map(str, found)), flush=True)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

METHODS["randomised_response"] = Mechanism("labels", answers)
rng = np.random.default_rng(0)
features = rng.normal(size=(40, 2)).astype(np.float32)
data = {"x": features, "y": rng.integers(0, 2, 40).astype(np.float32)}
logit = lambda params, x: x @ params["w"]
loss = lambda params, one: jaxdp.losses.sigmoid_cross_entropy(logit(params, one["x"]), one["y"])
settings = {"ks": 3, "clip": 0.2, "learning_rate": 1.0, "batch_size": 40, "epochs": 1}
bounds = train_with_bounds(loss, {"w": jnp.zeros(2)}, data, **settings)
with jaxdp.Ledger(path) as ledger:
    account = ledger.account("data")
    given = private_predict(
        bounds, logit, data["x"], epsilon=0.25, account=account, workdir=workdir
    )
print("".join(map(str, given)))
"""


@pytest.mark.slow
def test_a_kill_between_payment_and_answers_costs_nothing(tmp_path):
    path, workdir = tmp_path / "ledger.sqlite", tmp_path / "answers"
    with jaxdp.Ledger(path) as ledger:  # there is no room for a second time
        ledger.register("data", adjacency="add_remove", unit="example", epsilon=10.0, delta=0.0)
    heard = []
    for how, status in (("dies", -signal.SIGKILL), ("lives", 0), ("lives", 0)):
        run = forked.run(CHILD, path, workdir, how, modules=forked.STAGES)
        assert run.returncode == status, run.stderr
        assert (workdir / "secret_seed").exists() == bool(status)
        heard.append(run.stdout.split())
    (lost,), (repeated, given), (kept,) = heard
    assert lost == repeated == given == kept and set(lost) == {"0", "1"}
    with jaxdp.Ledger(path) as ledger:
        assert ledger.epsilon("data") == 10.0
        assert ledger.report()["datasets"][0]["open"] == []


# --- student ------------------------------------------------------------------------------------


def test_only_answered_queries_become_examples():
    asked, answers = prediction.answered(
        {"x": np.arange(8).reshape(4, 2)}, np.array([1, -1, 0, -1])
    )
    assert (
        asked["x"].tolist() == [[0, 1], [4, 5]]
        and answers.tolist() == [1, 0]
        and answers.dtype == np.int32
    )


@pytest.mark.slow
def test_a_student_learns_from_noisy_answers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2)).astype(np.float32)
    truth = (x @ [1.0, -2.0] > 0).astype(np.int64)
    answers = mechanisms.randomised_response(
        jaxdp.transforms.noise.stream(SEED, "student"),
        truth,
        np.zeros(400, int),
        epsilon=1.0,
        num_classes=2,
    )

    def loss_fn(params, example):
        query, label = example
        return jaxdp.losses.sigmoid_cross_entropy(query["x"] @ params["w"] + params["b"], label)

    start = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    settings = {"optimizer": optax.adam(0.05), "steps": 150, "batch_size": 64, "seed": SEED}
    student = prediction.train_student(
        loss_fn, start, prediction.answered({"x": x}, answers), **settings
    )
    test = rng.normal(size=(2000, 2)).astype(np.float32)
    right = ((test @ student["w"] + student["b"] > 0) == (test @ [1.0, -2.0] > 0)).mean()
    assert (
        answers == truth
    ).mean() < 0.8 and right > 0.9  # The student is better than its teacher's answers.
    again = prediction.train_student(
        loss_fn, start, prediction.answered({"x": x}, answers), **settings
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), student, again))


def test_a_student_needs_examples():
    settings = {"optimizer": optax.sgd(0.1), "steps": 1, "batch_size": 4, "seed": SEED}
    nothing = prediction.answered({"x": np.zeros((3, 2))}, np.full(3, -1))
    with pytest.raises(ValueError, match="examples is empty"):
        prediction.train_student(lambda params, example: 0.0, {}, nothing, **settings)
    with pytest.raises(ValueError, match="examples must be"):
        prediction.train_student(
            lambda params, example: 0.0, {}, {"a": np.zeros(2), "b": np.zeros(3)}, **settings
        )


# --- real certificates --------------------------------------------------------------------------


def logit(params, query):
    return query["x"] @ params["w"]


def logistic_loss(params, example):
    return jaxdp.losses.sigmoid_cross_entropy(logit(params, example), example["label"])


@pytest.mark.slow
def test_a_server_that_answers_query_by_query_compiles_once(caplog, tmp_path):
    """A twin that compiles a function of its own in every call fails."""
    data = {"x": np.eye(4, dtype=np.float32), "label": np.arange(4, dtype=np.float32) % 2}
    settings = {"ks": 2, "clip": 0.2, "learning_rate": 2.0, "batch_size": 4, "epochs": 1}
    bounds = agt.train_with_bounds(logistic_loss, {"w": jnp.zeros(4)}, data, **settings)

    def serve(i):
        noise = {"account": account(), "seed": SEED}
        ask, query = {"epsilon": 1.0, **noise}, {"x": data["x"][i : i + 1]}
        prediction.private_predict(bounds, logit, query, workdir=tmp_path / f"certified {i}", **ask)
        prediction.private_predict(bounds, logit, query, mechanism="global_response", **ask)
        prediction.private_values(bounds, logit, query, output_range=(-1, 1), **ask)
        prediction.pate_predict(
            [bounds.params], logit, query, mechanism=PATE, max_answers=1, **noise
        )

    def compiled(i):
        caplog.clear()
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            serve(i)
        return [
            record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()
        ]

    assert compiled(0) and compiled(1) == []


@pytest.mark.slow
def test_real_bounds_vote_and_answer():
    """Three members on hashed parts: certified labels are those of the models, the answers are
    theirs with noise."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 150)
    x = (rng.normal(size=(150, 2)) * 0.3 + (2 * label - 1)[:, None]).astype(np.float32)
    data = {"x": x, "label": label.astype(np.float32)}
    parts = ensembles.partition_by_hash(data, 3, salt=b"test")
    settings = {"ks": 12, "clip": 0.2, "learning_rate": 2.0, "batch_size": 64, "epochs": 1}
    members = [
        agt.train_with_bounds(logistic_loss, {"w": jnp.zeros(2)}, rows, **settings)
        for rows in (
            jax.tree.map(lambda leaf, part=part: leaf[parts == part], data) for part in range(3)
        )
    ]
    asked = {"x": np.concatenate([x[:30], np.zeros((1, 2), np.float32)])}
    certificates = [agt.certify(member, logit, asked) for member in members]
    for member, certificate in zip(members, certificates, strict=True):
        assert ((asked["x"] @ member.params["w"] > 0) == certificate.label).all()
    votes = np.stack([c.label for c in certificates]), np.stack([c.distance for c in certificates])
    winners, distances = ensembles.vote(*votes, num_classes=2)
    # Unanimous: two members have to change their label.
    assert distances[-1] == 1 and np.median(distances) > 12
    ledger = ledger_for()
    ask = {"account": account(ledger), "seed": SEED}
    answers = prediction.private_predict(members, logit, asked, epsilon=1.0, **ask)
    assert (
        answers[distances > 12] == winners[distances > 12]
    ).all()  # Each flips with probability below 1e-5.
    single = prediction.private_predict(members[0], logit, asked, epsilon=4.0, **ask)
    sure = np.asarray(certificates[0].distance) > 3
    assert sure.sum() > 15 and (single[sure] == np.asarray(certificates[0].label)[sure]).all()
    assert ledger.epsilon("data", delta=0.0) == pytest.approx(31 * 5.0)


def test_a_public_prior_narrows_the_answers_and_costs_the_same():
    """A model whose label is 1 of three classes."""
    ledger = ledger_for()
    prior = np.array([0.48, 0.48, 0.04])
    arguments = {"epsilon": 1.0, "mechanism": "global_response"}
    ask = functools.partial(predict, Bounds(1), 4000, ledger, three_logits, seed=SEED, **arguments)
    counts = np.bincount(ask(prior=prior), minlength=3)
    assert counts[2] == 0  # k* is 2
    assert composition(ledger.events("data")[None]) == {PureDpEvent(1.0): 4000}

    def p_value(epsilon):
        return stats.binomtest(int(counts[1]), 4000, 1 / (1 + math.exp(-epsilon))).pvalue

    assert p_value(1.0) > ACCEPT
    assert max(p_value(0.7), p_value(1.3)) < REJECT
    outside = ask(prior=[0.49, 0.02, 0.49])
    assert stats.binomtest(int((outside == 0).sum()), 4000, 0.5).pvalue > ACCEPT
    assert not (outside == 1).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mechanism": "randomised_response"}, "needs mechanism='global_response'"),
        ({"mechanism": "global_response", "prior": np.full((7, 2), 0.5)}, "for the 50 queries"),
        ({"mechanism": "global_response", "prior": [0.5, 0.6]}, "sum 1"),
    ],
)
def test_a_prior_that_does_not_fit_is_refused_before_anything_is_spent(options, words):
    ledger = ledger_for()
    with pytest.raises(ValueError, match=words):
        predict(Bounds(1), 50, ledger, epsilon=1.0, **{"prior": [0.5, 0.5]} | options)
    assert ledger.events("data") == {}
