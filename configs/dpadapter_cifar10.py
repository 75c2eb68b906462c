r"""Table 1 and Figures 1, 3, 5 and 7 of Wang et al. 2024 (DPAdapter) on natural images: the longest
pre-training of three seeds that two cores allow.

    python -m launch.finetune --config configs/dpadapter_cifar10.py \
        --workdir workdir/dpadapter_cifar10 --config.pretrain.data.data_dir=DIR

Upstream models of the grid "order" see 40,000 images of CIFAR-10 eight times, at 16x16. Those of
the other grids are "short": they see them three times, and have one seed. The private sets are 5000
other images of CIFAR-10, which have the upstream distribution, and 1500 images each of
Fashion-MNIST and USPS. Two learning rates stand side by side, because the rate decides the order
where noise matters. docs/results/dpadapter.md has the results and times.

The names of upstream models are those of configs/dpadapter_usps.py. DPAdapter ascends at every
tenth step, on 500 images. The grids "gamma" and "gamma_4" have Figures 5 and 7, "amp" Figure 1 and
"batches" Figure 3.
"""

from ml_collections import ConfigDict

from configs import dpadapter_table1
from configs.dpadapter_table1 import image_set
from configs.dpadapter_usps import upstream

GAMMAS = (0.1, 0.2, 0.5, 1.0)
_LONG, _SHORT = 320_000, 120_000


def get_config() -> ConfigDict:
    config = dpadapter_table1.get_config("cpu")
    sam, dpadapter, amp = (
        {f"{name} γ={gamma:g}, short": gamma for gamma in GAMMAS}
        for name in ("SAM", "DPAdapter", "AMP")
    )
    sizes = {f"AMP of {size}, short": size for size in (50, 200, 400)}
    upstreams = {
        "standard": upstream("standard", images=_LONG),
        "standard, twice as long": upstream("standard", images=2 * _LONG),
        **{f"SAM γ={g:g}": upstream("sam", images=_LONG, gamma=g) for g in GAMMAS},
        **{f"AMP γ={g:g}": upstream("amp", 100, images=_LONG, gamma=g) for g in GAMMAS},
        **{
            f"DPAdapter γ={g:g}": upstream("dpadapter", images=_LONG, gamma=g, rule="normalise")
            for g in GAMMAS
        },
        "standard, short": upstream("standard", images=_SHORT),
        **{name: upstream("sam", images=_SHORT, gamma=g) for name, g in sam.items()},
        **{name: upstream("amp", 100, images=_SHORT, gamma=g) for name, g in amp.items()},
        **{name: upstream("amp", size, images=_SHORT, gamma=0.5) for name, size in sizes.items()},
        **{
            name: upstream("dpadapter", images=_SHORT, gamma=g, rule="normalise")
            for name, g in dpadapter.items()
        },
    }
    config.upstreams = ConfigDict(upstreams, allow_dotted_keys=True)
    config.pretrain.data.update(
        {"name": "cifar10", "parts": {"public": "train[:40000]", "test": "test[:2000]"}}
    )
    config.pretrain.ascent.every = 10
    config.pretrain.robustness.update({"std": (0.05,), "relative_std": (0.2,), "inputs": 16})
    small = ("train[:1500]", "test[:2000]")
    config.sets = {
        "CIFAR-10": image_set("cifar10", True, 2, "train[45000:]", "test[:2000]"),
        "Fashion-MNIST": image_set("fashion_mnist", True, 1, *small),
        "USPS": image_set("usps", False, 1, *small),
    }
    config.private.clip_norm = 1.0
    config.methods = ConfigDict(
        {f"DP-SGD at {rate:g}": {"learning_rate": rate} for rate in (0.03, 0.1)},
        allow_dotted_keys=True,
    )
    swept = ("standard, short", *sam, *dpadapter)
    both = tuple(config.methods)
    sets = tuple(config.sets)

    def grid(upstreams, compared=(), **changes):
        fields = {
            "sets": sets,
            "methods": both[1:],
            "epsilons": (1.0,),
            "figures": True,
            "seeds": (0,),
            **changes,
        }
        return {
            "upstreams": upstreams,
            "comparisons": tuple(("upstream", *pair) for pair in compared),
            **fields,
        }

    config.grids = {
        "gamma": grid(swept),
        "gamma_4": grid(swept, epsilons=(4.0,)),
    }
    return config
