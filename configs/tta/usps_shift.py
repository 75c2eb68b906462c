r"""Test-time adaptation from USPS digits to noise, blur, brightness and the digits of another
scanner.

    python -m launch.adapt --config configs/tta/usps_shift.py --workdir workdir/usps_shift \
        --config.data.data_dir=DIR
    python -m launch.adapt --config configs/tta/usps_shift.py:episodic \
        --workdir workdir/usps_shift_episodic \
        --config.data.data_dir=DIR

A GroupNorm network is trained on clean digits of USPS and then sees five domains. Four are shifts
of USPS's test images. The fifth has scikit-learn's digits, which were scanned elsewhere. Three
source models see each stream in five orders of the domains. Hyper-parameters are chosen on training
images that no source model saw, under three other shifts. The episodic variant resets to the source
model before each domain. There the order of the domains has no effect, and two streams differ in
the order of images only. ":ablations" clips batches instead of images, keeps the filters of private
forms, and serves shorter streams, with three methods in one order of the domains. Results and
times: docs/results/tta.md.

DIR holds USPS as a data set of TFDS (usps/1.0.0, splits train and test, images [16, 16, 1]). The
catalogue of TFDS does not have USPS. With .npz files of the arrays image uint8 [n, 16, 16, 1] and
label [n], give instead:

    --config.data.source=npz --config.data.path=FOLDER --config.data.parts.public=train.npz \
    --config.data.parts.tuning=tuning.npz --config.data.parts.test=test.npz

configs/tta/digits.py needs no data.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from configs.tta import cifar10

_CLIP_NORM = 0.3  # a third of the median gradient norm
# What the continual study chose: the learning rate as published, and learning rate times clip norm
# with clipped images and at epsilon 20.
_STEPS = {"Tent": (0.03, 0.01, 0.03), "EATA": (0.03,) * 3, "DeYO": (0.1, 0.03, 0.03)}


def _chosen(steps: Mapping[str, tuple[float, ...]]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the hyper-parameters of these steps, by method and setting."""
    chosen = {}
    for name, (published, *clipped) in steps.items():
        chosen[name] = {"original": {"learning_rate": published}}
        for setting, step in zip(("clipped", "epsilon 20"), clipped, strict=True):
            choice = {"learning_rate": step / _CLIP_NORM, "clip_norm": _CLIP_NORM}
            chosen[name][setting] = choice
    return chosen


def get_config(variant: str = "continual") -> ConfigDict:
    known = ("continual", "episodic", "ablations")
    if variant not in known:
        raise ValueError(f"the variant must be one of {', '.join(known)}, got {variant!r}.")
    config = cifar10.get_config()
    config.data = {
        "source": "tfds",
        "name": "usps",
        "path": "",
        "data_dir": "",
        "num_classes": 10,
        "parts": {"public": "train[:6000]", "tuning": "train[6000:]", "test": "test"},
        "prepare": False,
        "corruptions": ("noise", "digits", "brightness", "impulse", "blur"),
        "strengths": {
            **{"noise": 0.45, "brightness": 0.5, "impulse": 0.2, "blur": 2.0},
            **{"speckle": 1.2, "contrast": 0.25, "rotation": 25.0},  # held out
        },
        "others": {"digits": {"source": "bundled", "name": "digits", "classes": ()}},
        "images": 1024,
    }
    config.model = {
        "name": "cnn",
        "num_classes": 10,
        "classes": "",
        "options": {"widths": (32, 64), "dense": 0, "norm": "group", "activation": "relu"},
        "checkpoint": "",
        "naming": "auto",
        "preprocessing": {"size": 16, "mean": (0.25,), "std": (0.3,)},
    }
    config.train = {
        "steps": 800,
        "batch_size": 64,
        "learning_rate": 2e-3,
        "crop_padding": 0,
        "init_seed": 0,
    }
    config.protocol.update(seeds=15, sources=3, domain_order="shuffled")
    if variant == "episodic":
        config.protocol.update(reset="domain", seeds=6)
    if variant == "ablations":
        config.methods, config.clipping = ("Tent", "EATA", "DeYO"), ("image", "batch")
        config.privacy.update(budgets=(20.0,), filters=("remove", "keep"))
        config.protocol.update(seeds=config.protocol.sources, lengths=(64, 256))
        config.hyper_parameters = _chosen(_STEPS)
    config.tuning.update(
        corruptions=("speckle", "contrast", "rotation"),
        images=1024,
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        clipped_steps=(3e-3, 1e-2, 3e-2, 1e-1),
        clip_norms=(_CLIP_NORM,),
        batch_clip_norms=(0.1,),  # of whole batches, likewise
    )
    return config
