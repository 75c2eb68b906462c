"""Privacy accounting: events, epsilon, noise calibration and the ledger. It never imports JAX.

The modules:

* Events: `events`, `relations`.
* Events of patterns of participation: `participation`, by `mixtures`, `simulation` and
  `curve_pairs`.
* Epsilon of events: `loss_distribution`, `loss_densities`, `losses`, `convolution` and `gaussian`
  for PLD, `renyi`, `renyi_conversions` and `selection` for RDP, `renyi_pairs` for both, `rules`,
  `tally`, `accounting`. `calibration` and `planning` invert it.
* The ledger's file: `chain`, `schema`, `integrity`, `database`, `store`, with `damage` and `times`.
* Its rows: `terms`, `datasets`, `spends`, `holds`, `contacts`.
* Its decisions: `compositions`, `spent_epsilon`, `budget`, `admission`.
* What explains them: `explanations`, `trade_offs`, `statements`, `group_privacy`.
* What users call: `accounts`, `ledger_reader`, `ledger`, and what they read: `reports`,
  `report_text`, in the words of `units`.
* Which ledger counts which records: `registry`.
"""

from jaxdp.privacy.accounting import delta, epsilon
from jaxdp.privacy.calibration import calibrate_noise
from jaxdp.privacy.events import (
    ComposedDpEvent,
    CorrelatedSampleDpEvent,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LabelDpEvent,
    LaplaceDpEvent,
    MonteCarloDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    OneOfDpEvent,
    OwnedGaussianDpEvent,
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
from jaxdp.privacy.explanations import Explanation, GroupCost
from jaxdp.privacy.group_privacy import GroupPrivacy, GroupRow
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
from jaxdp.privacy.participation import (
    b_min_sep_event,
    balls_in_bins_event,
    cyclic_poisson_event,
    truncated_event,
)
from jaxdp.privacy.planning import TrainingPlan, plan_training
from jaxdp.privacy.privacy_warnings import PrivacyWarning
from jaxdp.privacy.registry import Claim, CountedElsewhere, Registry
from jaxdp.privacy.statements import RenyiStatement
from jaxdp.privacy.trade_offs import TradeOff
from jaxdp.privacy.units import UnitWords, unit_words

__all__ = [
    "Account",
    "BudgetExceeded",
    "Claim",
    "ComposedDpEvent",
    "CorrelatedSampleDpEvent",
    "CountedElsewhere",
    "DiscreteLaplaceDpEvent",
    "DpEvent",
    "Explanation",
    "GaussianDpEvent",
    "GroupCost",
    "GroupPrivacy",
    "GroupRow",
    "Head",
    "Hold",
    "LabelDpEvent",
    "LaplaceDpEvent",
    "Ledger",
    "LedgerDamaged",
    "MonteCarloDpEvent",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "OneOfDpEvent",
    "OwnedGaussianDpEvent",
    "PoissonSampledDpEvent",
    "PrivacyWarning",
    "PureDpEvent",
    "RandomizedResponseDpEvent",
    "Registry",
    "RenyiStatement",
    "RepeatAndSelectDpEvent",
    "Reservation",
    "SampledWithoutReplacementDpEvent",
    "SelfComposedDpEvent",
    "SingleEpochTreeAggregationDpEvent",
    "Spend",
    "TradeOff",
    "TrainingPlan",
    "TruncatedSubsampledGaussianDpEvent",
    "UnitWords",
    "UnprovenDpEvent",
    "ZCDpEvent",
    "b_min_sep_event",
    "balls_in_bins_event",
    "calibrate_noise",
    "cyclic_poisson_event",
    "delta",
    "epsilon",
    "plan_training",
    "truncated_event",
    "unit_words",
    "unproven",
]
