"""Privacy accounting: events, epsilon, noise calibration, the ledger and audits. Needs dp_accounting, never JAX."""

from jaxdp.privacy import audit
from jaxdp.privacy.accounting import delta, epsilon
from jaxdp.privacy.calibration import calibrate_noise
from jaxdp.privacy.events import (
    ComposedDpEvent,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    SingleEpochTreeAggregationDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    UnprovenDpEvent,
    ZCDpEvent,
    unproven,
)
from jaxdp.privacy.ledger import BudgetExceeded, Ledger, Spend

__all__ = [
    "BudgetExceeded",
    "ComposedDpEvent",
    "DiscreteLaplaceDpEvent",
    "DpEvent",
    "GaussianDpEvent",
    "LaplaceDpEvent",
    "Ledger",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "PoissonSampledDpEvent",
    "PureDpEvent",
    "RandomizedResponseDpEvent",
    "RepeatAndSelectDpEvent",
    "SampledWithoutReplacementDpEvent",
    "SelfComposedDpEvent",
    "SingleEpochTreeAggregationDpEvent",
    "Spend",
    "TruncatedSubsampledGaussianDpEvent",
    "UnprovenDpEvent",
    "ZCDpEvent",
    "audit",
    "calibrate_noise",
    "delta",
    "epsilon",
    "unproven",
]
