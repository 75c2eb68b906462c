r"""DP-SGD on Fashion-MNIST with a small CNN and bounded activations, without pre-training.

    python -m launch.finetune --config configs/fashion_mnist_dpsgd.py --workdir workdir/fashion \
        --config.data.data_dir=DIR

DIR holds prepared TFDS data. Without it TFDS's default directory is read. Four to five minutes on
two CPU cores. Test accuracy: about 0.855 at epsilon 3, 0.90 without privacy. """

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, TUNING, clipping, optimizer
from configs.people import PEOPLE


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "init_seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "references": True,
            "data": {
                "source": "tfds",
                "name": "fashion_mnist",
                "data_dir": "",
                "parts": {"public": "", "private": "train", "test": "test"},
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "adjacency": "add_remove",
                "crop_padding": 0,
                "flip": False,
            },
            "model": {
                **TUNING,
                "name": "cnn",
                "options": {"widths": (16, 32), "dense": 32},
                "preprocessing": {"size": 28, "mean": (0.286,), "std": (0.353,)},
            },
            "pretrain": {
                "weights": "",
                "new_head": True,
                "steps": 0,
                "batch_size": 128,
                "learning_rate": 1e-3,
            },
            "no_privacy": {"steps": 4000, "batch_size": 128, "learning_rate": 2e-3},
            "private": {
                "method": "dp_sgd",  # or "adp_alloc", "adp_clip", "gep"
                "method_options": METHOD_OPTIONS,
                "accountant": "auto",  # PLD, or "rdp" as in older work
                "epsilon": 3.0,
                "delta": 1e-5,
                "batch_size": 1024,
                "truncated_batch_size": 0,  # the largest batch; 0 truncates none
                "physical_batch_size": 0,  # the library chooses
                "steps": 600,
                **clipping(1.0),
                "exact": False,  # True sums and draws noise by integers
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 2.0,
                **optimizer(momentum=0.9),
                "schedule": "cosine",
                "augmult": 0,
                "ema_decay": 0.0,
                "ascent_radius": 0.0,  # DP-SAT
                "checkpoint_every": 50,
                "evaluate_every": 0,  # 0 is with every checkpoint
            },
        }
    )
