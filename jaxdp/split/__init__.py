"""Split Adaptation: a client adapts a server's transformer and keeps its images.

The method is that of Wang et al. (CVPR 2025, arXiv:2503.00441).
"""

from jaxdp.split.augment import (
    amplitude_exchange,
    augmented_batch,
    hilbert_augment,
    patch_augment,
    retrieve_neighbors,
)
from jaxdp.split.backbone import Backbone, two_thirds
from jaxdp.split.client import perturb_params, represent
from jaxdp.split.copies import Copies, augment_then_noise, noise_then_augment
from jaxdp.split.methods import METHODS
from jaxdp.split.noisy_upload import (
    PrivateRelease,
    Projection,
    clip_representation,
    event,
    label_noise_matrix,
    lift,
    project,
    public_projection,
    published_event,
    randomized_response,
    release_privately,
)
from jaxdp.split.quantization import (
    QuantizedFrontend,
    Scales,
    dequantize,
    quantize,
    quantize_frontend,
    quantized_front,
    search_scales,
)
from jaxdp.split.server import (
    Adapted,
    adapt,
    calibrate_frontends,
    merge_amplitude_exchange,
    merge_hilbert,
    mixup_representations,
    tune_backend,
)

__all__ = [
    "METHODS",
    "Adapted",
    "Backbone",
    "Copies",
    "PrivateRelease",
    "Projection",
    "QuantizedFrontend",
    "Scales",
    "adapt",
    "amplitude_exchange",
    "augment_then_noise",
    "augmented_batch",
    "calibrate_frontends",
    "clip_representation",
    "dequantize",
    "event",
    "hilbert_augment",
    "label_noise_matrix",
    "lift",
    "merge_amplitude_exchange",
    "merge_hilbert",
    "mixup_representations",
    "noise_then_augment",
    "patch_augment",
    "perturb_params",
    "project",
    "public_projection",
    "published_event",
    "quantize",
    "quantize_frontend",
    "quantized_front",
    "randomized_response",
    "release_privately",
    "represent",
    "retrieve_neighbors",
    "search_scales",
    "tune_backend",
    "two_thirds",
]
