r"""Private predictions of drusen from retina scans (OctMNIST, drusen against normal), the paper's
medical task.

    python -m launch.predict --config configs/predict/octmnist.py \
        --workdir workdir/predict_octmnist \
        --config.data.path=/path/to/octmnist.npz --config.data.data_dir=/path/to/tfds

`path` is the file of MedMNIST v2 (https://medmnist.com) with the arrays
{train,val,test}_{images,labels}. The frozen network is trained on Fashion-MNIST from the TFDS
directory `data_dir`. A hash of its pixels keeps one normal scan in six, so that the classes have
about equal numbers, as in the paper. Not run by us on the real file. """

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "query_seed": 0,
            "references": True,
            "repetitions": 20,
            "mechanisms": ("global", "smooth", "ours"),
            "data": {
                "kind": "images",
                "unit": "example",  # of privacy, for the ledger
                "source": "npz",
                "path": "",
                "data_dir": "",
                "name": "octmnist",
                "num_classes": 4,
                "parts": {
                    "upstream": "fashion_mnist/train[:20000]",
                    "public": "val",
                    "private": "train",
                    "test": "test",
                },
                "classes": (3, 2),  # normal, drusen
                "keep": (0.168, 1.0),
                "network": {"steps": 800, "batch_size": 64, "learning_rate": 1e-3, "seed": 0},
                "features": {"dimensions": 100, "whiten": 0.5, "radius": 1.0},
            },
            "model": {"hidden": (), "bias": False, "init_seed": 0},
            "training": {
                "records": 15_486,  # about: 0.168 of 46,026 normal scans and 7754 with drusen
                "clip": 0.03,
                "learning_rate": 10.0,
                "epochs": 1,
                "momentum": 0.0,
                "weight_decay": 0.0,
                "lr_decay": 0.0,
                "lr_min": 0.0,
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
