"""Privacy accounting: events, epsilon, noise calibration and the ledger. It needs dp_accounting and
never JAX.
"""

from jaxdp.privacy.accounting import delta, epsilon
from jaxdp.privacy.calibration import calibrate_noise
from jaxdp.privacy.cautions import PrivacyWarning
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
from jaxdp.privacy.ledger import (
    Account,
    BudgetExceeded,
    Head,
    Hold,
    Ledger,
    LedgerDamaged,
    Reservation,
    Spend,
)
from jaxdp.privacy.planning import TrainingPlan, plan_training

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
    "PrivacyWarning",
    "PureDpEvent",
    "RandomizedResponseDpEvent",
    "RepeatAndSelectDpEvent",
    "Reservation",
    "SampledWithoutReplacementDpEvent",
    "SelfComposedDpEvent",
    "SingleEpochTreeAggregationDpEvent",
    "Spend",
    "TrainingPlan",
    "TruncatedSubsampledGaussianDpEvent",
    "UnprovenDpEvent",
    "ZCDpEvent",
    "calibrate_noise",
    "delta",
    "epsilon",
    "plan_training",
    "unproven",
]
