r"""DP-SGD on a folder of images: a small convolutional network, trained from nothing.

    python -m launch.finetune --config configs/finetune/folder.py --workdir workdir/folder \
        --config.data.path=scans --config.data.class_names="('well', 'ill')"

The folder has images and labels.csv with the columns "path" and "label". A share of the images is
the test set. The accuracy on it is printed and reported, and no ledger charges it: these images are
declared public. `config.data.group` names a column with the owners of the images, or "subfolder":
the first folder of each path. With `config.data.separator` an image has several owners
(docs/howto/several_owners.md), and without it one (docs/howto/protect_patients.md).

Fourteen CPU seconds for 1797 images of 8 by 8 pixels: the digits, with one or two of 900 made-up
people in the names of subfolders. The accuracy was 0.81 at epsilon 8 per person with three images.
"""

from ml_collections import ConfigDict

from configs import digits_dpsgd


def get_config() -> ConfigDict:
    config = digits_dpsgd.get_config()
    config.references = False  # a model without privacy must not be published
    config.data = ConfigDict(
        {
            **config.data,
            "source": "folder",
            "name": "images",  # change: of the set, by which ledgers know it
            "path": "",  # change: the folder
            "class_names": (),  # change: the texts of the column "label"
            "num_classes": 0,  # or their number, if labels are numbers
            # shares of the images, or with a group of the owners; in a copy of this file CSV files
            # of the folder
            "parts": {"public": "", "private": 0.8, "test": 0.2},
            "in_memory": True,  # False reads images whenever they are needed
            "prepare": False,  # True resizes and cuts images as the preprocessing says
            # of the column with the owners of each image, or "subfolder"
            "group": "",
            "max_records": 1,  # with group: the images of one owner that count
            # between the owners of an image that has several, such as ";"; with it, adjacency must
            # be "zero_out"
            "separator": "",
        }
    )
    # change: public numbers
    config.model.preprocessing = ConfigDict({"size": 8, "mean": (0.5,), "std": (0.25,)})
    config.pretrain.steps = 0
    config.private.update(
        {
            "epsilon": 8.0,
            "delta": 1e-4,
            "batch_size": 64,
            "physical_batch_size": 0,
            "steps": 60,
            "checkpoint_every": 20,
            "augmult": 0,
        }
    )
    return config
