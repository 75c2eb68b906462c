"""Measures private steps of language models: full training and LoRA, against plain steps,
jax_privacy and Opacus.

    python -m benchmarks run lm --rounds 9 --peers

"counted" is GPT-2 small with its tied vocabulary of 50257 tokens, at several lengths:
floating-point operations of a clipped gradient over those of a plain one, counted on the programs,
and the memory that XLA allocates for them. Nothing is computed there. With "remat" both compute the
inside of each block again in the backward pass. "cases" has a smaller model that runs. "clipped" is
a step with clipped gradients, "private" has noise too. jax_privacy runs in the same process. Opacus
(with --peers, if it is installed) has the untied model of `benchmarks.torch_steps` at length 128.
Its ratios are over a plain step in PyTorch."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import jaxdp
from benchmarks import bench_steps, counts, problems, timing
from jaxdp import models
from jaxdp.memory import keep_freed_memory

LENGTHS, BATCH, VOCABULARY, RANK = (128, 512, 1024), 8, 50_257, 8
TIMED_BATCH = 8  # with 256 tokens each, so that tokens take most of the time, and not parameters
SMALL = {"positions": 256, "width": 256, "depth": 4, "num_heads": 4, "mlp_width": 1024}
MODES = ("full", "lora")


FLAGS = {"rounds": 9, "peers": False}


def training(model, mode: str, batch: int, length: int, microbatch=None) -> problems.Training:
    """Returns the abstract training of a language model."""

    def network_of(params):
        network = models.Pretrained(model, params, None)
        return models.with_lora(network, rank=RANK, seed=0) if mode == "lora" else network

    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    )
    apply_fn = network_of(shapes).apply_fn  # reads no value

    def loss(params, tokens):
        return jaxdp.losses.next_token(apply_fn(params, tokens[None, :-1])[0], tokens[1:])

    params = jax.eval_shape(lambda p: network_of(p).params, shapes)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    moving = ("lora",) if mode == "lora" else ()
    return problems.Training(loss, params, tokens, moving, microbatch)


def counted(mode: str, remat: bool, length: int) -> dict:
    """Returns ratios of operations and memory of GPT-2 small, of a clipped gradient over a plain
    one."""
    model = models.create("gpt2", num_classes=VOCABULARY, remat=remat)
    case = training(model, mode, BATCH, length)
    args = (case.params, case.batch)
    programs = case.plain, case.clipped
    flops = [counts.count(program, *args).flops for program in programs]
    memory = []
    for program in programs:
        memory.append(timing.allocated_mb(jax.jit(program).lower(*args).compile()))
    return {
        "mode": mode,
        "remat": remat,
        "length": length,
        "batch": BATCH,
        "flops_ratio": flops[1] / flops[0],
        "memory_ratio": memory[1] / memory[0],
        "plain_gflop": flops[0] / 1e9,
        "plain_mb": memory[0],
        "clipped_mb": memory[1],
    }


def steps(model, mode: str, length: int, peers: bool) -> dict[str, Callable]:
    """Returns a plain step, and private steps, on one batch. Each keeps its own state."""
    case = training(model, mode, TIMED_BATCH, length)
    case = problems.concrete(case, model.num_classes)

    def step_of(sums, *parts):
        optimizer = optax.chain(*parts, optax.sgd(0.01))

        @jax.jit
        def step(params, state):
            grads = sums(params, case.batch)
            moved, state = problems.updated(optimizer, grads, state, case.trained(params))
            return {**params, **moved}, state

        return problems.stateful(step, case.params, optimizer.init(case.trained(case.params)))

    private = jaxdp.privatize(case.clipped_grad, noise_multiplier=1.0, divisor=TIMED_BATCH)
    calls = {
        "plain": step_of(case.plain, optax.scale(1 / TIMED_BATCH)),
        "clipped": step_of(case.clipped),
        "private": step_of(case.clipped, private),
    }
    if peers and not timing.missing("jax_privacy"):
        calls["jax_privacy clipped"] = step_of(case.jax_privacy())
    return calls


def timed(calls: dict[str, Callable], rounds: int) -> dict:
    for call in calls.values():
        jax.block_until_ready(call())
    wall, cpu = timing.interleaved(calls, rounds)
    return {name: bench_steps.row_of(name, timing.base_of(name), wall, cpu) for name in calls}


def measure(flags) -> dict:
    keep_freed_memory()
    missing = timing.missing("jax_privacy", "torch", "opacus") if flags.peers else []
    torch = flags.peers and not {"torch", "opacus"} & set(missing)
    cells = itertools.product(MODES, (False, True), LENGTHS)
    counts_by_length = [counted(*cell) for cell in cells]
    timing.show("counted", counts_by_length)
    cases = {}
    model = models.create("gpt2", num_classes=problems.VOCABULARY, **SMALL)
    for mode in MODES:
        calls = steps(model, mode, SMALL["positions"], flags.peers)
        if mode == "full" and torch:
            from benchmarks import torch_steps

            calls |= torch_steps.steps("lm", TIMED_BATCH, 1.0, 1.0)
        cases[mode] = rows = timed(calls, flags.rounds)
        noise = rows["private"]["cpu_over_plain"] - rows["clipped"]["cpu_over_plain"]
        rows["private"]["noise_cpu_over_plain"] = noise
        timing.show(mode, rows)
    return {
        "rounds": flags.rounds,
        "not installed": missing,
        "counted": counts_by_length,
        "cases": cases,
    }
