"""Every documented command parses, and its dry run ends with a plan or asks for what is not here.

A mistake in a page is found by the program that a reader would run: a flag, a config, a variant or
a field that does not exist, a value of another type, a config that no study accepts.
"""

import ast
import contextlib
import functools
import importlib
import io
import json
import re
import shlex
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from jax_privacy.matrix_factorization import buffered_toeplitz

import jaxdp
from jaxdp import data
from jaxdp.finetune import strategies
from jaxdp.models.checkpoints import blank_inputs
from jaxdp.transforms.noise import correlated
from launch import catalogue, command, models, plans, report, trainers
from launch.frame import program as frame_program
from tests.launch import program, tiny

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [path for name in ("configs", "launch") for path in sorted((ROOT / name).rglob("*.py"))]
LAUNCHED = r"python -m launch\.\w+ .*--\w|jaxdp \w+ .*[-/.]"
# Names that a reader replaces, and what a shell does behind a command.
REPLACED = ("...", "&", ">", "|")


def lines_of(path):
    """Returns the lines of the shell of a page or of a docstring, and what is in quotes."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
        blocks = [text]
    else:
        blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        text = re.sub("```.*?```", "", text, flags=re.DOTALL)
    lines = [quote.replace("\n", " ") for quote in re.findall("`([^`]+)`", text)]
    for block in blocks:
        lines += block.replace("\\\n", " ").splitlines()
    # What a command does stands behind two blanks.
    return [re.split(r"\s{2,}(?![\s-])", line.strip().removeprefix("$ "))[0] for line in lines]


def words_of(line):
    """Returns the words of a command without its workdir, which decides nothing here."""
    words = shlex.split(line, comments=True)
    end = min((words.index(word) for word in REPLACED if word in words), default=len(words))
    words = words[:end]
    if "--workdir" in words:
        at = words.index("--workdir")
        del words[at : at + 2]
    return words


def documented():
    """Returns each command once."""
    lines = {}
    for path in (*PAGES, *MODULES):
        for line in lines_of(path):
            is_command = re.match(LAUNCHED, line) and not re.search(r"\[--|--config$", line)
            if is_command:
                lines.setdefault(tuple(words_of(line)), line)
    return list(lines.values())


def module_of(line):
    """Returns the module of a command. `jaxdp finetune` is `python -m launch.finetune`."""
    words = words_of(line)
    return words[2] if words[0] == "python" else f"launch.{words[1]}"


# The noise of AdpAlloc is calibrated for one kind of step after the other, and that of many bands
# is optimised, which takes seconds.
ONE_BAND = "--config.private.noise.bands=1"
FASTER = {
    "configs/dpadapter_table1.py:digits": "--config.private.epochs=1",
    "configs/finetune/correlated.py": ONE_BAND,
    "configs/finetune/correlated.py:cyclic_poisson": ONE_BAND,
}
COMMANDS = documented()
LAUNCHERS = sorted({module_of(line) for line in COMMANDS})


@contextlib.contextmanager
def flags_of_links(module):
    """Gives a program its own flags, and a party those of `launch.links`. Earlier tests of this
    process may have imported either module, and Python runs a module once."""
    is_party = module.endswith(("_server", "_client"))
    others = {}
    for imported in (module, *(() if is_party else ("launch.links",))):
        for flag in tuple(flags.FLAGS.flags_by_module_dict().get(imported, ())):
            others[flag.name] = flag
            if flag.name in flags.FLAGS:  # a module that was read twice lists its flags twice
                delattr(flags.FLAGS, flag.name)
    with flagsaver.flagsaver():
        if is_party and "exchange" not in flags.FLAGS:
            importlib.reload(importlib.import_module("launch.links"))
        yield
    for name, flag in others.items():
        flags.FLAGS[name] = flag


def zeros(network, seed):
    """Returns parameters as `models.fresh` does, without the compilation of an initialisation."""
    if network.params:
        return network.params
    return zeros_of(network.model, network.preprocessing)


@functools.cache
def zeros_of(model, preprocessing):
    """Commands share a few networks."""
    inputs = blank_inputs(preprocessing)
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def one_buffer(pattern, buffers):
    """The noise of a buffered Toeplitz matrix that nobody has optimised."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        matrix = buffered_toeplitz.BufferedToeplitz.build([0.9], [0.1])
        return correlated(matrix, **pattern)


def not_parsed(parser, words):
    """Returns what a parser says about arguments, "" if it takes them. It runs nothing."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        parser.parse_args(words)
    return said.getvalue()


def mistake(line):
    """Returns what a command of a launcher says about a mistake in it, "" if there is none.

    Data, a checkpoint or an extra that is not here is no mistake of the command.
    """
    errors = []

    def stop(error):
        errors.append(error)
        raise SystemExit(2)

    module = module_of(line)
    rest = words_of(line)[3 if line.startswith("python") else 2 :]
    if module == "launch.plan" and "--config" in rest:
        module = f"launch.{catalogue.launcher(rest[rest.index('--config') + 1])}"
    elif module.removeprefix("launch.") in command._COMMANDS:
        shown = ["show"] if line.startswith("python") else []
        name = module.removeprefix("launch.")
        return not_parsed(command._parser(name), [name, *shown, *rest])
    elif module == "launch.report":  # the workdir of a page may be here, of another version
        return not_parsed(report._parser(), rest)
    with contextlib.ExitStack() as patched:
        replace = mock.patch.object
        patched.enter_context(flags_of_links(module))
        patched.enter_context(replace(frame_program, "_stop", stop))
        if "--config" not in rest:  # its flags are parsed, and nothing is run
            patched.enter_context(replace(frame_program, "tell", lambda *_: None))
        else:
            # The plan is built. What it would compile and time is another test's.
            patched.enter_context(replace(models, "fresh", zeros))
            patched.enter_context(mock.patch.dict(trainers._PATTERNS, balls_in_bins=tiny.few_draws))
            patched.enter_context(mock.patch.dict(strategies.STRATEGIES, blt=one_buffer))
            patched.enter_context(replace(plans, "_here", lambda item: plans._Estimate()))
            patched.enter_context(replace(plans, "_elsewhere", lambda *_: plans._Estimate()))
            config = rest[rest.index("--config") + 1]
            rest += ["--dry_run", *filter(None, [FASTER.get(config)])]
        done = program.call([*program.PYTHON, "-m", module, *rest])
    # A config that reads a file fails while flags are parsed, where absl hides the type.
    is_absent = errors and (
        isinstance(errors[0], FileNotFoundError | ImportError)
        or "there is no file" in str(errors[0])
    )
    if is_absent and " is neither a file " not in str(errors[0]):
        return ""
    return "" if done.returncode == 0 else f"{line}: {errors} {done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_documented_commands_of_a_launcher_are_right(launcher):
    lines = {line for line in COMMANDS if module_of(line) == launcher}
    assert lines and not [said for line in sorted(lines) if (said := mistake(line))]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("launch.predict --config configs/predict/blobs.py --workdr w", "workdr"),
        ("launch.predict --config configs/predict/imdb.py --config.data.pth=x", "pth"),
        ("launch.predict --config configs/predict/blob.py", "predict/blob"),
        ("launch.predict --config configs/predict/blobs.py:near", "near"),
        ("launch.predict --config configs/predict/blobs.py --config.data.sed=1", "sed"),
        ("launch.predict --config configs/predict/blobs.py --config.runs=two", "two"),
        ("launch.predict --config configs/recalibration/digits.py", "launch.recalibrate"),
        ("launch.predict --config configs/predict/blobs.py --devices=local", "devices"),
        ("launch.split_client --config configs/split/two_parties.py --mode secret", "secret"),
        ("launch.audit --mechanisms=DP-SGD", "mechanisms"),
        ("jaxdp plan --config digits_dpsgd --target v5", "v5"),
        ("jaxdp plan --records 50000 --epsilons 3", "epsilons"),
        ("jaxdp ledger shows ledger.sqlite", "shows"),
    ],
)
def test_a_mistake_in_a_command_is_noticed(line, said):
    """The twins: a wrong flag, config, variant, field, value, launcher and choice."""
    assert said in mistake(line if line.startswith("jaxdp") else f"python -m {line}")


@pytest.mark.slow
def test_commands_about_a_table_take_the_table_that_a_page_writes(tmp_path, monkeypatch):
    """A dry run excuses files that are absent, so it sees no table which is too small."""
    page = (ROOT / "docs" / "howto" / "your_own_data.md").read_text()
    block = re.search(r'^with open\("patients.csv".*?(?=^```)', page, re.DOTALL | re.MULTILINE)[0]
    lines = [line for line in COMMANDS if "csv.py:columns.json" in line]
    assert len(lines) >= 2  # of this page and of the one about scalers
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(data, "from_csv", wraps=data.from_csv) as from_csv:
        exec(block, {"jaxdp": jaxdp})
    fields = ("label", "classes", "group")  # the command has them
    columns = {k: v for k, v in from_csv.call_args.kwargs.items() if k not in fields}
    Path("columns.json").write_text(json.dumps(columns))
    here = [re.sub(r"columns\.json|patients\.csv", rf"{tmp_path}/\g<0>", line) for line in lines]
    assert not [said for line in here if (said := mistake(line))]
