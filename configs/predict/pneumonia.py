r"""Private predictions of pneumonia from chest X-rays of 28 by 28 pixels (PneumoniaMNIST, 4708
private images).

    python -m launch.predict --config configs/predict/pneumonia.py \
        --workdir workdir/predict_pneumonia \
        --config.data.data_dir=/path/to/tfds
    python -m launch.predict --config configs/predict/pneumonia.py:published \
        --workdir workdir/predict_pneumonia_published \
        --config.data.data_dir=/path/to/tfds

Features: activations of the paper's two convolutions, projected on 100 principal axes. The
convolutions are trained here on Fashion-MNIST, which is public, and frozen. Without that set, the
bundled digits train them. The axes come from the 524 images of the validation split, which are
declared public and used without their labels. Model: logistic regression, one full-batch step.

About two minutes on two CPU cores. Percent right of 624 test images, for 100 answers at (10, 1e-5):
85.0 by randomised response on the certified model, 57.5 by smooth sensitivity with the paper's
constants, 53.4 by global sensitivity, 85.1 without noise. A student trained on the answers gets 82.
Ensemble of 25: 83.9, 52.6, 76.8. DP-SGD 87.3. Clip norm and number of axes were chosen by hand on
the same data. The guarantee does not cover such choices.

"published" is the network and the optimizer of configs/predict/octmnist.py:published. The labelled
validation images, declared public, train it before. Its four steps take ten minutes or more, mostly
for distances. docs/results/agt.md has its numbers."""

from ml_collections import ConfigDict

from configs.people import PEOPLE
from configs.predict.octmnist import published_options
from configs.prediction_options import ONE_STEP, QUESTIONS

_VARIANTS = ("features", "published")


def get_config(variant: str = "features") -> ConfigDict:
    if variant not in _VARIANTS:
        raise ValueError(f"the variant must be one of {_VARIANTS}, got {variant!r}.")
    config = ConfigDict(
        {
            **QUESTIONS,
            "data": {
                "kind": "images",
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "source": "tfds",
                "data_dir": "",  # by default the environment variable TFDS_DATA_DIR
                "name": "pneumonia_mnist",
                "parts": {
                    "upstream": "fashion_mnist/train[:20000]",
                    "public": "val",
                    "private": "train",
                    "test": "test",
                },
                "classes": (),
                "keep": (),
                "network": {"steps": 800, "batch_size": 64, "learning_rate": 1e-3, "seed": 0},
                "features": {"dimensions": 100, "whiten": 0.5, "radius": 1.0},
            },
            "model": {"hidden": (), "bias": False, "init_seed": 0},
            "training": {
                "records": 4708,
                "clip": 0.03,
                "learning_rate": 10.0,
                **ONE_STEP,
            },
            "certificate": {"max_distance": 100},
            "prediction": {"queries": 100, "epsilon": 10.0, "delta": 1e-5},
            "ensemble": {"members": 25, "salt": "pneumonia"},
            "pate": {"threshold": 0.6, "ratio": 1.0},
            "student": {"steps": 20, "learning_rate": 5.0, "repetitions": 10},
            "dp_sgd": {
                "steps": 200,
                "batch_size": 512,
                "clip_norm": 0.5,
                "learning_rate": 5.0,
                "momentum": 0.0,
                "runs": 5,
            },
        }
    )
    if variant == "published":
        config.update(published_options())
        config.data.parts = ConfigDict({"upstream": "val", "private": "train", "test": "test"})
        config.data.features = ConfigDict()
        config.data.network.update(ConfigDict({"steps": 300, "dense": True}))
    return config
