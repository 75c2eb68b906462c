"""The public model of an experiment."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxdp import data
from jaxdp.models.public import public_model, trained

MODEL = {
    "name": "mlp",
    "num_classes": 10,
    "options": {"hidden": (8,), "activation": "tanh"},
    "checkpoint": "",
    "naming": "auto",
    "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
}
TRAIN = {"steps": 100, "batch_size": 32, "learning_rate": 1e-2, "crop_padding": 0, "init_seed": 0}


def test_a_model_is_trained_once_and_kept(tmp_path):
    images, path = data.bundled("digits"), tmp_path / "run" / "source.safetensors"
    untrained = public_model(ConfigDict(MODEL))
    assert untrained.params == {} and untrained.model.activation.__name__ == "tanh"
    model = trained(untrained, images, ConfigDict(TRAIN), path)
    batch = images.gather(np.arange(200))
    accuracy = np.mean(np.asarray(model.apply_fn(model.params, batch["image"])).argmax(1) == batch["label"])
    assert accuracy > 0.5  # chance is a tenth
    kept = path.read_bytes()
    again = trained(untrained, images, ConfigDict(TRAIN), path)
    assert path.read_bytes() == kept
    np.testing.assert_array_equal(again.params["head"]["kernel"], model.params["head"]["kernel"])
    other = trained(untrained, images, ConfigDict({**TRAIN, "crop_padding": 1}), tmp_path / "augmented.safetensors")
    assert np.any(other.params["head"]["kernel"] != model.params["head"]["kernel"])


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.model\.preprocessing must be given"):
        public_model(ConfigDict({**MODEL, "preprocessing": {}}))
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        public_model(ConfigDict({**MODEL, "checkpoint": str(tmp_path / "model.npz")}))
