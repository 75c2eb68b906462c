"""Embeddings of texts: from a public checkpoint to the features of private prediction."""

import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.predict import embeddings as embedding_config
from configs.predict import imdb
from jaxdp import models
from jaxdp.data import apart
from launch import data, embeddings, features, frame
from tests.models.test_language import load, make_checkpoints

WORDS = ("good", "bad", "film", "plot", "was", "the", "a", "very", "not")
TEXTS = {
    "train": ["the film was very good", "not a good plot", "bad", "the plot was bad"] * 4,
    "test": ["a good film", "a very bad film", "the plot", "unknown"],
    "unsupervised": ["the film", "a plot", "not very good", "was the film a bad film", "film"],
}


def read(spec, field, *, labelled=True):
    """Stands for the texts of TFDS."""
    assert field == "text" and labelled == (spec.part != "unsupervised")
    texts = TEXTS[spec.part]
    return texts, np.arange(len(texts), dtype=np.int32) % 2


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Returns the config of a tiny GPT-2 as a publisher distributes it."""
    monkeypatch.setattr(apart, "check_disjoint", lambda parts: None)  # TFDS is not there
    tokenizers = pytest.importorskip("tokenizers", reason="pip install .[text]")
    folder = tmp_path / "gpt2"
    shutil.copytree(make_checkpoints.LANGUAGE / "hf_gpt2", folder)
    numbers = {word: k for k, word in enumerate(("<unk>", *WORDS))}
    numbers |= {f"word{k}": k for k in range(len(numbers), 31)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = embedding_config.get_config()
    config.data.parts.test = "test"
    config.data.tokenizer = str(folder / "tokenizer.json")
    sizes = {"positions": 16, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
    config.model.options = sizes
    config.model.update(num_classes=31, checkpoint=str(folder / "model.safetensors"))
    config.embedding.update(length=4, batch_size=3)
    return config


@pytest.mark.slow
def test_texts_become_vectors_that_private_prediction_reads(config, tmp_path):
    with mock.patch.object(data, "texts", read):
        embeddings.experiment(config, str(tmp_path / "run"))
    file = tmp_path / "run" / embeddings.FILE
    arrays = dict(np.load(file))
    assert {name: array.shape for name, array in arrays.items()} == {
        "train_features": (16, 8),
        "train_labels": (16,),
        "test_features": (4, 8),
        "test_labels": (4,),
        "public_features": (5, 8),
    }
    # The vector of one text alone, cut at four tokens: "was the film a". A twin with five tokens
    # has another one.
    tokens = jnp.array([[5, 6, 3, 7, -1], [5, 6, 3, 7, 2]])
    alone, longer = jax.jit(models.text_embeddings, static_argnums=0)(load("hf_gpt2"), tokens)
    np.testing.assert_allclose(arrays["public_features"][3], alone, rtol=1e-4, atol=1e-5)
    assert np.abs(arrays["public_features"][3] - longer).max() > 0.01

    predict = imdb.get_config("embeddings").data
    predict.path = str(file)
    predict.features.dimensions = 3
    task = features.read(predict).compute(tmp_path / "none")
    assert (len(task.train), len(task.test), task.train.num_classes) == (16, 4, 2)
    assert "embeddings of embeddings.npz, centred" in task.provenance
    predict.features = {}  # as the published network reads them
    plain = features.read(predict).compute(tmp_path / "none").test
    np.testing.assert_array_equal(plain.gather(range(4))["features"], arrays["test_features"])


def test_a_dry_run_counts_the_texts_and_writes_nothing(config, tmp_path, capsys):
    with mock.patch.object(data, "texts", read):
        embeddings.experiment(config, str(tmp_path / "run"), dry_run=True)
    assert "16 private texts (imdb_reviews/train)." in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_the_workdir_of_another_study_stays_as_it_is(config, tmp_path):
    root = tmp_path / "run"
    with frame.bind("finetune", config, root):
        bound = (root / "config.json").read_bytes()
    unread = mock.patch.object(data, "texts", side_effect=AssertionError("read"))
    for dry_run in (True, False):
        with unread, pytest.raises(ValueError, match="belongs to the study 'finetune', not to"):
            embeddings.experiment(config, str(root), dry_run=dry_run)
    assert (root / "config.json").read_bytes() == bound


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.checkpoint", "", "config.model.checkpoint must be a file of a public model"),
        ("embedding.length", 17, r"config.embedding.length must lie in \[2, 16\]"),
        ("model.num_classes", 30, "config.data.tokenizer=.* has 31 tokens"),
    ],
)
def test_mistakes_are_named_before_a_text_is_read(config, field, value, message):
    config.update_from_flattened_dict({field: value})
    unread = mock.patch.object(data, "texts", side_effect=AssertionError("read"))
    with unread, pytest.raises(ValueError, match=message):
        embeddings.experiment(config, None)
