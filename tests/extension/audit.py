"""Its audit: the claim, and the broken twins that violate it."""

import numpy as np

from jaxdp.audit import multi_run
from jaxdp.privacy import Ledger
from jaxdp.release import derive
from launch.audits import case
from tests.extension.means import noisy_mean

EPSILON = 1.0


def audit(epsilon, *, one_seed=False):
    """Returns an audit of means that are released with `epsilon`, under the claim of EPSILON."""

    def outputs(value, trials, seed):
        means = []
        with Ledger.in_memory() as ledger:
            ledger.register("x", adjacency="replace_one", unit="number")
            account = ledger.account("x")
            for trial in range(trials):
                own = seed if one_seed else derive(seed, f"{value}, trial {trial}")
                mean = noisy_mean(np.full(1, value), epsilon=epsilon, account=account, seed=own)
                means.append(mean)
        return np.array(means)

    def run(trials, seed):
        scores = [outputs(value, trials, seed) for value in (1.0, 0.0)]
        if one_seed:
            # Either number has one output under one key. Which of them is larger is chance. So the
            # attacker, who has seen that of the first number, looks for it.
            (seen,) = outputs(1.0, 1, seed)
            scores = [-np.abs(means - seen) for means in scores]
        return multi_run(
            *scores,
            upper=EPSILON,
            delta=0.0,
            confidence=0.999,
        )

    return run


TWINS = case.standard_twins(
    # With an eighth of the noise, few runs miss the twin often.
    half_the_noise="a thirty-second of the noise takes fewer runs",
    no_clipping="the numbers are in [0, 1] by construction",
    sensitivity_off_by_two="it is twice the noise",
    reused_key=audit(EPSILON, one_seed=True),
    add_remove_for_replace_one="the number of records is public",
)
TWINS["a thirty-second of the noise"] = audit(32 * EPSILON)

CASES = (
    case.Case(
        mechanism="noisy mean",
        claim="one mean, epsilon 1",
        proof="the Laplace mechanism, tests/extension/means",
        run=audit(EPSILON),
        twins=TWINS,
        # Every source of jaxdp draws other noise. 81 of 1,500 simulations of 60 runs miss the twin.
        # Each run on the wrong side of the threshold costs 0.04 of the bound, and each more is half
        # as likely. The bound of 120 runs is 1.9 without any.
        trials=120,
    ),
)
