"""Privacy accounting: events, epsilon, noise calibration, the ledger. Needs dp_accounting, never JAX."""

from jaxdp.privacy.accounting import delta, epsilon
from jaxdp.privacy.accounts import Account, Hold, Reservation, Spend
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
from jaxdp.privacy.ledger import BudgetExceeded, Head, Ledger, LedgerDamaged

__all__ = [
    "Account",
    "BudgetExceeded",
    "ComposedDpEvent",
    "DiscreteLaplaceDpEvent",
    "DpEvent",
    "GaussianDpEvent",
    "Head",
    "Hold",
    "LaplaceDpEvent",
    "Ledger",
    "LedgerDamaged",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "PoissonSampledDpEvent",
    "PureDpEvent",
    "RandomizedResponseDpEvent",
    "RepeatAndSelectDpEvent",
    "Reservation",
    "SampledWithoutReplacementDpEvent",
    "SelfComposedDpEvent",
    "SingleEpochTreeAggregationDpEvent",
    "Spend",
    "TruncatedSubsampledGaussianDpEvent",
    "UnprovenDpEvent",
    "ZCDpEvent",
    "calibrate_noise",
    "delta",
    "epsilon",
    "unproven",
]
