"""The axes of `jaxdp.report.plot_curves`."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Required, TypedDict


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveAxes:
    """The axes of `plot_curves`.

    Attributes:
        xlabel, ylabel: The names of the axes. The name of y is above the panel.
        xscale, yscale: "linear" or "log".
        percent: Whether a linear y axis has percentages.
        xticks: x to the text of the marks on the x axis. Long texts are slanted. None chooses them.
    """

    xlabel: str
    ylabel: str
    xscale: Literal["linear", "log"] = "linear"
    yscale: Literal["linear", "log"] = "linear"
    percent: bool = True
    xticks: Mapping[float, str] | None = None


class AxesKeywords(TypedDict, total=False):
    """The fields of `CurveAxes` as keywords, for editors and type checkers."""

    xlabel: Required[str]
    ylabel: Required[str]
    xscale: Literal["linear", "log"]
    yscale: Literal["linear", "log"]
    percent: bool
    xticks: Mapping[float, str] | None
