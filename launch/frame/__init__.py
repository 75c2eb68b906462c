"""The frame of all studies: a config is bound to a workdir, each cell is computed once, results are
written.

A `Study` defines its cells, how one is run, and its tables and figures. `run` does the rest:

    config.json            the study and its config; another config in the same workdir is refused
    cells/<a>/<b>/row.json the row of the finished cell (a, b)
    cells/<a>/<b>/code.json the code that made it; an edited method is noticed
    cells/<a>/<b>/...      files of the cell's run; `scratch` is deleted once the row is written
    cells/<a>/<b>/charges.jsonl what was charged for the cell
    rows.jsonl             all rows, one per line
    tables.md, tables.tex  the tables
    released.json          the digests of the networks and answers that the study released
    result.json            the result of the finished study

Several processes may run one study in one workdir. Each takes cells that no other process holds. A
process that dies loses its current cell. The same command then continues, and does not pay again
for a paid release.

With `--devices` the processes of `jax.distributed` compute each cell together
(`jaxdp.release.Hosts`). Process 0 alone writes the files above.

    running   a run of a study           workdir   to which config a workdir belongs
    ledgers   which ledger counts    code      which code made a cell
    launcher  the flags of a launcher    accounts  the accounts of the ledgers
    program   errors become sentences    fields    checks of single fields of a config
    charges   noted charges that a ledger lacks
    events    lines of JSON for --log_json
    guide     --help, and what to say about the config of another launcher
"""

from ..study import PrivateSet, Program, Report, Row, Study
from .accounts import account, own_account
from .charges import noted
from .fields import check_watch, known, people, some, watching
from .launcher import main
from .ledgers import DEFAULT, Choice, asked, chosen, of_workdir, settled
from .ledgers import NAME as LEDGER
from .program import MISTAKES, keep_compiled, start, tell
from .running import Work, compute, distinct, run
from .workdir import bind, cell_folder, check_same_config, file_name, make_once, run_of, versions

__all__ = [
    "DEFAULT",
    "LEDGER",
    "MISTAKES",
    "Choice",
    "PrivateSet",
    "Program",
    "Report",
    "Row",
    "Study",
    "Work",
    "account",
    "asked",
    "bind",
    "cell_folder",
    "check_same_config",
    "check_watch",
    "chosen",
    "compute",
    "distinct",
    "file_name",
    "keep_compiled",
    "known",
    "main",
    "make_once",
    "noted",
    "of_workdir",
    "own_account",
    "people",
    "run",
    "run_of",
    "settled",
    "some",
    "start",
    "tell",
    "versions",
    "watching",
]
