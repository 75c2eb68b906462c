"""Auditing: empirical lower bounds on epsilon, to hold against the ledger's upper bound.

An audit plays the adversary of differential privacy. A canary is a record made to be noticed. A mechanism runs with it
and without it. Every run gets a score: a higher one says that the canary seems to be there. A guess is a score against
a threshold. No (epsilon, delta)-DP mechanism lets anybody guess too well, so good guesses refute small epsilons.

    found = audit.multi_run(scores_with, scores_without, upper=ledger.epsilon("train", delta=1e-5), delta=1e-5)
    print(found.describe())

The verdict is one of three:

* VIOLATED: `lower > upper`. The mechanism's proof, its code or its accounting is wrong, but for a chance of
  1 - confidence.
* consistent: the audit found no more than is claimed, and could have. It proves nothing: another canary or score may
  find more.
* cannot tell: the ceiling, which is what the audit could have found at most, does not exceed the claim. More trials or
  a smaller claim, for example that of one step, give it power.

`multi_run` needs one canary and many runs, `one_run` many canaries and one run. The modules `jaxdp.audit.finetune`,
`tta`, `prediction`, `recalibration`, `split` and `accuracy` attack jaxdp's own releases; `representations` reconstructs
images from uploads that have no guarantee.
"""

from jaxdp.audit.bounds import Audit, Claim, Verdict, audit_mechanism, multi_run, one_run

__all__ = ["Audit", "Claim", "Verdict", "audit_mechanism", "multi_run", "one_run"]
