"""Estimates by compilers of machines that are not there, and programs that only a CPU could
compile."""

import functools
import importlib.util
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from benchmarks import compiled, compiled_cases, device, trust
from jaxdp import models, pretrain, recalibration, tta
from jaxdp.compilers import hlo, process, schedules
from jaxdp.compilers import targets as compiled_targets
from jaxdp.data import storage
from jaxdp.split import copies
from jaxdp.transforms import chacha, forms, noise
from tests import foreign_programs
from tests.finetune import test_methods as finetuning

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed, which compiles for TPU",
)

# A loop of 5 turns whose bound is an element of its tuple, inside of it a loop of 3 that its
# condition states. A loop whose condition reads what it computes. A conditional with a cheap and a
# dear branch. A Pallas kernel.
TPU = """HloModule jit_f, is_scheduled=true

%inner_body (p.1: (s32[])) -> (s32[]) {
  %p.1 = (s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %fusion.1 = s32[] fusion(%i.1), kind=kLoop, calls=%f, FROM(jit(f)/layer_1/dot), CYCLES(10)
  ROOT %t.1 = (s32[]) tuple(%fusion.1)
}

%inner_condition (p.2: (s32[])) -> pred[] {
  %p.2 = (s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %three = s32[]{:T(128)} constant(3)
  ROOT %less.2 = pred[] compare(%i.2, %three), direction=LT
}

%outer_body (p.3: (s32[], s32[])) -> (s32[], s32[]) {
  %p.3 = (s32[], s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%p.3), index=0
  %bound.3 = s32[] get-tuple-element(%p.3), index=1
  %zero.3 = s32[] constant(0)
  %start.3 = (s32[]) tuple(%zero.3)
  %while.3 = (s32[]) while(%start.3), condition=%inner_condition, body=%inner_body, FROM(jit(f)/inner)
  %fusion.3 = s32[] fusion(%i.3), kind=kLoop, calls=%f, FROM(jit(f)/layer_2/dot), CYCLES(100)
  ROOT %t.3 = (s32[], s32[]) tuple(%fusion.3, %bound.3)
}

%outer_condition (p.4: (s32[], s32[])) -> pred[] {
  %p.4 = (s32[], s32[]) parameter(0)
  %i.4 = s32[] get-tuple-element(%p.4), index=0
  %bound.4 = s32[] get-tuple-element(%p.4), index=1
  ROOT %less.4 = pred[] compare(%i.4, %bound.4), direction=LT
}

%data_body (p.5: (pred[])) -> (pred[]) {
  %p.5 = (pred[]) parameter(0)
  %go.5 = pred[] get-tuple-element(%p.5), index=0
  %fusion.5 = pred[] fusion(%go.5), kind=kLoop, calls=%f, FROM(jit(f)/zero), CYCLES(7)
  ROOT %t.5 = (pred[]) tuple(%fusion.5)
}

%data_condition (p.6: (pred[])) -> pred[] {
  %p.6 = (pred[]) parameter(0)
  ROOT %go.6 = pred[] get-tuple-element(%p.6), index=0
}

%cheap (p.7: f32[8]) -> f32[8] {
  %p.7 = f32[8] parameter(0)
  ROOT %fusion.7 = f32[8] fusion(%p.7), kind=kLoop, calls=%f, FROM(jit(f)/cheap), CYCLES(1)
}

%dear (p.8: f32[8]) -> f32[8] {
  %p.8 = f32[8] parameter(0)
  ROOT %fusion.8 = f32[8] fusion(%p.8), kind=kLoop, calls=%f, FROM(jit(f)/dear), CYCLES(1000)
}

ENTRY %main (x: f32[8], go: pred[]) -> f32[2048,128] {
  %x = f32[8]{0:T(128)} parameter(0)
  %go = pred[] parameter(1)
  %zero = s32[] constant(0)
  %five = s32[] constant(5)
  %copied = s32[] copy(%five)
  %start = (s32[], /*index=1*/s32[]) tuple(%zero, %copied)
  %while.1 = (s32[], s32[]) while(%start), condition=%outer_condition, body=%outer_body, FROM(jit(f)/outer)
  %start.2 = (pred[]) tuple(%go)
  %while.2 = (pred[]) while(%start.2), condition=%data_condition, body=%data_body, FROM(jit(f)/zeroing)
  %which = f32[8] conditional(%go, %x, %x), true_computation=%dear, false_computation=%cheap
  %buffer = f32[8] custom-call(), custom_call_target="AllocateBuffer"
  ROOT %kernel.1 = f32[2048,128] custom-call(%x), custom_call_target="tpu_custom_call", FROM(jit(f)/pallas_call)
}
"""  # noqa: E501


def parsed(text):
    """Returns the program of a text with short forms of attributes."""
    return hlo.Program.parsed(with_forms(text))


def with_forms(text):
    """Returns a text whose short forms of attributes are written out."""
    forms = {
        r"CYCLES\((\d+)\)": r'backend_config={"window_config":{"estimated_cycles":"\1"}}',
        r"FROM\((.*?)\)(?=$|, )": r'metadata={op_name="\1"}',
        r"CONTRACTS\((\d)\)": r'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["\1"]}}',  # noqa: E501
    }
    for short, long in forms.items():
        text = re.sub(short, long, text, flags=re.MULTILINE)
    return text


def estimated(text=TPU, **options):
    return compiled_targets.of_tpu(parsed(text), compiled_targets.TARGETS["v5e"], **options)


def test_an_open_loop_counts_as_often_as_it_is_known_to_turn():
    """The loop over the microbatches of jax_privacy counts their number."""
    loop_of_data = 7
    turns = hlo.Assumed(open_turns=4)
    assert estimated(assumed=turns)["cycles"] - estimated()["cycles"] == 3 * loop_of_data
    case = compiled_cases.cases(tiny=True)["MLP, 256"]()
    if "jax_privacy" in case:
        # Two examples, one at a time.
        assert case["jax_privacy"]().assumed == hlo.Assumed(open_turns=2)
    assert case["clipped"]().assumed == hlo.ASSUMED


def test_the_branch_that_runs_is_the_dearest_or_is_known_to_be_the_cheapest():
    """A plain step of adaptation has a dear branch for losses that are not finite."""
    cheapest = hlo.Assumed(cheapest_branches=True)
    assert estimated()["cycles"] - estimated(assumed=cheapest)["cycles"] == 1000 - 1
    case = compiled_cases.cases(tiny=True)["tent on ViT-S/16, float32, 64"]()
    assert case["plain"]().assumed == cheapest and case["private"]().assumed == hlo.ASSUMED


def test_cycles_count_loops_branches_and_kernels():
    found = estimated()
    assert found["cycles"] == 5 * (3 * 10 + 100) + 7 + 1000
    assert {loop["source"]: loop["turns"] for loop in found["loops"]} == {
        "jit(f)/outer": 5,
        "jit(f)/inner": 3,
        "jit(f)/zeroing": None,
    }
    moved = 4 * (2048 * 128 + 8) / compiled_targets.TARGETS["v5e"].bandwidth
    assert found["kernel_cycles"] == pytest.approx(moved) and len(found["pallas"]) == 1
    assert found["total"] == found["cycles"] + found["kernel_cycles"]
    assert (
        found["without_estimate"]
        == {"AllocateBuffer": 1, "compare": 8, "copy": 1} | found["without_estimate"]
    )
    assert found["costliest"][0]["source"] == "jit(f)/dear"
    assert found["costliest"][1] == {
        "source": "jit(f)/layer_#/dot",  # both layers
        "amount": 650.0,
        "share": pytest.approx(650 / found["total"]),
    }


THREE = "%three = s32[]{:T(128)} constant"


@pytest.mark.parametrize(
    ("old", "new", "cycles"),
    [
        ("%five = s32[] constant(5)", "%five = s32[] constant(2)", 2 * 130 + 1007),
        (f"{THREE}(3)", f"{THREE}(1)", 5 * 110 + 1007),
        ("tuple(%fusion.3, %bound.3)", "tuple(%fusion.3, %i.3)", 5 * 130 + 1007),  # no turn changes
        ("tuple(%zero, %copied)", "tuple(%zero, %other)", 130 + 1007),  # the bound is not known
        ("true_computation=%dear", "true_computation=%cheap", 650 + 8),
    ],
)
def test_cycles_depend_on_bounds_and_branches(old, new, cycles):
    assert old in TPU
    assert estimated(TPU.replace(old, new))["cycles"] == cycles


def test_a_bound_that_an_outer_loop_passes_on_is_known_inside():
    """The inner loop's bound is an element of the outer loop's tuple, which no turn changes."""
    text = TPU.replace(
        "%start.3 = (s32[]) tuple(%zero.3)", "%start.3 = (s32[], s32[]) tuple(%zero.3, %bound.3)"
    )
    text = text.replace("condition=%inner_condition", "condition=%outer_condition")
    assert estimated(text)["cycles"] == 5 * (5 * 10 + 100) + 1007
    changed = text.replace("tuple(%fusion.3, %bound.3)", "tuple(%fusion.3, %fusion.3)")
    assert estimated(changed)["cycles"] == 5 * (10 + 100) + 1007


SCHEDULE = """
LB: loop body
     0   :  { %3 = vsyncpa [#allocation4], 0  } /* entry bundle: %kernel.1 = custom-call(%x) */
   0x1   :  { %s1 = smov.u32 0 }
   0x2 LB: > { %s2 = sphi %s1, %s3 }
   0x3   : > { %s4 = smov.u32 0 }
   0x4 LB: >> { %v1 = vadd.f32 %v2, %v3 }
   0x5   : >> { %v1 = vadd.f32 %v2, %v3 }
   0x6   : >> { %p1 = scmp.ge.s32.totalorder %s5, 16 /* loop exit test */ }
   0x7   : >> { %s6 = sbr.rel (!%p1) target = $region4 }
   0x8   : > { %p2 = scmp.ge.s32.totalorder (%p9), %s3, 10 /* loop exit test */ }
   0x9   : > { %s7 = sbr.rel (!%p2) target = $region2 }
   0xa LB: > { %v1 = vadd.f32 %v2, %v3 }
   0xb   : > { %p3 = scmp.ge.s32.totalorder %s3, 4 /* loop exit test */  ;;  %s8 = sbr.rel (%p9) target = $region9 }
   0xc   :  {}
   0xd   : > { %s9 = sbr.rel (!%p3) target = $regiona }
   0xe   :  { %4 = vsyncpa [#allocation4], 1 }
"""  # noqa: E501


def test_bundles_of_loops_count_as_often_as_they_turn(tmp_path):
    assert schedules.bundles(SCHEDULE) == 2 + 10 * (4 + 16 * 4) + 4 * 4 + 1 == 699
    unknown = SCHEDULE.replace(", 16 /*", ", %s9 /*")
    assert schedules.bundles(unknown) == 2 + 10 * (4 + 4) + 4 * 4 + 1
    (tmp_path / "1-kernel.1-01-final_bundles.txt").write_text(SCHEDULE)
    (tmp_path / "1-kernel.1-00-schedule-analysis_final_bundles.txt").write_text("no schedule")
    assert schedules.read(str(tmp_path)) == 699
    found = compiled_targets.of_tpu(
        parsed(TPU), compiled_targets.TARGETS["v5e"], {"kernel.1": 699.0}
    )
    (kernel,) = found["pallas"]
    # bytes take longer
    assert kernel["bundles"] == 699 and kernel["cycles"] == kernel["cycles_of_bytes"] > 699


def test_equal_kernels_share_their_schedule(monkeypatch):
    """One of them is compiled for it."""
    body = 'backend_config={"custom_call_config":{"body":"SAME"}}'
    kernel = re.search("  ROOT %kernel.1 = .*", TPU)[0]
    one, other = (f"{kernel}, {text}" for text in (body, body.replace("SAME", "OTHER")))
    more = [f"  %kernel.{n} = " + text.partition(" = ")[2] for n, text in ((2, one), (3, other))]
    text = TPU.replace(kernel, "\n".join([*more, one]))
    asked = []

    def answer(folder, question):
        asked.extend(question["kernels"])
        return [699.0, None]

    monkeypatch.setattr(schedules, "_in_process", answer)
    text = with_forms(text)
    bundles = schedules.of_kernels("v5e", text)
    operands = [["f32", [8]]]
    results = [["f32", [2048, 128]]]
    for kernel, body in zip(asked, ("SAME", "OTHER"), strict=True):
        assert json.loads(json.dumps(kernel)) == {
            "operands": operands,
            "results": results,
            "several": False,
            "config": {"custom_call_config": {"body": body}},
        }
    assert bundles == {"SAME": 699.0}
    program = hlo.Program.parsed(text)
    found = compiled_targets.of_tpu(program, compiled_targets.TARGETS["v5e"], bundles)
    assert [kernel["bundles"] for kernel in found["pallas"]] == [699, None, 699]
    assert schedules.of_kernels("v5e", text.replace("tpu_custom_call", "other")) == {}


GPU = """HloModule jit_f

%fused (a: f32[100,64], i: s32[], b: f32[64,8]) -> f32[1,8] {
  %a = f32[100,64] parameter(0)
  %i = s32[] parameter(1)
  %b = f32[64,8] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,64] dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,64}
  ROOT %dot = f32[1,8] dot(%row, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[100,64], i: s32[], b: f32[64,8], x: bf16[32,64], w: bf16[64,16]) -> f32[1,8] {
  %a.1 = f32[100,64]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %b.1 = f32[64,8]{1,0} parameter(2)
  %x.1 = bf16[32,64]{1,0} parameter(3)
  %w.1 = bf16[64,16]{1,0} parameter(4)
  %gemm = (bf16[32,16]{1,0}, s8[4194304]{0}) custom-call(%x.1, %w.1), custom_call_target="__cublas$gemm", CONTRACTS(1)
  ROOT %fusion = f32[1,8]{1,0} fusion(%a.1, %i.1, %b.1), kind=kCustom, calls=%fused, FROM(jit(f)/dot)
}
"""  # noqa: E501


def test_bytes_and_operations_of_a_gpus_kernels():
    """A slice of an array is not the array, and scratch memory of a library is not read."""
    program = parsed(GPU)
    found = compiled_targets.of_gpu(program, compiled_targets.TARGETS["h100"])
    assert found["bytes"] == 4 * (64 + 1 + 64 * 8 + 8) + 2 * (32 * 64 + 64 * 16 + 32 * 16)
    assert found["flops"] == 2 * 8 * 64 + 2 * 32 * 16 * 64
    assert (found["kernels"], found["library_calls"], found["loops"]) == (2, 1, [])
    steps, _ = program.steps(lambda instruction: 1.0)
    kinds = {step.instruction.name: hlo.work(program, step).flops for step in steps}
    assert kinds["gemm"] == {"bf16": 65536.0} and kinds["fusion"] == {"f32": 1024.0}


CONVOLUTION = (
    "HloModule jit_f\n\nENTRY %main (x: f32[8,16,16,3], y: f32[8,16,16,5]) -> f32[3,3,3,5] {{\n"
    "  %x = {x} parameter(0)\n  %y = {y} parameter(1)\n"
    "  ROOT %c = ({out}, u8[128]) custom-call(%x, %y), window={{size=3x3}}, "
    "dim_labels=b01f_01io->b01f, "
    'custom_call_target="__cudnn$conv{kind}"\n}}\n'
)


@pytest.mark.parametrize(
    ("kind", "x", "y", "out"),
    [
        ("Forward", "f32[8,16,16,3]", "f32[3,3,3,5]", "f32[8,16,16,5]"),
        ("BackwardInput", "f32[8,16,16,5]", "f32[3,3,3,5]", "f32[8,16,16,3]"),
        ("BackwardFilter", "f32[8,16,16,3]", "f32[8,16,16,5]", "f32[3,3,3,5]"),
    ],
)
def test_operations_of_a_librarys_convolution(kind, x, y, out):
    program = hlo.Program.parsed(CONVOLUTION.format(kind=kind, x=x, y=y, out=out))
    found = compiled_targets.of_gpu(program, compiled_targets.TARGETS["h100"])
    assert found["flops"] == 2 * 8 * 16 * 16 * 5 * 3 * 3 * 3


# --- Reports ---


def row(total, *, error=None):
    sizes = {"temp": 1e6 * total, "output": 0, "argument": 5, "alias": 0}
    amounts = {"total": total, "cycles": total, "kernel_cycles": 0.0}
    return (
        {"error": error}
        if error
        else amounts | {"memory": sizes, "compile_s": 2.0, "costliest": []}
    )


def test_ratios_are_over_plain_and_whole_steps_are_sums():
    steps = {
        "plain": row(10.0),
        "clipped": row(20.0),
        "update": row(1.0),
        "private update": row(4.0),
        "private update of 4 bands": row(6.0),
    }
    found = compiled.with_ratios(steps | {"jax_privacy": row(0, error="out of memory")})
    assert (
        found["clipped"]["total_over_plain"] == 2.0
        and found["private update"]["total_over_plain"] == 4.0
    )
    assert found["private step"]["total"] == 24.0
    assert found["private step"]["total_over_plain"] == pytest.approx(24 / 11)
    assert found["private update of 4 bands"]["total_over_plain"] == 6.0
    assert found["private step of 4 bands"]["total_over_plain"] == pytest.approx(26 / 11)
    assert "private step of 16 bands" not in found
    assert found["private step"]["memory_mb"] == 20.0 and found["plain step"]["memory_mb"] == 10.0
    assert found["jax_privacy"] == {"error": "out of memory"}
    rows = compiled.table(
        {"target": "v5e", "cases": {"a case": steps | {"jax_privacy": {"error": "x"}}}}
    )
    shown = {row["step"] for row in rows}
    assert "private step" in shown and "jax_privacy" not in shown


def test_cases_are_those_of_the_issue_and_tiny_ones_have_their_names():
    names = list(compiled_cases.cases())
    assert names == list(compiled_cases.cases(tiny=True))
    parts = (
        "ViT-B/16",
        "GPT-2 small, full",
        "GPT-2 small, LoRA",
        "135 M",
        "1.1 B",
        "WRN-16-4",
        "ResNet-20",
        "CNN",
    )
    parts += (
        "ResNet-50-GN",
        "MLP",
        "tent on",
        "sar on",
        "eata on",
        "deyo on",
        "ConvNeXt-T",
        "20 distances",
        "noise",
    )
    assert all(any(part in name for name in names) for part in parts)


def test_a_case_that_no_name_has_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled_targets, "require", lambda _: None)
    monkeypatch.setattr(compiled_targets, "version", lambda _: "none")
    with pytest.raises(SystemExit, match="--cases=of no case names none of: "):
        compiled.main(
            ["--target", "v5e", "--cases", "of no case", "--output", str(tmp_path / "x.json")]
        )


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_a_missing_compiler_is_named_with_its_installation(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ImportError, match=r"is not installed, .* the extra compilers: pip install "
    ):
        compiled_targets.environment(name)


@needs_libtpu
@pytest.mark.slow
def test_the_smallest_case_is_compiled_for_a_tpu_and_an_error_is_a_row(tmp_path, monkeypatch):
    output = tmp_path / "report.json"
    given = [
        "--target",
        "v5e",
        "--tiny",
        "--cases",
        "MLP",
        "--steps",
        "plain,clipped",
        "--output",
        str(output),
    ]
    report = compiled.main(given)
    assert (
        json.loads(output.read_text()) == report
        and report["what"] == "the compiler's estimate, not a time"
    )
    steps = report["cases"]["MLP, 256"]
    assert (
        steps["clipped"]["total"] > steps["plain"]["total"] > 0 and steps["plain"]["operations"] > 0
    )
    assert compiled.main(given) == report  # nothing is compiled again
    build = compiled_cases.cases(tiny=True)["MLP, 256"]()["plain"]
    late = compiled.compiled("v5e", "plain", build, seconds=0.1)
    assert "it was not compiled in 0.1 s" in late["error"]
    assert_loops_count_as_assumed()


def assert_loops_count_as_assumed():
    """A loop whose turns depend on data counts as often as is assumed."""

    def looped(x, turns):
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.sin(y @ y), x)

    args = (jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    once = process.estimate("v5e", looped, *args).details["total"]
    often = process.estimate("v5e", looped, *args, assumed=hlo.Assumed(open_turns=9))
    assert often.details["total"] > 3 * once


def test_a_step_that_cannot_be_built_is_a_row_with_its_error():
    def build():
        raise KeyError("no step")

    row = compiled.compiled("v5e", "plain", build, seconds=60)
    assert row == {"error": "KeyError: 'no step'"}


# More than the memory of the chip holds, and half of the last step of the kernel.
NORMALS = 2**26 + 2**16
PADDED = 2**24
# Runs where no other test has started JAX for a CPU with options that a TPU's compiler does not
# know.
NOISE = """
import sys
import jax, jax.numpy as jnp
from benchmarks import compiled_cases
from jaxdp.compilers import targets as compiled_targets
from jaxdp.transforms import noise

normals, padded = (
    compiled_cases.drawn(noise.gaussian, int(size))["private"]() for size in sys.argv[1:]
)

def in_pairs(key):  # an axis of two takes the room of 128 lanes
    pairs = padded.function(key).reshape(-1, 2)
    return jax.lax.scan(lambda total, pair: (total + pair, total), jnp.zeros(2), pairs)[1]

def memory(function):
    found = compiled_targets.compile_for("v5e", function, normals.args)[0].memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes

print(memory(normals.function), memory(in_pairs))
"""


@needs_libtpu
@pytest.mark.slow
def test_noise_on_a_tpu_takes_no_memory_beside_its_result():
    environment = compiled_targets.environment("v5e")
    ended = subprocess.run(
        [sys.executable, "-c", NOISE, str(NORMALS), str(PADDED)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    taken, padded = map(int, ended.stdout.split()[-2:])
    assert 4 * NORMALS <= taken <= 1.01 * 4 * NORMALS
    assert padded > 2 * 4 * PADDED


# --- Lowering for every platform, which needs no compiler ---

PLATFORMS = ("tpu", "cuda")
KEY = noise.stream(bytes(16), "test")


def traced(function, *args):
    return (function if hasattr(function, "trace") else jax.jit(function)).trace(*args)


def lowered(function, *args):
    """Lowers a function for each platform from one trace."""
    program = traced(function, *args)
    return {name: program.lower(lowering_platforms=(name,)).as_text() for name in PLATFORMS}


def lowered_together(function, *args):
    """Lowers a function to one program for both platforms, which takes half the time of two."""
    return {"both": traced(function, *args).lower(lowering_platforms=PLATFORMS).as_text()}


def lowered_for(platform, function, *args):
    """Lowers a function for one platform, and traces its form for that platform only."""
    with forms.traced_for(platform):
        program = traced(function, *args)
        return {platform: program.lower(lowering_platforms=(platform,)).as_text()}


def only_on_a_cpu(texts):
    """Returns custom calls that no accelerator has."""
    calls = {name: set(re.findall(r"custom_call @([\w.$]+)", text)) for name, text in texts.items()}
    cpu = {
        call
        for found in calls.values()
        for call in found
        if re.search(r"lapack|ducc|blas_|host|cpu", call)
    }
    return cpu


def stage_programs():
    """Returns the programs of every stage by name, as functions that return (function,
    arguments)."""
    found = {}
    for case in (
        "noise of 86 M values",
        "Laplace noise of 170 k values",
        "MLP, 256",
        "certificates of 20 distances",
    ):
        made = functools.cache(compiled_cases.cases(tiny=True)[case])
        steps = {
            "MLP, 256": ("clipped", "private update", "private update of 4 bands"),
            "certificates of 20 distances": ("first step", "later step"),
        }
        for step in steps.get(case, ("private",)):
            found[f"{case}, {step}"] = lambda made=made, step=step: made()[step]()[:2]
    for name in foreign_programs.PROGRAMS:
        found[f"clipping {name}"] = functools.partial(clipped_program, name)
    for name in finetuning.METHODS:
        found[f"finetune {name}"] = functools.partial(finetune_programs, name)
    for name in pretrain.METHODS:
        found[f"pretrain {name}"] = functools.partial(pretrain_program, name)
    for name in tta.METHODS:
        found[f"tta {name}"] = functools.partial(adaptation_program, name)
    for name in recalibration.METHODS:
        found[f"recalibration {name}"] = functools.partial(recalibration_program, name)
    images = jnp.zeros((4, 5, 3))  # tokens of images
    for draw, kind in ((noise.discrete_laplace, jnp.int32), (noise.cauchy, jnp.float32)):
        found[f"noise {draw.__name__}"] = functools.partial(drawn_program, draw, kind)
    found["split copies"] = lambda: (lambda key, x: copies._noisy(key, x, 1.0), (KEY, images))
    found["split neighbours"] = lambda: (copies.retrieve_neighbors, (images,))
    found["intervals"] = interval_program
    return found


def drawn_program(draw, kind):
    return lambda key: draw(key, jnp.zeros(9, kind), 3.0), (KEY,)


@functools.cache
def small_model():
    """Returns a model and parameters, zeros."""
    model = models.create("mlp", num_classes=4, hidden=(6,))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]
    return model, storage.zeros_on_device(shapes)


def interval_program():
    model, params = small_model()
    box = jax.tree.map(lambda x: jaxdp.Interval(x - 0.01, x + 0.01), params)
    return jaxdp.interval(lambda p, x: model.apply({"params": p}, x)), (
        box,
        jnp.zeros((2, 8, 8, 1)),
    )


def clipped_program(name):
    entry = foreign_programs.PROGRAMS[name]
    made = entry.build(*entry.small)
    is_array = lambda x: isinstance(x, foreign_programs.Array)  # noqa: E731
    params = jax.tree.map(lambda a: a.abstract, made.params, is_leaf=is_array)
    batch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.abstract.dtype),
        made.example,
        is_leaf=is_array,
    )
    return lambda p, b: jaxdp.clipped_grad(made.loss, clip_norm=1.0)(p, b).grads, (params, batch)


def finetune_programs(name):
    trainer = finetuning.trainer_of(name, engine="auto")
    return list(trainer.programs(finetuning.keyed(trainer), finetuning.source_of()).values())


def pretrain_program(name):
    model, params = small_model()

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["image"])
        return jax.vmap(jaxdp.losses.softmax_cross_entropy)(logits, batch["label"]).mean()

    trainer = pretrain.METHODS[name](loss, optax.sgd(0.1))
    batch = {"image": np.zeros((8, 8, 8, 1), np.float32), "label": np.zeros(8, np.int32)}
    return lambda state, batch: trainer.step(state, batch, batch)[0].params, (
        trainer.init(params),
        batch,
    )


def adaptation_program(name):
    sizes = {**compiled_cases.TINY_VIT, "depth": 1}
    model = models.create("vit_tiny", num_classes=4, patch_size=4, **sizes)
    method = (
        tta.COME(tta.Tent(), 4)
        if name == "COME"
        else tta.METHODS[name]()
        if name == "Tent"
        else None
    )
    method = method or tta.METHODS[name](4)
    return compiled_cases.adaptation_of(model, method, 2, 8, private=True)[:2]


def recalibration_program(name):
    return compiled_cases.recalibrated(recalibration.METHODS[name](), 8, 3)["private"]()[:2]


STAGE_PROGRAMS = stage_programs()


def one_platform():
    """Returns the programs that are lowered for one platform, with the platform.

    A TPU and a GPU have other code for each kind of layer, and for every convolution. Programs of
    one kind stand together here and in `foreign_programs`, so each kind is lowered for both."""
    kinds = ("clipping", "tta", "certificates")
    names = [name for name in STAGE_PROGRAMS if name.startswith(kinds)]
    names = [name for name in names if "convolution" not in name]
    return {name: PLATFORMS[k % 2] for k, name in enumerate(names)}


ONE_PLATFORM = one_platform()


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGE_PROGRAMS)
def test_every_program_lowers_for_tpu_and_gpu(name):
    made = STAGE_PROGRAMS[name]()
    with jax.numpy_rank_promotion("allow"):  # the programs are as others write them
        for function, args in made if isinstance(made, list) else [made]:
            if name in ONE_PLATFORM:
                texts = lowered_for(ONE_PLATFORM[name], function, *args)
            else:
                texts = lowered_together(function, *args)
            assert not only_on_a_cpu(texts)


@pytest.mark.parametrize(
    "lower", [lowered, lowered_together, *(functools.partial(lowered_for, x) for x in PLATFORMS)]
)
def test_a_program_that_only_a_cpu_has_is_caught(lower):
    """The twins: a custom call of LAPACK by its name, and one whose lowering exists for a CPU
    only."""
    with pytest.raises((NotImplementedError, ValueError), match=r"(?i)cpu|platform|lowering"):
        lower(lambda x: jax.lax.linalg.schur(x)[0], np.eye(3, dtype=np.float32))
    call = jax.ffi.ffi_call("lapack_sgetrf_ffi", jax.ShapeDtypeStruct((3, 3), jnp.float32))
    assert only_on_a_cpu(lower(call, np.eye(3, dtype=np.float32))) == {"lapack_sgetrf_ffi"}


def test_one_process_lowers_the_noise_of_each_platform():
    """Fails if the form is that of this process."""
    key = jax.ShapeDtypeStruct((8,), jnp.uint32)

    def draw(words):
        return noise.gaussian(
            jax.random.wrap_key_data(words, impl=chacha.CHACHA12), jnp.zeros(9), 1.0
        )

    texts = lowered(draw, key)
    assert [name for name, text in texts.items() if "tpu_custom_call" in text] == ["tpu"]


# --- How far to trust an estimate ---


def ranks(values):
    """Returns ranks from 1, equal values sharing the mean of theirs."""
    values = np.asarray(values, np.float64)
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    return below + (equal + 1) / 2


def test_rank_correlation_is_that_of_the_ranks():
    rng = np.random.default_rng(0)
    assert trust.rank_correlation([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == 1.0
    assert trust.rank_correlation([1.0, 2.0, 30.0], [7.0, 6.0, 5.0]) == -1.0
    for size in (4, 9):
        times, estimates = rng.integers(6, size=(2, size)).astype(float)  # with ties
        expected = np.corrcoef(ranks(times), ranks(estimates))[0, 1]
        assert trust.rank_correlation(list(times), list(estimates)) == pytest.approx(expected)
    assert np.isnan(trust.rank_correlation([1.0, 2.0], [1.0, 2.0]))
    assert np.isnan(trust.rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="times and estimates must have one length, got 3 and 2"):
        trust.rank_correlation([1.0, 2.0, 3.0], [1.0, 2.0])


def test_times_stand_beside_the_estimates_of_the_same_steps(tmp_path):
    timed = {
        "plain": {"ms": 160.0},
        "clipped": {"ms": 240.0},
        "private": {"error": "out of memory"},
    }
    timed["jax_privacy"] = {"ms": 320.0}
    report = {
        "device": "a card",
        "cases": {"GPT-2 small, full, bfloat16": {"examples": 16, "steps": timed}},
    }
    report["cases"]["Tent, base ViT"] = {"examples": 64, "steps": {"plain": {"ms": 64.0}}}
    report["cases"]["another case"] = {"examples": 1, "steps": {"plain": {"ms": 1.0}}}
    steps = {
        "plain": row(70.0),
        "update": row(10.0),
        "clipped": row(200.0),
        "jax_privacy": row(90.0),
    }
    estimates = {"GPT-2 small, full, bfloat16, 8 x 512": compiled.with_ratios(steps)}
    path = tmp_path / "device.json"
    path.write_text(json.dumps(report))
    found = trust.pairs(report["cases"], estimates)
    assert [(of["step"], of["ms"], of["estimate"]) for of in found] == [
        ("plain", 10.0, 10.0),  # 70 and the update, for eight texts
        ("clipped", 15.0, 25.0),
        ("jax_privacy", 20.0, 11.25),
    ]
    assert found[1]["ms over plain"] == 1.5 and found[1]["estimate over plain"] == 2.5
    agree = trust.correlations(found)
    assert (
        agree["pairs"] == 3
        and agree["an example"] == pytest.approx(0.5)
        and np.isnan(agree["over plain"])
    )
    text = trust.text(str(path), estimates)
    assert (
        "Times on a card" in text
        and "rank correlation of times and estimates: 0.50 over 3 steps" in text
    )
    assert "over the plain step: not defined over 2." in text
    assert trust.text(str(path), {}).endswith("has no step that is estimated.")


def test_the_cases_that_are_compared_exist():
    known = {*device.cases(tiny=True), "Tent, base ViT"}
    assert {*trust.CASES} <= known
    assert {case.name for case in trust.CASES.values()} <= {*compiled_cases.cases()}
