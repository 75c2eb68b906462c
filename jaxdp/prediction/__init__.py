"""Private answers to queries of a model that was trained without privacy."""

from jaxdp.prediction.agt import Bounds, Certificates, certify, train_with_bounds

__all__ = ["Bounds", "Certificates", "certify", "train_with_bounds"]
