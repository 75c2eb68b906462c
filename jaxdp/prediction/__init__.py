"""Private answers to queries of a model that was trained without privacy."""

from jaxdp.prediction.agt import (
    Bounds,
    Certificates,
    certify,
    train_with_bounds,
    training_programs,
)
from jaxdp.prediction.answers import (
    answered,
    event,
    pate_predict,
    private_predict,
    private_values,
    query_epsilon,
    train_student,
)
from jaxdp.prediction.ensembles import ConfidentGNMax, partition_by_hash, vote
from jaxdp.prediction.features import FeatureMap
from jaxdp.prediction.mechanisms import (
    METHODS,
    Mechanism,
    flip_probability,
    needed_distance,
    randomised_response,
    smooth_cauchy,
)
from jaxdp.prediction.plan import Threat, Training
from jaxdp.prediction.poisoning import Poisoning

__all__ = [
    "METHODS",
    "Bounds",
    "Certificates",
    "ConfidentGNMax",
    "FeatureMap",
    "Mechanism",
    "Poisoning",
    "Threat",
    "Training",
    "answered",
    "certify",
    "event",
    "flip_probability",
    "needed_distance",
    "partition_by_hash",
    "pate_predict",
    "private_predict",
    "private_values",
    "query_epsilon",
    "randomised_response",
    "smooth_cauchy",
    "train_student",
    "train_with_bounds",
    "training_programs",
    "vote",
]
