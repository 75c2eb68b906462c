"""The till: the one way by which anything leaves private data.

    with Till(workdir) as till:
        answers = till.release(Release(label="answers", charges=[(account, event)], facts=..., compute=...))

A `Release` says what it charges, what determines its bits, and how to compute its value from 16 secret bytes. The till

1. makes one token, a hash of the facts, the programs and the environment, keyed by the secret seed of the run;
2. reserves all accounts or none, under the token;
3. notes the charge in the workdir, with the head of the ledger;
4. derives all randomness of the release from the seed and the token;
5. hands the value to `keep`, which makes it durable;
6. deletes the seed.

A release that was interrupted after step 2 has the same token when the same program runs again: it is not charged a
second time, and its value is the same bit for bit. If anything is different, so is the token: the noise is fresh and
the ledger charges again. So no two values share noise, and the ledger never shows less than was released.
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

from jaxdp.files import understood, write_durably
from jaxdp.privacy import Account, DpEvent, Ledger
from jaxdp.privacy.events import from_json, to_json
from jaxdp.privacy.ledger import Head
from jaxdp.release import identity, secrets
from jaxdp.release.workdir import alone
from jaxdp.report import MetricsWriter, read_metrics

T = TypeVar("T")
Requests = Sequence[tuple[Account, DpEvent]]

_NOTES = "charges.jsonl"
_KEPT = "released.safetensors"
_DAMAGED = (
    "Restore it from a copy. Without one, delete it: the release is then made with fresh noise, and charged, once more."
)


class Payment(Protocol):
    """What a release charges, where only the reservation knows it, as for a stream of visits."""

    def reserve(self, *, label: str, token: str) -> contextlib.AbstractContextManager[Requests]:
        """Reserves everything or nothing; yields what was charged, and commits when the body ends."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Release(Generic[T]):
    """One release.

    Attributes:
      label: for people who read the ledger. Never put data in it.
      charges: (account, event) pairs of one ledger, each account once; or a `Payment`. Empty for public data.
      compute: `compute(secret) -> value`, from 16 secret bytes. Nothing else may touch private data. The value depends
        on the secret, `facts` and `programs` only.
      facts: `facts() -> pytree` of arrays, numbers and text that determine the value; called only where the release
        might be repeated: with a workdir, or with a given seed.
      programs: `programs() -> texts` of what is compiled (`identity.program`). A program that calls back to Python
        cannot be repeated: its release is charged again after a crash, with fresh noise.
      keep: `keep(value)` makes the value durable, before the seed is deleted.
      note: further fields for the row in the workdir's notes, which `Till.notes` reads.
      deterministic: whether all programs give the same bits on every run, by default what the backend promises
        (`identity.deterministic`). Otherwise the release cannot be repeated.
      once_in: the name of what the payment counts in, where a charge depends on what was counted before it. The same
        release is then free a second time in that count only.
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

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The texts of `programs`."""
        return tuple(self.programs())

    @functools.cached_property
    def digest(self) -> str:
        """A hash of label, programs and facts."""
        texts = [hashlib.sha256(text.encode()).hexdigest() for text in self.texts]
        return identity.digest([self.label, texts, self.facts()])


class Till:
    """The secret, the notes and the lock of one run.

    Args:
      workdir: the run's own folder, made if needed, for the notes and for the secret seed while a paid release is
        unfinished. None keeps the seed in memory: what is interrupted is paid again.
      seed: 16 secret bytes, to reproduce a run in a test, where the same release is paid once; random by default.
      forget: when the seed is deleted: after each "release"; or at the end of the "run", where several releases share
        a secret (`stream`). An unfinished release keeps it.

    Raises:
      TypeError, ValueError: the seed is not 16 bytes, or another process runs in the workdir.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str] | None = None,
        *,
        seed: bytes | None = None,
        forget: Literal["release", "run"] = "release",
    ):
        secrets.check_seed(seed)
        self.workdir = None if workdir is None else pathlib.Path(workdir)
        self._given, self._drawn, self._forget = seed, seed, forget
        self._unfinished = False
        self._files = contextlib.ExitStack()
        self._settled: set[str] = set()
        self._environment: dict[str, Any] | None = None
        if self.workdir is None:
            return
        self._secret, self._kept = self.workdir / secrets.FILE, self.workdir / _KEPT
        with contextlib.ExitStack() as opened:  # closes what is open if the rest fails
            opened.enter_context(alone(self.workdir))
            if self._secret.exists() or seed is not None:
                secrets.stored(self._secret, seed)  # raises now for a damaged one, or another one
            self._writer = opened.enter_context(MetricsWriter(self.workdir / _NOTES, fsync=True))
            self._files = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Deletes the seed unless a paid release needs it, or the "run" failed; lets go of the workdir."""
        if not self._unfinished and not (failed and self._forget == "run"):
            self._delete_seed()
        self._files.close()

    @property
    def name(self) -> str | None:
        """A name of the run that a resumed run has, too; None without a workdir."""
        return None if self.workdir is None else hashlib.sha256(os.fspath(self.workdir.resolve()).encode()).hexdigest()

    # --- The protocol -------------------------------------------------------------------------------------------------

    def release(self, what: Release[T]) -> T:
        """Pays for a release, computes it and keeps it; see the module's text.

        Raises:
          BudgetExceeded: nothing is computed or charged.
          ValueError: the accounts are of several ledgers, or one is named twice; before anything is charged.
        """
        with self.paying(what) as secret:
            value = what.compute(secret)
            what.keep(value)
        return value

    @contextlib.contextmanager
    def paying(self, what: Release[Any]) -> Iterator[bytes]:
        """Does `release` for a value that comes bit by bit: pays, yields the secret, and ends with the body."""
        if isinstance(what.charges, Sequence):
            self.settle([account for account, _ in what.charges])
        token = self.token(what)
        paid = hmac.digest(what.once_in.encode(), token.encode(), "sha256").hex() if what.once_in else token
        with _reserved(what, paid) as charged:
            self._unfinished = True
            if self.workdir is not None:
                events = [[account.name, to_json(event)] for account, event in charged]
                head = {"head": dataclasses.astuple(charged[0][0].ledger.head)} if charged else {}
                self._writer.write(0, token=paid, charges=events, **head, **what.note)
            yield secrets.derive(self._seed(), f"release {token}")
        self._unfinished = False
        if self._forget == "release":
            self._delete_seed()

    def token(self, what: Release[Any]) -> str:
        """Returns a hash of all that determines a release, keyed by the seed: it tells nothing about private data."""
        used_once = self.workdir is None and self._given is None  # the seed
        if used_once or not what.deterministic or any(map(identity.calls_host, what.texts)):
            return entropy.token_hex(32)
        if self._environment is None:
            self._environment = identity.environment()
        charges = [to_json(event) for _, event in what.charges] if isinstance(what.charges, Sequence) else []
        message = json.dumps([charges, self._environment, what.digest], sort_keys=True)
        return hmac.digest(self._seed(), b"token" + message.encode(), "sha256").hex()

    def stream(self, purpose: str, *, impl: str = "rbg") -> jax.Array:
        """Returns a key that several releases of the run share; ValueError if each release deletes the seed."""
        if self._forget != "run":
            raise ValueError(f"a shared secret needs Till(..., forget='run'), got forget={self._forget!r}.")
        return secrets.stream(self._seed(), purpose, impl=impl)

    # --- A single release, kept by the till ---------------------------------------------------------------------------

    def once(self, what: Release[dict[str, Any]]) -> dict[str, Any]:
        """Returns the NumPy arrays of a release, a flat dict; those that the workdir keeps are not made or paid again.

        Raises:
          ValueError: the workdir keeps another release: of other data, settings or programs.
          BudgetExceeded: the accounts are of another ledger, which has no room for what is kept.
        """
        kept = self.kept(what)
        if kept is None:
            keep = self.keeper(what)
            with self.paying(what) as secret:
                made = jax.tree.map(np.asarray, what.compute(secret))
                keep(made)
            return made
        self._delete_seed()  # it may have outlived a crash between the two
        return kept

    def kept(self, what: Release[Any]) -> dict[str, np.ndarray] | None:
        """Returns the arrays of a release that the workdir keeps, None without any; raises as `once`."""
        from safetensors import safe_open

        if self.workdir is None or not self._kept.exists():
            return None
        with understood(self._kept, _DAMAGED), safe_open(self._kept, framework="numpy") as file:
            found = {"salt": "", "check": "", **(file.metadata() or {})}
            salt = bytes.fromhex(found["salt"])
        if _check(salt, what) != found["check"]:
            raise ValueError(
                f"{self.workdir} keeps another release: of other data, settings or programs. Its values are in "
                f"{_KEPT}; use a new workdir for a new release."
            )
        if isinstance(what.charges, Sequence):
            self.settle([account for account, _ in what.charges])
        return load_arrays(self._kept)

    def keeper(self, what: Release[Any]) -> Callable[[dict[str, Any]], None]:
        """Returns a function that makes arrays of a release durable, in place of those that it was given before."""
        if self.workdir is None:
            return lambda arrays: None
        salt = secrets.new_seed()
        metadata = {"salt": salt.hex(), "check": _check(salt, what)}
        return lambda arrays: _save_arrays(self._kept, arrays, metadata)

    # --- Notes --------------------------------------------------------------------------------------------------------

    def notes(self) -> list[dict[str, Any]]:
        """Returns the workdir's rows, one per paid release, the oldest first."""
        return [] if self.workdir is None else notes(self.workdir)

    def settle(self, accounts: Sequence[Account]) -> None:
        """Charges the accounts what the workdir was ever charged and their ledger does not know.

        Another ledger, or one restored from an older copy, is charged in full. So is a single account under a name that
        the workdir does not know.

        Raises:
          BudgetExceeded: a ledger has no room for what was released.
          LedgerDamaged: a ledger has lost history that the notes know of.
        """
        fresh = {account.name: account for account in accounts if account.name not in self._settled}
        if fresh:
            rows, only = self.notes(), accounts[0] if len(accounts) == 1 else None
            noted = {name for row in rows for name, _ in row["charges"]}
            # Charges under other names are those of a renamed data set, or of another account of the same run.
            renamed = only if not self._settled and noted.isdisjoint(fresh) else None
            settle(rows, lambda name: fresh.get(name, renamed if name else only))
            self._settled |= set(fresh)

    # --- Inside -------------------------------------------------------------------------------------------------------

    def _seed(self) -> bytes:
        if self.workdir is not None:
            return secrets.stored(self._secret, self._given)
        if self._drawn is None:
            self._drawn = secrets.new_seed()
        return self._drawn

    def _delete_seed(self) -> None:
        self._drawn = self._given
        if self.workdir is not None:
            secrets.forget(self._secret)


def notes(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the notes of a workdir: rows with "token" and "charges", (account, event) pairs."""
    rows = read_metrics(workdir / _NOTES) if (workdir / _NOTES).exists() else []
    # The first release noted one event a row, and no account where there was only one.
    return [row if "charges" in row else {**row, "charges": [[row.get("dataset", ""), row["event"]]]} for row in rows]


def settle(rows: Sequence[Mapping[str, Any]], account_of: Callable[[str], Account | None]) -> None:
    """Charges rows of `notes` to accounts that do not know of them; a last one that was only reserved is committed.

    `account_of` returns the account for a noted name, "" for a charge of the first release; None leaves the charge out.

    Raises:
      BudgetExceeded: an account has no room.
      LedgerDamaged: a ledger that the notes know has lost history.
    """
    accounts = [account_of(name) for row in rows for name, _ in row["charges"]]
    for ledger in {id(account.ledger): account.ledger for account in accounts if account is not None}.values():
        check_history(rows, ledger)
    for row in rows:
        for name, event in row["charges"]:
            account = account_of(name)
            if account is not None and (row is rows[-1] or not account.paid(row["token"])):
                with account.spend(from_json(event), label="charged again on resuming", token=row["token"]):
                    pass


def check_history(rows: Sequence[Mapping[str, Any]], ledger: Ledger) -> None:
    """Raises LedgerDamaged if a ledger does not go through the newest of its heads in `notes`."""
    for row in reversed(rows):
        known = ledger.contains(Head(*row["head"])) if "head" in row else None
        if known is False:
            raise ledger.damaged(
                f"has lost history: a run was charged as spend {row['head'][1]}, which it does not have"
            )
        if known:
            return


@contextlib.contextmanager
def _reserved(what: Release[Any], token: str) -> Iterator[Requests]:
    """Reserves all that a release charges or nothing; yields it, and commits when the body ends."""
    if not isinstance(what.charges, Sequence):
        with what.charges.reserve(label=what.label, token=token) as charged:
            yield charged
        return
    ledgers = {account.ledger for account, _ in what.charges}
    if len(ledgers) > 1:
        raise ValueError("the accounts of one release must be of one ledger: two files cannot pay all or none.")
    with contextlib.ExitStack() as paid:
        for ledger in ledgers:
            paid.enter_context(ledger.spend_all(what.charges, label=what.label, token=token))
        yield what.charges


def _check(salt: bytes, what: Release[Any]) -> str:
    """Returns a salted hash: one of private data alone would let anybody try guesses."""
    return hmac.digest(salt, what.digest.encode(), "sha256").hex()


def _save_arrays(path: pathlib.Path, arrays: Mapping[str, Any], metadata: dict[str, str]) -> None:
    from safetensors.numpy import save

    write_durably(path, save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata))


def load_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `Till.once` kept in a workdir's file."""
    from safetensors.numpy import load_file

    with understood(path, _DAMAGED):
        return load_file(path)
