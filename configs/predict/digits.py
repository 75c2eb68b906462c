"""Private predictions of ten digits, from scikit-learn's bundled images. It needs no data and no
network.

    python -m launch.predict --config configs/predict/digits.py --workdir workdir/predict_digits

About a minute on two CPU cores. Percent right of 100 answers at (10, 1e-5): 77 by randomised
response on the certified model, 12 without certificates and 87 without noise. A student trained on
the answers gets 79, an ensemble of 10 small models 47, and DP-SGD 93. PATE gets 31 on the 60
queries that it answers. With 1078 records of 10 classes private training is better, as the paper
finds for small data."""

from ml_collections import ConfigDict

from configs.people import PEOPLE


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "query_seed": 0,  # of the public choice of test inputs to ask about
            # also the comparison and the figures, which read the private data without noise
            "references": True,
            "mechanisms": ("global", "ours"),  # or also "smooth", for two classes only
            "repetitions": 20,  # of each row of the table, with fresh noise and other queries
            "data": {
                "kind": "images",
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "source": "bundled",
                "name": "digits",
                "split_seed": 0,
                # Features are centred and scaled on the public images, without their labels.
                "parts": {"public": 0.1, "private": 0.6, "test": 0.3},
                "classes": (),  # all
                "keep": (),
                "features": {"dimensions": 16, "whiten": 0.5, "radius": 1.0},
            },
            "model": {"hidden": (), "bias": False, "init_seed": 0},
            # in full batches. `clip` bounds each coordinate of one record's gradient.
            "training": {
                # the declared, public number of private records, which divides sums
                "records": 1078,
                "clip": 0.02,
                "learning_rate": 10.0,
                "epochs": 1,
                "momentum": 0.0,
                "nesterov": False,
                "dampening": 0.0,
                "weight_decay": 0.0,
                "lr_decay": 0.0,
                "lr_min": 0.0,
                "threat": "add_remove",  # or "replace_one", Theorem 4.6
            },
            "certificate": {"max_distance": 100},
            "prediction": {"queries": 100, "epsilon": 10.0, "delta": 1e-5},
            "ensemble": {"members": 10, "salt": "digits"},
            # required share of members, and noise of the check over the votes
            "pate": {
                "threshold": 0.6,
                "ratio": 1.0,
            },
            "student": {"steps": 20, "learning_rate": 5.0, "repetitions": 10},
            "dp_sgd": {
                "steps": 100,
                "batch_size": 256,
                "clip_norm": 1.0,
                "learning_rate": 5.0,
                "momentum": 0.0,
                "runs": 5,
            },
        }
    )
