"""`ConfigDict` and its flags. Without the extra "launch" their import says how to get it."""

from jaxdp.files import optional

optional("ml_collections", "launch")

from ml_collections import ConfigDict, config_flags  # noqa: E402

__all__ = ["ConfigDict", "config_flags"]
