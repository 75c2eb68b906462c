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

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import bench_steps, counts, problems, timing
from jaxdp import models
from jaxdp.memory import keep_freed_memory
from jaxdp.report import format_table

LENGTHS, BATCH, VOCABULARY, RANK, CLIP = (128, 512, 1024), 8, 50_257, 8, 1.0
TIMED_BATCH = 8  # with 256 tokens each, so that tokens take most of the time, and not parameters
SMALL = {"positions": 256, "width": 256, "depth": 4, "num_heads": 4, "mlp_width": 1024}
MODES = ("full", "lora")


def problem(model: Any, mode: str, params: Any = None) -> tuple[Any, Callable[..., Any], Any]:
    """Returns (parameters, loss of one row of tokens, `trainable`). Without parameters they are
    shapes."""

    def network_of(params: Any) -> models.Pretrained:
        network = models.Pretrained(model, params, None)
        return models.with_lora(network, rank=RANK, seed=0) if mode == "lora" else network

    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    )
    apply_fn = network_of(shapes).apply_fn  # reads no value

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return jaxdp.losses.next_token(apply_fn(params, tokens[None, :-1])[0], tokens[1:])

    params = (
        jax.eval_shape(lambda p: network_of(p).params, shapes)
        if params is None
        else network_of(params).params
    )
    return params, loss, models.trainable("lora", params) if mode == "lora" else None


def plain_gradient(loss: Callable[..., Any], mode: str) -> Callable[[Any, Any], Any]:
    """Returns the gradient of the mean loss of a batch, for the parameters that are trained."""

    def mean(moving: Any, params: Any, tokens: jax.Array) -> jax.Array:
        whole = {**params, "lora": moving} if mode == "lora" else moving
        return jax.vmap(loss, (None, 0))(whole, tokens).mean()

    return lambda params, tokens: jax.grad(mean)(
        params["lora"] if mode == "lora" else params, params, tokens
    )


def counted(model: Any, mode: str, length: int, batch: int) -> dict[str, float]:
    """Returns ratios of operations and memory of a clipped gradient over a plain one."""
    params, loss, trainable = problem(model, mode)
    clipped = jaxdp.clipped_grad(loss, clip_norm=CLIP, trainable=trainable)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    programs = plain_gradient(loss, mode), lambda params, tokens: clipped(params, tokens).grads
    flops = [counts.count(program, params, tokens).flops for program in programs]
    memory = [
        timing.allocated_mb(jax.jit(program).lower(params, tokens).compile())
        for program in programs
    ]
    return {
        "flops_ratio": flops[1] / flops[0],
        "memory_ratio": memory[1] / memory[0],
        "plain_gflop": flops[0] / 1e9,
        "plain_mb": memory[0],
        "clipped_mb": memory[1],
    }


def steps(
    model: Any, mode: str, length: int, batch: int, peers: bool
) -> dict[str, Callable[[], Any]]:
    """Returns a plain step, and private steps, on one batch. Each keeps its own state."""
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params, loss, trainable = problem(model, mode, params)
    gradient, clipped = (
        plain_gradient(loss, mode),
        jaxdp.clipped_grad(loss, clip_norm=CLIP, trainable=trainable),
    )
    private = jaxdp.privatize(clipped, noise_multiplier=1.0, divisor=batch)
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(
            model.num_classes, size=(batch, length + 1), dtype=np.int32
        )
    )

    def step_of(
        optimizer: optax.GradientTransformation, sums: Callable[[Any, Any], Any]
    ) -> Callable[[], Any]:
        @jax.jit
        def updated(params: Any, state: Any) -> Any:
            grads = sums(params, tokens)
            updates, state = optimizer.update(grads, state, trained(params))
            return {**params, **optax.apply_updates(trained(params), updates)}, state

        return problems.stateful(updated, params, optimizer.init(trained(params)))

    def trained(params: Any) -> Any:
        return {"lora": params["lora"]} if mode == "lora" else params

    def only(grads: Any) -> Any:
        return {name: grads[name] for name in trained(params)}

    sgd = optax.sgd(0.01)
    calls = {
        "plain": step_of(
            sgd, lambda p, t: {"lora": gradient(p, t)} if mode == "lora" else gradient(p, t)
        ),
        "clipped": step_of(sgd, lambda p, t: only(clipped(p, t).grads)),
        "private": step_of(optax.chain(private, sgd), lambda p, t: only(clipped(p, t).grads)),
    }
    if peers and not timing.missing("jax_privacy"):

        def loss_of_trained(moving: Any, params: Any, tokens: jax.Array) -> jax.Array:
            return loss({**params, **moving}, tokens)

        peer = problems.jax_privacy_grad(loss_of_trained, CLIP, (2,))
        calls["jax_privacy clipped"] = step_of(sgd, lambda p, t: peer(trained(p), p, t))
    return calls


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    for call in calls.values():
        jax.block_until_ready(call())
    wall, cpu = timing.interleaved(calls, rounds)
    rows = {}
    for name in calls:
        base = "torch plain" if name.startswith(("torch", "Opacus")) else "plain"
        rows[name] = bench_steps.row_of(name, base, wall, cpu)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", action="store_true")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()
    missing = timing.missing("jax_privacy", "torch", "opacus") if flags.peers else []
    torch = flags.peers and not {"torch", "opacus"} & set(missing)
    counts_by_length = counted_rows()
    print(format_table(counts_by_length, digits=3), flush=True)
    cases = {}
    model = models.create("gpt2", num_classes=bench_steps.VOCABULARY, **SMALL)
    for mode in MODES:
        calls = steps(model, mode, SMALL["positions"], TIMED_BATCH, flags.peers)
        if mode == "full" and torch:
            from benchmarks import torch_steps

            calls |= torch_steps.steps("lm", TIMED_BATCH, CLIP, 1.0)
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


def counted_rows() -> list[dict[str, Any]]:
    """Returns the counts of GPT-2 small in every mode, with and without remat, by length."""
    rows = []
    for mode, remat, length in itertools.product(MODES, (False, True), LENGTHS):
        model = models.create("gpt2", num_classes=VOCABULARY, remat=remat)
        row = {"mode": mode, "remat": remat, "length": length, "batch": BATCH}
        rows.append(row | counted(model, mode, length, BATCH))
    return rows
