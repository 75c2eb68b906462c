"""The one table of benchmarks: what each one measures, and where it writes.

A benchmark is a module of this folder. `measure(flags)` returns its report, `FLAGS` has its flags
as `timing.parser` takes them, and `tables(report)` the tables of its page, where it has any. The
page stands in `benchmarks.evidence`, which writes it."""

import importlib
import pathlib
from types import ModuleType
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Benchmark(NamedTuple):
    """A benchmark, its module, and the file that its report goes to."""

    module: str
    measures: str
    output: str
    takes: str = ""  # the time on two CPU cores, where it was measured
    # A page's table of studies is keyed by study, so the machine has no place in it.
    with_machine: bool = True

    def place(self, *, update: bool) -> str:
        """Returns where a run writes: a file of its own, so that a reader who repeats a table does
        not overwrite what the pages are made of.
        """
        return self.output if update else f".bench/{pathlib.PurePath(self.output).name}"

    def load(self) -> ModuleType:
        """Returns the module. Some need extras, so only the one that runs is imported."""
        return importlib.import_module(f"benchmarks.{self.module}")


# Times and counts of the library beside plain steps and peers, in modules bench_NAME.
_TIMED = {
    "steps": "whole private steps over plain steps",
    "clipping": "clipped gradients over plain gradients",
    "noise": "Gaussian noise, and its share of a private step",
    "training": "sharpness-aware pre-training and the DP-SGD family",
    "adaptation": "private test-time adaptation over the plain methods",
    "recalibration": "simulated recalibrations over a NumPy loop",
    "prediction": "certificates of 20 distances over one training run",
    "certificates": "how far certificates reach",
    "certified_steps": "one certified step of the paper's networks over a plain step",
    "split": "the scale search and copies of Split Adaptation",
    "lm": "private steps of language models, in full and with LoRA",
    "ops": "operations of the models in several exact forms",
    "programs": "counts of clipped gradients of programs of other libraries",
    "ledger": "writers, spends and openings of the ledger",
    "start": "the wait for the first private step",
    "reading": "how long a step waits for its examples",
    "growth": "time and memory by batch, model, devices, steps and rows",
    "scale": "the work of one device of many",
    "estimate": "a step of a billion parameters on 256 devices, on paper",
    "intervals": "bounds of forty programs over a box",
}
_PAGES = {
    # Simulations of several parties.
    "hospitals": "recalibration with fifty hospitals",
    "secure_aggregation": "DP-SGD across silos under SecAgg+",
    # Tables of pages.
    "accountant": "epsilon of random histories beside a second accountant",
    "clip_parts": "clipping per part beside flat clipping: time and accuracy",
    "correlated_streams": "private adaptation to a stream with correlated noise",
    "correlated": "correlated noise beside DP-SGD at equal epsilon",
    "participation": "patterns of participation at equal epsilon",
    "demo_ranges": "ranges of the demo's results",
    "dpadapter_theory": "Lemma A.1, Theorem 1 and Algorithm 2 beside what training does",
    "exact_noise": "exact noise: time, and accuracy",
    "finetune_methods": "private training on features of a public network",
    "label_dp": "noisy labels beside DP-SGD at equal epsilon",
    "owners": "records with several owners, by the bound on each",
    "sla_clip": "clip norms that adapt, from good and bad starts",
    "membership": "utility beside attacks on membership",
    "tuning": "what a choice of the learning rate costs",
    "split_costs": "the client's costs of Split Adaptation",
    "split_private": "what a client with few images can release",
}
_STUDIES = {
    "agt_claims": "further claims of Abstract Gradient Training",
    "split_backends": "another model's backend, emulators of random layers and amplitude exchange",
    "evidence_agt": "claims of Abstract Gradient Training",
    "evidence_poisoning": "certificates against changed records",
    "evidence_recalibration": "claims of private recalibration",
    "recalibration_sweeps": "what helps and hurts recalibration",
    "evidence_split": "claims of Split Adaptation",
    "split_appendix": "what the appendix of Split Adaptation adds",
    "evidence_tta": "claims of private test-time adaptation",
}
_TAKES = {
    "intervals": "35 CPU seconds",
    "accountant": "7 CPU minutes",
    "dpadapter_theory": "6 CPU minutes",
    "tuning": "3 CPU minutes",
    "split_costs": "17 seconds",
    "evidence_agt": "6 CPU minutes",
}
# Counts and bounds do not depend on the processor, so the names of their reports do not have it.
_RESULTS = {name: f"{name}_cpu" for name in _TIMED}
_RESULTS |= {"programs": "programs", "intervals": "intervals", "estimate": "scale_estimate"}
_RESULTS |= {"evidence_split": "split_cifar100"}

BENCHMARKS = {}
for _name, _measures in (_TIMED | _PAGES | _STUDIES).items():
    BENCHMARKS[_name] = Benchmark(
        module=f"bench_{_name}" if _name in _TIMED else _name,
        measures=_measures,
        output=f"benchmarks/results/{_RESULTS.get(_name, _name)}.json",
        takes=_TAKES.get(_name, ""),
        with_machine=_name not in _STUDIES,
    )

# Commands that end with an exit status, start processes of their own or write after every case.
COMMANDS = {
    "benchmarks.gate": "the short gate against slower steps",
    "benchmarks.device": "private steps on one accelerator (10 minutes on one GPU)",
    "benchmarks.compiled": "what compilers of absent accelerators say about private steps",
    "benchmarks.claims": "writes the page of the papers' claims and verdicts",
    "benchmarks.evidence": "writes tables and pictures of pages from committed reports",
}
