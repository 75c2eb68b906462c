"""Clipping rules, which map the norm of a per-example gradient to a scale factor."""

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
import numpy as np

# Smaller gradient norms may be reported as 0 because their squares underflow float32. 10^9 entries
# of 1e-19 each have a norm of 3e-15, and none of their squares is a normal number.
_SMALLEST_NORM = 1e-12


@runtime_checkable
class ClipRule(Protocol):
    """A hashable object, such as a frozen dataclass, that maps norms to factors.

    `jaxdp.clipped_grad` takes it as `clip_rule` on every engine.
    """

    def factor(
        self,
        norms: jax.Array,
        clip_norm: jax.Array,
    ) -> jax.Array:
        """Computes factors [B] >= 0, with factor * norm <= bound(clip_norm).

        Args:
          norms: [B], at least 0.
          clip_norm: [], at least 0. A rule that divides by it returns 1 where it is infinite.
        """

    def bound(self, clip_norm: Any) -> Any:
        """Returns the L2 norm that no clipped gradient exceeds.

        `ClippedGrad.sensitivity` reports it.
        """


@dataclasses.dataclass(frozen=True)
class Global:
    """The rule that scales only gradients longer than C (Abadi et al. 2016, Algorithm 1)."""

    def factor(
        self,
        norms: jax.Array,
        clip_norm: jax.Array,
    ) -> jax.Array:
        """Computes min(1, C / ||g||)."""
        is_long = norms > clip_norm
        # Division by a norm of 0 would pass NaN through the derivative of `where`.
        divisors = jnp.where(norms > 0, norms, 1)
        return jnp.where(is_long, clip_norm / divisors, 1)

    def bound(self, clip_norm: Any) -> Any:
        """Returns C."""
        return clip_norm


@dataclasses.dataclass(frozen=True)
class Automatic:
    """The rule under which examples count alike, whatever their gradient norm.

    It is that of Bu et al. (2023, arXiv:2206.07136).
    """

    # It lets a gradient that is almost zero contribute almost nothing.
    gamma: float = 0.01

    def factor(
        self,
        norms: jax.Array,
        clip_norm: jax.Array,
    ) -> jax.Array:
        """Computes C / (||g|| + gamma), or 1 if C is infinite."""
        return jnp.where(jnp.isinf(clip_norm), 1, clip_norm / (norms + self.gamma))

    def bound(self, clip_norm: Any) -> Any:
        """Returns C."""
        return clip_norm


# The names that `clip_rule` accepts. Every engine uses this table.
CLIP_RULES: dict[str, ClipRule] = {"global": Global(), "automatic": Automatic()}


def find_rule(rule: str | ClipRule) -> ClipRule:
    """Returns the rule with a given name, or a given rule unchanged.

    Raises:
      ValueError: No rule has this name.
      TypeError: `rule` is neither a name nor a hashable `ClipRule`.
    """
    if isinstance(rule, str) and rule in CLIP_RULES:
        return CLIP_RULES[rule]
    expected = (
        f"clip_rule must be one of {sorted(CLIP_RULES)}, or a hashable object with factor(norms, "
        f"clip_norm) and bound(clip_norm), such as an instance of a frozen dataclass, got {rule!r}"
    )
    if isinstance(rule, str):
        raise ValueError(f"{expected}.")
    # A class has the methods too, but without an object to call them on.
    is_rule = isinstance(rule, ClipRule) and not isinstance(rule, type)
    if not is_rule or not isinstance(rule, Hashable):
        raise TypeError(f"{expected} of type {type(rule).__name__}.")
    return rule


def clip_factors(
    rule: ClipRule,
    norms: jax.Array,
    clip_norm: Any,
    bound: Any,
) -> jax.Array:
    """Computes the factors [B] of a rule and caps them at bound / norm.

    Negative and NaN factors count as 0. The factor of a norm that is NaN or infinite is 0.
    """
    # A negative, NaN or unresolvably small clip norm must release nothing, not an unbounded sum.
    clip_norm, bound = (jnp.asarray(x, norms.dtype) for x in (clip_norm, bound))
    clip_norm, bound = (jnp.where(x > _SMALLEST_NORM, x, 0) for x in (clip_norm, bound))
    factors = _factors(rule, norms, clip_norm)
    # A rule of a user cannot break the sensitivity that `bound` states.
    largest = bound / jnp.maximum(norms, _SMALLEST_NORM)
    factors = jnp.minimum(factors, largest)
    # NaN compares as False.
    return jnp.where(factors > 0, factors, 0)


def _factors(
    rule: ClipRule,
    norms: jax.Array,
    clip_norm: jax.Array,
) -> jax.Array:
    factors = rule.factor(norms, clip_norm)
    chex.assert_equal_shape(
        [factors, norms], custom_message=f"{rule!r}.factor must return one factor per norm."
    )
    return factors.astype(norms.dtype)


def check_clip_rule(rule: str | ClipRule) -> None:
    """Checks that a rule respects its own bound, at norms and clip norms from 0 to 1e30.

    `clipped_grad` caps the factors of a rule at its bound. So a rule that fails this check loses
    accuracy, not privacy.

    Raises:
      TypeError: `rule` is not a rule.
      ValueError: A factor is negative, NaN or above bound / norm by more than a relative 1e-5, or
          the name is unknown.
      AssertionError: The factors do not have the shape of the norms.
    """
    rule = find_rule(rule)
    # Four norms of each decade, and norms whose squares vanish or overflow in float32.
    norms = np.append(0, np.logspace(-30, 30, 241)).astype(np.float32)
    clip_norms = np.append(0, np.logspace(-10, 30, 41)).astype(np.float32)
    for clip_norm in clip_norms:
        bound = float(rule.bound(float(clip_norm)))
        # Without the cap of `clip_factors`, which would hide a rule that exceeds its bound.
        in_float32 = _factors(rule, jnp.asarray(norms), jnp.asarray(clip_norm))
        factors = np.asarray(in_float32, np.float64)
        with np.errstate(invalid="ignore"):  # 0 * inf
            # The division of a rule is rounded in float32, so a product may exceed the bound by
            # some 1e-7.
            is_right = (factors >= 0) & (factors * norms <= bound * (1 + 1e-5))
        if not is_right.all():
            first = int(is_right.argmin())
            raise ValueError(
                f"{rule!r} scales a gradient of norm {norms[first]:g} by {factors[first]:g}, but "
                f"its bound at clip_norm={clip_norm:g} is {bound:g}. A factor must lie between 0 "
                "and bound / norm."
            )
