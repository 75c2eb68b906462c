r"""GPT-2 embeddings of IMDB reviews, the inputs of the paper's text task.

    python -m launch.embeddings --config configs/predict/embeddings.py \
        --workdir workdir/imdb_embeddings --config.data.data_dir=/path/to/tfds \
        --config.model.checkpoint=GPT2/model.safetensors --config.data.tokenizer=GPT2/tokenizer.json

configs/predict/imdb.py:embeddings and :published read the file that it writes. GPT2 is the folder
of the public model as its publisher distributes it. ":sst2" embeds the phrases of SST-2 instead.
The tokenizer needs `pip install ".[text]"`.

As in the paper's public code, a text is cut at 60 tokens, and its vector is the last hidden state
at its last token, 768 numbers. That code first trains GPT-2 on some of the private reviews. Here
it stays as published, because such training would have to be paid for. That code also puts the
padding before a text, which shifts the positions of short texts. Here it is behind the text.

Not run by us with the public checkpoint. The tests run it with a tiny one.
"""

from ml_collections import ConfigDict

_TEXTS = {
    "imdb": {
        "name": "imdb_reviews",
        "field": "text",
        "parts": {"private": "train", "test": "test[:5000]", "public": "unsupervised"},
    },
    # The texts without labels are declared public.
    "sst2": {
        "name": "glue/sst2",
        "field": "sentence",
        "parts": {"private": "train", "test": "validation", "public": "test"},
    },
}


def get_config(texts: str = "imdb") -> ConfigDict:
    if texts not in _TEXTS:
        raise ValueError(f"the variant must be one of {sorted(_TEXTS)}, got {texts!r}.")
    return ConfigDict(
        {
            "data": {**_TEXTS[texts], "data_dir": "", "tokenizer": "tokenizer.json"},
            "model": {
                "name": "gpt2",
                "num_classes": 50_257,
                "options": {},
                "preprocessing": (),
                "checkpoint": "model.safetensors",
            },
            "embedding": {
                "length": 60,  # tokens of a text. The rest is cut
                "pooling": "last",  # or "mean"
                "batch_size": 32,  # texts that are computed together
            },
        }
    )
