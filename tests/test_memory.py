"""Freed memory is kept for the next step."""

import subprocess
import sys

import pytest

# What XLA does in every step, in a thread of its own: it takes 64 MB, writes them and frees them.
PROGRAM = """
import resource, sys, threading
import numpy as np
from jaxdp.memory import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()

def steps():
    for _ in range(10):
        np.ones(8_000_000)

for _ in range(2):  # the first round takes the memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(argument):
    done = subprocess.run([sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.slow
def test_freed_memory_is_kept():
    kept, count = faults("keep")
    if not kept:
        pytest.skip("only glibc gives freed memory back to the system")
    assert count < 1000
    # Without the settings the system clears the pages of every step again.
    assert faults("default")[1] > 10 * max(count, 50)
