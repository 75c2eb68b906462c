"""Pages for people: one HTML file without scripts, links or requests, and line charts in it.

A page is filled from a Jinja template that extends `page.html.jinja`. Beside it lie
`parts.html.jinja`, the macros of tables, bars and figures, and the style for wide and narrow
screens, dark mode and paper. Jinja loads on use.
"""

import base64
import dataclasses
import decimal
import functools
import hashlib
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdp.files import optional
from jaxdp.files.text import rounded

_FOLDER = pathlib.Path(__file__).parent / "pages"


def render_page(template: str | os.PathLike[str], /, **facts: Any) -> bytes:
    """Returns a page that is filled from a template.

    Every fact is escaped as text, unless a macro made it. A fact that is missing is an error. The
    page's content security policy allows its own style, by a digest, and embedded images. It
    refuses everything else.

    Args:
        template: A Jinja file. It extends `page.html.jinja`, fills its block `body`, and may import
            macros from `parts.html.jinja` and from files in its own folder. It may use the filters
            `up`, `down` and `percent`.
        **facts: The variables of the template. `title` is the page's title.

    Raises:
        jinja2.UndefinedError: The template uses a fact that is not given.
    """
    import markupsafe

    path = pathlib.Path(template)
    style = (_FOLDER / "style.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = _templates(path.parent).get_template(path.name)
    return page.render(style=markupsafe.Markup(style), digest=digest, **facts).encode()


@functools.cache
def _templates(folder: pathlib.Path) -> Any:
    """Returns the environment of the templates in a folder, which compiles each once."""
    jinja2 = optional("jinja2", "report")
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    pages.filters |= {"up": round_up, "down": round_down, "percent": _percent}
    return pages


def round_up(value: float, digits: int = 3) -> str:
    """Returns a number with at most `digits` significant digits, never less than the number.

    It is for epsilons and deltas. Infinity is "infinite".
    """
    return _rounded(value, digits, decimal.ROUND_CEILING)


def round_down(value: float, digits: int = 3) -> str:
    """Returns a number with at most `digits` significant digits, never more than the number.

    It is for proven lower bounds. Infinity is "infinite".
    """
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def _rounded(
    value: float,
    digits: int,
    direction: str,
) -> str:
    if math.isinf(value):
        return "infinite"
    number = rounded(value, digits, direction, keeps_whole=True)
    # From 10**digits on "g" would write an exponent, and round once more, to nearest.
    return f"{number:.0f}" if abs(number) >= 10**digits else f"{number:.{digits}g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """A line chart for the macro `figure`. Its y axis begins at 0.

    Attributes:
        curves: Name to (x, y) pairs in the order of x. At most five can be told apart. Non-finite y
            leave a gap.
        xlabel, ylabel: The names of the axes.
        top: The end of the y axis. None takes the largest value.
        limits: Name to y of horizontal lines, such as a budget. Infinite ones are left out.
        text: Returns the text of an x, for example of a day.
        mark: Returns a shorter text of an x, for the axis. None takes `text`.
        percent: Whether y is a share, shown as a percentage.
        steps: Whether y keeps its value until the next x.
        width, height: The size in units of which 13 are the height of the text.
    """

    curves: Mapping[str, Sequence[tuple[float, float]]]
    xlabel: str
    ylabel: str
    top: float | None = None
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    text: Callable[[float], str] = "{:g}".format
    mark: Callable[[float], str] | None = None
    percent: bool = False
    steps: bool = False
    width: int = 480
    height: int = 260

    @property
    def left(self) -> int:
        """The left end of the x axis."""
        return 54

    @property
    def right(self) -> int:
        """The right end of the x axis."""
        return self.width - 26

    @property
    def bottom(self) -> int:
        """The lower end of the y axis."""
        return self.height - 44

    @functools.cached_property
    def _points(self) -> list[tuple[float, float]]:
        return list(itertools.chain.from_iterable(self.curves.values()))

    @functools.cached_property
    def _high(self) -> float:
        if self.top:
            return self.top
        heights = [*(y for _, y in self._points), *self.limits.values()]
        return max(filter(math.isfinite, heights), default=0.0) or 1.0

    @functools.cached_property
    def _ends(self) -> tuple[float, float]:
        places = [x for x, _ in self._points]
        low = min(places)
        high = max(places)
        if low == high:  # one moment has no width
            return low - 0.5, high + 0.5
        return low, high

    def _x(self, x: float) -> float:
        low, high = self._ends
        share = (self.right - self.left) * (x - low) / (high - low)
        return round(self.left + share, 1)

    def _y(self, y: float) -> float:
        return round(self.bottom - (self.bottom - 28) * y / self._high, 1)

    def _value(self, y: float) -> str:
        if not math.isfinite(y):
            return "infinite" if y > 0 else "none"
        return f"{100 * y:.3g} %" if self.percent else round_up(y)

    @property
    def lines(self) -> dict[str, float]:
        """The heights of the horizontal lines."""
        return {name: self._y(value) for name, value in self.limits.items() if math.isfinite(value)}

    @property
    def xmarks(self) -> list[tuple[float, str]]:
        """The places and texts of the marks of the x axis.

        They are in round steps, and in whole ones if every x is whole. With `mark` they are
        quarters of the axis.
        """
        low, high = self._ends
        if self.mark is not None:
            quarters = [low + k * (high - low) / 4 for k in range(5)]
            places = {self.mark(x): self._x(x) for x in quarters}
            # A text is centred at its mark. The last one must end inside.
            return [(min(x, self.width - 4.0 * len(text)), text) for text, x in places.items()]
        whole = all(float(x).is_integer() for x, _ in self._points)
        marks = _marks(low, high, least=1.0 if whole else 0.0)
        return [(self._x(x), self.text(x)) for x in marks]

    @property
    def ymarks(self) -> list[tuple[float, str]]:
        """The heights and texts of the marks of the y axis, from 0 in round steps."""
        return [
            (self._y(y), f"{100 * y:g} %" if self.percent else f"{y:.6g}")
            for y in _marks(0.0, self._high)
        ]

    @property
    def paths(self) -> list[str]:
        """The curves as paths of SVG."""
        return [self._path(points) for points in self.curves.values()]

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        path = ""
        gap = True  # whether the pen is up
        for x, y in points:
            if not math.isfinite(y):
                gap = True
                continue
            across = self._x(x)
            down = self._y(min(y, self._high))
            if gap:
                path += f"M{across} {down}"
            elif self.steps:
                path += f"H{across}V{down}"
            else:
                path += f"L{across} {down}"
            gap = False
        return path

    @property
    def headings(self) -> list[str]:
        """The headings of the table of the chart's numbers."""
        return [self.xlabel, *self.curves]

    @property
    def rows(self) -> list[list[str]]:
        """The rows of the table of the chart's numbers, one for each x."""
        curves = [dict(points) for points in self.curves.values()]
        rows = []
        for x in sorted({x for x, _ in self._points}):
            values = [self._value(curve[x]) if x in curve else "" for curve in curves]
            rows.append([self.text(x), *values])
        return rows


def _marks(
    low: float,
    high: float,
    least: float = 0.0,
) -> list[float]:
    """Returns about five multiples of a round step from `low` to `high`."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [power * k for k in (1, 2, 2.5, 5, 10)]
    step = max(next(step for step in steps if step >= 0.999 * rough), least)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]
