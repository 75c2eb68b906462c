"""What a run would charge, take and need: the facts of --dry_run. Nothing is written, and nothing
is spent.
"""

import contextlib
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import compilers, finetune, privacy
from jaxdp.data import Examples, Groups
from jaxdp.data.storage import own_copy, zeros_on_device
from jaxdp.files.text import indented
from jaxdp.privacy import DpEvent, Ledger
from jaxdp.privacy.events import compose, composition, describe, from_json
from jaxdp.privacy.planning import facts, left_after
from jaxdp.privacy.units import unit_words
from jaxdp.release import notes

Rows = Sequence[tuple[str, str]]
# Compiled functions with arguments, some as `jax.ShapeDtypeStruct`, and the number of calls in a
# part of a run.
Programs = Sequence[tuple[Any, tuple[Any, ...], float]]
_ZEROS = (np.ndarray, jax.ShapeDtypeStruct)  # records, and what another program computes
_DRAWS = 20  # batches from which the number of physical batches per step is estimated


class Item(NamedTuple):
    """A part of a run: what it asks of a ledger, and what it computes.

    Attributes:
      what: The part of the run, for people.
      dataset: The name of the data set that pays. "" is the only one of its ledger.
      event: What is charged, or None.
      terms: The terms of the data set, as in `Ledger.register`. A budget among them is used if
          there is no ledger yet.
      rows: Facts about the part.
      ledger: The path of the ledger, below the workdir or absolute.
      folder: The folder below the workdir with the notes of charges that were made already.
      runs: The number of such parts. Each has its own data set or ledger.
      programs: Returns the programs for this machine, or for an accelerator with so many bytes of
          memory.
      steps: The number of private steps that the programs take, 0 if they are public.
    """

    what: str
    dataset: str = ""
    event: DpEvent | None = None
    terms: Mapping[str, Any] = MappingProxyType({})
    rows: Rows = ()
    ledger: str = "ledger.sqlite"
    folder: str = ""
    runs: int = 1
    programs: Callable[[int | None], Programs] = lambda memory: ()
    steps: int = 0


def training(
    what: str,
    trainer: finetune.PrivateTrainer,
    source: Examples | Groups,
    params: Any,
    *,
    steps: int,
    every: int,
    terms: Mapping[str, Any],
    **where: Any,
) -> Item:
    """Returns what `jaxdp.finetune.fit` charges and computes, whose arguments these are.

    Args:
      what, terms, **where: As in `Item`.
    """
    sampler, privatizer = trainer.sampler, trainer.privatizer
    batch_size = sampler.expected_batch_size
    first = privatizer.multiplier_at(0)
    last = privatizer.multiplier_at(steps - 1)
    noise = f"{first:.6g}"
    if first != last:
        noise += f" to {last:.6g}"
    correlated = privatizer.noise
    if correlated is not None:
        noise += ", correlated"
        if not trainer.is_amplified:
            noise += f" over a sensitivity of {correlated.sensitivity:.6g}"
    if trainer.is_whole:
        every = steps  # steps that share who takes part have one event
    rows = facts(
        trainer.event,
        records=sampler.num_examples,
        batch_size=batch_size,
        noise_multiplier=noise,
        steps=steps,
        every=every,
        terms={"unit": "example", **terms},
    )
    if correlated is not None and not trainer.is_amplified:
        order = f"{batch_size:g} on average, in a fixed order"
        rows = [(name, order if name == "batch size" else value) for name, value in rows]
    programs = programs_of(trainer, source, params, steps)
    event = trainer.event(0, steps)
    return Item(what, source.name, event, terms, rows, programs=programs, steps=steps, **where)


def programs_of(
    trainer: finetune.PrivateTrainer, source: Examples | Groups, params: Any, steps: int
) -> Callable[[int | None], Programs]:
    """Returns the `programs` of an `Item` for the steps of a trainer."""
    sampler = trainer.sampler

    def programs(memory: int | None) -> Programs:
        state = trainer.init(params)
        sizes = trainer.physical(state, source, memory=memory)
        batches = []
        for k in range(min(_DRAWS, steps)):
            records = len(sampler.batch(k))
            batches.append(sizes.counts(records))
        calls: dict[str, float] = {}
        for size in sizes.sizes:
            mean = np.mean([counts[size] for counts in batches])
            calls[f"sum {size}"] = steps * float(mean)
        # A step adds up the sums of its physical batches, so there is one addition fewer than sums.
        calls["add"] = sum(calls.values()) - steps
        every_steps = trainer.query.refresh_every
        calls["refresh"] = steps / every_steps if every_steps else 0.0
        calls["update"] = float(steps)
        functions = trainer.programs(state, source, memory=memory)
        return [(*program, calls[name]) for name, program in functions.items()]

    return programs


def public_training(
    what: str, loss: Callable[..., Any], params: Any, source: Examples, how: Any
) -> Item:
    """Returns the computation of `models.train`, without its optimizer, which takes far less than
    the gradients.
    """

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        losses = jax.vmap(loss, in_axes=(None, 0))(params, batch)
        return losses.mean()

    rows = min(how.batch_size, len(source))
    batch = source.gather(np.zeros(rows, np.int64))
    gradient = jax.jit(jax.grad(mean_loss))
    program = gradient, (params, batch), how.steps
    return Item(what, programs=lambda memory: [program])


def outstanding(charges: Mapping[str, DpEvent], folder: pathlib.Path) -> dict[str, DpEvent]:
    """Returns charges, by data set, without those that are noted in a folder."""
    left = {name: dict(composition(event)) for name, event in charges.items()}
    for row in notes(folder):
        for name, event in row["charges"]:
            counts = left.get(name, {})
            for leaf, count in composition(from_json(event)).items():
                counts[leaf] = max(0, counts.get(leaf, 0) - count)
    return {name: _composed(counts) for name, counts in left.items()}


def _composed(counts: Mapping[DpEvent, int]) -> DpEvent:
    return compose({leaf: count for leaf, count in counts.items() if count})


def show(
    items: Iterable[Item],
    root: pathlib.Path | None,
    target: str = "",
    *,
    ledger: pathlib.Path | None = None,
) -> None:
    """Prints charges and estimates.

    Args:
      items: The parts of the run.
      root: The workdir, if one is known, whose ledgers are read.
      target: A name of `jaxdp.compilers.TARGETS`, for whose chip private steps are compiled.
        Without it, all programs are compiled for this machine, and run once.
      ledger: The ledger that pays in place of ledger.sqlite in the workdir.

    Raises:
      ValueError: There is no such target, or no part takes a private step.
      ImportError: The compiler of the target is not installed.
    """
    if target:
        compilers.require(target)
    print("Dry run: nothing is written, and nothing is spent.", flush=True)
    items = list(items)
    seconds = 0.0
    if target and not any(item.steps for item in items):
        raise ValueError(
            "--target compiles the private steps of a run, and this config has none. Leave it out."
        )
    for item in items:
        times = f", {item.runs} times" if item.runs > 1 else ""
        print(f"\n{item.what}{times}", flush=True)
        if ledger is not None and item.ledger == Item._field_defaults["ledger"]:
            item = item._replace(ledger=os.fspath(ledger.absolute()))
        if item.event is None:
            rows = list(item.rows)
        else:
            rows = _charged(item, item.event, root)
        estimate = _elsewhere(item, target) if target else _here(item)
        rows += estimate.rows
        seconds += estimate.seconds
        print(*indented(rows), sep="\n", flush=True)
    if all(item.event is None for item in items):
        print("\nNo ledger is charged.")
    if target and seconds:
        print(
            f"\nAll private steps on one {target}: {_duration(seconds)}. This is "
            f"{compilers.CAVEAT}."
        )
    elif seconds:
        print(
            f"\nEstimated time of these computations: {_duration(seconds)}. Evaluation and "
            "figures come on top."
        )


def _charged(item: Item, event: DpEvent, root: pathlib.Path | None) -> list[tuple[str, str]]:
    terms = {"adjacency": "add_remove", "unit": "example", **item.terms}
    adjacency, unit = terms["adjacency"], terms["unit"]
    delta = terms.get("delta") or 0.0
    name = item.dataset or "private records"
    rows = [("data set", f"{name}, {adjacency}, unit {unit}"), *item.rows]
    if not any(name == "epsilon" for name, _ in item.rows):
        spent = privacy.epsilon(event, delta=delta, adjacency=adjacency)
        rows.append(("event", describe(event)))
        rows.append(("epsilon", f"{spent:.6g} at delta {delta:g}"))
        if delta and terms.get("records"):
            exposed = delta * terms["records"]
            units = unit_words(unit).many
            rows.append((f"delta * {units}", f"{exposed:.4g}"))
    if root is not None and item.folder:
        left = outstanding({item.dataset: event}, root / item.folder)
        event = left[item.dataset]
    with contextlib.ExitStack() as opened:
        path = (root or pathlib.Path()) / item.ledger
        if (root is not None or path.is_absolute()) and path.exists():
            ledger = opened.enter_context(Ledger(path, read_only=True))
            names = [row["name"] for row in ledger.report()["datasets"]]
            if not item.dataset and len(names) == 1:
                name = names[0]
            if name in names:
                text = left_after(ledger.account(name), event)
                return [*rows, ("ledger", f"{path}: {text}")]
        ledger = opened.enter_context(Ledger.in_memory())
        ledger.register(name, **terms)
        text = left_after(ledger.account(name), event)
        return [*rows, ("ledger", f"new: {text}")]


class _Estimate(NamedTuple):
    """What the programs of an item take: rows for people, and the seconds of all runs."""

    rows: Rows = ()
    seconds: float = 0.0


def _here(item: Item) -> _Estimate:
    """Compiles programs ahead of time and runs each on zeros."""
    memory = 0
    compiling = 0.0
    running = 0.0
    programs = item.programs(None)
    for function, arguments, calls in programs:
        started = time.perf_counter()
        compiled = function.lower(*arguments).compile()
        compiling += time.perf_counter() - started
        memory = max(memory, memory_of(compiled))
        # The first run warms up. A program may write over its arguments.
        for zeros in (_zeros(arguments), _zeros(arguments)):
            started = time.perf_counter()
            jax.block_until_ready(compiled(*zeros))
        running += calls * (time.perf_counter() - started)
    if not programs:
        return _Estimate()
    size = f"{_megabytes(memory)} for arguments, results and temporaries of the largest program"
    device = jax.devices()[0].device_kind
    duration = f"{_duration(running)}, from one step on zeros on {device}"
    rows = [
        ("memory (estimate)", size),
        ("compilation", f"{compiling:.1f} s, measured now"),
        ("run time (estimate)", duration),
    ]
    return _Estimate(rows, compiling + item.runs * running)


def memory_of(compiled: Any) -> int:
    """Returns the bytes of arguments, results and temporaries of a compiled program, 0 if it does
    not say.
    """
    needs = compiled.memory_analysis()
    if needs is None:
        return 0
    arrays: int = needs.argument_size_in_bytes + needs.output_size_in_bytes
    return arrays + needs.temp_size_in_bytes - needs.alias_size_in_bytes


def _elsewhere(item: Item, target: str) -> _Estimate:
    """Compiles private steps for a chip that is not there."""
    if not item.steps:
        return _Estimate()
    chip = compilers.target(target)
    estimates, calls = [], []
    for function, arguments, times in item.programs(chip.memory):
        estimates.append(compilers.estimate(target, function, *arguments))
        calls.append(times / item.steps)
    largest = max(estimate.memory for estimate in estimates)
    verdict = "fits" if all(estimate.fits for estimate in estimates) else "does not fit"
    share = f"{_megabytes(largest)} of {_megabytes(chip.memory)} of a chip"
    rows = [(f"memory of {target}", f"{verdict}: {share}")]
    if any(estimate.seconds is None for estimate in estimates):
        rows.append(
            ("remedy", "a smaller physical_batch_size, fewer trained parameters, or several chips")
        )
        return _Estimate(rows)

    def a_step(name: str) -> float:
        terms = [n * estimate.details[name] for n, estimate in zip(calls, estimates, strict=True)]
        return math.fsum(terms)

    seconds = a_step("total") / (chip.clock or 1.0)
    milliseconds = f"{1e3 * seconds:.3g} ms"
    if chip.clock:
        cycles = f"{a_step('total') / 1e6:,.3g} million cycles"
        text = f"{cycles}, {milliseconds} at {chip.clock / 1e9:g} GHz"
    else:
        moved = f"{a_step('bytes') / 1e9:,.3g} GB in {a_step('launched'):,.0f} kernels"
        text = f"{moved}, {milliseconds} if each is at its roofline"
    rows.append(("a step", f"{text}: {compilers.CAVEAT}"))
    kernels = a_step("kernel_cycles") if chip.clock else 0.0
    if kernels:
        own = "million cycles of Pallas kernels, by an estimate of their own"
        rows.append(("of these", f"{kernels / 1e6:,.3g} {own}"))
    whole = item.steps * seconds
    hours = f"{whole / 3600:.3g} hours"
    rows.append(("all steps", f"{hours} ({_duration(whole)}) for {item.steps:,} of them"))
    loops = sum(map(_open_loops, estimates))
    if loops:
        rows.append(("counted once", f"loops whose turns depend on data: {loops}"))
    # One answer serves equal programs, which are compiled once.
    answers = {id(estimate.details): estimate.details for estimate in estimates}
    compiling = math.fsum(details["compile_s"] for details in answers.values())
    rows.append(("compilation", f"{compiling:.0f} s on this machine"))
    return _Estimate(rows, item.runs * whole)


def _open_loops(estimate: Any) -> int:
    """Returns the number of loops whose turns the compiler does not know."""
    return sum(loop["turns"] is None for loop in estimate.details["loops"])


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


def _zeros(arguments: Any) -> Any:
    def zeros(x: Any) -> jax.Array:
        if isinstance(x, _ZEROS):
            return zeros_on_device(x)
        return own_copy(x)  # the program may write over it

    return jax.tree.map(zeros, arguments)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(1, math.ceil(seconds))} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
