"""The one table of benchmarks: what each one measures, and where it writes.

A benchmark is a module of this folder. `measure(flags)` returns its report, and
`add_arguments(parser)` declares its flags, where it has any."""

import importlib
import pathlib
from types import ModuleType
from typing import NamedTuple


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


def _timing(name: str, measures: str, takes: str = "") -> Benchmark:
    return Benchmark(f"bench_{name}", measures, f".bench/{name}.json", takes)


def _page(module: str, measures: str, output: str, takes: str = "") -> Benchmark:
    return Benchmark(module, measures, f"benchmarks/results/{output}.json", takes)


def _studies(module: str, measures: str, output: str, takes: str = "") -> Benchmark:
    return _page(module, measures, output, takes)._replace(with_machine=False)


BENCHMARKS = {
    # Times and counts of the library beside plain steps and peers.
    "steps": _timing("steps", "whole private steps over plain steps"),
    "clipping": _timing("clipping", "clipped gradients over plain gradients"),
    "noise": _timing("noise", "Gaussian noise, and its share of a private step"),
    "training": _timing("training", "sharpness-aware pre-training and the DP-SGD family"),
    "adaptation": _timing("adaptation", "private test-time adaptation over the plain methods"),
    "recalibration": _timing("recalibration", "simulated recalibrations over a NumPy loop"),
    "prediction": _timing("prediction", "certificates of 20 distances over one training run"),
    "certificates": _timing("certificates", "how far certificates reach"),
    "certified_steps": _timing(
        "certified_steps", "one certified step of the paper's networks over a plain step"
    ),
    "split": _page("bench_split", "the scale search and copies of Split Adaptation", "split_cpu"),
    "lm": _timing("lm", "private steps of language models, in full and with LoRA"),
    "ops": _timing("ops", "operations of the models in several exact forms"),
    "programs": _timing("programs", "counts of clipped gradients of programs of other libraries"),
    "ledger": _timing("ledger", "writers, spends and openings of the ledger"),
    "start": _timing("start", "the wait for the first private step"),
    "reading": _timing("reading", "how long a step waits for its examples"),
    "growth": _timing("growth", "time and memory by batch, model, devices, steps and rows"),
    "scale": _timing("scale", "the work of one device of many"),
    "estimate": _timing("estimate", "a step of a billion parameters on 256 devices, on paper"),
    "intervals": _page(
        "bench_intervals", "bounds of forty programs over a box", "intervals", "35 CPU seconds"
    ),
    # Simulations of several parties.
    "hospitals": _page("hospitals", "recalibration with fifty hospitals", "hospitals"),
    "secure_aggregation": _page(
        "secure_aggregation", "DP-SGD across silos under SecAgg+", "secure_aggregation"
    ),
    # Tables of pages.
    "accountant": _page(
        "accountant",
        "epsilon of random histories beside a second accountant",
        "accountant",
        "7 CPU minutes",
    ),
    "clip_parts": _page(
        "clip_parts", "clipping per part beside flat clipping: time and accuracy", "clip_parts"
    ),
    "correlated_streams": _page(
        "correlated_streams",
        "private adaptation to a stream with correlated noise",
        "correlated_streams",
    ),
    "correlated": _page(
        "correlated", "correlated noise beside DP-SGD at equal epsilon", "correlated"
    ),
    "participation": _page(
        "participation", "patterns of participation at equal epsilon", "participation"
    ),
    "demo_ranges": _page("demo_ranges", "ranges of the demo's results", "demo_ranges"),
    "dpadapter_theory": _page(
        "dpadapter_theory",
        "Lemma A.1, Theorem 1 and Algorithm 2 beside what training does",
        "dpadapter_theory",
        "6 CPU minutes",
    ),
    "exact_noise": _page("exact_noise", "exact noise: time, and accuracy", "exact_noise"),
    "finetune_methods": _page(
        "finetune_methods", "private training on features of a public network", "finetune_methods"
    ),
    "label_dp": _page("label_dp", "noisy labels beside DP-SGD at equal epsilon", "label_dp"),
    "owners": _page("owners", "records with several owners, by the bound on each", "owners"),
    "sla_clip": _page("sla_clip", "clip norms that adapt, from good and bad starts", "sla_clip"),
    "membership": _page("membership", "utility beside attacks on membership", "membership"),
    "tuning": _page(
        "tuning", "what a choice of the learning rate costs", "tuning", "3 CPU minutes"
    ),
    "split_costs": _page(
        "split_costs", "the client's costs of Split Adaptation", "split_costs", "17 seconds"
    ),
    "split_private": _page(
        "split_private", "what a client with few images can release", "split_private"
    ),
    "agt_claims": _studies(
        "agt_claims", "further claims of Abstract Gradient Training", "agt_claims"
    ),
    "split_backends": _studies(
        "split_backends",
        "another model's backend, emulators of random layers and amplitude exchange",
        "split_backends",
    ),
    "evidence_agt": _studies(
        "evidence_agt", "claims of Abstract Gradient Training", "evidence_agt", "6 CPU minutes"
    ),
    "evidence_poisoning": _studies(
        "evidence_poisoning", "certificates against changed records", "evidence_poisoning"
    ),
    "evidence_recalibration": _studies(
        "evidence_recalibration", "claims of private recalibration", "evidence_recalibration"
    ),
    "recalibration_sweeps": _studies(
        "recalibration_sweeps", "what helps and hurts recalibration", "recalibration_sweeps"
    ),
    "evidence_split": _studies("evidence_split", "claims of Split Adaptation", "split_cifar100"),
    "split_appendix": _studies(
        "split_appendix", "what the appendix of Split Adaptation adds", "split_appendix"
    ),
    "evidence_tta": _studies(
        "evidence_tta", "claims of private test-time adaptation", "evidence_tta"
    ),
}

# Commands that end with an exit status, start processes of their own or write after every case.
COMMANDS = {
    "benchmarks.gate": "the short gate against slower steps",
    "benchmarks.device": "private steps on one accelerator (10 minutes on one GPU)",
    "benchmarks.compiled": "what compilers of absent accelerators say about private steps",
    "benchmarks.claims": "writes the page of the papers' claims and verdicts",
    "benchmarks.evidence": "writes tables and pictures of pages from committed reports",
}
