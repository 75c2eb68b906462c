"""A model to publish: one folder with parameters, program, card, report and checksums.

The folder holds nothing else of a workdir: no hash of records, no time, no path, no name of a user.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.files import (
    optional,
    read_json,
    read_npz,
    sha256_of,
    shown,
    understood,
    write_durably,
    write_json,
)
from jaxdp.models.pretrained import flatten, load_tensors, save_params
from jaxdp.privacy import Ledger
from jaxdp.report import runs
from jaxdp.report.books import Books
from jaxdp.report.intervals import measured
from jaxdp.report.verdicts import verdict

_PARAMS = "params.safetensors"
_PROGRAM = "predict.stablehlo"
_PROBE = "probe.npz"
CARD = "card.json"
_README = "README.md"
_REPORT = "report.html"
_SUMS = "SHA256SUMS"
_FILES = (_README, CARD, _PARAMS, _PROGRAM, _PROBE, _REPORT)
# A program for any number of inputs would compile for each number. Inputs are padded to this one.
_BATCH = 32
_PLATFORMS = ("cpu", "cuda", "tpu")
_LOCATIONS = "jax_traceback_in_locations_limit"
_REMEDY = "Get the folder again from whoever released it, or write it again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What the people who use a model must know, and what no program can tell.

    Attributes:
      name: The name of the model.
      architecture: For example "CNN, 26 k parameters" or "ViT-B/16 with LoRA of rank 8".
      inputs: What one input is, before any preprocessing, such as "a grey photograph in [0, 1]".
      classes: The names of the outputs, in their order. Empty names none.
      purpose: What the model is for.
      limits: What it is not for, or where it is known to fail.
    """

    name: str
    architecture: str
    inputs: str
    classes: Sequence[str] = ()
    purpose: str = "not stated"
    limits: str = "not stated"


def write_release(
    folder: str | os.PathLike[str],
    predict: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    *,
    card: ModelCard,
    probe: Any,
    workdir: str | os.PathLike[str] | Books | None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    metrics: Mapping[str, float | tuple[float, int]] | None = None,
) -> pathlib.Path:
    """Writes a folder that may be published, and that `load_released` serves.

    The folder has the parameters (safetensors), the program with its preprocessing (StableHLO), the
    probe with its outputs, the card (README.md and card.json), the privacy report, and SHA256SUMS.

    Args:
      folder: A new or empty folder.
      predict: `predict(params, inputs)`, a function of a batch of inputs [B, ...] as their user has
        them. It includes the preprocessing, and returns one array [B, ...]. Rows do not depend on
        each other.
      params: The parameters to publish: `state.params` or `state.ema` of `jaxdp.finetune.fit`.
      card: What people must know.
      probe: PUBLIC inputs [n, ...], at least one. The folder has them, and `check_released` answers
        them again.
      workdir: The workdir of `fit`, or the file of a ledger, whose accounts are the guarantee. Or
        these accounts. None says that all data of the model is public.
      ledger: The ledger, if it is in memory or is not where the run left it.
      metrics: Numbers that were measured on public data, or were charged. A pair of a share and the
        number of cases, such as (0.96, 114), gets its 95 % interval.

    Returns:
      The folder.

    Raises:
      FileExistsError: The folder has files.
      ValueError: The probe is empty or has non-finite outputs, or the outputs do not fit the
        classes. Or the report refuses the workdir.
      ImportError: The package flatbuffers is missing, of the extra `serve`.
    """
    root = pathlib.Path(folder)
    if root.exists() and any(root.iterdir()):
        raise FileExistsError(f"folder {shown(root)} has files. Give a new or empty folder.")
    optional("flatbuffers", "serve")  # without it JAX cannot serialise a program
    inputs = np.asarray(probe)
    if inputs.ndim < 1 or not len(inputs):
        raise ValueError(f"probe must hold at least one public input, got shape {inputs.shape}.")
    books, run = _accounts(workdir, ledger)
    leaves = flatten(params)
    program = _exported(predict, params, list(leaves.values()), inputs)
    # By the program and not by `predict`, as those who load it will compute them.
    outputs = _answer(program, list(leaves.values()), inputs)
    _check_outputs(outputs, card.classes)
    # All that may fail comes before the first file.
    root.mkdir(parents=True, exist_ok=True)
    save_params(root / _PARAMS, params)
    write_durably(root / _PROGRAM, bytes(program.serialize()))
    asked, answered = _readable(inputs), _readable(outputs)
    write_durably(root / _PROBE, lambda file: np.savez(file, inputs=asked, outputs=answered))
    page = root / _REPORT
    place = pathlib.Path() if isinstance(workdir, Books | None) else pathlib.Path(workdir)
    runs.write_page(page, place, books, run, runs.statements(metrics))
    content = _content(card, leaves, inputs, books.entries, metrics or {})
    write_json(root / CARD, content)
    write_durably(root / _README, _readme(content).encode())
    # The checksums are last, so that a folder that lacks a file does not load.
    sums = [f"{sha256_of(root / name)}  {name}\n" for name in _FILES]
    write_durably(root / _SUMS, "".join(sums).encode())
    return root


def _accounts(
    workdir: str | os.PathLike[str] | Books | None,
    ledger: Ledger | str | os.PathLike[str] | None,
) -> tuple[Books, dict[str, Any]]:
    """Returns what may be published of the accounts, and the facts of a run of `fit`."""
    if workdir is None:
        return Books.empty(), {}
    if isinstance(workdir, Books):
        return workdir.anonymous(), {}
    books, run = runs.opened(workdir, ledger)
    return books.anonymous(), run


def _exported(
    predict: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    leaves: Sequence[Any],
    inputs: np.ndarray,
) -> Any:
    """Returns the program of `predict` for a list of parameters and `_BATCH` inputs."""
    structure = jax.tree.structure(params)

    def by_list(leaves: list[jax.Array], batch: jax.Array) -> jax.Array:
        return predict(jax.tree.unflatten(structure, leaves), batch)

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    dtype = jax.dtypes.canonicalize_dtype(inputs.dtype)
    batch = jax.ShapeDtypeStruct((_BATCH, *inputs.shape[1:]), dtype)
    with _without_locations():
        return jax.export.export(jax.jit(by_list), platforms=_PLATFORMS)(shapes, batch)


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """Programs that are lowered in the context hold no paths and lines of source files."""
    limit = getattr(jax.config, _LOCATIONS)
    jax.config.update(_LOCATIONS, 0)
    try:
        yield
    finally:
        jax.config.update(_LOCATIONS, limit)


def _answer(program: Any, leaves: list[Any], inputs: np.ndarray) -> np.ndarray:
    """Returns the outputs of a program for any number of inputs, in batches of `_BATCH`."""
    answers = []
    # At least one batch runs, so that no inputs give outputs of the right shape.
    for start in range(0, max(len(inputs), 1), _BATCH):
        batch = inputs[start : start + _BATCH]
        padding = [(0, _BATCH - len(batch))] + [(0, 0)] * (inputs.ndim - 1)
        outputs = program.call(leaves, np.pad(batch, padding))
        answers.append(np.asarray(outputs)[: len(batch)])
    return np.concatenate(answers)


def _readable(array: np.ndarray) -> np.ndarray:
    """Returns an array whose dtype a .npz file keeps: float32 in place of bfloat16 and smaller."""
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _check_outputs(outputs: np.ndarray, classes: Sequence[str]) -> None:
    if classes and outputs.shape[1:] != (len(classes),):
        raise ValueError(
            f"card.classes names {len(classes)} classes, and predict returns {outputs.shape[1:]} "
            "for one input. Return one number for each class, or name no classes."
        )
    if not np.isfinite(outputs).all():
        raise ValueError(
            "predict has NaN or infinite outputs for the probe. Publish parameters that are finite."
        )


def _content(
    card: ModelCard,
    leaves: Mapping[str, Any],
    inputs: np.ndarray,
    entries: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns what card.json holds."""
    content: dict[str, Any] = {"format": 1, **dataclasses.asdict(card)}
    content["classes"] = list(card.classes)
    content["parameters"] = {"names": list(leaves), "count": sum(x.size for x in leaves.values())}
    content["input"] = {"shape": list(inputs.shape[1:]), "dtype": str(inputs.dtype)}
    content["program"] = {"batch_size": _BATCH, "platforms": list(_PLATFORMS)}
    content["program"]["jax"] = jax.__version__
    content["guarantees"] = [_guarantee(entry) for entry in entries]
    content["measured"] = {name: measured(value) for name, value in metrics.items()}
    return content


def _guarantee(entry: Mapping[str, Any]) -> dict[str, Any]:
    said = verdict(entry)
    row = {key: entry[key] for key in ("name", "unit", "adjacency")}
    row["epsilon"] = said.epsilon
    row["delta"] = said.delta
    row["sentence"] = (
        f"epsilon {said.epsilon}, delta {said.delta}, for {said.change}. {said.protection}: "
        f"{said.meaning}"
    )
    return row


def _readme(content: Mapping[str, Any]) -> str:
    """Returns the card as Markdown."""
    shape = " x ".join(map(str, content["input"]["shape"])) or "one number"
    rows = {
        "architecture": content["architecture"],
        "parameters": f"{content['parameters']['count']:,}",
        "one input": f"{content['inputs']} ({content['input']['dtype']}, {shape})",
        "classes": ", ".join(content["classes"]) or "none",
        "for": content["purpose"],
        "limits": content["limits"],
        **content["measured"],
    }
    lines = [f"# {content['name']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    lines += ["", "## Privacy", ""]
    lines += [f"- {row['name']}: {row['sentence']}" for row in content["guarantees"]]
    if not content["guarantees"]:
        lines.append("All data of this model is public. No data set was charged.")
    lines += [
        "",
        f"`{_REPORT}` says what was charged, and for what.",
        "",
        "## Use",
        "",
        "```python",
    ]
    lines += ["import jaxdp", "", 'model = jaxdp.models.load_released(".")', "model(inputs)"]
    lines += ["```", "", f"`jaxdp serve-check .` checks the files and the answers to `{_PROBE}`."]
    lines += [f"`sha256sum -c {_SUMS}` checks the files alone.", ""]
    return "\n".join(lines)


class Released:
    """A released model: a function of inputs [n, ...] for any n, with its preprocessing.

    Attributes:
      card: The content of card.json.
      classes: The names of the outputs, or none.
    """

    def __init__(self, card: Mapping[str, Any], program: Any, leaves: list[Any]):
        self.card = card
        self.classes = tuple(card["classes"])
        self._program = program
        self._leaves = leaves

    def __call__(self, inputs: Any) -> np.ndarray:
        """Returns the outputs [n, ...] of inputs [n, ...], and compiles once for all n.

        Raises:
          ValueError: One input has another shape or dtype than the card states.
        """
        array = np.asarray(inputs)
        stated = self.card["input"]
        if list(array.shape[1:]) != stated["shape"] or array.ndim < 1:
            raise ValueError(
                f"inputs must have shape [n, {', '.join(map(str, stated['shape']))}], got "
                f"{list(array.shape)}."
            )
        if str(array.dtype) != stated["dtype"]:
            raise ValueError(
                f"inputs must be {stated['dtype']}, got {array.dtype}. Convert them as the card "
                f"says: {self.card['inputs']}."
            )
        return _answer(self._program, self._leaves, array)

    def labels(self, inputs: Any) -> list[str]:
        """Returns the class with the largest output for each input.

        Raises:
          ValueError: The card names no classes, or an input does not fit.
        """
        if not self.classes:
            raise ValueError("this model has no classes. Call it, and read its outputs.")
        return [self.classes[index] for index in self(inputs).argmax(axis=-1)]


def load_released(folder: str | os.PathLike[str]) -> Released:
    """Reads a folder of `write_release`. It needs no code of the model.

    Returns:
      A function of inputs, with its preprocessing.

    Raises:
      FileNotFoundError: A file is missing.
      ValueError: A file has changed since the release, or is damaged.
      ImportError: The package flatbuffers is missing, of the extra `serve`.
    """
    optional("flatbuffers", "serve")
    root = pathlib.Path(folder)
    _check_sums(root)
    card = read_json(root / CARD, remedy=_REMEDY, keys=("classes", "parameters", "input", "inputs"))
    tensors = load_tensors(root / _PARAMS, remedy=_REMEDY)
    with understood(root / CARD, _REMEDY):
        leaves = [tensors[name] for name in card["parameters"]["names"]]
    with understood(root / _PROGRAM, _REMEDY):
        program = jax.export.deserialize(bytearray((root / _PROGRAM).read_bytes()))
    return Released(card, program, leaves)


def _check_sums(root: pathlib.Path) -> None:
    path = root / _SUMS
    if not path.exists():
        raise FileNotFoundError(f"{shown(path)} does not exist. Give a folder of `write_release`.")
    sums = {}
    for line in path.read_text().splitlines():
        digest, _, name = line.partition("  ")
        sums[name] = digest
    for name in _FILES:
        if not (root / name).exists():
            raise FileNotFoundError(f"{shown(root / name)} is missing. {_REMEDY}")
        if sums.get(name) != sha256_of(root / name):
            raise ValueError(f"{shown(root / name)} is not the file that {_SUMS} names. {_REMEDY}")


def check_released(folder: str | os.PathLike[str], *, tolerance: float = 1e-3) -> float:
    """Loads a released folder, answers its probe again, and compares.

    Args:
      folder: A folder of `write_release`.
      tolerance: The largest difference, as a share of the largest output. Another device rounds
        otherwise: float32 products of a GPU or TPU may have the precision of TF32 or bfloat16.

    Returns:
      The largest difference, as a share of the largest output. It is 0 where nothing rounds
      otherwise.

    Raises:
      ValueError: The difference is larger, or `load_released` refuses the folder.
    """
    model = load_released(folder)
    path = pathlib.Path(folder) / _PROBE
    probe = read_npz(path, ("inputs", "outputs"), remedy=_REMEDY)
    # The file has float32 in place of bfloat16.
    inputs = probe["inputs"].astype(jnp.dtype(model.card["input"]["dtype"]))
    # Differences of integers of few bits would wrap around, and NumPy has none of booleans.
    outputs = model(inputs).astype(np.float64)
    kept = probe["outputs"].astype(np.float64)
    smallest = float(np.finfo(np.float32).tiny)  # for outputs that are all zero
    largest = max(float(np.abs(kept).max()), smallest)
    difference = float(np.abs(outputs - kept).max()) / largest
    if not difference <= tolerance:  # also for NaN
        raise ValueError(
            f"{shown(folder)} answers its probe with a difference of {difference:.3g} of the "
            f"largest output, more than tolerance {tolerance:g}. {_REMEDY}"
        )
    return difference
