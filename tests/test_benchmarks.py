"""The gate against slower steps, and the table of all benchmarks."""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax
import pytest

from benchmarks import __main__ as runner
from benchmarks import device, device_kernels, evidence, hospitals, problems, suites, timing
from benchmarks.registry import BENCHMARKS, COMMANDS, RESULTS, ROOT, Benchmark

# The gate as `python -m` runs it, for each of several arguments. One process imports JAX for all of
# them.
GATES = """
import json, runpy, sys
ended = []
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        runpy.run_module("benchmarks.gate", run_name="__main__")
    except SystemExit as end:
        ended.append(end.code)
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def gates():
    """What the gate and its twin end with, in a process without the compiler options of the
    tests."""
    dropped = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [sys.executable, "-c", GATES, json.dumps([[], ["vmap"]])]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *printed, ended = result.stdout.splitlines()
    return printed, json.loads(ended)


@pytest.mark.slow
def test_steps_are_not_slower_than_their_limits(gates):
    printed, (status, _) = gates
    assert status == 0, (status, printed)


@pytest.mark.slow
def test_the_gate_notices_per_example_gradients(gates):
    _, (_, status) = gates
    assert re.fullmatch(r"dense clipped takes \d+.\d+ times its base, above 1\.6\.", str(status))


def test_every_benchmark_of_the_suite_has_rows_in_the_table():
    rows = suites.rows_of(suites.reports())
    for name in suites.LINES:
        mine = [row for row in rows if row["benchmark"] == name]
        assert mine, name
        assert all(0 < row["ratio"] < 1e5 for row in mine)
        assert json.loads(suites.path_of(name).read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm")  # of jax_privacy
def test_a_device_is_measured_and_a_case_that_fails_leaves_the_others(tmp_path, monkeypatch):
    """The case of a language model with LoRA at tiny shapes stands for all: they share their
    steps."""
    monkeypatch.setitem(problems.TINY_TEXT, "depth", 1)
    tiny = device.cases(tiny=True)

    def too_large():
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    chosen = {"too large": too_large, "lora": tiny["GPT-2 small, lora, bfloat16"]}
    monkeypatch.setattr(device, "cases", lambda tiny: chosen)
    monkeypatch.setattr(device, "torch_steps_of", lambda *_: {"torch": too_large})
    output = tmp_path / "device.json"
    report = device.main(
        [
            "--tiny",
            "--rounds",
            "1",
            "--cases",
            "lora,large",
            "--minutes",
            "5",
            "--output",
            str(output),
        ]
    )
    assert json.loads(output.read_text()).keys() == report.keys()
    assert report["cases"]["too large"]["error"] == "MemoryError: RESOURCE_EXHAUSTED: out of memory"
    steps = report["cases"]["lora"]["steps"]
    assert "out of memory" in steps.pop("torch")["error"]
    assert (
        set(steps) == {"plain", "clipped", "private", "jax_privacy"}
        and steps["plain"]["over_plain"] == 1
    )
    assert all(row["ms"] > 0 and row["memory_mb"] > 0 for row in steps.values())
    assert steps["clipped"]["kernels"] == []  # a CPU's trace has none
    late = device.measured({"plain": too_large}, deadline=0, rounds=1)
    assert "no time left" in late["steps"]["plain"]["error"]
    assert list(report["cases"]) == ["lora", "too large"]


KERNELS = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #7(Compute)"
    events { metadata_id: 1 duration_ps: 3000000000 stats { metadata_id: 1 str_value: "fusion.2" } }
    events { metadata_id: 3 duration_ps: 1000000000 stats { metadata_id: 1 str_value: "fusion.2" } }
    events { metadata_id: 2 duration_ps: 6000000000 }
  }
  lines { name: "Steps" events { metadata_id: 2 duration_ps: 9000000000 } }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion" } }
  event_metadata { key: 2 value { id: 2 name: "memset" } }
  event_metadata { key: 3 value { id: 3 name: "loop_fusion_12" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 7 } } }
"""
PROGRAM = """HloModule jit_f

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %fusion.2 = f32[2]{0} negate(%x), metadata={op_name="jit(f)/neg"}
}
"""


def test_the_kernels_of_a_trace_have_the_names_of_jax():
    trace = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(KERNELS)
    )
    rows = device_kernels.by_source(trace, PROGRAM, turns=2)
    found = [(row["source"], row["kernel"], row["ms"], row["launches"]) for row in rows]
    assert found == [("", "memset", 3.0, 0.5), ("jit(f)/neg", "loop_fusion", 2.0, 1.0)]
    assert [row["share"] for row in rows] == [0.6, 0.4]


def test_the_cases_of_a_device_are_those_of_its_page():
    names = set(device.cases(tiny=False))
    assert names == set(device.cases(tiny=True))
    assert [
        part in " ".join(names) for part in ("ViT-B/16", "wrn_16_4", "wrn_40_4", "lora", "full")
    ] == [True] * 5


@pytest.mark.slow
def test_fifty_hospitals_exchange_what_the_page_states(tmp_path):
    """Without Flower's engine, which needs Ray."""
    page = (ROOT / "docs" / "design" / "network.md").read_text()
    stated = json.loads((RESULTS / "hospitals.json").read_text())
    hospitals.write_records(tmp_path, 50)
    with contextlib.ExitStack() as opened:
        found = hospitals.calibrate(hospitals.InProcess(tmp_path, 50, opened), tmp_path)
    for name in (
        "hospitals",
        "questions",
        "bytes_to_a_hospital",
        "bytes_from_a_hospital",
        "epsilon",
    ):
        assert found[name] == stated[name], name
    for value in (
        stated[name]
        for name in ("bytes_to_a_hospital", "bytes_from_a_hospital", "seconds", "cpu_seconds")
    ):
        assert f"| {value:,} |" in page, value


def named_commands():
    """The benchmarks that pages, configs and docstrings run, with the flags on the same line."""
    files = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/**/*.py")]
    files += ROOT.glob("benchmarks/*.py")
    for path in files:
        for line in re.findall(r"python -m benchmarks (run [^`|\n]*)", path.read_text()):
            yield path.relative_to(ROOT).as_posix(), line


def test_the_table_has_every_benchmark_and_each_has_one_form(capsys):
    runner.main([])
    listed = capsys.readouterr().out
    scripts = {path.stem for path in ROOT.glob("benchmarks/bench_*.py")}
    modules = {benchmark.module for benchmark in BENCHMARKS.values()}
    assert scripts <= modules
    assert all(BENCHMARKS[script.removeprefix("bench_")].module == script for script in scripts)
    for name, benchmark in BENCHMARKS.items():
        assert re.search(rf"^  {name} +{re.escape(benchmark.measures)}", listed, re.MULTILINE)
        assert callable(benchmark.load().measure), name
        assert benchmark.place(update=True) == benchmark.output
        assert (ROOT / benchmark.output).exists(), "no committed report has this name"
        parser = timing.parser_of(benchmark)
        assert parser.get_default("output") is None and parser.prog.endswith(f" run {name}")
    assert all(command in listed for command in COMMANDS)


def test_a_reader_does_not_overwrite_what_pages_are_made_of(tmp_path, monkeypatch):
    module = types.SimpleNamespace(__doc__="toy", measure=lambda flags: {"number": 1})
    monkeypatch.setattr(Benchmark, "load", lambda self: module)
    monkeypatch.chdir(tmp_path)
    toy = Benchmark("toy", "nothing", "benchmarks/results/toy.json", with_machine=False)
    timing.run(toy, [])
    assert [path.name for path in tmp_path.iterdir()] == [".bench"]
    timing.run(toy, ["--update"])
    for path in (".bench/toy.json", toy.output):
        assert json.loads(pathlib.Path(path).read_text()) == {"number": 1}


def test_commands_name_a_benchmark_and_flags_that_it_has():
    commands = list(named_commands())
    assert len(commands) > 30
    for page, line in commands:
        name, *words = line.split()[1:]
        if name.startswith(("NAME", "<name>")):
            continue
        assert name in BENCHMARKS, (page, line)
        parser = timing.parser_of(BENCHMARKS[name])
        flags = [word for word in words if word.startswith("--")]
        unknown = [flag for flag in flags if flag not in parser.format_help()]
        assert not unknown, (page, line)


def test_a_benchmark_runs_by_its_name_and_an_unknown_one_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.bench_noise.MODELS", ())
    output = tmp_path / "noise.json"
    runner.main(["run", "noise", "--size", "16", "--rounds", "1", "--output", str(output)])
    report = json.loads(output.read_text())
    assert {"device", "jax", "jaxdp", "vector", "steps"} <= set(report)
    with pytest.raises(SystemExit, match=r"unknown benchmark 'nose'\. Choose one of: steps, "):
        runner.main(["run", "nose"])
    with pytest.raises(SystemExit, match="usage: python -m benchmarks"):
        runner.main(["steps"])


# --- Documented commands ------------------------------------------------------------------------


def commands():
    """Returns the commands of this folder's programs in the documentation, each once."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text().replace("\\\n", " ") for page in pages)
    return sorted(set(re.findall(r"python -m (benchmarks(?:\.evidence| run) [^`\n#]*)", text)))


def mistake(command):
    """Returns what is wrong with a command, "" if nothing is. It runs nothing."""
    module, *rest = shlex.split(command)
    if module == "benchmarks.evidence":
        pages = {one.page for one in evidence.EVIDENCE}
        return "" if pages.issuperset(rest) else f"{rest} is no page"
    name, *flags = rest[1:]
    if name not in BENCHMARKS:
        return f"there is no benchmark {name}"
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        timing.parser_of(BENCHMARKS[name]).parse_args(flags)
    return said.getvalue()


def test_documented_commands_of_benchmarks_parse():
    """The broken twins: a benchmark, a flag, a study and a page that do not exist."""
    assert len(commands()) > 20
    assert not {command: said for command in commands() if (said := mistake(command))}
    for twin in (
        "benchmarks run evidence_tat --update",
        "benchmarks run evidence_tta --updates",
        "benchmarks run evidence_tta --study cifar11",
        "benchmarks run evidence_split --update",
        "benchmarks.evidence results/ttta.md",
    ):
        assert mistake(twin)
