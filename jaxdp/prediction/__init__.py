"""Private answers to queries of a model that was trained without privacy."""

from jaxdp.prediction.agt import Bounds, Certificates, certify, train_with_bounds
from jaxdp.prediction.ensembles import ConfidentGNMax, partition_by_hash, vote
from jaxdp.prediction.mechanisms import flip_probability, randomised_response, smooth_cauchy, smooth_laplace
from jaxdp.prediction.private import (
    answered,
    answers_event,
    pate_predict,
    private_predict,
    private_values,
    query_epsilon,
    train_student,
)

__all__ = [
    "Bounds",
    "Certificates",
    "ConfidentGNMax",
    "answered",
    "answers_event",
    "certify",
    "flip_probability",
    "partition_by_hash",
    "pate_predict",
    "private_predict",
    "private_values",
    "query_epsilon",
    "randomised_response",
    "smooth_cauchy",
    "smooth_laplace",
    "train_student",
    "train_with_bounds",
    "vote",
]
