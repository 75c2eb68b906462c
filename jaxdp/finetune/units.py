"""The unit of what a release counts, beside that of the account which pays."""

from jaxdp.privacy import Account


def check_unit(account: Account, unit: str, *, what: str, has_owners: bool, remedy: str) -> None:
    """Raises ValueError unless `unit` is that of the account.

    Args:
      account: The account that pays.
      unit: What one row, record or owner of a source is, in the words of the ledger.
      what: Which of these it is, for the error.
      has_owners: Whether a unit is an owner, who is no "example".
      remedy: The end of the error.
    """
    if account.unit != unit or (has_owners and unit == "example"):
        raise ValueError(
            f"unit must be that of account {account.name!r}, {account.unit!r}, and say what one "
            f"{what} of source is, got {unit!r}. {remedy}"
        )
