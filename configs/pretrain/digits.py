"""DPAdapter on scikit-learn's bundled digits. It needs no data and no network.

    python -m launch.pretrain --config configs/pretrain/digits.py --workdir workdir/pretrain_digits

It trains on the half of the digits that is public here. configs/pretrain/digits.py:standard, :sam
and :amp are the methods to compare with. Twenty seconds on two CPU cores. One run of each gave the
test accuracy, the accuracy under noise of half of each tensor's root mean square (mean of ten
draws), and rho:

    standard    .965  .64  27
    SAM         .961  .64  24
    DPAdapter   .954  .68  18    ||Delta|| .16 at the end
    AMP         .905  .80   9    ||Delta|| .45 at the end
"""

from ml_collections import ConfigDict

from configs.pretrain import cifar100


def get_config(method: str = "dpadapter") -> ConfigDict:
    config = cifar100.get_config(method)
    config.data = {
        "source": "bundled",
        "name": "digits",
        "split_seed": 0,
        "parts": {"public": 0.5, "private": 0.2, "test": 0.3},  # the private part is not read
        "crop_padding": 1,
        "flip": False,
    }
    config.model = {
        "name": "cnn",
        "options": {"widths": (16, 32), "dense": 0, "norm": "group"},
        "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
    }
    config.train.update({"steps": 400, "batch_size": 32, "checkpoint_every": 100})
    config.ascent.update({"batch_size": 400, "microbatch_size": 200})
    config.method.dpadapter.gamma = 0.5
    return config
