"""The parts of every launcher's report, which `jaxdp.report` fills."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxdp.files import write_durably
from jaxdp.report.books import Books, check, checked
from jaxdp.report.document import audited, file_row, page

__all__ = ["PAGES", "Books", "audited", "check", "checked", "write"]

PAGES = pathlib.Path(__file__).parent / "pages"


def write(
    root: pathlib.Path,
    template: str,
    *,
    output: pathlib.Path | None = None,
    released: Mapping[pathlib.Path, str],
    place: Callable[[pathlib.Path], pathlib.Path] = lambda path: path,
    **facts: Any,
) -> pathlib.Path:
    """Writes a report from a template that extends report.html.jinja.

    Args:
      root: The workdir.
      template: The file in `PAGES`.
      output: The HTML file, by default report.html in the workdir.
      released: What each released file is, by its path.
      place: `place(path)` is what the page shows of the path of a released file in the workdir. The
        page may be published, so no part of it may be a hash of private records.
      **facts: What `jaxdp.report.document.page` and the template take besides.
    """
    rows = []
    for path, what in released.items():
        if path.exists():
            rows.append(file_row(place(path.relative_to(root)), path, what))
    path = output or root / "report.html"
    write_durably(path, page(PAGES / template, released=rows, **facts))
    return path
