r"""A byte-level transformer on film reviews (SST-2, 67349 private phrases), trained with DP-Adam
from nothing.

    python -m launch.lm --config configs/lm/bytes.py --workdir workdir/lm \
        --config.data.data_dir=/path/to/tfds

`:bundled` after the config's name takes a few hundred lines that come with scikit-learn, to try the
launcher. The unit of privacy is a phrase, which is a row of the data set.

Nine minutes on two busy CPU cores. Bits per byte of the 872 validation sentences, one run each:
7.96 untrained, 3.50 at epsilon 8, 3.53 at epsilon 2. The reference without privacy reached 3.98
with half the batch. It is not tuned, so it is no bound on what is lost by privacy. See
docs/results/language_models.md."""

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, TUNING, clipping, optimizer
from configs.people import PEOPLE


def get_config(texts: str = "sst2") -> ConfigDict:
    if texts not in ("sst2", "bundled"):
        raise ValueError(f"the config takes 'sst2' or 'bundled' after the colon, got {texts!r}.")
    whole = texts == "sst2"
    parts = {"private": "train", "test": "validation"} if whole else {"private": 0.8, "test": 0.2}
    return ConfigDict(
        {
            "init_seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "references": True,  # also train without privacy
            "data": {
                "source": "tfds"
                if whole
                else "bundled",  # or "lines", files of one text per line in the folder `path`
                "name": "glue/sst2" if whole else "descriptions",
                "data_dir": "",
                "path": "",
                "field": "sentence",
                "split_seed": 0,
                "parts": parts,
                "tokenizer": "bytes",  # or the tokenizer.json of a checkpoint
                "length": 65,  # tokens per record, public. Longer texts are cut
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "adjacency": "add_remove",
            },
            "model": {
                "name": "lm_tiny",
                "num_classes": 256,
                "options": {
                    "positions": 128,
                    "width": 96,
                    "depth": 2,
                    "num_heads": 3,
                    "mlp_width": 384,
                },
                "preprocessing": (),
                **TUNING,
            },
            "no_privacy": {
                "steps": 250 if whole else 100,
                "batch_size": 256 if whole else 64,
                "learning_rate": 3e-3,
            },
            "private": {
                "method": "dp_sgd",
                "method_options": METHOD_OPTIONS,
                "accountant": "auto",
                "epsilon": 8.0,
                "delta": 1e-5 if whole else 1e-3,
                "batch_size": 512 if whole else 64,
                "physical_batch_size": 0,
                "steps": 250 if whole else 50,
                **clipping(1.0),
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 3e-3,
                **optimizer(momentum=0.0),
                "optimizer": "adam",
                "schedule": "warmup",
                "augmult": 0,
                "ema_decay": 0.0,
                "ascent_radius": 0.0,
                "checkpoint_every": 50,
                "evaluate_every": 0,  # 0 is with every checkpoint
            },
            "generation": {"prompts": ("the film is ", "a "), "length": 64, "temperature": 0.7},
        }
    )
