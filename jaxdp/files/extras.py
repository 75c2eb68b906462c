"""Optional packages, which are imported on use."""

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
            f'{module} is needed here ({error}): pip install "jaxdp[{extra}]".'
        ) from error
