"""Programs as other libraries write them: clipped gradients are right, and none costs what B x P
would."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import bench_programs
from jaxdp.transforms import clipped_sums, clipping, method_costs, sites
from tests import foreign_programs

BATCH = 3


def reference(loss: Any, params: Any, batch: Any, clip_norm: float) -> tuple[jax.Array, Any]:
    """Returns norms and the clipped sum by `vmap` of `grad`."""
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    norms = jnp.sqrt(sum(jnp.square(g).reshape(BATCH, -1).sum(1) for g in jax.tree.leaves(grads)))
    factors = jnp.minimum(1, clip_norm / norms)
    return norms, jax.tree.map(lambda g: jnp.einsum("b,b...->...", factors, g), grads)


def over_budget(entry: Any) -> list[str]:
    """Returns which counts of the clipped gradient exceed their budget."""
    found = bench_programs.work(entry)
    ratios = {
        kind: getattr(found["clipped"], kind) / getattr(found["plain"], kind)
        for kind in ("flops", "bytes")
    }
    return [f"{kind} {r:.2f}" for kind, r in ratios.items() if r > getattr(entry, kind)]


@pytest.mark.slow
@pytest.mark.parametrize("name", foreign_programs.PROGRAMS)
def test_large_programs_are_within_budget_and_small_ones_equal_vmap(
    name: str, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gives the weights of the small program, in float64, the treatment that those of the large
    program get."""
    entry, chosen, choose = foreign_programs.PROGRAMS[name], list[str](), method_costs.choose_method

    def noted(*args: Any) -> str:
        chosen.append(choose(*args))
        return chosen[-1]

    monkeypatch.setattr(clipped_sums, "choose_method", noted)
    assert not over_budget(entry)

    monkeypatch.setattr(clipped_sums, "choose_method", lambda *args: chosen.pop(0))
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        made = entry.build(*entry.small)
        params, batch = (
            foreign_programs.drawn(made.params, 0),
            foreign_programs.drawn(made.example, 1, (BATCH,)),
        )

        def run(params: Any, batch: Any) -> Any:
            expected = reference(made.plain or made.loss, params, batch, 0.1)
            return expected, clipping.clipped_grad(made.loss, clip_norm=0.1)(params, batch)

        options = oracle.compiler_options((params, batch))
        (norms, sums), out = jax.device_get(jax.jit(run, compiler_options=options)(params, batch))
    assert not chosen
    tolerance = 1e-2 if name == "bfloat16_layers" else 1e-9
    assert norms.dtype == np.float64 and np.all(norms > 1e-3) and np.any(norms > 0.1)
    np.testing.assert_allclose(out.norms, norms, rtol=tolerance)
    for g, e in zip(jax.tree.leaves(out.grads), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(g, e, rtol=tolerance, atol=tolerance * np.abs(e).max())


# Ways to read parts of a weight [4, 5, 3] at integers [2] from -1 to 4. None reads the whole
# weight.
READS: dict[str, Any] = {
    "columns": lambda w, i: w[:, i],
    "two dimensions": lambda w, i: w[i, i],
    "first and last": lambda w, i: w[i, :, i],
    "out of range": lambda w, i: w.at[2 * i - 3, i].get(mode="fill", fill_value=0),
    "clipped": lambda w, i: w.at[2 * i, i].get(mode="clip"),
    "entries": lambda w, i: jnp.take_along_axis(w, jnp.broadcast_to(abs(i[0]) % 3, (4, 5, 1)), 2),
    "a table each": lambda w, i: jax.vmap(lambda w, i: w[i])(w, jnp.tile(i, 2)),
    "a column each": lambda w, i: jax.vmap(lambda w, i: w[i], (1, 0))(w, jnp.arange(5) * i[0]),
    "a scalar": lambda w, i: w[i[0]],
    "a run": lambda w, i: lax.dynamic_slice_in_dim(w, i[0], 3, 1),
    "a window": lambda w, i: lax.dynamic_slice(w, (i[0], i[1], i[0]), (2, 3, 3)),
    "windows": lambda w, i: jax.vmap(lambda k: lax.dynamic_slice(w, (k, k, k), (2, 5, 1)))(i),
    "twice": lambda w, i: jnp.concatenate([w[i[0], 1:], w[:, i[1]]]),
    "twice by rows": lambda w, i: w[i] * w[i[::-1] - 1],
}


@pytest.mark.slow
def test_reads_of_any_part_of_a_weight(oracle: Any) -> None:
    def loss(p: Any, e: Any) -> Any:
        x, i = e
        return sum(
            foreign_programs.energy(jnp.sin(read(p[name], i)) * x) for name, read in READS.items()
        )

    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        rng = np.random.default_rng(0)
        params = {name: rng.normal(size=(4, 5, 3)) for name in READS}
        batch = rng.normal(size=BATCH), np.array([[0, 2], [3, 3], [-1, 4]])

        def run(params: Any, batch: Any) -> Any:
            found = oracle.every_method(loss, ("factors", "drop"), params, batch, clip_norm=0.1)
            return reference(loss, params, batch, 0.1), found

        options = oracle.compiler_options((params, batch))
        (norms, sums), found = jax.device_get(jax.jit(run, compiler_options=options)(params, batch))
        assert all(
            leaf.rules == ("embedding",)
            for leaf in clipping.clipped_grad(loss, clip_norm=1.0).plan(params, batch)
        )
    assert set(found) == {"factors", "drop"}
    for method, out in found.items():
        np.testing.assert_allclose(out.norms, norms, rtol=1e-9)
        for name in READS:
            message = f"{name}, {method}"
            np.testing.assert_allclose(
                out.grads[name], sums[name], rtol=1e-9, atol=1e-12, err_msg=message
            )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_ragged_dot_inside_of_other_programs(engine: Any, oracle: Any) -> None:
    """Uses the primitive with other weights in a loop, a branch and a recomputed block. JAX cannot
    batch it."""
    sizes = jnp.array([2, 0, 1], jnp.int32)

    def loss(p: Any, x: Any) -> Any:
        block = jax.checkpoint(lambda w, x: jnp.sin(lax.ragged_dot(x, w, sizes)))
        x = lax.scan(lambda h, w: (block(w, h), None), x, p["stack"])[0]
        return foreign_programs.energy(
            lax.cond(x[0, 0] > 0, lambda: lax.ragged_dot(x, p["w"], sizes), lambda: 2 * x)
        )

    def known(p: Any, x: Any) -> Any:
        group = jnp.array([0, 0, 2])
        for w in p["stack"]:
            x = jnp.sin(jnp.einsum("td,tdf->tf", x, w[group]))
        return foreign_programs.energy(
            jnp.where(x[0, 0] > 0, jnp.einsum("td,tdf->tf", x, p["w"][group]), 2 * x)
        )

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        rng = np.random.default_rng(0)
        params, batch = (
            {"stack": rng.normal(size=(2, 3, 2, 2)), "w": rng.normal(size=(3, 2, 2))},
            rng.normal(size=(BATCH, 3, 2)),
        )

        def run(params: Any, batch: Any) -> Any:
            clipped = clipping.clipped_grad(loss, clip_norm=0.1, engine=engine)
            return reference(known, params, batch, 0.1), clipped(params, batch)

        options = oracle.compiler_options((params, batch))
        (norms, sums), out = jax.device_get(jax.jit(run, compiler_options=options)(params, batch))
    np.testing.assert_allclose(out.norms, norms, rtol=1e-9)
    jax.tree.map(
        lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-9, atol=1e-12), out.grads, sums
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (sites.Lookup, "dlrm_stacked_tables"),
        (sites.Lookup, "dlrm_tables_by_vmap"),
        (sites.Lookup, "embedding_bag_by_segments"),
        (sites.Lookup, "class_embedding"),
        (sites.Dot, "equinox_gru"),
        (sites.Dot, "tied_autoencoder"),
    ],
)
def test_the_budget_notices_a_missing_rule(
    rule: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "of", lambda *args: None)
    assert over_budget(foreign_programs.PROGRAMS[name])
