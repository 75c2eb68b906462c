"""Physical batches on the way from a source to the devices. `jaxdp.data.physical` cuts them."""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.data import Records, Source, check_batch
from jaxdp.data.physical import RowBytes
from jaxdp.finetune.query import moving_params
from jaxdp.finetune.step import StepFunctions, TrainState
from jaxdp.transforms.example_loss import LossFunction, one_loss
from jaxdp.transforms.jaxprs import forward_bytes
from jaxdp.transforms.meshes import Layout

# How many batches, and of how many bytes, are read ahead.
MOST_AHEAD = 16
_BYTES_AHEAD = 2**24


class PhysicalBatch(NamedTuple):
    """A physical batch on the devices, the arguments of `StepFunctions.part_sum` after the state.

    Attributes:
      examples: A pytree of arrays [m, ...].
      mask: bool [m]. False marks padding.
      number: uint32 scalar, the number of the physical batch within its step.
    """

    examples: Any
    mask: jax.Array
    number: jax.Array


def put(
    layout: Layout | None,
    source: Source,
    rows: np.ndarray,
    mask: np.ndarray,
    number: int,
) -> PhysicalBatch:
    """Reads the examples at `rows` that the devices of this process need, and puts them there."""
    if layout is None:
        examples = _read(source, rows)
        return PhysicalBatch(*jax.device_put((examples, mask, np.uint32(number))))
    own = layout.own_rows(len(rows))
    examples = _read(source, rows[own])
    examples, own_mask = layout.batch((examples, mask[own]), len(rows))
    replicated = jax.make_array_from_process_local_data(layout.everywhere, np.uint32(number), ())
    return PhysicalBatch(examples, own_mask, replicated)


def _read(source: Source, rows: np.ndarray) -> Any:
    """Returns the examples at `rows` in memory that the source does not write again.

    A source may fill the same arrays in every call, and JAX shares an array of NumPy on a CPU. All
    physical batches would then hold the examples of the last one, and one example could count
    several times in a sum.
    """

    def own(x: Any) -> Any:
        return np.array(x) if isinstance(x, np.ndarray) else x

    return jax.tree.map(own, check_batch(source.gather(rows)))


@contextlib.contextmanager
def read_ahead(
    load: Callable[[int], list[PhysicalBatch]], steps: range
) -> Iterator[Iterator[list[PhysicalBatch]]]:
    """Yields the iterator of `load(step)` for each step, which a thread calls ahead of its use."""
    # One thread reads in the order of the steps, and a source need not be thread-safe.
    with concurrent.futures.ThreadPoolExecutor(1, "jaxdp batches") as reader:
        try:
            yield _ahead(reader, load, steps)
        finally:
            reader.shutdown(cancel_futures=True)  # an error in a step must not wait for reads


def _ahead(
    reader: concurrent.futures.Executor,
    load: Callable[[int], list[PhysicalBatch]],
    steps: range,
) -> Iterator[list[PhysicalBatch]]:
    unread = iter(steps)
    pending = collections.deque[concurrent.futures.Future[list[PhysicalBatch]]]()
    count = 2  # until the bytes of a batch are known
    while True:
        # Small batches are read several at once, while the code is in the processor's cache.
        if len(pending) < 2:
            for step in itertools.islice(unread, count):
                pending.append(reader.submit(load, step))
        if not pending:
            return
        batch = pending.popleft().result()
        if len(pending) < 2:
            size = sum(array.nbytes for array in jax.tree.leaves(batch))
            count = max(1, min(MOST_AHEAD, _BYTES_AHEAD // size))
        yield batch


def row_bytes(functions: StepFunctions, state: TrainState, source: Source) -> RowBytes:
    """Returns the bytes of one example of a source in a step, from the shapes of its first one."""
    gradient = functions.query.gradient
    # Row 0 gives shapes only. What the plan of sizes sees must be public.
    row = source.gather(np.zeros(1, np.int64))
    views = functions.augmult
    example = jax.tree.map(lambda x: x[0], row)
    if functions.group and isinstance(example, Records):
        views *= len(example.present)
        example = jax.tree.map(lambda x: x[0], example.records)
    key = state.key if functions.stochastic else None
    loss = functools.partial(one_loss, LossFunction(gradient.loss_fn, has_aux=False, group=False))
    jaxpr = jax.make_jaxpr(loss)(state.params, example, key).jaxpr
    moving = jax.tree.leaves(moving_params(gradient, state.params))
    return RowBytes(
        forward=views * forward_bytes(jaxpr),
        gradient=sum(leaf.size * leaf.dtype.itemsize for leaf in moving),
        # The engine "vmap" forms the gradient of every example, the others do not.
        gradients_held=functions.query.copies + (gradient.engine == "vmap"),
    )
