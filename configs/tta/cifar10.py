"""Test-time adaptation of a small ViT to CIFAR-10 under 15 corruptions of severity 5, private and not.

    python -m launch.adapt --config configs/tta/cifar10.py --workdir workdir/tta_cifar10 \\
        --config.data.data_dir=... --config.model.checkpoint=vit_tiny_patch4_cifar10.npz

The checkpoint is a ViT of 0.8 million parameters trained on 40,000 of CIFAR-10's training images (73.7% clean); with
--config.model.checkpoint="" one is trained here instead. Results and time: BUILD_NOTES.md, "Test-time adaptation".
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "public_benchmark": True,  # accuracies may be written: nobody's private stream
            "data": {
                "source": "tfds",
                "name": "cifar10",
                "data_dir": "",
                "test_split": "test",
                "public_name": "cifar10",  # clean images: Fisher information, or to train the source model on
                "public_split": "train",
                "prepare": False,  # whether images differ in size and are cut to the model's
                "corrupted_name": "",  # corrupt on the fly; "cifar10_corrupted" reads the published set instead
                "severity": 5,
                "corruptions": (
                    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
                    *("motion_blur", "zoom_blur", "snow", "frost", "fog"),
                    *("brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
                ),
                "images": 192,  # photographs of one stream, each under every corruption; each seed has others
            },
            "model": {
                "name": "vit_tiny",
                "num_classes": 10,
                "classes": "",  # "imagenet_r": only the logits of its 200 classes
                "options": {
                    "width": 128,
                    "depth": 6,
                    "num_heads": 8,
                    "mlp_width": 256,
                    "norm_order": "post",
                    "norm_epsilon": 1e-5,
                    "activation": "relu",
                },
                "checkpoint": "",
                "naming": "auto",
                "preprocessing": {
                    "size": 32,
                    "mean": (0.4914, 0.4822, 0.4465),
                    "std": (0.2023, 0.1994, 0.2010),
                },
            },
            "train": {"steps": 6000, "batch_size": 128, "learning_rate": 1e-3, "init_seed": 0},
            "protocol": {
                "batch_size": 64,
                "order": "continual",
                "reset": "never",
                "remainder": "drop",
                "seeds": 3,
                "accumulate": 1,
            },
            "methods": ("Tent", "EATA", "SAR", "DeYO", "DeYO-COME"),
            "method_options": {
                "EATA": {"diversity": 0.4, "fisher_strength": 1.0},  # for 10 classes, not for 1000
                "SAR": {},
                "DeYO": {},
            },
            "fisher_images": 2048,  # clean training images
            "privacy": {
                "budgets": (20.0, 15.0, 10.0, 5.0, 1.0),  # of one visit
                "delta": 1e-6,
                "adjacency": "replace_one",
                "unit": "photograph",
                "filters": {},  # {"filters": "keep", "kept_fraction": 0.5} keeps filters on single images
            },
            "tuning": {
                "corruptions": ("speckle_noise", "spatter", "gaussian_blur", "saturate"),
                "images": 512,  # so that this stream is nearly as long as the one that counts: instability needs time
                "learning_rates": (3e-4, 1e-3, 3e-3, 1e-2),
                "clipped_steps": (1e-3, 5e-3, 2.5e-2),  # learning rate times clip norm
                "clip_norms": (1.0,),  # a third of the median gradient norm
            },
            "hyper_parameters": {},  # by method and setting, instead of tuning
        }
    )
