"""The accounts of a study in its ledgers."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxdp.privacy import Account, Ledger, contacts


@contextlib.contextmanager
def account(
    path: pathlib.Path,
    name: str,
    *,
    label: str = "",
    adjacency: Any = "add_remove",
    unit: str = "example",
    run: str = "",
    **terms: Any,
) -> Iterator[Account]:
    """Yields the account of a data set in the ledger at `path`. Makes both if they are missing.

    Args:
      path: The path of the ledger.
      name: The name of the data set.
      label: The label of the spends.
      run: The word for this run in the ledger. By default it is random.
      adjacency, unit, **terms: As in `Ledger.register`. `launch.data.terms` has those of a config.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with Ledger(path, run=run or None) as ledger:
        yield own_account(ledger, name, label=label, adjacency=adjacency, unit=unit, **terms)


def own_account(ledger: Ledger, dataset: str, *, label: str = "", **terms: Any) -> Account:
    """Returns the account of a data set. Registers it, with terms as in `Ledger.register`, unless
    its owner has. Then the owner's budget holds, and the ledger gets only the fields of whom to ask
    that it lacks.

    Raises:
      ValueError: The owner registered another neighbouring relation or unit.
    """
    try:
        account = ledger.account(dataset, label=label)
    except ValueError:
        ledger.register(dataset, **terms)
        return ledger.account(dataset, label=label)
    for term in ("adjacency", "unit"):
        registered = getattr(account, term)
        if terms.get(term, registered) != registered:
            raise ValueError(
                f"data set {dataset!r} has {term}={registered!r} in its ledger, and this run has "
                f"{terms[term]!r}. Set the same one in the config."
            )
    people = {name: terms[name] for name in contacts.FIELDS if terms.get(name)}
    ledger.describe(dataset, **people, replace=False)
    return account
