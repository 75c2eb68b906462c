r"""Certificates against poisoned records and for unlearning, on the data of the configs of private
prediction.

    python -m launch.poisoning --config configs/predict/poisoning.py --workdir workdir/poisoning
    python -m launch.poisoning --config configs/predict/poisoning.py:digits \
        --workdir workdir/poisoning_digits
    python -m launch.poisoning --config configs/predict/poisoning.py:pneumonia \
        --workdir workdir/poisoning_pneumonia --config.data.data_dir=/path/to/tfds

Data, model and training are those of configs/predict/blobs.py:mlp, digits.py and pneumonia.py. The
default is the network of two layers on Blobs."""

from ml_collections import ConfigDict

from configs.predict import blobs, digits, pneumonia

_VARIANTS = {
    "blobs": (lambda: blobs.get_config("mlp"), {"radius": 0.05, "most": 20}),
    "digits": (digits.get_config, {"radius": 0.02, "most": 25}),
    "pneumonia": (pneumonia.get_config, {"radius": 0.02, "most": 50}),
}


def get_config(variant: str = "blobs") -> ConfigDict:
    if variant not in _VARIANTS:
        raise ValueError(f"the variant must be one of {sorted(_VARIANTS)}, got {variant!r}.")
    base, changes = _VARIANTS[variant]
    config = base()
    training = config.training.to_dict()
    # A further option of `jaxdp.prediction.Training`.
    training["l1"] = 0.0
    return ConfigDict(
        {
            "public_benchmark": True,
            "data": config.data.to_dict(),
            "model": config.model.to_dict(),
            "training": training,
            "changes": {
                "kinds": ("remove", "features", "labels", "both", "replace"),
                "radius": 0.0,  # by which the features of a poisoned record may move
                "most": 0,  # the largest number of changed records
                "public": 0.0,  # the share of records that nobody can change
                "witnesses": 10,  # models that are retrained on changed records, for each kind
                "seed": 0,  # of public records and of changes
            }
            | changes,
        }
    )
