r"""Split Adaptation of Swin-L: configs/split/vit_l.py with another model.

    python -m launch.split --config configs/split/swin_l.py:cifar100 \
        --workdir workdir/split_swin_l \
        --config.model.checkpoint=...

Not run by us.
"""

from ml_collections import ConfigDict

from configs.split import vit_l


def get_config(client: str = "cifar100") -> ConfigDict:
    config = vit_l.get_config(client)
    config.model.name = "swin_large"
    config.stolen = config.stolen[:-1]  # no DINOv2 takes the tokens of a Swin
    config.client.patch_share = 0.0  # the paper does not replace patches of a Swin
    config.sweeps.patches = ()
    return config
