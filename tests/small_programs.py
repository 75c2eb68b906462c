"""What makes tests with many small programs faster, in the processes of pytest and in those that
they fork. The programs compute the same."""

import gc
import importlib.metadata
import itertools
from collections.abc import Callable
from typing import Any

PROGRAMS_OF_A_CONTEXT = 100


def collect_rarely() -> None:
    """Lets Python look for garbage less often.

    The tests make little garbage. Looking for it takes a third of the time of imports, and a tenth
    of tracing."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def share_contexts() -> None:
    """Lets a hundred programs that JAX lowers share a context of MLIR.

    JAX makes a context for each program, in 5 ms, and keeps it with the program. With one for a
    hundred, a program takes 1 ms and two fifths less memory. A context keeps each constant that was
    in it, so it is not kept for ever. Another release of jaxlib is left as it is."""
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        from jax._src.interpreters import mlir

        mlir.make_ir_context = _shared(mlir.make_ir_context)


def _shared(make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `make` whose results serve `PROGRAMS_OF_A_CONTEXT` calls each."""
    calls = itertools.count()
    context = None

    def context_of_a_program() -> Any:
        nonlocal context
        if next(calls) % PROGRAMS_OF_A_CONTEXT == 0:
            context = make()
        return context

    return context_of_a_program
