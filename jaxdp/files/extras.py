"""Optional packages, which are imported on use.

An error never advises to install `jaxdp` by its name: on PyPI another project has this name.
"""

import importlib
from typing import Any


def optional(module: str, extra: str) -> Any:
    """Imports and returns a module of an extra.

    Raises:
      ImportError: The module is missing. The message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{module} is needed here ({error}): pip install ".[{extra}]" in a checkout of jaxdp, '
            f"or its wheel with [{extra}] behind the name of the file."
        ) from error
