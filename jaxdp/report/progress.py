"""Progress bars of long loops: how much is done, the rate, and the time that is left.

Every loop of jaxdp that can take long shows a bar on stderr once it has run for a second. Nothing
is shown if stderr is neither a terminal nor a notebook, as in a batch job. The environment variable
JAXDP_PROGRESS decides otherwise: 1 always shows bars, 0 never.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tqdm import tqdm


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
    return tqdm(
        items,
        desc=label,
        unit=unit,
        total=total,
        initial=initial,
        disable=not (show and (always == "1" or (watched and always != "0"))),
        delay=1,
        leave=None,
        # A file keeps every refresh, a terminal only the last.
        mininterval=0.1 if watched else 10,
    )


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
