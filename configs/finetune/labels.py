"""Label differential privacy on scikit-learn's 1797 digits: images are public, labels are not.

    python -m launch.finetune --config configs/finetune/labels.py --workdir workdir/labels

The epsilon protects the label of one image and nothing else. That of configs/digits_dpsgd.py
protects the whole image with its label. `python -m benchmarks run label_dp` compares them. Ten
seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import digits_dpsgd


def get_config() -> ConfigDict:
    whole = digits_dpsgd.get_config()
    # The unit is that of digits_dpsgd: the label of one example is protected.
    whole.data.adjacency = "replace_label"
    shared = {name: whole[name] for name in ("init_seed", "watch", "data", "model", "pretrain")}
    return ConfigDict(
        {
            **shared,
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
