"""The two parties: how much noise, exact sums, what an answer gives away, what a source accepts.

Statistical tests use fixed keys, so they are deterministic. Over the choice of key a correct
implementation fails one with probability below 1e-5, and noise scaled by 0.7 or 1.3 is told apart
with certainty to the same degree."""

import fractions
import functools
import itertools
import math
import os
import re
import secrets
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import stats

from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.recalibration import (
    AccBisection,
    AccT,
    EceT,
    HistogramBinning,
    NllT,
    Party,
    play,
    recalibrate,
)
from jaxdp.recalibration.protocol import Records, exact_sums, noise_scale, summands, with_noise
from jaxdp.release import Till
from jaxdp.transforms import noise
from tests import forked

KEY = noise.stream(bytes(range(16)), "test")
METHODS = [
    AccT(),
    AccT(iterations=1),
    AccT(search="grid"),
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


def registered(path=":memory:", **terms):
    ledger = Ledger(path)
    ledger.register("clinic", adjacency="add_remove", unit="patient", **terms)
    return ledger


def scale_of(method, epsilon, adjacency="add_remove", num_classes=5):
    return noise_scale(method, epsilon=epsilon, adjacency=adjacency, num_classes=num_classes)


# --- How much noise -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
def test_noise_is_the_sum_of_sensitivities_over_epsilon_and_hardly_more(method, adjacency):
    for m in (2, 10, 1000):
        sensitivities = [method.sensitivity(k, adjacency, m) for k in range(method.rounds)]
        for epsilon in (0.5, 1.0, 8.0, 1e3, 1e6):
            step, scale = scale_of(method, epsilon, adjacency, m)
            assert math.log2(step) == int(math.log2(step)) and 2**-10 <= step <= 2**-4
            # In steps, every round's rounded up: each round is (its steps / scale)-DP and these add
            # up to epsilon.
            least = sum(math.ceil(s / step) for s in sensitivities) / fractions.Fraction(epsilon)
            assert scale == np.float32(scale)
            assert least <= scale <= least * (1 + fractions.Fraction(1, 2**23))
            assert (
                sum(sensitivities)
                <= scale * step * epsilon
                <= (sum(sensitivities) + method.rounds * step) * (1 + 2.0**-23)
            )
            assert step <= max(scale * step / 1000, 2**-10, 2 * max(sensitivities) / 2**13)
            # A sum of 2**17 records with noise of 45 scales is an int32.
            assert 2**17 * math.ceil(max(sensitivities) / step) + 45 * scale < 2**31


def test_without_noise_there_is_no_scale():
    assert scale_of(AccT(), math.inf) is None


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_smallest_epsilon_is_named_and_works(method):
    with pytest.raises(
        ValueError, match=r"epsilon=1e-09 needs more noise .* Use at least"
    ) as error:
        scale_of(method, 1e-9)
    smallest = float(re.search(r"at least (.*)\.$", str(error.value))[1])
    assert scale_of(method, smallest).noise <= noise.LARGEST_DISCRETE_SCALE
    for epsilon in (math.nextafter(smallest, 0.0), 1e-300, 5e-324):
        with pytest.raises(ValueError, match="needs more noise"):
            scale_of(method, epsilon)


def test_impossible_noise_is_refused():
    for epsilon in (0.0, -1.0, math.nan, -math.inf):
        with pytest.raises(
            ValueError, match=rf"epsilon must be > 0 \(math.inf for no noise\), got {epsilon}"
        ):
            scale_of(AccT(), epsilon)
    with pytest.raises(ValueError, match=r"adjacency must be one of .* got 'substitute'"):
        scale_of(AccT(), 1.0, "substitute")
    with pytest.raises(
        ValueError, match=r"NllT.* sensitivity of 513.0. Exact sums hold at most 512"
    ):
        scale_of(NllT(bound=513.0), 1.0)


# --- Exact sums ---------------------------------------------------------------------------------


added_by = jax.jit(summands, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def compiled_sums(method, k, logits, labels, owner, sources, scale, temperature):
    return exact_sums(
        summands(method, k, Records(logits, labels), temperature), owner, sources, scale
    )


def sums_of(method, k, logits, labels, owner, sources, scale, temperature=1.3):
    found = compiled_sums(
        method, k, logits, labels.astype(np.int32), owner, sources, scale, np.float32(temperature)
    )
    return np.asarray(found)


@pytest.mark.slow
@pytest.mark.parametrize("method", [AccT(), NllT(), EceT(), HistogramBinning()], ids=repr)
def test_sums_are_exact_integers_in_any_order_of_records(method):
    logits, labels = people(500)
    # the source 2 is empty
    owner = np.sort(np.random.default_rng(1).choice([0, 1, 3], 500)).astype(np.int32)
    scale = scale_of(method, 1.0)
    sums = sums_of(method, 0, logits, labels, owner, 4, scale)
    assert sums.dtype == np.int32 and (sums[2] == 0).all() and (sums[[0, 1, 3]] != 0).any(1).all()
    added = np.asarray(
        added_by(method, 0, Records(logits, labels.astype(np.int32)), np.float32(1.3))
    )
    in_steps = np.rint(added.astype(np.float64) / scale.step).astype(np.int64)
    assert (sums == [in_steps[owner == i].sum(0) for i in range(4)]).all()
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(500)
        assert (
            sums == sums_of(method, 0, logits[order], labels[order], owner[order], 4, scale)
        ).all()


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_neighbouring_sources_differ_by_the_stated_number_of_steps(adjacency):
    logits, labels = people(80, m=3)
    logits[:20] *= 1e3
    logits[20:40] *= 1e-3
    everyone = np.zeros(80, np.int32)

    def sums_without(gone, method, k, logits, labels, scale):
        """Returns the sums of the records that are not in a source of their own."""
        source = np.where(gone, 1, everyone).astype(np.int32)
        return sums_of(method, k, logits, labels, source, 2, scale)[0]

    for method in (
        AccT(split=True),
        AccT(),
        NllT(bound=1.3),
        EceT(),
        HistogramBinning(form="published"),
    ):
        scale = scale_of(method, 2.0, adjacency, 3)
        # The first round is special in the split form. Elsewhere all are alike, which the tests of
        # the methods prove of the first and the last one.
        for k in (0, method.rounds - 1) if getattr(method, "split", False) else (0,):
            allowed = math.ceil(method.sensitivity(k, adjacency, 3) / scale.step)
            sums = sums_without(False, method, k, logits, labels, scale)
            largest = 0
            for number in range(0, 80, 3):
                gone = np.arange(80) == number
                if adjacency == "replace_one":
                    others = np.where(gone, (7 * number + 5) % 80, np.arange(80))
                    neighbour = sums_without(
                        False, method, k, logits[others], labels[others], scale
                    )
                else:
                    neighbour = sums_without(gone, method, k, logits, labels, scale)
                largest = max(largest, np.abs(sums - neighbour).sum())
            assert 0 < largest <= allowed


@pytest.mark.slow
def test_the_largest_source_with_the_largest_contributions_stays_in_range():
    n = 2**17
    for bound, epsilon in ((16.0, 1e4), (512.0, 1e4)):
        method = NllT(bound=bound)
        scale = scale_of(method, epsilon, num_classes=2)
        added, owner = np.full((n, 1), bound, np.float32), np.zeros(n, np.int32)
        total = jax.jit(exact_sums, static_argnums=(2, 3))(added, owner, 1, scale)
        assert int(total[0, 0]) == n * bound / scale.step
        noisy = jax.jit(with_noise, static_argnums=2)(KEY, total, scale)
        assert float(noisy[0, 0]) == pytest.approx(n * bound, rel=1e-6)


# --- What an answer gives away ------------------------------------------------------------------

# As many as keep the errors below the caps of the tests. A cap is below half of the distance to the
# ratio of noise that is scaled by 0.7 or 1.3, so that the test rejects such noise.
DRAWS = 60_000


@functools.partial(jax.jit, static_argnums=3)
def many_answers(key, exact, scale, draws):
    return with_noise(key, jnp.broadcast_to(exact, (draws, exact.shape[1])), scale)


def answers(method, source, epsilon, key, rounds=1, columns=None):
    """Returns many independent answers of a source in the first rounds, float64 [rounds, draws,
    s], or the first columns of them."""
    scale = scale_of(method, epsilon, num_classes=source.logits.shape[1])
    owner, out = np.zeros(len(source.labels), np.int32), []
    for k in range(rounds):
        exact = sums_of(method, k, source.logits, source.labels, owner, 1, scale, 1.0)
        drawn = many_answers(jax.random.fold_in(key, k), exact[:, :columns], scale, DRAWS)
        out.append(np.asarray(drawn, np.float64))
    return np.stack(out)


def log_ratio(first, second):
    """Returns the log ratio of two events' frequencies among as many draws, and five standard
    errors."""
    a, b, draws = first.sum(), second.sum(), len(first)
    return math.log(a / b), 5 * math.sqrt((1 - a / draws) / a + (1 - b / draws) / b)


@pytest.mark.slow
def test_likelihood_ratios_of_neighbours_stay_within_epsilon_and_reach_it():
    epsilon, method = 0.5, HistogramBinning(bins=1)
    logits, labels = np.tile(np.float32([[2.0, 0.0]]), (6, 1)), np.array([0, 0, 0, 1, 1, 0])
    first = functools.partial(answers, method, columns=1)
    one = first(Party(logits, labels), epsilon, jax.random.fold_in(KEY, 1))[0, :, 0]
    two = first(Party(logits[:5], labels[:5]), epsilon, jax.random.fold_in(KEY, 2))[0, :, 0]
    edges = np.quantile(np.concatenate([one, two]), np.linspace(0, 1, 21))
    edges[0], edges[-1] = -np.inf, np.inf
    cells = [
        ((low <= one) & (one < high), (low <= two) & (two < high))
        for low, high in itertools.pairwise(edges)
    ]
    for cell in cells:
        ratio, error = log_ratio(*cell)
        assert abs(ratio) <= epsilon + error
    for sign in (1, -1):  # beyond both exact answers the ratio is e^epsilon, not less
        ratio, error = log_ratio(
            sign * one > sign * (4.0 if sign > 0 else 3.0),
            sign * two > sign * (4.0 if sign > 0 else 3.0),
        )
        # 0.7 and 1.3 times the noise are 0.71 and 0.38
        assert error < 0.045 and abs(sign * ratio - epsilon) <= error


@pytest.mark.slow
def test_all_rounds_together_cost_epsilon():
    """A noise of one release for both would show a ratio of 2, 0.7 times the noise 1.43, and 1.3
    times the noise 0.77. The second round alone would show 1, 0.71 and 0.38."""
    epsilon, method = 1.0, AccT(iterations=1)
    sure_and_wrong = np.float32([[200.0, 0.0]])
    # The other search adds the same numbers and the same noise in its two rounds.
    other = AccT(iterations=1, search="grid")
    assert other.rounds == method.rounds == 2
    assert scale_of(other, epsilon, num_classes=2) == scale_of(method, epsilon, num_classes=2)
    both = [
        Party(sure_and_wrong, np.array([1])),
        Party(sure_and_wrong[:0], np.array([], int)),
    ]
    one, two = (
        answers(method, source, epsilon, jax.random.fold_in(KEY, number), rounds=2)[..., 0]
        for number, source in enumerate(both, start=3)
    )
    ratio, error = log_ratio((one <= -1).all(0), (two <= -1).all(0))
    assert error < 0.1 and abs(ratio - epsilon) <= error
    (alone, error) = log_ratio(one[1] <= -1, two[1] <= -1)
    assert error < 0.04 and abs(alone - epsilon / 2) <= error
    assert abs(np.corrcoef(one)[0, 1]) < 5 / math.sqrt(DRAWS)  # rounds do not share noise
    assert abs(np.corrcoef(one[0, 1:], one[0, :-1])[0, 1]) < 5 / math.sqrt(DRAWS)  # nor do sources


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 50.0])
def test_the_calibrator_knows_the_variance_of_the_noise(epsilon):
    """The conformance suite of mechanisms proves that sums have the noise of this law."""
    scale = scale_of(HistogramBinning(bins=1), epsilon, num_classes=2)
    exact = stats.dlaplace(1 / scale.noise).var() * scale.step**2
    assert exact == pytest.approx(scale.variance, rel=1 / (12 * scale.noise**2))


# --- Sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "labels", "error", "words"),
    [
        (
            np.zeros(7, np.float32),
            np.zeros(7, int),
            ValueError,
            r"logits of .* must be \[n, K\], .* K >= 2",
        ),
        (np.zeros((7, 1), np.float32), np.zeros(7, int), ValueError, "K >= 2"),
        (np.zeros((7, 3), np.float32), np.zeros(6, int), ValueError, "labels"),
        (np.zeros((7, 3), np.float32), np.zeros((7, 1), int), ValueError, "labels"),
        (
            np.zeros((7, 3), int),
            np.zeros(7, int),
            TypeError,
            "logits of .* floating point, got dtype int64",
        ),
        (
            np.zeros((7, 3), np.float32),
            np.zeros(7),
            TypeError,
            "labels of .* integers, got dtype float64",
        ),
    ],
)
def test_impossible_sources_are_refused_without_their_size(logits, labels, error, words):
    with registered() as ledger, pytest.raises(error, match=words) as raised:
        Party(logits, labels, account=ledger.account("clinic"))
    assert "'clinic'" in str(raised.value) and not re.search(r"\b[67]\b", str(raised.value))


def test_too_many_records_for_exact_sums_are_refused():
    with pytest.raises(ValueError, match=r"more than 131072 records\. Divide it"):
        Party(np.zeros((2**17 + 1, 2), np.float32), np.zeros(2**17 + 1, np.int32))


def test_an_account_is_one_of_a_ledger():
    with pytest.raises(
        TypeError, match=r"account must be ledger\.account\(name\) or None, got str"
    ):
        Party(*people(7), account="clinic")


def test_a_source_shows_nothing_of_its_records():
    assert repr(Party(*people(7))) == "Party(account=None, unit=None)"
    with registered() as ledger:
        account = ledger.account("clinic")
        assert repr(Party(*people(7), account=account)) == f"Party(account={account!r}, unit=None)"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("label_dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_any_floating_point_logits_and_integer_labels_do(dtype, label_dtype):
    logits, labels = people(20)
    source = Party(logits.astype(dtype), labels.astype(label_dtype))
    assert source.logits.dtype == np.float32 and source.labels.dtype == np.int32
    assert (source.logits == logits.astype(dtype).astype(np.float32)).all() and (
        source.labels == labels
    ).all()


def test_values_beyond_32_bits_are_invalid_not_other_values():
    logits = np.array([[1e300, 0.0], [0.0, -1e300], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    for wide, dtype in (
        (2**32 + 1, np.int64),
        (2**64 - 1, np.uint64),
        (2**63 + 1, np.uint64),
        (-(2**40), np.int64),
    ):
        source = Party(logits, np.array([0, 0, wide, wide, 0, 1], dtype))
        records = Records(jnp.asarray(source.logits), jnp.asarray(source.labels))
        assert records.valid.tolist() == [False] * 4 + [True] * 2


# --- A source over a network --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [AccT(iterations=1, split=True), HistogramBinning(bins=8)], ids=repr
)
def test_answers_of_separate_sources_play_the_same_conversation(method, tmp_path):
    parties = [Party(*people(40, seed=i)) for i in range(3)] + [Party(*people(0))]

    def converse(epsilon, variance, folder):
        talks = [
            party.begin(method, epsilon=epsilon, workdir=folder / str(i))
            for i, party in enumerate(parties)
        ]
        answers = []

        def ask(k, temperature):
            answers.append(sum(talk.answer(float(temperature), round=k) for talk in talks))
            return jnp.asarray(answers[-1])

        return play(method, ask, variance), np.hstack(answers)

    exact, _ = converse(math.inf, 0.0, tmp_path / "exact")
    together = recalibrate(method, parties, epsilon=math.inf).parameters
    np.testing.assert_allclose(np.hstack(exact), np.hstack(together), rtol=1e-5, atol=1e-5)
    variance = scale_of(method, 1.0).variance * len(parties)
    (noisy, one), (again, same), (_, other) = (
        converse(1.0, variance, tmp_path / name) for name in ("one", "one", "other")
    )
    assert np.isfinite(np.hstack(noisy)).all() and (np.hstack(noisy) == np.hstack(again)).all()
    assert (one == same).all() and (one != other).any()  # what is found of them may agree
    if isinstance(method, AccT):
        assert 0.5 < float(noisy.temperature) < 3.0


@pytest.mark.slow
def test_an_answer_is_the_exact_sum_plus_noise_in_whole_steps(monkeypatch):
    # Of fresh seeds, one in 2,000 gives two of three answers equal noise.
    monkeypatch.setattr(secrets, "token_bytes", lambda size: bytes(range(size)))
    source, method = Party(*people(20)), AccT(iterations=2)
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


@pytest.mark.slow
def test_a_conversation_is_paid_once_before_its_first_answer():
    method = AccT(iterations=2)
    with registered(epsilon=1.5, delta=0.0) as ledger:
        source = Party(*people(20), account=ledger.account("clinic"))
        with pytest.raises(ValueError, match="registered with 'add_remove'"):
            source.begin(method, epsilon=1.0, adjacency="replace_one")
        assert ledger.epsilon("clinic") == 0.0
        talk = source.begin(method, epsilon=1.0)
        assert ledger.epsilon("clinic") == 1.0
        other = Party(*people(20)).begin(method, epsilon=1.0)
        assert talk.answer(1.0) != other.answer(1.0)  # noise of its own
        with pytest.raises(BudgetExceeded):
            source.begin(method, epsilon=1.0)
        assert ledger.epsilon("clinic") == 1.0 and talk.answer(1.0).shape == (1,)


def test_a_question_is_answered_once_and_may_be_repeated():
    method = AccT(iterations=2)
    with Party(*people(20)).begin(method, epsilon=1.0) as talk:
        with pytest.raises(
            TypeError, match=r"temperature must be a number, got '1.5'\. Send a float"
        ):
            talk.answer("1.5")
        first = talk.answer(1.0)
        assert (talk.answer(jnp.float32(1), round=0) == first).all() and talk.answered == 1
        for other in (1.0000001, math.nan, -0.0):
            with pytest.raises(
                ValueError, match=r"round=0 is answered at temperature 1\.0, not at"
            ):
                talk.answer(other, round=0)
        for k in (2, 3, -1):
            with pytest.raises(
                (ValueError, RuntimeError), match=rf"round={k} cannot be answered|all 3 rounds"
            ):
                talk.answer(1.0, round=k)
        second = talk.answer(math.nan, round=1)
        assert (talk.answer(math.nan, round=1) == second).all()
        second += 1  # the caller's own copy
        assert (talk.answer(math.nan, round=1) == second - 1).all()
    with pytest.raises(RuntimeError, match="the conversation was closed"):
        talk.answer(1.0)
    assert (talk.answer(1.0, round=0) == first).all()


def test_threads_that_ask_at_once_do_not_share_noise(monkeypatch):
    # Two questions in one round: one is answered, and the other is an error.
    keeper = Till.keeper

    def slow(till, what):
        keep = keeper(till, what)
        return lambda arrays: (time.sleep(0.05), keep(arrays))

    monkeypatch.setattr(Till, "keeper", slow)
    with (
        Party(*people(20)).begin(AccT(iterations=2), epsilon=1.0) as talk,
        ThreadPoolExecutor(4) as pool,
    ):
        heard = [
            pool.submit(talk.answer, temperature, round=0) for temperature in (0.7, 1.3, 0.9, 0.7)
        ]
        errors = [future.exception() for future in heard]
    assert sum(error is None for error in errors) in (1, 2) and talk.answered == 1
    assert (
        len(
            {
                float(future.result()[0])
                for future, error in zip(heard, errors, strict=True)
                if error is None
            }
        )
        == 1
    )


CHILD = """
import os, signal, sys
import numpy as np
from jaxdp.privacy import Ledger
from jaxdp.recalibration import AccT, Party
from jaxdp.release import Till

path, workdir, dies_after = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = np.random.default_rng(0)
with Ledger(path) as ledger:
    logits, labels = rng.normal(size=(20, 3)), rng.integers(0, 3, 20)
    source = Party(logits, labels, account=ledger.account("clinic"))
    if dies_after == 0:  # as soon as an answer is to be kept
        Till.keeper = lambda till, what: lambda arrays: os.kill(os.getpid(), signal.SIGKILL)
    with source.begin(AccT(iterations=2), epsilon=1.0, workdir=workdir) as talk:
        print(talk.answered, flush=True)
        for k, temperature in enumerate((1.0, 2.0, 3.0)):
            print(talk.answer(temperature, round=k)[0], flush=True)
            if talk.answered == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_conversation_survives_kills_and_is_charged_once(tmp_path):
    path, workdir = tmp_path / "ledger.sqlite", tmp_path / "talk"
    registered(path, epsilon=1.0, delta=0.0).close()
    heard = []
    for dies_after, status in ((0, -signal.SIGKILL), (2, -signal.SIGKILL), (9, 0), (9, 0)):
        run = forked.run(CHILD, path, workdir, dies_after, modules=forked.STAGES)
        assert run.returncode == status, run.stderr
        heard.append(run.stdout.split())
        assert (workdir / "secret_seed").exists() == bool(status)
        with Ledger(path) as ledger:
            assert ledger.epsilon("clinic") == 1.0
    assert [int(rounds) for rounds, *_ in heard] == [0, 0, 2, 3]
    assert [len(answers) for _, *answers in heard] == [0, 2, 3, 3]
    for _, *answers in heard:
        assert answers == heard[-1][1 : 1 + len(answers)]


FORKED = """
import os, sys, warnings
import numpy as np
from jaxdp.recalibration import AccT, Party
warnings.simplefilter("ignore")  # JAX warns of every fork
logits, labels = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]], np.array([0, 1, 2, 1])
with Party(logits, labels).begin(AccT(iterations=2), epsilon=1.0, workdir=sys.argv[1]) as talk:
    talk.answer(1.0)
    pid = os.fork()
    if pid == 0:
        try:
            talk.answer(2.0)
        except RuntimeError as error:
            print(error, flush=True)
            talk.close()
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    talk.answer(2.0)
    talk.answer(3.0)
"""


@pytest.mark.slow
def test_a_forked_process_does_not_go_on_with_a_conversation(tmp_path):
    """It would wait forever for the threads of JAX."""
    run = forked.run(FORKED, tmp_path / "talk", modules=forked.STAGES)
    assert run.returncode == 0, run.stderr
    assert (
        "talk belongs to the process from which this one was forked. Go on with it there"
        in run.stdout
    )


def test_a_closed_conversation_goes_on_in_its_workdir_and_with_nothing_else(tmp_path):
    method, records = AccT(iterations=2), people(20)
    with registered(epsilon=1.5, delta=0.0) as ledger:
        source = Party(*records, account=ledger.account("clinic"))
        with source.begin(method, epsilon=1.0, workdir=tmp_path) as talk:
            first = talk.answer(1.0)
            with pytest.raises(ValueError, match="another process is running"):
                source.begin(method, epsilon=1.0, workdir=tmp_path)
        assert (tmp_path / "secret_seed").exists()
        other = Party(records[0] + 1e-3, records[1], account=ledger.account("clinic"))
        for party, terms in (
            (other, {"epsilon": 1.0}),
            (source, {"epsilon": 0.5}),
            (source, {"epsilon": 1.0, "method": AccT(iterations=3)}),
        ):
            with pytest.raises(ValueError, match="keeps another release"):
                party.begin(**{"method": method, "workdir": tmp_path} | terms)
        again = source.begin(method, epsilon=1.0, workdir=tmp_path)
        assert again.answered == 1 and (again.answer(1.0, round=0) == first).all()
        with pytest.raises(ValueError, match="round=0 is answered"):
            again.answer(2.0, round=0)
        second = again.answer(2.0)
        again.answer(3.0)
        assert not (tmp_path / "secret_seed").exists()
        done = source.begin(method, epsilon=1.0, workdir=tmp_path)
        assert (done.answer(2.0, round=1) == second).all() and ledger.epsilon("clinic") == 1.0
        with pytest.raises(RuntimeError, match="all 3 rounds are answered"):
            done.answer(1.0)


class Calling(AccT):
    def summand(self, k, records, temperature):
        added = super().summand(k, records, temperature)
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(added.shape, added.dtype), added)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags", "times"),
    [(AccT, "", 1), (AccT, " --xla_cpu_use_acl=false", 2), (Calling, "", 2)],
)
def test_another_machine_or_a_call_back_to_python_pays_again_and_goes_on(
    tmp_path, monkeypatch, kind, flags, times
):
    method = kind(iterations=2)
    with registered() as ledger:
        source = Party(*people(20), account=ledger.account("clinic"))
        with source.begin(method, epsilon=1.0, workdir=tmp_path) as talk:
            first = talk.answer(1.0)
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')}{flags}")
        with source.begin(method, epsilon=1.0, workdir=tmp_path) as talk:
            assert (talk.answer(1.0, round=0) == first).all()
            assert talk.answer(1.0).shape == talk.answer(1.0).shape == (1,)
        assert ledger.epsilon("clinic", delta=0.0) == times
    assert not list(tmp_path.rglob("secret_seed"))


@pytest.mark.slow
def test_a_workdir_that_was_restored_from_a_copy_does_not_reveal_a_difference(tmp_path):
    """Its round is asked again: at the same temperature it says the same, at another one it has
    noise of its own."""
    method, heard = HistogramBinning(bins=1), []
    source = Party(*people(50))
    source.begin(method, epsilon=1.0, workdir=tmp_path / "original").close()
    for i, temperature in enumerate((1.0, 1.0, 2.0)):  # which this method's sums do not depend on
        shutil.copytree(tmp_path / "original", tmp_path / str(i))
        heard.append(
            source.begin(method, epsilon=1.0, workdir=tmp_path / str(i)).answer(temperature)
        )
    assert (heard[0] == heard[1]).all() and (heard[0] != heard[2]).any()


def test_copies_of_a_workdir_answer_one_question_in_a_round(tmp_path):
    """Each copy has the secret. Without marks, copies that are asked other questions would answer
    them with independent noise, all for one charge."""
    ledger = registered(epsilon=1.0, delta=0.0)
    method, source = AccT(iterations=2), Party(*people(20), account=ledger.account("clinic"))
    source.begin(method, epsilon=1.0, workdir=tmp_path / "original").close()
    copies = [tmp_path / name for name in ("first", "equal", "other")]
    for copy in copies:
        shutil.copytree(tmp_path / "original", copy)
    first, equal, other = (source.begin(method, epsilon=1.0, workdir=copy) for copy in copies)
    answer = first.answer(1.0)
    assert (equal.answer(1.0) == answer).all()
    with pytest.raises(ValueError, match=r"round 0 was asked at another temperature than 2\.0"):
        other.answer(2.0)
    assert (other.answer(1.0) == answer).all()  # so it may go on
    first.answer(0.5)
    with pytest.raises(ValueError, match=r"round 1 was asked at another temperature than 0\.25"):
        equal.answer(0.25)
    for talk in (first, equal, other):
        talk.close()
    # What was answered while the ledger had no marks is marked when the conversation goes on.
    restored = registered(epsilon=2.0, delta=0.0)
    source = Party(*people(20), account=restored.account("clinic"))
    source.begin(method, epsilon=1.0, workdir=copies[0]).close()
    with (
        source.begin(method, epsilon=1.0, workdir=copies[1]) as equal,
        pytest.raises(ValueError, match=r"round 1 was asked at another temperature than 0\.25"),
    ):
        equal.answer(0.25)
    labels = [row["label"] for row in restored.history("clinic") if row["event"] == "NoOp()"]
    assert [label.split(", attempt")[0] for label in labels] == ["AccT, round 0", "AccT, round 1"]
    assert restored.epsilon("clinic", delta=0.0) == 1.0


def test_a_source_names_the_unit_of_its_records():
    account = registered().account("clinic")  # of patients
    assert Party(*people(3), account=account, unit="patient").units == 3
    with pytest.raises(ValueError, match="unit of 'clinic' must be that of its account, 'patient'"):
        Party(*people(3), account=account, unit="scan")


def test_an_answer_that_cannot_be_kept_is_not_given(tmp_path, monkeypatch):
    source = Party(*people(20))
    with source.begin(AccT(iterations=2), epsilon=1.0, workdir=tmp_path) as talk:
        monkeypatch.setattr(
            os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left"))
        )
        with pytest.raises(OSError, match="no space left"):
            talk.answer(1.0)
        monkeypatch.undo()
        assert talk.answered == 0 and talk.answer(2.0, round=0).shape == (1,)


@pytest.mark.slow
def test_a_hostile_calibrator_gets_no_more_rounds_and_no_odd_sums():
    source, method = Party(*people(20)), AccT(iterations=2)
    for epsilon in (math.inf, 1.0):
        strange = [math.nan, 0.0, -1.0, 1e-40, math.inf, -math.inf]
        for first, second, third in (strange[:3], strange[3:]):
            talk = source.begin(method, epsilon=epsilon)
            answers = np.array([talk.answer(first), talk.answer(second), talk.answer(third)])
            assert np.isfinite(answers).all() and (
                epsilon < math.inf or np.abs(answers).max() <= 20
            )
            with pytest.raises(RuntimeError, match="all 3 rounds are answered"):
                talk.answer(1.0)


# --- Owners of several records ------------------------------------------------------------------

OWNERS = ["a", "b", "a", "c", "b", "a"]


def in_steps(method, logits, labels, scale, owners=None):
    """The exact sum of a source's first round by hand, int [s], of the mean of each owner's records
    in whole steps."""
    added = np.asarray(
        added_by(method, 0, Records(logits, labels.astype(np.int32)), np.float32(1.0)), np.float64
    )
    steps = np.rint(added / scale.step).astype(int)
    owners = np.arange(len(labels)) if owners is None else np.asarray(owners)
    return sum(np.trunc(steps[owners == one].mean(0)).astype(int) for one in set(owners.tolist()))


@functools.partial(jax.jit, static_argnums=0)
def compiled_first(method, records, source, scale, owner):
    return exact_sums(summands(method, 0, records, jnp.float32(1.0)), source, 1, scale, owner)[0]


def first_sum(method, logits, labels, scale, owners):
    """The exact sum of a source's first round, from one program for all sources of at most 15
    records."""
    party = Party(logits, labels, group=owners)
    missing = 15 - len(labels)
    records = Records(
        np.pad(party.logits, ((0, missing), (0, 0))), np.pad(party.labels, (0, missing))
    )
    # The other records are those of a source that is not asked.
    owner = np.pad(party.group, (0, missing), constant_values=15)
    source = np.where(np.arange(16) < party.units, 0, 1).astype(np.int32)
    return np.asarray(compiled_first(method, records, source, scale, owner))


@pytest.mark.slow
@pytest.mark.parametrize("method", [AccT(), NllT(), EceT(), HistogramBinning()], ids=repr)
def test_an_owner_adds_the_mean_of_its_records_and_moves_the_sum_by_no_more_than_one(method):
    """The broken twin sums an owner's records: its sum moves by the number of the records."""
    logits, labels = people(6)
    scale = scale_of(method, 1.0)
    limit = method.sensitivity(0, "add_remove", logits.shape[1]) / scale.step
    assert (
        first_sum(method, logits, labels, scale, OWNERS)
        == in_steps(method, logits, labels, scale, OWNERS)
    ).all()
    for kinds in (1, 9):  # one owner more, with nine wrong records, equal or different
        more = np.repeat(people(kinds, seed=7)[0], 9 // kinds, axis=0)
        both = np.vstack([logits, more]), np.append(labels, (more.argmax(1) + 1) % 6)
        one, twin = (
            np.abs(
                first_sum(method, *both, scale, owners)
                - first_sum(method, logits, labels, scale, owners[:6])
            ).sum()
            for owners in ([*OWNERS, *["d"] * 9], list(range(15)))
        )
        assert one <= limit < twin


@pytest.mark.slow
def test_owners_play_and_answer_alike():
    logits, labels = people(6)
    owned, plain = Party(logits, labels, group=OWNERS), Party(*people(4, seed=3))
    twice = Party(np.repeat(logits, 2, 0), np.repeat(labels, 2), group=np.repeat(np.arange(6), 2))
    exact = {"epsilon": math.inf}
    for one, other in ([owned, plain], [twice, Party(logits, labels)]):
        answer = one.begin(HistogramBinning(), **exact).answer(1.0) + other.begin(
            HistogramBinning(), **exact
        ).answer(1.0)
        assert answer.sum() == pytest.approx(one.units + other.units)
        found = recalibrate(HistogramBinning(), [one, other], **exact).parameters
        right, wrong = np.split(answer, 2)
        total = right + wrong
        np.testing.assert_allclose(
            found[total > 0], (right / np.maximum(total, 1e-9))[total > 0], rtol=1e-5
        )
    assert (owned.units, twice.units, plain.units, Party(*people(0), group=[]).units) == (
        3,
        6,
        4,
        0,
    )
    with pytest.raises(
        ValueError, match=r"group needs the adjacency 'add_remove' or 'zero_out', got 'replace_one'"
    ):
        recalibrate(HistogramBinning(), [owned], epsilon=1.0, adjacency="replace_one")
    with pytest.raises(ValueError, match="group lacks a value"):
        Party(logits, labels, group=[*OWNERS[:5], None])
    with pytest.raises(
        ValueError, match="group must have one value for each of the 6 records, got 5"
    ):
        Party(logits, labels, group=OWNERS[:5])
