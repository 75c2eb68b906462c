"""Times one certified step of the paper's networks over a plain step, and reports the memory.

    python -m benchmarks run certified_steps --rounds 3

A case is a network of arXiv:2406.13433 at the paper's batch, which is the whole data set. "plain"
is one step of training with per-record clipped gradients, added up in a scan. "first step" bounds
it for the distances 0..20, and "later step" for one distance. A later step of K distances takes K
times as long, because each has a box of its own. The cases of 1000 records have the first step
under every threat. Rounds are interleaved. Seconds are medians of processor time, and ratios are
medians of ratios within a round. Memory is what XLA allocates beyond the arguments, by its own
analysis of the compiled program. "all gradients" is that of `jax.vmap(jax.grad(loss))`, which is
compiled and not run."""

import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import bench_prediction as networks
from benchmarks import pages, timing
from jaxdp.memory import keep_freed_memory
from jaxdp.prediction import Poisoning

KS = 20


class Size(NamedTuple):
    """A network, and the threats under which its first step is timed."""

    case: networks.Case
    threats: tuple[str, ...] = ("add_remove",)
    convolutions: bool = False  # whether they are trained too


_THREATS = ("add_remove", "replace_one", "remove", "poison")
_IMDB = networks.Case((768, 100, 1), 25_000, 1, 0.04, 0.2, 0.5)
_OCT = networks.Case((3200, 100, 1), 15_500, 1, 0.9, 0.06, 0.5, images=True)
_MNIST = networks.Case((784, 128, 10), 60_000, 1, 0.1, 0.1, 0.0)
SIZES = {
    "IMDB, 768-100-1": Size(_IMDB),
    "OctMNIST, frozen convolutions, 3200-100-1": Size(_OCT),
    "OctMNIST, convolutions trained too": Size(_OCT._replace(records=256), convolutions=True),
    "MNIST, 784-128-10": Size(_MNIST),
    "IMDB, every threat": Size(_IMDB._replace(records=1000), _THREATS),
    "MNIST, every threat": Size(_MNIST._replace(records=1000), _THREATS),
}


def plain(size: Size, params, data) -> dict[str, timing.Compiled]:
    """Returns one step by clipped gradients, added up in a scan or held all at once."""
    names = tuple(params) if size.convolutions else ("dense",)
    moving = {name: params[name] for name in names}
    on_device = jax.tree.map(jnp.asarray, (moving, data))
    steps = networks.baselines(size.case, params, names)
    programs = {"plain": steps["streamed"], "all gradients": steps["vmap"]}
    return {name: timing.compiled(step, *on_device) for name, step in programs.items()}


def programs(size: Size, params, data) -> dict[str, timing.Compiled]:
    """Returns the programs of a case. The later steps start from the box of the first."""
    result = plain(size, params, data)
    trainable = None if size.convolutions else networks.trained

    def certified(threat, ks=KS):
        poisoning = None
        if threat == "poison":
            poisoning = Poisoning(radius=0.01, features="x", label="y")
        options = {"threat": threat, "poisoning": poisoning, "trainable": trainable}
        step, arguments = networks.step_of(size.case, params, data, ks, **options)
        return lambda state=None: timing.compiled(step, *arguments(state))

    for threat in size.threats:
        name = "first step" if len(size.threats) == 1 else threat
        program = certified(threat)
        result[name] = program()
        if name == "first step":
            state = result[name]()
            result["later step, all distances"] = program(state)
            box = jax.tree.map(lambda x: x[1:2], state.lines)
            result["later step"] = certified(threat, (1,))(state._replace(lines=box))
    return result


_ONLY_COMPILED = ("all gradients", "later step, all distances")


def run_size(size: Size, rounds: int) -> dict:
    params, data = networks.problem(size.case)
    compiled = programs(size, params, data)
    calls = {name: call for name, call in compiled.items() if name not in _ONLY_COMPILED}
    _, cpu = timing.interleaved(calls, rounds, warm=False)
    rows = {}
    for name, program in compiled.items():
        rows[name] = {"memory_mb": program.memory_mb}
    for name in calls:
        rows[name]["cpu_s"] = statistics.median(cpu[name])
        rows[name]["over_plain"] = timing.median_ratio(cpu[name], cpu["plain"])
    return rows


def tables(report) -> dict:
    columns = {
        "network": "{network}",
        "records": "{records}",
        "step": "{step}",
        "CPU seconds": "{cpu_s:.2g}",
        "over plain": "{over_plain:.1f}",
        "memory, MB": "{memory_mb:.0f}",
    }
    rows = {"certified steps": [], "certified threats": []}
    for name, steps in report["cases"].items():
        network = name.removesuffix(", every threat")
        table = "certified steps" if network == name else "certified threats"
        case = {"network": network, "records": report["records"][name]}
        rows[table] += [case | {"step": step} | row for step, row in steps.items()]
    return {name: pages.lines(of, columns) for name, of in rows.items()}


FLAGS = {"cases": ("", f"parts of names, split by ;, of {[*SIZES]}"), "rounds": 3}


def measure(flags) -> dict:
    keep_freed_memory()
    names = timing.chosen(SIZES, flags.cases)
    earlier = timing.earlier(flags.output)  # --cases adds to the file
    cases = earlier.get("cases", {})
    cases |= timing.each(names, lambda name: run_size(SIZES[name], flags.rounds))
    records = {name: SIZES[name].case.records for name in cases}
    return {"rounds": flags.rounds, "ks": KS, "records": records, "cases": cases}
