"""Audits every mechanism and its broken twins: `python -m launch.audit [--mechanism=NAME]
[--output=PAGE]`.

The program prints a table. With --output it writes the page docs/design/audits.md. It exits with 1
in three cases: an honest mechanism is VIOLATED, an audit of one cannot tell, or a twin is not
caught.
"""

import pathlib
import re
import sys
from collections.abc import Sequence

from absl import flags

from jaxdp.report import format_table, progress_bar

from . import audits, frame
from .audits.case import Case, judge

_MECHANISM = flags.DEFINE_string(
    "mechanism", None, "The only mechanism to audit, for example DP-SGD."
)
_TRIALS = flags.DEFINE_integer(
    "trials", None, "Runs of either kind. The default is each case's.", 2
)
_SEED = flags.DEFINE_string(
    "seed", "000102030405060708090a0b0c0d0e0f", "16 bytes as hexadecimal digits."
)
_OUTPUT = flags.DEFINE_string("output", None, "The file for the table as a Markdown page.")

_PAGE = """# Audits

`{command}` writes this page. The seed is `{seed}`.

Each row is one claim of one mechanism. An audit runs the mechanism many times with a canary in
its data and many times without it. It tells the runs apart, and proves with a confidence of 99.9
% that epsilon is at least the audited bound. The ceiling is the largest bound that the audit
could have proved: the bound if it tells the runs apart every time.

- **VIOLATED**: the bound is above the claim. The proof, the code or the accounting is wrong,
  except for a chance of 0.1 %.
- **consistent**: the bound is not above the claim, but the ceiling is. It proves nothing: another
  attack may find more.
- **cannot tell**: the ceiling is not above the claim. The audit could not have found any
  mechanism VIOLATED.

A broken twin is the mechanism with one mistake. It is audited under the claim of the honest
mechanism and must be VIOLATED. The number beside it is the proved bound. Twins show the power of
an audit: an audit that catches no twin has none.

{table}

## Which twins do not apply

{notes}
"""


def main(argv: Sequence[str]) -> None:
    """Runs the audits."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}. Use --mechanism=NAME.")
    cases = _cases()
    if not re.fullmatch("[0-9a-fA-F]{32}", _SEED.value):
        raise ValueError(
            f"--seed must be 32 hexadecimal digits, which are 16 bytes, got {_SEED.value!r}."
        )
    seed = bytes.fromhex(_SEED.value)
    rows: list[dict[str, str]] = []
    all_good = True
    bar = progress_bar(cases, label="audits", unit="case")
    for case in bar:
        row, is_good = judge(case, seed, _TRIALS.value)
        rows.append(row)
        all_good &= is_good
        bar.clear()
        print("\n".join(f"{name}: {value}" for name, value in row.items()), end="\n\n", flush=True)
    if _OUTPUT.value is not None:
        path = pathlib.Path(_OUTPUT.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        page = _PAGE.format(
            command=" ".join(["python -m launch.audit", *sys.argv[1:]]),
            seed=_SEED.value,
            table=format_table(rows, style="markdown"),
            notes="\n".join(_notes(cases)) or "None.",
        )
        path.write_text(page, encoding="utf-8")
        print(f"wrote {path}")
    if not all_good:
        sys.exit(
            "An honest mechanism is not consistent, or a twin is not caught. See the rows above."
        )


def _cases() -> tuple[Case, ...]:
    """Returns the cases of --mechanism."""
    every = audits.cases()
    if _MECHANISM.value is None:
        return every
    cases = tuple(case for case in every if case.mechanism == _MECHANISM.value)
    if not cases:
        names = sorted({case.mechanism for case in every})
        raise ValueError(f"--mechanism must be one of {names}, got {_MECHANISM.value!r}.")
    return cases


def _notes(cases: Sequence[Case]) -> list[str]:
    """Returns why some twins have no meaning."""
    notes = []
    for case in cases:
        for name, twin in case.twins.items():
            if isinstance(twin, str):
                notes.append(f"- {case.mechanism}, no “{name}”: {twin}.")
    return notes


if __name__ == "__main__":
    frame.start(main)
