r"""Private predictions of drusen from retina scans (OctMNIST, drusen against normal), the paper's
medical task.

    python -m launch.predict --config configs/predict/octmnist.py \
        --workdir workdir/predict_octmnist \
        --config.data.path=/path/to/octmnist.npz --config.data.data_dir=/path/to/tfds
    python -m launch.predict --config configs/predict/octmnist.py:published \
        --workdir workdir/predict_octmnist_published \
        --config.data.path=/path/to/octmnist.npz

`path` is the file of MedMNIST v2 (https://medmnist.com) with the arrays
{train,val,test}_{images,labels}. A hash of its pixels keeps one normal scan in six, so that the
classes have about equal numbers, as in the paper.

The first is logistic regression on features of a frozen network, which is trained on Fashion-MNIST
from the TFDS directory `data_dir`. The second is the paper's network with its optimizer: two frozen
convolutions, and dense layers 3200-100-1 that four full-batch steps train further. The public scans
of "val" train it before, normal against the other classes without drusen. The paper's public code
trains it before on the training scans, whose normal ones are private later.

Not run by us on the real file. configs/predict/pneumonia.py:published is the same network on chest
X-rays."""

from typing import Any

from ml_collections import ConfigDict

from configs.people import PEOPLE
from configs.prediction_options import ONE_STEP, QUESTIONS

_FEATURES = {
    "parts": {
        "upstream": "fashion_mnist/train[:20000]",
        "public": "val",
        "private": "train",
        "test": "test",
    },
    "network": {"steps": 800, "batch_size": 64, "learning_rate": 1e-3, "seed": 0},
    "features": {"dimensions": 100, "whiten": 0.5, "radius": 1.0},
}
_PUBLISHED = {
    "parts": {"upstream": "val", "private": "train", "test": "test"},
    # About 7600 scans, 20 times.
    "network": {
        "steps": 1500,
        "batch_size": 100,
        "learning_rate": 1e-3,
        "seed": 0,
        "classes": ((3,), (0, 1)),  # normal against neovascularisation and oedema
        "dense": True,
    },
    "features": {},
}


def get_config(variant: str = "features") -> ConfigDict:
    variants = {"features": _FEATURES, "published": _PUBLISHED}
    if variant not in variants:
        raise ValueError(f"the variant must be one of {sorted(variants)}, got {variant!r}.")
    config = ConfigDict(
        {
            **QUESTIONS,
            "data": {
                "kind": "images",
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "source": "npz",
                "path": "",
                "data_dir": "",
                "name": "octmnist",
                "num_classes": 4,
                "classes": (3, 2),  # normal, drusen
                "keep": (0.168, 1.0),
                **variants[variant],
            },
            "model": {"hidden": (), "bias": False, "init_seed": 0},
            "training": {
                "records": 15_486,  # about: 0.168 of 46,026 normal scans and 7754 with drusen
                "clip": 0.03,
                "learning_rate": 10.0,
                **ONE_STEP,
            },
            "certificate": {"max_distance": 100},
            "prediction": {"queries": 100, "epsilon": 10.0, "delta": 1e-5},
            "ensemble": {"members": 25, "salt": "octmnist"},
            "pate": {"threshold": 0.6, "ratio": 1.0},
            "student": {"steps": 20, "learning_rate": 5.0, "repetitions": 10},
            "dp_sgd": {
                "steps": 200,
                "batch_size": 1000,
                "clip_norm": 0.5,
                "learning_rate": 5.0,
                "momentum": 0.0,
                "runs": 5,
            },
        }
    )
    if variant == "published":
        config.update(published_options())
    return config


def published_options() -> dict[str, Any]:
    """Returns the paper's OctMNIST network with the optimizer of its public code."""
    return {
        "model": {"hidden": (100,), "bias": True},
        "training": {
            "clip": 0.9,
            "learning_rate": 0.06,
            "epochs": 4,
            "momentum": 0.95,
            "nesterov": True,
            "lr_decay": 0.5,
            "lr_min": 1e-3,
        },
        # More distances change no answer by more than 0.001. Each takes all steps but the first.
        "certificate": {"max_distance": 31},
        "student": {"learning_rate": 0.06},
        "dp_sgd": {"steps": 62, "clip_norm": 0.9, "learning_rate": 0.06, "momentum": 0.95},
    }
