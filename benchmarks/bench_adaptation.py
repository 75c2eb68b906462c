"""Times a private adaptation step against the method's plain step and a forward pass, and its
memory.

    python -m benchmarks run adaptation --shapes vit_ti16,vit_b16 --rounds 5 --peers

Per shape and batch size, "forward" predicts only, "plain" is the published method, "private" its
private form, and "clip only" the private form without noise. Steps are interleaved. Each is timed
after an untimed call of it, and medians are reported. Ratios are medians of the ratios within a
round. "memory" is what XLA allocates for a step beyond its arguments (temporaries and outputs).
Weights are random, which does not change the work.

With --peers, `torch.func` and Opacus compute per-example gradients of Tent's loss, on the same
architecture and in the same rounds. Their ratios are over a plain Tent step in PyTorch. Install
torch, timm and opacus for this.

With --till, the benchmark reports what `tta.serve` adds to the steps of a stream of images of 8x8
pixels, in ms a batch: without an account, with one in memory, with a ledger in a file, and with a
workdir, whose time includes forcing its files to the disk."""

import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import problems, timing
from benchmarks.timing import Step
from jaxdp import models, tta
from jaxdp.memory import keep_freed_memory


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
METHODS = {
    "tent": lambda classes: tta.Tent(),
    "eata": tta.EATA,
    "sar": tta.SAR,
    "deyo": tta.DeYO,
    "deyo-come": lambda classes: tta.COME(tta.DeYO(classes), classes),
}


def step_of(function: Callable, *args, static: tuple = ()) -> Step:
    call = timing.compiled(function, *args, static=static)
    return Step(call, {"compile_s": call.compile_s, "memory_mb": call.memory_mb})


def adapter_step(adapter: tta.Adapter, images: jax.Array) -> Step:
    """Returns the compiled step of an adapter, which knows its memory."""
    function, (program, size, *args) = adapter.programs(adapter.init(), images)["step"]
    return step_of(function, *args, static=(program, size))


def steps_of(shape: Shape, batch_size: int, methods: list[str]) -> dict[str, Step]:
    model = models.create(shape.model, num_classes=shape.num_classes)
    images = jax.random.uniform(jax.random.key(0), (batch_size, shape.size, shape.size, 3))
    params = jax.jit(model.init)(jax.random.key(1), images[:1])["params"]

    def apply_fn(params, images):
        return model.apply({"params": params}, images)

    steps = {"forward": step_of(apply_fn, params, images)}
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


def check_equal(adapt: Callable, images: jax.Array):
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

    from benchmarks.torch_steps import stepped

    sigma = 0.6186
    images = torch.rand(batch_size, 3, shape.size, shape.size)

    def new_model():
        model = timm.create_model(shape.timm, pretrained=False).eval().requires_grad_(False)
        moving = {}
        for norm, module in model.named_modules():
            if "norm" in norm and hasattr(module, "weight"):
                moving |= {f"{norm}.{n}": p for n, p in module.named_parameters(recurse=False)}
        for parameter in moving.values():
            parameter.requires_grad_(True)
        return model, moving, torch.optim.SGD(moving.values(), 1e-3, momentum=0.9)

    def entropies(logits):
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    forward_model, _, _ = new_model()

    def forward():
        with torch.no_grad():
            forward_model(images)

    plain_model, _, plain_sgd = new_model()
    func_model, func_moving, func_sgd = new_model()

    def loss(moving, image):
        return entropies(torch.func.functional_call(func_model, moving, (image[None],)))[0]

    def vmapped():
        detached = {n: p.detach() for n, p in func_moving.items()}
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(detached, images)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, g in grads.items():
            total = torch.einsum("b,b...->...", factors, g)
            func_moving[name].grad = (total + sigma * torch.randn_like(total)) / batch_size
        func_sgd.step()

    opacus_model, _, opacus_sgd = new_model()
    # Opacus records only in training mode. These models have no dropout by default.
    wrapped = GradSampleModule(opacus_model.train())
    how = {"noise_multiplier": sigma, "max_grad_norm": 1.0, "expected_batch_size": batch_size}
    private = DPOptimizer(opacus_sgd, **how)
    calls = {
        "torch forward": forward,
        "torch plain": stepped(plain_sgd, lambda: entropies(plain_model(images)).mean()),
        "torch.func private": vmapped,
        "opacus private": stepped(private, lambda: entropies(wrapped(images)).mean()),
    }
    return {name: Step(call, {}) for name, call in calls.items()}


def run_case(
    shape: Shape, batch_size: int, methods: list[str], rounds: int, *, peers: bool
) -> dict:
    steps = steps_of(shape, batch_size, methods)
    if peers and shape.timm:
        steps |= peer_steps(shape, batch_size)

    def bases(name):
        if steps[name].row:
            return {"plain": f"{name.split()[0]} plain", "forward": "forward"}
        return {"plain": "torch plain", "forward": "torch forward"}

    rows = timing.step_rows(steps, rounds, bases)
    for name, row in rows.items():
        plain = rows.get(bases(name)["plain"])
        if plain and "memory_mb" in row:  # the peers' memory is not known
            row["memory_over_plain"] = row["memory_mb"] / plain["memory_mb"]
    return rows


def small_adapter() -> tta.Adapter:
    """Returns private Tent on a ViT for images of 8x8 pixels."""
    sizes = problems.TINY_VIT | {"depth": 1, "patch_size": 4}
    model = models.create("vit_tiny", num_classes=10, **sizes)
    params = model.init(jax.random.key(1), jnp.zeros((1, 8, 8, 3)))["params"]

    def apply_fn(params, images):
        return model.apply({"params": params}, images)

    method = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=0.6186)
    return tta.Adapter(apply_fn, params, method, optax.sgd(1e-3, momentum=0.9))


def till_case(batch_size: int, batches: int, rounds: int) -> dict[str, float]:
    """Returns the median ms per batch of a stream of 8x8 images, by how it is served. "steps" is
    without `serve`."""
    data = jaxdp.data.from_arrays(
        image=np.random.default_rng(0).random((batches * batch_size, 8, 8, 3), np.float32),
        label=np.zeros(batches * batch_size, int),
        num_classes=10,
    )
    stream = list(tta.Stream({"stream": data}, batch_size=batch_size, seed=0))
    adapter = small_adapter()

    def steps():
        state = adapter.init()
        for batch in stream:
            state, logits = adapter.step(state, batch.images, mask=batch.mask)
            np.asarray(logits)

    def serve(ledger, workdir=None):
        with ledger:
            ledger.register("stream", adjacency="replace_one", unit="image")
            account = tta.StreamAccount(ledger.account("stream"), event=adapter.method.event)
            tta.serve(adapter, stream, account=account, workdir=workdir)

    def in_file(*, workdir=False):
        folder = pathlib.Path(root, str(next(numbers)))
        folder.mkdir()
        serve(jaxdp.Ledger(folder / "ledger.sqlite"), folder / "run" if workdir else None)

    kinds = {
        "steps": steps,
        "without an account": lambda: tta.serve(adapter, stream, account=None),
        "account in memory": lambda: serve(jaxdp.Ledger.in_memory()),
        "ledger in a file": in_file,
        "ledger and workdir": functools.partial(in_file, workdir=True),
    }
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as root:
        wall, _ = timing.interleaved(kinds, 1 + rounds, warm=False)
    # the first compiles
    return {name: timing.median_ms(seconds[1:]) / batches for name, seconds in wall.items()}


FLAGS = {
    "shapes": ("vit_tiny32,vit_ti16", f"of {', '.join(SHAPES)}"),
    "batch-sizes": "8,64",
    "methods": ("tent", f"of {', '.join(METHODS)}"),
    "rounds": 5,
    "peers": False,
    "till": False,
}


def measure(flags) -> dict:
    keep_freed_memory()
    peers, note = timing.peers(flags.peers, "torch", "timm", "opacus")
    methods = flags.methods.split(",")
    report = {"rounds": flags.rounds, "peers": note, "cases": {}}
    for name in filter(None, flags.shapes.split(",")):
        for size in map(int, flags.batch_sizes.split(",")):
            rows = run_case(SHAPES[name], size, methods, flags.rounds, peers=peers)
            report["cases"][f"{name}, B={size}"] = rows
            timing.show(f"{name}, batch of {size}", rows)
    if flags.till:
        report["till"] = till_case(8, 200, flags.rounds)
        rows = {name: {"ms per batch": ms} for name, ms in report["till"].items()}
        timing.show("served", rows)
    return report
