r"""Figures 1, 3, 5 and 7 of Wang et al. 2024 (DPAdapter) from scikit-learn's digits.

    python -m launch.finetune --config configs/dpadapter_digits.py \
        --workdir workdir/dpadapter_digits --config.pretrain.data.data_dir=DIR

Upstream models see 808 digits of 8x8 pixels a hundred times. The private sets are 450 other digits,
which have the upstream distribution as in Figure 1, and 1500 images of USPS. Upstream models and
grids are those of configs/dpadapter_cifar10.py:figures. docs/results/dpadapter.md has the results.
"""

from ml_collections import ConfigDict

from configs import dpadapter_cifar10


def get_config() -> ConfigDict:
    config = dpadapter_cifar10.get_config("figures")
    config.pretrain.data = {
        "source": "bundled",
        "name": "digits",
        "data_dir": "",
        "split_seed": 0,
        "parts": {"public": 0.45, "private": 0.25, "test": 0.3},
        "crop_padding": 1,
        "flip": False,
    }
    config.pretrain.model.options.widths = (8, 16)
    config.pretrain.model.preprocessing = {"size": 8, "mean": (0.3,), "std": (0.4,)}
    config.robust.std = 0.4
    config.pretrain.robustness.relative_std = (0.4,)
    config.sets = {
        "digits": {"name": "digits"},
        "USPS": {
            "source": "tfds",
            "name": "usps",
            "parts": {"private": "train[:1500]", "test": "test[:2000]"},
        },
    }
    config.private.update({"batch_size": 150, "physical_batch_size": 150})
    for grid in config.grids.values():
        grid.sets = tuple(config.sets)
    return config
