"""The study of audits: which claims are audited, and which broken twins of each mechanism the
audits catch.

Every module here defines `CASES`, a tuple of `Case`s. `python -m launch.audit` runs all cases and
writes the table.
"""

import importlib
import pkgutil

from .case import Case


def cases() -> tuple[Case, ...]:
    """Returns the cases of all modules of this package, in the order of the modules' names."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    ]
    return tuple(case for module in modules for case in getattr(module, "CASES", ()))
