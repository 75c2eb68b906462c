"""Private answers to queries: their price, the answers, and a student trained on them.

    bounds = jaxdp.prediction.train_with_bounds(loss_fn, params, data, ...)
    account = ledger.account("my data")
    answers = private_predict(
        bounds, apply_fn, queries, account=account, total=(10.0, 1e-5), workdir="answers"
    )

The model, its certificates and its stable distances are private. Only noisy answers are returned. A
repeated query is answered and charged again, unless the workdir keeps the answers. A student that
is trained on the answers can answer any number of queries at no cost.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.files import check_delta
from jaxdp.models.training import fit_public
from jaxdp.prediction import ensembles
from jaxdp.prediction.agt import certify
from jaxdp.prediction.answer_checks import check_binary, check_range
from jaxdp.prediction.checks import check_queries, count_rows, positive, whole
from jaxdp.prediction.mechanisms import METHODS, Mechanism
from jaxdp.privacy import Account, DpEvent, PureDpEvent, SelfComposedDpEvent, calibrate_noise
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import Release, Till, program, stream
from jaxdp.report import counting
from jaxdp.transforms import responses
from jaxdp.transforms.precision import in_full_precision

ApplyFn = Callable[[Any, Any], jax.Array]
Folder = str | os.PathLike[str]

# (threat of the bounds, adjacency of the data set): certified steps per neighbouring data set.
# Divisors are constant, so a zeroed record is equivalent to a removed one. A replaced record is one
# removed and one added.
_STEPS: Mapping[tuple[str, str], int] = {
    ("add_remove", "add_remove"): 1,
    ("add_remove", "zero_out"): 1,
    ("add_remove", "replace_one"): 2,
    ("replace_one", "replace_one"): 1,
}


# --- Planning -----------------------------------------------------------------------------------


def query_epsilon(
    epsilon: float,
    delta: float,
    queries: int,
    *,
    adjacency: Adjacency = "add_remove",
) -> float:
    """Returns the largest epsilon per query for a total of (epsilon, delta).

    With it `queries` pure answers cost at most (epsilon, delta) together. It is computed from the
    privacy loss distribution of the worst pure pair, and is never below epsilon / queries. (10,
    1e-5) buys 100 queries of 0.204 or 1000 of 0.063. The paper's zero-concentrated DP buys 0.176
    and 0.056.

    `queries` is fixed in advance. Pure events cost the same under each adjacency of the data set.
    Raises ValueError unless epsilon is finite and > 0, delta in [0, 1) and queries >= 1.
    """
    queries = whole("queries", queries)
    even_share = positive("epsilon", epsilon) / queries
    check_delta(delta)
    # Without a delta, pure epsilons add up.
    if queries == 1 or delta == 0:
        return even_share
    # By advanced composition about sqrt(queries) even shares, so the search starts near its end.
    largest = even_share * math.sqrt(queries)

    def event_of(divisor: float) -> DpEvent:
        return SelfComposedDpEvent(PureDpEvent(largest / divisor), queries)

    with counting(event_of, label="epsilon of a query", unit="trial") as counted:
        # A larger divisor is less loss, as more noise is, so the same search finds it.
        divisor = calibrate_noise(counted, epsilon=epsilon, delta=delta, adjacency=adjacency)
    # Even shares add up to epsilon by basic composition.
    return max(even_share, largest / divisor)


def event(
    count: int,
    *,
    epsilon: float | None = None,
    total: tuple[float, float] | None = None,
    mechanism: str = "randomised_response",
) -> DpEvent:
    """Returns the charge of a call of `private_predict` or `private_values`, before a model exists.

    `count` is the number of queries. The call has the other arguments and errors too.
    `ConfidentGNMax.event` returns the charge of `pate_predict`.
    """
    row = _mechanism(mechanism, "labels", "values")
    count = whole("count", count)
    epsilon_each = _epsilon_each(epsilon, total, count)
    event_of_answer = row.event(epsilon_each)
    return SelfComposedDpEvent(event_of_answer, count)


def _mechanism(name: str, *kinds: str) -> Mechanism:
    fitting = sorted(known for known, row in METHODS.items() if row.kind in kinds)
    if name not in fitting:
        raise ValueError(f"mechanism must be one of {fitting}, got {name!r}.")
    return METHODS[name]


def _epsilon_each(
    epsilon: float | None,
    total: tuple[float, float] | None,
    count: int,
) -> float:
    # Both or none.
    if (epsilon is None) == (total is None):
        raise ValueError(
            f"Give either epsilon (of each answer) or total=(epsilon, delta), got {epsilon=}, "
            f"{total=}."
        )
    if total is None:
        return positive("epsilon", epsilon)
    return query_epsilon(*total, count)


# --- Answers ------------------------------------------------------------------------------------


# Eleven arguments, none of which decides another: what is asked of which model (3), who pays how
# much (3), by which mechanism (3), and where the answers are kept (2).
def private_predict(
    bounds: Any,
    apply_fn: ApplyFn,
    queries: Any,
    *,
    account: Account,
    epsilon: float | None = None,
    total: tuple[float, float] | None = None,
    mechanism: str = "randomised_response",
    prior: Any = None,
    fixed_parts: bool = False,
    workdir: Folder | None = None,
    seed: bytes | None = None,
) -> np.ndarray:
    """Answers queries with noisy labels, after spending for all of them on the ledger.

    A repeated query is answered and charged again, unless the workdir keeps the answers.

    Args:
        bounds: A result of `train_with_bounds`, or a sequence of results for disjoint parts of the
            data (`partition_by_hash`). The members of a sequence vote.
        apply_fn: `apply_fn(params, query) -> logits` of ONE query: [C], or [] or [1] for two
            classes.
        queries: A pytree of arrays [Q, ...], public.
        account: `ledger.account(name)` of all private data on which the models were trained.
        epsilon: The epsilon of each answer, finite and > 0.
        total: The (epsilon, delta) of all Q answers together, in place of `epsilon`, see
            `query_epsilon`. It is the total of this call. The ledger's budget limits all calls
            together.
        mechanism: A key of `METHODS` for labels. With an ensemble "global_laplace" adds noise to
            the vote counts.
        prior: PUBLIC probabilities of the answers, [C], or [Q, C] for each query, such as those of
            a student of earlier answers. "global_response" then answers by RRWithPrior
            (`jaxdp.transforms.responses`). Other mechanisms take none.
        fixed_parts: For an ensemble with bounds for replacement: your assertion that a replaced
            record stays in its part.
        workdir: A folder for the answers of this call. The same call with the same workdir returns
            the kept answers and charges nothing. An interrupted call is not charged again. None
            keeps nothing.
        seed: 16 secret bytes that reproduce answers, for tests. None draws them from the operating
            system. The same call with the same seed is the same release, and is charged once.

    Returns:
        int32 [Q], the noisy labels.

    Raises:
        BudgetExceeded: The budget does not allow the answers. Nothing has run or is charged.
        ValueError: An argument is out of range, the bounds are for another threat, or the workdir
            keeps other answers. Nothing is charged.

    Formal guarantees:
        The answers satisfy Q times `PureDpEvent(epsilon)`, which is spent before anything is
        computed. A refused call has read nothing private. A call that fails later has paid. Each
        mechanism is private because the calibrated distance changes by at most one between
        neighbours (`mechanisms`, `ensembles.vote`). Bounds for the threat "add_remove" serve data
        sets registered with "add_remove" or "zero_out", because a zeroed record contributes
        nothing, like a removed one. They also serve "replace_one" at half the distance, rounded
        down, because a replacement is two changes. Bounds for "replace_one" serve "replace_one"
        only. Timing is not protected.

        Noise is repeated only if everything that determines the answers is the same: models,
        queries, settings, programs and the machine. The noise of an `apply_fn` that calls back to
        Python is never repeated. The caller is responsible for three conditions: the bounds were
        trained on this data set, members have disjoint parts, and no hyperparameter was chosen by
        looking at the data.
    """
    row = _mechanism(mechanism, "labels")
    members = _members(bounds)
    steps = _certified_steps(members, account, fixed_parts=fixed_parts)
    count, outputs = _check_members([member.params for member in members], apply_fn, queries)
    # One logit decides between two classes.
    classes = max(outputs, 2)
    noisy_vote = None
    if len(members) > 1:
        noisy_vote = row.vote
    if row.binary and noisy_vote is None:
        check_binary(mechanism, classes)
    if count == 0:
        return np.zeros(0, np.int32)  # nothing is read or charged
    epsilon_each = _epsilon_each(epsilon, total, count)
    informed = _with_prior(prior, mechanism, count, epsilon=epsilon_each, num_classes=classes)

    def compute(secret: bytes) -> dict[str, np.ndarray]:
        key = stream(secret, "private prediction")
        options = {"epsilon": epsilon_each, "num_classes": classes}
        votes, distances = _votes(members, apply_fn, queries, certified=row.certified)
        if noisy_vote is not None:
            # A replaced record may leave one member and enter another.
            answers = noisy_vote(key, votes, changed_members=steps, **options)
            return {"answers": answers}
        if len(members) > 1:
            # One certified step changes one member, and the distance of the vote by at most 1.
            label, distance = ensembles.vote(votes, distances, num_classes=classes)
        else:
            label = votes[0]
            distance = distances[0]
        if informed is not None:
            return {"answers": informed.answer(responses.numbers(key, count), label)}
        # A neighbouring data set is `steps` certified steps away, which change k by as much.
        neighbours = distance // steps
        return {"answers": row.answer(key, label, neighbours, **options)}

    # Private facts only enter a keyed hash, the token.
    models = [_facts(member) for member in members]
    # Everything else that the bits depend on.
    settings: list[Any] = [epsilon_each, mechanism, steps, classes]
    if informed is not None:
        settings += informed
    charge = SelfComposedDpEvent(row.event(epsilon_each), count)
    what = Release(
        label="private prediction",
        charges=[(account, charge)],
        facts=lambda: [models, queries, *settings],
        programs=lambda: _programs(apply_fn, members, queries, certified=row.certified),
        compute=compute,
    )
    return _release_once(what, workdir, seed)


def _members(bounds: Any) -> list[Any]:
    """Returns the models that vote, which is one where `bounds` is no sequence."""
    # `Bounds`, or another class with its fields.
    if hasattr(bounds, "params"):
        return [bounds]
    return list(bounds)


def _check_members(params: Sequence[Any], apply_fn: ApplyFn, queries: Any) -> tuple[int, int]:
    """Returns the number of queries, and of the logits of each, which all members must share.

    A vote for a class that the first member lacks would raise an error in the mechanism, and so
    show a vote. So it is refused here, by shapes.
    """
    shapes = [check_queries(apply_fn, of, queries, may_be_empty=True) for of in _kinds(params)]
    count, outputs = shapes[0]
    others = sorted({logits for _, logits in shapes} - {outputs})
    if others:
        raise ValueError(
            f"members must have the same number of logits, got {[outputs, *others]}. Train all of "
            "them for all classes, also for classes that a part of the data lacks."
        )
    return count, outputs


def _with_prior(
    prior: Any, mechanism: str, count: int, *, epsilon: float, num_classes: int
) -> responses.Response | None:
    """Returns the response of a public prior, or None without one."""
    if prior is None:
        return None
    if mechanism != "global_response":
        raise ValueError(
            f"prior needs mechanism='global_response', got {mechanism!r}: the certificates of "
            "others hold for answers with all classes."
        )
    informed = responses.with_prior(prior, num_classes=num_classes, epsilon=epsilon)
    if len(informed.order) not in (1, count):
        raise ValueError(
            f"prior must be [C] or [Q, C] for the {count} queries, got shape {np.shape(prior)}."
        )
    return informed


def _votes(
    members: Sequence[Any],
    apply_fn: ApplyFn,
    queries: Any,
    *,
    certified: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels and distances of every member, [T, Q] each. Without certificates all 0."""
    if not certified:
        by_member = [_labels(apply_fn, member.params, queries) for member in members]
        labels = np.stack(by_member)
        # Distance 0 claims nothing.
        return labels, np.zeros_like(labels)
    certificates = [certify(member, apply_fn, queries) for member in members]
    labels = np.stack([np.asarray(certificate.label) for certificate in certificates])
    distances = np.stack([np.asarray(certificate.distance) for certificate in certificates])
    return labels, distances


def _release_once(
    what: Release,
    workdir: Folder | None,
    seed: bytes | None,
) -> np.ndarray:
    with Till(workdir, seed=seed) as till:
        answers: np.ndarray = till.once(what)["answers"]
        return answers


# Ten arguments, as in `private_predict`.
def private_values(
    bounds: Any,
    apply_fn: ApplyFn,
    queries: Any,
    *,
    account: Account,
    output_range: tuple[float, float],
    epsilon: float | None = None,
    total: tuple[float, float] | None = None,
    mechanism: str = "cauchy_values",
    workdir: Folder | None = None,
    seed: bytes | None = None,
) -> np.ndarray:
    """Answers queries of a regression model with noisy values, after spending on the ledger.

    Args:
        bounds: A result of `train_with_bounds` (one model).
        apply_fn: `apply_fn(params, query) -> value` of ONE query, [] or [1].
        output_range: (low, high), a public declaration. Values, bounds and answers are clipped to
            it.
        mechanism: A key of `METHODS` for values.
        queries, account, epsilon, total, workdir, seed: As in `private_predict`.

    Returns:
        float32 [Q], the noisy values.

    Raises:
        BudgetExceeded, ValueError: As in `private_predict`.

    Formal guarantees:
        As in `private_predict`, with `mechanisms.smooth_sensitivity` of the certified intervals.
    """
    if not hasattr(bounds, "params"):
        raise ValueError("bounds must be of one model. No mechanism answers values of an ensemble.")
    row = _mechanism(mechanism, "values")
    ends = check_range(output_range)
    steps = _certified_steps([bounds], account, fixed_parts=False)
    count, outputs = check_queries(apply_fn, bounds.params, queries, may_be_empty=True)
    if outputs != 1:
        raise ValueError(f"apply_fn must return one value of a query, got {outputs}.")
    if count == 0:
        return np.zeros(0, np.float32)
    epsilon_each = _epsilon_each(epsilon, total, count)

    def compute(secret: bytes) -> dict[str, np.ndarray]:
        key = stream(secret, "private regression")
        options = {"epsilon": epsilon_each, "output_range": ends}
        logits = _logits(apply_fn, bounds.params, queries)
        values = np.asarray(logits).reshape(count)
        # Its noise covers the whole range, so no box is needed.
        if not row.certified:
            return {"answers": row.answer(key, values, **options)}
        logits = certify(bounds, apply_fn, queries).logits
        lower = np.asarray(logits.lower).reshape(-1, count)
        upper = np.asarray(logits.upper).reshape(-1, count)
        values = np.clip(values, lower[0], upper[0])  # rounding may put them outside
        # Box j of the mechanism is certified at j neighbours, which are j * steps distances.
        rows_of_changes = [i for i, k in enumerate(bounds.ks) if k > 0]
        rows = rows_of_changes[steps - 1 :: steps]
        answers = row.answer(key, values, lower[rows], upper[rows], **options)
        return {"answers": answers}

    charge = SelfComposedDpEvent(row.event(epsilon_each), count)
    what = Release(
        label="private regression",
        charges=[(account, charge)],
        facts=lambda: [_facts(bounds), queries, epsilon_each, mechanism, steps, list(ends)],
        programs=lambda: _programs(apply_fn, [bounds], queries, certified=row.certified),
        compute=compute,
    )
    return _release_once(what, workdir, seed)


def pate_predict(
    members: Sequence[Any],
    apply_fn: ApplyFn,
    queries: Any,
    *,
    account: Account,
    mechanism: ensembles.ConfidentGNMax,
    max_answers: int,
    workdir: Folder | None = None,
    seed: bytes | None = None,
) -> np.ndarray:
    """Answers the queries on which an ensemble agrees, by PATE's Confident-GNMax.

    It spends for all of them first.

    Args:
        members: The parameters of models trained in any way on disjoint parts
            (`partition_by_hash`). They need no certificates.
        apply_fn, queries, account, workdir, seed: As in `private_predict`.
        mechanism: The threshold and the noise. `ConfidentGNMax.calibrated` finds the noise for a
            total.
        max_answers: In [1, Q], fixed in advance and charged in full.

    Returns:
        int32 [Q], the noisy labels, -1 for a query without an answer.

    Raises:
        TypeError: The mechanism is another one.
        BudgetExceeded, ValueError: As in `private_predict`.

    Formal guarantees:
        The answers satisfy `mechanism.event(Q, max_answers=max_answers, adjacency=...)` for the
        adjacency of the data set. It is spent before anything is computed. Under "zero_out" it
        counts two members: the zero record may be in another part, and nothing says that a member
        ignores it.
    """
    if not members:
        raise ValueError("members is empty. Give the parameters of at least one model.")
    # The token of the release would miss the code of a subclass.
    if type(mechanism) is not ensembles.ConfidentGNMax:
        raise TypeError(f"mechanism must be a ConfidentGNMax, got {type(mechanism).__name__}.")
    count, outputs = _check_members(members, apply_fn, queries)
    if count == 0:
        return np.zeros(0, np.int32)
    # One logit decides between two classes.
    classes = max(outputs, 2)

    def compute(secret: bytes) -> dict[str, np.ndarray]:
        by_member = [_labels(apply_fn, params, queries) for params in members]
        votes = np.stack(by_member)
        key = stream(secret, "PATE")
        answers = mechanism.answer(key, votes, num_classes=classes, max_answers=max_answers)
        return {"answers": answers}

    kinds = _kinds(members)
    charge = mechanism.event(count, max_answers=max_answers, adjacency=account.adjacency)
    what = Release(
        label="PATE",
        charges=[(account, charge)],
        facts=lambda: [list(members), queries, repr(mechanism), max_answers, classes],
        programs=lambda: [program(_logits, apply_fn, params, queries) for params in kinds],
        compute=compute,
    )
    return _release_once(what, workdir, seed)


# --- What determines the bits of answers --------------------------------------------------------


def _facts(bounds: Any) -> list[Any]:
    # Static fields are no arrays, so their text is hashed.
    static = bounds.ks, bounds.threat, bounds.trainable, bounds.product
    return [bounds.params, bounds.lower, bounds.upper, repr(static)]


def _programs(
    apply_fn: ApplyFn,
    members: Sequence[Any],
    queries: Any,
    *,
    certified: bool,
) -> list[str]:
    """Returns the texts of a release's programs, with one text for each kind of member."""
    kinds = _kinds(members)
    texts = [program(_logits, apply_fn, member.params, queries) for member in kinds]
    if certified:
        leaves, structure = jax.tree.flatten(queries)
        shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        for member in kinds:
            texts.append(program(_certificates, apply_fn, structure, shapes, member))
    return texts


def _kinds(members: Sequence[Any]) -> list[Any]:
    """Returns one member for each structure, shapes and static fields, which share a program."""
    by_type = {}
    for member in members:
        types = str(jax.tree.map(jax.typeof, member))
        # Which of them is kept does not matter: programs depend on shapes alone.
        by_type[types] = member
    return list(by_type.values())


# One compiled program for each `apply_fn` and each number of queries, however many calls there are.
@functools.partial(jax.jit, static_argnums=0)
def _logits(
    apply_fn: ApplyFn,
    params: Any,
    queries: Any,
) -> jax.Array:
    return jax.vmap(in_full_precision(apply_fn), in_axes=(None, 0))(params, queries)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _certificates(
    apply_fn: ApplyFn,
    structure: Any,
    shapes: Any,
    member: Any,
) -> Any:
    """Returns certificates of constant queries.

    Only the text of this program is used. The real queries are facts.
    """
    queries = structure.unflatten([np.zeros(*shape) for shape in shapes])
    return certify(member, apply_fn, queries)


def _labels(
    apply_fn: ApplyFn,
    params: Any,
    queries: Any,
) -> np.ndarray:
    """Returns the labels int64 [Q] by the rule of `certify`."""
    logits = np.asarray(_logits(apply_fn, params, queries))
    logits = logits.reshape(len(logits), -1)
    if logits.shape[1] == 1:
        # As `certify` decides.
        return (logits[:, 0] > 0).astype(np.int64)
    return logits.argmax(axis=1)


# --- Which data sets the bounds cover -----------------------------------------------------------


def _certified_steps(
    members: Sequence[Any],
    account: Account,
    *,
    fixed_parts: bool,
) -> int:
    """Returns the number of certified steps to a neighbouring data set.

    Raises ValueError for bounds of another relation.
    """
    if not members:
        raise ValueError("bounds is empty. Give at least one model.")
    threats = {member.threat for member in members}
    if len(threats) > 1:
        raise ValueError(f"bounds must all be certified for one threat, got {sorted(threats)}.")
    (threat,) = threats
    registered = account.adjacency
    if (threat, registered) not in _STEPS:
        fitting = sorted(adjacency for known, adjacency in _STEPS if known == threat)
        raise ValueError(
            f"bounds certified for threat={threat!r} cover {fitting}, but dataset {account.name!r} "
            f"is registered with adjacency={registered!r}. Train with threat='add_remove', or "
            "register the dataset with other terms."
        )
    if any(member.product != "tight" for member in members):
        raise ValueError(
            "bounds must have product='tight'. Others do not nest across neighbours in floating "
            "point."
        )
    if any(member.ks[0] != 0 for member in members):
        raise ValueError(
            "ks of the bounds must start at 0. Otherwise rounding may give neighbours different "
            "labels."
        )
    if len(members) > 1 and threat != "add_remove" and not fixed_parts:
        raise ValueError(
            f"an ensemble with bounds for threat={threat!r} does not cover a replaced record that "
            "changes its part. Train with threat='add_remove', or pass fixed_parts=True if a "
            "lasting identity assigns the parts."
        )
    return _STEPS[threat, registered]


# --- Student ------------------------------------------------------------------------------------


def answered(queries: Any, answers: Any) -> tuple[Any, np.ndarray]:
    """Returns the queries with an answer, and their answers: examples (query, label) for
    `train_student`.

    `queries` is a pytree of arrays [Q, ...]. `answers` is int [Q] with -1 for none, as from
    `pate_predict`.
    """
    answers = np.asarray(answers)
    # -1 is no answer, and no label to learn.
    rows = np.flatnonzero(answers >= 0)
    examples = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], queries)
    return examples, answers[rows].astype(np.int32)


def train_student(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    examples: Any,
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int,
    seed: bytes,
) -> Any:
    """Trains a student model on private answers, by the public training `fit_public`.

        examples = answered(queries, answers)
        student = train_student(loss_fn, params, examples, optimizer=optax.adam(1e-3), ...)

    The student is post-processing and costs nothing beyond the answers, if `params`, the queries
    and all settings are public or private releases. Raises ValueError for no examples, or leaves of
    different lengths.
    """
    if count_rows(examples, "examples") == 0:
        raise ValueError("examples is empty. Check that some queries have an answer.")
    return fit_public(
        loss_fn,
        params,
        examples,
        optimizer,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        progress=False,
    )
