"""Clipping rules, which map the norm of a per-example gradient to a scale factor."""

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
import numpy as np

# Smaller gradient norms may be reported as 0 because their squares underflow float32.
_SMALLEST_NORM = 1e-12


@runtime_checkable
class ClipRule(Protocol):
    """A hashable object, such as a frozen dataclass, that `jaxdp.clipped_grad` takes as `clip_rule`
    on every engine.
    """

    def factor(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
        """Computes factors [B] >= 0 of norms [B] >= 0 and clip_norm [] >= 0, with factor * norm <=
        bound(clip_norm).
        """

    def bound(self, clip_norm: Any) -> Any:
        """Returns the L2 norm that no clipped gradient exceeds. `ClippedGrad.sensitivity` reports
        it.
        """


@dataclasses.dataclass(frozen=True)
class Global:
    """The rule that scales only gradients longer than C (Abadi et al. 2016, Algorithm 1)."""

    def factor(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
        """Computes min(1, C / ||g||)."""
        return jnp.where(norms > clip_norm, clip_norm / jnp.where(norms > 0, norms, 1), 1)

    def bound(self, clip_norm: Any) -> Any:
        """Returns C."""
        return clip_norm


@dataclasses.dataclass(frozen=True)
class Automatic:
    """The rule under which examples count alike, whatever their gradient norm (Bu et al. 2023,
    arXiv:2206.07136).
    """

    gamma: float = 0.01

    def factor(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
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
    if not isinstance(rule, ClipRule) or not isinstance(rule, Hashable) or isinstance(rule, type):
        raise TypeError(f"{expected} of type {type(rule).__name__}.")
    return rule


def clip_factors(rule: ClipRule, norms: jax.Array, clip_norm: Any, bound: Any) -> jax.Array:
    """Computes the factors [B] of a rule and caps them at bound / norm.

    Negative and NaN factors count as 0. The factor of a norm that is NaN or infinite is 0.
    """
    # A negative, NaN or unresolvably small clip norm must release nothing, not an unbounded sum.
    clip_norm, bound = (jnp.asarray(x, norms.dtype) for x in (clip_norm, bound))
    clip_norm, bound = (jnp.where(x > _SMALLEST_NORM, x, 0) for x in (clip_norm, bound))
    factors = jnp.minimum(
        _factors(rule, norms, clip_norm), bound / jnp.maximum(norms, _SMALLEST_NORM)
    )
    return jnp.where(factors > 0, factors, 0)


def _factors(rule: ClipRule, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
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
    norms = np.append(0, np.logspace(-30, 30, 241)).astype(np.float32)
    for clip_norm in np.append(0, np.logspace(-10, 30, 41)).astype(np.float32):
        bound = float(rule.bound(float(clip_norm)))
        factors = np.asarray(_factors(rule, jnp.asarray(norms), jnp.asarray(clip_norm)), np.float64)
        with np.errstate(invalid="ignore"):
            wrong = ~((factors >= 0) & (factors * norms <= bound * (1 + 1e-5)))
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"{rule!r} scales a gradient of norm {norms[i]:g} by {factors[i]:g}, but its "
                "bound at clip_norm="
                f"{clip_norm:g} is {bound:g}. A factor must lie between 0 and bound / norm."
            )
