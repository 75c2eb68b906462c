"""The till: the one way by which anything leaves private data.

    with Till(workdir) as till:
        answers = till.release(
            Release(label="answers", charges=[(account, event)], facts=..., compute=...)
        )

A `Release` states its charges, the facts that determine its bits, and how to compute its value from
16 secret bytes. These are the till's steps:

1. Make one token, a hash of the facts, the programs and the environment, keyed by the secret seed
   of the run.
2. Reserve all accounts or none, under the token.
3. Note the charge in the workdir, with the head of the ledger.
4. Derive all randomness of the release from the seed and the token.
5. Pass the value to `keep`, which makes it durable.
6. Delete the seed.

A release that was interrupted after step 2 has the same token when the same program runs again. It
is not charged a second time, and its value is the same bit for bit. If anything differs, so does
the token. The noise is then fresh, and the ledger charges again. So no two values share noise, and
the ledger never shows less than was released.
"""

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import json
import os
import pathlib
import secrets as entropy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import jax
import numpy as np

from jaxdp.files import shown
from jaxdp.privacy import Account, DpEvent
from jaxdp.privacy.events import describe, to_json
from jaxdp.release import charge_notes, identity, kept_arrays, secrets
from jaxdp.release.charge_notes import notes, settle
from jaxdp.release.hosts import Hosts
from jaxdp.release.workdir import OwnProcess, alone
from jaxdp.report import MetricsWriter
from jaxdp.transforms.compiler import check_options

T = TypeVar("T")
Requests = Sequence[tuple[Account, DpEvent]]


class Payment(Protocol):
    """Charges that are known only at the reservation, such as for a stream of visits.

    The till cannot settle them. Whoever makes a Payment calls `Till.settle` before the first
    release of a workdir that is resumed.
    """

    def reserve(self, *, label: str, token: str) -> contextlib.AbstractContextManager[Requests]:
        """Reserves everything or nothing.

        Yields the charges, and commits them when the body ends.
        """


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Release(Generic[T]):
    """One release.

    Attributes:
      label: A label for people who read the ledger. Never put data in it.
      charges: (account, event) pairs of one ledger, with each account once, or a `Payment`. Empty
          for public data. A release that the till keeps (`Till.once`) needs pairs.
      compute: A function `compute(secret) -> value` of 16 secret bytes. Nothing else may touch
          private data. The value depends on the secret, `facts` and `programs` only.
      facts: A function `facts() -> pytree` of arrays, numbers and text that determine the value. It
          is called only if the release might be repeated: with a workdir, or with a given seed. It
          is called again for every token, so an array of NumPy that was changed in place gives
          another one. It must be of what `compute` reads: copy an array of the user that a later
          call reads.
      programs: A function `programs() -> texts` of the compiled programs (`identity.program`). A
          program that calls back to Python cannot be repeated. Its release is charged again after a
          crash, with fresh noise.
      keep: A function `keep(value)` that makes the value durable, before the seed is deleted.
      note: Further fields for the row in the workdir's notes, which `Till.notes` reads.
      deterministic: Whether all programs give the same bits on every run. The default is
          `identity.deterministic`. If False, the release cannot be repeated.
      once_in: The name of a count, if the charge depends on what was counted before. The token of
          the payment then includes the name. So a repetition of the release is free in the count
          that paid for it, and is charged in any other count.
      partition: The part of a fixed division that `compute` reads, as in `jaxdp.Ledger.spend`. None
          is the whole data set. A `Payment` names its own.
    """

    label: str
    charges: Requests | Payment
    compute: Callable[[bytes], T]
    facts: Callable[[], Any]
    programs: Callable[[], Iterable[str]] = tuple
    keep: Callable[[T], None] = lambda value: None
    note: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    deterministic: bool = dataclasses.field(default_factory=identity.deterministic)
    once_in: str = ""
    partition: str | None = None

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The texts of `programs`."""
        return tuple(self.programs())

    @property
    def digest(self) -> str:
        """A hash of label, programs and facts as they are now.

        Raises:
          RuntimeError: Texts of programs lack constants (`identity.check_constants`).
        """
        if self.texts:
            identity.check_constants()
        texts = [hashlib.sha256(text.encode()).hexdigest() for text in self.texts]
        return identity.digest([self.label, texts, identity.with_words(self.facts())])


class Till:
    """The secret, the notes and the lock of one run.

    Args:
      workdir: The run's folder for the notes, and for the secret seed while a paid release is
          unfinished. It is made if needed. None keeps the seed in memory, so that an interrupted
          release is paid again.
      seed: 16 secret bytes, to reproduce a run in a test. The same release is then paid once. The
          default is random.
      forget: When the seed is deleted: after each "release", or at the end of the "run" if several
          releases share a secret (`stream`). An unfinished release keeps it.
      hosts: The processes that release together, by default this one alone. All call the same
          methods with the same releases. Process 0 pays and has the files. The accounts of the
          others may be None.

    Raises:
      TypeError, ValueError: The seed is not 16 bytes, or another process runs in the workdir.
      RuntimeError: `XLA_FLAGS` has options that `jaxdp.transforms.compiler` refuses.
      RuntimeError: From every method but `close`, in a process that was forked with an open till.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str] | None = None,
        *,
        seed: bytes | None = None,
        forget: Literal["release", "run"] = "release",
        hosts: Hosts | None = None,
    ):
        check_options()
        secrets.check_seed(seed)
        self._hosts = hosts or Hosts()
        self._process = OwnProcess()
        # Absolute, so that the seed is deleted also where a program changes its folder meanwhile.
        self.workdir = None if workdir is None else pathlib.Path(workdir).absolute()
        self._given_seed = seed
        self._seed_in_memory = seed  # without a workdir
        self._forget = forget
        # Whether a release was paid and is not done. It needs the seed to be repeated.
        self._unfinished = False
        self._left_unfinished = False  # by an earlier process
        self._files = contextlib.ExitStack()
        self._settled: set[str] = set()
        self._environment: dict[str, Any] | None = None
        if self.workdir is not None:
            self._seed_path = self.workdir / secrets.FILE
            self._arrays_path = self.workdir / kept_arrays.FILE
            self._hosts.first(self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Deletes the seed unless a paid release needs it or the "run" failed.

        Releases the workdir. In a forked process it closes this process's files and leaves the run
        to the process that opened the till.
        """
        if self.forked:
            # Both processes share one open file, so closing it here frees no lock of the other.
            self._files.close()
            return
        # Releases of a "run" share the seed, so a run that failed needs it when it is resumed. So
        # does a release that an earlier process left, if this one was refused before it.
        goes_on = failed and (self._forget == "run" or self._left_unfinished)
        if not self._unfinished and not goes_on:
            self._delete_seed()
        self._files.close()

    @property
    def name(self) -> str | None:
        """A name of the run that a resumed run shares, or None without a workdir."""
        if self.workdir is None:
            return None
        return hashlib.sha256(os.fspath(self.workdir.resolve()).encode()).hexdigest()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that opened the till."""
        return self._process.forked

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked from the one that opened the till."""
        where = "" if self.workdir is None else f" in {shown(self.workdir)}"
        self._process.check(f"the run{where}")

    # --- The protocol ----------------------------------------------------------------------------

    def release(self, what: Release[T]) -> T:
        """Pays for a release, computes it and keeps it, as the module's text says.

        Raises:
          BudgetExceeded: A budget does not allow a charge. Nothing is computed or charged.
          ValueError: The accounts are of several ledgers, or one is named twice. Nothing is
              charged.
        """
        with self.paying(what) as secret:
            value = what.compute(secret)
            what.keep(value)
        return value

    @contextlib.contextmanager
    def paying(self, what: Release[Any]) -> Iterator[bytes]:
        """Pays for a value that comes bit by bit, and yields the secret.

        The release ends with the body.
        """
        self.check_process()
        token = self.token(what)
        # The stack commits the reservation when the body ends.
        with contextlib.ExitStack() as reservation:
            # JSON carries text between processes, and no bytes.
            secret = self._hosts.first(lambda: self._pay(what, token, reservation).hex())
            yield bytes.fromhex(secret)
        # The reservation is committed by now, so a repetition is a new release.
        self._unfinished = False
        self._left_unfinished = False
        if self._forget == "release":
            self._delete_seed()

    def token(self, what: Release[Any]) -> str:
        """Returns a hash of all that determines a release, keyed by the seed.

        It reveals nothing about private data. Only process 0 has it. It covers the facts of every
        process.
        """
        self.check_process()
        # A random token is charged again after a crash. It is right where the same bits cannot
        # come again: without the seed, or where a program may compute others.
        seed_is_lost = self.workdir is None and self._given_seed is None
        if seed_is_lost or not what.deterministic or any(map(identity.calls_host, what.texts)):
            return entropy.token_hex(32)
        facts = self._hosts.each(lambda: self._facts(what))
        if not self._hosts.leads:
            return ""
        # The events only. An account may be renamed, and the release stays the same.
        charges = []
        if isinstance(what.charges, Sequence):
            charges = [to_json(event) for _, event in what.charges]
        message = json.dumps([charges, facts], sort_keys=True)
        return hmac.digest(self._seed(), b"token" + message.encode(), "sha256").hex()

    def stream(self, purpose: str, *, impl: str = "chacha12") -> jax.Array:
        """Returns a key that several releases of the run share.

        Raises ValueError if each release deletes the seed.
        """
        self.check_process()
        if self._forget != "run":
            raise ValueError(
                f"a shared secret needs Till(..., forget='run'), got forget={self._forget!r}."
            )
        return secrets.stream(self._seed(), purpose, impl=impl)

    # --- A single release, kept by the till ------------------------------------------------------

    def once(self, what: Release[dict[str, Any]]) -> dict[str, Any]:
        """Returns the NumPy arrays of a release, a flat dict.

        Kept arrays are not computed or paid again.

        Raises:
          TypeError: The charges are a `Payment`, and there is a workdir. Another ledger could not
              be charged for what the workdir keeps.
          ValueError: The workdir keeps another release: of other data, settings or programs. Or it
              was paid by other events, by another number of accounts, or by several of which one
              has another name.
          BudgetExceeded: The accounts are of another ledger, which has no room for the kept
              release.
        """
        stored = self.kept(what)
        if stored is not None:
            # A crash between keeping and deleting leaves the seed.
            self._delete_seed()
            return stored
        keep = self.keeper(what)
        with self.paying(what) as secret:
            arrays: dict[str, Any] = jax.tree.map(np.asarray, what.compute(secret))
            keep(arrays)
        return arrays

    def kept(self, what: Release[Any]) -> dict[str, np.ndarray] | None:
        """Returns the arrays of a release that the workdir keeps, or None.

        Raises the errors of `once`.
        """
        self.check_process()
        if self.workdir is None:
            return None
        if not isinstance(what.charges, Sequence):
            raise TypeError(
                "charges must be (account, event) pairs for a release that a workdir keeps, got "
                f"{type(what.charges).__name__}. Use Till.release for a Payment."
            )
        if not self._arrays_path.exists():
            return None
        if not kept_arrays.is_of(self._arrays_path, what.digest):
            raise ValueError(
                f"{self.workdir} keeps another release: of other data, settings or programs. Its "
                f"values are in {kept_arrays.FILE}. Use a new workdir for a new release."
            )
        # The digest has no charges. Those of another adjacency, or of fewer accounts, would be
        # settled for less than the release costs them, or for nothing.
        if what.charges and not charge_notes.have(self.notes(), what.charges):
            asked = ", ".join(f"{describe(event)} of {a.name!r}" for a, event in what.charges)
            raise ValueError(
                f"{self.workdir} keeps this release, but has no note that {asked} paid for it. "
                "Nothing is spent. Give the accounts that paid, with their adjacency, or use a new "
                "workdir."
            )
        self.settle([account for account, _ in what.charges], partition=what.partition)
        return kept_arrays.load_arrays(self._arrays_path)

    def keeper(self, what: Release[Any]) -> Callable[[dict[str, Any]], None]:
        """Returns a function that makes arrays of a release durable.

        Each call replaces the earlier arrays.
        """
        self.check_process()
        if self.workdir is None:
            return lambda arrays: None
        metadata = kept_arrays.new_metadata(what.digest)
        return lambda arrays: kept_arrays.save_arrays(self._arrays_path, arrays, metadata)

    # --- Notes -----------------------------------------------------------------------------------

    def notes(self) -> list[dict[str, Any]]:
        """Returns the workdir's rows, one per paid release, the oldest first."""
        self.check_process()
        return [] if self.workdir is None else notes(self.workdir)

    def settle(
        self,
        accounts: Sequence[Account],
        *,
        partition: str | None = None,
        under_any_name: bool = False,
    ) -> None:
        """Charges the accounts for noted charges that their ledger lacks.

        Another ledger, or one restored from an older copy, is charged in full. The same holds for a
        single account under a name that the workdir does not know.

        Args:
          accounts: The accounts.
          partition: The part that paid for notes of earlier versions, which name none.
          under_any_name: Whether a single account pays for all notes, also for those under the name
            of another account of the workdir.

        Raises:
          BudgetExceeded: A ledger has no room for the noted charges.
          LedgerDamaged: A ledger has lost history that the notes know of.
        """
        unsettled = {
            account.name: account for account in accounts if account.name not in self._settled
        }
        if not unsettled:
            return
        rows = self.notes()
        only = accounts[0] if len(accounts) == 1 else None
        noted_names: set[str] = set()
        for row in rows:
            noted_names.update(name for name, _ in row["charges"])
        # Charges under other names belong to a renamed data set, or to another account of the same
        # run. The first single account takes them where none of the names is its own.
        is_renamed = not self._settled and noted_names.isdisjoint(unsettled)
        renamed = only if under_any_name or is_renamed else None
        settle(
            rows,
            lambda name: unsettled.get(name, renamed if name else only),
            partition=partition,
        )
        self._settled |= set(unsettled)

    # --- Inside ----------------------------------------------------------------------------------

    def _open(self) -> None:
        assert self.workdir is not None
        # The stack closes what is open if a later step fails.
        with contextlib.ExitStack() as files:
            files.enter_context(alone(self.workdir))
            if self._seed_path.exists() or self._given_seed is not None:
                # Before `stored`, which makes the file if it is missing.
                self._left_unfinished = self._seed_path.exists()
                # Raises if the file is damaged or holds another seed.
                secrets.stored(self._seed_path, self._given_seed)
            writer = MetricsWriter(self.workdir / charge_notes.FILE, fsync=True)
            self._writer = files.enter_context(writer)
            self._files = files.pop_all()

    def _pay(self, what: Release[Any], token: str, reservation: contextlib.ExitStack) -> bytes:
        """Reserves and notes a release. Returns its secret.

        `reservation` commits the charges when it ends.
        """
        # A ledger that has lost noted charges gets them back before it grants more.
        if isinstance(what.charges, Sequence):
            self.settle([account for account, _ in what.charges], partition=what.partition)
        paid_token = token
        if what.once_in:
            paid_token = hmac.digest(what.once_in.encode(), token.encode(), "sha256").hex()
        try:
            charges = reservation.enter_context(_reserved(what, paid_token))
        except (OSError, KeyboardInterrupt):
            # The ledger may have the reservation, of which only the same seed makes a repetition.
            self._unfinished = True
            raise
        # From here on the seed is needed, because a repetition is free.
        self._unfinished = True
        if self.workdir is not None:
            note = {
                "token": paid_token,
                "charges": [[account.name, to_json(event)] for account, event in charges],
            }
            if what.partition is not None:
                note["partition"] = what.partition
            if charges:
                account, _ = charges[0]
                note["head"] = dataclasses.astuple(account.ledger.head)
            # On the disk before anything is computed.
            self._writer.write(0, **note, **what.note)
        # By the token without the count: the bits are the same, whichever count pays.
        return secrets.derive(self._seed(), f"release {token}")

    def _facts(self, what: Release[Any]) -> list[Any]:
        """Returns what this process contributes to the token."""
        # Once a run, because it reads the versions of packages and the processor.
        if self._environment is None:
            self._environment = identity.environment()
        return [self._environment, what.digest]

    def _seed(self) -> bytes:
        if self.workdir is not None:
            return secrets.stored(self._seed_path, self._given_seed)
        if self._seed_in_memory is None:
            self._seed_in_memory = secrets.new_seed()
        return self._seed_in_memory

    def _delete_seed(self) -> None:
        self._seed_in_memory = self._given_seed
        if self.workdir is not None and self._hosts.leads:
            secrets.forget(self._seed_path)


@contextlib.contextmanager
def _reserved(what: Release[Any], token: str) -> Iterator[Requests]:
    if not isinstance(what.charges, Sequence):
        with what.charges.reserve(label=what.label, token=token) as charges:
            yield charges
        return
    ledgers = {account.ledger for account, _ in what.charges}
    if len(ledgers) > 1:
        raise ValueError(
            "the accounts of one release must be of one ledger. Two files cannot pay all or none."
        )
    with contextlib.ExitStack() as reservations:
        # One ledger, or none for public data.
        for ledger in ledgers:
            reservation = ledger.spend_all(
                what.charges, partition=what.partition, label=what.label, token=token
            )
            reservations.enter_context(reservation)
        yield what.charges
