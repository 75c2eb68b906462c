r"""DP LoRA fine-tuning of a public language model that is read from safetensors.

    python -m launch.lm --config configs/lm/lora.py:smollm2_135m --workdir workdir/lora \
        --config.model.checkpoint=FOLDER/model.safetensors \
        --config.data.tokenizer=FOLDER/tokenizer.json \
        --config.data.path=TEXTS

FOLDER is a public model as its publisher distributes it. What follows the colon is its name in
`jaxdp.models.create`: "gpt2" (the default), "gpt2_medium", "smollm2_135m" or "tinyllama_1b". TEXTS
is a folder with private.txt and test.txt, one text per line. The tokenizer needs `pip install
".[text]"`.

The factors of the four dense layers of attention are trained, in bfloat16 compute, and everything
else is public. The saved model has W + A B in the place of W.

Not run by us with a public checkpoint. The tests run it with a tiny one.
"""

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, TUNING, clipping, optimizer
from configs.people import PEOPLE

VOCABULARIES = {
    "gpt2": 50_257,
    "gpt2_medium": 50_257,
    "smollm2_135m": 49_152,
    "tinyllama_1b": 32_000,
}


def get_config(name: str = "gpt2") -> ConfigDict:
    if name not in VOCABULARIES:
        raise ValueError(
            f"the config takes one of {', '.join(VOCABULARIES)} after the colon, got {name!r}."
        )
    return ConfigDict(
        {
            "init_seed": 0,  # of A. B starts at zero
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "references": False,  # also train without privacy
            "data": {
                "source": "lines",  # or "tfds", or "bundled"
                "name": "texts",
                "data_dir": "",
                "path": "",
                "field": "sentence",  # tfds: the field with the text
                "split_seed": 0,
                "parts": {"private": "private.txt", "test": "test.txt"},
                "tokenizer": "tokenizer.json",
                "length": 129,  # tokens per record, public. Longer texts are cut
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "adjacency": "add_remove",
            },
            "model": {
                "name": name,
                "num_classes": VOCABULARIES[name],
                "options": {"dtype": "bfloat16", "remat": False},
                "preprocessing": (),
                **TUNING,
                "checkpoint": "model.safetensors",
                "trainable": "lora",
                "lora": {"rank": 8, "layers": ".*attention/(query|key|value|out)"},
            },
            "no_privacy": {"steps": 200, "batch_size": 64, "learning_rate": 1e-3},
            "private": {
                "method": "dp_sgd",
                "method_options": METHOD_OPTIONS,
                "accountant": "auto",
                "epsilon": 8.0,
                "delta": 1e-5,
                "batch_size": 512,
                "physical_batch_size": 16,
                "steps": 200,
                **clipping(1.0),
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 1e-3,
                **optimizer(momentum=0.0),
                "optimizer": "adam",
                "schedule": "warmup",
                "augmult": 0,
                "ema_decay": 0.0,
                "ascent_radius": 0.0,
                "checkpoint_every": 50,
                "evaluate_every": 0,  # 0 is with every checkpoint
            },
            "generation": {"prompts": ("The",), "length": 64, "temperature": 0.7},
        }
    )
