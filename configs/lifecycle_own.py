r"""A model's whole life on your own images: real hospitals and a real stream, and no artificial
shift.

    python -m launch.lifecycle --config configs/lifecycle_own.py --workdir workdir/own \
        --config.data.path=/my/folder

The folder has images and the CSV files below, with the header "path,label".
docs/howto/your_own_data.md makes such a folder. Each image is in one file only. The numbers fit
chest X-rays of 28 by 28 pixels in two classes: copy this file and change what is marked."""

from ml_collections import ConfigDict

from configs.lifecycle_digits import get_config as digits
from configs.people import PEOPLE

_SITES = ("site_0.csv", "site_1.csv", "site_2.csv", "site_3.csv", "site_4.csv")


def get_config() -> ConfigDict:
    config = digits()
    config.data = ConfigDict(
        {
            # or "npz", "hf", "tfds", "package.module:function", see launch/data.py
            "source": "folder",
            "name": "xrays",
            "path": "",  # change: the folder
            "class_names": ("normal", "pneumonia"),  # change: the texts of the column "label"
            "parts": {
                "public": "public.csv",  # for pre-training
                "private": "private.csv",
                "sources": _SITES,  # one hospital per file. They recalibrate the model.
                "stream": ("stream_0.csv", "stream_1.csv"),  # in the order of arrival
                "client": "client.csv",
                "test": "test.csv",  # public, to measure quality
            },
            "in_memory": True,  # False reads images whenever they are needed
            "prepare": False,
            # of privacy: one record of a part, or one owner of records, such as "patient"
            "unit": "image",
            **PEOPLE,
            # the column of the CSV files with the owner of each image, if a unit may have several
            "group": "",
            "max_records": 1,  # with group: the largest number of images of one owner that count
        }
    )
    with config.unlocked():
        # change: public numbers
        config.model.preprocessing = ConfigDict({"size": 28, "mean": (0.5,), "std": (0.25,)})
    config.references.show = False  # a model without privacy must not be published
    config.augmentation.crop_padding = 2
    config.adapt.update({"batch_size": 64, "learning_rate": 0.1, "momentum": 0.9})
    config.split.directions = 2  # at most the number of classes
    config.finetune.batch_size, config.finetune.physical_batch_size = 512, 0
    return config
