"""The programs of a step: what is compiled, what identifies it, and when it is compiled."""

import concurrent.futures
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxdp.data import Source
from jaxdp.data.physical import FIRST_STEPS
from jaxdp.finetune.batches import put
from jaxdp.finetune.step import StepFunctions, TrainState, apart

if TYPE_CHECKING:
    from jaxdp.finetune.trainer import PrivateTrainer

_FIRST_PROGRAMS = 3  # the sum of the largest size, the addition of two sums, and the update
_CACHED_SECONDS = 0.5  # in which they are read from JAX's cache, if they are there


class Programs:
    """The programs of a run, which are compiled in the background.

    A run starts when the programs of its first step are compiled. While the compiler works on
    these, the programs of the other sizes are traced. They are compiled after the first step, while
    the device takes the next steps. So an error of the compiler may come in a chunk that is paid,
    which a later call repeats.

    Attributes:
      text: What determines the results of the steps, once `start` has been called: the settings
        (`settings_text`) and the programs of the first step as StableHLO. Equal text, data and keys
        give equal results on equal devices. The programs of the other sizes come from the same
        functions, and every token has the source of jaxdp.
    """

    def __init__(self, trainer: "PrivateTrainer", source: Source):
        self.trainer = trainer
        self.source = source
        self.text = ""
        # Python waits for running threads when it ends.
        self._pool = concurrent.futures.ThreadPoolExecutor(
            os.cpu_count(), thread_name_prefix="jaxdp compiler"
        )
        self._untraced: Iterator[tuple[str, jax.stages.Lowered]] = iter(())
        self._lowered: list[jax.stages.Lowered] = []
        self._compiling: list[concurrent.futures.Future[Any]] = []

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: Any) -> None:
        # An exception does not wait for the compiler.
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, state: TrainState, steps: range) -> None:
        """Traces the programs of the first of these steps, and starts to compile them.

        A second call is free.
        """
        if self.text:  # `_shared` has started it, and a step may call again
            return
        texts = [settings_text(self.trainer, state, self.source)]
        self._untraced = lowered(self.trainer, state, self.source, steps.stop)
        for name, program in self._untraced:
            texts.append(program.as_text())
            if name != "refresh" and steps:  # "refresh" is compiled where it is called
                self._lowered.append(program)
                self._compile(_FIRST_PROGRAMS)
            if name == "update":
                break
        self.text = "".join(texts)

    def wait(self, step: int) -> None:
        """Returns when the programs of a step are compiled, or raises the error of one.

        Call it before every step.
        """
        first = self._compiling[:_FIRST_PROGRAMS]
        if not step:
            concurrent.futures.wait(first, timeout=_CACHED_SECONDS)
        # Before step 0 the other programs are traced only while the compiler is busy: programs from
        # the cache are there at once, and then the first step need not wait for a tracing.
        while step or not all(compiling.done() for compiling in first):
            following = next(self._untraced, None)
            if following is None:
                break
            _, program = following
            self._lowered.append(program)
        # On few cores the first step would wait for what it does not need.
        self._compile(len(self._lowered) if step else _FIRST_PROGRAMS)
        needed = self._compiling if step >= FIRST_STEPS else self._compiling[:_FIRST_PROGRAMS]
        for compiling in needed:
            compiling.result()

    def _compile(self, count: int) -> None:
        """Submits the first `count` of the traced programs, except for those that already are."""
        for program in self._lowered[len(self._compiling) : count]:
            self._compiling.append(self._pool.submit(program.compile))


def settings_text(trainer: "PrivateTrainer", state: TrainState, source: Source) -> str:
    """Returns the settings that change results but are in no program, for the token of a release.

    These are the steps at which the query refreshes, how a batch is cut into physical batches
    (`jaxdp.data.physical`), and where the arrays lie.
    """
    cut = trainer.physical(state, source).token_text()
    return f"refresh_every={trainer.query.refresh_every}\n{cut}\n{state.layout}\n"


def lowered(
    trainer: "PrivateTrainer",
    state: TrainState,
    source: Source,
    last: int,
) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """Yields the programs of the steps before `last` with their names.

    A program is traced when the iterator comes to it.
    """
    for name, (function, args) in step_programs(trainer, state, source, last).items():
        if name == "refresh":
            for part in trainer.query.refresh_programs(*args):
                yield name, part
        else:
            yield name, function.lower(*args)


def step_programs(
    trainer: "PrivateTrainer",
    state: TrainState,
    source: Source,
    last: int | None = None,
    *,
    memory: int | None = None,
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Returns the functions of a step with arguments. `PrivateTrainer.programs` documents it."""
    programs: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    sums = jax.eval_shape(trainer.zeros, state.params, state.layout)
    sums = _shapes(trainer, state, sums)
    query = trainer.query
    if query.refresh_every:
        args = (state.params, state.carried, state.step, query.public)
        refresh = jax.jit(query.refresh)
        programs["refresh"] = (refresh, args)
        state = state._replace(carried=refresh.eval_shape(*args))
    physical = trainer.physical(state, source, memory=memory)
    if last is not None:  # A run that ends within the first steps needs the largest size only.
        physical = physical.of_step(last - 1)
    for size in physical.sizes:
        rows = np.zeros(size, np.int64)  # row 0: only shapes matter
        mask = np.zeros(size, bool)
        batch = put(state.layout, source, rows, mask, 0)
        programs[f"sum {size}"] = (trainer.part_sum, (state, *batch))
        # The programs of the first step come first: they are the first to be compiled.
        programs.setdefault("add", (trainer.add, (sums, sums)))
        programs.setdefault("update", (trainer.update_in_place, (*apart(state), sums)))
    return programs


def _shapes(functions: StepFunctions, state: TrainState, tree: Any) -> Any:
    """Returns the shapes of a tree with the shardings that the steps give it."""
    shardings = functions.shardings(state.params, state.layout, tree)
    if shardings is None:
        return tree
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )
