"""Metrics in JSON lines, writers of metrics, progress bars, text tables, figures and pages."""

from jaxdp.report.html import Chart, render_page, round_down, round_up
from jaxdp.report.ledger import write_ledger_page
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
from jaxdp.report.progress import counting, progress_bar
from jaxdp.report.runs import write
from jaxdp.report.tables import format_table
from jaxdp.report.verdicts import Verdict, grade, guess_rate, verdict
from jaxdp.report.writers import Callback, TensorBoardWriter, WandbWriter

__all__ = [
    "Callback",
    "Chart",
    "MetricsWriter",
    "TensorBoardWriter",
    "Verdict",
    "WandbWriter",
    "check_figures",
    "counting",
    "format_table",
    "grade",
    "guess_rate",
    "plot_curves",
    "plot_images",
    "plot_panels",
    "plot_points",
    "plot_reliability",
    "plot_training",
    "progress_bar",
    "read_metrics",
    "render_page",
    "round_down",
    "round_up",
    "verdict",
    "write",
    "write_ledger_page",
]
