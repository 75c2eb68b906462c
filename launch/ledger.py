"""Prints what every dataset of a privacy ledger has spent: `python -m launch.ledger PATH [--json]
[--delta=1e-6]`.

`jaxdp ledger --help` lists the other commands.
"""

import sys

from .command import main

if __name__ == "__main__":
    main(["ledger", "show", *sys.argv[1:]])
