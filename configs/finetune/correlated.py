"""DP-SGD with correlated noise on scikit-learn's 1797 digits: fixed batches, four epochs.

    python -m launch.finetune --config configs/finetune/correlated.py --workdir workdir/correlated

The run of 28 steps is one release, which the ledger charges before the first of them. Beside it,
configs/digits_dpsgd.py has independent noise on Poisson samples, and
`python -m benchmarks run correlated` compares the two at equal epsilon. Half a minute on two CPU
cores.
"""

from ml_collections import ConfigDict

from configs import digits_dpsgd


def get_config() -> ConfigDict:
    config = digits_dpsgd.get_config()
    config.references = False
    config.private.noise = {
        "strategy": "banded",  # "blt" or "bisr"; "" is independent noise
        "bands": 0,  # 0 takes as many as are best
    }
    config.private.update({"epsilon": 8.0, "batch_size": 168, "steps": 28, "schedule": "constant"})
    return config
