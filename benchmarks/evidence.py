"""Writes the tables and pictures of pages from committed JSON files.

    python -m benchmarks.evidence                 # all pages
    python -m benchmarks.evidence results/tta.md  # one page

The other scripts of this folder measure and write the JSON files. A table stands between the lines
`<!-- table: NAME -->` and `<!-- end -->` of a page below docs. `tests/test_evidence.py` compares.
"""

import argparse
import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks import (
    accountant,
    agt_claims,
    bench_certificates,
    bench_certified_steps,
    bench_clipping,
    bench_estimate,
    bench_intervals,
    bench_noise,
    bench_reading,
    bench_scale,
    bench_start,
    bench_steps,
    bench_training,
    clip_parts,
    compiled,
    correlated,
    correlated_streams,
    demo_ranges,
    device,
    dpadapter_theory,
    evidence_agt,
    evidence_dpadapter,
    evidence_poisoning,
    evidence_recalibration,
    evidence_split,
    evidence_tta,
    exact_noise,
    finetune_methods,
    label_dp,
    membership,
    owners,
    participation,
    recalibration_sweeps,
    sla_clip,
    split_appendix,
    split_backends,
    split_costs,
    split_private,
    suites,
    timing,
    tuning,
)
from jaxdp.report import format_table
from launch import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PLACE = r"(?<=<!-- table: {} -->\n).*?(?=<!-- end -->)"


class Evidence(NamedTuple):
    """Tables by name, and pictures by file name, of JSON files. The functions take the content of
    each file."""

    page: str
    files: tuple[str, ...]
    tables: Callable[..., Mapping[str, str]]
    pictures: Mapping[str, Callable[..., None]] = {}  # the last argument is the path of the picture


def curve(found: Mapping[str, Any]) -> str:
    """Returns accuracies over epsilon, a row for each set of private images."""
    epsilons = sorted(
        {point["epsilon"] for one in found["runs"].values() for point in one["points"]}
    )
    header = ["private images", "runs", *(f"epsilon {e:g}" for e in epsilons), "no privacy"]
    lines = []
    for name, run in found["runs"].items():
        accuracies = {}
        for point in run["points"]:
            accuracy = results.percent(point["accuracy"], point["deviation"])
            accuracies[point["epsilon"]] = accuracy
        plain = run["without_privacy"]
        cells = [f"{run['records']} of {name.removesuffix('_full')}", str(run["runs"])]
        cells += [accuracies.get(epsilon, "") for epsilon in epsilons]
        cells.append("" if plain is None else results.percent(plain))
        lines.append(cells)
    return timing.page_table(header, lines)


EVIDENCE = [
    Evidence(
        "results/scattering.md",
        ("finetune_scattering.json",),
        lambda found: {"curve": curve(found)},
    ),
    Evidence(
        "results/public_checkpoint.md",
        ("finetune_squeezenet.json",),
        lambda found: {"curve": curve(found)},
    ),
    Evidence(
        "results/public_checkpoint.md",
        ("finetune_methods.json",),
        lambda found: {"methods": finetune_methods.table(found["rows"])},
    ),
    Evidence("results/accountant.md", ("accountant.json",), accountant.tables),
    Evidence("results/clip_parts.md", ("clip_parts.json",), clip_parts.tables),
    Evidence("results/correlated.md", ("correlated.json",), correlated.tables),
    Evidence("results/participation.md", ("participation.json",), participation.tables),
    Evidence("results/correlated.md", ("correlated_streams.json",), correlated_streams.tables),
    Evidence("results/exact_noise.md", ("exact_noise.json",), exact_noise.tables),
    Evidence("results/label_dp.md", ("label_dp.json",), label_dp.tables),
    Evidence("results/sla_clip.md", ("sla_clip.json",), sla_clip.tables),
    Evidence("results/owners.md", ("owners.json",), owners.tables),
    Evidence("results/tuning.md", ("tuning.json",), tuning.tables),
    Evidence(
        "results/membership.md",
        ("membership.json",),
        lambda found: {
            "membership": membership.table(found["rows"]),
            "lira": membership.lira_table(found["rows"]),
        },
        {"membership.png": membership.draw},
    ),
    Evidence(
        "results/split_adaptation.md",
        ("split_private.json",),
        lambda found: {"private": split_private.table(found)},
        {"split_private.png": split_private.draw},
    ),
    Evidence(
        "results/split_adaptation.md",
        ("split_costs.json",),
        lambda found: {"costs": split_costs.table(found)},
    ),
    Evidence(
        "results/split_adaptation.md",
        ("split_earlier.json", "split_paper.json"),
        evidence_split.earlier_tables,
    ),
    Evidence(
        "results/split_adaptation.md",
        ("split_backends.json", "split_paper.json"),
        split_backends.tables,
    ),
    Evidence(
        "results/split_adaptation.md",
        ("split_cifar100.json", "split_paper.json"),
        evidence_split.tables,
        {
            "split_noise.png": evidence_split.draw,
            "split_hilbert.png": evidence_split.draw_hilbert,
        },
    ),
    Evidence(
        "results/split_adaptation.md",
        ("split_appendix.json", "split_paper.json"),
        split_appendix.tables,
    ),
    Evidence(
        "results/tta.md",
        ("evidence_tta.json",),
        evidence_tta.tables,
        {"tta.png": evidence_tta.draw},
    ),
    Evidence(
        "results/tta.md",
        ("tta_paper.json", "evidence_tta.json"),
        evidence_tta.beside,
    ),
    Evidence(
        "results/tta.md",
        ("finetune_scattering.json", "finetune_squeezenet.json", "evidence_tta.json"),
        evidence_tta.cost_tables,
        {"tta_costs.png": evidence_tta.draw_costs},
    ),
    Evidence(
        "results/agt.md",
        ("evidence_agt.json",),
        evidence_agt.tables,
        {"agt.png": evidence_agt.draw},
    ),
    Evidence("results/agt.md", ("agt_claims.json",), agt_claims.tables),
    Evidence(
        "results/agt.md",
        ("agt_paper.json",),
        lambda paper: {"paper": format_table(paper["table"], style="markdown")},
    ),
    Evidence(
        "results/agt.md",
        ("certificates_cpu.json",),
        lambda found: {"certificates": bench_certificates.table(found)},
    ),
    Evidence("results/agt.md", ("evidence_poisoning.json",), evidence_poisoning.tables),
    Evidence(
        "results/recalibration.md",
        ("evidence_recalibration.json", "recalibration_network_b.json"),
        evidence_recalibration.tables,
        {
            "recalibration.png": functools.partial(evidence_recalibration.draw, "resnet20"),
            "recalibration_resnet56.png": functools.partial(
                evidence_recalibration.draw, "resnet56"
            ),
        },
    ),
    Evidence(
        "results/dpadapter.md",
        ("dpadapter_usps.json", "dpadapter_gamma_02.json"),
        evidence_dpadapter.tables,
        {
            **{
                f"dpadapter_{name}.png": functools.partial(evidence_dpadapter.draw_lengths, grid)
                for name, grid in (("gamma", "gamma_1"), ("gamma_4", "gamma_4"), ("amp", "amp"))
            },
            "dpadapter_robustness.png": functools.partial(
                evidence_dpadapter.draw_robustness, "gamma_1"
            ),
            "dpadapter_robustness_4.png": functools.partial(
                evidence_dpadapter.draw_robustness, "gamma_4"
            ),
        },
    ),
    Evidence(
        "results/recalibration.md",
        ("recalibration_sweeps.json",),
        recalibration_sweeps.tables,
        {"recalibration_sweeps.png": functools.partial(recalibration_sweeps.draw, "digits")},
    ),
    Evidence(
        "results/dpadapter.md",
        ("dpadapter_cifar.json", "dpadapter_paper.json"),
        evidence_dpadapter.earlier_tables,
    ),
    Evidence(
        "results/dpadapter.md",
        ("dpadapter_table_cifar10.json",),
        evidence_dpadapter.table_again,
    ),
    Evidence(
        "results/dpadapter.md",
        ("dpadapter_digits.json",),
        evidence_dpadapter.figures_again,
    ),
    Evidence(
        "results/dpadapter.md",
        ("dpadapter_theory.json",),
        dpadapter_theory.tables,
        {
            "dpadapter_theory.png": dpadapter_theory.draw,
            "dpadapter_lemma.png": dpadapter_theory.draw_lemma,
        },
    ),
    Evidence("results/intervals.md", ("intervals.json",), bench_intervals.tables),
    Evidence(
        "results/speed.md",
        tuple(job.path("cpu").name for job in suites.SUITES["cpu"]),
        lambda *found: {"suite": suites.markdown(suites.rows_of("cpu", found))},
        {"speed.png": lambda *found: suites.draw(suites.rows_of("cpu", found[:-1]), found[-1])},
    ),
    Evidence(
        "results/speed.md",
        ("steps_cpu.json", "steps_other_machine.json"),
        lambda found, other: {
            "steps": bench_steps.table(found),
            "steps elsewhere": bench_steps.table(other),
        },
    ),
    Evidence(
        "results/speed.md",
        ("clipping_cpu.json", "clipping_sequential_cpu.json"),
        lambda found, sequential: {
            "clipping": bench_clipping.table(found),
            "clipping in sequence": bench_clipping.table(sequential),
            "clipping memory": bench_clipping.memory_table(found, sequential),
            "clipping compile": bench_clipping.compile_table(found),
        },
    ),
    Evidence(
        "results/speed.md",
        ("start_cpu.json",),
        lambda found: {"start": bench_start.markdown(found)},
    ),
    Evidence("results/speed.md", ("training_cpu.json",), bench_training.tables),
    Evidence("results/speed.md", ("certified_steps_cpu.json",), bench_certified_steps.tables),
    Evidence("results/speed.md", ("noise_cpu.json",), bench_noise.tables),
    Evidence(
        "results/speed.md", ("device_gpu.json",), lambda found: {"gpu": device.markdown(found)}
    ),
    Evidence(
        "results/accelerators.md",
        ("compiled_v5e.json", "compiled_v6e.json", "compiled_v5p.json", "compiled_h100.json"),
        lambda v5e, v6e, v5p, h100: {
            "v5e": compiled.markdown(v5e),
            "v5e costs": compiled.costs(v5e),
            "v5e left out": compiled.left_out(v5e),
            "v6e": compiled.markdown(v6e),
            "v6e left out": compiled.left_out(v6e),
            "v5p": compiled.markdown(v5p),
            "h100": compiled.markdown(h100),
            "h100 costs": compiled.costs(h100),
        },
    ),
    Evidence(
        "howto/whole_life.md",
        ("demo_ranges.json",),
        lambda found: {"ranges": demo_ranges.table(found), "gains": demo_ranges.gains(found)},
    ),
    Evidence(
        "design/scale.md",
        ("scale_cpu.json", "reading_cpu.json", "scale_estimate.json"),
        lambda counts, reading, estimate: {
            "counts": bench_scale.markdown(counts["steps"]),
            "reading": bench_reading.markdown(reading["rows"]),
            "estimate": bench_estimate.markdown(estimate),
        },
    ),
]


def read(files: tuple[str, ...]) -> list[Any]:
    """Returns the content of JSON files of benchmarks/results."""
    return [json.loads((RESULTS / file).read_text(encoding="utf-8")) for file in files]


def place(page: str, name: str, table: str) -> str:
    """Returns the page with the table in its place."""
    found, count = re.subn(
        PLACE.format(re.escape(name)), lambda _: f"\n{table}\n\n", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the page must have one place {name!r}, got {count}.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pages = list(dict.fromkeys(one.page for one in EVIDENCE))
    parser.add_argument("page", nargs="?", choices=pages, help="a path below docs, by default all")
    only = parser.parse_args().page
    for page, files, tables, pictures in EVIDENCE:
        if only in (None, page):
            found, path = read(files), DOCS / page
            text = path.read_text(encoding="utf-8")
            for name, table in tables(*found).items():
                text = place(text, name, table)
            path.write_text(text, encoding="utf-8")
            for name, draw in pictures.items():
                draw(*found, path.with_name(name))


if __name__ == "__main__":
    main()
