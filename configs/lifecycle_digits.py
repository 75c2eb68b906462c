r"""A model's whole life on scikit-learn's 1797 digits. It needs no data and no network.

    python -m launch.lifecycle --config configs/lifecycle_digits.py --workdir workdir/lifecycle
    python -m launch.lifecycle --config configs/lifecycle_digits.py:smoke \
        --workdir workdir/lifecycle_smoke

About a minute on two CPU cores. Every verdict is at least "moderate protection". The noise is new
in every run. Ten runs on 247 test images had an accuracy of 83.8 % after public pre-training on 40
digits, of 85.8 to 87.4 % private at epsilon 1.4, and of 97.2 % without privacy. On brightened
images they had an accuracy of 68.8 to 81.0 % before the stream, and of 75.7 to 85.4 % after it.
Each run gained, 6.4 points on average. The ECE on brightened images was 0.060 to 0.111 before
recalibration, 0.055 to 0.117 after recalibration alone, and 0.057 to 0.113 in use: so mild a shift
leaves nothing for recalibration to mend.

"smoke" runs every stage at a tiny size for launch/colab.ipynb. Most of its time is compilation, and
its numbers are poor."""

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, clipping, optimizer
from configs.people import PEOPLE

_VARIANTS = ("", "smoke")
_SMOKE = {
    "model.options.widths": (16,),
    "pretrain.steps": 60,
    "finetune.steps": 30,
    "references.steps": 60,
    "recalibrate.epsilon": 2.0,  # the whole budget of a source
    "predict.queries": 10,
    "predict.max_distance": 30,
    "audit_finetune.trials": 500,
    "audit_recalibrate.trials": 200,
    "audit_adapt.trials": 100,
    "audit_split.trials": 2000,
    "audit_predict.trials": 1000,
}


def get_config(variant: str = "") -> ConfigDict:
    if variant not in _VARIANTS:
        raise ValueError(f"the variant must be one of {_VARIANTS}, got {variant!r}.")
    config = ConfigDict(
        {
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            # "" is ledger.sqlite in the workdir. Several lifecycles may share a file.
            "ledger": "",
            "data": {
                "source": "bundled",
                "name": "digits",
                "split_seed": 0,
                "parts": {
                    "public": 40,
                    "private": 860,
                    "sources": 250,
                    "stream": 320,
                    "client": 80,
                    "test": 247,
                },
                "sources": 5,  # the hospitals that share `parts.sources`
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "source_shift": "brightness",
                "stream_shifts": ("brightness",),  # one after the other
                "severity": 3,
            },
            "budgets": {  # of each private data set in the ledger
                "private": {"epsilon": 2.15, "delta": 1e-5},
                "sources": {"epsilon": 2.0, "delta": 0.0},
                "stream": {"epsilon": 2.0, "delta": 1e-5},
                "client": {"epsilon": 2.0, "delta": 1e-5},
            },
            "model": {
                "name": "cnn",
                "options": {"widths": (16, 32), "dense": 0, "norm": "group"},
                "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
            },
            "augmentation": {"crop_padding": 1, "flip": False},
            "pretrain": {
                "seed": 0,
                "steps": 300,
                "batch_size": 32,
                "perturbation_batch_size": 40,
                "learning_rate": 0.1,
                "gamma": 0.5,
                "checkpoint_every": 100,
            },
            "finetune": {
                "seed": 0,  # of a new head, not of any noise
                "new_head": False,
                "method": "dp_sgd",  # or "adp_alloc", "adp_clip", "gep"
                "method_options": METHOD_OPTIONS,
                "accountant": "auto",
                "epsilon": 1.4,
                "delta": 1e-5,
                "batch_size": 430,
                "physical_batch_size": 500,
                "steps": 60,
                **clipping(1.0),
                "learning_rate": 0.1,
                **optimizer(momentum=0.9),
                "schedule": "cosine",
                "augmult": 0,
                "ema_decay": 0.0,
                "ascent_radius": 0.0,
                "exact": False,  # True sums and draws noise by integers
                "checkpoint_every": 10,
            },
            "recalibrate": {"epsilon": 1.0},  # of each source
            "adapt": {
                "seed": 0,  # of the order of the stream
                "epsilon": 2.0,
                "delta": 1e-5,
                # Two large batches. Each brings the same noise, and its images come once, so few
                # large batches have more signal than many small ones.
                "batch_size": 160,
                "clip_norm": 1.0,
                "learning_rate": 0.8,
                "momentum": 0.0,
                "exact": False,  # True sums and draws noise by integers
            },
            "split": {  # the client's upload
                "epsilon": 2.0,
                "delta": 1e-5,
                "label_share": 0.5,
                "directions": 8,
            },
            "predict": {
                "epsilon": 1.0,
                "delta": 1e-5,
                "queries": 5,
                # of the linear model's features. 0 takes the whole span of the backbone's outputs.
                "dimensions": 0,
                "whiten": 1.0,
                "clip": 0.01,
                "learning_rate": 10.0,
                "max_distance": 60,
            },
            # What the same stages reach without privacy, which only public records may show.
            "references": {"show": True, "steps": 300, "batch_size": 64, "learning_rate": 1e-2},
            "certificates": {"show": False},  # True writes certificates.html, which is NOT private
            "audit_finetune": {"candidates": 8, "trials": 20_000},
            "audit_recalibrate": {"trials": 1000},
            "audit_adapt": {"candidates": 16, "trials": 300},
            "audit_split": {"candidates": 16, "trials": 4000},
            "audit_predict": {"images": 40, "candidates": 4, "trials": 5000},
        }
    )
    if variant == "smoke":
        config.update_from_flattened_dict(_SMOKE)
    return config
