r"""DP-SGD on CIFAR-10 by the recipe of De et al. 2022 (arXiv:2204.13650), without pre-training.

    python -m launch.finetune --config configs/cifar10_dpsgd.py --workdir workdir/cifar10 \
        --config.data.data_dir=DIR

The recipe has weight standardisation, GroupNorm, augmentation multiplicity, a moving average of the
parameters and large batches. The command runs WRN-16-4 at epsilon 1 as in the paper, which reports
56.8 % test accuracy. It needs a GPU or TPU. Not run by us. On two CPU cores,

    python -m launch.finetune --config configs/cifar10_dpsgd.py:cpu --workdir workdir/cifar10 \
        --config.data.data_dir=DIR

runs ResNet-20, also with weight standardisation, at epsilon 4 for 60 steps of the same recipe. It
takes five minutes and reaches about 0.33 test accuracy. It tests the pipeline, not the method. DIR
holds prepared TFDS data. Without it TFDS's default directory is read."""

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, TUNING, clipping, optimizer
from configs.people import PEOPLE


def get_config(size: str = "paper") -> ConfigDict:
    if size not in ("paper", "cpu"):
        raise ValueError(f"the config takes 'paper' or 'cpu' after the colon, got {size!r}.")
    config = ConfigDict(
        {
            "init_seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "references": False,
            "data": {
                "source": "tfds",
                "name": "cifar10",
                "data_dir": "",
                # "cifar100/train" to pre-train on it
                "parts": {
                    "public": "",
                    "private": "train",
                    "test": "test",
                },
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "adjacency": "add_remove",
                "crop_padding": 4,
                "flip": True,
            },
            "model": {
                **TUNING,
                "name": "wrn_16_4",
                "options": {},
                "preprocessing": {
                    "size": 32,
                    "mean": (0.4914, 0.4822, 0.4465),
                    "std": (0.2470, 0.2435, 0.2616),
                },
            },
            "pretrain": {
                "weights": "",
                "new_head": True,
                "steps": 5000,
                "batch_size": 128,
                "learning_rate": 1e-3,
            },
            "no_privacy": {"steps": 5000, "batch_size": 128, "learning_rate": 1e-3},
            "private": {
                "method": "dp_sgd",  # or "adp_alloc", "adp_clip", "gep"
                "method_options": METHOD_OPTIONS,
                "accountant": "auto",  # PLD, or "rdp" as in older work
                "epsilon": 1.0,
                "delta": 1e-5,
                "batch_size": 4096,
                "truncated_batch_size": 0,  # the largest batch; 0 truncates none
                "physical_batch_size": 0,  # the library chooses
                "steps": 875,
                **clipping(1.0),
                "exact": False,  # True sums and draws noise by integers
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 2.0,
                **optimizer(momentum=0.0),
                "schedule": "constant",
                "augmult": 16,
                "ema_decay": 0.999,
                "ascent_radius": 0.0,  # DP-SAT
                "checkpoint_every": 25,
                "evaluate_every": 0,  # 0 is with every checkpoint
            },
        }
    )
    if size == "cpu":
        config.model.update({"name": "resnet20", "options": {"standardise": True}})
        config.private.update(
            {
                "epsilon": 4.0,
                "batch_size": 512,
                "physical_batch_size": 0,  # the library chooses
                "steps": 60,
                "augmult": 1,
                "checkpoint_every": 10,
            }
        )
    return config
