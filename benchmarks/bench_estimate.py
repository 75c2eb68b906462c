"""Estimates a private step of a transformer with a billion parameters on 256 accelerators, on
paper.

    XLA_FLAGS=--xla_force_host_platform_device_count=256 python -m benchmarks run estimate

Nothing is run. Models of the full width with one, two and three layers are compiled and divided for
256 devices that the processor pretends to be. All counts are linear in the number of layers: two
models give the line, and the third checks it. Times are counts over the peak rates that the makers
state, so no step is faster than these."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import bench_scale, pages, problems, timing
from jaxdp import finetune
from jaxdp.compilers import hlo
from jaxdp.data import PoissonSampler
from jaxdp.report import format_table
from jaxdp.transforms.meshes import Layout

DEVICES, LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 256, 19, 2048, 16, 32768, 1024
EXAMPLES = {"physical": 256, "step": 4096, "records": 2**24}
# Peak rates of a chip: FLOP/s of bfloat16 products, bytes/s of its memory, bytes/s that it sends to
# other chips. Google Cloud, "TPU v5p": 459 TFLOPs, 2765 GBps, 4800 Gbps. NVIDIA, "H100 SXM" and
# "DGX H100": 989 TFLOPS, 3.35 TB/s, and an adapter of 400 Gb/s for each of 8 GPUs. Half of the 4800
# Gbps of a TPU is counted for one direction.
CHIPS = {"TPU v5p": (459e12, 2.765e12, 300e9), "H100 SXM": (989e12, 3.35e12, 50e9)}


Counts = Mapping[str, hlo.Count]


def counts_of(layers: int) -> tuple[int, Counts, dict[str, int]]:
    """Returns the number of parameters, and for the programs of a step the work and the bytes of
    one device."""
    network = problems.Language(VOCABULARY, LENGTH, WIDTH, layers, HEADS)
    optimizer = optax.adam(1e-3)

    def losses(params, batch):
        logits = network.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(-1)

    mesh, rule = bench_scale.mesh_of(DEVICES), bench_scale.divided(DEVICES)
    trainer = finetune.dp_sgd(
        lambda params, example: losses(params, example[None])[0],
        optimizer,
        clip_norm=1.0,
        noise_multiplier=1.0,
        sampler=PoissonSampler(EXAMPLES["records"], EXAMPLES["step"] / EXAMPLES["records"]),
        physical_batch_size=EXAMPLES["physical"],
    )
    params = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    layout = Layout.of(params, mesh, ("data",), rule)

    def placed(tree):
        lie = layout.shardings(tree, params, params)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, lie
        )

    small = trainer.init({"any": jnp.zeros(1)})._replace(
        params=params, opt_state=jax.eval_shape(optimizer.init, params)
    )
    state = placed(small)._replace(layout=layout)
    sums = placed(jax.eval_shape(trainer.zeros, params, layout))
    shape, rows = (EXAMPLES["physical"], LENGTH + 1), NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    mask = jax.ShapeDtypeStruct(shape[:1], jnp.bool_, sharding=rows)
    part = jax.ShapeDtypeStruct((), jnp.uint32, sharding=layout.everywhere)

    @jax.jit
    def gradient(params, batch):
        whole = layout.whole().constrained(params, params, params)
        grads = jax.grad(lambda params: losses(params, batch).sum())(whole)
        return layout.constrained(layout.whole().constrained(grads, params, params), params, params)

    @jax.jit
    def update(params, opt_state, grads):
        after = problems.updated(optimizer, grads, opt_state, params)
        return layout.constrained(after, params, params)

    programs = {
        "plain gradient": gradient.lower(state.params, batch),
        "plain update": update.lower(state.params, state.opt_state, sums),
        "clipped sum": trainer.part_sum.lower(state, batch, mask, part),
        "noise and update": trainer.update.lower(state, sums),
    }
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    compiled = {name: lowered.compile() for name, lowered in programs.items()}
    held = {name: timing.held_bytes(program) for name, program in compiled.items()}
    return size, {name: hlo.count(program) for name, program in compiled.items()}, held


def at(layers: int, one: hlo.Count, two: hlo.Count) -> hlo.Count:
    """Returns the count at a number of layers, on the line through one and two layers."""
    return one.plus(two, layers - 1).plus(one, 1 - layers)


def tables(report) -> dict:
    plain, private = report["steps"]
    rows = []
    for label, key, unit in (
        ("TFLOP", "flops", 1e12),
        ("GB sent", "sent_bytes", 1e9),
        ("collectives", "collectives", 1),
        ("GB read and written, at most", "memory_bytes", 1e9),
    ):
        rows.append(_cells(label, plain[key] / unit, private[key] / unit, ",.4g"))
    for chip in CHIPS:
        for label, key in (("compute", "flops"), ("send", "sent")):
            title = f"s to {label} at the peak of {chip}"
            rows.append(_cells(title, plain[chip][key], private[chip][key], ".3g"))
    held = {name: row["held_bytes"] / 1e9 for name, row in report["programs"].items()}
    rows.append(_cells("GB held by XLA", held["plain gradient"], held["clipped sum"], ".3g"))
    header = ["one chip, one step", "plain", "private", "private / plain"]
    return {"estimate": pages.page_table(header, rows)}


def _cells(label: str, plain: float, private: float, form: str) -> list[str]:
    return [label, format(plain, form), format(private, form), f"{private / plain:.3f}"]


def measure(flags) -> dict:
    few, one, little = counts_of(1)
    more, two, much = counts_of(2)
    _, three, _ = counts_of(3)
    passes = EXAMPLES["step"] // EXAMPLES["physical"]
    full = {name: at(LAYERS, one[name], two[name]) for name in one}
    rows = [
        step_row("plain", full["plain gradient"], full["plain update"], passes),
        step_row("private", full["clipped sum"], full["noise and update"], passes),
    ]
    counts = [{name: x for name, x in row.items() if not isinstance(x, dict)} for row in rows]
    print(format_table(counts, digits=4))
    programs = {}
    for name, count in full.items():
        held = little[name] + (LAYERS - 1) * (much[name] - little[name])
        programs[name] = sums_of(count) | {"held_bytes": held, "kinds": count.collectives}
    sizes = {"layers": LAYERS, "width": WIDTH, "vocabulary": VOCABULARY, "length": LENGTH}
    report = {
        "parameters": few + (LAYERS - 1) * (more - few),
        "devices": DEVICES,
        "sizes": sizes | EXAMPLES,
        "passes": passes,
        "line_off": line_errors(one, two, three),
        "programs": programs,
        "steps": rows,
    }
    print(tables(report)["estimate"])
    return report


def sums_of(count: hlo.Count) -> dict:
    return {"flops": count.flops, "memory_bytes": count.bytes, "sent_bytes": count.moved}


def step_row(step: str, gradient: hlo.Count, update: hlo.Count, passes: int) -> dict:
    """Returns the counts of a step of several passes, and its least seconds on each chip."""
    count = update.plus(gradient, passes)
    row = {"step": step} | sums_of(count)
    row |= {"collectives": count.messages, "kinds": count.collectives}
    amounts = {"flops": count.flops, "memory": count.bytes, "sent": count.moved}
    for chip, rates in CHIPS.items():
        pairs = zip(amounts.items(), rates, strict=True)
        row[chip] = {name: amount / rate for (name, amount), rate in pairs}
    return row


def line_errors(one: Counts, two: Counts, three: Counts) -> dict[str, dict[str, float]]:
    """Returns how far the line through one and two layers is off at three layers."""
    flops, sent = {}, {}
    for name, counted in three.items():
        line = at(3, one[name], two[name])
        flops[name] = abs(line.flops / counted.flops - 1)
        if counted.moved > 1e6:
            sent[name] = abs(line.moved / counted.moved - 1)
    return {"flops": flops, "sent": sent}
