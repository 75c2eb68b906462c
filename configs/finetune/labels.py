"""Label differential privacy on scikit-learn's 1797 digits: images are public, labels are not.

    python -m launch.finetune --config configs/finetune/labels.py --workdir workdir/labels

The epsilon protects the label of one image and nothing else. That of configs/digits_dpsgd.py
protects the whole image with its label. `python -m benchmarks run label_dp` compares them. Ten
seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs.method_options import TUNING
from configs.people import PEOPLE


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "init_seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "data": {
                "source": "bundled",
                "name": "digits",
                "split_seed": 0,
                "parts": {"public": 0.05, "private": 0.65, "test": 0.3},
                "unit": "example",  # whose label is protected
                "adjacency": "replace_label",
                **PEOPLE,
                "crop_padding": 1,
                "flip": False,
            },
            "model": {
                **TUNING,
                "name": "cnn",
                "options": {"widths": (32, 64), "dense": 0},
                "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
            },
            "pretrain": {
                "weights": "",
                "new_head": False,
                "steps": 400,
                "batch_size": 64,
                "learning_rate": 2e-3,
            },
            "labels": {  # see launch/label_dp.py
                "prior": "stages",  # or "none", "public", "histogram"
                "stages": 2,
                "split_seed": 0,
                "histogram_share": 0.1,
                "corrected": True,
            },
            "private": {
                "epsilon": 2.0,
                "delta": 0.0,
                "steps": 400,
                "batch_size": 64,
                "learning_rate": 2e-3,
                "augmult": 1,  # 0 does not augment
            },
        }
    )
