"""Test-time adaptation on scikit-learn's bundled digits. It needs no data and no network.

    python -m launch.adapt --config configs/tta/digits.py --workdir workdir/tta_digits

Two minutes on two CPU cores: a small ViT is trained on 1078 digits and adapts to noisy, blurred and
faded ones. On this small set adaptation gains nothing (75% with and without).
configs/tta/cifar10.py shows a gain."""

from ml_collections import ConfigDict

from configs.tta import cifar10


def get_config() -> ConfigDict:
    config = cifar10.get_config()
    config.data = {
        "source": "bundled",
        "name": "digits",
        "split_seed": 0,
        "parts": {"public": 0.6, "test": 0.4},
        "severity": 3,
        "corruptions": ("gaussian_noise", "defocus_blur", "contrast"),
        "images": 128,
    }
    config.model = {
        "name": "vit_tiny",
        "num_classes": 10,
        "classes": "",
        "options": {"patch_size": 2, "width": 32, "depth": 4, "num_heads": 4, "mlp_width": 64},
        "checkpoint": "",
        "naming": "auto",
        "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
    }
    config.train = {
        "steps": 400,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "crop_padding": 0,
        "init_seed": 0,
    }
    config.protocol.batch_size = 32
    config.protocol.seeds = 3
    config.methods = ("Tent", "EATA", "SAR", "DeYO", "Tent-COME")
    config.fisher_images = 256
    config.privacy.budgets = (20.0, 5.0, 1.0)
    config.tuning = {
        "corruptions": ("speckle_noise", "gaussian_blur"),
        "images": 128,
        "learning_rates": (1e-3, 1e-2),
        "clipped_steps": (1e-3, 1e-2),
        "clip_norms": (0.3,),
        "batch_clip_norms": (0.3,),
    }
    return config
