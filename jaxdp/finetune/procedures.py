"""Candidates of a search that `fit` does not train: a recalibration, an adaptation to a stream."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxdp.files import check_function
from jaxdp.privacy import Account, DpEvent, Ledger
from jaxdp.privacy.events import compose, composition, describe


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Procedure:
    """Any private release as a candidate of `tune`.

        def run(account, seed):
            hospital = recalibration.Party(logits, labels, account=account)
            key = jaxdp.release.stream(seed, "noise")
            found = recalibration.acc_t([hospital], epsilon=0.5, key=key)
            return {"temperature": np.float32(found.temperature)}

        facts = ["acc_t", logits, labels]
        candidate = finetune.Procedure(event=recalibration.event(0.5), run=run, facts=facts)

    Attributes:
      event: What one run costs a record of the account of the search.
      run: `run(account, seed) -> params` makes the release, and spends exactly `event` from the
        account. It returns arrays in the structure of the search's params. Only a run can tell
        what it spends and returns, so an error about that comes when the search is paid. `seed` is
        16 secret bytes, from which all of its noise comes. It shows and writes nothing else.
      facts: Numbers, texts and arrays that say which release it is, such as a name and its records.
        No hash sees what a Python function computes. So equal facts are the caller's word that a
        run with an equal seed releases equal bits: change them with the function. A search in a
        workdir goes on after a crash, and answers from there, only if they are the same. None, the
        default, says nothing: a search that is killed pays again, with other noise.
    """

    event: DpEvent
    run: Callable[[Account, bytes], Any]
    facts: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        check_function("run", self.run, "run(account, seed) -> {'temperature': array}")
        check_facts(self.facts)

    def release(self, account: Account, seed: bytes) -> Any:
        """Returns the params of one run, which a ledger in memory pays in the terms of `account`.

        Raises:
          RuntimeError: The run spent something else than `event`.
        """
        with spending(self.event, account) as own:
            return self.run(own, seed)


def check_facts(facts: Any) -> None:
    """Raises TypeError for facts that are no sequence of numbers, texts and arrays."""
    is_text = isinstance(facts, str | bytes)
    if facts is not None and (is_text or not isinstance(facts, Sequence)):
        raise TypeError(
            "facts must be a list of numbers, texts and arrays, such as ['accuracy', "
            f"source.fingerprint], or None, got {type(facts).__name__}."
        )


@contextlib.contextmanager
def spending(event: DpEvent, account: Account) -> Iterator[Account]:
    """Yields the account of a run that is paid: of a ledger in memory, in the terms of `account`.

    Raises:
      RuntimeError: The run spent something else than `event`. It may spend the event once on each
        of several disjoint parts of the records.
    """
    with Ledger.in_memory() as ledger:
        ledger.register("run", adjacency=account.adjacency, unit=account.unit)
        yield ledger.account("run")
        events = ledger.events("run")
    paid = compose(composition(event))
    spent = {part: each for part, each in events.items() if composition(each)}
    # The budget of a data set is for all its records, or for each of its parts (`None` is no part).
    is_once = spent == {None: paid}
    is_by_parts = bool(spent) and None not in spent and set(spent.values()) == {paid}
    if not (is_once or is_by_parts):
        raise RuntimeError(
            f"a run spent {spent}, but the search was charged for {describe(paid)}. Nothing is "
            "released."
        )
