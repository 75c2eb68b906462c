"""Writes what may be published of a run of private fine-tuning: python -m launch.release WORKDIR.

WORKDIR/release gets the parameters, the program with its preprocessing, a model card, the privacy
report and checksums (`jaxdp.models.write_release`). `jaxdp serve-check WORKDIR/release` checks it.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxdp.data import Examples
from jaxdp.data.spec import open_parts
from jaxdp.files import read_json, shown
from jaxdp.finetune import Scaler
from jaxdp.models import ModelCard, Pretrained, load_params, write_release
from jaxdp.models.checkpoints import blank_inputs
from jaxdp.models.preprocessing import Vectors

from . import data, frame
from .finetune import SCALER, STUDY, Model
from .frame.workdir import bound_to
from .tasks import network_of, scaled

__all__ = ["main", "write"]


def write(
    workdir: pathlib.Path, folder: pathlib.Path | None = None, *, purpose: str = "not stated"
) -> pathlib.Path:
    """Writes the release of a finished run of `launch.finetune`.

    Args:
      workdir: The workdir.
      folder: A new or empty folder, by default WORKDIR/release.
      purpose: What the model is for.

    Raises:
      FileNotFoundError: The run is not finished.
      ValueError: The workdir is of another study.
      FileExistsError: The folder has files.
    """
    bound = bound_to(workdir)
    if bound is None or not (workdir / "result.json").exists():
        raise FileNotFoundError(
            f"{shown(workdir)} has no finished run. Give the workdir of `jaxdp finetune`."
        )
    if bound["study"] != STUDY.name or not (workdir / "params.safetensors").exists():
        raise ValueError(
            f"{shown(workdir)} is of the study {bound['study']!r}. Models of `jaxdp finetune` are "
            "released here, others by jaxdp.models.write_release."
        )
    config = ml_collections.ConfigDict(bound["config"])
    result = read_json(workdir / "result.json", keys=("private", "tested", "dataset"))
    specs = data.specs(
        config.data, "test", needs=("test",), grouped=True, several=True, tables=True
    )
    sources = open_parts(specs, images=bool(config.model.preprocessing))
    network = _network(workdir, config, sources)
    inputs = _probe(network)
    card = ModelCard(
        name=f"{result['dataset']}, {config.model.name}",
        architecture=config.model.name,
        inputs=_meaning(network, config, sources["test"]),
        classes=specs["test"].class_names,
        purpose=purpose,
        limits="Measured on the test part of its own data set only.",
    )

    def predict(params: Any, batch: jax.Array) -> jax.Array:
        return jax.nn.softmax(network.apply_fn(params, batch))

    return write_release(
        workdir / "release" if folder is None else folder,
        predict,
        load_params(workdir / "params.safetensors"),
        card=card,
        probe=inputs,
        workdir=frame.cell_folder(workdir, Model("private")),
        metrics={"test accuracy": (result["private"], result["tested"])},
    )


def _network(workdir: pathlib.Path, config: Any, sources: Mapping[str, Examples]) -> Pretrained:
    """Returns the network that the run served, without parameters."""
    network = network_of(config, sources, sources["test"].num_classes)
    path = workdir / SCALER
    return scaled(network, Scaler.load(path)) if path.exists() else network


def _probe(network: Pretrained) -> np.ndarray:
    """Returns inputs that are nobody's: uniform random numbers."""
    shape = blank_inputs(network.preprocessing).shape[1:]
    return np.random.default_rng(0).random((4, *shape), np.float32)


def _meaning(network: Pretrained, config: Any, test: Examples) -> str:
    """Returns what one input is, so that its user can make one."""
    if not isinstance(network.preprocessing, Vectors):
        return "an image in [0, 1], of this size; the normalisation is in the program"
    names = ", ".join(test.feature_names)
    options = json.dumps(config.data.options.to_dict())
    return (
        f"the features of a row, in this order: {names}. jaxdp.data.from_csv makes them from a "
        f"table with these options: {options}"
    )


def main(argv: Sequence[str]) -> None:
    """Writes WORKDIR/release, or another folder."""
    if len(argv) not in (2, 3):
        raise ValueError("give a workdir: python -m launch.release WORKDIR [FOLDER].")
    print(write(*map(pathlib.Path, argv[1:])))


if __name__ == "__main__":
    frame.start(main)
