"""A small ViT and digits, for the attacks on what a client of Split Adaptation uploads."""

from typing import Any

import jax
import numpy as np

from jaxdp.data import bundled
from jaxdp.models import Preprocessing, ViT
from jaxdp.split.backbone import Backbone

MODEL = ViT(num_classes=5, patch_size=2, width=16, depth=2, num_heads=2, mlp_width=32)
BACKBONE = Backbone(MODEL, Preprocessing(size=8, mean=(0.5,), std=(0.5,)), 1)
_initialize = jax.jit(MODEL.init)


def fresh_params(key: jax.Array) -> Any:
    return _initialize(key, np.zeros((1, 8, 8, 1), np.float32))["params"]


def unlike_digits(*, public: int, references: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns public digits 0 to 4, and a client's 5 to 9."""
    source = bundled("digits")
    columns = source.gather(np.arange(len(source)))
    images, seen = np.asarray(columns["image"], np.float32), np.asarray(columns["label"]) < 5
    return images[seen][:public], images[~seen][:references]
