"""jaxdp: private machine learning over a model's whole life, in JAX, under one privacy ledger."""

import functools
import importlib
import pkgutil
import warnings
from typing import TYPE_CHECKING, Any

from jaxdp.version import __version__

# For type checkers only. A package that is missing here still loads, and they see it as Any.
if TYPE_CHECKING:
    from jaxdp import (  # noqa: F401
        audit,
        compilers,
        data,
        finetune,
        labels,
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
    from jaxdp.finetune.tune import tune
    from jaxdp.privacy.ledger import BudgetExceeded, Ledger
    from jaxdp.transforms import losses
    from jaxdp.transforms.clipping import clipped_grad, split_clip_norm
    from jaxdp.transforms.intervals import Interval, interval
    from jaxdp.transforms.model_check import ModelCheck, check
    from jaxdp.transforms.noise import correlated, privatize

# Names load on first use, so that `import jaxdp` stays fast and pulls in only what is called.
_ATTRIBUTES = {
    "check": "jaxdp.transforms.model_check",
    "ModelCheck": "jaxdp.transforms.model_check",
    "clipped_grad": "jaxdp.transforms.clipping",
    "interval": "jaxdp.transforms.intervals",
    "Interval": "jaxdp.transforms.intervals",
    "split_clip_norm": "jaxdp.transforms.clipping",
    "correlated": "jaxdp.transforms.noise",
    "privatize": "jaxdp.transforms.noise",
    "Ledger": "jaxdp.privacy.ledger",
    "BudgetExceeded": "jaxdp.privacy.ledger",
    "tune": "jaxdp.finetune.tune",
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
    "correlated",
    "interval",
    "losses",
    "privatize",
    "split_clip_norm",
    "tune",
]
__all__ += sorted(_PACKAGES)


@functools.cache
def _warn_of_namesake() -> None:
    """Warns if the other project of this name is installed, whose files are mixed with these."""
    import importlib.metadata  # which takes 30 ms

    if any(importlib.metadata.distributions(name="jaxdp")):
        warnings.warn(
            "the distribution jaxdp is installed beside jaxdp-ledger. Both are imported as jaxdp, "
            "and one has replaced files of the other. Run: pip uninstall -y jaxdp jaxdp-ledger. "
            "Then install this one again.",
            stacklevel=3,
        )


def __getattr__(name: str) -> Any:
    _warn_of_namesake()  # not on import, which is immediate
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(_ATTRIBUTES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
