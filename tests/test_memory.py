"""Freed memory is kept for the next step, and programs are freed before they are too many."""

import gc
import pathlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Ledger, data, finetune, memory, pretrain

# A step with temporaries of 40 MB, of a kind that XLA dispatches asynchronously by default. One
# process with the settings and one without them are forks, before JAX starts.
PROGRAM = """
import os, resource, sys
import jax, jax.numpy as jnp, numpy as np
from jaxdp.memory import keep_freed_memory


def faults():
    step = jax.jit(lambda x: (x[:, None] + x) @ jnp.ones((3200, 1)))
    rounds = []
    # The first rounds take the memory, and now and then a small block splits a large one.
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(2):
            step(np.zeros(3200, np.float32)).block_until_ready()
        rounds.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(rounds)


for keep in (True, False):
    pid = os.fork()
    if not pid:
        print(keep and keep_freed_memory(), faults(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.slow
def test_freed_memory_is_kept(run_in_subprocess):
    (kept, count), (_, default) = (
        line.split() for line in run_in_subprocess(PROGRAM).stdout.splitlines()
    )
    if kept != "True":
        pytest.skip("only glibc gives freed memory back to the system")
    assert int(count) < 1000
    # Without the settings the system clears the pages of every step again.
    assert int(default) > 10 * max(int(count), 50)


@pytest.mark.skipif(not memory.mappings(), reason="the system does not tell the number of mappings")
def test_programs_are_freed_before_they_are_too_many(monkeypatch):
    traced = []

    @jax.jit
    def program(x):
        traced.append(x)
        return jnp.cos(x) * 3

    limit = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    before = memory.mappings()
    program(np.zeros(7, np.float32))
    assert memory.mappings() > before  # a program takes mappings
    with monkeypatch.context() as patched:
        patched.setattr(memory, "mappings", lambda: limit // 2)
        assert not memory.make_room_for_programs()
    program(np.zeros(7, np.float32))
    assert len(traced) == 1
    taken = memory.mappings()
    with monkeypatch.context() as patched:
        patched.setattr(memory, "mappings", lambda: limit // 2 + 1)
        assert memory.make_room_for_programs()
    assert memory.mappings() < taken
    np.testing.assert_array_equal(program(np.zeros(7, np.float32)), np.full(7, 3))
    assert len(traced) == 2


class Called(Exception):
    """What the tests put in the place of freeing programs."""


@pytest.fixture
def caught(monkeypatch):
    def make_room():
        raise Called

    monkeypatch.setattr(memory, "make_room_for_programs", make_room)


PARAMS = {"w": np.zeros(2, np.float32)}
SOURCE = data.from_arrays(x=np.ones((4, 2), np.float32))


def loss(params, example):
    return (params["w"] * example["x"]).sum()


def test_private_training_makes_room_first(caught, tmp_path):
    sampler = data.PoissonSampler(4, 0.5)
    trainer = finetune.dp_sgd(
        loss, optax.sgd(0.1), sampler=sampler, noise_multiplier=1.0, clip_norm=1.0
    )
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("d", adjacency="add_remove", unit="example", delta=1e-5)
        with pytest.raises(Called):
            finetune.fit(trainer, PARAMS, SOURCE, steps=1, account=ledger.account("d"))
        assert ledger.epsilon("d") == 0


def test_programs_keep_no_clipped_gradient_and_no_loss():
    """A search makes many losses, whose closures may hold large arrays."""
    examples = np.ones((4, 2), np.float32)

    def used():
        def own_loss(params, example):
            return (params["w"] * example).sum()

        grad_fn = jaxdp.clipped_grad(own_loss, clip_norm=1.0)
        grad_fn(PARAMS, examples)  # alone
        jax.jit(grad_fn)(PARAMS, examples)  # in another program
        grad_fn.per_example(PARAMS, examples)
        return weakref.ref(grad_fn), weakref.ref(own_loss)

    references = used()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


class Slotted:
    """A source that no weak reference can be to."""

    __slots__ = ()
    fingerprint = SOURCE.fingerprint

    def __len__(self):
        return len(SOURCE)

    def gather(self, rows):
        return SOURCE.gather(rows)


def test_a_trainer_keeps_no_source():
    """A trainer may outlive the records that it was trained on, of which a source has many."""
    trainer = finetune.dp_sgd(
        loss,
        optax.sgd(0.1),
        sampler=data.PoissonSampler(4, 0.5),
        noise_multiplier=1.0,
        clip_norm=1.0,
    )
    state = trainer.init(PARAMS)

    def used():
        source = data.from_arrays(x=np.ones((4, 2), np.float32))
        trainer.load(state, source, np.arange(4))
        return weakref.ref(source)

    reference = used()
    gc.collect()
    assert reference() is None
    slotted = Slotted()
    assert trainer.physical(state, slotted) == trainer.physical(state, slotted)


def test_public_training_makes_room_first(caught):
    trainer = pretrain.sam(loss, optax.sgd(0.1), gamma=0.1)
    sizes = {"perturbation_batch_size": 2, "update_batch_size": 2}
    with pytest.raises(Called):
        pretrain.fit(trainer, PARAMS, SOURCE, steps=1, seed=bytes(16), shared_batch=True, **sizes)
