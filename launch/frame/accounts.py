"""The accounts of a study in its ledgers."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxdp.privacy import Account, Ledger


@contextlib.contextmanager
def account(
    path: pathlib.Path,
    name: str,
    *,
    label: str = "",
    adjacency: Any = "add_remove",
    unit: str = "example",
    **terms: Any,
) -> Iterator[Account]:
    """Yields the account of a data set in the ledger at `path`. Makes both if they are missing.

    Args:
      path: The path of the ledger.
      name: The name of the data set.
      label: The label of the spends.
      adjacency, unit, **terms: As in `Ledger.register`. `launch.data.terms` has those of a config.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with Ledger(path) as ledger:
        ledger.register(name, adjacency=adjacency, unit=unit, **terms)
        yield ledger.account(name, label=label)


def own_account(ledger: Ledger, dataset: str, **terms: Any) -> Account:
    """Returns the account of a data set. Registers it, with terms as in `Ledger.register`, unless
    its owner has.
    """
    try:
        return ledger.account(dataset)
    except ValueError:
        ledger.register(dataset, **terms)
        return ledger.account(dataset)
