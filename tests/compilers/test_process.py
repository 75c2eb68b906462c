"""Programs that go to the compiler of a machine that is not there, and what comes back."""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import compilers
from jaxdp.compilers import process, targets
from jaxdp.transforms import chacha, noise

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed, which compiles for TPU",
)
KEY = noise.stream(bytes(16), "test")
SIZES = {"argument": 100, "output": 60, "temp": 1000, "alias": 50}


SHIFT = np.full(5, 3.0, np.float32)  # which the function closes over


def noisy(key, x, unused):
    return noise.gaussian(key, x, 1.0) + SHIFT[0], jax.random.split(key)


@pytest.mark.slow
def test_a_program_is_written_for_its_target_with_keys_as_words():
    step = jax.jit(noisy, donate_argnums=(1,))
    data, donated = process.exported("v5e", step, (KEY, jnp.zeros((9, 5)), np.zeros(7, np.int16)))
    program = jax.export.deserialize(bytearray(data))
    assert program.platforms == ("tpu",) and "tpu_custom_call" in program.mlir_module()
    assert [(x.shape, x.dtype.name) for x in program.in_avals] == [
        ((8,), "uint32"),
        ((9, 5), "float32"),
        ((7,), "int16"),  # which the step does not read
    ]
    assert [x.shape for x in program.out_avals] == [(9, 5), (2, 8)] and donated == (1,)
    data, donated = process.exported(
        "h100", noisy, (KEY, jax.ShapeDtypeStruct((3,), jnp.float32), 1.0)
    )
    program = jax.export.deserialize(bytearray(data))
    assert (
        program.platforms == ("cuda",)
        and "tpu_custom_call" not in program.mlir_module()
        and donated == ()
    )


@pytest.mark.slow
def test_a_written_program_computes_what_the_function_does():
    """On this machine, so that keys and results are known to be in their places."""
    here = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(targets.TARGETS, "here", targets.Target(here, {}, 1.0, 1))
        data, _ = process.exported("here", noisy, (KEY, jnp.zeros(5), 0))
    drawn, keys = jax.export.deserialize(bytearray(data)).call(
        jax.random.key_data(KEY), jnp.zeros(5), 0
    )
    expected = noisy(KEY, jnp.zeros(5), 0)
    np.testing.assert_array_equal(drawn, expected[0])
    assert abs(np.mean(drawn) - 3) < 3
    np.testing.assert_array_equal(keys, jax.random.key_data(expected[1]))


def answered(monkeypatch, answer, target="v5e"):
    """Returns the estimate of a program whose compiler gives an answer."""
    monkeypatch.setattr(process, "_answer", lambda *_: answer)
    monkeypatch.setattr(targets, "COMPILERS", dict.fromkeys(("tpu", "cuda"), "jax"))
    return compilers.estimate(target, jnp.sin, np.zeros(3, np.float32))


def test_an_estimate_is_cycles_over_the_clock_and_all_of_the_memory(monkeypatch):
    answer = {"total": 3e9, "cycles": 3e9, "memory": SIZES}
    found = answered(monkeypatch, answer)
    assert found.seconds == pytest.approx(2.0) and found.memory == 1110 and found.fits
    assert found.details["cycles"] == 3e9
    assert answered(monkeypatch, {"total": 3.0, "memory": SIZES}, "h100").seconds == 3.0
    large = {"total": 1.0, "memory": SIZES | {"temp": 80 * 10**9}}
    assert (
        not answered(monkeypatch, large, "h100").fits and answered(monkeypatch, large, "v5p").fits
    )


@pytest.mark.parametrize(
    ("message", "memory"),
    [
        (
            "Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded hbm "
            "capacity by 1.75G.",
            17.5,
        ),
        (
            "the total memory required for HLO temporaries (640.00G) exceeds available HBM "
            "(15.75G)",
            640,
        ),
        ("Used 512.0M of 15.75G hbm", 0.5),
    ],
)
def test_a_program_that_the_compiler_refuses_for_its_memory_does_not_fit(
    message, memory, monkeypatch
):
    found = answered(monkeypatch, {"error": f"RESOURCE_EXHAUSTED: {message}"})
    assert found.memory == memory * 2**30 and found.seconds is None and not found.fits


def test_what_is_wrong_is_said(monkeypatch):
    with pytest.raises(
        compilers.NotCompiled, match="the compiler of v5e refused the program: UNIMPLEMENTED"
    ):
        answered(monkeypatch, {"error": "UNIMPLEMENTED: used 3 of 4"})
    with pytest.raises(ValueError, match="target must be one of v5e, v6e, v5p, h100, got 'v2'"):
        compilers.estimate("v2", jnp.sin, 1.0)
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ImportError,
        match=r"is not installed, .* the extra compilers: pip install \"\.\[compilers\]",
    ):
        compilers.estimate("h100", jnp.sin, 1.0)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="fewer than two devices")
def test_an_array_of_several_devices_is_refused():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    x = jax.device_put(np.zeros(4, np.float32), jax.sharding.NamedSharding(mesh, jax.P("data")))
    with pytest.raises(ValueError, match="args must be for one device"):
        process.exported("v5e", jnp.sin, (x,))


@pytest.mark.slow
def test_a_process_that_ends_is_an_error_and_so_is_one_that_is_late(tmp_path):
    environment = dict(os.environ)
    assert targets.answered("jaxdp.compilers", str(tmp_path), environment, 0.01) == {
        "error": "it was not compiled in 0.01 s"
    }
    found = targets.answered("jaxdp.compilers", str(tmp_path), environment)  # an empty folder
    assert found["error"].startswith("FileNotFoundError") and targets.QUESTION in found["error"]


@needs_libtpu
@pytest.mark.slow
def test_the_schedule_of_a_kernel_is_that_of_the_kernel_alone():
    """The program's own process writes no schedules."""
    assert "dump" not in targets.environment("v5e").get("LIBTPU_INIT_ARGS", "")
    words, many = np.zeros(8, np.uint32), jax.ShapeDtypeStruct((2**16,), jnp.float32)

    def draw(words, like):
        key = jax.random.wrap_key_data(words, impl=chacha.CHACHA12)
        return noise.gaussian(key, like, 1.0)

    estimate = compilers.estimate("v5e", draw, words, many)
    [kernel] = estimate.details["pallas"]
    assert kernel["bundles"] > kernel["cycles_of_bytes"] > 0


@needs_libtpu
@pytest.mark.slow
def test_a_step_is_compiled_for_a_tpu_and_a_large_one_does_not_fit():
    code = """
import jax, jax.numpy as jnp
from jaxdp import compilers

def step(w, x, state):
    return w - x.T @ (x @ w), state

shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (512, 1024), (2**20,))]
found = compilers.estimate("v5e", jax.jit(step, donate_argnums=(0, 2)), *shapes)
again = compilers.estimate("v5e", step, *shapes)
large = compilers.estimate("v5e", lambda x: jnp.sin(x), jax.ShapeDtypeStruct((2**34,), jnp.float32))
print(found.memory, again.memory, found.seconds, large.memory, large.fits)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    memory, without_donation, seconds, large, fits = ended.stdout.split()[-5:]
    arrays = 4 * (2**20 + 2**19 + 2**20)
    assert arrays <= int(memory) < 2 * arrays and int(without_donation) >= int(memory) + 4 * 2**21
    assert 0 < float(seconds) < 1e-3
    assert int(large) >= 2**36 and fits == "False"
