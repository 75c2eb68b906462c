"""The memory that a CPU process keeps between steps."""

import ctypes
import sys

# The parameters of mallopt(3) in glibc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> bool:
    """Makes this process keep the memory that it frees, for the next step, in place of giving it back to the system.

    XLA on CPU allocates the temporaries of a compiled call when it starts and frees them when it ends. glibc returns
    blocks of more than 32 MB to the system, which then clears every page again. This takes a fifth to a third of a
    training step of a small ResNet or ViT. Call the function once when a program starts. The launchers do. The process
    then holds the largest amount of memory that it ever needed.

    Returns:
      Whether the process has these settings now. Only glibc has them, and jemalloc and others do not need them.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # Only the main arena can grow beyond 64 MB, and by default every thread has an arena of its own.
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: 2**30, _TRIM_THRESHOLD: 2**31 - 1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
