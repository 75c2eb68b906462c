r"""A model's whole life on CIFAR-10 at a realistic size, for a GPU.

    python -m launch.lifecycle --config configs/lifecycle_cifar10.py \
        --workdir workdir/lifecycle_cifar10 \
        --config.data.data_dir=/path/to/tfds

A ResNet-20 with GroupNorm is pre-trained on CIFAR-100, which is public here. It is fine-tuned on
40,000 private images of CIFAR-10. 50 hospitals of 100 images recalibrate it, and it adapts to a
stream of 4,096 images under four corruptions. The directory holds prepared TFDS data. Without it
TFDS's default is read. Not run by us. """

from ml_collections import ConfigDict

from configs import lifecycle_digits


def get_config() -> ConfigDict:
    config = lifecycle_digits.get_config()
    config.data = {
        "source": "tfds",
        "name": "cifar10",
        "data_dir": "",
        "parts": {  # of TFDS, without overlap
            "public": "cifar100/train",
            "private": "cifar10/train[:40000]",
            "sources": "cifar10/train[40000:45000]",
            "stream": "cifar10/test[:4096]",
            "client": "cifar10/train[45000:45500]",
            "test": "cifar10/test[5000:]",
        },
        "sources": 50,
        "source_shift": "motion_blur",
        "stream_shifts": ("gaussian_noise", "defocus_blur", "fog", "contrast"),
        "severity": 5,
    }
    config.budgets.private.epsilon = 12.0
    config.budgets.sources.epsilon = 1.0
    config.model = {
        "name": "resnet20",
        "options": {},
        "preprocessing": {
            "size": 32,
            "mean": (0.4914, 0.4822, 0.4465),
            "std": (0.2470, 0.2435, 0.2616),
        },
    }
    config.augmentation = {"crop_padding": 4, "flip": True}
    config.pretrain.update(
        {
            "steps": 20_000,
            "batch_size": 128,
            "perturbation_batch_size": 512,
            "learning_rate": 0.1,
            "gamma": 0.5,
            "checkpoint_every": 1000,
        }
    )
    config.finetune.update(
        {
            "epsilon": 4.0,
            "batch_size": 2048,
            "physical_batch_size": 0,  # the library chooses
            "steps": 400,
            "learning_rate": 0.5,
            "augmult": 4,
            "checkpoint_every": 25,
        }
    )
    config.adapt.update({"batch_size": 64, "learning_rate": 1e-2, "momentum": 0.9})
    config.predict.update({"queries": 100, "epsilon": 8.0, "dimensions": 32, "max_distance": 400})
    config.audit_adapt.trials = 1000
    return config
