"""The study of audits: which claims are audited, and which broken twins of each mechanism the
audits catch.

Every module of `MODULES` defines `CASES`, a tuple of `Case`s. `python -m launch.audit` runs all
cases and writes the table.
"""

import importlib
import pkgutil

from .case import Case

# The modules of this package by name. A module from elsewhere is added by its whole name.
MODULES = [f".{found.name}" for found in pkgutil.iter_modules(__path__)]


def cases() -> tuple[Case, ...]:
    """Returns the cases of all modules in their order."""
    found: list[Case] = []
    for name in MODULES:
        module = importlib.import_module(name, __name__)
        found += getattr(module, "CASES", ())
    return tuple(found)
