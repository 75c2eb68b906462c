"""Writes the tables and pictures of pages from committed JSON files.

    python -m benchmarks.evidence                 # all pages
    python -m benchmarks.evidence results/tta.md  # one page

The other scripts of this folder measure and write the JSON files. A table stands between the lines
`<!-- table: NAME -->` and `<!-- end -->` of a page below docs. `tests/test_evidence.py` compares.
"""

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks import suites, timing
from benchmarks.pages import markdown
from benchmarks.registry import RESULTS, ROOT

DOCS = ROOT / "docs"
PLACE = r"(?<=<!-- table: {} -->\n).*?(?=<!-- end -->)"


class Evidence(NamedTuple):
    """Tables by name, and pictures by file name, of JSON files. The functions take the content of
    each file."""

    page: str
    files: tuple[str, ...]
    tables: Callable
    pictures: Mapping[str, Callable]  # the last argument is the path of the picture


def _of(page: str, function: str, *files: str, **pictures: str) -> Evidence:
    """Returns the evidence of a module, or of a function of it that is not `tables`.

    Args:
      page: The page below docs.
      function: "module" or "module.function".
      files: The names of JSON files, by default that of the module.
      pictures: The functions of the module that draw, by the names of pictures.
    """
    name, _, tables = function.partition(".")
    module = importlib.import_module(f"benchmarks.{name}")
    lines_of = getattr(module, tables or "tables")
    draw = {f"{picture}.png": getattr(module, of) for picture, of in pictures.items()}

    def texts(*reports):
        return {title: markdown(table) for title, table in lines_of(*reports).items()}

    return Evidence(page, tuple(f"{file}.json" for file in files or (name,)), texts, draw)


_AGT = "results/agt.md"
_CORRELATED = "results/correlated.md"
_DPADAPTER = "results/dpadapter.md"
_RECALIBRATION = "results/recalibration.md"
_SPEED = "results/speed.md"
_SPLIT = "results/split_adaptation.md"
_TTA = "results/tta.md"
_CHECKPOINT = "results/public_checkpoint.md"
_FEATURES = ("finetune_scattering", "finetune_squeezenet")
_CPU = tuple(suites.path_of(name).stem for name in suites.LINES)

EVIDENCE = [
    _of("results/scattering.md", "finetune_methods.curve", _FEATURES[0]),
    _of(_CHECKPOINT, "finetune_methods.curve", _FEATURES[1]),
    _of(_CHECKPOINT, "finetune_methods"),
    _of("results/accountant.md", "accountant"),
    _of("results/clip_parts.md", "clip_parts"),
    _of(_CORRELATED, "correlated"),
    _of("results/participation.md", "participation"),
    _of(_CORRELATED, "correlated_streams"),
    _of("results/exact_noise.md", "exact_noise"),
    _of("results/label_dp.md", "label_dp"),
    _of("results/sla_clip.md", "sla_clip"),
    _of("results/owners.md", "owners"),
    _of("results/tuning.md", "tuning"),
    _of("results/membership.md", "membership", membership="draw"),
    _of(_SPLIT, "split_private", split_private="draw"),
    _of(_SPLIT, "split_costs"),
    _of(_SPLIT, "evidence_split.earlier_tables", "split_earlier", "split_paper"),
    _of(_SPLIT, "split_backends", "split_backends", "split_paper"),
    _of(
        _SPLIT,
        "evidence_split",
        *("split_cifar100", "split_paper"),
        split_noise="draw",
        split_hilbert="draw_hilbert",
    ),
    _of(_SPLIT, "split_appendix", "split_appendix", "split_paper"),
    _of(_TTA, "evidence_tta", tta="draw"),
    _of(_TTA, "evidence_tta.beside", "tta_paper", "evidence_tta"),
    _of(_TTA, "evidence_tta.cost_tables", *_FEATURES, "evidence_tta", tta_costs="draw_costs"),
    _of(_AGT, "evidence_agt", agt="draw"),
    _of(_AGT, "agt_claims"),
    _of(_AGT, "evidence_agt.of_paper", "agt_paper"),
    _of(_AGT, "bench_certificates", "certificates_cpu"),
    _of(_AGT, "evidence_poisoning"),
    _of(
        _RECALIBRATION,
        "evidence_recalibration",
        *("evidence_recalibration", "recalibration_network_b"),
        recalibration="draw",
        recalibration_resnet56="draw_resnet56",
    ),
    _of(_RECALIBRATION, "recalibration_sweeps", recalibration_sweeps="draw"),
    _of(
        _DPADAPTER,
        "evidence_dpadapter",
        *("dpadapter_usps", "dpadapter_gamma_02"),
        dpadapter_gamma="draw_gamma",
        dpadapter_gamma_4="draw_gamma_4",
        dpadapter_amp="draw_amp",
        dpadapter_robustness="draw_robust",
        dpadapter_robustness_4="draw_robust_4",
    ),
    _of(_DPADAPTER, "evidence_dpadapter.earlier_tables", "dpadapter_cifar", "dpadapter_paper"),
    _of(_DPADAPTER, "evidence_dpadapter.table_again", "dpadapter_table_cifar10"),
    _of(_DPADAPTER, "evidence_dpadapter.figures_again", "dpadapter_digits"),
    _of(
        _DPADAPTER,
        "dpadapter_theory",
        dpadapter_theory="draw",
        dpadapter_lemma="draw_lemma",
    ),
    _of("results/intervals.md", "bench_intervals", "intervals"),
    _of(_SPEED, "suites", *_CPU, speed="draw"),
    _of(_SPEED, "bench_steps", "steps_cpu", "steps_other_machine"),
    _of(_SPEED, "bench_clipping", "clipping_cpu", "clipping_sequential_cpu"),
    _of(_SPEED, "bench_start", "start_cpu"),
    _of(_SPEED, "bench_training", "training_cpu"),
    _of(_SPEED, "bench_certified_steps", "certified_steps_cpu"),
    _of(_SPEED, "bench_noise", "noise_cpu"),
    _of(_SPEED, "device", "device_gpu"),
    _of(
        "results/accelerators.md",
        "compiled",
        *("compiled_v5e", "compiled_v6e", "compiled_v5p", "compiled_h100"),
    ),
    _of("results/accelerators.md", "compiled.beside", "compiled_h100", "compiled_h100_before"),
    _of("results/accelerators.md", "device.beside", "device_h100", "device_h100_before"),
    _of("howto/whole_life.md", "demo_ranges"),
    _of("design/scale.md", "bench_scale", "scale_cpu"),
    _of("design/scale.md", "bench_reading", "reading_cpu"),
    _of("design/scale.md", "bench_growth", "growth_cpu", growth="draw"),
    _of("design/scale.md", "bench_estimate", "scale_estimate"),
]


def read(files: tuple[str, ...]) -> list:
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


def main():
    parser = timing.parser(__doc__, {})
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
