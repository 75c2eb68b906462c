"""Finds random draws in the loss of one example that are the same for all examples.

A draw is shared if its key depends neither on the example nor on `key=` of the call, such as the
key of one dropout mask for the whole batch.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from jaxdp.transforms.jaxprs import scan_layout

# Primitives that draw numbers. Their first operand is the key.
_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})


def has_shared_draw(jaxpr: jex.Jaxpr, varies: Sequence[bool]) -> bool:
    """Returns whether a draw takes a key that depends on no input that varies.

    Args:
      jaxpr: The program.
      varies: Whether each of its inputs differs between examples or calls.
    """
    has_shared, _ = _follow(jaxpr, varies)
    return has_shared


def _follow(
    jaxpr: jex.Jaxpr,
    varies: Sequence[bool],
) -> tuple[bool, list[bool]]:
    """Returns whether there is a shared draw, and whether each output varies."""
    pairs = zip(jaxpr.invars, varies, strict=True)
    # Constants are not in it, such as a key on which the loss closes.
    varying = {variable for variable, differs in pairs if differs}
    has_shared = False

    def is_varying(variable: Any) -> bool:
        return not isinstance(variable, jex.Literal) and variable in varying

    for eqn in jaxpr.eqns:
        inputs = [is_varying(v) for v in eqn.invars]
        outputs = [any(inputs)] * len(eqn.outvars)
        if eqn.primitive.name in _DRAWS:
            key_varies = inputs[0]
            has_shared |= not key_varies
        # A body knows more than "any operand varies", so its answer replaces that.
        for body in jex.jaxprs_in_params(eqn.params):
            body_has_shared, body_outputs = _follow_body(eqn, body, inputs)
            has_shared |= body_has_shared
            outputs = body_outputs or outputs
        pairs = zip(eqn.outvars, outputs, strict=True)
        varying.update(variable for variable, differs in pairs if differs)
    return has_shared, [is_varying(v) for v in jaxpr.outvars]


def _follow_body(
    eqn: Any,
    body: jex.Jaxpr,
    inputs: list[bool],
) -> tuple[bool, list[bool] | None]:
    """Follows a program inside of an equation.

    Returns:
      Whether it has a shared draw, and whether each output of the equation varies. The latter is
      None if the operands and results of the equation are not those of the body, one by one.
    """
    sizes = (len(body.invars), len(body.outvars))
    # A `while` has two bodies. The operands of each are a part of its own, and its results are a
    # carry that changes.
    has_same_sizes = sizes == (len(inputs), len(eqn.outvars))
    is_aligned = has_same_sizes and eqn.primitive.name != "while"
    if not is_aligned:
        # It is unknown which operand is which input of the body. If one operand varies, every
        # input counts as varying, so that no draw is refused wrongly.
        all_vary = [any(inputs)] * len(body.invars)
        has_shared, _ = _follow(body, all_vary)
        return has_shared, None
    if eqn.primitive.name == "scan":
        return _follow_scan(eqn, body, inputs)
    return _follow(body, inputs)


def _follow_scan(
    eqn: Any,
    body: jex.Jaxpr,
    inputs: list[bool],
) -> tuple[bool, list[bool]]:
    """Follows a scan until no further carry turns out to vary."""
    first_carry, first_x = scan_layout(eqn)
    while True:
        has_shared, outputs = _follow(body, inputs)
        before = inputs[first_carry:first_x]
        after = outputs[: len(before)]  # the carries are the first results
        carries = [old or new for old, new in zip(before, after, strict=True)]
        if carries == before:
            return has_shared, outputs
        inputs = [*inputs[:first_carry], *carries, *inputs[first_x:]]
