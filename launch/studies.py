"""The studies, in the order of a model's life. A new study adds one line.

The modules of the studies are imported on use, since they import JAX. A line has what help and the
search for a config's launcher need, so neither waits for a module.
"""

import functools
import importlib
from typing import Any, NamedTuple

from .study import Program


class Listed(NamedTuple):
    """A line of `STUDIES`.

    Attributes:
      place: "module:NAME" of a `launch.study.Study`, or of a `launch.study.Program` that no frame
          runs. A module that begins with a dot is below this package.
      launcher: The name by which the launcher is called: its module in `launch`. A name with a dot
          is that of a module from elsewhere.
      needs: The parts of a config by which the study is recognised. A config may have the parts of
          several studies. It belongs to the one that needs most of them.
      about: What the launcher does, for `jaxdp --help`.
      own_flags: Whether the launcher has flags besides those of all launchers.
    """

    place: str
    launcher: str
    needs: tuple[str, ...]
    about: str = ""
    own_flags: bool = False


_RECALIBRATION = ("method", "server", "client")
_SPLIT = ("server", "client")
STUDIES = [
    Listed(".pretrain:STUDY", "pretrain", ("ascent",), "robust pre-training on public images"),
    Listed(
        ".finetune:STUDY",
        "finetune",
        ("private",),
        "private fine-tuning, and the table of DPAdapter",
    ),
    Listed(".dpadapter:STUDY", "finetune", ("private", "grids")),
    Listed(".curve:STUDY", "finetune", ("private", "curve")),
    Listed(".label_dp:STUDY", "finetune", ("private", "labels")),
    Listed(".tune:STUDY", "finetune", ("private", "tune")),
    Listed(".lm:STUDY", "lm", ("private", "generation"), "private training of a language model"),
    Listed(
        ".recalibrate:STUDY",
        "recalibrate",
        ("sweep",),
        "private recalibration from many sources",
    ),
    Listed(
        ".owners:RECALIBRATE_SERVER",
        "recalibrate_server",
        _RECALIBRATION,
        "a calibrator that asks hospitals over a network",
        own_flags=True,
    ),
    Listed(
        ".owners:RECALIBRATE_CLIENT",
        "recalibrate_client",
        _RECALIBRATION,
        "a hospital that answers it",
        own_flags=True,
    ),
    Listed(".adapt:STUDY", "adapt", ("protocol",), "private test-time adaptation"),
    Listed(".split:STUDY", "split", ("ablation", "server", "client"), "Split Adaptation"),
    Listed(
        ".owners:SPLIT_SERVER",
        "split_server",
        _SPLIT,
        "the server of Split Adaptation between two processes",
        own_flags=True,
    ),
    Listed(".owners:SPLIT_CLIENT", "split_client", _SPLIT, "its client", own_flags=True),
    # Here, since its stage `deploy` comes before the answers of `predict`.
    Listed(
        ".lifecycle:STUDY",
        "lifecycle",
        ("budgets",),
        "every stage of a model's life under one ledger, and a report",
    ),
    Listed(
        ".embeddings:PROGRAM",
        "embeddings",
        ("embedding",),
        "embeddings of texts by a public language model",
    ),
    Listed(".predict:STUDY", "predict", ("prediction",), "certified private answers"),
    Listed(
        ".poisoning:STUDY",
        "poisoning",
        ("changes",),
        "certificates against poisoned records and for unlearning",
    ),
]


def known() -> list[Program]:
    """Returns all studies."""
    return [_load(listed.place) for listed in STUDIES]


def named(name: str) -> Program | None:
    """Returns the study with this name in config.json, or None."""
    for study in known():
        if study.name == name:
            return study
    return None


def recognised(config: Any) -> list[Listed]:
    """Returns the lines of the studies whose parts a config has. If several fit, these are the ones
    that need most parts, for example both parties of a protocol.
    """
    fitting = [study for study in STUDIES if _has(config, study.needs)]
    most = max((len(study.needs) for study in fitting), default=0)
    return [study for study in fitting if len(study.needs) == most]


def _has(config: Any, parts: tuple[str, ...]) -> bool:
    return all(part in config for part in parts)


def module(name: str) -> Any:
    """Returns a module. A name that begins with a dot is below this package."""
    return importlib.import_module(name, __package__)


@functools.cache
def _load(place: str) -> Program:
    path, _, attribute = place.partition(":")
    study: Program = getattr(module(path), attribute)
    return study
