r"""The command `jaxdp`: plans, ledgers, configs and launchers, from a terminal.

    jaxdp plan --records 50000 --batch-size 500 --steps 1000 --epsilon 3 \
        --delta 1e-6     the noise of a training run
    jaxdp plan --config digits_dpsgd                  what the run of a config would cost and take
    jaxdp plan --config digits_dpsgd \
        --target v5e     the memory and time that a compiler expects on a TPU

    jaxdp configs list                                the configs of all launchers
    jaxdp configs copy digits_dpsgd my_config.py      a config to change
    jaxdp finetune --config digits_dpsgd \
        --workdir workdir/digits     a launcher, here of private fine-tuning
    jaxdp finetune --help                             its configs, and their fields with defaults

    jaxdp ledger show PATH                            what every dataset has spent
    jaxdp ledger show PATH \
        --if "data: 100 * Gaussian(5)"     and what it would have spent after that
    jaxdp ledger show PATH \
        --html page.html           the same as a page, with the growth of every account
    jaxdp ledger history PATH --csv                   every spend
    jaxdp ledger history PATH --by-day                how epsilon grew
    jaxdp ledger verify PATH                          whether the file holds everything that was spent
    jaxdp ledger backup PATH COPY                     a copy, which appears whole
    jaxdp ledger accept PATH                          an older copy becomes valid, if no newer one is left

Of the ledger commands only `accept` writes to the ledger. `python -m jaxdp.command` is the same
command.
"""

import argparse
import contextlib
import csv
import datetime
import importlib
import importlib.util
import json
import math
import pathlib
import runpy
import sys
import warnings
import zoneinfo
from collections.abc import Sequence
from typing import Any

from jaxdp.files import shown, shown_lines
from jaxdp.privacy import Account, BudgetExceeded, Ledger
from jaxdp.privacy.events import describe, parse
from jaxdp.privacy.planning import facts, left_after, plan_training
from jaxdp.privacy.readout import aligned, finite, local
from jaxdp.privacy.store import accept

LAUNCHERS = {
    "finetune": "private fine-tuning, and the table of DPAdapter",
    "lm": "private training of a language model",
    "pretrain": "robust pre-training on public images",
    "lifecycle": "every stage of a model's life under one ledger, and a report",
    "adapt": "private test-time adaptation",
    "predict": "certified private answers",
    "recalibrate": "private recalibration from many sources",
    "recalibrate_server": "a calibrator that asks hospitals over a network",
    "recalibrate_client": "a hospital that answers it",
    "split": "Split Adaptation",
    "split_server": "the server of Split Adaptation between two processes",
    "split_client": "its client",
    "certificates": "keys for parties over a network",
    "audit": "attacks on every mechanism and its broken twins",
    "report": "the report of any run, written again from its workdir",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. A user's mistake becomes a sentence and the exit status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in LAUNCHERS:
        return _launch(*arguments)
    if arguments[:1] == ["plan"] and any(argument.startswith("--config") for argument in arguments):
        return _plan_config(arguments[1:])
    about: Any = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="jaxdp", **about)
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    ledger = groups.add_parser("ledger", help="questions to a ledger", **about)
    commands = ledger.add_subparsers(
        required=True, metavar="show | history | verify | backup | accept"
    )

    show = _command(commands, "show", _show)
    show.add_argument(
        "--delta", type=float, default=1e-5, help="for datasets that have none registered"
    )
    show.add_argument(
        "--if",
        dest="events",
        action="append",
        default=[],
        metavar="'DATASET: EVENT'",
        help="what if",
    )
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument("--html", metavar="PAGE", help="write a page for a browser instead of text")

    history = _command(commands, "history", _history)
    history.add_argument("--dataset", help="the dataset to list, by default all")
    history.add_argument(
        "--by-day", action="store_true", help="one row per day, with epsilon at its end"
    )
    history.add_argument("--csv", action="store_true", help="print CSV instead of text")
    history.add_argument("--delta", type=float, help="for --by-day, by default the registered one")
    for command in (show, history):
        command.add_argument(
            "--timezone", type=_timezone, default=datetime.UTC, help="for example Europe/Berlin"
        )

    _command(commands, "verify", _verify)
    _command(commands, "backup", _backup).add_argument("copy", help="the new file")
    _command(commands, "accept", _accept)

    plan = groups.add_parser(
        "plan", help="noise, steps, batch size or epsilon from the other three", epilog=_PLAN
    )
    plan.add_argument("--records", type=int, help="n, by default as declared in the ledger")
    plan.add_argument("--batch-size", type=float, help="the expected size of a batch")
    plan.add_argument(
        "--noise-multiplier", type=float, help="standard deviation of the noise over the clip norm"
    )
    plan.add_argument("--steps", type=int)
    plan.add_argument("--epsilon", type=float)
    plan.add_argument("--delta", type=float, help="by default as registered in the ledger")
    plan.add_argument(
        "--adjacency", choices=["add_remove", "replace_one", "zero_out"], default="add_remove"
    )
    plan.add_argument(
        "--every", type=int, help="steps of a chunk, whose epsilons are listed; by default a tenth"
    )
    plan.add_argument("--ledger", help="a ledger, to say what the run would leave of it")
    plan.add_argument("--dataset", help="the dataset in the ledger, if it has several")
    plan.add_argument(
        "--target", help="with --config: a TPU or GPU, such as v5e, whose compiler is asked"
    )
    plan.set_defaults(run=_plan)

    configs = groups.add_parser("configs", help="lists and copies configs").add_subparsers(
        required=True, metavar="list | copy"
    )
    configs.add_parser("list", help="lists the configs").set_defaults(run=_list)
    copy = configs.add_parser("copy", help="copies a config, to change it")
    copy.add_argument("name", help="for example digits_dpsgd")
    copy.add_argument("path", nargs="?", help="the new file, by default with the config's name")
    copy.set_defaults(run=_copy)

    for name, what in LAUNCHERS.items():  # only for --help
        groups.add_parser(name, help=what)

    given = parser.parse_args(arguments)
    warnings.formatwarning = lambda message, *_: f"Warning: {shown_lines(str(message))}\n"
    try:
        given.run(given)
    except (ValueError, TypeError, OSError) as error:
        print(shown(str(error)), file=sys.stderr)
        raise SystemExit(2) from error


# --- Launchers and configs ----------------------------------------------------------------------


def _launchers() -> str:
    """Returns the package of the launchers: jaxdp.launch in a wheel, launch in a checkout."""
    return "jaxdp.launch" if importlib.util.find_spec("jaxdp.launch") else "launch"


def _launch(name: str, *arguments: str) -> None:
    sys.argv = [f"jaxdp {name}", *arguments]
    runpy.run_module(f"{_launchers()}.{name}", run_name="__main__", alter_sys=True)


def _catalogue() -> Any:
    return importlib.import_module(f"{_launchers()}.catalogue")


def _list(given: argparse.Namespace) -> None:
    for line in aligned(
        [(found.name, ", ".join(found.launchers), found.about) for found in _catalogue().known()]
    ):
        print(line)


def _copy(given: argparse.Namespace) -> None:
    source = pathlib.Path(_catalogue().find(given.name))
    path = pathlib.Path(given.path or source.name)
    with open(path, "x", encoding="utf-8") as file:  # never over another file
        file.write(source.read_text(encoding="utf-8"))
    print(f"{path}: a copy of {given.name}")


# --- Plans --------------------------------------------------------------------------------------

_PLAN = (
    "Leave out one of --batch-size, --noise-multiplier, --steps and --epsilon: it is found. Or "
    "give a --config, and a --target, whose compiler says what a private step takes."
)


def _plan_config(arguments: Sequence[str]) -> None:
    """Runs the launcher of a config with --dry_run."""
    named = argparse.ArgumentParser(prog="jaxdp plan", add_help=False, allow_abbrev=False)
    named.add_argument("--config", required=True)
    given, _ = named.parse_known_args(arguments)
    try:
        launcher = _catalogue().launcher(given.config)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    _launch(launcher, "--dry_run", *arguments)


def _plan(given: argparse.Namespace) -> None:
    if given.target:
        raise ValueError(
            f"--target={given.target} compiles the private steps of a config. Give its --config "
            "too."
        )
    terms = {
        name: getattr(given, name)
        for name in ("batch_size", "noise_multiplier", "steps", "epsilon")
    }
    with contextlib.ExitStack() as opened:
        account = None
        if given.ledger:
            ledger = opened.enter_context(Ledger(given.ledger, read_only=True))
            account, row = _dataset(ledger, given.dataset)
            given.records, given.adjacency = given.records or row["records"], row["adjacency"]
            given.delta = given.delta or account.delta
        if missing := [
            f"--{name}" for name in ("records", "delta") if getattr(given, name) is None
        ]:
            raise ValueError(
                f"{' and '.join(missing)} must be given, since no --ledger declares them."
            )
        plan = plan_training(
            records=given.records, delta=given.delta, adjacency=given.adjacency, **terms
        )
        rows = facts(
            plan.event,
            records=plan.records,
            batch_size=plan.batch_size,
            noise_multiplier=f"{plan.noise_multiplier:.6g}",
            steps=plan.steps,
            every=given.every or math.ceil(plan.steps / 10),
            delta=plan.delta,
            adjacency=plan.adjacency,
        )
        if account is not None:
            left = left_after(account, plan.event(0, plan.steps))
            rows.append(("ledger", f"{shown(given.ledger)}, dataset {shown(account.name)}: {left}"))
    for line in aligned(rows):
        print(line)


def _dataset(ledger: Ledger, name: str | None) -> tuple[Account, dict[str, Any]]:
    """Returns the account of a dataset and its terms. Without a name the ledger must have only
    one.
    """
    found = {row["name"]: row for row in ledger.report()["datasets"]}
    if name is None and len(found) != 1:
        raise ValueError(
            f"--dataset must be one of {', '.join(map(shown, found)) or 'none'}, got none."
        )
    name = name or next(iter(found))
    account = ledger.account(name)  # raises for an unknown name
    return account, found[name]


# --- The ledger ---------------------------------------------------------------------------------


def _command(commands: Any, name: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=run.__doc__.rstrip("."))
    command.add_argument("path", help="the ledger's file")
    command.set_defaults(run=run)
    return command


def _timezone(name: str) -> datetime.tzinfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"no time zone {name!r}. Use a name such as Europe/Berlin."
        ) from error


def _show(given: argparse.Namespace) -> None:
    """Shows what every dataset has spent."""
    if given.html is not None:
        return _write_page(given)
    with Ledger(given.path, read_only=True) as ledger:
        asked = []
        for text in given.events:
            name, colon, event = text.rpartition(": ")
            if not colon:
                raise ValueError(
                    "--if takes 'DATASET: EVENT', for example 'data: 100 * Gaussian(5)', got "
                    f"{text!r}."
                )
            asked.append(_what_if(ledger, name, event, given.delta))
        if given.json:
            print(
                json.dumps(
                    ledger.report(delta=given.delta) | ({"if": asked} if asked else {}), indent=2
                )
            )
            return
        print(ledger.report_text(delta=given.delta, timezone=given.timezone))
        verdicts = {
            True: "the budget allows it",
            False: "the budget does not allow it",
            None: "it has no budget",
        }
        for answer in asked:
            after, before = (
                "inf" if answer[key] is None else f"{answer[key]:.6g}"
                for key in ("epsilon", "before")
            )
            print(
                f"\nIf {shown(answer['event'])} were spent on {shown(answer['dataset'])}: epsilon "
                f"{after} at delta "
                f"{answer['delta']:g}, after {before}; {verdicts[answer['allowed']]}"
            )


def _write_page(given: argparse.Namespace) -> None:
    target = pathlib.Path(given.html)
    if given.events:
        raise ValueError(
            "--html shows what is spent, and --if what would be. Leave one of them out."
        )
    if (
        target.suffix != ".html" or target.resolve() == pathlib.Path(given.path).resolve()
    ):  # never over a ledger
        raise ValueError(f"--html must name a new page that ends in .html, got {given.html!r}.")
    from jaxdp.report import write_ledger_page  # other commands do without NumPy and Jinja

    write_ledger_page(given.path, target, delta=given.delta, timezone=given.timezone)
    print(f"{shown(given.html)}: the page of {shown(given.path)}")


def _what_if(ledger: Ledger, name: str, text: str, default_delta: float) -> dict[str, Any]:
    event, registered = parse(text), ledger.delta(name)
    delta = default_delta if registered is None else registered
    allowed = True if math.isfinite(ledger.remaining(name)) else None
    try:
        ledger.check([(name, event)])
    except BudgetExceeded:
        allowed = False
    return {
        "dataset": name,
        "event": describe(event),
        "delta": delta,
        "before": finite(ledger.epsilon(name, delta=delta)),
        "epsilon": finite(ledger.would_cost(name, event, delta=delta)),
        "allowed": allowed,
    }


def _history(given: argparse.Namespace) -> None:
    """Lists every spend, or the growth of epsilon by the day."""
    with Ledger(given.path, read_only=True) as ledger:
        if given.by_day:
            names = (
                [given.dataset]
                if given.dataset
                else [entry["name"] for entry in ledger.report()["datasets"]]
            )
            rows = [
                row
                for name in names
                for row in ledger.by_day(name, delta=given.delta, timezone=given.timezone)
            ]
            columns = ["day", "dataset", "spends", "epsilon", "delta"]
        else:
            rows = ledger.history(given.dataset)
            for row in rows:
                for key in ("reserved_at", "finished_at"):
                    row[key] = row[key] and local(row[key], given.timezone).isoformat()
            columns = [
                "spend",
                "reserved_at",
                "dataset",
                "partition",
                "event",
                "label",
                "status",
                "who",
                "host",
                "run",
            ]
            columns += ["version", "finished_at", "token", "link"]
    if given.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row[column]) for column in columns] for row in rows)
        return
    shorter = columns[:10]  # enough for a terminal
    for line in aligned(
        [shorter, *([_cell(row[column]) or "-" for column in shorter] for row in rows)]
    ):
        print(line)


def _cell(value: Any) -> str:
    """Returns a value for a terminal or a spreadsheet, which would read some texts as formulas."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = shown(str(value))
    return f"'{text}" if isinstance(value, str) and text[:1] in ("=", "+", "-", "@") else text


def _verify(given: argparse.Namespace) -> None:
    """Checks whether the file holds everything that was spent."""
    with Ledger(given.path, read_only=True) as ledger:
        head = ledger.head
        print(
            f"{shown(given.path)}: {head.spend} spend(s), each linked to all before it. Totals "
            "equal their sums."
        )
        if ledger.has_head:
            print(f"The head beside it agrees. Its last spend is {head.spend}, link {head.link}.")
        else:
            print("No head lies beside it, so missing last spends cannot be detected.")


def _backup(given: argparse.Namespace) -> None:
    """Makes a copy, which appears whole."""
    with Ledger(given.path, read_only=True) as ledger:
        ledger.backup(given.copy)
    with Ledger(given.copy, read_only=True) as copy:
        print(f"{shown(given.copy)}: {copy.head.spend} spend(s), verified")


def _accept(given: argparse.Namespace) -> None:
    """Makes an older copy valid, if no newer one is left."""
    head = accept(given.path)
    print(
        f"{shown(given.path)} is valid up to its spend {head.spend}. Resume every run that was "
        "charged later. Its workdir charges the spends that this copy lacks."
    )


if __name__ == "__main__":
    main()
