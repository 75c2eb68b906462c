"""The traced program of the loss of one example, and its gradient for each example of a batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from jaxdp.transforms import loss_checks, shards
from jaxdp.transforms.batchable import batchable

# The loss of one example: (trainable leaves, example, mask of the group's members, key) ->
# (value, aux).
Loss = Callable[..., tuple[jax.Array, Any]]


class Program(NamedTuple):
    """The traced loss of one example.

    Attributes:
      jaxpr: The program from the trainable leaves and the leaves of an example to the loss and the
        leaves of aux.
      value: The shape and dtype of the loss.
      aux: The shapes and dtypes of the auxiliary output, a pytree.
    """

    jaxpr: Any
    value: jax.ShapeDtypeStruct
    aux: Any

    def evaluate(
        self,
        consts: list[Any],
    ) -> Callable[..., list[Any]]:
        """Returns the program as a function.

        The constants, on which `loss_fn` closes, are an argument of their own: they may be traced
        values, which a function with a custom derivative must not close over.
        """
        program = jex.ClosedJaxpr(self.jaxpr, consts)
        function: Callable[..., list[Any]] = jex.jaxpr_as_fun(program)
        return function

    def with_aux(self, leaves: Sequence[Any]) -> Any:
        """Returns the auxiliary output with these leaves."""
        return jax.tree.unflatten(jax.tree.structure(self.aux), leaves)


def trace_loss(
    loss: Loss,
    leaves: list[Any],
    batch: Any,
) -> tuple[Program, list[Any]]:
    """Traces the loss of one example. Returns its program and the constants of the program.

    Raises:
      ValueError: One example could see others, or all would share random numbers.
    """
    trace = jax.make_jaxpr(loss, return_shape=True)
    program, (value, aux) = trace(leaves, *_one_example(batch))
    # The checks read the equations of the user's loss, before `batchable` replaces some.
    loss_checks.refuse_batch_norm(program.jaxpr)
    loss_checks.refuse_shared_draws(program.jaxpr, len(leaves))
    program = _batchable(program)
    return Program(program.jaxpr, value, aux), list(program.consts)


def _one_example(batch: Any) -> Any:
    """Returns the shapes and dtypes of one example of a batch."""

    def one(x: jax.Array) -> Any:
        # An empty batch has no x[0]. Its result is zeros of no examples.
        if shards.varying_axes(x) and len(x):  # keeps the mesh axes in the type
            return jax.eval_shape(lambda x: x[0], x)
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    return jax.tree.map(one, batch)


def _batchable(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns a program that JAX can apply to a batch, in which no example sees another one.

    Raises:
      ValueError: The program combines values along a named axis, or hands a batch to a function
        that JAX does not batch.
    """
    loss_checks.refuse_collectives(program.jaxpr)
    loss_checks.refuse_calls_of_a_batch(program.jaxpr)
    return jex.ClosedJaxpr(batchable(program.jaxpr), program.consts)


def batched_gradient(
    function: Callable[..., Any],
    weights: Any,
    examples: list[Any],
) -> Any:
    """Computes `jax.value_and_grad` with an auxiliary output for each example.

    The program of one gradient is traced before it is batched. So the backward passes of custom
    derivatives are checked too.

    Args:
      function: (weights, example) -> (value, aux).
      weights: A pytree that all examples share.
      examples: Arrays with a leading axis B.
    """
    gradient = jax.value_and_grad(function, has_aux=True)
    trace = jax.make_jaxpr(gradient, return_shape=True)
    program, shapes = trace(weights, _one_example(examples))
    structure = jax.tree.structure(shapes)
    evaluate = jex.jaxpr_as_fun(_batchable(program))

    def one(weights: Any, example: list[Any]) -> Any:
        arguments = jax.tree.leaves((weights, example))
        return jax.tree.unflatten(structure, evaluate(*arguments))

    return jax.vmap(one, in_axes=(None, 0))(weights, examples)
