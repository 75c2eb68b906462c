r"""Table 1 and Figures 1, 3, 5 and 7 of Wang et al. 2024 (DPAdapter) on natural images.

    python -m launch.finetune --config configs/dpadapter_cifar10.py \
        --workdir workdir/dpadapter_cifar10 --config.pretrain.data.data_dir=DIR

Upstream models see 40,000 images of CIFAR-10 four times, at 16x16. The private sets are 1500 other
images of CIFAR-10, which have the upstream distribution (the paper's Figure 1 holds out a tenth of
CIFAR-100), and 1500 images each of Fashion-MNIST and USPS. docs/results/dpadapter.md has the
results of ":table". Not run by us: ":figures".

The grids "order" and "order_4" have Table 1, from three seeds. The others have one seed and models
that are "short": they see the images twice. "gamma" and "gamma_4" have Figures 5 and 7, "amp"
Figure 1 and "batches" Figure 3. configs/dpadapter_cifar10.py:table has the first two grids, and
configs/dpadapter_cifar10.py:figures the others. The names of upstream models are those of
configs/dpadapter_usps.py.
"""

import itertools

from ml_collections import ConfigDict

from configs import dpadapter_table1
from configs.dpadapter_table1 import image_set
from configs.dpadapter_usps import upstream

GAMMAS = (0.1, 0.2, 0.5, 1.0)
_LONG, _SHORT = 160_000, 80_000
_MAIN = ("none", "standard", "SAM γ=0.2", "DPAdapter γ=0.2")


def get_config(grids: str = "all") -> ConfigDict:
    if grids not in ("all", "table", "figures"):
        raise ValueError(f"the config takes 'all', 'table' or 'figures', got {grids!r}.")
    config = dpadapter_table1.get_config("cpu")
    sam, dpadapter, amp = (
        {f"{name} γ={gamma:g}, short": gamma for gamma in GAMMAS}
        for name in ("SAM", "DPAdapter", "AMP")
    )
    sizes = {f"AMP of {size}, short": size for size in (50, 200, 400)}
    sphere = {"rule": "normalise"}
    upstreams = {
        "standard": upstream("standard", images=_LONG),
        "SAM γ=0.2": upstream("sam", images=_LONG, gamma=0.2),
        "DPAdapter γ=0.2": upstream("dpadapter", images=_LONG, gamma=0.2, **sphere),
        "standard, short": upstream("standard", images=_SHORT),
        **{name: upstream("sam", images=_SHORT, gamma=g) for name, g in sam.items()},
        **{name: upstream("amp", 100, images=_SHORT, gamma=g) for name, g in amp.items()},
        **{name: upstream("amp", size, images=_SHORT, gamma=0.5) for name, size in sizes.items()},
        **{
            name: upstream("dpadapter", images=_SHORT, gamma=g, **sphere)
            for name, g in dpadapter.items()
        },
    }
    config.upstreams = ConfigDict(upstreams, allow_dotted_keys=True)
    config.pretrain.data.update(
        {"name": "cifar10", "parts": {"public": "train[:40000]", "test": "test[:2000]"}}
    )
    config.pretrain.model.options.widths = (8, 16, 32)
    config.pretrain.ascent.every = 10
    config.pretrain.robustness.update({"std": (0.05,), "relative_std": (0.2,), "inputs": 16})
    small = ("train[:1500]", "test[:2000]")
    config.sets = {
        "CIFAR-10": image_set("cifar10", True, 2, "train[45000:46500]", "test[:2000]"),
        "Fashion-MNIST": image_set("fashion_mnist", True, 1, *small),
        "USPS": image_set("usps", False, 1, *small),
    }
    config.private.update({"clip_norm": 1.0, "learning_rate": 0.1})
    config.methods = {"DP-SGD": {}}

    def grid(upstreams: tuple[str, ...], **changes: object) -> dict[str, object]:
        fields = {
            "sets": tuple(config.sets),
            "methods": ("DP-SGD",),
            "epsilons": (1.0,),
            "comparisons": (),
            "seeds": (0,),
            "figures": True,
        }
        return {"upstreams": upstreams, **fields, **changes}

    pairs = (*itertools.pairwise(_MAIN), (_MAIN[1], _MAIN[3]))
    table = {
        "comparisons": tuple(("upstream", *pair) for pair in pairs),
        "seeds": (0, 1, 2),
        "figures": False,
    }
    first, *larger = sizes
    swept = ("standard, short", *sam, *dpadapter)
    table_1 = {
        "order": grid(_MAIN, **table),
        "order_4": grid(_MAIN, epsilons=(4.0,), **table),
    }
    figures = {
        "gamma": grid(swept),
        "gamma_4": grid(swept, epsilons=(4.0,)),
        "amp": grid(("standard, short", *amp)),
        "batches": grid((first, "AMP γ=0.5, short", *larger), field="batch size"),
    }
    config.grids = {"table": table_1, "figures": figures, "all": table_1 | figures}[grids]
    return config
