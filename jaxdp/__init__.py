"""jaxdp: private machine learning over a model's whole life, in JAX, under one privacy ledger."""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from jaxdp.version import __version__

# For type checkers only. A package that is missing here still loads, and they see it as Any.
if TYPE_CHECKING:
    from jaxdp import (  # noqa: F401
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
# A wheel has the launchers and the configs, which are no part of the library's face.
_APART = ("files", "launch", "configs")
_PACKAGES = {
    found.name: f"jaxdp.{found.name}"
    for found in pkgutil.iter_modules(__path__)
    if found.ispkg and found.name not in _APART
}
_MODULES = {"losses": "jaxdp.transforms.losses", **_PACKAGES}

__all__ = [
    "BudgetExceeded",
    "Interval",
    "Ledger",
    "ModelCheck",
    "__version__",
    "check",
    "clipped_grad",
    "interval",
    "losses",
    "privatize",
]
__all__ += sorted(_PACKAGES)


def __getattr__(name: str) -> Any:
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(_ATTRIBUTES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
