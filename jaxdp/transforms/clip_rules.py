"""Clipping rules: how far the gradient of one example is scaled, given its norm."""

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
import numpy as np

# Smaller gradient norms may be reported as 0, because their squares underflow float32.
_SMALLEST_NORM = 1e-12


@runtime_checkable
class ClipRule(Protocol):
    """A hashable object, such as a frozen dataclass, that `jaxdp.clipped_grad` takes as `clip_rule` on every engine."""

    def factor(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
        """Factors [B] >= 0 from norms [B] >= 0 and the clip norm [] >= 0, with factor * norm <= bound(clip_norm)."""

    def bound(self, clip_norm: Any) -> Any:
        """The L2 norm that no clipped gradient exceeds; `sensitivity` reports it."""


@dataclasses.dataclass(frozen=True)
class Global:
    """Shorter gradients stay as they are (Abadi et al. 2016, Algorithm 1)."""

    def factor(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
        """min(1, C / ||g||)."""
        return jnp.where(norms > clip_norm, clip_norm / jnp.where(norms > 0, norms, 1), 1)

    def bound(self, clip_norm: Any) -> Any:
        """C."""
        return clip_norm


@dataclasses.dataclass(frozen=True)
class Automatic:
    """Every example counts alike (Bu et al. 2023, arXiv:2206.07136)."""

    gamma: float = 0.01

    def factor(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
        """C / (||g|| + gamma); 1 if C is infinite."""
        return jnp.where(jnp.isinf(clip_norm), 1, clip_norm / (norms + self.gamma))

    def bound(self, clip_norm: Any) -> Any:
        """C."""
        return clip_norm


# The names that `clip_rule` accepts; a new row serves every engine.
CLIP_RULES: dict[str, ClipRule] = {"global": Global(), "automatic": Automatic()}


def find_rule(rule: str | ClipRule) -> ClipRule:
    """The rule of a name, or the rule itself.

    Raises:
      ValueError: no rule has this name.
      TypeError: `rule` is neither a name nor a hashable `ClipRule`.
    """
    if isinstance(rule, str) and rule in CLIP_RULES:
        return CLIP_RULES[rule]
    expected = (
        f"clip_rule must be one of {sorted(CLIP_RULES)}, or a hashable object with factor(norms, clip_norm) and "
        f"bound(clip_norm), such as an instance of a frozen dataclass; got {rule!r}"
    )
    if isinstance(rule, str):
        raise ValueError(f"{expected}.")
    if not isinstance(rule, ClipRule) or not isinstance(rule, Hashable) or isinstance(rule, type):
        raise TypeError(f"{expected} of type {type(rule).__name__}.")
    return rule


def clip_factors(rule: ClipRule, norms: jax.Array, clip_norm: Any, bound: Any) -> jax.Array:
    """The factors [B] of a rule, cut to bound / norm; negative and NaN factors count as 0."""
    # Negative, NaN or below what norms resolve: release nothing rather than an unbounded sum.
    clip_norm, bound = (jnp.asarray(x, norms.dtype) for x in (clip_norm, bound))
    clip_norm, bound = (jnp.where(x > _SMALLEST_NORM, x, 0) for x in (clip_norm, bound))
    factors = _factors(rule, norms, clip_norm)
    return jnp.where(factors > 0, jnp.minimum(factors, bound / jnp.maximum(norms, _SMALLEST_NORM)), 0)


def _factors(rule: ClipRule, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
    factors = rule.factor(norms, clip_norm)
    chex.assert_equal_shape([factors, norms], custom_message=f"{rule!r}.factor must return one factor per norm")
    return factors.astype(norms.dtype)


def check_clip_rule(rule: str | ClipRule) -> None:
    """Checks that a rule respects its own bound, at norms and clip norms from 0 to 1e30.

    `clipped_grad` cuts what a rule returns to its bound, so a rule that fails here loses accuracy, not privacy.

    Raises:
      TypeError: `rule` is no rule.
      ValueError: a factor is negative or NaN, or exceeds bound / norm by more than a relative 1e-5.
      AssertionError: factors have another shape than the norms.
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
                f"{rule!r} scales a gradient of norm {norms[i]:g} by {factors[i]:g}, and its bound at clip_norm="
                f"{clip_norm:g} is {bound:g}. A factor must lie between 0 and bound / norm."
            )
