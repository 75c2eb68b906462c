"""What a study is: the functions that compute it, and the facts by which others know it."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxdp.data import Source
    from jaxdp.privacy import Account

    from . import plans
    from .frame import Work

Row = Mapping[str, Any]  # the values of a cell, by name
Rows = Sequence[Row]
Result = Mapping[str, Any]  # the content of result.json
Fields = dict[str, Any]  # of a JSON object
Lines = list[Fields]  # of a table, by heading


def noise_of_training(config: Mapping[str, Any]) -> list[str]:
    """Returns what a report says of the noise of config.private, nothing without this part."""
    private = config.get("private")
    if not isinstance(private, Mapping):
        return []
    from jaxdp.report.exactness import noise_of  # loads SciPy, which help does without

    sentences = noise_of(private.get("exact", False), "private training in this run")
    if private.get("scaler_noise_multiplier"):
        sentences += noise_of(True, "the scaler of columns")
    return sentences


def nothing(*_: Any) -> Any:
    """Returns no tables, or draws no figures."""
    return {}


class PrivateSet(NamedTuple):
    """Private records of a study, for which one ledger counts.

    Attributes:
      name: Their name in the ledger.
      records: The records as they are stored.
      is_public: Whether everybody has them, as those of scikit-learn and TensorFlow Datasets.
    """

    name: str
    records: "Source"
    is_public: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a report tells about the finished runs of a study.

    Attributes:
      title: What the run did.
      page: The template in `launch/pages`. By default it shows the tables of the study.
      shape: The types of the fields of result.json that the page reads, as in
          `launch.document.check`.
      released: What the released files are, by their patterns in the workdir.
      ledgers: The patterns of the ledgers in the workdir.
      references: Whether config.references adds models that no ledger counts.
      no_account: The verdict on a run that charged no ledger.
      noise: `noise(config)` returns sentences about whether the noise of the run was exact.
      write: `write(workdir, output, past)` writes a report of another form and returns its path.
          Without an output it is report.html. Without a past the accounts are today's.
    """

    title: str
    page: str = "run.html.jinja"
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    released: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ledgers: Sequence[str] = ("ledger.sqlite",)
    references: bool = False
    no_account: str = "No ledger was charged."
    noise: Callable[[Mapping[str, Any]], Sequence[str]] = noise_of_training
    write: Callable[..., pathlib.Path] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What others know about a launcher without running it.

    Attributes:
      name: The name of the study, which is kept in config.json of its workdirs.
      report: What a report tells about its runs.
      life: The module with its stages of a lifecycle, for example ".lifecycle.finetune". A name
          that begins with a dot is below this package.
    """

    name: str
    report: Report | None = None
    life: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(Program):
    """An experiment as data.

    Attributes:
      open: `open(config, root)` reads data and models and refuses a config that cannot work. It
          writes nothing.
      private: `private(opened)` returns the private sets of what `open` returned. All runs about
          them share a ledger (`launch.frame.ledgers`). Without it, the ledgers stay in the workdir.
      cells: `cells(config)` yields named tuples, in the order in which they are run.
      run: `run(cell, work) -> row`, a JSON-able dict.
      result: `result(rows, work)`, the content of result.json.
      summary: `summary(result)`, the text for the terminal.
      tables: `tables(result, work)`, rows by title. A str among them is a paragraph.
      figures: `figures(result, work)` draws into `work.root`.
      benchmark: Which data the results read without payment to a ledger, and what to use for
          private data instead. A study with this text needs config.public_benchmark.
      grows: `grows(config)` returns the part of the config to which a workdir is bound. A finished
          study with this function takes more cells.
      plan: `plan(config, opened)` returns what a dry run tells. `opened()` is what `open` returns.
      account: `account(cell, work)` opens the account that pays for a cell, as a context manager.
          Its ledger is charged for what the cell has noted and the ledger lacks. Without it, the
          study has no notes, or `rows` settles them.
      rows: `rows(work, cells)` returns a row for each cell, for a study whose cells build on each
          other. By default each cell is run on its own.
    """

    open: Callable[[Any, pathlib.Path], Any]
    cells: Callable[[Any], Iterable[Any]]
    run: Callable[[Any, "Work"], Row]
    result: Callable[[Rows, "Work"], Any]
    summary: Callable[[Any], str]
    private: Callable[[Any], Sequence[PrivateSet]] | None = None
    tables: Callable[[Any, "Work"], Mapping[str, Any]] = nothing
    figures: Callable[[Any, "Work"], None] = nothing
    benchmark: str = ""
    grows: Callable[[Any], Any] | None = None
    plan: Callable[[Any, Callable[[], Any]], Iterable["plans.Item"]] = lambda config, opened: ()
    account: Callable[[Any, "Work"], AbstractContextManager["Account"]] | None = None
    rows: Callable[["Work", Sequence[Any]], Lines] | None = None
