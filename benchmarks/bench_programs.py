"""Counts operations and bytes of clipped gradients over plain gradients, for programs that other
libraries write.

    python -m benchmarks run programs --update

Nothing is compiled or run. The counts depend on JAX's release and on the backend, not on the
machine."""

import jax

import jaxdp
from benchmarks import counts, timing
from tests import foreign_programs


def work(entry: foreign_programs.Entry) -> dict[str, counts.Count]:
    """Returns the cost of the plain and of the clipped gradient of a program at its large size."""
    problem = entry.build(*entry.large)
    params, batch = (
        foreign_programs.abstract(problem.params),
        foreign_programs.abstract(problem.example, (entry.batch,)),
    )
    loss = problem.plain or problem.loss

    def total(params, batch):
        return jax.vmap(loss, (None, 0))(params, batch).sum()

    clipped = jaxdp.clipped_grad(problem.loss, clip_norm=1.0)
    # as the libraries expect
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return {
            "plain": counts.count(jax.grad(total), params, batch),
            "clipped": counts.count(lambda p, b: clipped(p, b).grads, params, batch),
        }


def measure(flags) -> dict:
    rows = []
    for name, entry in foreign_programs.PROGRAMS.items():
        counted = work(entry)
        plain = counted["plain"]
        clipped = counted["clipped"]
        rows.append(
            {
                "program": name,
                "sizes": entry.large,
                "batch": entry.batch,
                "flops": clipped.flops / plain.flops,
                "bytes": clipped.bytes / plain.bytes,
                "plain_gflop": plain.flops / 1e9,
                "plain_gb": plain.bytes / 1e9,
            }
        )
    timing.show("clipped over plain", rows)
    return {"backend": jax.default_backend(), "programs": rows}
