r"""Private recalibration of a ViT-B/16 on ImageNet-C at severity 5: Tables 1 and 6, Figure 1 of Luo
et al. 2020.

    python -m launch.recalibrate --config configs/recalibration/imagenet.py \
        --workdir workdir/recalibrate_imagenet \
        --config.data.data_dir=/path/to/tfds \
        --config.model.checkpoint=/path/to/vit_base_patch16_224/model.safetensors

":convnext" takes a ConvNeXt-T instead. ":resnet50" trains the paper's ResNet-50 on the training
images by its recipe: SGD for 90 epochs with a learning rate of 0.1 that decays as a cosine. The
paper is silent on the rest. Momentum 0.9, weight decay 1e-4 and batches of 256 are those of He et
al. (2016). Crops are of padded images in place of random sizes, and the network has GroupNorm in
place of BatchNorm. With --config.model.checkpoint and --config.model.options.norm=frozen_batch it
reads a published ResNet-50 with BatchNorm.

A run needs the 15 sets `imagenet2012_corrupted/{corruption}_5`
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
    elif variant == "resnet50":
        _train_as_published(config)
    elif variant != "vit":
        raise ValueError(f"the variant must be 'vit', 'convnext' or 'resnet50', got {variant!r}.")
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


def _train_as_published(config: ConfigDict) -> None:
    """The ResNet-50 of section E.1, with He et al. (2016) where it is silent."""
    config.data.parts.public = "train"
    config.model.update(
        name="resnet50",
        options={"norm": "group"},
        preprocessing={"size": 224, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    )
    config.train.update(
        steps=90 * 5005,  # 90 epochs of 1,281,167 images
        batch_size=256,
        learning_rate=0.1,
        optimizer="sgd",
        optimizer_options={"sgd": {"momentum": 0.9, "nesterov": False}},
        schedule="cosine",
        weight_decay=1e-4,
        crop_padding=28,
    )
