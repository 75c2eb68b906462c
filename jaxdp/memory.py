"""The memory that a process keeps: freed blocks for the next step, and compiled programs."""

import ctypes
import gc
import pathlib
import sys

# The parameters of mallopt(3) in glibc.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Makes this process keep the memory that it frees, for the next step.

    Otherwise it gives the memory back to the system.

    XLA on CPU allocates the temporaries of a compiled call when it starts and frees them when it
    ends. glibc returns blocks of more than 32 MB to the system, which then clears every page again.
    This takes a fifth to a third of a training step of a small ResNet or ViT. The process then
    holds the largest amount of memory that it ever needed.

    Only the main thread's heap in glibc can grow beyond 64 MB. So the function also turns off JAX's
    asynchronous dispatch on CPU (`jax_cpu_enable_async_dispatch`): a call then computes in the
    thread that made it. One heap for all threads would work too, but each thread's small blocks
    would be looked for among all that compiling has left, which can double the time of a step.

    Call the function once when a program starts, before JAX has computed anything, and train in the
    main thread. The launchers do.

    Returns:
      Whether the process has these settings now. Only glibc has them, and jemalloc and others do
      not need them.
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


def mappings() -> int:
    """Returns the number of memory mappings of this process, 0 if the system does not tell."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def forget_programs() -> None:
    """Frees compiled programs that nothing else holds, and returns their memory to the system.

    A function that is called again is traced again. Its program is read from JAX's compilation
    cache if there is one.
    """
    import jax

    jax.block_until_ready(jax.live_arrays())  # a program that still runs must not be freed
    jax.clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc keeps freed memory otherwise
        libc.malloc_trim(0)


def make_room_for_programs() -> bool:
    """Calls `forget_programs` if this process has over half of the mappings that Linux allows.

    JAX keeps every program that it compiles, and XLA on CPU takes several mappings for each. Every
    trainer has programs of its own, some 300 mappings. The default limit (`vm.max_map_count`) is
    65,530. At the limit XLA cannot load a program and ends the process. `jaxdp.finetune.fit`,
    `jaxdp.pretrain.fit` and the cells of a study call this first.

    Returns:
      Whether programs were freed.
    """
    limit = pathlib.Path("/proc/sys/vm/max_map_count")
    if not limit.exists() or mappings() <= int(limit.read_text()) // 2:
        return False
    forget_programs()
    return True
