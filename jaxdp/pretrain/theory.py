"""Lemma A.1 and Theorem 1 of Wang et al. 2024, to evaluate beside what a model does.

The theorem is corrected. docs/design/pretrain.md has the counterexamples and the proof.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.models.robustness import Predict, parameter_robustness


class Constants(NamedTuple):
    """How fast a function changes.

    Attributes:
      lipschitz: The largest change of the value over the change of the argument.
      smoothness: The same of the gradient.
    """

    lipschitz: float
    smoothness: float


# beta_1 and beta_2 of Assumptions 2 and 3, for softmax cross-entropy of the logits in L2: the
# gradient p - e_y is at most sqrt(2) long, and the Hessian diag(p) - p p^T is at most 1/2.
CROSS_ENTROPY = Constants(math.sqrt(2), 0.5)


def loss_constants(rho: float, beta: float, loss: Constants = CROSS_ENTROPY) -> Constants:
    """Returns the constants of L_i in theta (Lemma A.1).

    Args:
      rho: The Lipschitz constant of f_theta(x) in theta (section 2.3).
      beta: The Lipschitz constant of its Jacobian in theta (Assumption 1).
      loss: beta_1 and beta_2, the constants of the loss in f_theta(x).

    Raises:
      ValueError: rho or beta is negative or not finite. For most networks both are infinite over
        all theta. `parameter_change` has those of two points.
    """
    if not (0 <= rho < math.inf and 0 <= beta < math.inf):
        raise ValueError(f"rho and beta must be finite and at least 0, got {rho} and {beta}.")
    return Constants(loss.lipschitz * rho, rho**2 * loss.smoothness + beta * loss.lipschitz)


def excess_loss_bound(
    steps: int,
    *,
    smoothness: float,
    pl_constant: float,
    variance: float,
    gap: float,
    perturbation_batch_size: int,
    update_batch_size: int,
) -> float:
    """Bounds the mean excess loss of Eq. 6 with both step sizes 1 / (4 smoothness) (Theorem 1).

    The bound is mu (512 beta (L(theta_0) - inf L) / T + sigma^2 (13 / m1 + 16 / m2)) / 87.

    Args:
      steps: T. The mean is over theta_0 to theta_{T-1}.
      smoothness: beta^, at least the smoothness of every L_i, such as
          `loss_constants(rho, beta).smoothness`.
      pl_constant: mu of Assumption 5: L - inf L <= mu ||grad L||^2.
      variance: sigma^2 of Assumption 4, E ||grad L_i - grad L||^2.
      gap: L(theta_0) - inf L.
      perturbation_batch_size, update_batch_size: m1 and m2 of two independent batches.

    Raises:
      ValueError: A number is out of range.
    """
    for name, value in (("smoothness", smoothness), ("pl_constant", pl_constant)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}.")
    if not (0 <= variance < math.inf and 0 <= gap < math.inf):
        raise ValueError(
            f"variance and gap must be finite and at least 0, got {variance} and {gap}."
        )
    if min(steps, perturbation_batch_size, update_batch_size) < 1:
        raise ValueError(
            "steps and batch sizes must be at least 1, got "
            f"{steps}, {perturbation_batch_size} and {update_batch_size}."
        )
    noise = variance * (13 / perturbation_batch_size + 16 / update_batch_size)
    return pl_constant * (512 * smoothness * gap / steps + noise) / 87


class ParameterChange(NamedTuple):
    """What a change Delta of the parameters does, and what Lemma A.1 allows.

    Attributes:
      length: ||Delta||.
      rho: The largest of ||f_{theta+Delta}(x) - f_theta(x)|| / ||Delta|| and of the spectral norms
          of the Jacobians at theta and theta + Delta.
      beta: The largest spectral norm of the difference of the Jacobians, over ||Delta||.
      loss, gradient: The largest |L_i(theta + Delta) - L_i(theta)| and the largest change of the
          gradient of L_i.
      loss_bound, gradient_bound: beta_1 rho ||Delta|| and (rho^2 beta_2 + beta beta_1) ||Delta||.
    """

    length: float
    rho: float
    beta: float
    loss: float
    loss_bound: float
    gradient: float
    gradient_bound: float


def parameter_change(
    predict: Predict,
    params: Any,
    moved: Any,
    inputs: Any,
    labels: Any,
    *,
    iterations: int = 20,
    seed: int = 0,
    batch_size: int = 32,
) -> ParameterChange:
    """Measures the change from params to moved beside Lemma A.1, for softmax cross-entropy.

    rho and beta are the smallest constants with which the proof of the lemma holds for these two
    points and these inputs. The global constants of the paper are larger. The power method
    converges from below, so a bound can be too small by its remaining error.

    Args:
      predict: `predict(params, inputs [B, ...]) -> logits [B, K]`.
      params, moved: theta and theta + Delta.
      inputs, labels: [n, ...] and integers [n], PUBLIC or held out. Nothing is charged.
      iterations, seed, batch_size: As in `jaxdp.pretrain.parameter_robustness`.

    Raises:
      ValueError: moved equals params, or inputs are as `parameter_robustness` refuses.
    """
    length = float(_distance(params, moved))
    if not length:
        raise ValueError("moved must differ from params, got the same parameters.")

    def norm(predict: Predict, params: Any) -> float:
        """Returns the largest spectral norm of the Jacobian over the inputs."""
        options = {"iterations": iterations, "seed": seed, "batch_size": batch_size}
        return parameter_robustness(predict, params, inputs, draws=1, **options).local

    zeros = jax.tree.map(jnp.zeros_like, params)
    beta = norm(_difference(predict), (zeros, params, moved)) / length
    rows = zip(np.asarray(inputs), np.asarray(labels), strict=True)
    changes = [jax.device_get(_changes(predict, params, moved, *row)) for row in rows]
    loss, gradient, logits = np.max(changes, 0).tolist()
    rho = max(norm(predict, params), norm(predict, moved), logits / length)
    bound = loss_constants(rho, beta)
    return ParameterChange(
        length=length,
        rho=rho,
        beta=beta,
        loss=loss,
        loss_bound=bound.lipschitz * length,
        gradient=gradient,
        gradient_bound=bound.smoothness * length,
    )


@jax.jit
def _distance(params: Any, moved: Any) -> jax.Array:
    return optax.tree.norm(jax.tree.map(jnp.subtract, moved, params))


@functools.cache
def _difference(predict: Predict) -> Callable[..., jax.Array]:
    """Returns a function of (v, theta, theta + Delta) whose Jacobian at v = 0 is that at theta +
    Delta less that at theta.
    """

    def difference(points: Any, inputs: jax.Array) -> jax.Array:
        step, *ends = points
        before, after = (
            predict(jax.tree.map(jnp.add, jax.lax.stop_gradient(end), step), inputs) for end in ends
        )
        return after - before

    return difference


@functools.partial(jax.jit, static_argnums=0)
def _changes(
    predict: Predict, params: Any, moved: Any, example: jax.Array, label: jax.Array
) -> jax.Array:
    """Returns how much the loss, its gradient and the logits of one example change."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = predict(params, example[None])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label), logits

    with_gradient = jax.value_and_grad(loss, has_aux=True)
    (before, logits_before), gradient_before = with_gradient(params)
    (after, logits_after), gradient_after = with_gradient(moved)
    gradient = jax.tree.map(jnp.subtract, gradient_after, gradient_before)
    change = jnp.abs(after - before)
    return jnp.stack(
        [change, optax.tree.norm(gradient), jnp.linalg.norm(logits_after - logits_before)]
    )
