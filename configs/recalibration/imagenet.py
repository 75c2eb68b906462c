r"""Private recalibration of a ViT-B/16 on ImageNet-C at severity 5: Tables 1 and 6, Figure 1 of Luo
et al. 2020.

    python -m launch.recalibrate --config configs/recalibration/imagenet.py \
        --workdir workdir/recalibrate_imagenet \
        --config.data.data_dir=/path/to/tfds \
        --config.model.checkpoint=/path/to/vit_base_patch16_224/model.safetensors

":convnext" takes a ConvNeXt-T instead. It needs the 15 sets `imagenet2012_corrupted/{corruption}_5`
and the validation images of `imagenet2012`, prepared by TFDS, and a checkpoint in the naming of
timm, Hugging Face or augreg. It also needs an accelerator. Each set of 50,000 images is read once,
and a batch at a time.

Expected, from the paper with a ResNet-50, median / mean ECE: none .1343/.1334, one source
.0657/.0700, histogram binning .0656/.0787, ECE-T .0684/.0739, NLL-T .0597/.0624, Acc-T .0289/.0325.
Not run by us: we do not have this data. """

from ml_collections import ConfigDict

from configs.recalibration import cifar10


def get_config(variant: str = "vit") -> ConfigDict:
    config = cifar10.get_config()
    config.data.update(
        name="imagenet2012",
        parts={"public": "", "test": "validation"},  # the classifier comes from a checkpoint
        corrupted_name="imagenet2012_corrupted",
        prepare=True,
        in_memory=False,  # a set of 50,000 photographs would take 7.5 GB
    )
    config.model = {
        "name": "vit_b16",
        "num_classes": 1000,
        "options": {},
        "checkpoint": "",
        "naming": "auto",
        "preprocessing": {"size": 224, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
    }
    if variant == "convnext":
        config.model.update(
            name="convnext_tiny",
            preprocessing={
                "size": 224,
                "mean": (0.485, 0.456, 0.406),
                "std": (0.229, 0.224, 0.225),
            },
        )
    elif variant != "vit":
        raise ValueError(f"the variant must be 'vit' or 'convnext', got {variant!r}.")
    config.sweep.sources = {"values": tuple(range(100, 2001, 100)), "samples": 10, "epsilon": 1.0}
    config.sweep.samples = {"values": tuple(range(5, 101, 5)), "sources": 100, "epsilon": 1.0}
    config.sweep.epsilon = {
        "values": tuple(k / 5 for k in range(1, 11)),
        "sources": 100,
        "samples": 50,
    }
    config.sweep.centre = {"sources": 100, "samples": 50, "epsilon": 1.0}
    config.figures.reliability_shift = "fog"
    return config
