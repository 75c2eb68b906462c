"""Label differential privacy: noisy labels of records whose features are public.

* `noisy`: the release of labels by randomised response, with or without a prior.
* `histogram`: a prior from the private labels, charged.
* `stages`: a prior from a model that was trained on the labels of other records.
* `methods`: the table of both, and what they cost.
"""

from jaxdp.labels.histogram import release_label_prior
from jaxdp.labels.methods import METHODS, event
from jaxdp.labels.noisy import NoisyLabels, PublicColumns, release_labels
from jaxdp.labels.stages import release_labels_in_stages

__all__ = [
    "METHODS",
    "NoisyLabels",
    "PublicColumns",
    "event",
    "release_label_prior",
    "release_labels",
    "release_labels_in_stages",
]
