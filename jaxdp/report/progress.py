"""Progress bars of long loops: how much is done, the rate, and the time that is left.

Every loop of jaxdp that can take long shows a bar on stderr once it has run for a second. Nothing
is shown if stderr is neither a terminal nor a notebook, as in a batch job, or without the extra
"report". The environment variable JAXDP_PROGRESS decides otherwise: 1 always shows bars, 0 never.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdp.files import optional


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    label: str,
    unit: str,
    total: int | None = None,
    initial: int = 0,
    show: bool = True,
) -> Any:
    """Returns a bar over `items`, or over `total` units that the caller counts by `update()`.

        for batch in progress_bar(batches, label="logits", unit="batch"): ...

    Args:
      items: What to loop over. None for a bar that is a context manager and is moved by
          `update(count)`.
      label: The text before the bar.
      unit: The name of one item, for the rate.
      total: The number of units. The default is `len(items)`. Without either, no time that is left
          is shown.
      initial: The units that an earlier process has done.
      show: False shows nothing.

    Returns:
      A `tqdm.tqdm`. A bar inside of another bar disappears at its end.
    """
    always = os.environ.get("JAXDP_PROGRESS", "")
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    hidden = not (show and (always == "1" or (watched and always != "0")))
    if always != "1" and importlib.util.find_spec("tqdm") is None:  # the extra "report"
        return _NoBar(items, initial)
    return optional("tqdm", "report").tqdm(
        items,
        desc=label,
        unit=unit,
        total=total,
        initial=initial,
        disable=hidden,
        delay=1,
        leave=None,
        # A file keeps every refresh, a terminal only the last.
        mininterval=0.1 if watched else 10,
    )


class _NoBar:
    """Counts as a bar of tqdm does, and shows nothing. It needs no tqdm.

    Attributes:
      n: The number of units that are done.
    """

    def __init__(self, items: Iterable[Any] | None, initial: int):
        self._items = items
        self.n = initial

    def __iter__(self) -> Iterator[Any]:
        yield from self._items or ()

    def __enter__(self) -> "_NoBar":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        """Counts units that are done."""
        self.n += count

    def set_postfix(self, *_: Any, **values: Any) -> None:
        """Shows nothing."""

    def clear(self) -> None:
        """Shows nothing."""


@contextlib.contextmanager
def counting(
    function: Callable[[float], Any], *, label: str, unit: str
) -> Iterator[Callable[[float], Any]]:
    """Yields `function` with a bar that counts its calls.

    It is for a search whose length nobody knows.
    """
    with progress_bar(label=label, unit=unit) as bar:

        def counted(value: float) -> Any:
            bar.update()
            return function(value)

        yield counted
