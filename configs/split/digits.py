"""Split Adaptation on scikit-learn's bundled digits. It needs no data and no network.

    python -m launch.split --config configs/split/digits.py --workdir workdir/split_digits

":appendix" has what the paper's appendix adds: all attackers, Tables 9 and 10 on the paper's grids,
and training until the loss does not decrease. Its attackers.png is on
docs/results/split_adaptation.md.

The server has the digits 0 to 4, the client a few images of 5 to 9. About 40 minutes on one busy
CPU core. Accuracy with 10 images per class: 0.57 for Split Adaptation, 0.45 with noise once, 0.65
and 0.66 for fine-tuning and split learning. An attacker who takes the median of the published
copies reconstructs the images nearly as well as without noise (20.8 dB of 21.4)."""

from ml_collections import ConfigDict

# Tables 9 and 10: 0 to 180 of 196 patches are replaced, and 0 to 100 copies are made.
PAPER_SWEEPS = {
    "patches": tuple(number / 196 for number in (*range(0, 101, 10), 120, 140, 160, 180)),
    "copies": (0, 1, 2, 4, 8, 20, 30, 40, 50, 60, 64, 70, 80, 90, 100),
}


_VARIANTS = ("", "appendix")


def get_config(variant: str = "") -> ConfigDict:
    if variant not in _VARIANTS:
        raise ValueError(f"the variant must be one of {_VARIANTS}, got {variant!r}.")
    config = _whole()
    if variant == "appendix":
        config.update(_APPENDIX)
    return config


_APPENDIX = {
    "methods": (
        *("Linear probing", "Fine-tuning", "LN-tune", "Split learning", "Offsite tuning"),
        "Split Adaptation",
    ),
    "stolen": (),
    "seeds": (1, 42, 215),
    "shots": (5,),
    "learning_rates": (1e-2,),
    "ablation": {"shots": 5, "rows": ("Split Adaptation",)},
    "attack": {
        "attackers": (
            *("noise-unaware", "noise-aware", "aggregating", "oracle"),
            *("FORA", "FORA, aggregating", "Ginver", "Ginver, aggregating"),
        ),
        "uploads": ("Split learning", "Split Adaptation"),
    },
    "noise": {"scales": (0.8,), "seeds": 1},
    "sweeps": {**PAPER_SWEEPS, "seeds": 3},
    "rule": {"patience": (1,), "epochs": 20, "seeds": 1},
    "private": {"epsilons": (8.0,), "dimensions": (16,), "shots": (10,), "steps": 100},
}


def _whole() -> ConfigDict:
    digits = {
        "source": "bundled",
        "name": "digits",
        "split": "",
        "data_dir": "",
        "prepare": False,
        "images": 0,
    }
    model = {
        "name": "vit_tiny",
        "num_classes": 5,
        "options": {"patch_size": 2, "width": 32, "depth": 6, "num_heads": 4, "mlp_width": 64},
        "checkpoint": "",
        "naming": "auto",
        "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
    }
    train = {
        "steps": 1500,
        "batch_size": 64,
        "learning_rate": 1e-3,
        "crop_padding": 0,
        "init_seed": 0,
    }
    return ConfigDict(
        {
            # no image is private, so accuracies and reconstructions may be written
            "public_benchmark": True,
            "data": {
                "server": {**digits, "classes": (0, 1, 2, 3, 4)},
                # the rest is D_S, the server's images for everything else
                "pretrain_fraction": 0.7,
                "server_images": 0,  # at most so many of D_S. 0 takes all.
                "client": {**digits, "classes": (5, 6, 7, 8, 9)},
                # the half from which no shots are drawn
                "client_test": {
                    **digits,
                    "name": "",
                    "classes": (),
                },
                # Learning rates are chosen on D_S turned by 90 degrees, which the backbone has
                # never seen.
                "tuning": {**digits, "name": "", "classes": (), "rotate": 1},
                # Public images that train the auxiliary model, if it has no checkpoint. Without a
                # name they are those of the backbone.
                "auxiliary": {**digits, "name": "", "classes": ()},
                "split_seed": 0,
            },
            "model": model,
            "train": train,
            "cut": 0,  # blocks of the frontend. 0 is two thirds.
            "head_hidden": 0,  # width of a hidden layer in front of new heads. 0 is none.
            "auxiliary": {"model": model, "train": {**train, "init_seed": 1}, "cut": 0},
            # The compared methods. Leave out what takes too long.
            "methods": (
                *("Linear probing", "Fine-tuning", "LN-tune", "Split learning", "Offsite tuning"),
                *("Split Adaptation", "SA, noise once"),
            ),
            "stolen": (
                *("Quantised frontend", "Original frontend", "Quantised frontend, all of it tuned"),
                "Auxiliary backend",
            ),
            "seeds": (1, 42, 215, 7, 11),  # the paper's three, and two more
            "shots": (3, 5, 10),
            "learning_rates": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),  # tried for every method
            "tuning": {"seeds": (1, 42)},
            "server": {
                "seed": 0,
                "frontends": 3,
                "samples": 32,
                "partition": "random",
                "bits": 8,
                "metric": "hessian",
                "learning_rate": 1e-4,  # the paper's 1e-5 is for pre-trained ViTs
                "epochs": 1,
            },
            "client": {
                "alpha": 0.01,
                "noise_mode": "rel",
                "laplace": 0.8,
                # of public representations, or "representation" for the paper's bare 0.8
                "laplace_unit": "std",
                "patch_share": 0.25,  # the paper replaces 50 of 196
                "copies": 64,
            },
            # Over all copies. The paper has 100. With a patience of 1, training ends after the
            # first epoch whose loss is not below that of all before it. 0 runs all epochs.
            "adaptation": {"epochs": 20, "batch_size": 32, "patience": 0},
            # The server draws the layers that "Offsite tuning, random layers" drops, by this seed
            # plus that of the client's images. Both are public.
            "baselines": {"epochs": 100, "batch_size": 32, "patience": 0, "drop_seed": 0},
            "ablation": {
                "shots": 5,
                "rows": (
                    "Split Adaptation",
                    "without Hilbert augmentation",
                    "backend tuned with F_0 only",
                    "backend not tuned",
                    "one noisy copy (no patch retrieval)",
                    "fresh noise on all copies, no retrieval",
                    "noise once, then retrieval",
                    "no Laplace noise",
                    "no noise",
                    "no noise, no retrieval",
                ),
            },
            # "original", "Hilbert augmentation" and "amplitude exchange" are beside each other as
            # in Figure 3.
            "augmentations": (),
            "attack": {
                "uploads": (
                    *(
                        "Split learning",
                        "Split Adaptation",
                        "SA without Laplace noise",
                        "SA without model noise",
                    ),
                    "SA, noise once",
                ),
                "attackers": ("noise-unaware", "noise-aware", "aggregating", "oracle"),
                "client_images": 25,  # at most so many are attacked
                "epsilons": (8.0, 64.0),  # of private uploads
                "images": 400,  # public ones, to train decoders
                "epochs": 20,
                "fora_steps": 400,  # of the alignment of "FORA" and "FORA, aggregating"
                "ginver_steps": 2000,  # of the generator of "Ginver" and "Ginver, aggregating"
                "batch_size": 32,
                # a score of images of 31x31 pixels and more. It needs the extra "lpips".
                "lpips": False,
            },
            "noise": {"scales": (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0), "seeds": 3},
            # Tables 9 and 10. `PAPER_SWEEPS` has the paper's values.
            "sweeps": {
                "patches": (0.0, 0.125, 0.25, 0.5, 0.75),
                "copies": (0, 1, 4, 16, 64, 100),
                "seeds": 3,
            },
            # The paper trains until "the training loss does not decrease". These runs do so with
            # each patience, for at most so many epochs.
            "rule": {"patience": (1, 5), "epochs": 100, "seeds": 3},
            "private": {
                "delta": 1e-5,
                "epsilons": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
                "dimensions": (4, 16),
                "shots": (10, 60),
                "label_share": 0.5,
                "copies": 0,
                "steps": 1000,  # of the backend, for any number of images
            },
        }
    )
