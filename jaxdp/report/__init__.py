"""Metrics in JSON lines, text tables and figures."""

from jaxdp.report.metrics import MetricsWriter, read_metrics
from jaxdp.report.plots import (
    check_figures,
    plot_curves,
    plot_images,
    plot_panels,
    plot_points,
    plot_reliability,
    plot_training,
)
from jaxdp.report.tables import format_table

__all__ = [
    "MetricsWriter",
    "check_figures",
    "format_table",
    "plot_curves",
    "plot_images",
    "plot_panels",
    "plot_points",
    "plot_reliability",
    "plot_training",
    "read_metrics",
]
