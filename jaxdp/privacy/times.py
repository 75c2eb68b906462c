"""Times as the ledger's file writes them."""

import datetime
import time


def utc(seconds: float) -> str:
    """Returns a time, in seconds since 1970, in UTC to milliseconds."""
    time_in_utc = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return time_in_utc.isoformat(timespec="milliseconds")


def now() -> str:
    """Returns the present time in the format of `utc`."""
    return utc(time.time())


def local(text: str, timezone: datetime.tzinfo) -> datetime.datetime:
    """Converts a time of the ledger to a time zone."""
    return datetime.datetime.fromisoformat(text).astimezone(timezone)
