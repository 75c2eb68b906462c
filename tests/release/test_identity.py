"""What a token hashes: everything that can move a bit, and nothing that has no bits."""

import os
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxdp.release import digest, program
from jaxdp.release.identity import calls_host, environment
from tests import forked

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(3, np.float32), np.zeros(3, np.int32)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2))),
        ({"a": np.ones(2)}, {"b": np.ones(2)}),
        ([1.0, 2.0], [2.0, 1.0]),
        (0.0, -0.0),
        (1, True),
        ("1", 1),
        ("ab", b"ab"),
        (["a", "b"], ["ab"]),
        (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float16)),
    ],
)
def test_what_differs_has_another_digest(one, other):
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_a_digest_does_not_depend_on_where_an_array_is_or_how_it_is_laid_out():
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    assert (
        digest(x) == digest(jnp.asarray(x)) == digest(np.asfortranarray(x)) == digest(x[::-1][::-1])
    )


@pytest.mark.parametrize("leaf", [lambda x: x, jax.random.key(0), object(), np.array([object()])])
def test_what_has_no_bytes_is_refused(leaf):
    with pytest.raises(TypeError, match=r"a fact at .*'f'"):
        digest({"f": leaf})


def test_calls_to_the_host_are_seen_and_other_custom_calls_are_not():
    def texts(*functions):
        return [program(jax.jit(f), jnp.ones((3, 3))) for f in functions]

    hosts = texts(
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3, 3), jnp.float32), x),
        lambda x: io_callback(np.sin, jax.ShapeDtypeStruct((3, 3), jnp.float32), x),
        lambda x: jax.lax.scan(
            lambda c, _: (jax.pure_callback(np.cos, SCALAR, c), None), x[0, 0], None, length=3
        )[0],
    )
    assert all(map(calls_host, hosts))
    # as TPUs have it
    assert calls_host('"stablehlo.send"(%0, %1) {channel_handle = #c, is_host_transfer = true}')
    plain = texts(
        *(
            jnp.linalg.qr,
            jnp.linalg.svd,
            jnp.linalg.eigh,
            jnp.linalg.eigvals,
            jnp.linalg.cholesky,
            jnp.linalg.inv,
        ),
        lambda x: jnp.sort(x) @ x,
        lambda x: jax.random.normal(jax.random.key(0), x.shape),
        lambda x: jax.lax.approx_max_k(x, 2),
    )
    assert not any(map(calls_host, plain))


@pytest.mark.parametrize("target", ["counter", "lapack", "my_lapack_spotrf_ffi", "Qr2", "foo.bar"])
def test_foreign_functions_are_calls_to_the_host(target):
    """A foreign function may count its calls. Only the names of JAX's own functions are known to be
    pure."""
    call = jax.ffi.ffi_call(target, SCALAR, vmap_method="sequential")
    text = program(jax.jit(call), jnp.float32(1))
    assert target in text
    assert calls_host(text)
    # A text that has a pure call next to it, and the generic form of an operation.
    assert calls_host(f"%0 = stablehlo.custom_call @lapack_spotrf_ffi(%1)\n{text}")
    assert calls_host(f'"stablehlo.custom_call"(%0) {{call_target_name = "{target}"}}')


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_a_text_has_the_arrays_that_a_function_closes_over(make):
    """Whether they are few or many, and wherever they differ."""

    def text(size, last):
        constant = np.ones(size, np.float32)
        constant[-1] = last
        constant = make(constant)
        return program(jax.jit(lambda x: x + constant), jnp.ones(size))

    for size in (2, 100_000):
        assert text(size, 2) == text(size, 2) != text(size, 2.0000002)


@pytest.mark.parametrize("change", ["flag", "variable", "host", "cores", "nothing", "cache"])
def test_the_environment_knows_what_changes_the_arithmetic(monkeypatch, change):
    before = environment()
    if change == "variable":
        monkeypatch.setenv(
            "XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=true"
        )
    elif change == "cache":
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    elif change == "host":
        monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    elif change == "cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(1000), raising=False)
    precision = "highest" if change == "flag" else jax.config.values["jax_default_matmul_precision"]
    old = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", precision)
    try:
        assert (environment() == before) == (change in ("nothing", "cache"))
    finally:
        jax.config.update("jax_default_matmul_precision", old)


@pytest.mark.slow
def test_the_environment_is_the_same_in_another_process():
    """A fact that has an address in it, or an order of a set, would never let a release be
    repeated."""
    code = "import json\nfrom jaxdp.release import digest\n"
    code += "from jaxdp.release.identity import environment\n"
    code += "print(digest(json.dumps(environment(), sort_keys=True)))"
    processes = [forked.run(code, modules=forked.STAGES) for _ in range(2)]  # of two interpreters
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr
    assert len({process.stdout for process in processes}) == 1
