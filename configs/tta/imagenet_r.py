r"""Test-time adaptation to ImageNet-R's paintings, sketches and toys, private and not.

    python -m launch.adapt --config configs/tta/imagenet_r.py --workdir workdir/tta_imagenet_r \
        --config.data.data_dir=/path/to/tfds \
        --config.model.checkpoint=/path/to/vit_base_patch16_224/model.safetensors

The model is a ViT-B/16, with ":convnext" a ConvNeXt-T. Rates and clip norms are chosen from the
paper's grid, on the held-out corruptions of 500 other images. A stream of one domain is the same
with and without resets between domains.

It needs `imagenet_r` and clean images of `imagenet2012`, prepared by TFDS. The model predicts
ImageNet-R's 200 classes only, and every method sees 200 logits. Each photograph comes once. Not run
by us: we do not have this data. """

from ml_collections import ConfigDict

from configs.tta import imagenet_c


def get_config(model: str = "vit") -> ConfigDict:
    variants = {"vit": "continual", "convnext": "convnext"}
    if model not in variants:
        raise ValueError(f"the model must be 'vit' or 'convnext', got {model!r}.")
    config = imagenet_c.get_config(variants[model])
    parts = {"public": "imagenet2012/train[:2048]", "test": "test"}
    config.data.update(
        name="imagenet_r", parts=parts, corrupted_name="", corruptions=("clean",), images=29_500
    )
    config.model.classes = "imagenet_r"
    config.hyper_parameters = {}  # those of ImageNet-C are for another stream
    return config
