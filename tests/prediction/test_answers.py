"""Private answers: the ledger comes first, nothing but answers comes back, adjacencies match;
planning; the student.

Certificates are fakes with chosen labels and distances, so that what is tested is what happens to
them."""

import dataclasses
import functools
import math
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

        def each(x):
            if isinstance(x, jax.core.Tracer):
                return jnp.broadcast_to(x.astype(jnp.int32), (n,))
            return jax.device_put(np.full(n, x, np.int32))

        logits = Ends(bounds.lower, bounds.upper)
        return agt.Certificates(each(bounds.label), each(bounds.distance), logits)

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


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_answers_flip_with_the_probability_of_their_distance(certified, distance):
    n, epsilon = 20_000, 0.6
    answers = predict(Bounds(1, distance), n, epsilon=epsilon)
    assert type(answers) is np.ndarray and answers.dtype == np.int32 and len(certified) == 1
    wrong = int((answers != 1).sum())
    p = float(mechanisms.flip_probability(distance, epsilon=epsilon))
    assert stats.binomtest(wrong, n, p).pvalue > ACCEPT
    assert (
        stats.binomtest(wrong, n, 0.7 * p).pvalue < REJECT
        and stats.binomtest(wrong, n, 1.3 * p).pvalue < REJECT
    )


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
def test_values_come_back_noisy(certified, mechanism):
    ask = {"output_range": (0.0, 9.0), "mechanism": mechanism, "seed": SEED}
    bounds = value_bounds(400, tuple(range(60)))
    answers = prediction.private_values(
        bounds, value_of, queries(400), account=account(), epsilon=2.0, **ask
    )
    assert answers.dtype == np.float32 and answers.shape == (400,)
    assert abs(np.median(answers) - 3) < 1.0 and answers.std() > 0.1


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


def test_members_of_other_classes_are_refused_before_anything_is_spent():
    # One member never saw class 2. An error about a vote for it would show the vote.
    def logits(params, query):
        return params["w"] + 0 * query["x"]

    narrow, wide = jnp.array([1.0, 0.0]), jnp.array([0.0, 0.0, 1.0])
    ledger = ledger_for()
    mechanism = ensembles.ConfidentGNMax(threshold=1.0, sigma_threshold=1.0, sigma_votes=1.0)
    with pytest.raises(ValueError, match=r"same number of logits, got \[2, 3\]"):
        prediction.pate_predict(
            [{"w": narrow}, {"w": wide}],
            logits,
            {"x": np.zeros(2, np.float32)},
            account=account(ledger),
            mechanism=mechanism,
            max_answers=1,
        )
    members = [
        prediction.Bounds({"w": w}, {"w": w[None]}, {"w": w[None]}, (0,), "add_remove", (True,))
        for w in (narrow, wide)
    ]
    with pytest.raises(ValueError, match=r"same number of logits, got \[2, 3\]"):
        prediction.private_predict(
            members, logits, {"x": np.zeros(2, np.float32)}, account=account(ledger), epsilon=1.0
        )
    assert not ledger.events("data")


def test_classes_in_place_of_logits_are_refused_before_anything_is_spent():
    """The class of a query was taken for its only logit: every class above 0 became class 1."""

    def classes(params, query):
        return (params["w"] + 0 * query["x"]).argmax()

    w, ledger = jnp.array([0.0, 0.0, 1.0]), ledger_for()
    asked = {"x": np.zeros(2, np.float32)}
    member = prediction.Bounds(
        {"w": w}, {"w": w[None]}, {"w": w[None]}, (0,), "add_remove", (True,)
    )
    mechanism = ensembles.ConfidentGNMax(threshold=1.0, sigma_threshold=1.0, sigma_votes=1.0)
    options = {"account": account(ledger), "mechanism": mechanism, "max_answers": 1}
    for answer in (
        lambda: prediction.certify(member, classes, asked),
        lambda: prediction.private_predict(
            member, classes, asked, account=account(ledger), epsilon=1.0
        ),
        lambda: prediction.pate_predict([{"w": w}] * 2, classes, asked, **options),
    ):
        with pytest.raises(TypeError, match=r"logits, got dtype int32\. Give the logits of all"):
            answer()
    assert not ledger.events("data")


# --- what a crash leaves ------------------------------------------------------------------------


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

    start = {"w": np.zeros(2, np.float32), "b": np.zeros((), np.float32)}
    settings = {"optimizer": optax.adam(0.05), "steps": 150, "batch_size": 64, "seed": SEED}
    train = functools.partial(prediction.train_student, loss_fn, start, **settings)
    student = jax.device_get(train(prediction.answered({"x": x}, answers)))
    test = rng.normal(size=(2000, 2)).astype(np.float32)
    right = ((test @ student["w"] + student["b"] > 0) == (test @ [1.0, -2.0] > 0)).mean()
    assert (
        answers == truth
    ).mean() < 0.8 and right > 0.9  # The student is better than its teacher's answers.
    again = train(prediction.answered({"x": x}, answers))
    jax.tree.map(np.testing.assert_array_equal, student, again)


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
        agt.train_with_bounds(logistic_loss, {"w": np.zeros(2, np.float32)}, rows, **settings)
        for rows in (
            jax.tree.map(lambda leaf, part=part: leaf[parts == part], data) for part in range(3)
        )
    ]
    asked = {"x": np.concatenate([x[:30], np.zeros((1, 2), np.float32)])}
    certificates = [agt.certify(member, logit, asked) for member in members]
    for member, certificate in zip(members, certificates, strict=True):
        labels = asked["x"] @ np.asarray(member.params["w"]) > 0
        np.testing.assert_array_equal(labels, certificate.label)
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
