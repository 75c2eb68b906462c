"""Ensembles of models trained on disjoint parts: partition, certified vote, and two baselines.

One record is in the data of one member. So a neighbouring data set changes the data of one member
by one record, and only that member's label and calibrated distance can change. Either its label
stays and its distance k moves by at most one, or its label changes and k is 0 on both sides.
Everything in this file rests on this fact. It holds if the part of a record depends on nothing but
the record (`partition_by_hash`). A rule like "the i-th record goes to part i mod T" breaks it: it
moves every later record when one is removed.

A replaced record may leave one part and enter another. Members certified for the threat
"add_remove" cover that as two steps, which `private_predict` counts. Members certified for
replacement do not cover it. They need parts that a replacement cannot leave, assigned by a lasting
public identity (`ids`).
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import identifiers
from jaxdp.prediction.checks import count_rows, positive, whole
from jaxdp.privacy.accounting import Adjacency
from jaxdp.privacy.calibration import calibrate_noise
from jaxdp.privacy.events import ComposedDpEvent, DpEvent, GaussianDpEvent, SelfComposedDpEvent
from jaxdp.report import counting
from jaxdp.transforms import noise

# The cost of a change that no member can make. Its sums over members fit an int64.
_UNREACHABLE = 2**40


# --- Partition ----------------------------------------------------------------------------------


def partition_by_hash(
    records: Any,
    parts: int,
    *,
    salt: bytes,
    ids: Sequence[int | str] | None = None,
) -> np.ndarray:
    """Assigns every record to one of `parts` disjoint parts by a keyed hash (BLAKE2b) of its bytes.

    Args:
        records: A pytree of arrays [n, ...]. A record is one row of every leaf, labels included.
        parts: The number of parts, >= 1.
        salt: 1 to 64 bytes, public, and chosen without looking at the records. The same salt gives
            the same parts.
        ids: One public identity per record, hashed in place of its bytes: an identifier
            (`jaxdp.data.ids`), so that 7 and "7" are one. A record with replaced contents then
            stays in its part. Distances still count records.

    Returns:
        int32 [n] in [0, parts). The number of records of a part is private under "add_remove", so
        train every member with one public divisor.

    Raises:
        TypeError, ValueError: An argument is out of range, leaves differ in length, ids have
            another type, or a leaf holds Python objects or fields.

    Formal guarantees:
        A record's part is a function of that record (or of its identity), the dtypes and row shapes
        of the leaves, `parts` and `salt` only. Dtypes and shapes are public and must not follow
        from the records. The longest text of a leaf counts as no part of its dtype. Adding or
        removing a record changes one part, by that record. Equal records go to the same part.
    """
    num_parts = whole("parts", parts)
    if not isinstance(salt, bytes) or not 1 <= len(salt) <= 64:
        raise ValueError("salt must be 1 to 64 public bytes, for example b'my experiment v1'.")
    count = count_rows(records, "records")
    if ids is None:
        layout, contents = _contents(records, count)
    else:
        layout = "identity"
        contents = _identities(ids, count)
    # The layout is hashed once, and each record continues from a copy.
    keyed = hashlib.blake2b(layout.encode(), key=salt, digest_size=16)
    part_of_record = np.empty(count, np.int32)
    for i, content in enumerate(contents):
        digest = keyed.copy()
        digest.update(content)
        number = int.from_bytes(digest.digest(), "little")
        # A number of 128 bits, so its remainder prefers no part noticeably.
        part_of_record[i] = number % num_parts
    return part_of_record


def _contents(records: Any, count: int) -> tuple[str, Iterable[bytes]]:
    """Returns the layout of the records as text, and the bytes of each record."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(records)]
    kinds = [(_kind(array), array.shape[1:]) for array in arrays]
    structure = str(jax.tree.structure(records))
    layout = repr((structure, kinds))

    def bytes_of(record: int) -> bytes:
        return b"".join(_row_bytes(array[record]) for array in arrays)

    return layout, map(bytes_of, range(count))


def _identities(ids: Sequence[int | str], count: int) -> list[bytes]:
    identities = identifiers(ids, "ids")
    if len(identities) != count:
        raise ValueError(
            f"ids must hold one identity for each record, got {len(identities)} for {count}."
        )
    return [f"str:{identity}".encode() for identity in identities]


def _kind(array: np.ndarray) -> str:
    """Returns the dtype as text, without the width that the longest text of an array gives it."""
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError(
            f"records must have leaves of numbers or texts, got dtype {array.dtype}."
            " Convert objects to such arrays, and pass each field as a leaf."
        )
    if array.dtype.kind in "US":
        return array.dtype.kind
    return array.dtype.str


def _row_bytes(row: Any) -> bytes:
    """Returns the bytes of one row of a leaf.

    NumPy pads texts with zeros to the longest one of the leaf. A record's bytes must not depend on
    the others, so they are of the text without zeros.
    """
    if row.dtype.kind in "US":
        # Quotes and escapes keep the texts of two leaves apart.
        return repr(row.tolist()).encode()
    content: bytes = row.tobytes()
    return content


# --- The certified vote -------------------------------------------------------------------------


def vote(
    labels: Any,
    distances: Any,
    *,
    num_classes: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the majority label of every query and its calibrated distance: int32 [Q] each.

    Ties have distance 0. The distance is one less than the number of records that have to change
    before some class c has as many votes as the winner w. A changed label of a member costs k + 1
    changes. A member that leaves w for c closes the gap n_w - n_c by two. A member that leaves
    another class for c closes it by one. So

        K = max(0, min over c != w, a, b with 2 a + b >= n_w - n_c of A(a) + B_c(b) - 1).

    A(a) is the sum of the a smallest k + 1 among the members that vote for w. B_c(b) is the sum of
    the b smallest k + 1 among the members that vote for neither w nor c. With two classes b = 0,
    and K is the paper's Theorem 5.3: the sum of the n smallest k among the members that vote for
    the winner, plus n - 1, with n = ceil((n_w - n_c) / 2), and 0 at ties. The sum over ALL members
    would not be private, nor, with three or more classes, over the winner's voters only.

    Args:
        labels: int [T, Q] in [0, num_classes), one row per member.
        distances: int [T, Q] >= 0, the members' calibrated distances.
        num_classes: C >= 2. Ties go to the smallest label.

    Raises:
        ValueError: An argument is out of range or has another shape.

    Formal guarantees:
        Condition: every neighbouring data set changes one member only. Either its label stays and
        its distance moves by at most one, or its label changes and its distance is 0 on both sides.
        Then the returned distance changes by at most one, and is 0 on both sides if the returned
        labels differ. So `randomised_response` on it is private.

        Proof: call such a change of the vector of (label, distance) a step. Steps can be reversed.
        1 + K is the least number of steps from this vector to the set U_w of vectors in which some
        class has at least as many votes as w. (Members change independently, a changed label costs
        k + 1 steps, and c is the best label to change to, so the formula is that minimum.) The
        number of steps to a fixed set changes by at most one per step. If a neighbour has another
        winner, or a tie, it lies in U_w and is one step away. So K = 0, and by symmetry K = 0 there
        too.
    """
    votes, away = _check_votes(labels, distances, num_classes)
    costs = away + 1  # of a changed label
    counts = _counts(votes, num_classes)
    winner = counts.argmax(axis=1)
    leaving = _cheapest(costs, votes == winner)  # A(a)
    least = np.full(winner.shape, _UNREACHABLE)
    for rival in range(num_classes):
        is_neither = (votes != winner) & (votes != rival)
        joining = _cheapest(costs, is_neither)  # B_c(b)
        gap = counts.max(axis=1) - counts[:, rival]
        # The gap is at most T, and each member that leaves w for c closes it by two.
        for a in range(math.ceil(len(votes) / 2) + 1):
            b = np.maximum(gap - 2 * a, 0)
            (cost_of_b,) = np.take_along_axis(joining, b[None], axis=0)
            cost = leaving[a] + cost_of_b
            reachable = np.where(winner == rival, _UNREACHABLE, cost)  # the winner is no rival
            least = np.minimum(least, reachable)
    # One change fewer cannot flip the vote.
    distance = np.clip(least - 1, 0, np.iinfo(np.int32).max)
    return winner.astype(np.int32), distance.astype(np.int32)


def _cheapest(costs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Returns [T + 1, Q]: row a is the sum of the a smallest allowed costs.

    It is `_UNREACHABLE` or more if fewer than a exist.
    """
    allowed_costs = np.where(allowed, costs, _UNREACHABLE)
    ordered = np.sort(allowed_costs, axis=0)
    nothing = np.zeros_like(ordered[:1])
    sums = np.cumsum(ordered, axis=0)
    return np.vstack([nothing, sums])


def _counts(votes: np.ndarray, num_classes: int) -> np.ndarray:
    counts = []
    for label in range(num_classes):
        counts.append((votes == label).sum(axis=0))
    return np.stack(counts, axis=1)


def _check_votes(
    labels: Any,
    distances: Any,
    num_classes: int,
) -> tuple[np.ndarray, np.ndarray]:
    votes = np.asarray(labels)
    away = np.asarray(distances)
    if votes.ndim != 2 or not len(votes) or votes.shape != away.shape:
        raise ValueError(
            f"labels and distances must be [T, Q] with T >= 1, got {votes.shape} and {away.shape}."
        )
    has_labels = np.issubdtype(votes.dtype, np.integer)
    has_distances = np.issubdtype(away.dtype, np.integer)
    if not (has_labels and has_distances):
        raise ValueError(
            f"labels and distances must be integers, got {votes.dtype} and {away.dtype}."
        )
    is_outside = (votes < 0) | (votes >= num_classes)
    if num_classes < 2 or is_outside.any():
        raise ValueError(
            f"labels must lie in [0, num_classes={num_classes}), and num_classes must be >= 2."
        )
    if (away < 0).any():
        raise ValueError("distances must be >= 0. Clip them at 0.")
    largest = np.iinfo(np.int32).max  # below `_UNREACHABLE`
    return votes.astype(np.int64), np.minimum(away.astype(np.int64), largest)


def _vote_counts(labels: Any, num_classes: int) -> np.ndarray:
    """Checks labels [T, Q] and returns the votes of each class, [Q, C]."""
    distances = np.zeros(np.shape(labels), np.int64)
    votes, _ = _check_votes(labels, distances, num_classes)
    return _counts(votes, num_classes)


# --- Baselines ----------------------------------------------------------------------------------


def laplace_vote(
    key: jax.Array,
    labels: Any,
    *,
    epsilon: float,
    num_classes: int,
    changed_members: int = 1,
) -> np.ndarray:
    """Answers the class with most votes after Laplace noise on every count.

    The scale of the noise is 2 changed_members / epsilon. Other arguments, result and errors are as
    in `ConfidentGNMax.answer`. `changed_members` is the number of members that a neighbouring data
    set may change. It is 1, or 2 if a replaced record may change its part.

    Formal guarantees:
        Each answer is (epsilon, 0)-DP, `PureDpEvent(epsilon)`, up to the floating-point limits in
        `jaxdp.transforms.noise`. A changed vote moves two counts by one each (Dwork and Roth 2014,
        Theorem 3.6).
    """
    scale = 2 * changed_members / positive("epsilon", epsilon)  # a changed vote moves two counts
    if changed_members not in (1, 2):
        raise ValueError(f"changed_members must be 1 or 2, got {changed_members!r}.")
    counts = _vote_counts(labels, num_classes)
    noisy_counts = _noisy(noise.laplace, key, counts, scale)
    return noisy_counts.argmax(axis=1).astype(np.int32)


def _noisy(
    draw: Callable[..., Any],
    key: jax.Array,
    counts: np.ndarray,
    scale: float,
) -> np.ndarray:
    like = jax.ShapeDtypeStruct(counts.shape, jnp.float32)
    sample = draw(key, like, scale)
    # In float64, because a float32 sum would round the noise to fewer digits.
    return counts + np.asarray(sample, np.float64)


@dataclasses.dataclass(frozen=True)
class ConfidentGNMax:
    """PATE's Confident-GNMax (Papernot et al. 2018, arXiv 1802.08908, Algorithm 1).

    Its accounting does not depend on the data. A query is answered if the largest vote count plus
    N(0, sigma_threshold^2) reaches `threshold`. The answer is the class whose count plus N(0,
    sigma_votes^2) is largest.

    Attributes:
        threshold: Finite. 0.6 to 0.8 of the number of members is usual.
        sigma_threshold, sigma_votes: Standard deviations, finite, > 0.

    Formal guarantees:
        `answer` satisfies `event`. A changed label of one member moves the largest count by at most
        1 and the vector of counts by sqrt(2) in L2 norm. All thresholds are checked first. Then at
        most `max_answers` of the queries that passed are answered. This is a sequence of `queries`
        Gaussian mechanisms of noise multiplier sigma_threshold and `max_answers` of sigma_votes /
        sqrt(2). Their inputs depend on earlier outputs, their noise does not. Unused answers are
        charged. Under "replace_one" accounting doubles both sensitivities, which covers a
        replacement that changes two members. Under "zero_out" accounting does not, so `event` does:
        a hash of the content may put the zero record into another part, whose member trains on it.
    """

    threshold: float
    sigma_threshold: float
    sigma_votes: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be finite, got {self.threshold!r}.")
        # A quotient of a scalar of NumPy or JAX would be rounded to its type.
        for name in ("sigma_threshold", "sigma_votes"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))

    @classmethod
    def calibrated(
        cls,
        *,
        threshold: float,
        queries: int,
        max_answers: int,
        epsilon: float,
        delta: float,
        adjacency: Adjacency = "add_remove",
        ratio: float = 3.0,
    ) -> "ConfidentGNMax":
        """Returns the mechanism of least noise that costs at most (epsilon, delta).

        It has sigma_threshold = ratio sigma_votes. Raises ValueError for an argument out of range,
        or if no noise suffices.
        """
        ratio = positive("ratio", ratio)

        def event(sigma_votes: float) -> DpEvent:
            candidate = cls(threshold, ratio * sigma_votes, sigma_votes)
            return candidate.event(queries, max_answers=max_answers, adjacency=adjacency)

        with counting(event, label="noise", unit="trial") as tried:
            sigma_votes = calibrate_noise(tried, epsilon=epsilon, delta=delta, adjacency=adjacency)
        return cls(threshold, ratio * sigma_votes, sigma_votes)

    def event(
        self, queries: int, *, max_answers: int, adjacency: Adjacency = "add_remove"
    ) -> DpEvent:
        """Returns the cost of `queries` queries of which at most `max_answers` are answered.

        `adjacency` is that of the data set. "zero_out" counts two members.
        """
        if not 1 <= max_answers <= queries:
            raise ValueError(f"max_answers={max_answers} must lie in [1, queries={queries}].")
        members = 2 if adjacency == "zero_out" else 1
        # Two members move the sums twice as far, which half the noise multiplier says.
        check = GaussianDpEvent(self.sigma_threshold / members)
        # A changed vote moves two counts by one each.
        answer = GaussianDpEvent(self.sigma_votes / math.sqrt(2) / members)
        checks = SelfComposedDpEvent(check, queries)
        answers = SelfComposedDpEvent(answer, max_answers)
        return ComposedDpEvent([checks, answers])

    def answer(
        self,
        key: jax.Array,
        labels: Any,
        *,
        num_classes: int,
        max_answers: int,
    ) -> np.ndarray:
        """Answers the first `max_answers` queries that pass the noisy threshold.

        Args:
            key: A typed noise key, used for this call only.
            labels: int [T, Q] in [0, num_classes), one row per member.
            num_classes: C >= 2.
            max_answers: In [1, Q].

        Returns:
            int32 [Q], -1 for no answer.

        Raises:
            TypeError, ValueError: An argument is out of range or has another shape.
        """
        counts = _vote_counts(labels, num_classes)
        self.event(len(counts), max_answers=max_answers)  # checks max_answers
        # One key for both would draw equal noise for both.
        key_threshold, key_votes = jax.random.split(key)
        largest = counts.max(axis=1)
        noisy_largest = _noisy(noise.gaussian, key_threshold, largest, self.sigma_threshold)
        passed = noisy_largest >= self.threshold
        # In the order of the queries, so that no later check decides on an earlier answer.
        is_answered = passed & (np.cumsum(passed) <= max_answers)
        noisy_counts = _noisy(noise.gaussian, key_votes, counts, self.sigma_votes)
        labels_with_noise = noisy_counts.argmax(axis=1)
        return np.where(is_answered, labels_with_noise, -1).astype(np.int32)
