"""What happens in a run, for whoever watches it from outside: events of the logger "jaxdp.events".

An event has no private value. Its fields are names, settings, charges and counts that a report of
the same run may show.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

EVENTS = logging.getLogger("jaxdp.events")


def happened(event: str, fields: Callable[[], dict[str, Any]]) -> None:
    """Logs an event at level INFO.

    Args:
      event: The kind of the event.
      fields: A function `fields()` that returns its fields. It is called if somebody listens.
    """
    if EVENTS.isEnabledFor(logging.INFO):
        EVENTS.info("%s %s", event, fields())


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Logs no event of the body, because the number of its events is secret."""
    disabled = EVENTS.disabled
    EVENTS.disabled = True
    try:
        yield
    finally:
        EVENTS.disabled = disabled
