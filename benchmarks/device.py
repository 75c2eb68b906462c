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
"compile_s" seconds. "kernels" are the longest ones of a step, by the JAX name that they come from.

Every case has its share of --minutes. A step that fails or finds no time left has an "error" in the
report, and the others go on. The report is written after every case."""

import os

# leaves room for torch in the same process
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import concurrent.futures
import functools
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import (
    bench_adaptation,
    bench_lm,
    bench_prediction,
    counts,
    device_kernels,
    pages,
    problems,
    timing,
)
from jaxdp import models

CLIP, NOISE = 1.0, 1.0
# Operations per second in bfloat16 without sparsity, from the data sheets, by a part of the name of
# the device.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L4": 121e12, "T4": 65e12, "V100": 125e12}
PEAKS |= {"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12}


class Work(NamedTuple):
    """A step that is measured.

    Attributes:
      call: The step.
      memory_mb: The megabytes that it allocates, None for torch on a CPU.
      text: The text of its largest program, "" for torch.
    """

    call: Callable
    memory_mb: float | None
    text: str = ""


Steps = Mapping[str, Callable[[], Work]]


class Training(NamedTuple):
    """A training step: `count` physical batches are added up, then there is one update."""

    case: problems.Training
    count: int

    def steps(self) -> Steps:
        """Returns the makers of all steps in JAX."""
        case = self.case
        sgd = optax.sgd(0.01, momentum=0.9)

        def private():
            noise = jaxdp.privatize(
                case.clipped_grad, noise_multiplier=NOISE, divisor=self.examples
            )
            return self._stepped(case.clipped, optax.chain(noise, sgd))

        def theirs():
            from jax_privacy import noise_addition

            key = jax.random.key(1)
            noise = noise_addition.gaussian_privatizer(stddev=NOISE * CLIP, prng_key=key)
            optimizer = optax.chain(noise, optax.scale(1 / self.examples), sgd)
            return self._stepped(case.jax_privacy(), optimizer)

        return {
            "plain": lambda: self._stepped(case.plain, sgd),
            "clipped": lambda: self._stepped(case.clipped, sgd),
            "private": private,
            "jax_privacy": theirs,
        }

    @property
    def examples(self) -> int:
        """Returns the logical batch size."""
        return self.count * self.case.examples

    def flops(self) -> float:
        """Returns the operations of a plain step."""
        case = self.case
        return self.count * counts.count(case.plain, case.params, case.batch).flops

    def _stepped(self, sums: Callable, optimizer) -> Work:
        case = self.case
        moving = jax.tree.map(jnp.copy, case.trained(case.params))  # each step owns its parameters
        rest = {name: x for name, x in case.params.items() if name not in moving}

        @functools.partial(jax.jit, donate_argnums=1)
        def accumulate(moving, total, rest, batch):
            return jax.tree.map(jnp.add, total, sums({**rest, **moving}, batch))

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def update(moving, state, total):
            after = problems.updated(optimizer, total, state, moving)
            return *after, jax.tree.map(jnp.zeros_like, total)

        now = [moving, optimizer.init(moving), jax.tree.map(jnp.zeros_like, moving)]
        added = accumulate.lower(moving, now[2], rest, case.batch).compile()

        def step():
            for _ in range(self.count):
                now[2] = added(now[0], now[2], rest, case.batch)
            now[:] = update(*now)
            return now

        return Work(step, timing.allocated_mb(added), added.as_text())


def adaptation(shape: bench_adaptation.Shape, batch_size: int) -> Steps:
    """Returns the makers of steps of Tent. Its peers are those of `bench_adaptation --peers`."""
    made = functools.cache(lambda: bench_adaptation.steps_of(shape, batch_size, ["tent"]))
    one = threading.Lock()

    def taken(name):
        with one:  # the first thread makes all steps
            step = made()[name]
        return Work(step.call, step.row["memory_mb"])

    kinds = {"plain": "tent plain", "clipped": "tent clip only", "private": "tent private"}
    return {name: functools.partial(taken, kind) for name, kind in kinds.items()}


def cases(tiny: bool) -> dict[str, Callable]:
    """Returns the training cases by name."""

    def image(name, physical, count, microbatch, side=32, **attributes):
        model = models.create(name, **attributes)
        case = problems.image_training(model, physical, (side, side, 3), microbatch)
        return Training(problems.concrete(case, model.num_classes), count)

    def text(mode, physical, length, microbatch, **attributes):
        model = models.create("gpt2", **attributes, **problems.BF16)
        case = bench_lm.training(model, mode, physical, length, microbatch)
        return Training(problems.concrete(case, model.num_classes), 1)

    vit = {"num_classes": 1000, "side": 224}
    wide = {"num_classes": 10}
    words = {"num_classes": bench_lm.VOCABULARY}
    # A physical batch, their number in a step or the length of texts, and a microbatch.
    sizes = {"vit": (256, 1, 16), "wrn_16_4": (512, 8, 64), "wrn_40_4": (256, 16, 32)}
    sizes["text"] = (16, 512, 4)
    if tiny:
        vit = {"num_classes": 4, "side": 32, **problems.TINY_VIT}
        wide = {"num_classes": 4, "side": 8, "width": 1, "depth": 10}
        words = problems.TINY_TEXT
        sizes = dict.fromkeys(sizes, (2, 2, 1)) | {"vit": (2, 1, 1), "text": (2, 8, 1)}
    of = functools.partial
    found = {"ViT-B/16, bfloat16": of(image, "vit_b16", *sizes["vit"], **vit, **problems.BF16)}
    for name in ("wrn_16_4", "wrn_40_4"):
        found[name] = of(image, name, *sizes[name], **wide)
    for mode in ("lora", "full"):
        found[f"GPT-2 small, {mode}, bfloat16"] = of(text, mode, *sizes["text"], **words)
    return found


def measured(
    steps: Steps, deadline: float, rounds: int, flops: float = 0.0, peers: Steps | None = None
) -> dict:
    """Returns a row for every step, with times and ratios or an error, and the seconds of
    compiling.

    Args:
      steps: The makers of steps in JAX. They compile at the same time.
      deadline: When to stop.
      rounds: The number of rounds, at least one.
      flops: The operations of a plain step.
      peers: The makers of steps in torch, which are made one after the other.
    """
    rows = {}
    calls = {}
    texts = {}
    started = time.perf_counter()

    def in_time(make):
        if time.perf_counter() > deadline:
            raise TimeoutError("no time left for this step. Give more --minutes.")
        return make()

    with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
        coming = {name: pool.submit(in_time, make) for name, make in steps.items()}
    compile_s = time.perf_counter() - started
    makers = {name: future.result for name, future in coming.items()}
    makers |= {name: functools.partial(in_time, make) for name, make in (peers or {}).items()}
    for name, make in makers.items():
        try:
            work = make()
            jax.block_until_ready(work.call())
        except Exception as error:  # out of memory, a library that is missing: the others go on
            first_line = str(error).strip().partition("\n")[0]
            rows[name] = {"error": f"{type(error).__name__}: {first_line}"[:300]}
            gc.collect()
            continue
        rows[name] = {"memory_mb": work.memory_mb}
        calls[name] = work.call
        if work.text:
            texts[name] = work.text
    wall = {name: [] for name in calls}
    for k in range(rounds):
        if k and time.perf_counter() > deadline:
            break
        for name, seconds in timing.interleaved(calls, 1)[0].items():
            wall[name] += seconds
    kind = jax.devices()[0].device_kind
    peak = next((peak for part, peak in PEAKS.items() if part in kind), None)
    for name, seconds in wall.items():
        base = timing.base_of(name)
        rows[name] |= {"ms": timing.median_ms(seconds), "rounds": len(seconds)}
        if base in wall:
            rows[name]["over_plain"] = timing.median_ratio(seconds, wall[base])
            if rows[base]["memory_mb"]:
                rows[name]["memory_over_plain"] = rows[name]["memory_mb"] / rows[base]["memory_mb"]
        if flops and peak:
            rows[name]["mfu"] = flops / (np.median(seconds) * peak)
        if name.startswith(("jax_privacy", "Opacus", "fastDP")) and "private" in wall:
            rows[name]["over_private"] = timing.median_ratio(seconds, wall["private"])
    # After all rounds, since a trace slows down what it sees.
    for name, text in texts.items():
        rows[name]["kernels"] = device_kernels.profiled(calls[name], text)
    return {"compile_s": compile_s, "steps": rows}


def torch_steps_of(name: str, case: Training, tiny: bool) -> Steps:
    """Returns the makers of the steps of the peers in PyTorch, none where torch or opacus is not
    installed."""
    if timing.missing("torch", "opacus"):
        return {}
    from benchmarks import torch_steps

    made = torch_steps.device_steps(name, case.case.batch, case.count, CLIP, NOISE, tiny=tiny)
    return {step: lambda make=make: Work(*make()) for step, make in made.items()}


def certificates(tiny: bool, rounds: int) -> dict[str, dict]:
    """Returns the rows of certifying 20 distances, over one training run by clipped gradients."""
    case = bench_prediction.CASES["mlp 784-128-10, 1 step"]
    if tiny:
        case = bench_prediction.Case((4, 3, 2), 24, 1, 0.1, 0.1, 0.0)
    rows = {}
    for name, row in bench_prediction.run_case(case, rounds).items():
        ratio = {"ms": row["wall_ms"], "over_plain": row["wall_over_vmap"]}
        rows[name] = ratio | {"memory_mb": row["memory_mb"]}
    return rows


def tables(report) -> dict:
    """Returns the steps of all cases of a report as a table of a page."""
    rows = []
    for case, row in report["cases"].items():
        for step, of in row["steps"].items():
            if "error" not in of:
                rows.append({"case": case, "step": step} | of)
    columns = {"case": "{case}", "step": "{step}", "ms": "{ms:.3g}"}
    columns |= {f"over {base}": f"{{over_{base}:.3g}}" for base in ("plain", "private")}
    columns |= {"share of the peak": "{mfu:.3g}", "MB": "{memory_mb:.3g}"}
    columns |= {"MB over plain": "{memory_over_plain:.3g}"}
    return {"gpu": pages.lines(rows, columns)}


def beside(now, before) -> dict:
    """Returns the steps of two versions of jaxdp on one card as a table of a page."""
    rows = []
    for case, row in before["cases"].items():
        steps = now["cases"].get(case, {"steps": {}})["steps"]
        for step, of in row["steps"].items():
            if "ms" not in of:
                continue
            of_now = {f"{name} now": value for name, value in steps.get(step, {}).items()}
            rows.append({"case": case, "step": step} | of | of_now)
    columns = {"case": "{case}", "step": "{step}"}
    columns |= {"ms before": "{ms:.3g}", "ms": "{ms now:.3g}"}
    columns |= {"over plain before": "{over_plain:.3g}", "over plain": "{over_plain now:.3g}"}
    columns |= {"MB over plain before": "{memory_over_plain:.3g}"}
    columns |= {"MB over plain": "{memory_over_plain now:.3g}"}
    return {"h100 times": pages.lines(rows, columns)}


def jobs_of(flags) -> dict[str, Callable]:
    """Returns the measurements of the cases by name, each a function of its deadline."""

    def trained(name, build, deadline):
        case = build()
        flops = case.flops()
        sizes = {
            "examples": case.examples,
            "physical": case.examples // case.count,
            "plain_tflop": flops / 1e12,
        }
        peers = torch_steps_of(name, case, flags.tiny)
        return sizes | measured(case.steps(), deadline, flags.rounds, flops, peers)

    def adapted(deadline):
        shape, size = bench_adaptation.SHAPES["vit_b16"], 64
        if flags.tiny:
            shape, size = bench_adaptation.Shape("vit_tiny", 8, 3), 2
        return {"examples": size} | measured(adaptation(shape, size), deadline, flags.rounds)

    def certified(_):
        return {"steps": certificates(flags.tiny, min(flags.rounds, 3))}

    every = {}
    for name, build in cases(flags.tiny).items():
        every[name] = functools.partial(trained, name, build)
    every["Tent, base ViT"] = adapted
    every["certificates of 20 distances"] = certified
    jobs = {}
    for part in flags.cases.split(","):
        jobs |= {name: job for name, job in every.items() if part in name}
    return jobs


FLAGS = {
    "output": ".bench/device.json",
    "tiny": (False, "tiny shapes, to check the programs"),
    "cases": ("", "parts of names of cases, with commas, in their order"),
    "minutes": 9.5,
    "rounds": 10,
}


def main(arguments: Sequence[str] | None = None) -> dict:
    flags = timing.parser(__doc__, FLAGS).parse_args(arguments)
    end = time.perf_counter() + 60 * flags.minutes
    jobs = jobs_of(flags)
    report = {
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
            timing.show(name, row["steps"])
        else:
            print(f"\n{name}\n{row['error']}", flush=True)
        timing.write(report, flags.output)
    return report


if __name__ == "__main__":
    main()
