"""The former name of `jaxdp.privacy.reports` and `jaxdp.privacy.report_text`."""

from jaxdp.privacy.report_text import aligned, grouped, text
from jaxdp.privacy.reports import by_day, entry, finite, growth, history
from jaxdp.privacy.times import local

__all__ = ["aligned", "by_day", "entry", "finite", "grouped", "growth", "history", "local", "text"]
