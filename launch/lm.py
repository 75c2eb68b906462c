"""Private training of a language model: python -m launch.lm --config configs/lm/bytes.py --workdir
workdir/lm.

--tune searches the settings of the training (launch/tune.py). Its public score is minus the bits
per token of `config.data.parts.public`. Its charged score is the noisy share of the private texts
whose middle token the model predicts.
"""

import functools
import importlib.resources
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import finetune
from jaxdp.data import DataSpec, Examples, from_arrays, from_texts, pad_to_physical
from jaxdp.data.order import shuffled
from jaxdp.files import optional, understood
from jaxdp.finetune.scores import Score
from jaxdp.models import LanguageModel, Pretrained, generate, merge_lora, save_params
from jaxdp.models.registry import MODELS
from jaxdp.privacy import Account
from jaxdp.report import format_table

from . import data, frame, models, plans, results, trainers, tune
from .study import PrivateSet

Params = Any
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]
BYTES = "bytes"
# Rows of the embedding beyond the tokenizer's vocabulary that a publisher may have added, so that
# sizes are round.
_SPARE = 1024
_READ = 256  # texts that are read together


class Model(NamedTuple):
    """A cell: the private model, or the one without privacy."""

    model: str


class Opened(NamedTuple):
    """The records as tokens, the model, and what translates tokens.

    Attributes:
      spec: Of the private texts: their terms in the ledger.
      public: PUBLIC texts, for the score of a search, or None.
      chosen: As `Task.chosen` in launch/tasks.py.
      prompts: Those of the config, as tokens.
      decode: Token ids to text.
      trainer: That of the config's `private` part. A search has none.
    """

    spec: DataSpec
    public: Examples | None
    private: Examples
    test: Examples
    network: Pretrained
    chosen: Callable[[str, Any], bool] | None
    prompts: list[list[int]]
    decode: Decode
    trainer: Any = None

    def trainer_of(self, private: Any) -> finetune.PrivateTrainer:
        """Returns the trainer of the `private` part of a config."""
        trainer: finetune.PrivateTrainer = trainers.make(
            private,
            self.network,
            self.private,
            self.public,
            self.spec,
            unit=self.spec.unit,
            trainable=self.chosen,
        )
        return trainer

    @property
    def private_set(self) -> PrivateSet:
        """The private texts, for which a ledger counts."""
        return PrivateSet(self.private.name, self.private, self.spec.is_public)

    def terms(self, private: Any) -> dict[str, Any]:
        """Returns the terms of the texts in a ledger, with the budget of the `private` part."""
        budget = results.only(private, "epsilon", "delta")
        return self.spec.terms | {"records": len(self.private)} | budget


def _text_of_bytes(ids: Sequence[int]) -> str:
    text = bytes(i for i in ids if i > 0)
    return text.decode("utf-8", "replace")


def tokenizer_of(config: Any) -> tuple[Encode | None, Decode, int]:
    """Returns (encode, decode, size of the vocabulary) of the data part of a config."""
    if config.tokenizer == BYTES:
        return None, _text_of_bytes, 256
    path = pathlib.Path(config.tokenizer)
    if not path.is_file():
        raise FileNotFoundError(
            "config.data.tokenizer must be 'bytes' or the tokenizer.json of the checkpoint, got "
            f"{config.tokenizer!r}, which is no file."
        )
    library = optional("tokenizers", "text")
    with understood(path, "Give the tokenizer.json that lies beside the checkpoint."):
        tokenizer = library.Tokenizer.from_file(str(path))

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text).ids
        return ids

    return encode, tokenizer.decode, tokenizer.get_vocab_size()


def _texts(config: Any) -> dict[str, list[str]]:
    """Returns the private and the test texts of the data part of a config, one per record."""
    if config.source not in _SOURCES:
        known = "'tfds', 'lines' or 'bundled'"
        raise ValueError(f"config.data.source must be {known}, got {config.source!r}.")
    texts = _SOURCES[config.source](config)
    for role in texts:
        if not texts[role]:
            raise ValueError(f"config.data.parts.{role} has no text.")
    return texts


def _texts_of_tfds(config: Any) -> dict[str, list[str]]:
    texts = {}
    for role, spec in data.specs(config, *_roles(config)).items():
        texts[role], _ = data.texts(spec, config.field, labelled=False)
    return texts


def _lines(config: Any) -> dict[str, list[str]]:
    """Returns the lines of a file for each role."""
    texts = {}
    role_of: dict[pathlib.Path, str] = {}
    for role in _roles(config):
        if not isinstance(config.parts[role], str):
            raise ValueError(
                f"config.data.parts.{role} must be the name of a file of texts, got "
                f"{config.parts[role]!r}."
            )
        path = pathlib.Path(config.path, config.parts[role])
        if not path.is_file():
            raise FileNotFoundError(
                f"config.data.parts.{role} must be a file of texts, got {str(path)!r}."
            )
        first = role_of.setdefault(path.resolve(), role)
        if first != role:
            raise ValueError(
                f"config.data.parts.{role} must be another file than that of {first}, got "
                f"{str(path)!r}. No account counts both uses of a text."
            )
        # `str.splitlines` also cuts at characters within a text, such as U+2028 and a form feed.
        # Each part would be a record of its own.
        lines = path.read_bytes().decode("utf-8").split("\n")
        if not lines[-1]:
            lines.pop()  # what follows the last end of a line
        texts[role] = [line.removesuffix("\r") for line in lines]
    return texts


def _bundled_texts(config: Any) -> dict[str, list[str]]:
    """Returns long lines of the descriptions of scikit-learn's data sets."""
    folder = importlib.resources.files(optional("sklearn.datasets.descr", "bundled"))
    pages = [page for page in folder.iterdir() if page.name.endswith(".rst")]
    lines: list[str] = []
    for page in sorted(pages, key=lambda page: page.name):
        text = page.read_text(encoding="utf-8")
        lines += map(str.strip, text.splitlines())
    records = [line for line in lines if len(line) >= _SHORTEST]
    order = shuffled(len(records), seed=config.split_seed)
    shares = {"private": config.parts.private, "public": config.parts.get("public") or 0}
    for role, share in shares.items():
        if not isinstance(share, int | float) or share >= 1:
            raise ValueError(
                f"config.data.parts.{role} must be a share of the bundled texts, such as 0.2, got "
                f"{share!r}."
            )
    first = round(shares["private"] * len(records))
    last = first + round(shares["public"] * len(records))
    places = {"private": order[:first], "public": order[first:last], "test": order[last:]}
    return {role: [records[i] for i in places[role]] for role in _roles(config)}


def _roles(config: Any) -> list[str]:
    """Returns the roles with texts. Public ones are for the score of a search."""
    if config.parts.get("public"):
        return ["private", "public", "test"]
    return ["private", "test"]


_SHORTEST = 20  # characters of a bundled record, which leaves out headings and rules
_SOURCES: Mapping[str, Callable[[Any], dict[str, list[str]]]] = {
    "tfds": _texts_of_tfds,
    "lines": _lines,
    "bundled": _bundled_texts,
}


def check_model(config: Any, vocabulary: int) -> None:
    """Refuses a model of images, and a tokenizer that does not fit the vocabulary of the model."""
    model = config.model
    tokenizer = config.data.tokenizer
    languages = [name for name, (family, _) in MODELS.items() if family is LanguageModel]
    frame.known("model.name", [model.name], languages)
    spare = model.num_classes - vocabulary
    allowed = math.inf  # fresh rows may be as many as anybody likes
    if model.checkpoint:
        allowed = 0 if tokenizer == BYTES else _SPARE - 1
    if not 0 <= spare <= allowed:
        raise ValueError(
            f"config.data.tokenizer={tokenizer!r} has {vocabulary} tokens, and "
            "config.model.num_classes="
            f"{model.num_classes} is the vocabulary of the model. Give the tokenizer.json of the "
            "checkpoint."
        )


def _prompts(config: Any, encode: Encode, positions: int) -> list[list[int]]:
    """Returns the prompts of a config as tokens. Refuses those to which no token can be added."""
    encoded = [list(encode(prompt)) for prompt in config.prompts]
    length = config.length
    if length > positions:
        raise ValueError(
            f"config.generation.length must be at most {positions}, the model's positions, got "
            f"{length}."
        )
    for prompt, tokens in zip(config.prompts, encoded, strict=True):
        if not 1 <= len(tokens) < length:
            raise ValueError(
                f"config.generation.prompts must have 1 to {length - 1} tokens each, which is "
                f"below config.generation.length, got {len(tokens)} in {prompt!r}."
            )
    return encoded


def _open(config: Any, root: pathlib.Path) -> Opened:
    opened = _read(config)
    return opened._replace(trainer=opened.trainer_of(config.private))


def _read(config: Any) -> Opened:
    """Reads texts and model of a config, and refuses what cannot work."""
    encode, decode, vocabulary = tokenizer_of(config.data)
    check_model(config, vocabulary)
    network = models.network(config.model)
    positions = network.model.positions
    if config.data.length - 1 > positions:
        raise ValueError(
            f"config.data.length must be at most {positions + 1}, the model's positions and the "
            f"last target, got {config.data.length}. Cut the texts, or take a model with more "
            "positions."
        )
    prompts = _prompts(config.generation, encode or _bytes_of_prompt, positions)
    network, chosen = models.adapted(network, config.model, seed=config.init_seed)
    sources: dict[str, Examples] = {}
    sizes = []
    for role, texts in _texts(config.data).items():
        source = from_texts(
            texts,
            length=config.data.length,
            encode=encode,
            num_classes=vocabulary,
            name=f"{config.data.name}/{role}",
        )
        sources[role] = source
        sizes.append(f"{len(source)} {role} ({source.name})")
    print(f"{', '.join(sizes)}.", flush=True)
    test = sources["test"]
    if not _has_target(test):
        raise ValueError(
            "config.data.parts.test must have a text of two tokens. The model is judged by the "
            "tokens after the first one."
        )
    private = sources["private"]
    spec = DataSpec(source=config.data.source, role="private", **data.terms(config.data))
    return Opened(
        spec,
        sources.get("public"),
        private,
        test,
        network,
        chosen,
        prompts,
        decode,
    )


def _has_target(texts: Examples) -> bool:
    """Returns whether a text has two tokens. Reads texts until one has."""
    rows = np.arange(len(texts))
    for start in range(0, len(rows), _READ):
        tokens = texts.gather(rows[start : start + _READ])["tokens"]
        if (tokens[:, 1:] >= 0).any():
            return True
    return False


def _bytes_of_prompt(text: str) -> Sequence[int]:
    return [0, *text.encode()]  # texts begin with a zero


def _cells(config: Any) -> Iterator[Model]:
    yield Model("private")
    if config.references:
        yield Model("no_privacy")


@functools.partial(jax.jit, static_argnums=0)
def _nats(
    network: Pretrained, params: Params, tokens: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of the losses, number) of the known tokens of a batch."""
    targets = tokens[:, 1:]
    logits = network.apply_fn(params, tokens[:, :-1])
    known = (targets >= 0) & mask[:, None]  # -1 is padding
    labels = jnp.maximum(targets, 0)[..., None]
    of_targets = jnp.take_along_axis(logits, labels, 2)[..., 0]
    nats = jax.nn.logsumexp(logits, -1) - of_targets
    return jnp.where(known, nats, 0).sum(), known.sum()


def bits(network: Pretrained, params: Params, source: Examples, *, batch_size: int = 64) -> float:
    """Returns the mean bits per token of held-out texts. Nothing is charged."""
    rows, masks = pad_to_physical(np.arange(len(source)), min(batch_size, len(source)))
    sums = []
    for batch, mask in zip(rows, masks, strict=True):
        sums.append(_nats(network, params, source.gather(batch)["tokens"], mask))
    losses, count = np.array(sums, np.float64).sum(0)
    return float(losses / max(count, 1) / math.log(2))


def _account(cell: Model, work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account of the private texts."""
    opened = work.shared
    terms = opened.terms(work.config.private)
    return work.account(opened.private.name, label="private", **terms)


def _run(cell: Model, work: frame.Work) -> dict[str, Any]:
    config = work.config
    opened = work.shared
    start = models.fresh(opened.network, config.init_seed)
    judge = functools.partial(bits, opened.network, source=opened.test)
    if cell.model == "no_privacy":
        params = _without_privacy(config, opened, start)
        return {"bits": judge(params), "samples": _samples(config, opened, params)}
    folder = work.folder(cell)
    with _account(cell, work) as account, frame.watching(config, folder) as writers:
        state = finetune.fit(
            opened.trainer,
            start,
            opened.private,
            account=account,
            workdir=folder,
            evaluate=lambda params: {"bits": judge(params)},
            callbacks=writers,
            **trainers.fit_options(config.private),
        )
        spent = account.epsilon(delta=config.private.delta)
    params = trainers.released(state)
    save_params(work.root / "params.safetensors", merge_lora(params))
    return {
        "untrained": judge(start),
        "bits": judge(params),
        "epsilon": spent,
        "samples": _samples(config, opened, params),
    }


def _without_privacy(config: Any, opened: Opened, start: Params) -> Params:
    warm_up = max(1, config.no_privacy.steps // 10)

    def optimizer(rate: Callable[[Any], Any]) -> Any:
        # A transformer needs a warm-up without privacy too.
        def rising(step: Any) -> Any:
            share = jnp.minimum(1, (step + 1) / warm_up)
            return rate(step) * share

        return models.adam_on(rising, chosen=opened.chosen)

    return models.train(
        opened.network,
        start,
        opened.private,
        config.no_privacy,
        seed=config.init_seed,
        optimizer=optimizer,
        label="no privacy",
    )


def _samples(config: Any, opened: Opened, params: Params) -> list[str]:
    """Returns a continuation of every prompt. A model is post-processing of what was paid for
    it.
    """
    samples = []
    for seed, prompt in enumerate(opened.prompts):
        generated = generate(
            opened.network.apply_fn,
            params,
            prompt,
            length=config.generation.length,
            seed=seed,
            temperature=config.generation.temperature,
        )
        tokens = generated.tolist()
        if config.data.tokenizer == BYTES and 0 in tokens[1:]:  # a zero ends a text
            end = tokens.index(0, 1)
            tokens = tokens[:end]
        samples.append(opened.decode(tokens))
    return samples


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    private, *references = rows
    config = work.config
    opened = work.shared
    return {
        **results.only(private, "untrained", "bits", "epsilon", "samples"),
        **{row["model"]: row["bits"] for row in references},
        "delta": config.private.delta,
        "noise_multiplier": float(opened.trainer.privatizer.multiplier_at(0)),
        "steps": config.private.steps,
        **opened.spec.terms,
        "dataset": opened.private.name,
    }


def _table(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    def row(model: str, field: str, epsilon: str) -> dict[str, Any]:
        return {"model": model, "bits per token": result[field], "epsilon": epsilon}

    rows = [row("at the start", "untrained", "0")]
    rows.append(row("private", "bits", f"{result['epsilon']:.3f}"))
    if "no_privacy" in result:
        rows.append(row("no privacy", "no_privacy", "inf"))
    return rows


def _summary(result: Mapping[str, Any]) -> str:
    change = f"one {result['unit']} of {result['dataset']} under {result['adjacency']}"
    lines = [
        format_table(_table(result)),
        "",
        f"Epsilon is at delta = {result['delta']:g}, for {change}.",
    ]
    return "\n".join([*lines, *(f"  {text!r}" for text in result["samples"])])


def _plan(config: Any, opened: Callable[[], Opened]) -> Iterator[plans.Item]:
    task = opened()
    start = models.fresh(task.network, config.init_seed)
    yield plans.training(
        "private",
        task.trainer,
        task.private,
        start,
        steps=config.private.steps,
        every=config.private.checkpoint_every,
        terms=task.terms(config.private),
        folder="cells/private",
    )
    if config.references:
        loss = models.loss(task.network)
        yield plans.public_training(
            "reference without privacy", loss, start, task.private, config.no_privacy
        )


# --- A search -----------------------------------------------------------------------------------


def middle_tokens(texts: Examples) -> Examples:
    """Returns texts with their middle token as label, for a score that counts one per record.

    A text without two tokens has the label 0, and never a right answer (`_logits_of_middle`).
    """
    tokens = texts.gather(np.arange(len(texts)))["tokens"]
    known = (tokens >= 0).sum(1)
    middle = np.take_along_axis(tokens, known[:, None] // 2, 1)[:, 0]
    label = np.where(known > 1, middle, 0)
    return from_arrays(tokens=tokens, label=label, num_classes=texts.num_classes, name=texts.name)


def _logits_of_middle(network: Pretrained, params: Params, batch: Any) -> jax.Array:
    """Returns the logits of the middle token of each text, [B, vocabulary].

    Those of a text without two tokens are NaN, which is no answer.
    """
    tokens = batch["tokens"]
    known = (tokens >= 0).sum(1)
    logits = network.apply_fn(params, tokens[:, :-1])
    place = jnp.maximum(known // 2 - 1, 0)[:, None, None]
    of_middle = jnp.take_along_axis(logits, place, 1)[:, 0]
    return jnp.where(known[:, None] > 1, of_middle, jnp.nan)


def _subject(config: Any, root: pathlib.Path) -> tune.Subject:
    opened = _read(config)
    network, private = opened.network, opened.private
    start = models.fresh(network, config.init_seed)

    def public() -> Score:
        texts: Any = opened.public
        facts = ["minus bits", texts.fingerprint]  # the token has the network's training programs
        return finetune.PublicScore(lambda params: -bits(network, params, texts), facts=facts)

    def charged() -> Score:
        return finetune.ChargedScore(
            predict=functools.partial(_logits_of_middle, network),
            source=middle_tokens(private),
            noise_multiplier=config.tune.score_noise_multiplier,
            unit=opened.spec.unit,
        )

    scores = {"charged": charged} if opened.public is None else dict(charged=charged, public=public)
    return tune.Subject(
        private=private,
        adjacency=opened.spec.adjacency,
        private_set=opened.private_set,
        trainer=opened.trainer_of,
        terms=opened.terms,
        start=lambda work: start,
        scores=scores,
        judge=functools.partial(bits, network, source=opened.test),
        measure="bits",
        serving=merge_lora,
        tested=len(opened.test),
        blank=lambda: (private, start),
        before=lambda: iter(()),
    )


STUDY = frame.Study(
    name="lm",
    open=_open,
    private=lambda opened: [opened.private_set],
    account=_account,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    tables=lambda result, work: {"Bits per token of held-out texts": _table(result)},
    plan=_plan,
    report=frame.Report(
        title="private training of a language model",
        released={"params.safetensors": "language model"},
    ),
)


def experiment(config: Any, workdir: str | None, **options: Any) -> Any:
    """Runs the training, or a search of it. The arguments are those of `launch.frame.run`."""
    study = tune.study(_subject) if "tune" in config else STUDY
    return frame.run(study, config, workdir, **options)


if __name__ == "__main__":
    frame.main(experiment, trains=True, pays=True, has_cells=True, tunes=tune.with_grid)
