"""Embeddings of texts by a public language model: python -m launch.embeddings --config
configs/predict/embeddings.py --workdir workdir/embeddings.

The workdir gets embeddings.npz, which configs/predict/imdb.py:embeddings reads. Each vector depends
on one text and on the public model, so a certificate for vectors holds for texts. The vectors of
private texts are as private as the texts.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.data import from_texts
from jaxdp.files import write_durably
from jaxdp.models import Pretrained, text_embeddings

from . import data, frame, lm, models
from .study import Program

FILE = "embeddings.npz"
# The names of the parts in the file.
_NAMES = {"private": "train", "test": "test", "public": "public"}

PROGRAM = Program(name="embeddings")


def experiment(config: Any, workdir: str | None, *, dry_run: bool = False) -> None:
    """Writes the embeddings of the texts of a config."""
    root = None if workdir is None else pathlib.Path(workdir)
    if root is not None:
        frame.check_same_config(PROGRAM.name, config, root)
    encode, _, vocabulary = lm.tokenizer_of(config.data)
    lm.check_model(config, vocabulary)
    if not config.model.checkpoint:
        raise ValueError(
            "config.model.checkpoint must be a file of a public model, got ''. A model without "
            "one has no parameters."
        )
    network = models.network(config.model)
    most = network.model.positions
    if not 2 <= config.embedding.length <= most:
        raise ValueError(
            f"config.embedding.length must lie in [2, {most}], the positions of the model, got "
            f"{config.embedding.length}."
        )
    specs = data.specs(config.data, *_NAMES, source="tfds")
    arrays: dict[str, Any] = {}
    for role, name in _NAMES.items():
        is_labelled = role != "public"
        texts, labels = data.texts(specs[role], config.data.field, labelled=is_labelled)
        print(f"{len(texts)} {role} texts ({specs[role].title}).", flush=True)
        if dry_run:
            continue
        arrays[f"{name}_features"] = embed(
            network, texts, encode=encode, vocabulary=vocabulary, **config.embedding
        )
        if is_labelled:
            arrays[f"{name}_labels"] = labels
    if dry_run or root is None:
        return
    with frame.bind(PROGRAM.name, config, root):
        write_durably(root / FILE, lambda file: np.savez(file, **arrays))
    print(f"{root / FILE}: vectors of {network.model.width} numbers.")


def embed(
    network: Pretrained,
    texts: Sequence[str],
    *,
    encode: Callable[[str], Sequence[int]] | None,
    vocabulary: int,
    length: int,
    pooling: str,
    batch_size: int,
) -> np.ndarray:
    """Returns the vectors of texts, float32 [n, D].

    Args:
      network: A language model with parameters.
      texts: The texts. Tokens behind the first `length` are cut.
      encode, vocabulary: The tokenizer and its size, as in `lm.tokenizer_of`.
      length: The largest number of tokens.
      pooling: As in `jaxdp.models.text_embeddings`.
      batch_size: The number of texts that are computed together.
    """
    source = from_texts(texts, length=length, encode=encode, num_classes=vocabulary)
    compute = functools.partial(_vectors, network, pooling, network.params)
    return models.outputs(compute, source, batch_size=batch_size, label="embeddings")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _vectors(network: Pretrained, pooling: Any, params: Any, batch: Any) -> jax.Array:
    # An argument, so that the program does not contain the parameters.
    with_params = dataclasses.replace(network, params=params)
    return text_embeddings(with_params, batch["tokens"], pooling=pooling)


if __name__ == "__main__":
    frame.main(experiment)
