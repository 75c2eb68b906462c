"""The launcher of language models: bytes, LoRA from a checkpoint, a crash, and mistakes before
anything is spent."""

import functools
import re
import shutil
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from scipy import special

from jaxdp import models
from jaxdp.data import from_arrays
from jaxdp.finetune import RandomRuns
from jaxdp.finetune.evaluate import count_correct
from jaxdp.privacy import Ledger
from jaxdp.privacy.events import composition, describe
from launch import frame, lm, release, tune
from launch.tune import with_grid
from tests.launch import tiny

CHECKPOINTS = Path(__file__).resolve().parents[1] / "golden" / "language"


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A folder as a publisher distributes it: a Llama with 31 tokens and its tokenizer.json. Two
    files of texts."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install .[text]")
    folder = tmp_path_factory.mktemp("public") / "llama"
    shutil.copytree(CHECKPOINTS / "hf_llama", folder)
    known = ("<unk>", "good", "bad", "film", "plot", "was", "the", "a", "very", "not")
    words = {
        word: k for k, word in enumerate([*known, *(f"word{k}" for k in range(len(known), 31))])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = [
        f"the {what} was {how} {verdict}"
        for what in ("film", "plot")
        for how in ("very", "not", "a")
        for verdict in ("good", "bad")
    ]
    for part in ("private", "test"):
        (folder / f"{part}.txt").write_text("\n".join(texts * 4))
    (folder / "short.txt").write_text("good\n\nbad\n")
    return folder


def steps_charged(root, dataset):
    with Ledger(root / "ledger.sqlite") as ledger:
        return sum(composition(ledger.events(dataset)[None]).values())


@pytest.mark.slow
def test_lora_of_a_checkpoint_continues_after_a_crash_and_belongs_to_its_config(
    public, tmp_path, capsys
):
    root, judged, study = tmp_path / "run", lm.bits, tiny.opened_once(lm.STUDY)
    with (
        mock.patch.object(lm, "bits", side_effect=[3.0, KeyboardInterrupt]),
        pytest.raises(KeyboardInterrupt),
    ):
        # after the first checkpoint of two
        frame.run(study, tiny.lora(public, references=True), root)
    assert steps_charged(root, "texts/private") == 4  # the next two were reserved
    with mock.patch.object(lm, "bits", side_effect=judged):
        result = frame.run(study, tiny.lora(public, references=True), root)
    assert steps_charged(root, "texts/private") == 4  # nothing is paid twice
    assert 7.0 < result["epsilon"] <= 8.0 and result["bits"] != result["untrained"]
    assert result["no_privacy"] != result["untrained"]
    assert all(text.startswith("the film") for text in result["samples"])
    config = tiny.lora(public)
    network = models.load_checkpoint(
        public / "model.safetensors", model=lm.models.network(config.model).model
    )
    # W + A B has the form of W
    served = models.load_params(root / "params.safetensors", like=network.params)
    changed = jax.tree.map(
        lambda a, b: (np.asarray(a) != np.asarray(b)).any(), served, network.params
    )
    assert changed["blocks"]["attention"]["query"]["kernel"] and not changed["embed"]["embedding"]
    released = models.load_released(release.write(root))
    (guarantee,) = released.card["guarantees"]
    assert guarantee["name"] == "texts/private" and str(tmp_path) not in str(released.card)
    tokens = np.array([[1, 5, 6, 9, *[-1] * 7]], np.int32)
    after = special.softmax(jax.jit(network.apply_fn)(served, tokens), axis=-1)
    np.testing.assert_allclose(released(tokens), after, atol=1e-6)
    released_again = functools.partial(release.write, root, tmp_path / "again")
    file = root / "params.safetensors"
    content = file.read_bytes()
    models.save_params(file, jax.tree.map(lambda leaf: -leaf, served))  # as of another run
    with pytest.raises(ValueError, match=r"is not the file that the run wrote"):
        released_again()
    file.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"Or delete result.json and cells/private/row.json"
    ):
        released_again()
    again = functools.partial(frame.run, study, tiny.lora(public, references=True), root)
    assert again() == result and not file.exists()
    assert "params.safetensors is not in the workdir" in capsys.readouterr().out
    for name in ("result.json", "cells/private/row.json"):
        (root / name).unlink()
    assert again() == result and file.read_bytes() == content
    assert steps_charged(root, "texts/private") == 4
    released_again()
    with pytest.raises(ValueError, match=r"another model.lora.rank. Use a new workdir"):
        frame.run(lm.STUDY, tiny.lora(public, references=True, model__lora__rank=3), root)


def test_a_line_is_one_record_whatever_it_holds(tmp_path):
    lines = ["one\u2028text", "another\x0cone", "a\x85third\x1cone\x0b", "a\rfourth", "", "last"]
    for ending, end in (("\n", ""), ("\r\n", "\r\n")):
        parts = {"private": "private.txt", "test": "test.txt"}
        for name in parts.values():
            (tmp_path / name).write_bytes((ending.join(lines) + end).encode())
        config = types.SimpleNamespace(source="lines", path=str(tmp_path), parts=parts)
        assert lm._texts(config) == dict.fromkeys(parts, lines)


def test_test_texts_are_read_until_one_has_two_tokens():
    tokens = np.full((3000, 4), -1)
    tokens[:, 0] = 1
    for place, read in ((0, 256), (256, 512), (2999, 3000), (None, 3000)):
        texts = tokens.copy()
        if place is not None:
            texts[place, 1] = 2
        source = from_arrays(tokens=texts, num_classes=16, name="texts")
        rows = []

        def gather(some, source=source, rows=rows):
            rows.extend(some)
            return source.gather(some)

        counted = mock.MagicMock(gather=gather, __len__=lambda _: 3000)
        assert lm._has_target(counted) == (place is not None) and len(rows) == read


def test_texts_without_a_tokenizer_are_bytes(tmp_path):
    opened = lm.STUDY.open(tiny.lm(), tmp_path)
    assert len(opened.private) > 100 and len(opened.test) > 30 and opened.private.num_classes == 256
    [prompt] = opened.prompts
    assert prompt == [0, *b"the film"] and opened.decode([*prompt, 100]) == "the filmd"
    assert not list(tmp_path.iterdir())


def test_a_charged_score_counts_the_middle_token_of_each_text():
    texts = np.array([[5, 6, 7, 8, -1], [1, 2, 9, -1, -1], [4, -1, -1, -1, -1]])
    source = lm.middle_tokens(from_arrays(tokens=texts, num_classes=16, name="texts"))
    assert source.gather(np.arange(3))["label"].tolist() == [7, 2, 0]  # half of 4, 3 and 1
    rising = types.SimpleNamespace(
        apply_fn=lambda params, tokens: jax.nn.one_hot(tokens + params, 16)
    )
    predict = functools.partial(lm._logits_of_middle, rising)
    # The next token is one larger in both texts, and the twin says two larger.
    assert [count_correct(predict, params, source) for params in (1, 2)] == [2, 0]


@pytest.mark.slow
def test_a_search_of_a_language_model_is_one_charge(tmp_path, monkeypatch):
    monkeypatch.setattr(RandomRuns, "draw", lambda runs, secret: 1)
    config = with_grid(tiny.lm(), "learning_rate=0.001,0.003")
    config.tune.score = "public"
    study = tune.study(lm._subject)
    with pytest.raises(ValueError, match=r"tune.score='public' needs public examples"):
        study.open(config, tmp_path)
    config.data.parts.update({"private": 0.7, "test": 0.1})
    with config.unlocked():
        config.data.parts.public = 0.2
    subject = study.open(config, tmp_path).subject
    start = subject.start(None)
    texts = lm._read(config).public
    assert subject.scores["public"]().of(start, b"") == -lm.bits(
        lm._read(config).network, start, texts
    )
    config.tune.score = "charged"
    result = lm.experiment(config, str(tmp_path / "run"))
    assert 7.9 < result["epsilon"] <= 8.0 and result["candidates"] == 2
    assert result["bits"] != result["before"] > 7 and 0 <= result["score"] <= 1
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        [event] = ledger.events(result["dataset"]).values()
    assert event.mean == 8.0 and "Gaussian(20)" in describe(event)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "a private search" in report and "What an attacker must miss" in report


# A field, its value, and the message. Before a blank, the message names the field.
MISTAKES = [
    (
        "data.tokenizer",
        "bytes",
        r"tokenizer='bytes' has 256 tokens, .*num_classes=31 .* Give the tokenizer",
    ),
    ("data.tokenizer", "none.json", r" must be 'bytes' or the tokenizer.json .*'none.json'"),
    (
        "data.tokenizer",
        "private.txt",
        r"private.txt is damaged.* Give the tokenizer.json that lies beside",
    ),
    (
        "model.num_classes",
        2000,
        r"has 31 tokens, and config.model.num_classes=2000 is the vocabulary",
    ),
    ("model.num_classes", 32, r"(?s)needs a model with num_classes=31, not 32"),
    ("data.length", 18, r" must be at most 17, the model's positions .*got 18. Cut the texts"),
    ("generation.length", 17, r" must be at most 16.*got 17"),
    ("generation.prompts", ("",), r" must have 1 to 15 tokens each.*got 0 in ''"),
    ("model.lora.layers", ".*atention", r" must match .*'.\*atention'. There are b"),
    ("model.trainable", "head", r"config.model.trainable='head' matches no parameter.*lora/blocks"),
    ("model.lora.rank", -1, r" must be at least 1, got -1"),
    ("model.checkpoint", "", r"config.model.lora.rank must be 0 without config.model.checkpoint"),
    ("model.checkpoint", "no.safetensors", r"there is no checkpoint at .*no.safetensors"),
    ("data.parts.test", "none.txt", r" must be a file of texts, got '.*none.txt'"),
    ("data.parts.test", "short.txt", r" must have a text of two tokens"),
    (
        "data.parts.test",
        "./private.txt",
        r" must be another file than that of private, got '.*private",
    ),
    ("data.source", "npz", r" must be 'tfds', 'lines' or 'bundled', got 'npz'"),
    ("model.name", "mlp", r" has 'mlp', which is not one of lm_tiny, gpt2"),
]


@pytest.mark.parametrize(("field", "value", "message"), MISTAKES)
def test_mistakes_are_named_before_anything_is_spent(public, field, value, message, tmp_path):
    value = str(public / value) if (field, value) == ("data.tokenizer", "private.txt") else value
    config = tiny.lora(public, **{field: value})
    named = rf"config\.{re.escape(field)}" if message.startswith(" ") else ""
    with pytest.raises((ValueError, FileNotFoundError), match=named + message):
        frame.run(lm.STUDY, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_text_that_leaves_the_vocabulary_is_refused_without_naming_it():
    with pytest.raises(
        ValueError, match=r"encode returns tokens outside of 0..3. Set num_classes"
    ) as error:
        lm.from_texts(["secret"], length=4, encode=lambda text: [1, 7], num_classes=4)
    assert "secret" not in str(error.value) and "7" not in str(error.value)


def test_bits_count_known_tokens_only():
    """A twin that counts padding has 1.4 bits here."""
    source = lm.from_texts(
        ["a", "abcd"], length=5, encode=lambda text: [ord(c) - 97 for c in text], num_classes=4
    )
    network = models.Pretrained(None, {}, None)
    with mock.patch.object(
        models.Pretrained, "apply_fn", lambda self, params, x: np.zeros((*x.shape, 4), np.float32)
    ):
        assert lm.bits(network, {}, source, batch_size=2) == pytest.approx(2.0)
