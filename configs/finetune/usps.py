r"""DP-SGD trains the network of configs/tta/usps_shift.py on the same clean digits of USPS.

    python -m launch.finetune --config configs/finetune/usps.py --workdir workdir/usps_training \
        --config.data.data_dir=DIR --config.public_benchmark

What privacy costs when a model is trained stands beside what it costs when one is adapted, at equal
epsilon and delta. Without privacy the network is trained as the source models of
configs/tta/usps_shift.py are, which says where the data comes from. Learning rates were chosen on
the last 1291 training images. Results and time: docs/results/tta.md.
"""

from ml_collections import ConfigDict

from configs.finetune import scattering
from configs.tta import usps_shift


def get_config() -> ConfigDict:
    config, adapted = scattering.get_config("fashion_mnist"), usps_shift.get_config()
    config.curve = {
        "epsilons": (20.0, 15.0, 10.0, 5.0, 1.0),
        "learning_rates": (1.0, 1.0, 1.0, 1.0, 0.5),
        "runs": 2,
    }
    config.data.update(
        name="usps", parts={"public": "", "private": adapted.data.parts.public, "test": "test"}
    )
    config.model.update(
        name="cnn", options=adapted.model.options, preprocessing=adapted.model.preprocessing
    )
    config.model.trainable, config.model.features.keep = "all", ""
    config.no_privacy = {
        name: adapted.train[name] for name in ("steps", "batch_size", "learning_rate")
    }
    config.private.update(
        delta=adapted.privacy.delta,
        batch_size=256,
        physical_batch_size=320,
        steps=150,
        clip_norm=1.0,
        schedule="cosine",
        checkpoint_every=150,
    )
    return config
