r"""Batches of one: DP-Tent on CIFAR-10 under corruption, an update per image or one per A images.

    python -m launch.adapt --config configs/tta/cifar10_batch_one.py:64 \
        --workdir workdir/tta_batch_one_64 \
        --config.data.data_dir=...

The number is A. A private update accumulates over A batches of one image. The original method
updates at every image for every A. Epsilon is the same for every A, since each image is in one
noisy sum. The noise relative to the signal falls like 1/A. With a source.safetensors of
`configs/tta/cifar10.py` in the workdir, it is not trained again, and the run takes two minutes on
two CPU cores. Results: docs/results/tta.md. """

from ml_collections import ConfigDict

from configs.tta import cifar10


def get_config(accumulate: str = "64") -> ConfigDict:
    config = cifar10.get_config()
    config.data.images = 128
    config.protocol.seeds = 3
    config.protocol.batch_size = 1
    config.protocol.accumulate = int(accumulate)
    config.methods = ("Tent",)
    config.privacy.budgets = (20.0,)
    config.tuning.images = 256
    config.tuning.learning_rates = (1e-5, 1e-4, 1e-3)
    config.tuning.clipped_steps = (1e-5, 1e-4, 1e-3, 1e-2)
    config.fisher_images = 64
    return config
