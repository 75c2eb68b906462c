"""Freed memory is kept for the next step."""

import subprocess
import sys

import pytest

# A step with temporaries of 64 MB, of a kind that XLA dispatches asynchronously by default.
PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np
from jaxdp.memory import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()
step = jax.jit(lambda x: jnp.exp(x[:, None] + x) @ jnp.ones((4000, 8)))
rounds = []
for _ in range(4):  # the first rounds take the memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step(np.zeros(4000, np.float32)).block_until_ready()
    rounds.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(rounds))
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
