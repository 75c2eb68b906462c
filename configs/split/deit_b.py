r"""Split Adaptation of DeiT-B/16: configs/split/vit_l.py with another model.

    python -m launch.split --config configs/split/deit_b.py:cifar100 \
        --workdir workdir/split_deit_b \
        --config.model.checkpoint=... --config.auxiliary.model.checkpoint=...

The second checkpoint is Hugging Face's facebook/dinov2-base. Not run by us.
"""

from ml_collections import ConfigDict

from configs.split import vit_l


def get_config(client: str = "cifar100") -> ConfigDict:
    config = vit_l.get_config(client)
    config.model.name = "deit_b16"
    config.auxiliary.model.name = "dinov2_b14"
    return config
