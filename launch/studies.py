"""The studies, in the order of a model's life. A new study adds one line.

A line is "module:NAME" of a `launch.study.Study`, or of a `launch.study.Program` that no frame
runs. A module that begins with a dot is below this package. The modules are imported on use, since
they import JAX.
"""

import functools
import importlib
from typing import Any

from .study import Program

STUDIES = [
    ".pretrain:STUDY",
    ".finetune:STUDY",
    ".dpadapter:STUDY",
    ".curve:STUDY",
    ".lm:STUDY",
    ".recalibrate:STUDY",
    ".owners:RECALIBRATE_SERVER",
    ".owners:RECALIBRATE_CLIENT",
    ".adapt:STUDY",
    ".split:STUDY",
    ".owners:SPLIT_SERVER",
    ".owners:SPLIT_CLIENT",
    ".lifecycle:STUDY",  # here, since its stage `deploy` comes before the answers of `predict`
    ".predict:STUDY",
    ".poisoning:STUDY",
]


def known() -> list[Program]:
    """Returns all studies."""
    return [_load(name) for name in STUDIES]


def named(name: str) -> Program | None:
    """Returns the study with this name in config.json, or None."""
    for study in known():
        if study.name == name:
            return study
    return None


def recognised(config: Any) -> list[Program]:
    """Returns the studies whose parts a config has. If several fit, these are the ones that need
    most parts, for example both parties of a protocol.
    """
    fitting = [study for study in known() if study.needs and _has(config, study.needs)]
    most = max((len(study.needs) for study in fitting), default=0)
    return [study for study in fitting if len(study.needs) == most]


def _has(config: Any, parts: tuple[str, ...]) -> bool:
    return all(part in config for part in parts)


def module(name: str) -> Any:
    """Returns a module. A name that begins with a dot is below this package."""
    return importlib.import_module(name, __package__)


@functools.cache
def _load(name: str) -> Program:
    path, _, attribute = name.partition(":")
    study: Program = getattr(module(path), attribute)
    return study
