"""Writes what may be published of a finished run: python -m launch.release WORKDIR.

WORKDIR/release gets the parameters, the program with its preprocessing, a model card, the privacy
report and checksums (`jaxdp.models.write_release`). `jaxdp serve-check WORKDIR/release` checks it.
`launch.published` says what is published of which study.
"""

import pathlib
from collections.abc import Sequence

import ml_collections

from jaxdp.files import read_json, shown
from jaxdp.models import ModelCard, write_release

from . import frame
from .frame.workdir import bound_to
from .published import MAKERS, REFUSED, Run

__all__ = ["main", "write"]


def write(
    workdir: pathlib.Path, folder: pathlib.Path | None = None, *, purpose: str = "not stated"
) -> pathlib.Path:
    """Writes the release of a finished run.

    Args:
      workdir: The workdir of a study that saves a network.
      folder: A new or empty folder, by default WORKDIR/release.
      purpose: What the model is for.

    Raises:
      FileNotFoundError: The run is not finished, or used a public network that it did not train.
      ValueError: The workdir is of a study without a network to publish.
      FileExistsError: The folder has files.
    """
    bound = bound_to(workdir)
    if bound is not None and bound["study"] not in MAKERS:
        reason = REFUSED.get(bound["study"], "It saves no network")
        raise ValueError(
            f"{shown(workdir)} is of the study {bound['study']!r}. {reason}. Any model of your own "
            "is released by jaxdp.models.write_release. This command releases "
            f"{', '.join(MAKERS)}."
        )
    if bound is None or not (workdir / "result.json").exists():
        raise FileNotFoundError(
            f"{shown(workdir)} has no finished run. Give the workdir of a launcher, such as `jaxdp "
            "finetune`."
        )
    result = read_json(workdir / "result.json")
    # A workdir of a lifecycle is bound to no config. Its result has that of the last run.
    config = ml_collections.ConfigDict(bound["config"] or result["config"])
    published = MAKERS[bound["study"]](Run(root=workdir, config=config, result=result))
    card = ModelCard(
        name=published.name,
        architecture=config.model.name if "name" in config.model else "dense layers",
        inputs=published.inputs,
        classes=published.classes,
        purpose=purpose,
        limits="Measured on the test part of its own data set only.",
    )
    return write_release(
        workdir / "release" if folder is None else folder,
        published.predict,
        published.params,
        card=card,
        probe=published.probe,
        workdir=published.accounts,
        metrics=published.metrics,
    )


def main(argv: Sequence[str]) -> None:
    """Writes WORKDIR/release, or another folder."""
    if len(argv) not in (2, 3):
        raise ValueError("give a workdir: python -m launch.release WORKDIR [FOLDER].")
    print(write(*map(pathlib.Path, argv[1:])))


if __name__ == "__main__":
    frame.start(main)
