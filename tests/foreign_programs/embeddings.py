"""Programs that look up rows of tables."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.foreign_programs.entries import Array, Program, energy, program


@program((5, 4), (20_000, 64), flops=1.2, bytes=1.4)
def dlrm_stacked_tables(rows: int, width: int) -> Program:
    """Looks up one row in each of four stacked tables (DLRM)."""

    def loss(p: Any, e: Any) -> Any:
        ids, dense = e
        found = p["tables"][jnp.arange(4), ids]
        features = jnp.concatenate([found, jnp.tanh(dense @ p["bottom"])[None]])
        return energy(
            jnp.concatenate([(features @ features.T).ravel(), features.ravel()]) @ p["top"]
        )

    params = {
        "tables": Array((4, rows, width)),
        "bottom": Array((13, width)),
        "top": Array((25 + 5 * width, width)),
    }
    return Program(loss, params, (Array((4,), rows), Array((13,))))


@program((5, 4), (20_000, 64), flops=1.2, bytes=1.6)
def dlrm_tables_by_vmap(rows: int, width: int) -> Program:
    """Looks up one row in each of four stacked tables by `vmap`, which makes a gather with batching
    dimensions."""

    def loss(p: Any, ids: Any) -> Any:
        return energy(jax.vmap(lambda t, i: t[i])(p["tables"], ids).ravel() @ p["top"])

    return Program(
        loss,
        {"tables": Array((4, rows, width)), "top": Array((4 * width, width))},
        Array((4,), rows),
    )


@program((7, 4, 6), (50_000, 64, 40), flops=1.4, bytes=1.7)
def embedding_bag_by_segments(rows: int, width: int, length: int) -> Program:
    """Sums looked-up rows by segments (EmbeddingBag with offsets)."""

    def loss(p: Any, e: Any) -> Any:
        ids, bags = e
        return energy(jnp.tanh(jax.ops.segment_sum(p["table"][ids], bags, num_segments=4)) @ p["w"])

    return Program(
        loss,
        {"table": Array((rows, width)), "w": Array((width, width))},
        (Array((length,), rows), Array((length,), 4)),
    )


@program((7, 4, 6), (50_000, 64, 40), flops=1.7, bytes=2.0)
def embedding_bag_by_mean(rows: int, width: int, length: int) -> Program:
    """Averages looked-up rows with weights (EmbeddingBag)."""

    def loss(p: Any, e: Any) -> Any:
        ids, weights = e
        return energy(jnp.tanh((p["table"][ids] * weights[:, None]).mean(0)) @ p["w"])

    return Program(
        loss,
        {"table": Array((rows, width)), "w": Array((width, width))},
        (Array((length,), rows), Array((length,))),
    )


@program((7, 4, 5), (50_000, 512, 64), flops=1.2, bytes=1.4, batch=8)
def tied_embeddings(rows: int, width: int, length: int) -> Program:
    """Uses one table for tokens and logits."""

    def loss(p: Any, tokens: Any) -> Any:
        x = jnp.tanh(p["table"][tokens] @ p["w"])
        scores = jax.nn.log_softmax(x @ p["table"].T)
        return -jnp.take_along_axis(scores, jnp.roll(tokens, -1)[:, None], 1).mean()

    return Program(
        loss, {"table": Array((rows, width)), "w": Array((width, width))}, Array((length,), rows)
    )


@program((7, 4, 5), (5_000, 64, 64), flops=1.2, bytes=2.7)
def one_hot_embedding(rows: int, width: int, length: int) -> Program:
    """Looks up by a product with one-hot rows."""

    def loss(p: Any, tokens: Any) -> Any:
        return energy(
            jnp.tanh(jax.nn.one_hot(tokens, rows, dtype=p["table"].dtype) @ p["table"]) @ p["w"]
        )

    return Program(
        loss, {"table": Array((rows, width)), "w": Array((width, width))}, Array((length,), rows)
    )


@program((4, 3, 2), (32, 1024, 16), flops=1.3, bytes=1.9)
def codebooks_by_take_along_axis(books: int, codes: int, width: int) -> Program:
    """Looks up one code in each codebook (product quantisation)."""

    def loss(p: Any, e: Any) -> Any:
        found = jnp.take_along_axis(p["codes"], e[:, None, None], axis=1)[:, 0]
        return energy(jnp.tanh(found.ravel()) @ p["w"])

    return Program(
        loss,
        {"codes": Array((books, codes, width)), "w": Array((books * width, width))},
        Array((books,), codes),
    )


@program((6, 4), (512, 256), flops=1.2, bytes=2.2)
def sliced_positions(length: int, width: int) -> Program:
    """Adds the first positions of a table, and a run of a table from where an example says."""

    def loss(p: Any, e: Any) -> Any:
        x, start = e
        shifted = lax.dynamic_slice_in_dim(p["shifted"], start, length // 2)
        return energy(jnp.tanh(x + p["positions"][: length // 2] + shifted) @ p["w"])

    shape = Array((length, width))
    return Program(
        loss,
        {"positions": shape, "shifted": shape, "w": Array((width, width))},
        (Array((length // 2, width)), Array((), length // 2)),
    )


@program((6, 4), (1_000, 256), flops=1.2, bytes=1.3)
def class_embedding(classes: int, width: int) -> Program:
    """Looks up one row by a scalar, which JAX writes as a slice (conditional generators)."""

    def loss(p: Any, e: Any) -> Any:
        label, x = e
        return energy(jnp.tanh(x + p["table"][label]) @ p["w"])

    return Program(
        loss,
        {"table": Array((classes, width)), "w": Array((width, width))},
        (Array((), classes), Array((width,))),
    )
