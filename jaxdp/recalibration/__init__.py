"""Private recalibration: confidences that fit a new site.

They come from noisy answers of many private sources.
"""

from jaxdp.recalibration.methods import (
    METHODS,
    AccBisection,
    AccT,
    EceT,
    HistogramBinning,
    LogisticBinning,
    NllT,
)
from jaxdp.recalibration.metrics import brier, classwise_ece, ece, nll, reliability
from jaxdp.recalibration.protocol import (
    Conversation,
    Method,
    Party,
    Records,
    event,
    noise_scale,
    play,
)
from jaxdp.recalibration.recalibrate import (
    Recalibration,
    acc_t,
    ece_t,
    histogram_binning,
    logistic_binning,
    nll_t,
    none,
    one_source,
    recalibrate,
)
from jaxdp.recalibration.search import Bracket

__all__ = [
    "METHODS",
    "AccBisection",
    "AccT",
    "Bracket",
    "Conversation",
    "EceT",
    "HistogramBinning",
    "LogisticBinning",
    "Method",
    "NllT",
    "Party",
    "Recalibration",
    "Records",
    "acc_t",
    "brier",
    "classwise_ece",
    "ece",
    "ece_t",
    "event",
    "histogram_binning",
    "logistic_binning",
    "nll",
    "nll_t",
    "noise_scale",
    "none",
    "one_source",
    "play",
    "recalibrate",
    "reliability",
]
