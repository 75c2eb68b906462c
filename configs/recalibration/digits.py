r"""Private recalibration on scikit-learn's bundled digits. It needs no data and no network.

    python -m launch.recalibrate --config configs/recalibration/digits.py \
        --workdir workdir/recalibrate_digits

A minute of computation on two CPU cores. Mean ECE under four shifts at the centre, with 20 sources
of 20 digits at epsilon = 1: .32 without recalibration, .19 by Acc-T, .11 over a wide range of
temperatures. Histogram binning has .18, and .10 with its honest noise. Bisection has .075, logistic
binning .06. One source alone gets .08 without privacy.

    python -m launch.recalibrate --config configs/recalibration/digits.py:sweeps \
        --workdir workdir/recalibrate_digits_sweeps

Three minutes: three severities, the sweeps of iterations, bins and numbers of sources of the same
records, grid search, isotonic regression and Platt scaling. docs/results/recalibration.md has the
results.
"""

from ml_collections import ConfigDict

from configs.recalibration import cifar10


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "sweeps"):
        raise ValueError(f"the variant must be '' or 'sweeps', got {variant!r}.")
    config = cifar10.get_config()
    config.data = {
        "source": "bundled",
        "name": "digits",
        "split_seed": 0,
        "parts": {"public": 0.4, "test": 0.6},
        "severity": (5,),
        "corruptions": ("clean", "motion_blur", "defocus_blur", "glass_blur", "fog"),
        "batch_size": 250,
    }
    config.model = {
        "name": "mlp",
        "num_classes": 10,
        "options": {"hidden": (128, 128)},
        "checkpoint": "",
        "naming": "auto",
        "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
    }
    config.train.update(steps=1500, batch_size=64, learning_rate=1e-2, crop_padding=0)
    config.sweep.trials = 100
    config.sweep.sources = {"values": (5, 10, 20, 40), "samples": 10, "epsilon": 1.0}
    config.sweep.samples = {"values": (5, 10, 20, 30), "sources": 20, "epsilon": 1.0}
    config.sweep.epsilon = {"values": (0.25, 0.5, 1.0, 2.0), "sources": 20, "samples": 20}
    config.sweep.division.records = 400
    config.sweep.centre = {"sources": 20, "samples": 20, "epsilon": 1.0}
    if variant == "sweeps":
        cifar10.vary(config)
        config.sweep.division.sources = (1, 4, 20, 80, 400)
    return config
