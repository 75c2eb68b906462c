"""Training without privacy: for public data, and for the reference that a private run is compared with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jaxdp.data import FixedBatchSampler, Source


def train_without_privacy(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    batch_size: int,
    seed: bytes,
    augment: Callable[[jax.Array, Any], Any] | None = None,
    label: str = "public training",
    progress: bool = True,
) -> Any:
    """Minimises the mean of a per-example loss over shuffled batches; for PUBLIC data.

    Args:
      loss_fn: `loss_fn(params, example) -> scalar`.
      params: pytree to start from.
      data: public examples: a `Source`, or a pytree of arrays with one first axis.
      optimizer: any optax optimizer.
      steps, batch_size: number of updates, and examples in each.
      seed: 16 bytes that fix the order of the examples and the augmentation.
      augment: `augment(key, example) -> example`, one view per example and step.
      label, progress: of the progress bar on stderr.

    Returns:
      The trained parameters.
    """
    if not isinstance(data, Source):
        data = jax.tree.map(np.asarray, data)
    count = len(data) if isinstance(data, Source) else len(jax.tree.leaves(data)[0])
    sampler = FixedBatchSampler(count, min(batch_size, count), seed=seed)

    def gather(rows: np.ndarray) -> Any:
        return data.gather(rows) if isinstance(data, Source) else jax.tree.map(lambda leaf: leaf[rows], data)

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        return jax.vmap(loss_fn, in_axes=(None, 0))(params, batch).mean()

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        if augment is not None:
            batch = jax.vmap(augment)(jax.random.split(key, sampler.batch_size), batch)
        updates, opt_state = optimizer.update(jax.grad(mean_loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = optimizer.init(params)
    keys = jax.random.split(jax.random.wrap_key_data(jnp.frombuffer(seed[:8], jnp.uint32)), steps)
    for step in tqdm(range(steps), desc=label, unit="step", disable=not progress):
        params, opt_state = update(params, opt_state, gather(sampler.batch(step)), keys[step])
    return params
