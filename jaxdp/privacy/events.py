"""The vocabulary of private releases, and one text form for all of them.

An event describes one release for the accountant. **`noise_multiplier` is the standard deviation
(Gaussian) or scale (Laplace) of the noise over the norm of ONE record's contribution**, `noise_std
/ clip_norm`, under every adjacency. Replacing a record moves a sum by up to twice that norm.
`jaxdp.privacy.accounting` charges this factor. `PureDpEvent` and `ZCDpEvent` state a guarantee FOR
the adjacency of the dataset that they are spent on. `LabelDpEvent` states one for labels only.
`RepeatAndSelectDpEvent` is the best of a random number of runs, `OneOfDpEvent` a run of one of
several mechanisms.

Unknown classes, unknown JSON and impossible parameters raise an error.
"""

import ast
import dataclasses
import json
import math
import numbers
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dp_accounting.dp_event import (
    ComposedDpEvent,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    SingleEpochTreeAggregationDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    ZCDpEvent,
)

from jaxdp.files import parse_json, shown

__all__ = ["ComposedDpEvent", "CorrelatedSampleDpEvent", "Counts", "DiscreteLaplaceDpEvent"]
__all__ += ["DpEvent", "GaussianDpEvent", "LabelDpEvent", "LaplaceDpEvent", "MonteCarloDpEvent"]
__all__ += ["NoOpDpEvent", "NonPrivateDpEvent", "OneOfDpEvent", "OwnedGaussianDpEvent"]
__all__ += ["PoissonSampledDpEvent", "PureDpEvent", "RandomizedResponseDpEvent"]
__all__ += ["RepeatAndSelectDpEvent", "SampledWithoutReplacementDpEvent", "SelfComposedDpEvent"]
__all__ += ["SingleEpochTreeAggregationDpEvent", "TruncatedSubsampledGaussianDpEvent"]
__all__ += ["UnprovenDpEvent", "ZCDpEvent"]
__all__ += ["compose", "composition", "describe", "from_json", "kind", "parse", "precision"]
__all__ += ["to_json", "unproven"]

Counts = Counter[DpEvent]


@dataclasses.dataclass(frozen=True)
class PureDpEvent(DpEvent):
    """Any release that is `epsilon`-DP with delta = 0.

    The guarantee is for the adjacency of the dataset that the event is spent on.

    The accountant uses the worst pure pair, binary randomised response (Kairouz, Oh, Viswanath
    2015, arXiv 1311.0776).

    Attributes:
        epsilon: A finite number >= 0.
    """

    epsilon: float


@dataclasses.dataclass(frozen=True)
class LabelDpEvent(PureDpEvent):
    """Any release that is `epsilon`-DP with delta = 0 for the replacement of one label.

    It says nothing about features, which may be public, and nothing about who is in the data. So a
    ledger charges it to datasets with the adjacency "replace_label" only, and charges them nothing
    else. Accounting is that of `PureDpEvent`.

    Attributes:
        epsilon: A finite number >= 0.
    """


@dataclasses.dataclass(frozen=True)
class OneOfDpEvent(DpEvent):
    """One of several releases, which is chosen without the data, such as one candidate of a search.

    Who sees the release may know which one it is. At every order its Renyi divergence is at most
    the largest one of the events. Proof: let the choice c have the same probability p_c for both
    data. The moment of the pair (c, release) is the mean of the moments of the releases, and a mean
    is at most the maximum. The choice may be dropped, by post-processing.

    Attributes:
        events: One or more events.
    """

    events: tuple[DpEvent, ...]


@dataclasses.dataclass(frozen=True)
class OwnedGaussianDpEvent(DpEvent):
    """A Gaussian on a Poisson sample of records, of which one owner has several.

    Neighbours have the same records with the same owners, and differ in what the records of one
    owner contain (Ganesh et al. 2025, arXiv 2503.03622, "fixed graph"). So a ledger charges it to
    datasets with the adjacency "zero_out" only: the records of one owner against zeros.

    The number of an owner's records in the sample is binomial, and each moves the sum by at most
    one norm. The pair is the mixture of N(j, s^2) with the weights of Binomial(records, q) against
    N(0, s^2) (Choquette-Choo et al. 2024, arXiv 2310.15526, section 4).

    Attributes:
        sampling_probability: q, with which each record joins the sample, independently.
        noise_multiplier: s, the standard deviation over the norm of ONE record's contribution.
        records: The most records that one owner has among those that are sampled from.
    """

    sampling_probability: float
    noise_multiplier: float
    records: int


class CorrelatedSampleDpEvent(PoissonSampledDpEvent):
    """One cycle of a run with cyclic Poisson sampling and correlated noise, about one unit.

    Its accounting is that of `PoissonSampledDpEvent` (Choquette-Choo et al. 2023, arXiv 2306.08153,
    theorem 4). Cycles are separate releases about one unit only: what two units of different groups
    move overlaps from one cycle to the next. So group privacy has no rule for this event, and
    converts from one unit.

    Attributes:
        sampling_probability: q, with which a record of the group of a step is sampled.
        event: The Gaussian whose noise counts over the longest column of the strategy.
    """

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class MonteCarloDpEvent(DpEvent):
    """A whole run whose cost was estimated by simulation (`jaxdp.privacy.participation`).

    It holds the result of the simulation, so that a ledger that is read again gives the same
    number. It is proven for "add_remove" and "zero_out". One event stands for all steps of its
    run: the steps share who takes part, so a part of them has no event.

    Attributes:
        mechanism: What was simulated, such as "BallsInBins(20, 400, Gaussian(2))".
        draws: The number of draws behind each estimate.
        failure_probability: The probability over the draws that one of the deltas is too small. It
            is a part of every delta of the event.
        epsilons: 0 and further numbers, ascending, float [N].
        forward: Bounds in [0, 1] on the deltas at `epsilons` where the record is in the data that
            are drawn from, not ascending, float [N].
        backward: The same where the record is not.
    """

    mechanism: str
    draws: int
    failure_probability: float
    epsilons: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class UnprovenDpEvent(DpEvent):
    """A release without a privacy proof. It makes every epsilon that includes it infinite.

    Attributes:
        reason: What the proof lacks, for reports. Never put data in it.
    """

    reason: str


def unproven(reason: str) -> UnprovenDpEvent:
    """Returns the event of a release with empirical privacy only.

    The ledger's report shows `reason`.
    """
    event: UnprovenDpEvent = _validated(UnprovenDpEvent(reason))
    return event


def _real(low: float, high: float = math.inf, *, allow_inf: bool = False) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"must be a Python or NumPy real number, got {type(value).__name__}.")
        try:
            number = float(value) + 0.0  # Adding 0.0 gives -0.0 and 0.0 the same text.
        except OverflowError:
            raise ValueError(f"must be at most {high:g}, got an integer beyond float64.") from None
        if not low <= number <= high or (math.isinf(number) and not allow_inf):
            raise ValueError(
                f"must be {'' if allow_inf else 'finite and '}in [{low:g}, {high:g}], got "
                f"{number!r}."
            )
        return number

    return check


# Accounting computes with float64, which holds every integer up to this one.
_MOST = 2**53


def _integer(low: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"must be an integer, got {type(value).__name__}.")
        number = int(value)
        if number < low:
            raise ValueError(f"must be an integer >= {low}, got {number}.")
        if number > _MOST:
            digits = math.floor(math.log10(number)) + 1
            raise ValueError(f"must be at most 2^53, got a number of {digits} digits.")
        return number

    return check


def _sequence(value: Any) -> Iterable[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"must be a sequence, got {type(value).__name__}.")
    return value


def _step_counts(value: Any) -> int | tuple[int, ...]:
    if isinstance(value, numbers.Integral):
        return _integer(1)(value)
    counts = tuple(map(_integer(1), _sequence(value)))
    if not counts:
        raise ValueError("must not be empty.")
    return counts


def _reals(low: float, high: float, sign: int) -> Callable[[Any], tuple[float, ...]]:
    """Returns a check of a sequence of numbers that rises, or falls with sign -1."""

    def check(value: Any) -> tuple[float, ...]:
        numbers = tuple(map(_real(low, high), _sequence(value)))
        signed = [sign * number for number in numbers]
        if not numbers or signed != sorted(signed):
            raise ValueError("must be a sequence in order, and not empty.")
        return numbers

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be a non-empty string, got {value!r}.")
    return value


def _event(value: Any) -> DpEvent:
    return compose(composition(value))


def _alternatives(value: Any) -> tuple[DpEvent, ...]:
    """Returns the different events of a sequence that no other one of them contains."""
    if isinstance(value, str | DpEvent) or not isinstance(value, Iterable):
        raise TypeError(f"must be a sequence of events, got {type(value).__name__}.")
    compositions = {}
    for event in value:
        counts = composition(event)
        # Equal events have equal texts, so each stands here once.
        compositions[_dumps(_encode(compose(counts)))] = counts
    if not compositions:
        raise ValueError("must not be empty.")
    alternatives = []
    for _, counts in sorted(compositions.items()):
        # 100 steps cost at most as much as 200 equal ones.
        if not any(counts < larger for larger in compositions.values()):
            alternatives.append(compose(counts))
    return tuple(alternatives)


_FIELDS: Mapping[type[DpEvent], Mapping[str, Callable[[Any], Any]]] = {
    NoOpDpEvent: {},
    NonPrivateDpEvent: {},
    GaussianDpEvent: {"noise_multiplier": _real(0)},
    LaplaceDpEvent: {"noise_multiplier": _real(0)},
    DiscreteLaplaceDpEvent: {"noise_parameter": _real(0), "sensitivity": _integer(1)},
    RandomizedResponseDpEvent: {"noise_parameter": _real(0, 1), "num_buckets": _integer(1)},
    OwnedGaussianDpEvent: {
        "sampling_probability": _real(0, 1),
        "noise_multiplier": _real(0),
        "records": _integer(1),
    },
    PoissonSampledDpEvent: {"sampling_probability": _real(0, 1), "event": _event},
    CorrelatedSampleDpEvent: {"sampling_probability": _real(0, 1), "event": _event},
    SampledWithoutReplacementDpEvent: {
        "source_dataset_size": _integer(1),
        "sample_size": _integer(0),
        "event": _event,
    },
    TruncatedSubsampledGaussianDpEvent: {
        "dataset_size": _integer(0),
        "sampling_probability": _real(0, 1),
        "truncated_batch_size": _integer(0),
        "noise_multiplier": _real(0),
    },
    SingleEpochTreeAggregationDpEvent: {"noise_multiplier": _real(0), "step_counts": _step_counts},
    RepeatAndSelectDpEvent: {"event": _event, "mean": _real(1), "shape": _real(0, allow_inf=True)},
    OneOfDpEvent: {"events": _alternatives},
    ZCDpEvent: {"rho": _real(0), "xi": _real(0)},
    PureDpEvent: {"epsilon": _real(0)},
    LabelDpEvent: {"epsilon": _real(0)},
    MonteCarloDpEvent: {
        "mechanism": _text,
        "draws": _integer(1),
        "failure_probability": _real(0, 1),
        "epsilons": _reals(0, 1e6, 1),
        "forward": _reals(0, 1, -1),
        "backward": _reals(0, 1, -1),
    },
    UnprovenDpEvent: {"reason": _text},
}
_NAMES: Mapping[type[DpEvent], str] = {cls: cls.__name__.removesuffix("DpEvent") for cls in _FIELDS}
_CLASSES: Mapping[str, type[DpEvent]] = {name: cls for cls, name in _NAMES.items()}


def _validated(event: Any) -> Any:
    cls = type(event)
    if cls not in _FIELDS:
        raise ValueError(
            f"event of type {cls.__module__}.{cls.__qualname__} is not in the vocabulary of "
            "jaxdp.privacy.events. Use one of its events, PureDpEvent(epsilon) for a release with "
            "a pure proof, ZCDpEvent(rho) for one with a concentrated proof, or unproven(reason)."
        )
    values = {name: _checked(event, name, check) for name, check in _FIELDS[cls].items()}
    sample_size = values.get("sample_size", 0)
    if sample_size > values.get("source_dataset_size", math.inf):
        raise ValueError(
            "SampledWithoutReplacementDpEvent.sample_size: must be at most source_dataset_size."
        )
    if cls is MonteCarloDpEvent:
        _check_curves(values["epsilons"], values["forward"], values["backward"])
    return cls(**values)


def _check_curves(epsilons: tuple[float, ...], *deltas: tuple[float, ...]) -> None:
    """Raises ValueError unless the epsilons begin at 0, with a delta of each direction at each."""
    points = len(set(epsilons))
    if epsilons[0] != 0 or any(len(curve) != points for curve in (epsilons, *deltas)):
        raise ValueError(
            "MonteCarloDpEvent.epsilons: must be different numbers from 0 on, with one delta of "
            "forward and of backward for each."
        )


def _checked(event: Any, name: str, check: Callable[[Any], Any]) -> Any:
    try:
        return check(getattr(event, name))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{type(event).__name__}.{name}: {error}") from error


def composition(event: DpEvent) -> Counts:
    """Flattens an event into {leaf event: count}, which accounting and ledger use.

    Equal releases get equal leaves. `ComposedDpEvent` and `SelfComposedDpEvent` are counted, and
    `NoOpDpEvent` disappears. Poisson sampling with probability 1 is dropped. A composition of
    Gaussians on one Poisson sample becomes the Gaussian with multiplier (sum_i s_i^-2)^-1/2 on that
    sample. Events with a separate sample for each would under-count. A mechanism without noise
    becomes `NonPrivateDpEvent`.

    Returns:
        Counts >= 1 of validated, hashable leaves, ordered by the leaves' JSON.

    Raises:
        ValueError, TypeError: The event class is unknown, or a parameter is out of range. The
            message names it.
    """
    counts: Counts = Counter()

    def add(node: DpEvent, count: int) -> None:
        if count == 0:
            return
        if isinstance(node, ComposedDpEvent):
            for child in node.events:
                add(child, count)
        elif isinstance(node, SelfComposedDpEvent):
            add(node.event, count * _checked(node, "count", _integer(0)))
        else:
            leaf = _normal_form(_validated(node))
            if isinstance(leaf, ComposedDpEvent | SelfComposedDpEvent):
                add(leaf, count)
            elif not isinstance(leaf, NoOpDpEvent):
                counts[leaf] += count
                # Nested counts multiply, and float64 has every integer up to this one only.
                if counts[leaf] > _MOST:
                    raise ValueError(
                        "SelfComposedDpEvent.count: nested counts must multiply to at most 2^53 "
                        "releases of a kind. Charge fewer releases."
                    )

    add(event, 1)
    # The order decides how sums of losses are rounded, and the text of the event.
    by_text = sorted(counts.items(), key=lambda item: _dumps(_encode(item[0])))
    return Counter(dict(by_text))


# Squares of smaller multipliers overflow, and their epsilon exceeds 1e200.
_NO_NOISE = 1e-100
# Squares of larger multipliers overflow. They are charged as this one, whose delta is 1e-100 at
# epsilon 0.
MOST_NOISE = 1e100


def _normal_form(leaf: DpEvent) -> DpEvent:
    """Returns the simplest event that means the same.

    PoissonSampled(1.0, Gaussian(2.0)) becomes Gaussian(2.0), and Gaussian(0.0) NonPrivate.
    """
    match leaf:
        case OwnedGaussianDpEvent(sampling_probability=0.0):
            return NoOpDpEvent()
        case (
            GaussianDpEvent(noise_multiplier=scale)
            | LaplaceDpEvent(noise_multiplier=scale)
            | SingleEpochTreeAggregationDpEvent(noise_multiplier=scale)
            | OwnedGaussianDpEvent(noise_multiplier=scale)
        ):
            return NonPrivateDpEvent() if scale < _NO_NOISE else leaf
        case DiscreteLaplaceDpEvent(noise_parameter=0.0):
            return NonPrivateDpEvent()  # There is no such distribution.
        case RandomizedResponseDpEvent():
            if leaf.num_buckets == 1 or leaf.noise_parameter == 1:
                return NoOpDpEvent()  # no answer depends on the record
            return NonPrivateDpEvent() if leaf.noise_parameter == 0 else leaf
        case TruncatedSubsampledGaussianDpEvent():
            # A factor of 0 means that no record is read.
            factors = (leaf.sampling_probability, leaf.truncated_batch_size, leaf.dataset_size)
            if 0 in factors:
                return NoOpDpEvent()
            return NonPrivateDpEvent() if leaf.noise_multiplier < _NO_NOISE else leaf
        case PureDpEvent(epsilon=0.0) | ZCDpEvent(rho=0.0, xi=0.0):
            return NoOpDpEvent()
        case (
            PoissonSampledDpEvent(sampling_probability=share)
            | SampledWithoutReplacementDpEvent(sample_size=share)
        ):
            inner = _merged(leaf.event)
            # A sample is a share of 1 or a number of records.
            whole = getattr(leaf, "source_dataset_size", 1)
            if share == 0 or isinstance(inner, NoOpDpEvent):
                return NoOpDpEvent()
            if share == whole or isinstance(inner, NonPrivateDpEvent | UnprovenDpEvent):
                return inner  # all records, or what no sampling bounds
            return type(leaf)(**_values(leaf) | {"event": inner})
        case RepeatAndSelectDpEvent(event=NoOpDpEvent()):
            return leaf.event
        case RepeatAndSelectDpEvent():
            return _boundless(leaf.event) or leaf
        case OneOfDpEvent(events=(event,)):
            return event
        case OneOfDpEvent():
            return next(filter(None, map(_boundless, leaf.events)), leaf)
    return leaf


def _boundless(event: DpEvent) -> DpEvent | None:
    """Returns a release of a normal event that is unproven or not private, or None."""
    match event:
        case ComposedDpEvent(events=events):
            return next(filter(None, map(_boundless, events)), None)
        case SelfComposedDpEvent(event=inner):
            return _boundless(inner)
        case NonPrivateDpEvent() | UnprovenDpEvent():
            return event
    return None


def _merged(event: DpEvent) -> DpEvent:
    """Returns one Gaussian for a composition of Gaussians on the same records.

    Returns any other event unchanged.
    """
    counts = composition(event)
    if sum(counts.values()) <= 1 or not all(isinstance(leaf, GaussianDpEvent) for leaf in counts):
        return event
    return _normal_form(GaussianDpEvent(precision(counts) ** -0.5))


def precision(gaussians: Mapping[DpEvent, int]) -> float:
    """Returns the sum of count / noise_multiplier^2.

    One Gaussian of this precision equals all of them.
    """
    terms = []
    for leaf, count in gaussians.items():
        multiplier = min(leaf.noise_multiplier, MOST_NOISE)
        terms.append(count / multiplier / multiplier)
    # Exactly rounded, so that the order of spends does not matter.
    return math.fsum(terms)


def _values(event: DpEvent) -> dict[str, Any]:
    return {name: getattr(event, name) for name in _FIELDS[type(event)]}


def compose(counts: Mapping[DpEvent, int]) -> DpEvent:
    """Returns the one hashable event that `composition` flattens to `counts`."""
    events = [
        leaf if count == 1 else SelfComposedDpEvent(leaf, count) for leaf, count in counts.items()
    ]
    if not events:
        return NoOpDpEvent()
    return events[0] if len(events) == 1 else ComposedDpEvent(tuple(events))


def to_json(event: DpEvent) -> str:
    """Returns the canonical text of an event's `composition`, with exact floats.

    Equal releases have equal texts for every nesting and order.

    Raises:
        ValueError, TypeError: As in `composition`.
    """
    text = _dumps(_encode(compose(composition(event))))
    parse_json(text)  # a ledger that cannot read an event back must not charge it
    return text


def from_json(text: str) -> DpEvent:
    """Reads the text of `to_json`.

    Raises:
        ValueError, TypeError: `text` is not JSON, names an unknown event or field, or holds an
            impossible value.
    """
    return _decode(parse_json(text))


def describe(event: DpEvent) -> str:
    """Returns an event as one short line for people.

    An example is "PoissonSampled(0.01, Gaussian(1.1)) x 500".
    """
    match event:
        case ComposedDpEvent():
            return " + ".join(describe(child) for child in event.events)
        case SelfComposedDpEvent():
            return f"{describe(event.event)} x {event.count}"
        case MonteCarloDpEvent():
            return (
                f"MonteCarlo({shown(event.mechanism)}, {event.draws} draws, wrong with probability "
                f"{event.failure_probability:g} which delta includes)"
            )
    arguments = map(_describe_value, _values(event).values())
    return f"{_NAMES[type(event)]}({', '.join(arguments)})"


def kind(leaf: DpEvent) -> str:
    """Returns the type of a leaf for people, for example "PoissonSampled(Gaussian)"."""
    name = _NAMES[type(leaf)]
    inner = getattr(leaf, "event", None)
    if isinstance(leaf, OneOfDpEvent):
        inner = leaf.events[0]
    return name if inner is None else f"{name}({kind(inner)})"


def _describe_value(value: Any) -> str:
    if isinstance(value, DpEvent):
        return describe(value)
    if isinstance(value, tuple) and isinstance(value[0], DpEvent):
        return f"({', '.join(map(describe, value))})"
    return f"{value:.6g}" if isinstance(value, float) else shown(value)


def parse(text: str) -> DpEvent:
    """Reads the text of `describe`, in which `*` may stand for `x`.

    An example is "500 * PoissonSampled(0.01, Gaussian(1.1)) + Laplace(2)".

    Nothing is evaluated. Arguments are numbers, texts and events, in the order of the fields of
    their class.

    Raises:
        ValueError, TypeError: The syntax or a name is unknown, or a value is impossible.
    """
    try:
        # `describe` writes "Gaussian(1.1) x 500".
        expression = re.sub(r"\)\s+x\s+(?=\d)", ") * ", text.strip())
        event = _read(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(
            f"event {text[:80]!r} cannot be read: {error.msg}. Write for example 100 * "
            "Gaussian(1.1)."
        ) from error
    except (RecursionError, MemoryError):
        raise ValueError(
            f"event {text[:80]!r} nests too deeply. Write for example 100 * Gaussian(1.1)."
        ) from None
    return _event(event)


def _read(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str()):
            return node.value
        case ast.Name(id="inf"):
            return math.inf
        case ast.Tuple():
            return tuple(map(_read, node.elts))
        case ast.BinOp(op=ast.Add()):
            return ComposedDpEvent([_read(node.left), _read(node.right)])
        case (
            ast.BinOp(op=ast.Mult(), left=ast.Constant(value=int(count)), right=event)
            | ast.BinOp(op=ast.Mult(), left=event, right=ast.Constant(value=int(count)))
        ):
            return SelfComposedDpEvent(_read(event), count)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _CLASSES:
            cls = _CLASSES[name]
            fields = _FIELDS[cls]
            if len(node.args) != len(fields):
                raise ValueError(
                    f"event {name} takes {len(fields)} arguments, {list(fields)}, got "
                    f"{len(node.args)}."
                )
            arguments = map(_read, node.args)
            return cls(**dict(zip(fields, arguments, strict=True)))
    raise ValueError(
        f"event {ast.unparse(node)!r} cannot be read. Use numbers, + and *, and the names "
        f"{sorted(_CLASSES)}."
    )


def _dumps(node: Any) -> str:
    return json.dumps(node, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _encode(value: Any) -> Any:
    match value:
        case ComposedDpEvent():
            return {"type": "Composed", "events": [_encode(child) for child in value.events]}
        case SelfComposedDpEvent():
            return {"type": "SelfComposed", "event": _encode(value.event), "count": value.count}
        case DpEvent():
            fields = {name: _encode(field) for name, field in _values(value).items()}
            return {"type": _NAMES[type(value)], **fields}
        case tuple():
            return [_encode(item) for item in value]
        case float() if math.isinf(value):
            # JSON has no infinity.
            return "inf"
    return value


def _decode(node: Any) -> DpEvent:
    if not isinstance(node, dict) or not isinstance(node.get("type"), str):
        raise ValueError("event JSON must be an object with a 'type'.")
    name = node["type"]
    values = {key: value for key, value in node.items() if key != "type"}
    if name == "Composed" and set(values) == {"events"} and isinstance(values["events"], list):
        return _event(ComposedDpEvent([_decode(child) for child in values["events"]]))
    if name == "SelfComposed" and set(values) == {"event", "count"}:
        return _event(SelfComposedDpEvent(_decode(values["event"]), values["count"]))
    if name not in _CLASSES:
        raise ValueError(
            f"event JSON has the unknown type {name!r}. A newer jaxdp may have written it."
        )
    cls = _CLASSES[name]
    if set(values) != set(_FIELDS[cls]):
        raise ValueError(
            f"event JSON of type {name!r} must have the fields {sorted(_FIELDS[cls])}, got "
            f"{sorted(values)}."
        )
    if "event" in values:
        values["event"] = _decode(values["event"])
    if isinstance(values.get("events"), list):
        values["events"] = tuple(map(_decode, values["events"]))
    if values.get("shape") == "inf":
        values["shape"] = math.inf
    return _validated(cls(**values))
