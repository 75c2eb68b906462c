"""Ensembles: the vote's distance by exhaustive enumeration, the partition, and the noise of the
baselines.

Statistical tests use fixed keys; a correct implementation fails with probability below 1e-5 per
test over the choice of key, and one whose noise is off by 0.7 or 1.3 is rejected."""

import collections
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp.prediction import ensembles
from jaxdp.privacy import epsilon as epsilon_at
from jaxdp.privacy.events import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from jaxdp.transforms import noise

SEED = bytes(range(16))
ACCEPT, REJECT = 1e-6, 1e-9


def key(purpose):
    return noise.stream(SEED, purpose)


# --- vote ---------------------------------------------------------------------------------------


def steps_of(member, num_classes, farthest):
    """Yields each (label, distance) of a member after a change of one record."""
    label, distance = member
    yield from ((label, k) for k in (distance - 1, distance + 1) if 0 <= k <= farthest)
    if distance == 0:
        yield from ((other, 0) for other in range(num_classes) if other != label)


def graph(members, num_classes, farthest):
    """Returns all states of an ensemble, and for each state the indices of the states one changed
    record away."""
    single = list(itertools.product(range(num_classes), range(farthest + 1)))
    states = list(itertools.product(single, repeat=members))
    index = {state: i for i, state in enumerate(states)}
    neighbours = [
        [
            index[(*state[:i], changed, *state[i + 1 :])]
            for i in range(members)
            for changed in steps_of(state[i], num_classes, farthest)
        ]
        for state in states
    ]
    labels = np.array([[label for label, _ in state] for state in states]).T
    distances = np.array([[k for _, k in state] for state in states]).T
    return labels, distances, neighbours


def violations(label, distance, neighbours):
    """Returns the number of neighbouring states that break the condition of a mechanism."""
    bad = 0
    for i, near in enumerate(neighbours):
        for j in near:
            bad += abs(int(distance[i]) - int(distance[j])) > 1
            bad += label[i] != label[j] and (distance[i] > 0 or distance[j] > 0)
    return bad


SIZES = [
    (1, 2, 3),
    (2, 2, 4),
    (3, 2, 3),
    (4, 2, 2),
    (5, 2, 1),
    (6, 2, 1),
    (2, 3, 3),
    (3, 3, 2),
    (4, 3, 2),
    (3, 4, 1),
    (5, 3, 0),
]


@pytest.mark.parametrize(("members", "num_classes", "farthest"), SIZES)
def test_the_vote_is_lipschitz_for_every_ensemble_and_every_step(members, num_classes, farthest):
    labels, distances, neighbours = graph(members, num_classes, farthest)
    label, distance = ensembles.vote(labels, distances, num_classes=num_classes)
    assert label.dtype == distance.dtype == np.int32 and label.shape == (labels.shape[1],)
    assert violations(label, distance, neighbours) == 0
    counts = np.stack([(labels == c).sum(axis=0) for c in range(num_classes)])
    assert (label == counts.argmax(axis=0)).all()
    ties = (counts == counts.max(axis=0)).sum(axis=0) > 1
    assert (distance[ties] == 0).all()


@pytest.mark.parametrize(("members", "num_classes", "farthest"), SIZES)
def test_the_votes_distance_is_the_length_of_the_shortest_way_out(members, num_classes, farthest):
    """Breadth-first search from the states in which another class has as many votes: nothing is
    given away."""
    labels, distances, neighbours = graph(members, num_classes, farthest)
    label, distance = ensembles.vote(labels, distances, num_classes=num_classes)
    counts = np.stack([(labels == c).sum(axis=0) for c in range(num_classes)])
    for winner in range(num_classes):
        rivals = np.delete(counts, winner, axis=0).max(axis=0)
        length = {i: 0 for i in np.flatnonzero(rivals >= counts[winner]).tolist()}
        queue = collections.deque(length)
        while queue:
            i = queue.popleft()
            for j in neighbours[i]:
                if j not in length:
                    length[j] = length[i] + 1
                    queue.append(j)
        for i in np.flatnonzero(label == winner):
            assert distance[i] == max(length[int(i)] - 1, 0)


def simple_vote(labels, distances, num_classes, *, winners_only):
    """Returns the n = ceil((n_1 - n_2) / 2) smallest distances plus n - 1. Right for two classes
    and winners_only."""
    counts = np.stack([(labels == c).sum(axis=0) for c in range(num_classes)])
    winner = counts.argmax(axis=0)
    ordered = np.sort(counts, axis=0)
    need = -((ordered[-2] - ordered[-1]) // 2)
    away = np.where((labels == winner) | (not winners_only), distances, 10**6)
    total = [
        np.sort(away[:, q])[: need[q]].sum() + need[q] - 1 if need[q] else 0
        for q in range(labels.shape[1])
    ]
    return winner, np.array(total)


@pytest.mark.parametrize(("members", "farthest"), [(1, 3), (3, 3), (4, 2), (6, 1)])
def test_two_classes_give_theorem_5_3(members, farthest):
    labels, distances, _ = graph(members, 2, farthest)
    label, distance = ensembles.vote(labels, distances, num_classes=2)
    expected = simple_vote(labels, distances, 2, winners_only=True)
    assert (label == expected[0]).all() and (distance == expected[1]).all()


def test_the_enumeration_rejects_two_shortcuts():
    labels, distances, neighbours = graph(4, 2, 2)
    assert violations(*simple_vote(labels, distances, 2, winners_only=False), neighbours) > 0
    labels, distances, neighbours = graph(4, 3, 2)
    assert violations(*simple_vote(labels, distances, 3, winners_only=True), neighbours) > 0


def test_third_parties_are_counted():
    # Six sure voters for 0, four for 1, and two for 2 that one record each can move to 1.
    labels = np.repeat([0, 1, 2], [6, 4, 2])[:, None]
    distances = np.where(labels == 2, 0, 100)
    assert ensembles.vote(labels, distances, num_classes=3)[1] == [1]
    assert ensembles.vote(labels, np.full_like(distances, 100), num_classes=3)[1] == [100]


def test_many_members_queries_and_huge_distances():
    rng = np.random.default_rng(3)
    labels, distances = rng.integers(0, 10, (100, 50)), rng.integers(0, 2000, (100, 50))
    label, distance = ensembles.vote(labels, distances, num_classes=10)
    assert label.shape == distance.shape == (50,)
    unanimous = ensembles.vote(np.zeros((7, 1), int), np.full((7, 1), 2**31 - 1), num_classes=2)
    assert unanimous[0] == [0] and unanimous[1] == [2**31 - 1]


@pytest.mark.parametrize(
    ("labels", "distances", "match"),
    [
        ([[0, 1]], [[0]], r"must be \[T, Q\]"),
        ([0, 1], [0, 1], r"must be \[T, Q\]"),
        (np.zeros((0, 2), int), np.zeros((0, 2), int), "T >= 1"),
        ([[0.5]], [[1]], "must be integers"),
        ([[2]], [[1]], "num_classes=2"),
        ([[0]], [[-7]], "distances must be >= 0"),
    ],
)
def test_vote_refuses(labels, distances, match):
    with pytest.raises(ValueError, match=match) as info:
        ensembles.vote(labels, distances, num_classes=2)
    assert "-7" not in str(info.value)


# --- partition ----------------------------------------------------------------------------------


def records(n, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(n, 3)).astype(np.float32),
        "label": rng.integers(0, 2, n).astype(np.int32),
    }


def rows(tree, index):
    return {name: leaf[index] for name, leaf in tree.items()}


def test_a_record_keeps_its_part_whatever_the_others():
    data = records(500)
    parts = ensembles.partition_by_hash(data, 7, salt=b"v1")
    assert parts.dtype == np.int32 and parts.shape == (500,)
    some = np.random.default_rng(1).permutation(500)[:123]
    assert (ensembles.partition_by_hash(rows(data, some), 7, salt=b"v1") == parts[some]).all()
    twice = ensembles.partition_by_hash(rows(data, np.r_[0:500, 0:500]), 7, salt=b"v1")
    assert (twice[:500] == twice[500:]).all()


@pytest.mark.parametrize("dtype", [np.str_, np.bytes_])
def test_a_text_keeps_its_part_whatever_the_longest_text(dtype):
    """NumPy gives a text column the width of its longest text, which may be of another record."""
    texts = np.array(
        [f"visit {'x' * (i % 5)}{i}" for i in range(60)] + ["much longer than every other one"],
        dtype,
    )
    data = {"text": texts, "pair": np.stack([texts, texts[::-1]], axis=1), "x": np.arange(61.0)}
    parts = ensembles.partition_by_hash(data, 7, salt=b"v1")
    assert len(set(parts.tolist())) == 7
    for i in (0, 30, 60):
        fewer = {name: np.array(np.delete(leaf, i, axis=0).tolist()) for name, leaf in data.items()}
        assert (ensembles.partition_by_hash(fewer, 7, salt=b"v1") == np.delete(parts, i)).all()


def test_parts_are_balanced_and_depend_on_every_byte_and_on_the_salt():
    data = records(7000)
    parts = ensembles.partition_by_hash(data, 7, salt=b"v1")
    assert stats.chisquare(np.bincount(parts, minlength=7)).pvalue > ACCEPT
    for other in (
        ensembles.partition_by_hash(data, 7, salt=b"v2"),
        ensembles.partition_by_hash({**data, "label": 1 - data["label"]}, 7, salt=b"v1"),
        ensembles.partition_by_hash(
            {**data, "x": np.nextafter(data["x"], np.float32(9))}, 7, salt=b"v1"
        ),
    ):
        assert stats.binomtest(int((other == parts).sum()), 7000, 1 / 7).pvalue > ACCEPT
    assert (ensembles.partition_by_hash(data, 1, salt=b"v1") == 0).all()


def test_an_identity_keeps_its_part_when_its_content_is_replaced():
    ids = [f"patient {i}" for i in range(50)] * 2
    parts = ensembles.partition_by_hash(records(100), 5, salt=b"v1", ids=ids)
    assert (
        parts == ensembles.partition_by_hash(records(100, seed=1), 5, salt=b"v1", ids=ids)
    ).all()
    assert (parts[:50] == parts[50:]).all() and len(set(parts.tolist())) == 5
    # The type of an identity does not depend on the other identities.
    data = records(3)
    numbers = ensembles.partition_by_hash(data, 1000, salt=b"v1", ids=[1, 2, 3])
    mixed = ensembles.partition_by_hash(data, 1000, salt=b"v1", ids=[1, 2, "x"])
    assert (numbers[:2] == mixed[:2]).all()
    assert (
        numbers == ensembles.partition_by_hash(data, 1000, salt=b"v1", ids=np.arange(1, 4))
    ).all()
    # Broken twin: a person whose id is a number in one file and text in another was in two parts.
    assert (
        numbers == ensembles.partition_by_hash(data, 1000, salt=b"v1", ids=["1", " 2", b"3"])
    ).all()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"parts": 0}, ValueError, "parts must be"),
        ({"parts": 2.0}, ValueError, "parts must be"),
        ({"salt": b""}, ValueError, "salt must be"),
        ({"salt": "text"}, ValueError, "salt must be"),
        ({"ids": [1]}, ValueError, "one identity for each record"),
        ({"ids": [1.5, 2.5]}, TypeError, "ids must have identifiers"),
        ({"records": {"x": np.zeros((2, 1)), "y": np.zeros(3)}}, ValueError, "different lengths"),
        ({"records": {}}, ValueError, "records must be"),
        (
            {"records": {"x": np.array(["a", "b"], object)}},
            TypeError,
            "numbers or texts, got dtype object",
        ),
        (
            {"records": {"x": np.zeros(2, [("a", "U3"), ("b", "i4")])}},
            TypeError,
            "pass each field as a leaf",
        ),
    ],
)
def test_partition_refuses(change, error, match):
    arguments = {"records": {"x": np.zeros((2, 3))}, "parts": 2, "salt": b"v1", **change}
    with pytest.raises(error, match=match):
        ensembles.partition_by_hash(**arguments)


# --- baselines ----------------------------------------------------------------------------------

QUERIES = 40_000


def split_votes(*counts):
    return np.tile(np.repeat(np.arange(len(counts)), counts)[:, None], (1, QUERIES))


def laplace_difference(gap, scale):
    """Returns P(gap + difference of two Laplace variables < 0)."""
    x = gap / scale
    return math.exp(-x) * (0.5 + x / 4)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [1, 2])
def test_laplace_vote_has_its_noise(changed):
    epsilon, votes = 0.8, split_votes(9, 5)
    answers = ensembles.laplace_vote(
        key(f"laplace {changed}"), votes, epsilon=epsilon, num_classes=2, changed_members=changed
    )
    assert answers.shape == (QUERIES,) and answers.dtype == np.int32
    wrong = int((answers == 1).sum())

    def p_value(factor):
        return stats.binomtest(
            wrong, QUERIES, laplace_difference(4, factor * 2 * changed / epsilon)
        ).pvalue

    assert p_value(1.0) > ACCEPT and p_value(0.7) < REJECT and p_value(1.3) < REJECT


@pytest.mark.slow
def test_confident_gnmax_has_its_noise():
    mechanism = ensembles.ConfidentGNMax(threshold=10.0, sigma_threshold=2.0, sigma_votes=3.0)
    votes = split_votes(9, 5, 0)
    answers = mechanism.answer(key("gnmax"), votes, num_classes=3, max_answers=QUERIES)
    passed = answers >= 0
    assert stats.binomtest(int(passed.sum()), QUERIES, stats.norm.sf(0.5)).pvalue > ACCEPT
    for factor in (0.7, 1.3):
        assert (
            stats.binomtest(int(passed.sum()), QUERIES, stats.norm.sf(0.5 / factor)).pvalue < REJECT
        )
    # Of two classes that are left, by the difference of two normals; the third is far below.
    two = mechanism.answer(key("two"), split_votes(9, 5), num_classes=2, max_answers=QUERIES)
    wrong, total = int((two == 1).sum()), int((two >= 0).sum())
    assert stats.binomtest(wrong, total, stats.norm.sf(4 / (3 * math.sqrt(2)))).pvalue > ACCEPT
    for factor in (0.7, 1.3):
        assert (
            stats.binomtest(wrong, total, stats.norm.sf(4 / (factor * 3 * math.sqrt(2)))).pvalue
            < REJECT
        )


@pytest.mark.slow
def test_confident_gnmax_answers_no_more_than_planned_and_in_order():
    mechanism = ensembles.ConfidentGNMax(threshold=3.0, sigma_threshold=0.01, sigma_votes=0.01)
    sure, split = np.zeros((4, 1), int), np.array([[0], [0], [1], [1]])
    votes = np.hstack([split, sure, split, sure, sure])
    assert mechanism.answer(key("order"), votes, num_classes=2, max_answers=2).tolist() == [
        -1,
        0,
        -1,
        0,
        -1,
    ]
    assert mechanism.answer(key("order"), votes, num_classes=2, max_answers=5).tolist() == [
        -1,
        0,
        -1,
        0,
        0,
    ]


def test_confident_gnmax_costs_its_two_gaussians():
    mechanism = ensembles.ConfidentGNMax(threshold=10.0, sigma_threshold=20.0, sigma_votes=8.0)
    event = mechanism.event(100, max_answers=30)
    expected = ComposedDpEvent(
        [
            SelfComposedDpEvent(GaussianDpEvent(20.0), 100),
            SelfComposedDpEvent(GaussianDpEvent(8 / math.sqrt(2)), 30),
        ]
    )
    assert event == expected
    # A zeroed record may leave one member and enter another, which the accountant does not double.
    halves = ensembles.ConfidentGNMax(threshold=10.0, sigma_threshold=10.0, sigma_votes=4.0)
    doubled = mechanism.event(100, max_answers=30, adjacency="zero_out")
    assert doubled == halves.event(100, max_answers=30)
    assert mechanism.event(100, max_answers=30, adjacency="replace_one") == expected
    # One changed vote moves two counts: as Gaussian DP, mu^2 = 100 / 20^2 + 30 * 2 / 8^2.
    single = GaussianDpEvent((100 / 400 + 60 / 64) ** -0.5)
    for adjacency in ("add_remove", "replace_one"):
        at = {"delta": 1e-5, "adjacency": adjacency}
        assert epsilon_at(event, **at) == pytest.approx(epsilon_at(single, **at), rel=1e-3)


@pytest.mark.parametrize("scalar", [np.float32, np.float16, jnp.bfloat16])
def test_confident_gnmax_charges_for_its_noise_also_of_few_digits(scalar):
    # In 16 bits the quotient by sqrt(2) would be rounded.
    for sigma in (17.7, 8.3):
        mechanism = ensembles.ConfidentGNMax(10.0, scalar(sigma), scalar(sigma))
        exact = float(scalar(sigma))
        expected = ensembles.ConfidentGNMax(10.0, exact, exact)
        assert mechanism.event(5, max_answers=2) == expected.event(5, max_answers=2)


def test_confident_gnmax_calibrates():
    plan = {"threshold": 10.0, "queries": 200, "max_answers": 100}
    mechanism = ensembles.ConfidentGNMax.calibrated(**plan, epsilon=3.0, delta=1e-5)
    assert mechanism.sigma_threshold == pytest.approx(3 * mechanism.sigma_votes)
    cost = epsilon_at(mechanism.event(200, max_answers=100), delta=1e-5)
    assert 3.0 * 0.998 < cost <= 3.0
    zeroed = ensembles.ConfidentGNMax.calibrated(
        **plan, epsilon=3.0, delta=1e-5, adjacency="zero_out"
    )
    assert zeroed.sigma_votes == pytest.approx(2 * mechanism.sigma_votes, rel=1e-2)


def test_a_zeroed_record_changes_two_parts_of_a_hash_of_the_content():
    records = {"x": np.arange(1, 41, dtype=np.float32)}
    zeroed = {"x": np.where(np.arange(40) == 7, 0, records["x"])}
    parts = [ensembles.partition_by_hash(some, 10, salt=b"public") for some in (records, zeroed)]
    before, after = parts[0][7], parts[1][7]
    assert before != after and (np.delete(parts[0], 7) == np.delete(parts[1], 7)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ensembles.ConfidentGNMax(math.inf, 1.0, 1.0), "threshold must be"),
        (lambda: ensembles.ConfidentGNMax(1.0, 0.0, 1.0), "sigma_threshold must be"),
        (lambda: ensembles.ConfidentGNMax(1.0, 1.0, math.nan), "sigma_votes must be"),
        (lambda: ensembles.ConfidentGNMax(1.0, 1.0, 1.0).event(5, max_answers=6), "max_answers=6"),
        (lambda: ensembles.ConfidentGNMax(1.0, 1.0, 1.0).event(5, max_answers=0), "max_answers=0"),
        (
            lambda: ensembles.ConfidentGNMax(1.0, 1.0, 1.0).answer(
                key("x"), [[0]], num_classes=2, max_answers=2
            ),
            "max_answers=2",
        ),
        (
            lambda: ensembles.laplace_vote(key("x"), [[0]], epsilon=0.0, num_classes=2),
            "epsilon must be",
        ),
        (
            lambda: ensembles.laplace_vote(
                key("x"), [[0]], epsilon=1.0, num_classes=2, changed_members=3
            ),
            "changed_members must be",
        ),
        (
            lambda: ensembles.ConfidentGNMax.calibrated(
                threshold=1.0, queries=2, max_answers=1, epsilon=1.0, delta=1e-5, ratio=0.0
            ),
            "ratio must be",
        ),
    ],
)
def test_baselines_refuse(call, match):
    with pytest.raises(ValueError, match=match):
        call()
