"""A private search for the settings of DP-SGD on scikit-learn's 1797 digits, for one epsilon.

    python -m launch.finetune --config configs/finetune/tune.py --workdir workdir/tune

Nine candidates, six runs expected, epsilon 4 for the whole search. docs/howto/tune.md says what
stays secret. `--config.tune.score=charged` chooses by a noisy count on the private digits.
"""

from ml_collections import ConfigDict

from configs import digits_dpsgd


def get_config() -> ConfigDict:
    config = digits_dpsgd.get_config()
    del config.references
    del config.no_privacy
    config.private.steps = 60
    config.private.augmult = 0
    config.private.checkpoint_every = 60
    config.tune = ConfigDict(
        {  # see launch/tune.py
            "grid": {"learning_rate": (0.1, 0.35, 1.0), "clip_norm": (0.3, 1.0, 3.0)},
            "runs": 6.0,
            "distribution": "geometric",  # or "logarithmic", "poisson"
            "score": "public",  # or "charged"
            "score_noise_multiplier": 20.0,
        }
    )
    return config
