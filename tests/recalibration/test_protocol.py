"""The two parties: how much noise, exact sums, what an answer gives away, what a source accepts.

Statistical tests use fixed keys, so they are deterministic; over the choice of key a correct implementation fails one
with probability below 1e-5, and noise scaled by 0.7 or 1.3 is told apart with certainty to the same degree.
"""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.recalibration import AccBisection, AccT, EceT, HistogramBinning, NllT, Source, play, recalibrate
from jaxdp.recalibration.protocol import Records, exact_sums, noise_scale, release, summands
from jaxdp.transforms import noise

KEY = noise.stream(bytes(range(16)), "test")
METHODS = [
    AccT(),
    AccT(iterations=1),
    AccT(split=True),
    AccBisection(iterations=7, split=True),
    NllT(),
    NllT(bound=0.3),
    NllT(bound=16.0),
    NllT(bound=512.0),
    EceT(),
    HistogramBinning(form="published"),
]


def people(n, m=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, m)).astype(np.float32) * 3, rng.integers(0, m, n)


def scale_of(method, epsilon, adjacency="add_remove", num_classes=5):
    return noise_scale(method, epsilon=epsilon, adjacency=adjacency, num_classes=num_classes)


# --- How much noise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
def test_noise_is_the_sum_of_sensitivities_over_epsilon_and_hardly_more(method, adjacency):
    for m in (2, 10, 1000):
        sensitivities = [method.sensitivity(k, adjacency, m) for k in range(method.rounds)]
        for epsilon in (0.5, 1.0, 8.0, 1e3, 1e6):
            step, scale = scale_of(method, epsilon, adjacency, m)
            assert math.log2(step) == int(math.log2(step)) and 2**-10 <= step <= 2**-4
            # In steps, every round's rounded up: each round is (its steps / scale)-DP and these add up to epsilon.
            assert scale == sum(math.ceil(s / step) for s in sensitivities) / epsilon
            assert sum(sensitivities) <= scale * step * epsilon <= sum(sensitivities) + method.rounds * step
            assert step <= max(scale * step / 1000, 2**-10, 2 * max(sensitivities) / 2**13)
            # A sum of 2**17 records with noise of 45 scales is an int32.
            assert 2**17 * math.ceil(max(sensitivities) / step) + 45 * scale < 2**31


def test_without_noise_there_is_no_scale():
    assert scale_of(AccT(), math.inf) is None


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_smallest_epsilon_is_named_and_works(method):
    with pytest.raises(ValueError, match=r"epsilon=1e-09 needs more noise .* use at least") as error:
        scale_of(method, 1e-9)
    smallest = float(re.search(r"at least (.*)\.$", str(error.value))[1])
    assert scale_of(method, smallest).noise <= noise.LARGEST_DISCRETE_SCALE
    for epsilon in (math.nextafter(smallest, 0.0), 1e-300, 5e-324):
        with pytest.raises(ValueError, match="needs more noise"):
            scale_of(method, epsilon)


def test_impossible_noise_is_refused():
    for epsilon in (0.0, -1.0, math.nan, -math.inf):
        with pytest.raises(ValueError, match=rf"epsilon must be > 0 \(math.inf for no noise\), got {epsilon}"):
            scale_of(AccT(), epsilon)
    with pytest.raises(ValueError, match=r"adjacency must be one of .* got 'substitute'"):
        scale_of(AccT(), 1.0, "substitute")
    with pytest.raises(ValueError, match=r"NllT.* sensitivity of 513.0; exact sums hold at most 512"):
        scale_of(NllT(bound=513.0), 1.0)


# --- Exact sums -------------------------------------------------------------------------------------------------------


def sums_of(method, k, logits, labels, owner, sources, scale, temperature=1.3):
    added = summands(method, k, Records(jnp.asarray(logits), jnp.asarray(labels)), jnp.float32(temperature))
    return np.asarray(exact_sums(added, jnp.asarray(owner), sources, scale))


@pytest.mark.parametrize("method", [AccT(), NllT(), EceT(), HistogramBinning()], ids=repr)
def test_sums_are_exact_integers_in_any_order_of_records(method):
    logits, labels = people(500)
    owner = np.sort(np.random.default_rng(1).choice([0, 1, 3], 500)).astype(np.int32)  # the source 2 is empty
    scale = scale_of(method, 1.0)
    sums = sums_of(method, 0, logits, labels, owner, 4, scale)
    assert sums.dtype == np.int32 and (sums[2] == 0).all() and (sums[[0, 1, 3]] != 0).any(1).all()
    added = np.asarray(summands(method, 0, Records(jnp.asarray(logits), jnp.asarray(labels)), jnp.float32(1.3)))
    in_steps = np.rint(added.astype(np.float64) / scale.step).astype(np.int64)
    assert (sums == [in_steps[owner == i].sum(0) for i in range(4)]).all()
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(500)
        assert (sums == sums_of(method, 0, logits[order], labels[order], owner[order], 4, scale)).all()


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_neighbouring_sources_differ_by_the_stated_number_of_steps(adjacency):
    logits, labels = people(80, m=3)
    logits[:20] *= 1e3
    logits[20:40] *= 1e-3
    everyone = np.zeros(80, np.int32)
    for method in (AccT(split=True), AccT(), NllT(bound=1.3), EceT(), HistogramBinning(form="published")):
        scale = scale_of(method, 2.0, adjacency, 3)
        for k in (0, method.rounds - 1):
            allowed = math.ceil(method.sensitivity(k, adjacency, 3) / scale.step)
            sums = sums_of(method, k, logits, labels, everyone, 1, scale)
            largest = 0
            for gone in range(0, 80, 3):
                others = np.arange(80) != gone
                if adjacency == "replace_one":
                    others = np.where(others, np.arange(80), (7 * gone + 5) % 80)
                without = sums_of(method, k, logits[others], labels[others], everyone[: len(labels[others])], 1, scale)
                largest = max(largest, np.abs(sums - without).sum())
            assert 0 < largest <= allowed


def test_the_largest_source_with_the_largest_contributions_stays_in_range():
    n = 2**17
    for bound, epsilon in ((16.0, 1e4), (512.0, 1e4)):
        method = NllT(bound=bound)
        scale = scale_of(method, epsilon, num_classes=2)
        added = jnp.full((n, 1), bound)
        (total,) = exact_sums(added, jnp.zeros(n, jnp.int32), 1, scale)[0]
        assert int(total) == n * bound / scale.step
        assert float(release(KEY, total[None, None], scale)[0, 0]) == pytest.approx(n * bound, rel=1e-6)


# --- What an answer gives away ----------------------------------------------------------------------------------------

DRAWS = 400_000


def answers(method, source, epsilon, key, rounds=1):
    """Many independent answers of a source in the first rounds, float64 [rounds, DRAWS, s]."""
    scale = scale_of(method, epsilon, num_classes=source.logits.shape[1])
    records = Records(jnp.asarray(source.logits), jnp.asarray(source.labels))
    out = []
    for k in range(rounds):
        added = summands(method, k, records, jnp.float32(1.0))
        exact = exact_sums(added, jnp.zeros(len(added), jnp.int32), 1, scale)
        many = jnp.broadcast_to(exact, (DRAWS, exact.shape[1]))
        out.append(np.asarray(release(jax.random.fold_in(key, k), many, scale), np.float64))
    return np.stack(out)


def log_ratio(first, second):
    """log of the ratio of two events' frequencies among DRAWS each, and five standard errors of it."""
    a, b = first.sum(), second.sum()
    return math.log(a / b), 5 * math.sqrt((1 - a / DRAWS) / a + (1 - b / DRAWS) / b)


def test_likelihood_ratios_of_neighbours_stay_within_epsilon_and_reach_it():
    epsilon, method = 0.5, HistogramBinning(bins=1)
    logits, labels = np.tile(np.float32([[2.0, 0.0]]), (6, 1)), np.array([0, 0, 0, 1, 1, 0])
    one = answers(method, Source(logits, labels), epsilon, jax.random.fold_in(KEY, 1))[0, :, 0]
    two = answers(method, Source(logits[:5], labels[:5]), epsilon, jax.random.fold_in(KEY, 2))[0, :, 0]
    edges = np.quantile(np.concatenate([one, two]), np.linspace(0, 1, 21))
    edges[0], edges[-1] = -np.inf, np.inf
    cells = [((low <= one) & (one < high), (low <= two) & (two < high)) for low, high in itertools.pairwise(edges)]
    for cell in cells:
        ratio, error = log_ratio(*cell)
        assert abs(ratio) <= epsilon + error
    for sign in (1, -1):  # beyond both exact answers the ratio is e^epsilon, not less
        ratio, error = log_ratio(
            sign * one > sign * (4.0 if sign > 0 else 3.0), sign * two > sign * (4.0 if sign > 0 else 3.0)
        )
        assert error < 0.03 and abs(sign * ratio - epsilon) <= error  # 0.7 and 1.3 times the noise are 0.71 and 0.38


def test_all_rounds_together_cost_epsilon():
    epsilon, method = 1.0, AccT(iterations=1)
    sure_and_wrong = np.float32([[200.0, 0.0]])
    one = answers(method, Source(sure_and_wrong, np.array([1])), epsilon, jax.random.fold_in(KEY, 3), rounds=2)[..., 0]
    two = answers(method, Source(sure_and_wrong[:0], np.array([], int)), epsilon, jax.random.fold_in(KEY, 4), rounds=2)[
        ..., 0
    ]
    ratio, error = log_ratio((one <= -1).all(0), (two <= -1).all(0))
    assert error < 0.05 and abs(ratio - epsilon) <= error
    (alone, error) = log_ratio(one[1] <= -1, two[1] <= -1)
    assert error < 0.02 and abs(alone - epsilon / 2) <= error
    assert abs(np.corrcoef(one)[0, 1]) < 5 / math.sqrt(DRAWS)  # rounds do not share noise
    assert abs(np.corrcoef(one[0, 1:], one[0, :-1])[0, 1]) < 5 / math.sqrt(DRAWS)  # nor do sources


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 50.0])
def test_the_calibrator_knows_the_variance_of_the_noise(epsilon):
    method = HistogramBinning(bins=1)
    logits, labels = people(3, m=2)
    drawn = answers(method, Source(logits, labels), epsilon, KEY)[0]
    stated = scale_of(method, epsilon, num_classes=2).variance
    # The fourth moment of a Laplace variable is 6 times the squared variance.
    assert drawn.var(0) == pytest.approx(np.full(2, stated), rel=5 * math.sqrt(5 / DRAWS))
    exact = answers(method, Source(logits, labels), math.inf, KEY)[0, 0]
    np.testing.assert_allclose(drawn.mean(0), exact, atol=5 * math.sqrt(stated / DRAWS))


# --- Sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "labels", "error", "words"),
    [
        (np.zeros(7, np.float32), np.zeros(7, int), ValueError, r"logits \[n, m\] with m >= 2"),
        (np.zeros((7, 1), np.float32), np.zeros(7, int), ValueError, "m >= 2"),
        (np.zeros((7, 3), np.float32), np.zeros(6, int), ValueError, "labels"),
        (np.zeros((7, 3), np.float32), np.zeros((7, 1), int), ValueError, "labels"),
        (np.zeros((7, 3), int), np.zeros(7, int), TypeError, "floating-point logits .* got int64"),
        (np.zeros((7, 3), np.float32), np.zeros(7), TypeError, "integer labels, got float32 and float64"),
    ],
)
def test_impossible_sources_are_refused_without_their_size(logits, labels, error, words):
    with pytest.raises(error, match=words) as raised:
        Source(logits, labels, account="clinic")
    assert "'clinic'" in str(raised.value) and not re.search(r"\b[67]\b", str(raised.value))


def test_too_many_records_for_exact_sums_are_refused():
    with pytest.raises(ValueError, match="more than 131072 records; divide it"):
        Source(np.zeros((2**17 + 1, 2), np.float32), np.zeros(2**17 + 1, np.int32))


def test_a_source_shows_nothing_of_its_records():
    assert repr(Source(*people(7), account="clinic")) == "Source(account='clinic')"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("label_dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_any_floating_point_logits_and_integer_labels_do(dtype, label_dtype):
    logits, labels = people(20)
    source = Source(logits.astype(dtype), labels.astype(label_dtype))
    assert source.logits.dtype == np.float32 and source.labels.dtype == np.int32
    assert (source.logits == logits.astype(dtype).astype(np.float32)).all() and (source.labels == labels).all()


def test_values_beyond_32_bits_are_invalid_not_other_values():
    logits = np.array([[1e300, 0.0], [0.0, -1e300], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    for wide, dtype in ((2**32 + 1, np.int64), (2**64 - 1, np.uint64), (2**63 + 1, np.uint64), (-(2**40), np.int64)):
        source = Source(logits, np.array([0, 0, wide, wide, 0, 1], dtype))
        records = Records(jnp.asarray(source.logits), jnp.asarray(source.labels))
        assert records.valid.tolist() == [False] * 4 + [True] * 2


# --- A source over a network ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [AccT(split=True), HistogramBinning()], ids=repr)
def test_answers_of_separate_sources_play_the_same_conversation(method):
    parties = [Source(*people(40, seed=i)) for i in range(3)] + [Source(*people(0))]

    def converse(epsilon, variance):
        keys = jax.random.split(KEY, len(parties))
        talks = [party.begin(method, epsilon=epsilon, key=key) for party, key in zip(parties, keys, strict=True)]
        return play(method, lambda k, t: jnp.asarray(sum(talk.answer(float(t)) for talk in talks)), variance)

    exact = converse(math.inf, 0.0)
    together = recalibrate(method, parties, epsilon=math.inf).parameters
    np.testing.assert_allclose(np.hstack(exact), np.hstack(together), rtol=1e-5, atol=1e-5)
    noisy, again = (converse(1.0, scale_of(method, 1.0).variance * len(parties)) for _ in range(2))
    assert np.isfinite(np.hstack(noisy)).all()
    assert (np.hstack(noisy) == np.hstack(again)).all()
    if isinstance(method, AccT):
        assert 0.5 < float(noisy.temperature) < 3.0


def test_an_answer_is_the_exact_sum_plus_noise_in_whole_steps():
    source, method = Source(*people(60)), AccT()
    scale, exact, noisy = (
        scale_of(method, 1.0),
        source.begin(method, epsilon=math.inf),
        source.begin(method, epsilon=1.0),
    )
    drawn = []
    for _ in range(method.rounds):
        answer = noisy.answer(1.5)
        assert answer.shape == (1,) and answer.dtype == np.float32
        assert (answer / scale.step == np.rint(answer / scale.step)).all()
        drawn.append(float((answer - exact.answer(1.5))[0]))
    assert len(set(drawn)) == method.rounds and np.abs(drawn).max() < 40 * scale.noise * scale.step


def test_a_conversation_is_paid_once_before_its_first_answer():
    source, method = Source(*people(20), account="clinic"), AccT(iterations=2)
    with Ledger.in_memory() as ledger:
        ledger.register("clinic", adjacency="add_remove", unit="patient", epsilon=1.5, delta=0.0)
        with pytest.raises(ValueError, match="registered with 'add_remove'"):
            source.begin(method, epsilon=1.0, adjacency="replace_one", ledger=ledger)
        with pytest.raises(ValueError, match="needs an account"):
            Source(*people(20)).begin(method, epsilon=1.0, ledger=ledger)
        assert ledger.epsilon("clinic") == 0.0
        talk = source.begin(method, epsilon=1.0, ledger=ledger)
        assert ledger.epsilon("clinic") == 1.0
        other = Source(*people(20)).begin(method, epsilon=1.0)
        assert talk.answer(1.0) != other.answer(1.0)  # without a key, noise of its own
        with pytest.raises(BudgetExceeded):
            source.begin(method, epsilon=1.0, ledger=ledger)
        assert ledger.epsilon("clinic") == 1.0


def test_a_hostile_calibrator_gets_no_more_rounds_and_no_odd_sums():
    source, method = Source(*people(60)), AccT(iterations=2)
    for epsilon in (math.inf, 1.0):
        strange = [math.nan, 0.0, -1.0, 1e-40, math.inf, -math.inf]
        for first, second, third in (strange[:3], strange[3:]):
            talk = source.begin(method, epsilon=epsilon)
            answers = np.array([talk.answer(first), talk.answer(second), talk.answer(third)])
            assert np.isfinite(answers).all() and (epsilon < math.inf or np.abs(answers).max() <= 60)
            with pytest.raises(RuntimeError, match="all 3 rounds are answered"):
                talk.answer(1.0)
