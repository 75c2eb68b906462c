"""Prints what every dataset of a privacy ledger has spent: `python -m launch.ledger PATH [--json] [--delta=1e-6]`."""

import json
import os
from collections.abc import Sequence

from absl import app, flags

from jaxdp.privacy import Ledger

_JSON = flags.DEFINE_bool("json", False, "Print JSON instead of text.")
_DELTA = flags.DEFINE_float("delta", 1e-5, "Delta for datasets that have none registered.", 0.0, 1.0)


def main(argv: Sequence[str]) -> None:
    """Prints the report."""
    if len(argv) != 2:
        raise app.UsageError("give the path of one ledger: python -m launch.ledger PATH [--json]")
    path = argv[1]
    if not os.path.isfile(path):  # Ledger() would create it.
        raise SystemExit(f"There is no ledger at {path!r}; give the file that a run was given or wrote in its workdir.")
    try:
        with Ledger(path) as ledger:
            if _JSON.value:
                print(json.dumps(ledger.report(delta=_DELTA.value), indent=2))
            else:
                print(ledger.report_text(delta=_DELTA.value))
    except ValueError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    app.run(main)
