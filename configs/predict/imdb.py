r"""Private predictions of the sentiment of IMDB reviews, the paper's text task.

    python -m launch.predict --config configs/predict/imdb.py --workdir workdir/predict_imdb \
        --config.data.data_dir=/path/to/tfds --config.data.word_vectors=/path/to/vectors.npz
    python -m launch.predict --config configs/predict/imdb.py:embeddings \
        --workdir workdir/predict_imdb_gpt2 \
        --config.data.path=/path/to/embeddings.npz
    python -m launch.predict --config configs/predict/imdb.py:published \
        --workdir workdir/predict_imdb_published \
        --config.data.path=/path/to/embeddings.npz

The first reads the reviews (`imdb_reviews` of TFDS) and averages word vectors, as
configs/predict/sst2.py. The second reads embeddings of a public language model from a file.
configs/predict/embeddings.py has the command that writes it for GPT-2, with 768 numbers a review as
in the paper. The file has train_features [n, d], train_labels [n], test_features, test_labels, and
public_features [m, d]. The last are embeddings of public texts such as the unlabelled reviews.

The third is the paper's network on them, dense layers 768-100-1, with its settings. In the paper's
public code the vectors of its second part come from the training reviews again. So a review can be
there twice, in training and in test. Here training and test are the parts of the data set.

Not run by us on the real data."""

from ml_collections import ConfigDict

from configs.people import PEOPLE
from configs.prediction_options import ONE_STEP, QUESTIONS

_DATA = {
    "reviews": {
        "kind": "text",
        "unit": "example",  # of privacy, for the ledger
        **PEOPLE,
        "name": "imdb_reviews",
        "data_dir": "",
        "parts": {"private": "train", "test": "test[:5000]"},
        "field": "text",
        "word_vectors": "",
        "weight": 1e-3,
        "negation": 3,
        "features": {"dimensions": 0, "whiten": 1.0, "radius": 1.0},
    },
    "embeddings": {
        "kind": "embeddings",
        "name": "imdb",
        "path": "",
        "num_classes": 2,
        "features": {"dimensions": 100, "whiten": 0.5, "radius": 1.0},
    },
}
_DATA["published"] = _DATA["embeddings"] | {"features": {}}
_PUBLISHED = {
    "model": {"hidden": (100,), "bias": True},
    "training": {
        "clip": 0.04,
        "learning_rate": 0.2,
        "epochs": 3,
        "momentum": 0.99,
        "dampening": 0.3,
        "lr_decay": 0.5,
    },
    "certificate": {"max_distance": 31},
    "student": {"learning_rate": 0.2},
    "dp_sgd": {"steps": 19, "clip_norm": 0.04, "learning_rate": 0.2, "momentum": 0.99},
}


def get_config(variant: str = "reviews") -> ConfigDict:
    if variant not in _DATA:
        raise ValueError(f"the variant must be one of {sorted(_DATA)}, got {variant!r}.")
    config = ConfigDict(
        {
            **QUESTIONS,
            "data": _DATA[variant],
            "model": {"hidden": (), "bias": False, "init_seed": 0},
            "training": {
                "records": 25_000,
                "clip": 0.05,
                "learning_rate": 100.0,
                **ONE_STEP,
            },
            "certificate": {"max_distance": 200},
            "prediction": {"queries": 100, "epsilon": 10.0, "delta": 1e-5},
            "ensemble": {"members": 25, "salt": "imdb"},
            "pate": {"threshold": 0.6, "ratio": 1.0},
            "student": {"steps": 20, "learning_rate": 5.0, "repetitions": 10},
            "dp_sgd": {
                "steps": 200,
                "batch_size": 4000,
                "clip_norm": 0.5,
                "learning_rate": 10.0,
                "momentum": 0.0,
                "runs": 3,
            },
        }
    )
    if variant == "published":
        config.update(_PUBLISHED)
    return config
