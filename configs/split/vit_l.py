r"""Split Adaptation at the paper's size: ViT-L/16 of ImageNet, for CIFAR-100, Places365 or
DomainNet.

    python -m launch.split --config configs/split/vit_l.py:cifar100 --workdir workdir/split_vit_l \
        --config.model.checkpoint=vit_large_patch16_224.safetensors \
        --config.auxiliary.model.checkpoint=dinov2_large/model.safetensors

The second checkpoint is Hugging Face's facebook/dinov2-large with its preprocessor_config.json. Its
last third is the auxiliary backend of Table 3. Offsite tuning drops layers at random, as the paper
does. ":places365" and ":domainnet" choose the client's data. configs/split/deit_b.py and
configs/split/swin_l.py have other models. It needs a checkpoint (see
`jaxdp.models.load_checkpoint`), ImageNet's validation images and the client's data prepared by
TFDS, and a GPU. Hyperparameters are the paper's where it states them. Not run by us: we had no GPU.

5 images of each of 100 classes make 32,500 copies of 197 x 1024 numbers. They are made batch by
batch here. As files they would be 26 GB. """

from ml_collections import ConfigDict

from configs.split import digits

CLIENTS = {
    # Data set, training and test split. DomainNet's smallest domain is Clipart.
    "cifar100": ("cifar100", "train", "test"),
    # all of it would be 271 GB at this size
    "places365": (
        "places365_small",
        "train[:2%]",
        "validation[:20%]",
    ),
    "domainnet": ("domainnet/clipart", "train", "test"),
}


def get_config(client: str = "cifar100") -> ConfigDict:
    if client not in CLIENTS:
        raise ValueError(f"the client's data must be one of {', '.join(CLIENTS)}, got {client!r}.")
    name, train, test = CLIENTS[client]
    config = digits.get_config()
    images = {"source": "tfds", "data_dir": "", "prepare": True, "classes": (), "images": 0}
    config.data = {
        # The paper says "test set", which has no public labels.
        "server": {**images, "name": "imagenet2012", "split": "validation"},
        "pretrain_fraction": 0.0,
        "server_images": 5000,
        # Images are held as float32: 10,000 of them are 6 GB.
        "client": {**images, "name": name, "split": train, "images": 20000},
        "client_test": {**images, "name": name, "split": test, "images": 5000},
        "tuning": {**images, "name": "food101", "split": "validation", "rotate": 0},
        "auxiliary": {**images, "name": "", "split": ""},
        "split_seed": 0,
    }
    config.model = {
        "name": "vit_l16",
        "num_classes": 1000,
        "options": {},
        "checkpoint": "",
        "naming": "auto",
        "preprocessing": {},  # from the checkpoint
    }
    config.auxiliary.model = {**config.model.to_dict(), "name": "dinov2_l14"}
    config.methods = tuple(
        "Offsite tuning, random layers" if name == "Offsite tuning" else name
        for name in config.methods
    )
    config.ablation.rows = (*config.ablation.rows, "amplitude exchange for Hilbert")
    config.augmentations = ("original", "Hilbert augmentation", "amplitude exchange")
    # two linear maps, whose width the paper does not state
    config.head_hidden = 1024 if client == "places365" else 0
    config.server.learning_rate = 1e-5
    config.client.laplace_unit = "representation"
    config.adaptation.epochs = 100
    config.sweeps.update(digits.PAPER_SWEEPS)
    config.attack.client_images = 10  # their copies take 520 MB
    config.learning_rates = (1e-5, 1e-4, 1e-3, 1e-2)
    config.private.update({"dimensions": (8, 32), "shots": (10, 50)})
    return config
