"""The command `jaxdp`: plans, ledgers, configs and launchers, from a terminal.

    jaxdp plan --records 50000 --batch-size 500 --steps 1000 --epsilon 3 --delta 1e-6
                                                  the noise of a training run
    jaxdp plan --config digits_dpsgd              what the run of a config would cost and take
    jaxdp plan --config digits_dpsgd --target v5e
                                                  what a compiler expects of a TPU

    jaxdp configs list                            the configs of all launchers
    jaxdp configs copy digits_dpsgd my_config.py  a config to change
    jaxdp finetune --config digits_dpsgd --workdir workdir/digits
                                                  a launcher, here of private fine-tuning
    jaxdp finetune --help                         its configs, and their fields with defaults

    jaxdp report RUN                              the report of a run, written again
    jaxdp report --verify PAGE                    whether ledger and workdir make this page
    jaxdp release RUN                             RUN/release: the model of a run, to publish

    jaxdp ledger show PATH                        what every dataset has spent
    jaxdp ledger show PATH --if "data: 100 * Gaussian(5)"
                                                  and what it would have spent after that
    jaxdp ledger show PATH --html page.html       the same as a page, with how accounts grew
    jaxdp ledger history PATH --csv               every spend
    jaxdp ledger history PATH --by-day            how epsilon grew
    jaxdp ledger describe PATH DATASET --owner "Cardiology" --contact data@clinic.org
                                                  whom to ask, with --purpose and --approver
    jaxdp ledger verify PATH                      whether the file holds everything that was spent
    jaxdp ledger backup PATH COPY                 a copy, which appears whole; --registry FILE
                                                  copies the registry too
    jaxdp ledger accept PATH                      makes an older copy valid, if no newer one is left

Of the ledger commands only `describe` and `accept` write to the ledger. `python -m jaxdp.command`
is the same command.
"""

import argparse
import contextlib
import math
import pathlib
import runpy
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.files import shown, shown_lines
from jaxdp.files.text import aligned
from jaxdp.version import __version__

from . import catalogue, studies, usage

# What the commands print for --help. What they compute with is imported when they run.
_COMMANDS = {
    "ledger": "questions to a ledger",
    "plan": "noise, steps, batch size or epsilon from the other three",
    "configs": "lists and copies configs",
}
# Launchers that run no study.
_TOOLS = {
    "certificates": "keys for parties over a network",
    "audit": "attacks on every mechanism and its broken twins",
    "report": "the report of any run, written again from its workdir",
    "release": "a folder to publish: parameters, program, card, report and checksums",
    "serve-check": "whether a released folder is whole, and answers as it did",
}
if TYPE_CHECKING:
    from jaxdp.privacy import Account, DpEvent, Ledger

_PLAN = (
    "Leave out one of --batch-size, --noise-multiplier, --steps and --epsilon: it is found. Or "
    "give a --config, and a --target, whose compiler says what a private step takes."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. A user's mistake becomes a sentence and the exit status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(arguments)
    except BrokenPipeError as error:
        usage.end_if_unread(error)
        raise


def _run(arguments: list[str]) -> None:
    if arguments and arguments[0] in _launchers():
        return _launch(*arguments)
    if arguments[:1] == ["plan"] and any(argument.startswith("--config") for argument in arguments):
        return _plan_config(arguments[1:])
    if arguments[:1] == ["--version"]:
        print(f"jaxdp {__version__}", flush=True)
        return
    options = _parser(*arguments[:1]).parse_args(arguments)
    warnings.formatwarning = lambda message, *_: f"Warning: {shown_lines(str(message))}\n"
    try:
        options.run(options)
        sys.stdout.flush()
    except (ValueError, TypeError, OSError) as error:
        usage.end_if_unread(error)
        print(shown(str(error)), file=sys.stderr)
        raise SystemExit(2) from error


def _parser(command: str = "") -> argparse.ArgumentParser:
    """Returns the parser of a command. The others are there for --help."""
    about: Any = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="jaxdp", **about)
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, what in (_COMMANDS | _launchers()).items():
        options = about if name == "ledger" else {"epilog": _PLAN} if name == "plan" else {}
        group = groups.add_parser(name, help=what, **options)
        if name == command:
            _add(name, group)
    return parser


def _add(command: str, parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command."""
    match command:
        case "ledger":
            from . import ledger_commands

            ledger_commands.add(parser)
        case "plan":
            _add_plan(parser)
        case "configs":
            _add_configs(parser)


# --- Launchers and configs ----------------------------------------------------------------------


def _launchers() -> dict[str, str]:
    """Returns what each launcher does, by its name."""
    names = {study.launcher: study.about for study in studies.STUDIES if study.about}
    return names | _TOOLS


def _launch(name: str, *arguments: str) -> None:
    sys.argv = [f"jaxdp {name}", *arguments]
    asks = usage.HELP & {*arguments}
    if asks and any(study.launcher == name and not study.own_flags for study in studies.STUDIES):
        catalogue.importable()
        print(usage.of_launcher(name, arguments), flush=True)
        return
    module = name if "." in name else f"{__package__}.{name.replace('-', '_')}"
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _add_configs(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="list | copy")
    commands.add_parser("list", help="lists the configs").set_defaults(run=_list)
    copy = commands.add_parser("copy", help="copies a config, to change it")
    copy.add_argument("name", help="for example digits_dpsgd")
    copy.add_argument(
        "path", nargs="?", help="the new file, by default with the config's name, and _ for /"
    )
    copy.set_defaults(run=_copy)


def _list(options: argparse.Namespace) -> None:
    configs = catalogue.known()
    rows = [(config.name, ", ".join(config.launchers), config.about) for config in configs]
    for line in aligned(rows):
        print(line)


def _copy(options: argparse.Namespace) -> None:
    source = pathlib.Path(catalogue.find(options.name)).resolve()
    # `python -m` takes a csv.py of its folder for Python's own module, so finetune/csv is not that.
    is_known = source.is_relative_to(catalogue.FOLDER)
    name = "_".join(source.relative_to(catalogue.FOLDER).parts) if is_known else source.name
    path = pathlib.Path(options.path or name)
    if path.exists():
        raise FileExistsError(
            f"{shown(path)} exists. Give another file: jaxdp configs copy {options.name} FILE."
        )
    with open(path, "x", encoding="utf-8") as file:  # never over another file
        file.write(source.read_text(encoding="utf-8"))
    print(f"{path}: a copy of {options.name}")


# --- Plans --------------------------------------------------------------------------------------


def _add_plan(plan: argparse.ArgumentParser) -> None:
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
    plan.add_argument(
        "--correlated",
        action="store_true",
        help="choose groups and bands of correlated noise, and say what they gain over DP-SGD",
    )
    plan.add_argument("--ledger", help="a ledger, to say what the run would leave of it")
    plan.add_argument("--dataset", help="the dataset in the ledger, if it has several")
    # `_run` hands a plan with a config to the config's launcher.
    plan.add_argument("--config", help="a config, instead of numbers: what its run would take")
    plan.add_argument(
        "--target", help="with --config: a TPU or GPU, such as v5e, whose compiler is asked"
    )
    plan.set_defaults(run=_plan)


def _plan_config(arguments: Sequence[str]) -> None:
    """Runs the launcher of a config with --dry_run."""
    parser = argparse.ArgumentParser(prog="jaxdp plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", required=True)
    options, _ = parser.parse_known_args(arguments)
    try:
        launcher = catalogue.launcher(options.config)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    _launch(launcher, "--dry_run", *arguments)


def _plan(options: argparse.Namespace) -> None:
    if options.target:
        raise ValueError(
            f"--target={options.target} compiles the private steps of a config. Give its --config "
            "too."
        )
    from jaxdp.privacy import Ledger

    with contextlib.ExitStack() as opened:
        account = None
        if options.ledger:
            ledger = opened.enter_context(Ledger(options.ledger, read_only=True))
            account, row = _dataset(ledger, options.dataset)
            options.records = options.records or row["records"]
            options.adjacency = row["adjacency"]
            options.delta = options.delta or account.delta
        rows, event = _planned(options, "record" if account is None else account.unit)
        if account is not None:
            from jaxdp.privacy.planning import left_after

            place = f"{shown(options.ledger)}, dataset {shown(account.name)}"
            rows.append(("ledger", f"{place}: {left_after(account, event)}"))
        for line in aligned(rows):
            print(line)


def _planned(options: argparse.Namespace, unit: str) -> tuple[list[tuple[str, str]], "DpEvent"]:
    """Returns the facts of a plan, and the event of its run."""
    missing = [f"--{name}" for name in ("records", "delta") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given, since no --ledger declares them.")
    if options.every is not None and options.every < 1:
        raise ValueError(f"--every must be at least 1, got {options.every}.")
    if options.correlated:
        return _correlated(options)
    from jaxdp.privacy.planning import facts, plan_training

    plan = plan_training(
        records=options.records,
        delta=options.delta,
        adjacency=options.adjacency,
        batch_size=options.batch_size,
        noise_multiplier=options.noise_multiplier,
        steps=options.steps,
        epsilon=options.epsilon,
    )
    rows = facts(
        plan.event,
        records=plan.records,
        batch_size=plan.batch_size,
        noise_multiplier=f"{plan.noise_multiplier:.6g}",
        steps=plan.steps,
        every=options.every or math.ceil(plan.steps / 10),
        terms={"delta": plan.delta, "adjacency": plan.adjacency, "unit": unit},
    )
    return rows, plan.event(0, plan.steps)


def _correlated(options: argparse.Namespace) -> tuple[list[tuple[str, str]], "DpEvent"]:
    """Returns the facts of a plan with correlated noise, and the event of its run."""
    needed = ("batch_size", "steps", "epsilon")
    missing = [name.replace("_", "-") for name in needed if getattr(options, name) is None]
    if missing or options.noise_multiplier is not None:
        raise ValueError(
            "--correlated plans the noise of --batch-size, --steps and --epsilon. Missing: "
            f"{missing or 'none'}. Leave out --noise-multiplier."
        )
    from jaxdp.finetune import plan_correlated

    if options.batch_size % 1:
        raise ValueError(f"--batch-size must be an integer, got {options.batch_size}.")
    plan = plan_correlated(
        records=options.records,
        batch_size=int(options.batch_size),
        steps=options.steps,
        epsilon=options.epsilon,
        delta=options.delta,
        adjacency=options.adjacency,
    )
    return plan.facts(), plan.event


def _dataset(ledger: "Ledger", name: str | None) -> tuple["Account", dict[str, Any]]:
    """Returns the account of a dataset and its terms. Without a name the ledger must have only
    one.
    """
    rows = {row["name"]: row for row in ledger.report()["datasets"]}
    if not name and len(rows) != 1:
        raise ValueError(
            f"--dataset must be one of {', '.join(map(shown, rows)) or 'none'}, got none."
        )
    name = name or next(iter(rows))
    account = ledger.account(name)  # raises for an unknown name
    return account, rows[name]


if __name__ == "__main__":
    main()
