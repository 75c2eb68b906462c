"""The bound that a ledger claims for a release, for comparison with an audit."""

from collections.abc import Callable

from jaxdp.privacy import Account, DpEvent, Ledger
from jaxdp.privacy.accounting import Adjacency


def claim(
    charge: DpEvent | Callable[[Account], None], *, adjacency: Adjacency, delta: float
) -> float:
    """Returns epsilon at `delta`, in [0, 1), of a data set that was charged for one release only.

    `charge` is the event, or a function `charge(account)` that charges an account as the stage
    does.
    """
    # In memory, because an audit spends nothing of a real budget.
    account = audited(adjacency)
    if isinstance(charge, DpEvent):
        account.spend(charge)
    else:
        charge(account)
    return account.epsilon(delta=delta)


def audited(adjacency: Adjacency) -> Account:
    """Returns an account of a new ledger in memory, from which nobody else spends."""
    ledger = Ledger.in_memory()
    ledger.register("audited", adjacency=adjacency, unit="record")
    return ledger.account("audited", label="audit")
