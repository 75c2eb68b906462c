"""The runner of all benchmarks.

python -m benchmarks                          # lists them
python -m benchmarks run steps --rounds 3     # runs one, with its flags
python -m benchmarks run steps --help         # says what it measures
python -m benchmarks suite cpu                # runs nine of them: hours
"""

import sys
from collections.abc import Sequence

from benchmarks.registry import BENCHMARKS, COMMANDS

USAGE = "usage: python -m benchmarks [run NAME [flags] | suite cpu [flags]]"


def listing() -> str:
    """Returns a line for each benchmark and each command."""
    lines = [USAGE, "", "python -m benchmarks run NAME"]
    for name, benchmark in BENCHMARKS.items():
        takes = f" ({benchmark.takes})" if benchmark.takes else ""
        lines.append(f"  {name:<23} {benchmark.measures}{takes} -> {benchmark.output}")
    lines += ["", "python -m MODULE"]
    for module, purpose in COMMANDS.items():
        lines.append(f"  {module:<23} {purpose}")
    return "\n".join(lines)


def main(arguments: Sequence[str]):
    if not arguments:
        print(listing())
        return
    command, *rest = arguments
    if command == "suite":
        from benchmarks import suites

        suites.main(rest)
        return
    if command != "run" or not rest:
        raise SystemExit(USAGE)
    name, *flags = rest
    if name not in BENCHMARKS:
        raise SystemExit(f"unknown benchmark {name!r}. Choose one of: {', '.join(BENCHMARKS)}")
    from benchmarks import timing  # the list above does without JAX

    timing.run(BENCHMARKS[name], flags)


if __name__ == "__main__":
    main(sys.argv[1:])
