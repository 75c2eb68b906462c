"""Times Gaussian noise beside other generators, and `privatize` as a share of a private step.

    python -m benchmarks run noise [--size 1048576] [--rounds 9]

The design before ChaCha is here as "rbg, two normals". `jaxdp.transforms.noise.CPU_OPTIONS` are
those of `fit`. NumPy and PyTorch draw on the host. Processor time counts all threads, so a value of
one core and of two cores are compared fairly."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from benchmarks import pages, problems, timing
from jaxdp.transforms import noise

SEED = bytes(16)
MODELS = {"resnet20": 64, "vit": 32}  # batch sizes of cases of `problems.cases`
FLAGS = {"size": (2**20, "values of the vector"), "rounds": 9}


def old_noise(key: jax.Array, tree):
    """Sums two normals over sqrt(2), with a program for each leaf."""

    def leaf(index, like):
        first, second = (
            jax.random.normal(k, like.shape)
            for k in jax.random.split(jax.random.fold_in(key, index))
        )
        return (first + second) * math.sqrt(0.5)

    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [leaf(i, x) for i, x in enumerate(leaves)])


def vector(size: int, rounds: int) -> dict:
    """Times one vector of float32."""
    like = jnp.zeros(size)
    keys = {impl: jax.random.key(0, impl=impl) for impl in ("rbg", "threefry2x32")}

    def normal(key):
        return jax.random.normal(key, like.shape)

    def gaussian(key):
        return noise.gaussian(key, like, 1.0)

    ours, rbg = noise.stream(SEED, "noise"), keys["rbg"]
    calls = {
        "chacha12": timing.compiled(gaussian, ours),
        "rbg, two normals": timing.compiled(lambda key: old_noise(key, like), rbg),
        "rbg, one normal": timing.compiled(normal, rbg),
        "threefry2x32, one normal": timing.compiled(normal, keys["threefry2x32"]),
        "chacha12, CPU_OPTIONS": timing.compiled(
            gaussian, ours, compiler_options=noise.CPU_OPTIONS
        ),
    }
    generator = np.random.default_rng(0)
    calls["numpy"] = lambda: generator.standard_normal(size, np.float32)
    if not timing.missing("torch"):
        import torch

        calls["torch"] = lambda: torch.randn(size)
    wall, cpu = timing.interleaved(calls, rounds)
    rows = {}
    for name in calls:
        rows[name] = {
            "wall_ns_per_value": timing.median_ms(wall[name]) * 1e6 / size,
            "cpu_ns_per_value": timing.median_ms(cpu[name]) * 1e6 / size,
            "least_cpu_ns_per_value": min(cpu[name]) * 1e9 / size,
            "cpu_over_chacha12": timing.median_ratio(cpu[name], cpu["chacha12"]),
        }
    return rows


def step(name: str, rounds: int) -> dict:
    """Times the noise of a model's gradient beside its clipped gradient."""
    case = problems.cases()[name]
    params, loss, _ = problems.image_problem(case)
    batch_size, batch = case.batch_size, case.images(case.batch_size)
    grad_fn = jaxdp.clipped_grad(loss, clip_norm=1.0)
    calls = {"gradient": timing.compiled(lambda params: grad_fn(params, batch).grads, params)}
    grads = calls["gradient"]()

    def privatize(multiplier, options):
        key = noise.stream(SEED, "noise")
        how = {"noise_multiplier": multiplier, "divisor": batch_size, "key": key}
        privatizer = noise.privatize(grad_fn, **how)
        update = lambda grads, state: privatizer.update(grads, state)[0]  # noqa: E731
        state = privatizer.init(params)
        return timing.compiled(update, grads, state, compiler_options=options)

    def before(grads, key):
        return jax.tree.map(lambda x, z: (x + z) / batch_size, grads, old_noise(key, grads))

    calls["privatize"] = privatize(1.0, noise.CPU_OPTIONS)
    calls["without noise"] = privatize(0.0, None)
    calls["before"] = timing.compiled(before, grads, jax.random.key(0, impl="rbg"))
    compile_s = {name: call.compile_cpu_s for name, call in calls.items() if name != "gradient"}
    wall, cpu = timing.interleaved(calls, rounds)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    per_value, share = {}, {}
    for part in ("privatize", "before"):
        steps = [a + b for a, b in zip(cpu["gradient"], cpu[part], strict=True)]
        per_value[part] = timing.median_ms(cpu[part]) * 1e6 / size
        share[part] = timing.median_ratio(cpu[part], steps)
    return {
        "parameters": size,
        "leaves": len(jax.tree.leaves(params)),
        "compile_cpu_s": compile_s,
        "cpu_ns_per_value": per_value,
        "cpu_share_of_step": share,
        "wall_ms": {part: timing.median_ms(seconds) for part, seconds in wall.items()},
    }


NAMES = {
    "chacha12": "jaxdp, ChaCha12",
    "chacha12, CPU_OPTIONS": "jaxdp, ChaCha12 with `CPU_OPTIONS`, as in `fit`",
    "rbg, two normals": "before",
    "rbg, one normal": "`jax.random.normal`, rbg, one draw",
    "threefry2x32, one normal": "`jax.random.normal`, threefry2x32, one draw",
    "numpy": "NumPy, `standard_normal` in float32",
    "torch": "PyTorch, `randn`",
}


def tables(report) -> dict:
    generators = {
        "a vector of 2^20 values": "{name}",
        "processor ns per value": "{cpu_ns_per_value:.1f}",
        "ns per value": "{wall_ns_per_value:.1f}",
        "processor time over jaxdp": "{cpu_over_chacha12:.2g}",
    }
    rows = [{"name": NAMES[name]} | row for name, row in report["vector"].items()]
    of_models = []
    for title, (values, scale, unit) in _OF_MODELS.items():
        line = {"noise of a model's gradient": f"{title} (before)"}
        for name, row in report["steps"].items():
            ours, before = (scale * row[values][part] for part in ("privatize", "before"))
            line[f"{name}, batch {MODELS[name]}"] = f"{ours:.1f}{unit} ({before:.1f}{unit})"
        of_models.append(line)
    return {
        "noise": pages.lines(rows, generators),
        "noise of models": of_models,
    }


_OF_MODELS = {
    "share of clipped gradient and noise": ("cpu_share_of_step", 100, " %"),
    "processor ns per value": ("cpu_ns_per_value", 1, ""),
    "seconds to compile `privatize`": ("compile_cpu_s", 1, ""),
}


def measure(flags) -> dict:
    report = {
        "vector": vector(flags.size, flags.rounds),
        "steps": {name: step(name, flags.rounds) for name in MODELS},
    }
    for part in (report["vector"], *report["steps"].values()):
        for name, row in part.items():
            print(name, row)
    return report
