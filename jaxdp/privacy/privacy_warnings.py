"""Warnings about guarantees that hold but promise little."""

import warnings

from jaxdp.privacy.units import unit_words

LARGE_EPSILON = 10.0


class PrivacyWarning(UserWarning):
    """A guarantee holds but promises little. Python shows each text once per process by default."""


def warn_if_weak(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    records: int | None = None,
    sampling_probability: float | None = None,
    unit: str = "record",
) -> None:
    """Warns about public terms that promise little. An argument that is None is not looked at.

    Args:
        epsilon: A target or a budget. Above 10 gives a warning.
        delta: A target or a budget, with `records`, the public number of records. At least 1 /
            records gives a warning.
        sampling_probability: The probability with which a step reads a record. 1 gives a warning.
        unit: The unit of privacy, for the words of a warning.
    """
    units = unit_words(unit)
    if epsilon is not None and epsilon > LARGE_EPSILON:
        _warn(
            f"epsilon {epsilon:g} is above {LARGE_EPSILON:g}: an attacker's odds that one {unit} "
            f"was there may change by a factor of e^{epsilon:g}. Choose a smaller epsilon, or "
            "audit what attackers can tell."
        )
    if records is not None and delta is not None and delta * records >= 1:
        _warn(
            f"delta {delta:g} is at least 1 / {units.many} = {1 / records:g}: a mechanism that "
            f"publishes one {unit} in the clear can satisfy it. Use a delta far below 1 / "
            f"{units.many}."
        )
    if sampling_probability == 1:
        _warn(
            f"sampling_probability is 1: every step reads every {unit}, so sampling lowers no "
            f"cost. Choose a batch size below the number of {units.many}, unless full batches are "
            "meant."
        )


def warn_of_another_number(
    name: str, *, registered: int | None, present: int, unit: str = "record"
) -> None:
    """Warns if a dataset has another number of units than its ledger declares.

    It may have grown, and then the guarantee holds. Or it is not the dataset of this account.
    """
    if registered is not None and registered != present:
        _warn(
            f"account {name!r} declares {registered} {unit_words(unit).many}, and there are "
            f"{present}. Check that it is the account of these data. If they have grown, delta was "
            "judged by the smaller number."
        )


def warn_of_another_contact(name: str, field: str, *, registered: str, present: str) -> None:
    """Warns that a ledger has another owner, purpose, contact or approver, which stays."""
    _warn(
        f"dataset {name!r} has {field} {registered!r} in its ledger, which stays, and not "
        f"{present!r}. `jaxdp ledger describe` or ledger.describe corrects it."
    )


def warn_of_no_anchor(path: str) -> None:
    """Warns if nothing shows whether a ledger is an older copy of itself."""
    _warn(
        f"ledger {path!r} has no anchor beside it, so nothing shows whether it is an older copy. "
        "If it was restored from a backup, run `jaxdp ledger accept` on it. From now on it has one."
    )


def warn_of_network_disk(path: str, kind: str) -> None:
    """Warns if processes of several machines could open a ledger whose locks one machine has."""
    _warn(
        f"ledger {path!r} lies on a network file system ({kind}). Processes of two machines could "
        "spend one budget twice there. Keep it on a local disk of the machine that spends, for "
        "example with --ledger."
    )


def _warn(text: str) -> None:
    # Python shows a text once per place. The place is always this line, so several callers with one
    # text warn once.
    warnings.warn(text, PrivacyWarning, stacklevel=1)
