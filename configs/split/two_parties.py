r"""Split Adaptation between two processes on scikit-learn's bundled digits. It needs no data and no
network.

    python -m launch.split_server --config configs/split/two_parties.py --workdir workdir/server \
        --exchange workdir/exchange &
    python -m launch.split_client --config configs/split/two_parties.py --workdir workdir/client \
        --exchange workdir/exchange --mode private --queries

The server has the digits 0 to 4, the client five images each of 5 to 9. Each process reads only its
own part of this file. Two real parties would each have a file with their part alone.

Two minutes of computation on two CPU cores, most of it once for the server. One run of each mode,
with the upload's size (chance is .20, and 25 images are few):

    published    accuracy .52   3.5 MB   epsilon = inf (empirical only)
    noise_once   accuracy .42    55 kB   epsilon = inf (empirical only)
    private      accuracy .25     3 kB   epsilon = 8 at delta = 1e-5
"""

from ml_collections import ConfigDict

from configs.people import PEOPLE


def get_config() -> ConfigDict:
    digits = {"source": "bundled", "name": "digits", "split": "", "data_dir": "", "prepare": False}
    return ConfigDict(
        {
            "server": {
                "seed": 0,
                # PUBLIC images. Without a checkpoint, pretrain_fraction of them trains the
                # backbone. The rest is D_S.
                "data": {**digits, "classes": (0, 1, 2, 3, 4), "pretrain_fraction": 0.7},
                "model": {
                    "name": "vit_tiny",
                    "num_classes": 5,
                    "options": {
                        "patch_size": 2,
                        "width": 32,
                        "depth": 6,
                        "num_heads": 4,
                        "mlp_width": 64,
                    },
                    "checkpoint": "",
                    "naming": "auto",
                    "preprocessing": {"size": 8, "mean": (0.3,), "std": (0.4,)},
                },
                "train": {
                    "steps": 1000,
                    "batch_size": 64,
                    "learning_rate": 1e-3,
                    "crop_padding": 0,
                    "init_seed": 0,
                },
                "cut": 0,  # blocks of the frontend. 0 is two thirds.
                "calibration": {
                    "frontends": 3,
                    "samples": 32,
                    "partition": "random",
                    "bits": 8,
                    "metric": "hessian",
                },
                # The paper's learning rates of 1e-5 are for pre-trained ViTs.
                "tuning": {"learning_rate": 1e-4, "epochs": 1, "batch_size": 32},
                "copies": 64,
                "n_patches": 4,  # a quarter of 16, as the paper's 50 of 196
                # of the public projection for private uploads. 0 makes no projection.
                "directions": 16,
                "adaptation": {"learning_rate": 1e-3, "epochs": 20, "batch_size": 32},
            },
            "client": {
                # an .npz file with image and label, optionally test_image and test_label
                "images": "",
                # their name on the client's ledger. "" is that of the file, without .npz.
                "dataset": "",
                "data": {**digits, "classes": (5, 6, 7, 8, 9)},  # without a file: half is for tests
                "data_seed": 0,
                **PEOPLE,
                "shots": 5,
                "num_classes": 5,  # a public declaration
                "mode": "private",  # or "published", "noise_once"
                "alpha": 0.01,  # of the noise on the frontend
                # "published", "noise_once": of the noise on representations, in their units
                "laplace_scale": 0.8,
                "query_laplace_scale": 0.0,  # the same for test images
                "epsilon": 8.0,  # "private": of the upload
                "delta": 1e-5,
                "label_share": 0.5,
            },
        }
    )
