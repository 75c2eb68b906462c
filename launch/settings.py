"""Checks of the values in a config. A wrong value is refused before a workdir is bound and anything
is spent.
"""

import collections
import contextlib
import functools
import itertools
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import catalogue


class _Rule(NamedTuple):
    """Finite numbers from `low` to `high`, both included. Only integers if `whole`."""

    low: float
    high: float
    says: str
    whole: bool = False

    def allows(self, value: float) -> bool:
        """Returns whether a number fits. NaN and infinity never do."""
        return (
            math.isfinite(value)
            and self.low <= value <= self.high
            and not (self.whole and value % 1)
        )


_ANY = _Rule(-math.inf, math.inf, "finite")
_COUNT = _Rule(1, math.inf, "an integer of at least 1", whole=True)
_COUNT_OR_NONE = _Rule(0, math.inf, "an integer of at least 0", whole=True)
# in the range of float32, with room for products
_POSITIVE = _Rule(1e-30, 1e30, "positive, between 1e-30 and 1e+30")
_NOT_NEGATIVE = _Rule(0, 1e30, "at least 0 and at most 1e+30")
_SHARE = _Rule(0, 1, "in [0, 1]")
_BELOW_ONE = _Rule(0, math.nextafter(1, 0), "in [0, 1)")
_NORM = _Rule(
    1e-8, 1e8, "between 1e-08 and 1e+08, so that float32 squares neither overflow nor underflow"
)
_SEVERITY = _Rule(1, 5, "an integer in 1..5", whole=True)
# Rules by the last names of a field. The longest match counts. A field `values` has the rule of its
# parent.
_NAMES: Mapping[_Rule, str] = {
    _NORM: "clip_norm clip_norms batch_clip_norms residual_clip_norm",
    _POSITIVE: (
        "learning_rate learning_rates clip_learning_rate clipped_steps clip epsilon epsilons "
        "budgets std scales radius separation threshold ratio temperature factor parts.upstream "
        "parts.public parts.private parts.sources parts.stream parts.client parts.test "
        "robustness.lengths"
    ),
    _COUNT: (
        "steps epochs batch_size perturbation_batch_size checkpoint_every accumulate every period "
        "trials runs repetitions draws inputs candidates queries members samples sources records "
        "shots max_distance max_records client_images fisher_images anchors basis_size "
        "basis_every groups ascent_steps devices bins num_classes depth width widths hidden "
        "num_heads patch_size mlp_width protocol.seeds noise.seeds data.images tuning.images "
        "length lengths positions most stages bits fora_steps ginver_steps iterations data.train "
        "data.test"
    ),
    _COUNT_OR_NONE: (
        "data.num_classes data.tuning.images pretrain.steps physical_batch_size "
        "truncated_batch_size augmult "
        "copies n_patches directions microbatch_size warmup_steps evaluate_every crop_padding "
        "images server_images frontends size channels dimensions cut dense head_hidden seed seeds "
        "init_seed split_seed data_seed query_seed drop_seed stable.steps fewest patience "
        "witnesses noise_steps negation head_padding bands"
    ),
    _NOT_NEGATIVE: (
        "weight_decay lr_decay lr_min ascent_radius gamma ascent_rate alpha laplace laplace_scale "
        "query_laplace_scale noise_multiplier score_noise_multiplier relative_std fisher_strength "
        "generation.temperature l1 layer_scale norm_epsilon"
    ),
    _BELOW_ONE: "momentum ema_decay quantile delta tolerance b1 b2",
    _SHARE: (
        "pretrain_fraction label_share patch_share kept_fraction confidence whiten keep drops "
        "warmup_accuracy dampening patches"
    ),
    _SEVERITY: "severity",
}
# Fields for which None says that there is nothing.
_OPTIONAL = ("preprocessing", "watch", "evaluate_every", "truncated_batch_size")
# Parts in which a user chooses the names of the fields.
_OF_USERS = (
    "grids",
    "upstreams",
    "methods",
    "sets",
    "method_options",
    "others",
    "hyper_parameters",
)
# Parts whose fields take values of several kinds.
_SEVERAL = {"parts", "grid"}
_NUMBER = "a number"
_PART = "a part with fields of its own"
_RULES: dict[str, _Rule] = {}
for _rule, _names in _NAMES.items():
    _RULES |= dict.fromkeys(_names.split(), _rule)


def check_values(config: Any) -> None:
    """Refuses a value of a config that no experiment can use: `check_numbers`, and a value of
    another kind than in the configs of the launcher, such as a text in place of a number.

    Args:
      config: An `ml_collections.ConfigDict`.

    Raises:
      ValueError: The message has the field, its value, and a value that it may have.
    """
    check_numbers(config)
    known = _known(catalogue.launchers(config))
    for names, value in _fields(config, ()):
        examples = known.get(_key(names), [])
        if examples and not _is_free(names, value) and not _is_like(value, examples, names):
            field = ".".join(names)
            kinds = " or ".join(sorted({_kind(example) for example in examples}))
            example = max(examples, key=bool)  # one that is not empty, if there is one
            raise ValueError(
                f"config.{field} must be {kinds}, such as {_shown(example)}, got "
                f"{_shown(value)}. Change it with --config.{field}=..."
            )


@functools.cache
def _known(launchers: tuple[str, ...]) -> Mapping[tuple[str, ...], list[Any]]:
    """Returns the values of each field in the configs of some launchers."""
    values = collections.defaultdict(list)
    for config in catalogue.known():
        if {*launchers} & {*config.launchers}:
            for names, value in _fields(catalogue.load(config.name), ()):
                values[_key(names)].append(value)
    return values


def _fields(config: Any, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the names and the value of each field of a config, its parts included."""
    for name, value in config.items():
        names = (*before, str(name))
        yield names, value
        if hasattr(value, "items"):
            yield from _fields(value, names)


def _key(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of a field, without those that a user chooses."""
    chosen = (parent in _OF_USERS for parent in ("", *names))
    return tuple("*" if is_chosen else name for is_chosen, name in zip(chosen, names, strict=False))


def _kind(value: Any) -> str:
    match value:
        case None:
            return "None"
        case bool():
            return "True or False"
        case numbers.Real():
            return _NUMBER
        case str():
            return "a text"
        case list() | tuple():
            return "a list"
    return _PART


def _is_like(value: Any, examples: list[Any], names: tuple[str, ...]) -> bool:
    """Returns whether a value has the kind of an example, and the entries of a list too."""
    kinds = {_kind(example) for example in examples}
    if _kind(True) in kinds and value in (0, 1):
        return True
    if not isinstance(value, list | tuple):
        return _kind(value) in kinds
    if _PART in kinds:
        return not value  # nothing
    lists = (example for example in examples if isinstance(example, list | tuple))
    entries = {_kind(entry) for entry in itertools.chain(*lists)}
    if not entries and _rule_of(names) is not _ANY:
        entries = {_NUMBER}
    return _kind(value) in kinds and (not entries or {_kind(entry) for entry in value} <= entries)


def _is_free(names: tuple[str, ...], value: Any) -> bool:
    """Returns whether a field takes values of several kinds, or None where there is nothing."""
    *_, name = names
    return not _SEVERAL.isdisjoint(names[:-1]) or (value is None and name in _OPTIONAL)


def _shown(value: Any) -> str:
    return f"{{{', '.join(value)}}}" if hasattr(value, "items") else repr(value)


def check_numbers(config: Any) -> None:
    """Refuses a number of a config that no experiment can use, such as a clip norm of 0 or a
    learning rate of NaN.

    Args:
      config: An `ml_collections.ConfigDict`, or nested dicts, lists and tuples.

    Raises:
      ValueError: The message has the field, its value and the allowed values.
    """
    for names, value in _numbers(config, ()):
        rule = _rule_of(names)
        if not rule.allows(value):
            field = ".".join(names)
            raise ValueError(
                f"config.{field} must be {rule.says}, got {value!r}. Change it with "
                f"--config.{field}=..."
            )


def _rule_of(names: Sequence[str]) -> _Rule:
    """Returns the rule of the longest known ending of a field's names."""
    names = [name for name in names if name != "values"]
    for length in (3, 2, 1):
        if rule := _RULES.get(".".join(names[-length:])):
            return rule
    return _ANY


@contextlib.contextmanager
def named(part: str, config: Any, **fields: str) -> Iterator[None]:
    """Names the field of the config in a ValueError of the body that begins with an argument of the
    library.

    Args:
      part: The part of the config whose fields have the names of arguments.
      config: That part.
      **fields: The fields of other arguments, for example steps="train.steps".
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        rest = re.sub(r"^\w*", "", text)
        argument = text.removesuffix(rest)
        field = fields.get(argument)
        if not field and argument not in config:
            raise
        field = field or f"{part}.{argument}"
        raise ValueError(f"config.{field}{rest}") from error


def _numbers(value: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int | float]]:
    if hasattr(value, "items"):
        for name, inner in value.items():
            yield from _numbers(inner, (*names, str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, names)
    elif value is None and names[-1:] == ("parts",):
        raise ValueError(
            f"config.{'.'.join(names)} must name the part of each role, such as private=0.8 and "
            "test=0.2, got None."
        )
    elif value is None and names and names[-1].endswith("seed"):
        raise ValueError(
            f"config.{'.'.join(names)} must be an integer of at least 0, got None. With None each "
            f"start would draw anew. Change it with --config.{'.'.join(names)}=..."
        )
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield names, value
