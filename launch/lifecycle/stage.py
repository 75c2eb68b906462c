"""What a stage of a life is: what it reads, charges, computes, releases and shows."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from jaxdp import audit
from jaxdp.privacy import Account, DpEvent
from jaxdp.report import Callback
from jaxdp.version import __version__

from .parts import Parts, unit_of

if TYPE_CHECKING:
    from .. import plans

Charges = dict[str, DpEvent]
Accounts = dict[str, dict[str, Any]]

# Types of fields of a result, as in `launch.document.check`.
CURVE = [[float]]
PAIR = {"before": float, "after": float}
CHANGE = {**PAIR, "gained": int, "lost": int}
_AUDIT = {
    **dict.fromkeys(("lower", "upper", "ceiling", "delta", "confidence"), float),
    "trials": int,
    "method": str,
    "verdict": str,
    "accounts": [str],
    "release": str,
}
AUDITS = {"audits": [_AUDIT]}
CONFIDENCE = 0.99  # of each audit. Seven audits have a false alarm with probability below 7 %.


@dataclasses.dataclass(frozen=True)
class Done:
    """A finished stage.

    Attributes:
      folder: The folder with its files.
      result: The return value of the stage.
      content: A hash of the result and of the parameters in the folder.
    """

    folder: pathlib.Path
    result: dict[str, Any]
    content: str


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The input of a stage.

    Attributes:
      config: The parts of the lifecycle's config that the stage reads.
      data: The data of the whole lifecycle.
      before: The stages that it builds on, by name.
      folder: The folder of the stage.
      account: `account(name)` of a private data set, labelled with the stage's name. Its spends
          were held before.
      watching: `launch.frame.watching` for the folder of the stage.
    """

    config: Any
    data: Parts
    before: Mapping[str, Done]
    folder: pathlib.Path
    account: Callable[[str], Account]
    watching: Callable[[], AbstractContextManager[list[Callback]]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step in a model's life.

    Attributes:
      name: The name, also of its folder. That of an audit begins with "audit_".
      run: `run(job) -> result`, a JSON-able dict. Arrays for other stages go into .safetensors
          files in its folder.
      after: The names of the stages that it builds on.
      data: The roles of the data that it reads: attributes of `Parts`.
      config: The parts of the config that it reads.
      charges: `charges(config, data) -> {account: event}`, all that the stage will spend. None if
          it spends nothing.
      accounts: `accounts(config) -> {name: terms}` of the data sets that it pays for. The terms are
          those of `Ledger.register`.
      plan: `plan(config, data)` returns what it computes, for --dry_run.
      shape: The types of its result, as in `launch.document.check`.
      released: What each released file in its folder is.
      title: The heading of its part of the report. Without one the report shows no part.
      page: The template of this part in `launch/pages`. By default it is a table of the result.
      opens: Whether its part comes first.
    """

    name: str
    run: Callable[[Job], dict[str, Any]]
    after: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    charges: Callable[[Any, Parts], Charges] | None = None
    accounts: Callable[[Any], Accounts] | None = None
    plan: Callable[[Any, Parts], Iterable["plans.Item"]] | None = None
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    released: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    title: str = ""
    page: str = "life_stage.html.jinja"
    opens: bool = False

    @property
    def is_audit(self) -> bool:
        """Whether the stage attacks a release of another stage."""
        return self.name.startswith("audit_")

    @property
    def is_private(self) -> bool:
        """Whether only the owners of its data may read errors about them."""
        return not {"private", "sources", "stream", "client"}.isdisjoint(self.data)

    def key(self, config: Any, data: Parts, before: Mapping[str, Done]) -> str:
        """Returns the hash by which the stage's result is found."""
        fields = json.loads(config.to_json())
        if fields.get("finetune", {}).get("clip_parts") == "":
            del fields["finetune"]["clip_parts"]  # A life from before the field has the same key.
        facts = {
            "stage": self.name,
            "config": {part: fields[part] for part in self.config if part in fields},
            "data": {role: data.fingerprints(role) for role in self.data},
            "before": {name: before[name].content for name in self.after},
            "version": __version__,
        }
        canonical = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def attack_on(
    stage: Stage,
    run: Callable[[Job], dict[str, Any]],
    *,
    data: tuple[str, ...],
    after: tuple[str, ...] | None = None,
) -> Stage:
    """Returns the stage that audits another one.

    Args:
      stage: The audited stage. Its options for the audit are the part "audit_" + its name.
      run, data: As in `Stage`.
      after: As in `Stage`. By default the audited stage and those that it builds on.
    """
    name = f"audit_{stage.name}"
    if after is None:
        after = (*stage.after, stage.name)
    return Stage(name, run, after=after, data=data, config=(*stage.config, name), shape=AUDITS)


def terms(config: Any, adjacency: str, budget: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the terms of an account with a budget of the config."""
    return {"adjacency": adjacency, "unit": unit_of(config.data), **budget}


def audited(audits: Sequence[tuple[audit.Audit, str]], accounts: Sequence[str]) -> dict[str, Any]:
    """Returns the result of an audit stage.

    Args:
      audits: The audits, each with the words for its release.
      accounts: The accounts that paid for these releases.
    """
    rows = []
    for one, release in audits:
        row = dataclasses.asdict(one)
        row |= {"verdict": one.verdict, "accounts": list(accounts), "release": release}
        rows.append(row)
    return {"audits": rows}
