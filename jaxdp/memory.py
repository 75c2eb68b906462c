"""The memory that a CPU process keeps between steps."""

import ctypes
import sys

# The parameters of mallopt(3) in glibc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Makes this process keep the memory that it frees, for the next step, in place of giving it back to the system.

    XLA on CPU allocates the temporaries of a compiled call when it starts and frees them when it ends. glibc returns
    blocks of more than 32 MB to the system, which then clears every page again. This takes a fifth to a third of a
    training step of a small ResNet or ViT. The process then holds the largest amount of memory that it ever needed.

    Only the main thread's heap in glibc can grow beyond 64 MB. So the function also turns off JAX's asynchronous
    dispatch on CPU (`jax_cpu_enable_async_dispatch`): a call then computes in the thread that made it. One heap for all
    threads would work too, but each thread's small blocks would be looked for among all that compiling has left, which
    can double the time of a step.

    Call the function once when a program starts, before JAX has computed anything, and train in the main thread. The
    launchers do.

    Returns:
      Whether the process has these settings now. Only glibc has them, and jemalloc and others do not need them.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    settings = {_MMAP_THRESHOLD: 2**30, _TRIM_THRESHOLD: 2**31 - 1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
