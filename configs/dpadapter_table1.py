r"""Table 1 of Wang et al. 2024 (DPAdapter) and more: does robust pre-training help private
fine-tuning?

    python -m launch.finetune --config configs/dpadapter_table1.py --workdir workdir/table1 \
        --config.pretrain.data.data_dir=DIR

is the paper's protocol: a ResNet-20 with GroupNorm, pre-trained on CIFAR-100, fine-tuned on
CIFAR-10, SVHN and STL-10. It needs an accelerator. Not run by us. On CPUs

    python -m launch.finetune --config configs/dpadapter_table1.py:cpu --workdir workdir/table1 \
        --config.pretrain.data.data_dir=DIR

runs the same grids with a small CNN on 16x16 images: 8000 public images of CIFAR-100, and 5000
private images of each of CIFAR-10, Fashion-MNIST and MNIST. It takes about an hour per seed on one
core. Start it twice to use two. It stops and resumes at any cell.
configs/dpadapter_table1.py:digits takes two minutes, on bundled data. The page
docs/results/dpadapter.md has the results of a run with USPS in place of MNIST.

The grid "table1" is the paper's table, "gamma" its Figures 2, 5 and 6. "equal_norm" has
perturbations of one length from large and from small batches, which the paper does not separate.
"beyond" has other ways to more accuracy at the same epsilon.
"""

import itertools

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, clipping, optimizer
from configs.pretrain import cifar100

_SETS = {"CIFAR-10": ("cifar10", True), "SVHN": ("svhn_cropped", False), "STL-10": ("stl10", True)}
_LENGTHS = ("length 0.2, large m1", "length 1, m1=50", "length 1, large m1")
_TRICKS = (
    "PLD",
    "PLD, DP-SAT",
    "PLD, EMA",
    "PLD, augmult 4",
    "PLD, clip 1",
    "PLD, clip 1, EMA, augmult 4",
)
_GAMMAS = (0.1, 0.5, 1.0, 5.0)  # beside the default, 2
_AMP_GAMMAS = (0.1, 0.5, 2.0)  # beside the default, 1


def image_set(
    name: str, flip: bool, padding: int = 4, private: str = "train", test: str = "test"
) -> dict[str, object]:
    return {
        "name": name,
        "parts": {"private": private, "test": test},
        "crop_padding": padding,
        "flip": flip,
    }


def _dpadapter(**options: object) -> dict[str, object]:
    return {"method": {"name": "dpadapter", "dpadapter": options}}


def _amp(batch_size: int, steps: int, gamma: float = 1.0) -> dict[str, object]:
    return {
        "method": {"name": "amp", "amp": {"gamma": gamma}},
        "train": {"batch_size": batch_size, "steps": steps},
    }


def get_config(size: str = "paper") -> ConfigDict:
    if size not in ("paper", "cpu", "digits"):
        raise ValueError(
            f"the config takes 'paper', 'cpu' or 'digits' after the colon, got {size!r}."
        )
    pretrain = cifar100.get_config()
    pretrain.robustness.lengths = ()
    config = ConfigDict(
        {
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "seeds": (0, 1, 2),  # of upstream models and of new heads, not of any noise
            # what differs from `pretrain.data`
            "sets": {name: image_set(*what) for name, what in _SETS.items()},
            "pretrain": pretrain,  # also which model
            "upstreams": {  # what differs from `pretrain`, besides "none"
                "standard": {"method": {"name": "standard"}},
                # the paper's "vanilla SAM", gamma 1 and m = 100
                "SAM": _amp(100, pretrain.train.steps // 2),
                "DPAdapter": {"method": {"name": "dpadapter"}},
                **{f"DPAdapter γ={gamma:g}": _dpadapter(gamma=gamma) for gamma in _GAMMAS},
                **{
                    f"SAM γ={gamma:g}": _amp(100, pretrain.train.steps // 2, gamma)
                    for gamma in _AMP_GAMMAS
                },
                # Perturbations of length 1 for all gradients, from batches of 50 and of m1.
                "length 1, m1=50": {
                    **_dpadapter(gamma=1.0, rule="normalise"),
                    "ascent": {"batch_size": 50, "microbatch_size": 0},
                },
                "length 1, large m1": _dpadapter(gamma=1.0, rule="normalise"),
                "length 0.2, large m1": _dpadapter(gamma=0.2, rule="normalise"),
            },
            # which robust accuracy the figures show
            "robust": {
                "std": 0.1,
                "relative": False,
                "draws": 10,
            },
            "private": {
                "method": "dp_sgd",
                "method_options": METHOD_OPTIONS,
                "accountant": "rdp",  # section 5.1
                "delta": 1e-5,
                "batch_size": 256,  # not stated in the paper
                "physical_batch_size": 128,
                "epochs": 100,
                **clipping(4.0),
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 0.01,
                **optimizer(momentum=0.9),
                "schedule": "constant",
                "augmult": 0,
                "ema_decay": 0.0,
                "ascent_radius": 0.0,
                "checkpoint_every": 1000,
            },
            "methods": {  # what differs from `private`
                "DP-SGD": {},
                # The learning rate is larger because gradients have norm 1 instead of 4.
                "AdpClip": {"method": "adp_clip", "learning_rate": 0.04},
                "GEP": {"method": "gep", "clip_norm": 5.0},
                "AdpAlloc": {"method": "adp_alloc"},
                "PLD": {"accountant": "auto"},
                "PLD, DP-SAT": {"accountant": "auto", "ascent_radius": 0.05},
                "PLD, EMA": {"accountant": "auto", "ema_decay": 0.99},
                "PLD, augmult 4": {"accountant": "auto", "augmult": 4},
                "PLD, clip 1": {"accountant": "auto", "clip_norm": 1.0, "learning_rate": 0.04},
                "PLD, clip 1, EMA, augmult 4": {
                    "accountant": "auto",
                    **clipping(1.0),
                    "learning_rate": 0.04,
                    "ema_decay": 0.99,
                    "augmult": 4,
                },
                "AdpClip as published": {
                    "method": "adp_clip",
                    "method_options": {"adp_clip": {"unit_norm": False}},
                },
            },
            "grids": {
                "table1": {
                    "upstreams": ("none", "standard", "SAM", "DPAdapter"),
                    "methods": ("DP-SGD", "AdpClip", "GEP", "AdpAlloc"),
                    "epsilons": (1.0, 4.0),
                    "comparisons": (  # (coordinate, before, after)
                        *(
                            ("upstream", a, b)
                            for a, b in itertools.pairwise(("none", "standard", "SAM", "DPAdapter"))
                        ),
                        ("upstream", "standard", "DPAdapter"),
                        *(("method", "DP-SGD", name) for name in ("AdpClip", "GEP", "AdpAlloc")),
                    ),
                },
                "gamma": {
                    "upstreams": (
                        *("standard", "SAM", "DPAdapter"),
                        *(f"DPAdapter γ={gamma:g}" for gamma in _GAMMAS),
                        *(f"SAM γ={gamma:g}" for gamma in _AMP_GAMMAS),
                    ),
                    "methods": ("DP-SGD",),
                    "epsilons": (1.0,),
                    "comparisons": (
                        ("upstream", "standard", "SAM"),
                        ("upstream", "standard", "DPAdapter"),
                    ),
                    "figures": True,
                },
                "equal_norm": {
                    "upstreams": ("standard", "DPAdapter", *_LENGTHS),
                    "methods": ("DP-SGD",),
                    "epsilons": (1.0, 4.0),
                    "comparisons": (
                        ("upstream", "length 1, m1=50", "length 1, large m1"),  # is it the batch?
                        # or the length?
                        (
                            "upstream",
                            "length 0.2, large m1",
                            "length 1, large m1",
                        ),
                    ),
                },
                "beyond": {
                    "upstreams": ("DPAdapter",),
                    "methods": ("DP-SGD", *_TRICKS, "AdpClip", "AdpClip as published"),
                    "epsilons": (1.0, 4.0),
                    "comparisons": (
                        *(("method", "DP-SGD", name) for name in _TRICKS),
                        ("method", "AdpClip as published", "AdpClip"),
                    ),
                },
            },
        },
        allow_dotted_keys=True,  # "γ=0.1" is a name
    )
    for grid in config.grids.values():
        grid.sets = tuple(config.sets)
    config.private.method_options.gep.update(
        {"anchors": 2000, "basis_size": 1000, "residual_clip_norm": 2.0}
    )
    config.private.method_options.gep.basis_every = 1
    if size != "paper":
        _small(config)
    if size == "digits":
        _digits(config)
    return config


def _small(config: ConfigDict) -> None:
    """Sets a small CNN on 16x16 images, 5000 private examples per set, 10 epochs."""
    small = ("train[:5000]", "test[:2000]")
    config.sets = {
        "CIFAR-10": image_set("cifar10", True, 2, *small),
        "Fashion-MNIST": image_set("fashion_mnist", True, 1, *small),
        "digits": image_set("mnist", False, 1, *small),
    }
    for grid in config.grids.values():
        grid.sets = tuple(config.sets)
    swept = ("DPAdapter γ=0.5", "DPAdapter γ=5", "SAM γ=0.5", "SAM γ=2")
    for name in [name for name in config.upstreams if "γ" in name and name not in swept]:
        del config.upstreams[name]
    config.grids.gamma.upstreams = tuple(
        name for name in config.grids.gamma.upstreams if name in config.upstreams
    )
    for grid in (config.grids.equal_norm, config.grids.beyond):
        grid.epsilons = (1.0,)
    config.pretrain.model.update(
        {
            "name": "cnn",
            "options": {"widths": (16, 32, 64), "dense": 0, "norm": "group", "activation": "relu"},
        }
    )
    config.pretrain.model.preprocessing.size = 16
    config.pretrain.data.parts.update({"public": "train[:8000]", "test": "test[:2000]"})
    config.pretrain.data.crop_padding = 2
    config.pretrain.train.update({"steps": 3000, "checkpoint_every": 1000})
    config.pretrain.ascent.update({"batch_size": 500})
    config.pretrain.robustness.update({"draws": 3})
    for upstream in config.upstreams.values():  # half as many updates of twice the size
        if upstream.get("train"):
            upstream.train.steps = 1500
    config.robust.update({"std": 0.2, "relative": True, "draws": 3})
    config.private.update(
        {"batch_size": 250, "physical_batch_size": 256, "epochs": 10, "learning_rate": 0.02}
    )
    config.methods["AdpClip"].learning_rate = 0.08
    for name in ("PLD, clip 1", "PLD, clip 1, EMA, augmult 4"):
        config.methods[name].learning_rate = 0.08
    config.private.method_options.gep.update({"anchors": 256, "basis_size": 60, "basis_every": 10})


def _digits(config: ConfigDict) -> None:
    """Sets a small table from scikit-learn's bundled digits: half public, a fifth private."""
    config.seeds = (0,)
    config.pretrain.data = {
        "source": "bundled",
        "name": "digits",
        "data_dir": "",
        "split_seed": 0,
        "parts": {"public": 0.5, "private": 0.2, "test": 0.3},
        "crop_padding": 1,
        "flip": False,
    }
    config.sets = {"digits": {"name": "digits"}}
    config.pretrain.model.preprocessing = {"size": 8, "mean": (0.3,), "std": (0.4,)}
    config.pretrain.model.options.widths = (8, 16)
    config.pretrain.train.update({"steps": 100, "checkpoint_every": 100})
    config.pretrain.ascent.batch_size = 200
    config.pretrain.robustness.update(
        {"std": (0.1,), "relative_std": (0.2,), "draws": 2, "inputs": 8}
    )
    config.private.update({"batch_size": 60, "physical_batch_size": 64, "epochs": 3})
    config.private.method_options.gep.update({"anchors": 64, "basis_size": 24})
    config.upstreams = {name: config.upstreams[name] for name in ("standard", "SAM", "DPAdapter")}
    config.upstreams.SAM.train.update({"batch_size": 50, "steps": 100})
    config.grids = {"table1": config.grids.table1, "gamma": config.grids.gamma}
    config.grids.table1.update({"sets": ("digits",), "epsilons": (4.0,)})
    config.grids.gamma.update(
        {"sets": ("digits",), "epsilons": (4.0,), "upstreams": tuple(config.upstreams)}
    )
