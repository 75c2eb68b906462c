"""Audits every mechanism and its broken twins: `python -m launch.audit [--mechanism=NAME]
[--output=PAGE]`.

The program prints a table. With --output it writes the page docs/design/audits.md. It exits with 1
in three cases: an honest mechanism is VIOLATED, an audit of one cannot tell, or a twin is not
caught.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from . import audits, frame
from .audits.case import Case

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

Each row is one claim of one mechanism. An audit runs the mechanism many times with a canary in its data and many times
without it. It tells the runs apart, and proves with a confidence of 99.9 % that epsilon is at least the audited bound.
The ceiling is the largest bound that the audit could have proved: the bound if it tells the runs apart every time.

- **VIOLATED**: the bound is above the claim. The proof, the code or the accounting is wrong, except for a chance of
  0.1 %.
- **consistent**: the bound is not above the claim, but the ceiling is. It proves nothing: another attack may find more.
- **cannot tell**: the ceiling is not above the claim. The audit could not have found any mechanism VIOLATED.

A broken twin is the mechanism with one mistake. It is audited under the claim of the honest mechanism and must be
VIOLATED. The number beside it is the proved bound. Twins show the power of an audit: an audit that catches no twin has
none.

{table}

## Which twins do not apply

{notes}
"""


def judge(case: Case, seed: bytes, trials: int | None) -> tuple[dict[str, str], bool]:
    """Returns the row of a case, and whether the honest mechanism is consistent and all twins are
    caught.
    """
    honest = case.honest(seed, trials)
    twins, caught = [], True
    for name, twin in case.twins.items():
        found = case.broken(name, seed, trials)
        if isinstance(twin, str) or isinstance(found, str):
            continue
        caught &= found.violated
        twins.append(
            f"{name} {found.lower:.3g}" + ("" if found.violated else f" ({found.verdict})")
        )
    row = {
        "mechanism": case.mechanism,
        "claim": case.claim,
        "proof": case.proof,
        "epsilon claimed": f"{honest.upper:.4g} at delta {honest.delta:g}",
        "audited bound": f"{honest.lower:.3g}",
        "ceiling": f"{honest.ceiling:.3g}",
        "verdict": honest.verdict,
        "twins caught, bound of each": "; ".join(twins),
    }
    return row, caught and honest.verdict == "consistent"


def main(argv: Sequence[str]) -> None:
    """Runs the audits."""
    from jaxdp.report import format_table, progress_bar

    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}. Use --mechanism=NAME.")
    found, seed = audits.cases(), bytes.fromhex(_SEED.value)
    if _MECHANISM.value is not None:
        names = sorted({case.mechanism for case in found})
        found = tuple(case for case in found if case.mechanism == _MECHANISM.value)
        if not found:
            raise ValueError(f"--mechanism must be one of {names}, got {_MECHANISM.value!r}.")
    rows: list[dict[str, str]] = []
    good = True
    bar = progress_bar(found, label="audits", unit="case")
    for case in bar:
        row, fine = judge(case, seed, _TRIALS.value)
        rows, good = [*rows, row], good and fine
        bar.clear()
        print("\n".join(f"{name}: {value}" for name, value in row.items()), end="\n\n", flush=True)
    if _OUTPUT.value is not None:
        path = pathlib.Path(_OUTPUT.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        page = _PAGE.format(
            command=" ".join(["python -m launch.audit", *sys.argv[1:]]),
            seed=_SEED.value,
            table=format_table(rows, style="markdown"),
            notes="\n".join(note for case in found for note in _notes(case)) or "None.",
        )
        path.write_text(page, encoding="utf-8")
        print(f"wrote {path}")
    if not good:
        sys.exit(
            "An honest mechanism is not consistent, or a twin is not caught. See the rows above."
        )


def _notes(case: Case) -> list[str]:
    reasons = {name: reason for name, reason in case.twins.items() if isinstance(reason, str)}
    return [f"- {case.mechanism}, no “{name}”: {reason}." for name, reason in reasons.items()]


if __name__ == "__main__":
    frame.start(main)
