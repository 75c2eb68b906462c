"""The flags of all launchers, and their help, which imports no JAX."""

import ast
import importlib.util
import json
import os
import pathlib
import select
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from . import catalogue

_BROKEN_PIPE = 141  # what a shell reports of a program that ends by SIGPIPE
HELP = {"--help", "-help", "-h", "--helpfull", "--helpshort"}
_DEVICES = (
    "The devices that share each batch: one, local (all of this process), cluster (all of the "
    "processes that SLURM, Open MPI, Kubernetes or a TPU pod has started), or HOST:PORT,I,N (all "
    "of N processes, of which this is number I and number 0 listens at HOST:PORT)."
)
_LEDGER = (
    "The ledger that counts what is released about the private records. All runs about the same "
    "records share one. The default is that of the workdir, then that of JAXDP_LEDGER, then the "
    "one that counts these records already, then a new one outside of the workdir. Records that "
    "everybody has are counted in the workdir."
)
_NEW_LEDGER = (
    "Count records anew that another ledger counts already. What is known about a record is then "
    "bounded by the sum of the ledgers, which no ledger shows."
)
_STALE = (
    "What to do with finished cells whose code was edited since: keep, redo, or redo_all, which "
    "also computes those again that another version of jaxdp computed. What is private is paid "
    "again. Without the flag the run stops and says which code changed."
)
_TARGET = (
    "With --dry_run: a TPU or GPU that need not be there. The private steps are compiled for it, "
    "and the compiler's estimates of memory and time are shown. One of v5e, v6e, v5p, h100."
)
_TUNE = (
    "Search privately among values of fields of config.private, such as "
    "'learning_rate=0.1,0.3 clip_norm=0.5,1'. The epsilon is that of the whole search. For "
    "launch.finetune, see configs/finetune/tune.py."
)

_LOG_JSON = (
    "A file that gets one line of JSON per event: start, cell, payment, checkpoint, cell_end, "
    "cell_error, end, error. The lines have no private value. - is stderr."
)


class Flags(NamedTuple):
    """The flags of a launcher."""

    config: Any
    workdir: Any
    dry_run: Any
    ledger: Any
    new_ledger: Any
    stale: Any
    devices: Any
    target: Any
    tune: Any


def define() -> Flags:
    """Defines the flags of all launchers."""
    from .config_dict import config_flags  # of an extra, which other commands do without

    defined = Flags(
        config=config_flags.DEFINE_config_file(
            "config",
            help_string="The experiment: a file, or a name of `jaxdp configs list`. Its fields are "
            "flags.",
        ),
        workdir=flags.DEFINE_string(
            "workdir", None, "Directory of the run. An interrupted run in it is resumed."
        ),
        dry_run=flags.DEFINE_bool(
            "dry_run", False, "Only say what the run would cost and take. Nothing is written."
        ),
        ledger=flags.DEFINE_string("ledger", None, _LEDGER),
        new_ledger=flags.DEFINE_bool("new_ledger", False, _NEW_LEDGER),
        stale=flags.DEFINE_string("stale", "", _STALE),
        devices=flags.DEFINE_string("devices", "one", _DEVICES),
        target=flags.DEFINE_string("target", "", _TARGET),
        tune=flags.DEFINE_string("tune", "", _TUNE),
    )
    define_log()
    for flag in defined:
        # --help lists the flags of the program itself, and these are defined in another module.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])
    return defined


def define_log() -> None:
    """Defines the flag of all programs, once."""
    if "log_json" not in flags.FLAGS:
        flags.DEFINE_string("log_json", "", _LOG_JSON)
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["log_json"])


def of_launcher(name: str, arguments: Sequence[str]) -> str:
    """Returns the help of a launcher without flags of its own. Its module is read, not run."""
    module = name if "." in name else f"{__package__}.{name}"
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = pathlib.Path(spec.origin)
    if source.name == "__init__.py":
        source = source.with_name("__main__.py")
    about = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")), clean=False)
    define()
    return text(about or "", name, arguments)


def text(about: str, launcher: str, arguments: Sequence[str]) -> str:
    """Returns the help of a launcher: what it does, its flags, its configs, and the fields of one
    of them with their defaults.
    """
    sections = [about.strip(), flags.FLAGS.main_module_help().strip()]
    configs = catalogue.known(launcher)
    name = catalogue.given(arguments)
    if configs:
        width = max(len(config.name) for config in configs)
        lines = [f"  {config.name:{width}}  {config.about}" for config in configs]
        sections.append("\n".join(["Configs:", *lines]))
        # Digits are bundled, so a newcomer can run such a config.
        name = name or min(configs, key=lambda config: "digits" not in config.name).name
    if name:
        defaults = flat(json.loads(catalogue.load(name).to_json()))
        lines = [f"  --config.{field}={value!r}" for field, value in defaults.items()]
        sections.append("\n".join([f"Fields of {name}:", *lines]))
    return "\n\n".join(sections)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested dicts by dotted names: {"a": {"b": 1}} gives {"a.b": 1}."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for name, branch in tree.items():
        leaves |= flat(branch, f"{prefix}.{name}" if prefix else name)
    return leaves


def end_if_unread(error: Exception) -> None:
    """Ends the program silently if the error is that nobody reads its output any more."""
    if isinstance(error, BrokenPipeError) and _is_unread():
        # The reader, such as `head`, has what it wanted. Python would flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_BROKEN_PIPE) from None


def _is_unread() -> bool:
    """Returns whether stdout is a closed pipe, and not a connection to another machine."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
