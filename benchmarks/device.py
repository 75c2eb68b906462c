"""Measures private steps on one accelerator: `python -m benchmarks.device`, ten minutes on one GPU.

    python -m benchmarks.device --output benchmarks/results/device_gpu.json
    python -m benchmarks.device --tiny          # the same programs with tiny shapes, on any machine

The cases are ViT-B/16 in bfloat16, WRN-16-4 and WRN-40-4 at a logical batch of 4096 by physical
batches, GPT-2 small with LoRA and in full, adaptation of ViT-B/16 by Tent, and certificates of 20
distances. "plain" adds up ordinary gradients and updates. "clipped" adds up clipped ones. "private"
also adds noise. jax_privacy runs in the same process, and Opacus and fastDP run where torch is
installed, on the same shapes. Ratios are medians of those within a round.

"mfu" is the share of the peak of the device in bfloat16 that the operations of the PLAIN step would
take in the time of the step. "memory_mb" is what XLA allocates for the largest program beyond its
arguments. For torch it is the peak. The programs of a case in JAX are compiled at the same time, in
"compile_s" seconds.

Every case has its share of --minutes. A step that fails or finds no time left has an "error" in the
report, and the others go on. The report is written after every case."""

import argparse
import os

# leaves room for torch in the same process
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import concurrent.futures
import functools
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import bench_adaptation, bench_lm, bench_prediction, counts, problems, timing
from jaxdp import models
from jaxdp.report import format_table

CLIP, NOISE = 1.0, 1.0
# Operations per second in bfloat16 without sparsity, from the data sheets, by a part of the name of
# the device.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L4": 121e12, "T4": 65e12, "V100": 125e12}
PEAKS |= {"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12}


class Work(NamedTuple):
    """A step that is measured, and the megabytes that it allocates, None for torch on a CPU."""

    call: Callable[[], Any]
    memory_mb: float | None


Steps = Mapping[str, Callable[[], Work]]


class Training(NamedTuple):
    """A training step: `count` physical batches are added up, then there is one update.

    Attributes:
      loss: `loss(params, example)`, one example of `batch`.
      params, batch: The parameters, dicts by name, and a physical batch.
      count: The number of physical batches of a step.
      moving: The names of the parameters that are trained.
      microbatch: The number of examples whose gradients jax_privacy holds at once.
    """

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    count: int
    moving: tuple[str, ...]
    microbatch: int | None

    def steps(self) -> Steps:
        """Returns the makers of all steps in JAX."""
        trainable = (
            None if len(self.moving) == len(self.params) else models.trainable("lora", self.params)
        )
        clipped = jaxdp.clipped_grad(self.loss, clip_norm=CLIP, trainable=trainable)
        sgd = optax.sgd(0.01, momentum=0.9)
        private = optax.chain(
            jaxdp.privatize(clipped, noise_multiplier=NOISE, divisor=self.examples), sgd
        )

        def ours(params: Any, batch: Any) -> Any:
            grads = clipped(params, batch).grads
            return {name: grads[name] for name in self.moving}

        def theirs() -> Work:
            from jax_privacy import noise_addition

            grad = problems.jax_privacy_grad(self._whole, CLIP, (2,), self.microbatch)
            noise = noise_addition.gaussian_privatizer(
                stddev=NOISE * CLIP, prng_key=jax.random.key(1)
            )
            optimizer = optax.chain(noise, optax.scale(1 / self.examples), sgd)
            return self._stepped(
                lambda params, batch: grad(self._trained(params), params, batch), optimizer
            )

        return {
            "plain": lambda: self._stepped(self.plain, sgd),
            "clipped": lambda: self._stepped(ours, sgd),
            "private": lambda: self._stepped(ours, private),
            "jax_privacy": theirs,
        }

    @property
    def examples(self) -> int:
        """Returns the logical batch size."""
        return self.count * len(jax.tree.leaves(self.batch)[0])

    def flops(self) -> float:
        """Returns the operations of a plain step."""
        return self.count * counts.count(self.plain, self.params, self.batch).flops

    def plain(self, params: Any, batch: Any) -> Any:
        """Returns the sum of the gradients of a physical batch."""

        def total(moving: Any) -> jax.Array:
            return jax.vmap(lambda example: self._whole(moving, params, example))(batch).sum()

        return jax.grad(total)(self._trained(params))

    def _whole(self, moving: Any, params: Any, example: Any) -> jax.Array:
        return self.loss({**params, **moving}, example)

    def _trained(self, params: Any) -> Any:
        return {name: params[name] for name in self.moving}

    def _stepped(self, sums: Callable[[Any, Any], Any], optimizer: Any) -> Work:
        rest = {name: x for name, x in self.params.items() if name not in self.moving}

        @functools.partial(jax.jit, donate_argnums=1)
        def accumulate(moving: Any, total: Any, rest: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, total, sums({**rest, **moving}, batch))

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def update(moving: Any, state: Any, total: Any) -> Any:
            updates, state = optimizer.update(total, state, moving)
            return optax.apply_updates(moving, updates), state, jax.tree.map(jnp.zeros_like, total)

        moving = jax.tree.map(jnp.copy, self._trained(self.params))  # each step owns its parameters
        now = [moving, optimizer.init(moving), jax.tree.map(jnp.zeros_like, moving)]
        added = accumulate.lower(moving, now[2], rest, self.batch).compile()

        def step() -> Any:
            for _ in range(self.count):
                now[2] = added(now[0], now[2], rest, self.batch)
            now[:] = update(*now)
            return now

        return Work(step, timing.allocated_mb(added))


def random_params(model: Any, inputs: jax.Array) -> Any:
    """Returns small parameters. Compiling the initialization of a large model takes as long as one
    of its steps."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
    generator = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(0.02 * generator.standard_normal(x.shape, np.float32)), shapes
    )


def image_training(
    name: str, physical: int, count: int, microbatch: int, **attributes: Any
) -> Training:
    side, classes = attributes.pop("side"), attributes.pop("num_classes")
    model = models.create(name, num_classes=classes, **attributes)
    images = np.random.default_rng(0).random((physical, side, side, 3), np.float32)
    batch = {"x": jnp.asarray(images), "label": jnp.arange(physical) % classes}
    params = random_params(model, batch["x"][:1])

    loss = problems.named_classifier_loss(model)
    return Training(loss, params, batch, count, tuple(params), microbatch)


def text_training(
    mode: str, physical: int, length: int, microbatch: int, **attributes: Any
) -> Training:
    model = models.create("gpt2", **attributes)
    params = random_params(model, jnp.zeros((1, 1), jnp.int32))
    params, loss, _ = bench_lm.problem(model, mode, params)
    tokens = np.random.default_rng(0).integers(
        model.num_classes, size=(physical, length + 1), dtype=np.int32
    )
    return Training(
        loss,
        params,
        jnp.asarray(tokens),
        1,
        ("lora",) if mode == "lora" else tuple(params),
        microbatch,
    )


def adaptation(shape: bench_adaptation.Shape, batch_size: int) -> Steps:
    """Returns the makers of steps of Tent. Its peers are those of `bench_adaptation --peers`."""
    made = functools.cache(lambda: bench_adaptation.steps_of(shape, batch_size, ["tent"]))
    one = threading.Lock()

    def taken(name: str) -> Work:
        with one:  # the first thread makes all steps
            step = made()[name]
        return Work(step.call, step.row["memory_mb"])

    kinds = {"plain": "tent plain", "clipped": "tent clip only", "private": "tent private"}
    return {name: functools.partial(taken, kind) for name, kind in kinds.items()}


BF16 = {"dtype": jnp.bfloat16}
TINY_TEXT = {
    "num_classes": 61,
    "positions": 16,
    "width": 16,
    "depth": 1,
    "num_heads": 2,
    "mlp_width": 32,
}
TINY_VIT = {"width": 16, "depth": 2, "num_heads": 2, "mlp_width": 32}


def cases(tiny: bool) -> dict[str, Callable[[], Training]]:
    """Returns the training cases by name."""
    text = TINY_TEXT if tiny else {"num_classes": bench_lm.VOCABULARY}
    sizes = (2, 8, 1) if tiny else (16, 512, 4)
    if tiny:
        vit = functools.partial(
            image_training, "vit_b16", 2, 1, 1, side=32, num_classes=4, **TINY_VIT, **BF16
        )
        wide = {"wrn_16_4": (2, 2, 1), "wrn_40_4": (2, 2, 1)}
        size: dict[str, Any] = {"side": 8, "num_classes": 4, "width": 1}
    else:
        vit = functools.partial(
            image_training, "vit_b16", 256, 1, 16, side=224, num_classes=1000, **BF16
        )
        wide = {"wrn_16_4": (512, 8, 64), "wrn_40_4": (256, 16, 32)}
        size = {"side": 32, "num_classes": 10}
    found = {"ViT-B/16, bfloat16": vit}
    for name, (physical, count, microbatch) in wide.items():
        depth = {"depth": 10} if tiny else {}
        found[name] = functools.partial(
            image_training, name, physical, count, microbatch, **size, **depth
        )
    for mode in ("lora", "full"):
        found[f"GPT-2 small, {mode}, bfloat16"] = functools.partial(
            text_training, mode, *sizes, **text, **BF16
        )
    return found


def measured(
    steps: Steps, deadline: float, rounds: int, flops: float = 0.0, peers: Steps | None = None
) -> dict[str, Any]:
    """Returns a row for every step, with times and ratios or an error, and the seconds of
    compiling.

    Args:
      steps: The makers of steps in JAX. They compile at the same time.
      deadline: When to stop.
      rounds: The number of rounds, at least one.
      flops: The operations of a plain step.
      peers: The makers of steps in torch, which are made one after the other.
    """
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    started = time.perf_counter()

    def in_time(make: Callable[[], Work]) -> Work:
        if time.perf_counter() > deadline:
            raise TimeoutError("no time left for this step. Give more --minutes.")
        return make()

    with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
        coming = {name: pool.submit(in_time, make) for name, make in steps.items()}
    compile_s = time.perf_counter() - started
    makers: dict[str, Callable[[], Work]] = {name: future.result for name, future in coming.items()}
    makers |= {name: functools.partial(in_time, make) for name, make in (peers or {}).items()}
    for name, make in makers.items():
        try:
            work = make()
            jax.block_until_ready(work.call())
        except Exception as error:  # out of memory, a library that is missing: the others go on
            rows[name] = {
                "error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
            }
            gc.collect()
            continue
        rows[name] = {"memory_mb": work.memory_mb}
        calls[name] = work.call
    wall: timing.Seconds = {name: [] for name in calls}
    for k in range(rounds):
        if k and time.perf_counter() > deadline:
            break
        for name, seconds in timing.interleaved(calls, 1)[0].items():
            wall[name] += seconds
    peak = next(
        (peak for part, peak in PEAKS.items() if part in jax.devices()[0].device_kind), None
    )
    for name, seconds in wall.items():
        base = "torch plain" if name.startswith(("torch", "Opacus", "fastDP")) else "plain"
        rows[name] |= {"ms": timing.median_ms(seconds), "rounds": len(seconds)}
        if base in wall:
            rows[name]["over_plain"] = timing.median_ratio(seconds, wall[base])
            if rows[base]["memory_mb"]:
                rows[name]["memory_over_plain"] = rows[name]["memory_mb"] / rows[base]["memory_mb"]
        if flops and peak:
            rows[name]["mfu"] = flops / (np.median(seconds) * peak)
        if name.startswith(("jax_privacy", "Opacus", "fastDP")) and "private" in wall:
            rows[name]["over_private"] = timing.median_ratio(seconds, wall["private"])
    return {"compile_s": compile_s, "steps": rows}


def torch_steps_of(name: str, case: Training, tiny: bool) -> Steps:
    """Returns the makers of the steps of the peers in PyTorch, none where torch or opacus is not
    installed."""
    if timing.missing("torch", "opacus"):
        return {}
    from benchmarks import torch_steps

    made = torch_steps.device_steps(name, case.batch, case.count, CLIP, NOISE, tiny=tiny)
    return {
        step: functools.partial(lambda make: Work(*make()), make) for step, make in made.items()
    }


def certificates(tiny: bool, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns the rows of certifying 20 distances, over one training run by clipped gradients."""
    case = bench_prediction.Case((4, 3, 2), 24, 1, 0.1, 0.1, 0.0) if tiny else None
    case = case or bench_prediction.CASES["mlp 784-128-10, 1 step"]
    rows = bench_prediction.run_case(case, rounds, replace=False, reference=False)
    return {
        name: {
            "ms": row["wall_ms"],
            "memory_mb": row["memory_mb"],
            "over_plain": row["wall_over_vmap"],
        }
        for name, row in rows.items()
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the steps of all cases of a report as a table of a page."""
    rows = []
    for case, row in report["cases"].items():
        for step, of in row["steps"].items():
            if "error" not in of:
                ratios = {
                    "over plain": of.get("over_plain"),
                    "over private": of.get("over_private"),
                }
                memory = {"MB": of["memory_mb"], "MB over plain": of.get("memory_over_plain")}
                numbers = {"ms": of["ms"], **ratios, "share of the peak": of.get("mfu"), **memory}
                shown = {name: "" if x is None else f"{x:.3g}" for name, x in numbers.items()}
                rows.append({"case": case, "step": step} | shown)
    return format_table(rows, style="markdown")


COLUMNS = ("ms", "over_plain", "over_private", "memory_mb", "memory_over_plain", "mfu", "error")


def jobs_of(flags: argparse.Namespace) -> dict[str, Callable[[float], dict[str, Any]]]:
    """Returns the measurements of the cases by name, each a function of its deadline."""

    def trained(name: str, build: Callable[[], Training], deadline: float) -> dict[str, Any]:
        case = build()
        flops = case.flops()
        sizes = {
            "examples": case.examples,
            "physical": case.examples // case.count,
            "plain_tflop": flops / 1e12,
        }
        peers = torch_steps_of(name, case, flags.tiny)
        return sizes | measured(case.steps(), deadline, flags.rounds, flops, peers)

    def adapted(deadline: float) -> dict[str, Any]:
        shape, size = bench_adaptation.SHAPES["vit_b16"], 64
        if flags.tiny:
            shape, size = bench_adaptation.Shape("vit_tiny", 8, 3), 2
        return {"examples": size} | measured(adaptation(shape, size), deadline, flags.rounds)

    def certified(_: float) -> dict[str, Any]:
        return {"steps": certificates(flags.tiny, min(flags.rounds, 3))}

    every: dict[str, Callable[[float], dict[str, Any]]] = {}
    for name, build in cases(flags.tiny).items():
        every[name] = functools.partial(trained, name, build)
    every["Tent, base ViT"] = adapted
    every["certificates of 20 distances"] = certified
    jobs = {}
    for part in flags.cases.split(","):
        jobs |= {name: job for name, job in every.items() if part in name}
    return jobs


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = timing.arguments(__doc__, output=".bench/device.json")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to check the programs")
    parser.add_argument(
        "--cases", default="", help="parts of names of cases, with commas, in their order"
    )
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--rounds", type=int, default=10)
    flags = parser.parse_args(arguments)
    end = time.perf_counter() + 60 * flags.minutes
    jobs = jobs_of(flags)
    report: dict[str, Any] = {
        **timing.machine(),
        "tiny": flags.tiny,
        "not installed": timing.missing("jax_privacy", "torch", "opacus", "fastDP"),
        "cases": {},
    }
    for number, (name, job) in enumerate(jobs.items()):
        started = time.perf_counter()
        share = (end - started) / (len(jobs) - number)
        try:
            row = job(started + share)
        except Exception as error:  # a model that does not fit: the other cases go on
            row = {"error": f"{type(error).__name__}: {error}"[:300], "steps": {}}
        report["cases"][name] = row | {"seconds": time.perf_counter() - started}
        gc.collect()
        if row["steps"]:
            timing.show(name, row["steps"], COLUMNS)
        else:
            print(f"\n{name}\n{row['error']}", flush=True)
        timing.write(report, flags.output)
    return report


if __name__ == "__main__":
    main()
