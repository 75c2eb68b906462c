"""Counts the work of one device in a private step that is divided over many, beside that of a plain
step.

    python -m benchmarks run scale

Nothing is run. XLA compiles and divides the steps for devices that the processor pretends to be.
"plain" is an ordinary step with the same shardings. "private" is the sum of the programs of a
trainer's step: the clipped sum of one physical batch, and noise with the update. "data" divides the
batch, "fsdp" also all parameters. "noise" compares two ways to the noise of parameters that all
devices have: each draws all of it, or each draws a part and gathers the others."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import pages, problems, timing
from jaxdp import finetune, models
from jaxdp.compilers import hlo
from jaxdp.data import PoissonSampler
from jaxdp.transforms.noise import gaussian, stream
from launch import results

DEVICES, LAYOUTS = 8, ("data", "fsdp")
NOISE = ("MLP", "ViT")  # a few large leaves, and many small ones


def pretend(devices: int):
    """Makes the processor pretend to be so many devices. JAX must not have used it yet."""
    jax.config.update("jax_num_cpu_devices", devices)


def mesh_of(count: int) -> Mesh:
    """Returns a mesh of the first devices.

    Raises:
      ValueError: There are fewer, so that counts would be those of another mesh.
    """
    devices = jax.devices()[:count]
    if len(devices) < count:
        raise ValueError(
            f"{count} devices are needed, but JAX has {len(devices)}. Set JAX_PLATFORMS=cpu, where "
            "a benchmark pretends to have them."
        )
    return Mesh(np.array(devices), ("data",))


def divided(count: int) -> Callable:
    """Returns the rule that divides the largest dimension of a parameter that is a multiple of the
    devices."""

    def rule(path, leaf):
        whole = [d for d, n in enumerate(leaf.shape) if n % count == 0]
        longest = max(whole, key=lambda d: leaf.shape[d], default=None)
        return PartitionSpec(*("data" if d == longest else None for d in range(leaf.ndim)))

    return rule


def whole(path: str, leaf) -> PartitionSpec:
    return PartitionSpec()


def steps(
    loss: Callable,
    mean_loss: Callable,
    params,
    source,
    size: int,
    *,
    devices: int,
    layout: str,
    optimizer: optax.GradientTransformation,
) -> dict[str, hlo.Count]:
    """Returns the work of one device in the plain step, the private one, and its two programs.

    Args:
      loss: The loss of an example.
      mean_loss: The mean loss of a batch.
      params: The parameters.
      source: The examples.
      size: The number of examples in the batch.
      devices: The number of devices.
      layout: "data" or "fsdp".
      optimizer: The optimizer of both steps.
    """
    mesh = mesh_of(devices)
    trainer = finetune.dp_sgd(
        loss,
        optimizer,
        clip_norm=1.0,
        noise_multiplier=1.0,
        sampler=PoissonSampler(len(source), size / len(source)),
        physical_batch_size=size,
        mesh=mesh,
        param_sharding=divided(devices) if layout == "fsdp" else whole,
    )
    state = trainer.init(params)
    lie = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))

    @functools.partial(jax.jit, out_shardings=lie)
    def plain(params, opt_state, batch):
        grads = jax.lax.with_sharding_constraint(jax.grad(mean_loss)(params, batch), lie[0])
        return problems.updated(optimizer, grads, opt_state, params)

    rows = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.device_put(source.gather(np.arange(size)), rows)
    found = {"plain": hlo.count(plain.lower(state.params, state.opt_state, batch).compile())}
    programs = trainer.programs(state, source).items()
    parts = {name.split()[0]: hlo.count(f.lower(*args).compile()) for name, (f, args) in programs}
    return found | {"private": parts["sum"].plus(parts["update"])} | parts


def cases() -> dict[str, problems.Case]:
    steps = problems.cases()
    sizes = {"width": 64, "depth": 2, "num_heads": 2, "mlp_width": 256}
    vit = models.create("vit_tiny", num_classes=10, patch_size=4, pool="mean", **sizes)
    return {
        "MLP": dataclasses.replace(steps["mlp"], batch_size=64),
        "CNN": dataclasses.replace(steps["cnn"], batch_size=64),
        "ViT": problems.Case(vit, (32, 32, 3), 64),
        "transformer": steps["lm"],
    }


def rows_of(name: str, case: problems.Case) -> Iterator[dict]:
    """Yields the counts of the steps of a case on one device and, in both layouts, on many."""
    source, params = case.source(), case.init()
    alone = None
    for devices, layout in ((1, "data"), *((DEVICES, layout) for layout in LAYOUTS)):
        options = {"devices": devices, "layout": layout, "optimizer": optax.sgd(0.01, momentum=0.9)}
        found = steps(case.loss, case.mean_loss, params, source, case.batch_size, **options)
        alone = alone or found
        for step, count in found.items():
            yield {
                "network": name,
                "devices": devices,
                "layout": layout,
                "step": step,
                "collectives": count.messages,
                "sent_bytes": count.moved,
                "kinds": count.collectives,
                "flops": count.flops,
                "share": count.flops / alone[step].flops,
            }


def noise_rows(name: str, case: problems.Case) -> Iterator[dict]:
    """Yields what the noise of a parameter takes on one of many devices that all have it, "drawn"
    or "gathered"."""
    params, mesh = case.init(), mesh_of(DEVICES)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    everywhere = NamedSharding(mesh, PartitionSpec())
    sums = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), params
    )
    for way, rule in (("drawn", whole), ("gathered", divided(DEVICES))):
        lie = jax.tree.map(lambda x, rule=rule: NamedSharding(mesh, rule("", x)), params)
        draw = jax.jit(
            functools.partial(gaussian, std=1.0, shardings=lie), out_shardings=everywhere
        )
        counted = hlo.count(draw.lower(stream(bytes(16), "benchmark"), sums).compile())
        yield {
            "network": name,
            "way": way,
            "flops": counted.flops / size,
            "sent_bytes": counted.moved / size,
            "collectives": counted.messages,
        }


def tables(report) -> dict:
    by_step = {}
    for row in results.select(report["steps"], devices=DEVICES):
        by_step[row["network"], row["layout"], row["step"]] = row
    divided = {"data": "batch", "fsdp": "batch and parameters"}
    header = ["network", "divided", "collectives, plain", "private"]
    header += ["MB sent, plain", "private", "work, plain", "private"]
    lines = []
    for network, layout in dict.fromkeys(key[:2] for key in by_step):
        pair = [by_step[network, layout, step] for step in ("plain", "private")]
        line = [network, divided[layout]]
        line += [f"{row['collectives']:.0f}" for row in pair]
        line += [f"{row['sent_bytes'] / 1e6:.3g}" for row in pair]
        line += [f"1/{1 / row['share']:.1f}" for row in pair]
        lines.append(line)
    return {"counts": pages.page_table(header, lines)}


def measure(flags) -> dict:
    pretend(DEVICES)
    rows = [row for name, case in cases().items() for row in rows_of(name, case)]
    noise = [row for name in NOISE for row in noise_rows(name, cases()[name])]
    timing.show("noise", noise)
    report = {"steps": rows, "noise": noise}
    print(tables(report)["counts"])
    return report
