"""The processes of `jax.distributed` that run one program together. One process is the case n = 1.

Every process runs the same Python program, and their devices compute together. Process 0 leads: it
alone has the ledger, draws secrets, and writes notes and metrics. What it finds reaches the others
by `Hosts.each`. So does an error of any process. The others would otherwise wait for a process that
has given up.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxdp.privacy import BudgetExceeded, LedgerDamaged
from jaxdp.release import identity

T = TypeVar("T")

_SHORT = 1024  # bytes of a message that needs one exchange
# Errors that a user can mend, by name, because JSON carries no class.
_ERRORS = {kind.__name__: kind for kind in (BudgetExceeded, LedgerDamaged, TypeError, ValueError)}


class HostFailed(RuntimeError):
    """An error of another process.

    Its text has the number of the process, and the kind and text of the error.
    """


class Hosts:
    """The processes that have devices of a mesh, or this process alone.

    Their calls must come in the same order.

    Attributes:
      count: The number of processes.
    """

    def __init__(self, mesh: Mesh | None = None):
        self.count = jax.process_count() if mesh is not None and mesh.is_multi_process else 1
        self._late: Exception | None = None

    @property
    def leads(self) -> bool:
        """Whether this process has the ledger and the files."""
        return self.count == 1 or jax.process_index() == 0

    def each(self, function: Callable[[], Any]) -> list[Any]:
        """Calls a function on every process.

        Returns the results, which JSON must hold, in the order of the processes.

        Raises:
          Exception: The function failed on a process. All raise its error if it is one of a user's
            mistakes: a BudgetExceeded, LedgerDamaged, TypeError or ValueError. Of another error,
            other processes raise HostFailed.
        """
        if self.count == 1:
            return [function()]
        own_error: Exception | None = None
        try:
            if self._late is not None:
                raise self._late
            message: dict[str, Any] = {"value": function()}
        except Exception as error:
            # The others have to know. They would wait for this process in their next exchange.
            own_error = error
            message = {"error": [type(error).__name__, str(error), vars(error)]}
        # An attribute of an error may be nothing that JSON holds.
        messages = self._gathered(json.dumps(message, default=repr).encode())
        if own_error is not None:
            raise own_error
        for process, message in enumerate(messages):
            if "error" in message:
                raise _error(process, *message["error"])
        return [message["value"] for message in messages]

    def first(self, function: Callable[[], Any]) -> Any:
        """Calls a function on process 0.

        Returns its result, which JSON must hold, or raises its error on all.
        """
        return self.each(function if self.leads else lambda: None)[0]

    def together(self, function: Callable[[], T]) -> T:
        """Calls a function on every process.

        Returns the own result, or raises an error as `each` does.
        """
        results: list[T] = []
        # `append` returns None, which JSON holds, unlike the result.
        self.each(lambda: results.append(function()))
        return results[0]

    def later(self, function: Callable[[], None]) -> None:
        """Calls a function on this process, and waits for nobody.

        The next `each` raises its error on all. After an error it calls nothing more.
        """
        if self._late is not None:
            return
        try:
            function()
        except Exception as error:
            # A single process has no exchange, in which the error could be raised later.
            if self.count == 1:
                raise
            self._late = error

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Raises ValueError on all processes if their facts or versions differ.

        `facts` returns texts by name.
        """
        if self.count == 1:
            return
        # Other versions may compile another program for the same computation.
        rows = self.each(lambda: {"versions": repr(identity.versions()), **facts()})
        for process, row in enumerate(rows):
            differ = [name for name, text in rows[0].items() if row[name] != text]
            if differ:
                raise ValueError(
                    f"processes disagree: process {process} has another {' and '.join(differ)} "
                    "than process 0. Start all processes with the same program, config, data and "
                    "versions. Nothing was spent."
                )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Adds to an error of JAX what it means if a process has died."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if self.count > 1:
                error.add_note(
                    "If another process has died: everything that was computed is charged. Start "
                    "all processes again with the same workdir and ledger, and the run goes on "
                    "after its newest checkpoint."
                )
            raise

    def _gathered(self, message: bytes) -> list[Any]:
        """Returns the JSON messages of all processes. Each sends its length, and then its bytes."""
        # An exchange takes arrays of one shape, but messages differ in length.
        framed = len(message).to_bytes(8, "little") + message

        def exchanged(start: int, stop: int) -> Any:
            """Returns bytes uint8 [processes, stop - start] of all messages, padded with zeros."""
            own = np.frombuffer(framed[start:stop], np.uint8)
            return multihost_utils.process_allgather(np.pad(own, (0, stop - start - len(own))))

        rows = exchanged(0, _SHORT)
        ends = [int.from_bytes(row[:8].tobytes(), "little") + 8 for row in rows]
        # All processes see the same lengths, so all take part in the second exchange or none.
        if max(ends) > _SHORT:
            rows = np.concatenate([rows, exchanged(_SHORT, max(ends))], axis=1)
        return [json.loads(row[8:end].tobytes()) for row, end in zip(rows, ends, strict=True)]


def _error(process: int, kind: str, text: str, fields: dict[str, Any]) -> Exception:
    """Returns the error that a process reported, for the other processes to raise."""
    if kind not in _ERRORS:
        return HostFailed(f"process {process} failed: {kind}: {text}")
    # Only this kind has arguments besides its text.
    arguments = fields if kind == BudgetExceeded.__name__ else {}
    return _ERRORS[kind](text, **arguments)
