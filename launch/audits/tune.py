"""Audits of a private search. Its bound is loose, so the twins are far from the honest search."""

from jaxdp.audit.tune import NoisySums, audit_search
from jaxdp.finetune import RandomRuns
from jaxdp.privacy import GaussianDpEvent, calibrate_noise
from jaxdp.release import claim

from .case import Case, Run, held, run_of, standard_twins

SIGMA = 4.0
DELTA = 1e-2
RUNS = RandomRuns(10.0)
CLAIMED = claim(RUNS.event(GaussianDpEvent(SIGMA)), adjacency="add_remove", delta=DELTA)
# What somebody takes who charges a search as its best run.
OF_ONE_RUN = calibrate_noise(GaussianDpEvent, epsilon=CLAIMED, delta=DELTA)
FIXED = 20


class _FixedRuns(RandomRuns):
    """A number of runs that everybody knows."""

    def draw(self, secret: bytes) -> int:
        return FIXED


def searches(runs: RandomRuns, sigma: float) -> Run:
    """Returns the audit of a search under the honest claim."""
    run = run_of(audit_search, runs, noise_multiplier=sigma, search=NoisySums, delta=DELTA)
    return held(run, CLAIMED)


_RUN = "is a matter of one run, and runs are audited as DP-SGD"
TWINS = standard_twins(
    half_the_noise="the bound is loose: a search with half the noise stays below it",
    no_clipping=f"clipping {_RUN}",
    sensitivity_off_by_two=f"sensitivity {_RUN}",
    reused_key="runs of a search that share a key are one run, which tells less",
    add_remove_for_replace_one=f"the relation {_RUN}",
)
TWINS["a tenth of the noise"] = searches(RUNS, SIGMA / 10)
TWINS[f"the best of {FIXED} runs, with the noise of one run"] = searches(
    _FixedRuns(RUNS.mean), OF_ONE_RUN
)

CASES = (
    Case(
        "private search",
        f"the best of a geometric number of runs, {RUNS.mean:g} on average, of Gaussians of "
        f"multiplier {SIGMA:g}, add/remove",
        "Papernot and Steinke 2022, arXiv:2110.03620, Theorem 2; `jaxdp.finetune.tune`",
        searches(RUNS, SIGMA),
        TWINS,
        trials=1000,
    ),
)
