r"""A linear head on scattering coefficients, without any public image: the baseline of Tramer and
Boneh 2021.

    python -m launch.finetune --config configs/finetune/scattering.py:cifar10 \
        --workdir workdir/scattering \
        --config.data.data_dir=DIR --config.public_benchmark

`:cifar10`, `:cifar10_full`, `:fashion_mnist` and `:fashion_mnist_full` choose the first 5000 or all
training images of the data set. DIR holds its prepared TFDS data. With
`--config.data.parts.public="cifar100/train[:3000]" --config.model.features.dimensions=512` the head
sees principal directions of PUBLIC images, whose labels are not used.

Results, minutes and what was tuned on which images: docs/results/scattering.md.
"""

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, TUNING, clipping, optimizer
from configs.people import PEOPLE

# side, channels, training images
_IMAGES = {
    "cifar10": (32, 3, 50_000),
    "fashion_mnist": (28, 1, 60_000),
}


def get_config(chosen: str = "cifar10") -> ConfigDict:
    name, full = chosen.removesuffix("_full"), chosen.endswith("_full")
    if name not in _IMAGES:
        known = ", ".join(repr(name + end) for name in _IMAGES for end in ("", "_full"))
        raise ValueError(f"the config takes one of {known} after the colon, got {chosen!r}.")
    side, channels, records = _IMAGES[name]
    records, steps = (records, 80) if full else (5000, 40)
    return ConfigDict(
        {
            "public_benchmark": False,  # see launch/curve.py
            "init_seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "references": True,  # also train without privacy
            "curve": {
                "epsilons": (1.0, 2.0, 3.0, 8.0),
                "learning_rates": (128.0, 128.0, 256.0, 256.0)
                if full
                else (32.0, 32.0, 64.0, 128.0),
                "runs": 1 if full else 5,
            },
            "data": {
                "source": "tfds",
                "name": name,
                "data_dir": "",
                "parts": {"public": "", "private": f"train[:{records}]", "test": "test"},
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "adjacency": "add_remove",
                "crop_padding": 0,
                "flip": False,
            },
            "model": {
                "name": "scattering",
                "options": {},
                "preprocessing": {
                    "size": side,
                    "mean": (0.5,) * channels,
                    "std": (0.25,) * channels,
                },
                **TUNING,
                "trainable": "head",
                "features": {"keep": "memory", "dimensions": 0, "whiten": 0.5},
            },
            "pretrain": {
                "weights": "",
                "new_head": False,
                "steps": 0,
                "batch_size": 128,
                "learning_rate": 1e-3,
            },
            "no_privacy": {"steps": 500, "batch_size": 500, "learning_rate": 0.01},
            "private": {
                "method": "dp_sgd",
                "method_options": METHOD_OPTIONS,
                "accountant": "auto",
                "epsilon": 1.0,
                "delta": 1e-5,
                # all images in every step: the least noise for the same epsilon
                "batch_size": records,
                "truncated_batch_size": 0,  # the largest batch; 0 truncates none
                "physical_batch_size": 5000,
                "steps": steps,
                **clipping(0.15),
                "exact": False,  # True sums and draws noise by integers
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 64.0,
                **optimizer(momentum=0.9),
                "schedule": "constant",
                "augmult": 0,
                "ema_decay": 0.0,
                "checkpoint_every": steps,
                "evaluate_every": 0,  # 0 is with every checkpoint
                "ascent_radius": 0.0,
            },
        }
    )
