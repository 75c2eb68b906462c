"""DP-SGD on scikit-learn's 1797 digits: pre-train on a small public part, fine-tune on the private
part.

    python -m launch.finetune --config configs/digits_dpsgd.py --workdir workdir/digits

configs/digits_dpsgd.py:random_round is Algorithm 2 of Wang et al. 2024: batches of one example, and
a number of rounds that is drawn. configs/digits_dpsgd.py:cyclic_poisson, :balls_in_bins and
:b_min_sep take another pattern of participation (docs/howto/participation.md), not run by us to the
end.

Half a minute on two CPU cores. Test accuracy on 539 digits: 0.90 after public pre-training on 90
digits, 0.92 private at epsilon 4, 0.96 without privacy, 0.84 private without pre-training. Noise
changes it by a point or two between runs."""

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, TUNING, clipping, optimizer
from configs.people import PEOPLE

PATTERNS = ("cyclic_poisson", "balls_in_bins", "b_min_sep")


def get_config(rounds: str = "all") -> ConfigDict:
    variants = ("all", "random_round", *PATTERNS)
    if rounds not in variants:
        raise ValueError(f"the config takes {', '.join(map(repr, variants))}, got {rounds!r}.")
    config = ConfigDict(
        {
            # of the initial parameters and the order of public examples, not of any noise
            "init_seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "references": True,  # also train without privacy and without pre-training, to compare
            "data": {
                "source": "bundled",
                "name": "digits",
                "split_seed": 0,
                "parts": {"public": 0.05, "private": 0.65, "test": 0.3},
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "adjacency": "add_remove",
                "crop_padding": 1,
                "flip": False,
            },
            "model": {
                **TUNING,
                "name": "cnn",
                "options": {"widths": (32, 64), "dense": 0},
                "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
            },
            "pretrain": {
                "weights": "",
                "new_head": False,
                "steps": 400,
                "batch_size": 64,
                "learning_rate": 2e-3,
            },
            "no_privacy": {"steps": 400, "batch_size": 64, "learning_rate": 2e-3},
            "private": {
                "method": "dp_sgd",  # or "adp_alloc", "adp_clip", "gep"
                "method_options": METHOD_OPTIONS
                | {"gep": {**METHOD_OPTIONS["gep"], "anchors": 90, "basis_size": 24}},
                "accountant": "auto",  # PLD, or "rdp" as in older work
                "epsilon": 4.0,
                "delta": 1e-5,
                "batch_size": 192,  # expected size of a Poisson-sampled batch
                "truncated_batch_size": 0,  # the largest batch; 0 truncates none
                "physical_batch_size": 240,
                "steps": 100,
                **clipping(1.0),
                "exact": False,  # True sums and draws noise by integers
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 0.35,
                **optimizer(momentum=0.9),
                "schedule": "cosine",
                "augmult": 4,
                "ema_decay": 0.0,
                "ascent_radius": 0.0,  # DP-SAT
                "checkpoint_every": 10,
                "evaluate_every": 0,  # 0 is with every checkpoint
            },
        }
    )
    if rounds == "random_round":
        _random_round(config)
    if rounds in PATTERNS:
        # An epoch is six batches. A chunk of cyclic Poisson sampling is whole cycles.
        config.private.participation = {"kind": rounds, "separation": 6}
        config.private.update({"steps": 102, "checkpoint_every": 12})
    return config


def _random_round(config: ConfigDict) -> None:
    """Sets Algorithm 2 with at most 20 n rounds. The paper has n^2, over a million."""
    examples = 1168
    config.private.random_round = {"seed": 0}  # public, of the number of rounds
    config.private.update(
        {
            "batch_size": 1,
            "physical_batch_size": 0,
            "steps": 20 * examples,
            "checkpoint_every": 1000,
            "learning_rate": 2e-3,
            **optimizer(momentum=0.0),
            "schedule": "constant",
            "augmult": 0,
        }
    )
