r"""Times a private adaptation step against the method's plain step and a forward pass, and its
memory.

    python -m benchmarks run adaptation --shapes vit_ti16,vit_b16 --rounds 5 --peers \
        --output .bench/adaptation.json

Per shape and batch size, "forward" predicts only, "plain" is the published method, "private" its
private form, and "clip only" the private form without noise. Steps are interleaved. Each is timed
after an untimed call of it, and medians are reported. Ratios are medians of the ratios within a
round. "memory" is what XLA allocates for a step beyond its arguments (temporaries and outputs).
Weights are random, which does not change the work.

With --peers, `torch.func` and Opacus compute per-example gradients of Tent's loss, on the same
architecture and in the same rounds. Their ratios are over a plain Tent step in PyTorch. Install
torch, timm and opacus for this.

With --stream, 10,000 images of 8x8 pixels pass through one adapter, with resets by schedule and by
hand. The number of compiled programs is checked.

With --till, the benchmark reports what `tta.serve` adds to the steps of such a stream, in ms a
batch: without an account, with one in memory, with a ledger in a file, and with a workdir, whose
time includes forcing its files to the disk."""

import argparse
import functools
import math
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import timing
from jaxdp import models, tta
from jaxdp.memory import keep_freed_memory
from jaxdp.tta.step import compiled_step


class Shape(NamedTuple):
    model: str
    size: int  # of the square images
    num_classes: int
    timm: str | None = None  # name of the same architecture there


SHAPES = {
    "vit_tiny32": Shape("vit_tiny", 32, 10),
    "vit_ti16": Shape("vit_ti16", 224, 1000, "vit_tiny_patch16_224"),
    "vit_b16": Shape("vit_b16", 224, 1000, "vit_base_patch16_224"),
    "convnext_tiny": Shape("convnext_tiny", 224, 1000, "convnext_tiny"),
}
METHODS: dict[str, Callable[[int], tta.Method]] = {
    "tent": lambda classes: tta.Tent(),
    "eata": tta.EATA,
    "sar": tta.SAR,
    "deyo": tta.DeYO,
    "deyo-come": lambda classes: tta.COME(tta.DeYO(classes), classes),
}
STREAM = 10_000


class Step(NamedTuple):
    call: Callable[[], Any]
    row: dict[str, Any]  # how long it took to compile, and its memory


def compiled(lowered: Any, *args: Any) -> Step:
    start = time.perf_counter()
    step = lowered.compile()
    seconds = time.perf_counter() - start
    return Step(lambda: step(*args), {"compile_s": seconds, "memory_mb": timing.allocated_mb(step)})


def adapter_step(adapter: tta.Adapter, images: jax.Array) -> Step:
    """Returns the compiled step of an adapter, which knows its memory."""
    state = adapter.init()
    args = (
        adapter.constants,
        adapter._moving(state),
        images,
        jnp.ones(len(images), bool),
        state.key,
    )
    return compiled(compiled_step.lower(adapter._program, len(images), *args), *args)


def steps_of(shape: Shape, batch_size: int, methods: list[str]) -> dict[str, Step]:
    model = models.create(shape.model, num_classes=shape.num_classes)
    images = jax.random.uniform(jax.random.key(0), (batch_size, shape.size, shape.size, 3))
    params = jax.jit(model.init)(jax.random.key(1), images[:1])["params"]

    def apply_fn(params: Any, images: jax.Array) -> jax.Array:
        return model.apply({"params": params}, images)

    steps = {"forward": compiled(jax.jit(apply_fn).lower(params, images), params, images)}
    adapt = functools.partial(
        tta.Adapter, apply_fn, params, optimizer=optax.sgd(1e-3, momentum=0.9)
    )
    for name in methods:
        method = METHODS[name](shape.num_classes)
        steps[f"{name} plain"] = adapter_step(adapt(method=method), images)
        for kind, noise in (("private", 0.6186), ("clip only", 0.0)):
            private = tta.private(method, clip_norm=1.0, noise_multiplier=noise)
            steps[f"{name} {kind}"] = adapter_step(adapt(method=private), images)
    check_equal(adapt, images)
    return steps


def check_equal(adapt: Callable[..., tta.Adapter], images: jax.Array) -> None:
    """Checks that a private Tent step without clipping and noise equals a plain one."""
    methods = tta.Tent(), tta.private(tta.Tent(), clip_norm=1e6, noise_multiplier=0.0)
    moved = []
    for adapter in (adapt(method=method) for method in methods):
        state, _ = adapter.step(adapter.init(), images)
        difference = jax.tree.map(jnp.subtract, state.params, adapter.init().params)
        moved.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(difference)]))
    error = np.linalg.norm(moved[1] - moved[0]) / np.linalg.norm(moved[0])
    if not error < 1e-2:  # of displacements that float32 parameters have rounded
        raise AssertionError(f"The private step differs from the plain step by {error:.1e}.")


def peer_steps(shape: Shape, batch_size: int) -> dict[str, Step]:
    """Returns Tent steps in PyTorch: a plain one, and private ones by `torch.func` and Opacus."""
    import timm
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    sigma, learning_rate = 0.6186, 1e-3
    images = torch.rand(batch_size, 3, shape.size, shape.size)

    def new_model() -> tuple[Any, dict[str, Any]]:
        model = timm.create_model(shape.timm, pretrained=False).eval().requires_grad_(False)
        names = [
            name
            for name, module in model.named_modules()
            if "norm" in name and hasattr(module, "weight")
        ]
        moving = {n: p for n, p in model.named_parameters() if n.rsplit(".", 1)[0] in names}
        for parameter in moving.values():
            parameter.requires_grad_(True)
        return model, moving

    def entropies(logits: Any) -> Any:
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    def sgd(moving: dict[str, Any]) -> Any:
        return torch.optim.SGD(moving.values(), learning_rate, momentum=0.9)

    forward_model, _ = new_model()

    def forward() -> None:
        with torch.no_grad():
            forward_model(images)

    plain_model, plain_moving = new_model()
    plain_optimizer = sgd(plain_moving)

    def plain() -> None:
        plain_optimizer.zero_grad()
        entropies(plain_model(images)).mean().backward()
        plain_optimizer.step()

    func_model, func_moving = new_model()
    func_optimizer = sgd(func_moving)

    def loss(moving: dict[str, Any], image: Any) -> Any:
        return entropies(torch.func.functional_call(func_model, moving, (image[None],)))[0]

    def vmapped() -> None:
        detached = {n: p.detach() for n, p in func_moving.items()}
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(detached, images)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, g in grads.items():
            total = torch.einsum("b,b...->...", factors, g)
            func_moving[name].grad = (total + sigma * torch.randn_like(total)) / batch_size
        func_optimizer.step()

    opacus_model, opacus_moving = new_model()
    # Opacus records only in training mode. These models have no dropout by default.
    opacus_model.train()
    wrapped = GradSampleModule(opacus_model)
    opacus_optimizer = DPOptimizer(
        sgd(opacus_moving),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
        expected_batch_size=batch_size,
    )

    def opacus() -> None:
        opacus_optimizer.zero_grad()
        entropies(wrapped(images)).mean().backward()
        opacus_optimizer.step()

    calls = {
        "torch forward": forward,
        "torch plain": plain,
        "torch.func private": vmapped,
        "opacus private": opacus,
    }
    return {name: Step(call, {}) for name, call in calls.items()}


def run_case(
    shape: Shape, batch_size: int, methods: list[str], rounds: int, *, peers: bool
) -> dict[str, Any]:
    steps = steps_of(shape, batch_size, methods)
    if peers and shape.timm:
        steps |= peer_steps(shape, batch_size)
    wall, cpu = timing.interleaved({name: step.call for name, step in steps.items()}, rounds)
    rows = {name: dict(step.row) for name, step in steps.items()}
    for name, row in rows.items():
        row["wall_ms"] = timing.median_ms(wall[name])
        row["cpu_ms"] = timing.median_ms(cpu[name])
        ours = "memory_mb" in row  # the peers' memory is not known
        bases = {"plain": "torch plain", "forward": "torch forward"}
        if ours:
            method = name.split()[0]
            bases = {"plain": f"{method} plain", "forward": "forward"}
        for column, base in bases.items():
            if base in steps:
                row[f"over_{column}"] = timing.median_ratio(wall[name], wall[base])
                row[f"cpu_over_{column}"] = timing.median_ratio(cpu[name], cpu[base])
        if ours and bases["plain"] in steps:
            row["memory_over_plain"] = row["memory_mb"] / rows[bases["plain"]]["memory_mb"]
    return rows


def small_adapter(reset_every: int | None) -> tta.Adapter:
    """Returns private Tent on a ViT for images of 8x8 pixels."""
    model = models.create(
        "vit_tiny", num_classes=10, patch_size=4, width=16, depth=1, num_heads=2, mlp_width=32
    )
    params = model.init(jax.random.key(1), jnp.zeros((1, 8, 8, 3)))["params"]

    def apply_fn(params: Any, images: jax.Array) -> jax.Array:
        return model.apply({"params": params}, images)

    method = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=0.6186)
    return tta.Adapter(
        apply_fn, params, method, optax.sgd(1e-3, momentum=0.9), reset_every=reset_every
    )


def stream_case(batch_size: int) -> dict[str, Any]:
    """Counts the programs of a stream of 10,000 images: padded last batch, resets every 50 batches
    and by hand."""
    adapter = small_adapter(reset_every=50)
    images = np.random.default_rng(0).random((STREAM, 8, 8, 3), np.float32)
    before = compiled_step._cache_size()
    state, seen, batches = adapter.init(), 0, math.ceil(STREAM / batch_size)
    start = time.perf_counter()
    for i in range(batches):
        batch = images[i * batch_size : (i + 1) * batch_size]
        mask = np.arange(batch_size) < len(batch)
        padded = np.pad(batch, [(0, batch_size - len(batch)), (0, 0), (0, 0), (0, 0)])
        state, logits = adapter.step(state, padded, mask=mask)
        seen += len(logits[mask])
        if i == batches // 2:
            state = adapter.reset(state)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    compilations = compiled_step._cache_size() - before
    if compilations != 1:
        raise AssertionError(
            f"A stream of {batches} batches compiled its step {compilations} times."
        )
    return {"images": seen, "batches": batches, "compilations": compilations, "wall_s": seconds}


def till_case(batch_size: int, batches: int, rounds: int) -> dict[str, float]:
    """Returns the median ms per batch of a stream of 8x8 images, by how it is served. "steps" is
    without `serve`."""
    data = jaxdp.data.from_arrays(
        image=np.random.default_rng(0).random((batches * batch_size, 8, 8, 3), np.float32),
        label=np.zeros(batches * batch_size, int),
        num_classes=10,
    )
    stream = list(tta.Stream({"stream": data}, batch_size=batch_size, seed=0))
    adapter = small_adapter(None)

    def steps() -> None:
        state = adapter.init()
        for batch in stream:
            state, logits = adapter.step(state, batch.images, mask=batch.mask)
            np.asarray(logits)

    def serve(folder: str, *, file: bool = False, workdir: bool = False) -> None:
        with (
            jaxdp.Ledger(f"{folder}/ledger.sqlite") if file else jaxdp.Ledger.in_memory() as ledger
        ):
            ledger.register("stream", adjacency="replace_one", unit="image")
            account = tta.StreamAccount(ledger.account("stream"), event=adapter.method.event)
            tta.serve(
                adapter, stream, account=account, workdir=f"{folder}/run" if workdir else None
            )

    kinds: dict[str, Callable[[str], Any]] = {
        "steps": lambda folder: steps(),
        "without an account": lambda folder: tta.serve(adapter, stream, account=None),
        "account in memory": serve,
        "ledger in a file": functools.partial(serve, file=True),
        "ledger and workdir": functools.partial(serve, file=True, workdir=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, kind in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                kind(folder)
                seconds[name].append((time.perf_counter() - start) / batches)
    # the first compiles
    return {name: 1e3 * float(np.median(times[1:])) for name, times in seconds.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="vit_tiny32,vit_ti16", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--batch-sizes", default="8,64")
    parser.add_argument("--methods", default="tent", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--till", action="store_true")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()
    peers, note = timing.peers(flags.peers, "torch", "timm", "opacus")
    methods = flags.methods.split(",")
    report: dict[str, Any] = {"rounds": flags.rounds, "peers": note, "cases": {}}
    for name in filter(None, flags.shapes.split(",")):
        for size in map(int, flags.batch_sizes.split(",")):
            rows = run_case(SHAPES[name], size, methods, flags.rounds, peers=peers)
            report["cases"][f"{name}, B={size}"] = rows
            timing.show(f"{name}, batch of {size}", rows, COLUMNS)
    if flags.stream:
        report["stream"] = result = stream_case(64)
        batches = f"{result['images']} images in {result['batches']} batches"
        compilations = f"{result['compilations']} compilation"
        print(f"\n{batches}: {compilations}, {result['wall_s']:.1f} s")
    if flags.till:
        report["till"] = till_case(8, 200, flags.rounds)
        rows = {name: {"ms per batch": ms} for name, ms in report["till"].items()}
        timing.show("served", rows)
    return report


COLUMNS = (
    "wall_ms",
    "over_plain",
    "over_forward",
    "cpu_over_plain",
    "memory_mb",
    "memory_over_plain",
)
