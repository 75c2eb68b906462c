"""A case of the study of audits: one claim of one mechanism, its honest audit and its broken
twins.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax

from jaxdp.audit import Audit
from jaxdp.release import derive

HALF_THE_NOISE = "half the noise"
NO_CLIPPING = "no clipping"
SENSITIVITY_OFF_BY_TWO = "sensitivity off by two"
REUSED_KEY = "a reused key"
ADD_REMOVE_FOR_REPLACE_ONE = "add/remove charged for replace-one"
TWINS = (
    HALF_THE_NOISE,
    NO_CLIPPING,
    SENSITIVITY_OFF_BY_TWO,
    REUSED_KEY,
    ADD_REMOVE_FOR_REPLACE_ONE,
)

# The confidence of every bound. A page of forty honest audits has a false VIOLATED with probability
# below 4 %.
CONFIDENCE = 0.999

Run = Callable[[int, bytes], Audit]
# The audit of a twin, or why the twin has no meaning.
Twin = Run | str
Twins = Mapping[str, Twin]
# The audit of an honest mechanism, and those of its twins.
Audits = tuple[Run, Twins]


@dataclasses.dataclass(frozen=True)
class Case:
    """One claim of one mechanism, and the broken twins that violate it.

    A twin breaks the mechanism, or the claim that is made for it, by public arguments or by a
    wrapper. It is audited under the claim of the honest mechanism.

    Attributes:
        mechanism: The name in the documentation, for example "DP-SGD".
        claim: The ledger's claim, in words with numbers.
        proof: The citation or equation, and the module whose docstring has it, on one line.
        run: `run(trials, seed) -> Audit` of the honest mechanism. `trials` counts the runs of
            either kind, `seed` is 16 secret bytes.
        twins: For every name in `TWINS` the audit of the broken twin, or a string that says why the
            twin has no meaning here. `standard_twins` makes them. A mechanism may have further
            twins.
        trials: The runs of either kind with which the honest audit has power and every twin is
            caught.

    Raises:
        ValueError: A standard twin is missing.
    """

    mechanism: str
    claim: str
    proof: str
    run: Run
    twins: Twins
    trials: int = 1000

    def __post_init__(self) -> None:
        if missing := [name for name in TWINS if name not in self.twins]:
            raise ValueError(
                f"twins of {self.mechanism!r} lack {missing}. If a twin has no meaning, give the "
                "reason as a string."
            )

    def honest(self, seed: bytes, trials: int | None = None) -> Audit:
        """Returns the audit of the honest mechanism. Its randomness is derived from `seed`."""
        return self.run(trials or self.trials, self._seed(seed, "honest"))

    def broken(self, twin: str, seed: bytes, trials: int | None = None) -> Audit | str:
        """Returns the audit of a broken twin, or why there is none. Its randomness is derived from
        `seed`.
        """
        run = self.twins[twin]
        return run if isinstance(run, str) else run(trials or self.trials, self._seed(seed, twin))

    def _seed(self, seed: bytes, purpose: str) -> bytes:
        return derive(seed, f"{self.mechanism}, {self.claim}: {purpose}")


def standard_twins(
    *,
    half_the_noise: Twin,
    no_clipping: Twin,
    sensitivity_off_by_two: Twin,
    reused_key: Twin,
    add_remove_for_replace_one: Twin,
) -> dict[str, Twin]:
    """Returns the twins of `TWINS` by name."""
    return {
        HALF_THE_NOISE: half_the_noise,
        NO_CLIPPING: no_clipping,
        SENSITIVITY_OFF_BY_TWO: sensitivity_off_by_two,
        REUSED_KEY: reused_key,
        ADD_REMOVE_FOR_REPLACE_ONE: add_remove_for_replace_one,
    }


def patched(owner: Any, name: str, broken: Any) -> Callable[[], Any]:
    """Returns a function whose context has a broken function in the place of an honest one."""
    return lambda: mock.patch.object(owner, name, broken)


def one_key(key: jax.Array) -> jax.Array:
    """Returns the same key for every key of a kind.

    It is a function of the key, so that the programs of the honest mechanism draw the noise.
    """
    zeros = 0 * jax.random.key_data(key)
    return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(key))


def run_of(audit: Callable[..., Audit], *subject: Any, **options: Any) -> Run:
    """Returns the run of a function of `jaxdp.audit` on its subject, at the confidence of all
    cases.
    """
    options["confidence"] = CONFIDENCE
    return lambda trials, seed: audit(*subject, trials=trials, seed=seed, **options)


def under(audit: Audit, claimed: float) -> Audit:
    """Returns the audit of a twin with the claim of the honest mechanism at the same delta."""
    return dataclasses.replace(audit, upper=claimed)


def held(run: Run, claimed: float) -> Run:
    """Returns the audit of a twin, held to the claim of the honest mechanism."""
    return lambda trials, seed: under(run(trials, seed), claimed)


def judge(case: Case, seed: bytes, trials: int | None) -> tuple[dict[str, str], bool]:
    """Returns the row of a case, and whether the honest mechanism is consistent and all twins are
    caught.
    """
    honest = case.honest(seed, trials)
    is_good = honest.verdict == "consistent"
    twins = []
    for name in case.twins:
        broken = case.broken(name, seed, trials)
        if isinstance(broken, str):  # why the twin has no meaning
            continue
        if broken.violated:
            twins.append(f"{name} {broken.lower:.3g}")
        else:
            is_good = False
            twins.append(f"{name} {broken.lower:.3g} ({broken.verdict})")
    row = {
        "mechanism": case.mechanism,
        "claim": case.claim,
        "proof": case.proof,
        "epsilon claimed": f"{honest.upper:.4g} at delta {honest.delta:g}",
        "audited bound": f"{honest.lower:.3g}",
        "ceiling": f"{honest.ceiling:.3g}",
        "verdict": honest.verdict,
        "twins caught, bound of each": "; ".join(twins),
    }
    return row, is_good
