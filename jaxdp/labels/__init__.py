"""Label differential privacy: noisy labels of records whose features are public.

* `noisy`: the release of labels by randomised response, with or without a prior.
* `histogram`: a prior from the private labels, charged.
* `stages`: a prior from a model that was trained on the labels of other records.
"""

from jaxdp.labels.histogram import release_label_prior
from jaxdp.labels.noisy import NoisyLabels, PublicColumns, release_labels
from jaxdp.labels.stages import release_labels_in_stages

__all__ = [
    "NoisyLabels",
    "PublicColumns",
    "release_label_prior",
    "release_labels",
    "release_labels_in_stages",
]
