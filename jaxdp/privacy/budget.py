"""The check of a spend against a dataset's budget.

RDP decides where it suffices, and few PLDs decide the rest.
"""

import math
from collections import Counter
from collections.abc import Sequence

from jaxdp.files.text import up
from jaxdp.privacy.accounting import Tally, check_rules
from jaxdp.privacy.compositions import is_proven
from jaxdp.privacy.events import Counts, DpEvent, compose, describe
from jaxdp.privacy.spent_epsilon import ROUNDING, epsilon_of, renyi_spent, used_epsilon
from jaxdp.privacy.terms import Dataset

# The verdicts that a check keeps, beside one for each composition of the question.
_REMEMBERED = 64


class BudgetExceeded(RuntimeError):
    """A spend that its dataset's budget does not allow. Nothing ran and nothing was charged.

    Attributes:
        dataset: The dataset's name.
        budget: The registered (epsilon, delta).
        would_spend: Epsilon at the budget's delta, with this spend and all room that others hold.
        held: The part of `would_spend` that is room held by others, or 0.0.
    """

    def __init__(
        self,
        message: str,
        *,
        dataset: str,
        budget: tuple[float, float],
        would_spend: float,
        held: float = 0.0,
    ):
        super().__init__(message)
        self.dataset = dataset
        self.budget = budget
        self.would_spend = would_spend
        self.held = held


class Undecided(Exception):
    """A request that the budget denies, or that takes a PLD to decide.

    It is raised inside of a transaction, whose lock others wait for. PLDs are slow, so `decide`
    runs after the transaction has ended.

    Args:
        check: The check of the dataset.
        spent: The compositions that are spent.
        held_by_others: The events for which others hold room.
        with_own_holds: The requested events and all that the requester's holds keep room for. An
            event in both counts once, because a spend takes it out of the hold.
        requested: The requested events.
        more_follow: Whether more such requests are likely to follow.

    Raises:
        ValueError: No accounting rule covers an event together with the others.
    """

    def __init__(
        self,
        check: "BudgetCheck",
        spent: Sequence[Tally],
        *,
        held_by_others: Counts,
        with_own_holds: Counts,
        requested: Counts,
        more_follow: bool,
    ):
        super().__init__()
        self._check = check
        self._spent = spent
        self._with_own_holds = with_own_holds
        self._requested = requested
        self._more_follow = more_follow
        self._after = [tally.plus(held_by_others).plus(with_own_holds) for tally in spent]
        for tally in self._after:
            check.check_rules(tally)
        limited = check.dataset.epsilon is not None and not check.dataset.allow_unproven
        self._lacks_proof = limited and not is_proven(requested)

    def is_allowed(self) -> bool:
        """Returns whether the budget is known to allow the request."""
        return not self._lacks_proof and all(map(self._check.known, self._after))

    def decide(self) -> bool:
        """Computes what the check does not know.

        Returns False if the budget certainly denies the request.
        """
        verdicts = [self._check.known(tally) for tally in self._after]
        if self._lacks_proof or False in verdicts:
            return False
        next_step = self._requested if self._more_follow else Counter[DpEvent]()
        for tally, verdict in zip(self._after, verdicts, strict=True):
            if verdict is None:
                self._check.decide(tally, next_step, remember=_REMEMBERED + len(self._after))
        return True

    def refusal(self) -> BudgetExceeded:
        """Returns the error that explains the refusal."""
        dataset = self._check.dataset
        assert dataset.epsilon is not None and dataset.delta is not None
        budget = (dataset.epsilon, dataset.delta)
        event = describe(compose(self._requested))
        subject = (
            f"dataset {dataset.name!r}, budget epsilon {dataset.epsilon:g} at delta "
            f"{dataset.delta:g}"
        )
        if self._lacks_proof:
            return BudgetExceeded(
                f"{subject}: {event} has no proof, so its epsilon is infinite. Nothing was run or "
                "charged. Register the dataset without a budget or with allow_unproven=True to "
                "accept empirical privacy.",
                dataset=dataset.name,
                budget=budget,
                would_spend=math.inf,
            )
        if dataset.accounting == "renyi_filter":
            subject += (
                f" by the Renyi filter at order {dataset.renyi_order:g} (shares of its bound, in "
                "units of epsilon)"
            )
        spent = self._largest_use(self._spent)
        alone = self._largest_use([tally.plus(self._with_own_holds) for tally in self._spent])
        would_spend = self._largest_use(self._after)
        # inf - inf would be NaN where the request alone is infinite.
        held = would_spend - alone if alone < would_spend else 0.0
        share = f", {up(held)} of which is room that others hold" if held else ""
        remedy = "Use"
        if held:
            remedy = "Wait until the others are done (the report lists their holds), or use"
        return BudgetExceeded(
            f"{subject}: {up(spent)} is spent and {event} would make it {up(would_spend)}{share}. "
            f"Nothing was run or charged. {remedy} more noise, fewer steps or other data. "
            "privacy.calibrate_noise computes the noise.",
            dataset=dataset.name,
            budget=budget,
            would_spend=would_spend,
            held=held,
        )

    def _largest_use(self, tallies: Sequence[Tally]) -> float:
        return max(used_epsilon(self._check.dataset, tally.counts) for tally in tallies)


class BudgetCheck:
    """Decides whether compositions fit a dataset's budget, with few PLDs.

    Composition is monotone. A part of a fitting composition fits, and a superset of an exceeding
    one exceeds. So a few known compositions answer most questions. RDP, where it suffices, is
    cheap.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self._fitting: list[Tally] = []
        self._exceeding: list[Tally] = []
        self._last: Tally | None = None

    def check_rules(self, tally: Tally) -> None:
        """Raises ValueError if no accounting rule covers the composition."""
        methods = {"pld", "rdp"} if self.dataset.method == "auto" else {self.dataset.method}
        if methods.isdisjoint(tally.rules):
            check_rules(tally.counts, adjacency=self.dataset.adjacency, method=self.dataset.method)

    def known(self, tally: Tally) -> bool | None:
        """Returns whether a composition fits, or None if that needs a PLD."""
        dataset = self.dataset
        if dataset.epsilon is None or dataset.delta is None:
            return True
        if dataset.accounting == "renyi_filter":
            return renyi_spent(dataset, tally.counts) <= dataset.renyi_bound * (1 + ROUNDING)
        if any(fitting.covers(tally) for fitting in self._fitting):
            return True
        if any(tally.covers(exceeding) for exceeding in self._exceeding):
            return False
        # RDP is an upper bound, so what fits by RDP fits.
        if tally.rdp_epsilon(dataset.delta) <= dataset.epsilon * (1 + ROUNDING):
            return True
        # RDP is an upper bound of what a PLD gives, so it denies nothing where a PLD decides.
        return False if dataset.accounting == "rdp" else None

    def decide(self, tally: Tally, step: Counts, *, remember: int) -> None:
        """Decides a composition and likely later ones.

        A loop of spends then rarely needs another PLD.

        Args:
            tally: The composition to decide.
            step: The last step. It is empty if no similar step will follow.
            remember: The number of verdicts to keep, enough for all compositions of one question.
        """
        single = Tally(tally.adjacency).plus(step)
        recent = single
        if self._last and tally.covers(self._last):
            recent = tally.minus(self._last)
        self._last = tally
        fits = self._computed(tally, remember)
        # `others` has no Gaussians, which are one precision.
        repeats = all(tally.others[leaf] > count for leaf, count in single.others.items())
        if not fits or not single or not repeats:
            return
        # Twice the spends since the last decision are a guess at the next ones. The guess doubles
        # while spends grow. Near the budget it halves until it fits. So the number of PLDs is
        # logarithmic in the number of spends.
        share = 2.0
        while recent:
            ahead = tally.plus_share(recent, share)
            fits_ahead = self.known(ahead)
            if fits_ahead is None:
                fits_ahead = self._computed(ahead, remember)
            if fits_ahead:
                return
            # A guess of less than one more step saves nothing.
            most_repeats = share * max(recent.others.values(), default=0)
            if most_repeats <= 1 and share * recent.precision <= single.precision:
                return
            share /= 2

    def _computed(self, tally: Tally, remember: int) -> bool:
        """Returns whether a composition fits, and remembers it in place of weaker ones."""
        dataset = self.dataset
        assert dataset.epsilon is not None and dataset.delta is not None
        fits = epsilon_of(dataset, tally.counts, dataset.delta) <= dataset.epsilon * (1 + ROUNDING)
        if fits:
            # A fitting composition that the new one covers answers nothing more.
            stronger = [old for old in self._fitting if not tally.covers(old)]
            self._fitting = [tally, *stronger][:remember]
        else:
            stronger = [old for old in self._exceeding if not old.covers(tally)]
            self._exceeding = [tally, *stronger][:remember]
        return fits
