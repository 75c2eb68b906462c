r"""Private recalibration on CIFAR-10 under 15 corruptions of severity 5: Tables 1 and 4, Figure 3
of Luo et al. 2020.

    python -m launch.recalibrate --config configs/recalibration/cifar10.py \
        --workdir workdir/recalibrate_cifar10 \
        --config.data.data_dir=/path/to/tfds
    python -m launch.recalibrate --config configs/recalibration/cifar10.py:checkpoint \
        --workdir workdir/recalibrate_cifar10_resnet20 --config.data.data_dir=/path/to/tfds \
        --config.model.checkpoint=/path/to/resnet20_cifar10.npz

    python -m launch.recalibrate --config configs/recalibration/cifar10.py:sweeps \
        --workdir workdir/recalibrate_sweeps --config.data.data_dir=/path/to/tfds \
        --config.model.checkpoint=/path/to/resnet20_cifar10.npz

The first trains its classifier, a ResNet-20 with GroupNorm, on CIFAR-10's training images. The
second reads a published ResNet-20 (akamaster/pytorch_resnet_cifar10, 91.73% clean) from a .npz or
.safetensors file. ":resnet56" does so with its ResNet-56 (93.39% clean), and takes six minutes with
100 trials. ":cifar100" trains on 6000 images of all classes of a subset of CIFAR-100, and
recalibrates on 4000. ":sweeps" takes the ResNet-20 under five corruptions of three severities, and
varies iterations, bins and the number of sources of the same records. Its baselines are grid search
for the temperature, and isotonic regression and Platt scaling with and without privacy. Not run by
us: the sweeps on record are those of digits.py.

":wrn" and ":wrn_cifar100" train the paper's WRN-28-10 by its recipe: SGD for 200 epochs with a
learning rate of 0.1 that decays as a cosine. The paper is silent on the rest. Momentum 0.9, weight
decay 5e-4, batches of 128, and crops and flips are those of Zagoruyko and Komodakis (2016). The
network has GroupNorm in place of BatchNorm. Not run by us at this size: 78,200 steps need a GPU.

Expected, from the paper with a WRN-28-10, median / mean ECE: none .2187/.2924, one source
.1241/.1359, histogram binning .1168/.1181, ECE-T .1160/.1668, NLL-T .1157/.1653, Acc-T .0836/.1199.
Our median ECE at the centre (50 sources of 30, epsilon 1), of the trained and of the published
ResNet-20: none .033, .302. Histogram binning .117, .095. Acc-T .048, .152. Acc-T with the wide
range .045, .047. Bisection .033, .035. Logistic binning .026, .026. All results:
docs/results/recalibration.md.

Time on two CPU cores: 13 minutes to train, 4 for logits under 16 shifts, 2 to 5 for the sweep.
"""

from ml_collections import ConfigDict

_PUBLISHED = {"bracket": (0.5, 3.0), "spacing": "linear"}
_VARIANTS = ("trained", "checkpoint", "resnet56", "cifar100", "sweeps", "wrn", "wrn_cifar100")
# For very over-confident classifiers: under gaussian_noise the best temperature of a ResNet-20 is
# above 12.
_WIDE = {"bracket": (0.5, 16.0), "spacing": "log"}


def get_config(source: str = "trained") -> ConfigDict:
    if source not in _VARIANTS:
        variants = ", ".join(map(repr, _VARIANTS[:-1]))
        raise ValueError(f"the variant must be {variants} or {_VARIANTS[-1]!r}, got {source!r}.")
    config = ConfigDict(
        {
            "public_benchmark": True,  # no label is private, so errors may be written
            "data": {
                "source": "tfds",
                "name": "cifar10",
                "data_dir": "",
                # the public images train the classifier
                "parts": {
                    "public": "train",
                    "test": "test",
                },
                "prepare": False,  # whether images differ in size and are cut to the model's
                # "" corrupts images here, "cifar10_corrupted" reads the published set
                "corrupted_name": "",
                "severity": (5,),  # one or several, such as (1, 3, 5)
                # "clean" is in the tables, but not in the medians and means over shifts
                "corruptions": (
                    "clean",
                    *(
                        "gaussian_noise",
                        "shot_noise",
                        "impulse_noise",
                        "defocus_blur",
                        "glass_blur",
                    ),
                    *("motion_blur", "zoom_blur", "snow", "frost", "fog"),
                    *(
                        "brightness",
                        "contrast",
                        "elastic_transform",
                        "pixelate",
                        "jpeg_compression",
                    ),
                ),
                "batch_size": 250,  # of classification, for speed and memory only
            },
            "model": {
                "name": "resnet20",
                "num_classes": 10,
                "options": {},
                "checkpoint": "",
                "naming": "auto",
                "preprocessing": {
                    "size": 32,
                    "mean": (0.4914, 0.4822, 0.4465),
                    "std": (0.2023, 0.1994, 0.2010),
                },
            },
            "train": {
                "steps": 1500,
                "batch_size": 128,
                "learning_rate": 3e-3,
                # any optimizer of optax, see launch/optimizers.py
                "optimizer": "adamw",
                "optimizer_options": {"sgd": {"momentum": 0.9, "nesterov": True}},
                "schedule": "cosine",
                "weight_decay": 1e-4,
                "crop_padding": 4,
                "init_seed": 0,
            },
            "methods": (
                *("Acc-T", "NLL-T", "ECE-T", "HB published", "none", "one source"),  # as published
                *(
                    "Acc-T wide",
                    "NLL-T wide",
                    "ECE-T wide",
                    "HB split",
                    "Acc-T bisection",
                    "logistic binning",
                ),
            ),
            "method_options": {  # a kind, and the attributes of its class in jaxdp.recalibration
                "none": {"kind": "none"},
                "one source": {"kind": "one_source", **_WIDE},  # its own data costs nothing
                "Acc-T": {"kind": "acc_t", **_PUBLISHED},
                "NLL-T": {"kind": "nll_t", **_PUBLISHED},
                "ECE-T": {"kind": "ece_t", **_PUBLISHED},
                "HB published": {"kind": "histogram_binning", "form": "published"},
                "Acc-T wide": {"kind": "acc_t", **_WIDE},
                "NLL-T wide": {"kind": "nll_t", **_WIDE},
                "ECE-T wide": {"kind": "ece_t", **_WIDE},
                "HB split": {"kind": "histogram_binning", "form": "split"},
                "Acc-T bisection": {"kind": "acc_bisection", **_WIDE},
                "logistic binning": {"kind": "logistic_binning"},
                # baselines of the variant "sweeps"
                "Acc-T grid": {"kind": "acc_t", "search": "grid", **_WIDE},
                "NLL-T grid": {"kind": "nll_t", "search": "grid", **_WIDE},
                "ECE-T grid": {"kind": "ece_t", "search": "grid", **_WIDE},
                "HB monotone": {"kind": "histogram_binning", "monotone": True},
                "isotonic, not private": {"kind": "isotonic"},
                "Platt, not private": {"kind": "platt"},
            },
            "sweep": {
                "trials": 500,  # each divides the test images anew, in the same way for all methods
                "seed": 0,  # of these divisions and of the simulated noise
                "adjacency": "add_remove",
                "sources": {"values": tuple(range(10, 251, 10)), "samples": 10, "epsilon": 1.0},
                "samples": {"values": tuple(range(5, 51, 5)), "sources": 50, "epsilon": 1.0},
                "epsilon": {
                    "values": tuple(k / 5 for k in range(1, 11)),
                    "sources": 50,
                    "samples": 30,
                },
                # where methods are compared
                "centre": {
                    "sources": 50,
                    "samples": 30,
                    "epsilon": 1.0,
                },
                # Values of an attribute of methods, at the centre. Any attribute may be added.
                "options": {"iterations": (), "bins": ()},
                # The same records in all, divided among each of these numbers of sources.
                "division": {"records": 1500, "epsilon": 1.0, "sources": ()},
            },
            "figures": {
                "methods": (
                    *("Acc-T wide", "NLL-T wide", "ECE-T wide", "HB published", "one source"),
                    *("Acc-T", "HB split", "Acc-T bisection", "logistic binning"),
                ),
                "reliability_shift": "motion_blur",
                "reliability_methods": ("Acc-T wide", "HB split", "logistic binning"),
            },
        }
    )
    if source == "cifar100":
        config.data.name, config.data.parts = (
            "cifar100_subset",
            {"public": "train[:6000]", "test": "train[6000:]+test"},
        )
        config.model.num_classes = 100
    if source in ("wrn", "wrn_cifar100"):
        _train_as_published(config)
    if source == "wrn_cifar100":
        config.data.name, config.model.num_classes = "cifar100", 100
    if source == "sweeps":
        vary(config)
        _fewer_shifts(config)
    if source in ("checkpoint", "resnet56", "sweeps"):
        depth = 56 if source == "resnet56" else 20
        config.model.options = {"norm": "frozen_batch", "shortcut": "pad", "depth": depth}
        config.model.naming = "cifar_resnet"
        config.model.preprocessing = {
            "size": 32,
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
        }
    return config


def _train_as_published(config: ConfigDict) -> None:
    """The WRN-28-10 of section E.1, with Zagoruyko and Komodakis (2016) where it is silent."""
    config.model.update(name="wrn_28_10", options={"depth": 28, "width": 10})
    config.train.update(
        steps=200 * 391,  # 200 epochs of 50,000 images
        batch_size=128,
        learning_rate=0.1,
        optimizer="sgd",
        schedule="cosine",
        weight_decay=5e-4,
    )


def vary(config: ConfigDict) -> None:
    """Adds what section D.1 and Table 2 say in words, as curves."""
    searched = ("Acc-T wide", "NLL-T wide", "ECE-T wide")
    grids = ("Acc-T grid", "NLL-T grid", "ECE-T grid")
    binned = ("HB published", "HB split", "HB monotone", "logistic binning")
    references = ("isotonic, not private", "Platt, not private", "one source", "none")
    config.methods = (*searched, *grids, "Acc-T bisection", *binned, *references)
    config.data.severity = (1, 3, 5)
    config.sweep.options = {"iterations": (1, 2, 3, 5, 7), "bins": (1, 5, 15, 50)}
    config.sweep.division.sources = (1, 5, 15, 50, 150, 500, 1500)
    config.figures.methods = (
        *searched,
        "HB split",
        "HB monotone",
        "logistic binning",
        "one source",
    )
    config.figures.reliability_shift = "motion_blur_5"


def _fewer_shifts(config: ConfigDict) -> None:
    """Leaves as many logits to compute as one severity has."""
    shifts = ("gaussian_noise", "motion_blur", "fog", "contrast", "jpeg_compression")
    config.data.corruptions = ("clean", *shifts)
    config.data.parts.test = "test[:4000]"
    config.sweep.trials = 50
    config.sweep.sources = {"values": (10, 50, 100, 200), "samples": 10, "epsilon": 1.0}
    config.sweep.samples = {"values": (5, 10, 30, 50), "sources": 50, "epsilon": 1.0}
