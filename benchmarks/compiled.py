"""Compiles private steps for absent machines, and writes what their compilers say about
them.

    python -m benchmarks.compiled --target v5e --cases "ViT-B/16;ResNet-20"
    python -m benchmarks.compiled --target h100 --tiny

For a TPU (v5e, v6e, v5p) the numbers are the cycles that its compiler expects, loops included. A
Pallas kernel has no such number. Its own estimate, from the schedule of its instructions, stands
apart and is added. For a GPU (h100) they are the bytes and operations of each kernel, the number of
kernels, and the time if each kernel met the roofline. They are the compiler's estimate, not a time.
A loop whose turns depend on data counts once, and is listed. The loop of jax_privacy counts as
often as there are microbatches.

Needs the compilers: `make compilers`, or `pip install -e ".[compilers]"`. Each program is compiled
in a process of its own, for at most --minutes. One that fails is a row with the message. The report
is written after each program, and a program that --output has already is not compiled again, unless
--again is given.

With --device, a report of `benchmarks.device`, times of the same steps stand beside the estimates,
and the correlation of their ranks says how far to trust the estimates."""

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import jaxdp
from benchmarks import compiled_cases, counts, pages, timing, trust
from jaxdp.compilers import hlo, process, targets
from jaxdp.report import format_table

Row = dict[str, Any]
EXPORTED = "jit(call)/call_exported/jit(flat)/"  # before the names of operations of a program


def compiled(target: str, step: str, build: Callable, seconds: float) -> Row:
    """Returns the row of a step, or its error. The compiler runs in a process of its own."""
    try:
        program = build()
        function = jax.jit(program.function, donate_argnums=program.donate)
        found = process.estimate(
            target, function, *program.args, seconds=seconds, assumed=program.assumed
        )
    except Exception as error:  # the other steps go on
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    if found.seconds is None:
        return {"error": "does not fit", "needed_mb": found.memory / 1e6}
    row = dict(found.details)
    if step == "plain":
        row["operations"] = counts.count(program.function, *program.args).flops
    if program.assumed != hlo.ASSUMED:
        row["assumed"] = program.assumed._asdict()
    return row


def with_ratios(steps: Mapping[str, Row]) -> dict[str, Row]:
    """Returns the steps of a case, with the whole steps that they make up and the ratios to the
    plain ones."""
    rows = {name: dict(row) for name, row in steps.items()}
    for name, parts in compiled_cases.WHOLE.items():
        if all("total" in rows.get(part, {}) for part in parts):
            of = [rows[part] for part in parts]
            rows[name] = {key: sum(row[key] for row in of) for key in AMOUNTS if key in of[0]}
            rows[name]["memory_mb"] = max(map(allocated_mb, of))
            rows[name]["compile_s"] = sum(row["compile_s"] for row in of)
    for name, row in rows.items():
        if "total" not in row:
            continue
        row.setdefault("memory_mb", allocated_mb(row) if "memory" in row else 0.0)
        base = rows.get(BASES.get(name, "plain"), {})
        for key in (*AMOUNTS, "memory_mb", "compile_s"):
            if row.get(key) and base.get(key):
                row[f"{key}_over_plain"] = row[key] / base[key]
    return rows


_CYCLES = ("total", "cycles", "kernel_cycles")
AMOUNTS = (*_CYCLES, "bytes", "flops", "kernels", "launched", "library_calls")
BASES = {
    **{"update": "update", "private update": "update"},
    **{f"private update of {kind}": "update" for kind in compiled_cases.CORRELATED},
    **dict.fromkeys(compiled_cases.WHOLE, "plain step"),
}


def allocated_mb(row: Row) -> float:
    """Returns what is allocated beyond the arguments: temporaries, and results that take over no
    argument."""
    memory = row["memory"]
    return (memory["temp"] + memory["output"] - memory["alias"]) / 1e6


def beside(now, before) -> dict:
    """Returns the clipped gradients of two versions over their plain ones, a table of the page."""
    rows = []
    for case, steps in before["cases"].items():
        row = {"case": case}
        for version, of in (("before", steps), ("now", now["cases"].get(case, {}))):
            clipped = with_ratios(of).get("clipped", {})
            ratios = {f"{name} {version}": value for name, value in clipped.items()}
            row |= ratios
        if len(row) > 1:
            rows.append(row)
    columns = {"case": "{case}"}
    for name, title in (("bytes", "GB"), ("total", "roofline"), ("memory_mb", "MB")):
        for version in ("before", "now"):
            columns[f"{title} over plain, {version}"] = f"{{{name}_over_plain {version}:.3g}}"
    return {"h100 before": pages.lines(rows, columns)}


def tables(v5e, v6e, v5p, h100) -> dict:
    """Returns the tables of docs/results/accelerators.md: steps, costly operations, and the steps
    that were not compiled."""
    markdown = {}
    for name, report in {"v5e": v5e, "v6e": v6e, "v5p": v5p, "h100": h100}.items():
        markdown[name] = table(report)
    for name, report in {"v5e": v5e, "h100": h100}.items():
        markdown[f"{name} costs"] = costs(report)
    for name, report in {"v5e": v5e, "v6e": v6e}.items():
        markdown[f"{name} left out"] = left_out(report)
    return markdown


def costs(report, most: int = 4) -> list[Row]:
    """Returns the costliest operations of the clipped gradients and private steps."""
    rows = []
    for case, steps in report["cases"].items():
        for step in ("clipped", "private"):
            for of in costliest(steps.get(step, {}))[:most]:
                code = {"operation": f"`{of['operation']}`"}
                rows.append({"case": case, "step": step} | of | code)
    return rows


def left_out(report) -> list[Row]:
    """Returns the steps that were not compiled, with the reasons."""
    rows = []
    for case, steps in report["cases"].items():
        for step, row in steps.items():
            if "error" in row:
                rows.append({"case": case, "step": step} | row)
    columns = {"case": "{case}", "step": "{step}", "reason": "{error}"}
    return pages.lines(rows, columns | {"needs, MB": "{needed_mb:,.0f}"})


TPU = {
    "M cycles": lambda row: row["total"] / 1e6,
    "of these kernels": lambda row: row["kernel_cycles"] / 1e6 or None,
    "over plain": lambda row: row.get("total_over_plain"),
}
GPU = {
    "GB": lambda row: row["bytes"] / 1e9,
    "over plain": lambda row: row.get("bytes_over_plain"),
    "kernels": lambda row: row["launched"],
    "kernels over plain": lambda row: row.get("launched_over_plain"),
    "roofline, ms": lambda row: 1e3 * row["total"],
    "roofline over plain": lambda row: row.get("total_over_plain"),
}
ANY = {
    "MB": lambda row: row["memory_mb"],
    "MB over plain": lambda row: row.get("memory_mb_over_plain"),
    "compile, s": lambda row: row["compile_s"],
}


def table(report: Mapping) -> list[Row]:
    """Returns a row of text for each step of a report."""
    tpu = targets.TARGETS[report["target"]].platform == "tpu"
    rows = []
    for case, steps in report["cases"].items():
        for step, row in with_ratios(steps).items():
            if "error" in row:
                continue
            (numbers,) = pages.lines([row], (TPU if tpu else GPU) | ANY)
            shown = {name: "" if x is None else f"{x:.3g}" for name, x in numbers.items()}
            rows.append({"case": case, "step": step} | shown)
    return rows


def costliest(row: Row) -> list[Row]:
    """Returns the costliest operations of a step as rows of text."""
    rows = []
    for of in row.get("costliest", ()):
        operation = of["source"].removeprefix(EXPORTED)[-110:]
        rows.append({"share": f"{100 * of['share']:.1f} %", "operation": operation})
    return rows


FLAGS = {
    "output": "",
    "target": {"choices": targets.TARGETS, "required": True},
    "cases": ("", "parts of names of cases, with semicolons; all without it"),
    "steps": ("", "names of steps, with commas; all without it"),
    "tiny": (False, "tiny shapes, to check the programs"),
    "note": ("", "what the version is, for the report"),
    "again": (False, "compiles what the report has already"),
    "device": ("", "a report of benchmarks.device, whose times are set beside"),
    "minutes": (20.0, "the limit of one program"),
}


def main(given: Sequence[str] | None = None) -> dict:
    flags = timing.parser(__doc__, FLAGS).parse_args(given)
    tiny = "_tiny" if flags.tiny else ""
    flags.output = flags.output or f".bench/compiled_{flags.target}{tiny}.json"
    target = targets.TARGETS[flags.target]
    try:
        targets.require(flags.target)
    except ImportError as error:  # before anything runs
        raise SystemExit(f"{error} In a checkout: make compilers.") from error
    report = {
        "what": targets.CAVEAT,
        "target": flags.target,
        "compiler": targets.version(target),
        "jax": jax.__version__,
        "jaxdp": jaxdp.__version__,
        "tiny": flags.tiny,
        "note": flags.note,
        "cases": {},
    }
    path = pathlib.Path(flags.output)
    if path.exists():
        before = json.loads(path.read_text())
        report |= {"cases": before["cases"], "note": flags.note or before["note"]}
    compile_cases(flags, report)
    rows = table(report) or [{"": "nothing was compiled"}]
    print(f"\n{flags.target}: {targets.CAVEAT}\n{format_table(rows)}\n\nWritten to {path}")
    if flags.device:
        estimates = {case: with_ratios(steps) for case, steps in report["cases"].items()}
        print(f"\n{trust.text(flags.device, estimates)}")
    return report


def compile_cases(flags: argparse.Namespace, report: dict):
    """Compiles the programs that the report has not, and writes it after each one."""
    path = pathlib.Path(flags.output)
    cases = compiled_cases.cases(flags.tiny)
    names = timing.chosen(cases, flags.cases)
    if not names:
        raise SystemExit(
            f"--cases={flags.cases} names none of: {'; '.join(compiled_cases.cases())}"
        )
    seconds = 60 * flags.minutes
    for case in names:
        rows = report["cases"].setdefault(case, {})
        for step, build in cases[case]().items():
            if flags.steps and step not in flags.steps.split(","):
                continue
            if step in rows and "error" not in rows[step] and not flags.again:
                continue
            row = compiled(flags.target, step, build, seconds)
            rows[step] = row
            result = row.get("error")
            if result is None:
                result = f"{row['total']:.4g}, {row['compile_s']:.0f} s"
            print(f"{case}, {step}: {result}", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n")
        for step in ("clipped", "private"):
            if step in rows and "error" not in rows[step]:
                print(f"\n{case}, {step}: {targets.CAVEAT}\n{format_table(costliest(rows[step]))}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # where libtpu is installed JAX would look for a TPU
    main()
