"""Split Adaptation on CIFAR-10: the server has six classes, the client a few images of the other
four.

    python -m launch.split --config configs/split/cifar10.py --workdir workdir/split_cifar10

Set TFDS_DATA_DIR if the data is not in the default directory of TFDS. The backbone, a ViT of width
96 and 6 blocks, is trained on 25,000 images of the server. Learning rates are tuned on four classes
of CIFAR-100 that CIFAR-10 does not have.

On one CPU core the backbone takes 50 minutes and the rest 75. Accuracy with 5 images per class
(chance 0.25): 0.62 for Split Adaptation, 0.55 with noise once, 0.61 for a linear probe, 0.58 for
fine-tuning. The private mode with 500 per class has 0.43 at epsilon 8 and 0.69 at 64."""

from ml_collections import ConfigDict

from configs.split import digits


def get_config() -> ConfigDict:
    config = digits.get_config()
    cifar10 = {
        "source": "tfds",
        "name": "cifar10",
        "split": "train",
        "data_dir": "",
        "prepare": False,
        "images": 0,
    }
    config.data = {
        # airplane, automobile, bird, cat, deer, dog
        "server": {
            **cifar10,
            "classes": (0, 1, 2, 3, 4, 5),
        },
        "pretrain_fraction": 5 / 6,
        "server_images": 1000,
        "client": {**cifar10, "classes": (6, 7, 8, 9)},  # frog, horse, ship, truck
        "client_test": {**cifar10, "split": "test", "classes": (6, 7, 8, 9), "images": 1000},
        # apple, chair, mountain, rocket
        "tuning": {**cifar10, "name": "cifar100", "classes": (0, 20, 49, 69), "rotate": 0},
        "auxiliary": {**cifar10, "name": "", "classes": ()},
        "split_seed": 0,
    }
    config.model = {
        "name": "vit_tiny",
        "num_classes": 6,
        "options": {"width": 96, "depth": 6, "num_heads": 3, "mlp_width": 384},
        "checkpoint": "",
        "naming": "auto",
        "preprocessing": {
            "size": 32,
            "mean": (0.4914, 0.4822, 0.4465),
            "std": (0.2023, 0.1994, 0.2010),
        },
    }
    config.train = {
        "steps": 3000,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "crop_padding": 4,
        "init_seed": 0,
    }
    config.stolen = config.stolen[:-1]  # no second public model, so no auxiliary backend
    config.learning_rates = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    config.tuning.seeds = (1,)
    # These suit two CPU cores. With a GPU take the paper's 100 epochs.
    config.adaptation.epochs = 3
    config.baselines.epochs = 60
    config.attack.update({"images": 300, "epochs": 5})
    config.noise.update({"scales": (0.2, 0.8), "seeds": 2})
    config.private.update(
        {"epsilons": (1.0, 8.0, 64.0), "dimensions": (16,), "shots": (50, 500), "steps": 100}
    )
    return config
