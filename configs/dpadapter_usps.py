r"""DPAdapter's claims where noise matters: a converged small network, few private records, tuned
learning rates.

    python -m launch.finetune --config configs/dpadapter_usps.py --workdir workdir/dpadapter_usps \
        --config.pretrain.data.data_dir=DIR

Upstream models are trained on 6500 images of USPS to convergence. The private sets are
scikit-learn's digits (898 records) and 1500 images of Fashion-MNIST. The other 791 images of USPS
are a PUBLIC task with the upstream distribution: it chooses the learning rate for each upstream
model and epsilon. docs/results/dpadapter.md has the results and times.

DPAdapter ascends at every tenth step, on 500 images. One ascent and ten updates then cost as much
as ten updates of SAM. "SAM" and "DPAdapter" with a γ have perturbations of this length. "AMP" is
the paper's "vanilla SAM", a gradient projected to the ball, with one batch of 100 unless the name
says otherwise. "DPAdapter, in the ball" is Eq. 6.

The grids "order" and "gamma_1" have Figures 2, 5 and 6 of Wang et al. 2024, "amp" Figure 1,
"batches" Figure 3. The grid "gamma_4" has Figure 7, and "family" its Table 1 with the other methods
of private training. configs/dpadapter_usps.py:gamma_02 has only the models of gamma 0.2."""

import itertools

from ml_collections import ConfigDict

from configs import dpadapter_table1

GAMMAS = (0.1, 0.2, 0.5, 1.0, 2.0)
RATES = (0.03, 0.08, 0.2)
_HELD_OUT = "USPS, held out"


def upstream(
    method: str, batch_size: int = 50, images: int = 60_000, **options: object
) -> dict[str, object]:
    """Returns a method with its batch, and its updates for a number of images."""
    schedule = {
        "batch_size": batch_size,
        "steps": images // batch_size,
        "checkpoint_every": images // batch_size,
    }
    rate = max(0.1, batch_size / 1000)  # linear from 100 images (Goyal et al. 2017)
    return {
        "method": {"name": method, method: options},
        "train": {**schedule, "learning_rate": rate},
    }


def get_config(grids: str = "all") -> ConfigDict:
    if grids not in ("all", "gamma_02"):
        raise ValueError(f"the config takes 'all' or 'gamma_02' after the colon, got {grids!r}.")
    config = dpadapter_table1.get_config("cpu")
    sam, dpadapter, amp = (
        {f"{name} γ={gamma:g}": gamma for gamma in GAMMAS} for name in ("SAM", "DPAdapter", "AMP")
    )
    sizes = {"AMP of 50": 50, "AMP of 200": 200, "AMP of 400": 400}
    upstreams = {
        "standard": upstream("standard"),
        "standard, twice as long": upstream("standard", images=120_000),
        **{name: upstream("sam", gamma=gamma) for name, gamma in sam.items()},
        **{name: upstream("amp", 100, gamma=gamma) for name, gamma in amp.items()},
        **{name: upstream("amp", size, gamma=1.0) for name, size in sizes.items()},
        **{
            name: upstream("dpadapter", gamma=gamma, rule="normalise")
            for name, gamma in dpadapter.items()
        },
        "DPAdapter, in the ball": upstream("dpadapter", gamma=2.0),
    }
    config.upstreams = ConfigDict(upstreams, allow_dotted_keys=True)  # "γ=0.1" is a name
    config.pretrain.data.update(
        {"name": "usps", "parts": {"public": "train[:6500]", "test": "test"}}
    )
    config.pretrain.data.update({"crop_padding": 0, "flip": False})
    config.pretrain.model.options.widths = (8, 16, 32)
    config.pretrain.model.preprocessing = {"size": 16, "mean": (0.3,), "std": (0.35,)}
    config.pretrain.ascent.every = 10
    config.pretrain.robustness = {
        "std": (0.05,),
        "relative_std": (0.2, 0.4),
        "draws": 3,
        "inputs": 16,
        "lengths": (),
    }
    config.robust.std = 0.4
    config.sets = {
        "digits": {
            "source": "bundled",
            "name": "digits",
            "split_seed": 0,
            "parts": {"private": 0.5, "test": 0.5},
        },
        "Fashion-MNIST": {
            "name": "fashion_mnist",
            "parts": {"private": "train[:1500]", "test": "test[:2000]"},
        },
        _HELD_OUT: {"name": "usps", "parts": {"private": "train[6500:]", "test": "test"}},
    }
    config.private.update(
        {"batch_size": 150, "physical_batch_size": 150, "epochs": 10, "clip_norm": 1.0}
    )
    trials = {f"DP-SGD at {rate:g}": {"learning_rate": rate} for rate in RATES}
    others = {
        "AdpClip": {"method": "adp_clip"},
        "GEP": {"method": "gep"},
        "AdpAlloc": {"method": "adp_alloc"},
    }
    config.methods = ConfigDict({"DP-SGD": {}, **others, **trials}, allow_dotted_keys=True)
    config.tuning = {"set": _HELD_OUT, "methods": tuple(trials)}

    swept = ("standard", *sam, *dpadapter)
    private = ("digits", "Fashion-MNIST")
    main = ("none", "standard", "SAM γ=0.5", "AMP γ=1", "DPAdapter γ=0.5")

    def grid(
        upstreams: tuple[str, ...], *compared: tuple[str, str], **changes: object
    ) -> dict[str, object]:
        fields = {
            "sets": private,
            "methods": ("DP-SGD",),
            "epsilons": (1.0,),
            "figures": False,
            **changes,
        }
        return {
            "upstreams": upstreams,
            "comparisons": tuple(("upstream", *pair) for pair in compared),
            **fields,
        }

    orders = (
        *itertools.pairwise(main),
        ("standard", "standard, twice as long"),
        ("standard", "AMP γ=1"),
        ("standard", "DPAdapter γ=0.5"),
        ("SAM γ=0.5", "DPAdapter γ=0.5"),
        ("standard, twice as long", "SAM γ=0.5"),
        ("standard, twice as long", "DPAdapter γ=0.5"),
    )
    every = (*main, "standard, twice as long", "DPAdapter, in the ball")
    lengths = tuple(zip(sam, dpadapter, strict=True))
    config.grids = {
        "order": grid(every, *orders, figures=True),
        "order_4": grid(every, *orders, epsilons=(4.0,)),
        "tuning": grid(every, methods=tuple(trials), sets=(_HELD_OUT,)),
        "gamma_1": grid(swept, *lengths, figures=True),
        "amp": grid(("standard", *amp), sets=(*private, _HELD_OUT), figures=True),
        "batches": grid(
            ("AMP of 50", "AMP γ=1", "AMP of 200", "AMP of 400"), figures=True, field="batch size"
        ),
        "gamma_4": grid(swept, *lengths, epsilons=(4.0,), figures=True),
        "family": grid(every[:-1], *orders, methods=tuple(others)),
    }
    if grids == "gamma_02":
        _only(config, 0.2)
    return config


def _only(config: ConfigDict, gamma: float) -> None:
    """Keeps what the figures show at one gamma."""
    config.grids = {name: config.grids[name] for name in ("gamma_1", "gamma_4", "amp")}
    for grid in config.grids.values():
        grid.upstreams = tuple(name for name in grid.upstreams if name.endswith(f"γ={gamma:g}"))
        pairs = (pair for pair in grid.comparisons if {*pair[1:]}.issubset(grid.upstreams))
        grid.update({"comparisons": tuple(pairs), "figures": False})
