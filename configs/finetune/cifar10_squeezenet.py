r"""The head of a public ImageNet SqueezeNet on private CIFAR-10 images: accuracy over epsilon.

    python -m launch.finetune --config configs/finetune/cifar10_squeezenet.py \
        --workdir workdir/squeezenet \
        --config.model.checkpoint=FILE --config.data.data_dir=DIR --config.public_benchmark

The first 5000 training images are private. `:full` after the config's name takes all 50,000. FILE
holds SqueezeNet 1.0 as arrays of the Caffe model (forresti/SqueezeNet or
songhan/SqueezeNet-Deep-Compression). DIR holds prepared TFDS data of cifar10 and of the PUBLIC
images, whose labels are not used (`--config.data.parts.public=cifar100/train[:8000]`).

Test accuracy with 5000 images, five runs: 0.744 / 0.768 / 0.788 / 0.793 at epsilon 1 / 2 / 4 / 8,
0.800 without privacy. Five minutes for the features of 23,000 images and one for the curve, on two
busy CPU cores. See docs/results/public_checkpoint.md for all images. """

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, TUNING, clipping, optimizer
from configs.people import PEOPLE


def get_config(size: str = "small") -> ConfigDict:
    if size not in ("small", "full"):
        raise ValueError(f"the config takes 'small' or 'full' after the colon, got {size!r}.")
    records = 5000 if size == "small" else 50_000
    return ConfigDict(
        {
            "public_benchmark": False,  # see launch/curve.py
            "init_seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "references": True,  # also train without privacy
            "curve": {
                "epsilons": (1.0, 2.0, 4.0, 8.0),
                "learning_rates": (64.0, 64.0, 128.0, 128.0),
                "runs": 5,
            },
            "data": {
                "source": "tfds",
                "name": "cifar10",
                "data_dir": "",
                "parts": {
                    "public": "cifar100/train[:8000]",
                    "private": f"train[:{records}]",
                    "test": "test",
                },
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "adjacency": "add_remove",
                "crop_padding": 0,
                "flip": False,
            },
            "model": {
                "name": "squeezenet1_0",
                "options": {"pool": "features", "head_padding": 1},
                # Caffe models take pixels of 0..255 minus a mean.
                "preprocessing": {
                    "size": 96,
                    "mean": (123 / 255, 117 / 255, 104 / 255),
                    "std": (1 / 255,) * 3,
                },
                **TUNING,
                "checkpoint": "squeezenet1_0_imagenet.npz",
                "trainable": "head",
                "features": {"keep": "workdir", "dimensions": 256, "whiten": 0.5},
            },
            "pretrain": {
                "weights": "",
                "new_head": True,
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
                "steps": 30,
                **clipping(0.15),
                "exact": False,  # True sums and draws noise by integers
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 64.0,
                **optimizer(momentum=0.9),
                "schedule": "constant",
                "augmult": 0,
                "ema_decay": 0.0,
                "ascent_radius": 0.0,
                "checkpoint_every": 30,
                "evaluate_every": 0,  # 0 is with every checkpoint
            },
        }
    )
