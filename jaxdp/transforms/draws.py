"""Finds random draws in the loss of one example whose key is the same for all examples."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from jaxdp.transforms import walker

_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})


def has_fixed_draw(jaxpr: jex.Jaxpr, varies: Sequence[bool]) -> bool:
    """Returns whether a draw takes a key that depends on no input that varies.

    Args:
      jaxpr: The program.
      varies: Whether each of its inputs differs between examples or calls.
    """
    return _follow(jaxpr, varies)[0]


def _follow(jaxpr: jex.Jaxpr, varies: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Returns whether there is a fixed draw, and whether each output varies."""
    varying = {v for v, known in zip(jaxpr.invars, varies, strict=True) if known}
    fixed = False

    def look(variable: Any) -> bool:
        return not isinstance(variable, jex.Literal) and variable in varying

    for eqn in jaxpr.eqns:
        inputs = [look(v) for v in eqn.invars]
        outputs = [any(inputs)] * len(eqn.outvars)
        if eqn.primitive.name in _DRAWS:
            fixed |= not inputs[0]
        for body in jex.jaxprs_in_params(eqn.params):
            aligned = (len(body.invars), len(body.outvars)) == (len(inputs), len(outputs))
            aligned &= eqn.primitive.name != "while"  # its bodies change the carry
            # Inputs of a body that cannot be told apart all vary if one of them does. So a draw is
            # not refused wrongly.
            entered = inputs if aligned else [any(inputs)] * len(body.invars)
            found, after = _follow(body, entered)
            if eqn.primitive.name == "scan":
                avals = ([v.aval for v in variables] for variables in (eqn.invars, eqn.outvars))
                first, last = walker.scan_starts(eqn.params["jaxpr"], *avals)
                while any(
                    new and not old for new, old in zip(after, entered[first:last], strict=False)
                ):
                    entered = [
                        old or (first <= i < last and after[i - first])
                        for i, old in enumerate(entered)
                    ]
                    found, after = _follow(body, entered)
            fixed |= found
            if aligned:
                outputs = after
        varying.update(v for v, known in zip(eqn.outvars, outputs, strict=True) if known)
    return fixed, [look(v) for v in jaxpr.outvars]
