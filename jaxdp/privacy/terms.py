"""The terms that a dataset is registered with, which never change."""

import dataclasses
import math
import numbers
from typing import Literal

from jaxdp.files import check_choice, check_delta
from jaxdp.privacy.accounting import (
    RDP_ORDERS,
    RELATIONS,
    ROUGH_ORDERS,
    Adjacency,
    Method,
    default_renyi_order,
    renyi_bound,
)

Accounting = Literal["pld", "rdp", "renyi_filter"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """The arguments of `Ledger.register` besides the name."""

    adjacency: Adjacency
    unit: str
    epsilon: float | None
    delta: float | None
    accounting: Accounting
    renyi_order: float | None
    allow_unproven: bool
    records: int | None

    def checked(self) -> "Terms":
        """Returns the terms with their default order. Raises ValueError if one is impossible."""
        if not self.unit or not isinstance(self.unit, str):
            raise ValueError(
                f"unit must be a non-empty string such as 'example' or 'user', got {self.unit!r}."
            )
        if self.adjacency not in RELATIONS:
            raise ValueError(
                f"adjacency must be one of {sorted(RELATIONS)}, got {self.adjacency!r}."
            )
        check_choice("accounting", self.accounting, Accounting)
        epsilon, delta = self.epsilon, self.delta
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if isinstance(value, bool) or not isinstance(value, numbers.Real | None):
                raise TypeError(f"{name} must be a number or None, got {value!r}.")
        if delta is not None:
            check_delta(delta)
        if epsilon is not None and (not 0 < epsilon < math.inf or delta is None):
            raise ValueError(
                "a budget needs a finite epsilon > 0 and a delta (0.0 for pure releases), got "
                f"{epsilon=}, {delta=}."
            )
        renyi_order = self._checked_order()
        records = self.records
        if records is not None and (type(records) is not int or records < 1):  # True is an int
            raise ValueError(f"records must be an integer >= 1 or None, got {records!r}.")
        return dataclasses.replace(
            self,
            epsilon=None if epsilon is None else float(epsilon),
            delta=None if delta is None else float(delta),
            renyi_order=renyi_order,
            allow_unproven=bool(self.allow_unproven),
        )

    def _checked_order(self) -> float | None:
        epsilon, delta, order = self.epsilon, self.delta, self.renyi_order
        if self.accounting != "renyi_filter":
            if order is not None:
                raise ValueError(f"renyi_order={order!r} needs accounting='renyi_filter'.")
            return None
        # At delta = 0 no Renyi loss converts to a finite epsilon.
        if epsilon is None or not delta:
            raise ValueError(
                f"accounting='renyi_filter' needs a budget with delta > 0, got {epsilon=}, "
                f"{delta=}."
            )
        order = default_renyi_order(epsilon, delta) if order is None else float(order)
        if not 1 < order < math.inf or renyi_bound(epsilon, delta, order) <= 0:
            raise ValueError(
                f"renyi_order={order!r} leaves nothing to spend of epsilon={epsilon!r} "
                f"at delta={delta!r}. Use a larger order, or leave it out."
            )
        return order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset(Terms):
    """A dataset in the ledger's file."""

    id: int
    name: str

    @property
    def method(self) -> Method:
        """The method of `jaxdp.privacy.accounting` that computes this dataset's numbers."""
        return "auto" if self.accounting == "pld" else "rdp"

    @property
    def orders(self) -> tuple[float, ...]:
        """The Renyi orders of the first check. Where PLD decides, a few are enough."""
        return RDP_ORDERS if self.accounting == "rdp" else ROUGH_ORDERS

    @property
    def renyi_bound(self) -> float:
        """The largest Renyi loss at the fixed order that converts to the budget."""
        assert self.epsilon is not None and self.delta is not None and self.renyi_order is not None
        return renyi_bound(self.epsilon, self.delta, self.renyi_order)

    def check_unchanged(self, terms: Terms) -> None:
        """Raises ValueError if `terms` differ from those of the dataset.

        `records` is only compared where both are declared.
        """
        different = []
        for field in dataclasses.fields(Terms):
            registered = getattr(self, field.name)
            requested = getattr(terms, field.name)
            if field.name == "records" and (registered is None or requested is None):
                continue
            if registered != requested:
                different.append(f"{field.name} {registered!r}, not {requested!r}")
        if different:
            raise ValueError(
                f"dataset {self.name!r} is already registered with {', '.join(different)}. Terms "
                "never change, because earlier guarantees rest on them. Use the same terms, or "
                "another name for other data."
            )
