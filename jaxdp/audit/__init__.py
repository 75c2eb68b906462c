"""Auditing: empirical lower bounds on epsilon, for comparison with the ledger's upper bound.

An audit plays the adversary of differential privacy. A canary is a record that is easy to notice. A
mechanism runs with it and without it. Every run gets a score, which is higher if the canary seems
to be there. A guess compares a score with a threshold. An (epsilon, delta)-DP mechanism limits the
quality of guesses, so good guesses refute small epsilons.

    upper = ledger.epsilon("train", delta=1e-5)
    result = audit.multi_run(scores_with, scores_without, upper=upper, delta=1e-5)
    print(result.describe())

The verdict is "VIOLATED", "consistent" or "cannot tell", see `Audit`. `multi_run` needs one canary
and many runs. `one_run` needs many canaries and one run. The modules `jaxdp.audit.finetune`, `tta`,
`prediction`, `recalibration`, `split`, `accuracy`, `scaler` and `participation` attack jaxdp's own
releases.
"""

from jaxdp.audit.bounds import Audit, Claim, Verdict, audit_mechanism, multi_run, one_run

__all__ = ["Audit", "Claim", "Verdict", "audit_mechanism", "multi_run", "one_run"]
