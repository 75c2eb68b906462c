"""A program of this package: it reads flags, and a user's mistake becomes a sentence."""

import contextlib
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from jaxdp import compilers, memory
from jaxdp.files import shown_lines
from jaxdp.privacy import BudgetExceeded, LedgerDamaged
from jaxdp.release import HostFailed, digest
from jaxdp.release.identity import processor

from .. import catalogue, usage
from . import events, guide

LARGEST_CACHE = 2**31  # bytes of compiled programs that later runs find
# What Python says of a value of a flag, and which values it may have.
_RAW = {
    "Non-boolean argument": "true or false",
    "invalid literal for int()": "a whole number",
    "could not convert string to float": "a number",
}
# A user can correct these. The program prints the message without a traceback.
MISTAKES = (
    ValueError,
    TypeError,
    OSError,
    ImportError,
    BudgetExceeded,
    LedgerDamaged,
    HostFailed,
    compilers.NotCompiled,
)


def start(program: Callable[[Sequence[str]], None]) -> None:
    """Parses the flags and runs `program(argv)`, as `absl.app.run` does.

    After a user's mistake the program prints it as a sentence on stderr and exits with 2. With
    --verbosity=1 it also prints the traceback. After Ctrl-C it exits with 130. --help exits with 0.
    """

    def run_program(argv: Sequence[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            # Orbax prints a dozen lines for every checkpoint.
            logging.set_verbosity(logging.WARNING)
        warnings.formatwarning = lambda message, *_: f"Warning: {shown_lines(str(message))}\n"
        keep_compiled()
        tell(_watched, program, argv)

    usage.define_log()
    memory.keep_freed_memory()
    try:
        app.run(run_program, flags_parser=_parse)
    except KeyboardInterrupt as error:
        message = shown_lines(str(error))
        print(f"\n{message or 'Interrupted. The same command goes on from here.'}", file=sys.stderr)
        sys.exit(130)


def _watched(program: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    with events.as_lines(str(flags.FLAGS["log_json"].value), guide.launcher()):
        program(argv)


def _parse(argv: list[str]) -> list[str]:
    arguments = argv[1:]
    try:
        catalogue.importable()
        if usage.HELP & {*arguments}:
            print(guide.text(arguments))
            sys.exit(0)
        return flags.FLAGS([argv[0], *catalogue.resolve(arguments)])
    except (*MISTAKES, flags.Error, AttributeError, KeyError) as error:
        _stop(_clear(error, arguments))


def _clear(error: Exception, arguments: Sequence[str]) -> Exception:
    """Returns an error of ml_collections as a sentence. It names no flag, or has a traceback."""
    cause = error.args[0] if error.args else ""
    if isinstance(cause, KeyError):  # of a field inside another
        error, cause = cause, cause.args[0]
    if isinstance(error, KeyError):
        # Its text is the name of a field, quoted, and perhaps "Did you mean ...?" on a second line.
        field, _, hint = str(cause).partition("\n")
        fields = [argument for argument in arguments if field.strip("'\"") in argument]
        named = ", ".join(fields) or "a flag"
        hint = hint or "--help lists its fields."
        return ValueError(f"{named}: the config has no field {field}. {hint}")
    for raw, kind in _RAW.items():
        if raw in str(error):
            return ValueError(f"{str(error).partition(': ')[0]} must be {kind}.")
    if " as a ConfigDict" in str(error):
        return ValueError(f"{error} Change its fields one by one. --help lists them.")
    _, mark, raised = str(error).rpartition("\nValueError: ")
    if not mark:
        return error
    return ValueError(f"--config={catalogue.given(arguments)}: {raised.strip()}")


def tell(program: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Runs a program. After a user's mistake, prints it on stderr and exits with 2."""
    try:
        program(*arguments, **options)
        sys.stdout.flush()
    except MISTAKES as error:
        _stop(error)


def _stop(error: Exception) -> NoReturn:
    usage.end_if_unread(error)
    logging.debug("The error was raised here:", exc_info=error)
    for text in (error, *getattr(error, "__notes__", ())):
        print(shown_lines(text), file=sys.stderr)
    sys.exit(2)


def keep_compiled() -> None:
    """Lets the next run load what this one compiles, unless JAX_COMPILATION_CACHE_DIR names another
    folder.

    A compiled program contains the arrays that its function closes over. So the programs of this
    package get records and keys as arguments. Machines that share the user's folder may have
    different processors, so each kind has its own. A folder that cannot be used, or a damaged file
    in it, costs time and nothing else.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        folder = cache / "jaxdp" / digest([str(fact) for fact in processor()])[:16]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return
    with contextlib.suppress(OSError):  # another process may delete the same files
        _delete_oldest(folder)
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _delete_oldest(folder: pathlib.Path) -> None:
    """Deletes the oldest files of a folder, until the others have at most `LARGEST_CACHE` bytes."""
    total = 0
    for entry in sorted(os.scandir(folder), key=lambda entry: -entry.stat().st_mtime):
        total += entry.stat().st_size
        if total > LARGEST_CACHE:
            os.unlink(entry)
