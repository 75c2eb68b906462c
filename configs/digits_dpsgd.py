"""DP-SGD on scikit-learn's digits: pre-train on the public digits 0-4, fine-tune on the private digits 5-9.

    python -m launch.finetune --config configs/digits_dpsgd.py --workdir workdir/digits
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "init_seed": 0,  # of the initial parameters and the order of public examples; not of any noise
            "references": True,  # also train without privacy and without pre-training, to compare
            "data": {
                "source": "bundled",
                "name": "digits",
                "test_fraction": 0.3,
                "split_seed": 0,
                "public_classes": (0, 1, 2, 3, 4),
                "private_classes": (5, 6, 7, 8, 9),
                "mean": 0.3,
                "std": 0.4,
                "crop_padding": 1,
                "flip": False,
            },
            "model": {"name": "cnn", "options": {"widths": (32, 64), "dense": 64}},
            "pretrain": {"weights": "", "steps": 400, "batch_size": 64, "learning_rate": 2e-3},
            "no_privacy": {"steps": 400, "batch_size": 64, "learning_rate": 2e-3},
            "private": {
                "epsilon": 4.0,
                "delta": 1e-5,
                "batch_size": 128,  # expected size of a Poisson-sampled batch
                "physical_batch_size": 160,
                "steps": 200,
                "clip_norm": 1.0,
                "learning_rate": 1.0,
                "momentum": 0.9,
                "schedule": "cosine",
                "augmult": 4,
                "ema_decay": 0.9,
                "checkpoint_every": 20,
            },
        }
    )
