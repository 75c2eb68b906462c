"""Private recalibration on scikit-learn's bundled digits: runs anywhere, without data or network.

python -m launch.recalibrate --config configs/recalibration/digits.py --workdir workdir/recalibrate_digits
"""

from ml_collections import ConfigDict

from configs.recalibration import cifar10


def get_config() -> ConfigDict:
    config = cifar10.get_config()
    config.data = {
        "source": "bundled",
        "name": "digits",
        "test_fraction": 0.6,
        "severity": 4,
        "corruptions": ("clean", "gaussian_noise", "defocus_blur", "contrast"),
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
    config.train = {"steps": 400, "batch_size": 64, "learning_rate": 3e-3, "crop_padding": 0, "init_seed": 0}
    config.sweep.trials = 100
    config.sweep.sources = {"values": (5, 10, 20, 40), "samples": 10, "epsilon": 1.0}
    config.sweep.samples = {"values": (5, 10, 20, 30), "sources": 20, "epsilon": 1.0}
    config.sweep.epsilon = {"values": (0.25, 0.5, 1.0, 2.0), "sources": 20, "samples": 20}
    config.sweep.centre = {"sources": 20, "samples": 20, "epsilon": 1.0}
    config.figures.reliability_shift = "gaussian_noise"
    return config
