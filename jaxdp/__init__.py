"""jaxdp: private machine learning over a model's whole life, in JAX, under one privacy ledger."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxdp.version import __version__

if TYPE_CHECKING:
    from jaxdp import (
        audit,
        compilers,
        data,
        finetune,
        models,
        prediction,
        pretrain,
        privacy,
        recalibration,
        release,
        report,
        split,
        transforms,
        tta,
    )
    from jaxdp.privacy.ledger import BudgetExceeded, Ledger
    from jaxdp.transforms import losses
    from jaxdp.transforms.clipping import clipped_grad
    from jaxdp.transforms.intervals import Interval, interval
    from jaxdp.transforms.model_check import ModelCheck, check
    from jaxdp.transforms.noise import privatize

# Names load on first use, so that `import jaxdp` stays fast and pulls in only what is called.
_ATTRIBUTES = {
    "check": "jaxdp.transforms.model_check",
    "ModelCheck": "jaxdp.transforms.model_check",
    "clipped_grad": "jaxdp.transforms.clipping",
    "interval": "jaxdp.transforms.intervals",
    "Interval": "jaxdp.transforms.intervals",
    "privatize": "jaxdp.transforms.noise",
    "Ledger": "jaxdp.privacy.ledger",
    "BudgetExceeded": "jaxdp.privacy.ledger",
}
_MODULES = {
    "losses": "jaxdp.transforms.losses",
    "audit": "jaxdp.audit",
    "compilers": "jaxdp.compilers",
    "privacy": "jaxdp.privacy",
    "transforms": "jaxdp.transforms",
    "models": "jaxdp.models",
    "data": "jaxdp.data",
    "finetune": "jaxdp.finetune",
    "prediction": "jaxdp.prediction",
    "pretrain": "jaxdp.pretrain",
    "recalibration": "jaxdp.recalibration",
    "release": "jaxdp.release",
    "report": "jaxdp.report",
    "split": "jaxdp.split",
    "tta": "jaxdp.tta",
}

__all__ = [
    "BudgetExceeded",
    "Interval",
    "Ledger",
    "ModelCheck",
    "__version__",
    "audit",
    "check",
    "clipped_grad",
    "compilers",
    "data",
    "finetune",
    "interval",
    "losses",
    "models",
    "prediction",
    "pretrain",
    "privacy",
    "privatize",
    "recalibration",
    "release",
    "report",
    "split",
    "transforms",
    "tta",
]


def __getattr__(name: str) -> Any:
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(_ATTRIBUTES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
