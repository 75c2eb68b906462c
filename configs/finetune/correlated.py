"""DP-SGD with correlated noise on scikit-learn's 1797 digits: fixed batches, four epochs.

    python -m launch.finetune --config configs/finetune/correlated.py --workdir workdir/correlated

The run of 28 steps is one release, which the ledger charges before the first of them.
configs/finetune/correlated.py:cyclic_poisson, :balls_in_bins and :b_min_sep draw who takes part,
which amplifies (docs/howto/participation.md). Beside it, configs/digits_dpsgd.py has independent
noise on Poisson samples, and `python -m benchmarks run correlated` compares the two at equal
epsilon. Half a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import digits_dpsgd

# By pattern, the least number of steps from one participation to the next. An epoch has seven.
SEPARATIONS = {"cyclic_poisson": 4, "balls_in_bins": 7, "b_min_sep": 4}


def get_config(pattern: str = "fixed_order") -> ConfigDict:
    if pattern not in ("fixed_order", *SEPARATIONS):
        patterns = ", ".join(map(repr, ("fixed_order", *SEPARATIONS)))
        raise ValueError(f"the config takes {patterns}, got {pattern!r}.")
    config = digits_dpsgd.get_config()
    config.references = False
    config.private.noise = {
        "strategy": "banded",  # "blt" or "bisr"; "" is independent noise
        "bands": 0,  # 0 takes as many as are best
    }
    config.private.update({"epsilon": 8.0, "batch_size": 168, "steps": 28, "schedule": "constant"})
    if pattern in SEPARATIONS:
        separation = SEPARATIONS[pattern]
        config.private.participation = {"kind": pattern, "separation": separation}
        config.private.batch_size = 166  # seven of them are at most the private examples
    return config
