"""Estimates a private step of a transformer with a billion parameters on 256 accelerators, on
paper.

    python -m benchmarks run estimate

Nothing is run. Models of the full width with one, two and three layers are compiled and divided for
256 devices that the processor pretends to be. All counts are linear in the number of layers: two
models give the line, and the third checks it. Times are counts over the peak rates that the makers
state, so no step is faster than these."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import bench_scale, pages, problems, timing
from jaxdp import finetune
from jaxdp.compilers import hlo
from jaxdp.data import PoissonSampler
from jaxdp.transforms.meshes import Layout

DEVICES = 256
LAYERS = 19
WIDTH = 2048
HEADS = 16
VOCABULARY = 32768
LENGTH = 1024
EXAMPLES = {"physical": 256, "step": 4096, "records": 2**24}


class Chip(NamedTuple):
    """Peak rates of a chip.

    Attributes:
      flops: FLOP/s of bfloat16 products.
      memory: Bytes/s of its memory.
      sent: Bytes/s that it sends to other chips.
    """

    flops: float
    memory: float
    sent: float


# Google Cloud, "TPU v5p": 459 TFLOPs, 2765 GBps, 4800 Gbps. NVIDIA, "H100 SXM" and "DGX H100": 989
# TFLOPS, 3.35 TB/s, and an adapter of 400 Gb/s for each of 8 GPUs. One direction of a TPU
# counts half of the 4800 Gbps.
CHIPS = {
    "TPU v5p": Chip(459e12, 2.765e12, 300e9),
    "H100 SXM": Chip(989e12, 3.35e12, 50e9),
}
Counts = Mapping[str, hlo.Count]


class Programs(NamedTuple):
    """The programs of a step of a model, by name.

    Attributes:
      parameters: The number of parameters.
      counts: The work of one device.
      held: The bytes that one device holds.
    """

    parameters: int
    counts: Counts
    held: dict[str, int]


class Training:
    """Plain and private training of a transformer with so many layers, as shapes only."""

    def __init__(self, layers: int):
        self.network = problems.Language(VOCABULARY, LENGTH, WIDTH, layers, HEADS)
        self.optimizer = optax.adam(1e-3)
        self.mesh = bench_scale.mesh_of(DEVICES)
        tokens = jnp.zeros((1, LENGTH), jnp.int32)
        self.params = jax.eval_shape(self.network.init, jax.random.key(0), tokens)
        rule = bench_scale.divided(DEVICES)
        self.layout = Layout.of(self.params, self.mesh, ("data",), rule)

    def losses(self, params, batch: jax.Array) -> jax.Array:
        """Returns the loss of each example."""
        logits = self.network.apply(params, batch[:, :-1])
        labels = batch[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean(-1)

    def placed(self, tree):
        """Returns the shapes of a tree with the places of the parameters."""

        def with_place(leaf, place):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        places = self.layout.shardings(tree, self.params, self.params)
        return jax.tree.map(with_place, tree, places)

    def constrained(self, layout: Layout, tree):
        return layout.constrained(tree, self.params, self.params)

    def gradient(self, params, batch: jax.Array):
        """Returns the plain gradient. Each device computes with whole parameters."""

        def total(params):
            return self.losses(params, batch).sum()

        whole = self.layout.whole()
        grads = jax.grad(total)(self.constrained(whole, params))
        return self.constrained(self.layout, self.constrained(whole, grads))

    def update(self, params, opt_state, grads):
        """Returns the parameters and the state of the optimizer after a plain update."""
        after = problems.updated(self.optimizer, grads, opt_state, params)
        return self.constrained(self.layout, after)

    def trainer(self) -> finetune.PrivateTrainer:
        """Returns the private trainer."""

        def loss(params, example):
            (one,) = self.losses(params, example[None])
            return one

        share = EXAMPLES["step"] / EXAMPLES["records"]
        return finetune.dp_sgd(
            loss,
            self.optimizer,
            clip_norm=1.0,
            noise_multiplier=1.0,
            sampler=PoissonSampler(EXAMPLES["records"], share),
            physical_batch_size=EXAMPLES["physical"],
        )

    def lowered(self) -> dict[str, Any]:
        """Returns the lowered programs of a plain and of a private step."""
        trainer = self.trainer()
        rows = NamedSharding(self.mesh, PartitionSpec("data"))
        examples = EXAMPLES["physical"]
        batch = jax.ShapeDtypeStruct((examples, LENGTH + 1), jnp.int32, sharding=rows)
        mask = jax.ShapeDtypeStruct((examples,), jnp.bool_, sharding=rows)
        part = jax.ShapeDtypeStruct((), jnp.uint32, sharding=self.layout.everywhere)
        # The state of a tiny model, with the shapes of this one.
        tiny = trainer.init({"any": jnp.zeros(1)})
        opt_state = jax.eval_shape(self.optimizer.init, self.params)
        state = self.placed(tiny._replace(params=self.params, opt_state=opt_state))
        state = state._replace(layout=self.layout)
        sums = self.placed(jax.eval_shape(trainer.zeros, self.params, self.layout))
        gradient = jax.jit(self.gradient)
        update = jax.jit(self.update)
        return {
            "plain gradient": gradient.lower(state.params, batch),
            "plain update": update.lower(state.params, state.opt_state, sums),
            "clipped sum": trainer.part_sum.lower(state, batch, mask, part),
            "noise and update": trainer.update.lower(state, sums),
        }

    def programs(self) -> Programs:
        """Compiles the programs and counts their work."""
        counts, held = {}, {}
        for name, lowered in self.lowered().items():
            program = lowered.compile()
            counts[name] = hlo.count(program)
            held[name] = timing.held_bytes(program)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return Programs(parameters, counts, held)


def at(layers: int, one: hlo.Count, two: hlo.Count) -> hlo.Count:
    """Returns the count at a number of layers, on the line through one and two layers."""
    return one.plus(two, layers - 1).plus(one, 1 - layers)


def at_full_depth(one: int, two: int) -> int:
    """Returns a number of all layers, on the line through one and two layers."""
    return one + (LAYERS - 1) * (two - one)


# Titles of the rows, the sums of a step, and their units.
_SUMS = (
    ("TFLOP", "flops", 1e12),
    ("GB sent", "sent_bytes", 1e9),
    ("collectives", "collectives", 1),
    ("GB read and written, at most", "memory_bytes", 1e9),
)


def tables(report) -> dict:
    """Returns the counts of a step, and its least seconds on each chip."""
    plain, private = report["steps"]
    rows = []
    for title, key, unit in _SUMS:
        rows.append(_cells(title, plain[key] / unit, private[key] / unit, ",.4g"))
    for chip in CHIPS:
        for verb, key in (("compute", "flops"), ("send", "sent")):
            title = f"s to {verb} at the peak of {chip}"
            rows.append(_cells(title, plain[chip][key], private[chip][key], ".3g"))
    held = {name: row["held_bytes"] / 1e9 for name, row in report["programs"].items()}
    rows.append(_cells("GB held by XLA", held["plain gradient"], held["clipped sum"], ".3g"))
    header = ["one chip, one step", "plain", "private", "private / plain"]
    return {"estimate": pages.page_table(header, rows)}


def _cells(title: str, plain: float, private: float, form: str) -> list[str]:
    ratio = private / plain
    return [title, format(plain, form), format(private, form), f"{ratio:.3f}"]


def measure(flags) -> dict:
    bench_scale.pretend(DEVICES)
    one, two, three = (Training(layers).programs() for layers in (1, 2, 3))
    passes = EXAMPLES["step"] // EXAMPLES["physical"]
    full = {name: at(LAYERS, one.counts[name], two.counts[name]) for name in one.counts}
    rows = [
        step_row("plain", full["plain gradient"], full["plain update"], passes),
        step_row("private", full["clipped sum"], full["noise and update"], passes),
    ]
    programs = {}
    for name, count in full.items():
        programs[name] = sums_of(count)
        programs[name]["held_bytes"] = at_full_depth(one.held[name], two.held[name])
        programs[name]["kinds"] = count.collectives
    sizes = {"layers": LAYERS, "width": WIDTH, "vocabulary": VOCABULARY, "length": LENGTH}
    report = {
        "parameters": at_full_depth(one.parameters, two.parameters),
        "devices": DEVICES,
        "sizes": sizes | EXAMPLES,
        "passes": passes,
        "line_off": line_errors(one.counts, two.counts, three.counts),
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
    row["collectives"] = count.messages
    row["kinds"] = count.collectives
    for name, chip in CHIPS.items():
        row[name] = {
            "flops": count.flops / chip.flops,
            "memory": count.bytes / chip.memory,
            "sent": count.moved / chip.sent,
        }
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
