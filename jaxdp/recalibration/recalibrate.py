"""Recalibration over many private sources in one process.

There is a function per method, and a payment per source.
"""

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.labels import check_logits
from jaxdp.files import check_choice
from jaxdp.privacy import Account, DpEvent, NoOpDpEvent, SelfComposedDpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.recalibration.methods import (
    AccBisection,
    AccT,
    EceT,
    Form,
    HistogramBinning,
    LogisticBinning,
    NllT,
    Search,
)
from jaxdp.recalibration.protocol import (
    Method,
    Party,
    Records,
    Scale,
    event,
    exact_sums,
    in_units,
    noise_scale,
    play,
    round_noise,
    summands,
)
from jaxdp.recalibration.search import Bracket, FoundTemperature, Spacing
from jaxdp.release import Release, Till, digest, program, stream
from jaxdp.transforms.noise import check_key

Sources = Sequence[Party | tuple[Any, Any]]
Workdir = str | os.PathLike[str] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Recalibration:
    """The calibrator's result.

    It depends on noisy answers only, so it is free to publish if `event` is private.

    Attributes:
      method: The algorithm with its public constants.
      parameters: The result of `method.finish`, a pytree of NumPy arrays.
      event: The charge of every source, for one of its records, or of its owners of records.
    """

    method: Method
    parameters: Any
    event: DpEvent

    def apply(self, logits: Any) -> np.ndarray:
        """Returns the confidence in the largest of logits [n, m], float32 [n].

        It is NaN for logits that are not finite.

        Raises:
          TypeError, ValueError: The logits are not floating point [n, m] with m >= 2.
        """
        if not isinstance(logits, jax.Array):
            logits = np.asarray(logits)
        check_logits(logits, least=2)
        logits = jnp.asarray(logits, jnp.float32)
        return np.asarray(_confidence(self.method, self.parameters, logits))

    @property
    def temperature(self) -> float:
        """T of a temperature method. Other methods raise AttributeError."""
        return float(self._found.temperature)

    @property
    def at_end(self) -> Literal["low", "high"] | None:
        """The end of the bracket that the search for T still has. The best T may be beyond it.

        An objective that is flat and does not say whether T is too high, as without records, leads
        to T near 1.
        """
        if self._found.low:
            return "low"
        return "high" if self._found.high else None

    @property
    def bins(self) -> np.ndarray:
        """The confidence in each bin of histogram binning, float32 [bins].

        Other methods raise AttributeError.
        """
        if not isinstance(self.method, HistogramBinning):
            raise AttributeError(f"{self._contents}, no confidences of bins.")
        return self.parameters

    @property
    def _found(self) -> FoundTemperature:
        if not isinstance(self.parameters, FoundTemperature):
            raise AttributeError(f"{self._contents}, no temperature.")
        return self.parameters

    @property
    def _contents(self) -> str:
        return f"{type(self.method).__name__} has {self.parameters!r}"


def recalibrate(
    method: Method,
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    adjacency: Adjacency = "add_remove",
    workdir: Workdir = None,
) -> Recalibration:
    """Runs a method over private sources. `acc_t` and the other functions here do so by name.

    Args:
      method: A method of `jaxdp.recalibration.METHODS`, or one of your own.
      sources: For each source a pair (logits floating point [n_i, m], labels integer [n_i]) or a
        `Party`. Sources may differ in size, be empty or miss classes. A `Party` with `group=`
        protects owners of several records. A record with a logit that is not finite, or a label
        outside [0, m), adds zero to every answer. Either no source has an account and nothing is
        recorded, or all have accounts of one ledger. Then all sources pay, or none pays and nothing
        is computed.
      epsilon: epsilon of each source, pure. `math.inf` runs the algorithm without noise.
      key: Typed key of the noise, for tests and for your own secrets, by default operating-system
        entropy. Anyone who knows it can subtract the noise. The same call under the same key is the
        same release and is charged once.
      adjacency: The neighbouring relation of a source's data sets. Under "replace_one" the sizes of
          sources are public.
      workdir: A folder for the result of this call. The same call with it returns the kept result
        and charges nothing. An interrupted call is not charged again. None keeps nothing.

    Formal guarantees:
      A source's answers together are epsilon-DP for one of its records, or with `group=` for one
      owner. That holds for every observer and for every way in which the calibrator chooses its
      questions. The calibrator and the other sources may collude. Sources with disjoint people
      compose in parallel: each person loses epsilon, not epsilon times the number of sources. Sums
      are integers, and so is their discrete Laplace noise, which is drawn by integers. So no
      rounding of floats weakens epsilon. A record's own contribution is a float that is rounded to
      a step. Its bits may not depend on other records.
      Noise is repeated only if everything that determines the answers is the same: records,
      settings, the method's compiled program and the machine. A method that calls back to Python is
      not repeated. Without accounts nothing is recorded. The running time is not protected.

    Raises:
      ValueError, TypeError: An argument is impossible. Nothing is spent.
      BudgetExceeded: A source cannot pay. Nothing is computed or charged anywhere.
    """
    parties = _parties(sources)
    num_classes = parties[0].logits.shape[1]
    scale = noise_scale(method, epsilon=epsilon, adjacency=adjacency, num_classes=num_classes)
    for party in parties:
        party.check_adjacency(adjacency)
    if key is not None:
        check_key(key)
    charge = event(epsilon)
    inputs = _inputs(method, parties, stream(bytes(16), "shapes"), scale)
    structure = jax.tree.structure(_play.eval_shape(*inputs))

    def compute(secret: bytes) -> dict[str, Any]:
        noise_key = stream(secret, "recalibration")
        parameters = converse(method, parties, noise_key, epsilon=epsilon, adjacency=adjacency)
        leaves = jax.tree.leaves(parameters)
        return {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}

    def facts() -> list[Any]:
        _, records, source, _, _, _, *owner = inputs
        return [records, source, epsilon, adjacency, list(scale or ()), *owner]

    what = Release(
        label=type(method).__name__,
        charges=_charges(parties, charge),
        facts=facts,
        # A result depends on the method only through its program.
        programs=lambda: [program(_play, *inputs)],
        compute=compute,
    )
    with Till(workdir, seed=None if key is None else _seed(key)) as till:
        released = till.once(what)
    leaves = [released[str(i)] for i in range(len(released))]
    return Recalibration(method, jax.tree.unflatten(structure, leaves), charge)


def _parties(sources: Sources) -> list[Party]:
    parties = []
    for i, source in enumerate(sources):
        if isinstance(source, Party):
            parties.append(source)
            continue
        if not isinstance(source, tuple | list) or len(source) != 2:
            raise TypeError(
                f"sources[{i}] must be a pair (logits, labels) or a Party, got "
                f"{type(source).__name__}."
            )
        try:
            parties.append(Party(*source))
        except (TypeError, ValueError) as error:
            raise type(error)(f"sources[{i}]: {error}") from None
    if not parties:
        raise ValueError("sources is empty. Give at least one pair (logits, labels).")
    classes = {party.logits.shape[1] for party in parties}
    if len(classes) > 1:
        raise ValueError(
            f"sources must have the same number of classes, got logits with {sorted(classes)} "
            "columns."
        )
    return parties


def _charges(parties: Sequence[Party], charge: DpEvent) -> list[tuple[Account, DpEvent]]:
    """Returns each account once. An account of several sources pays for each of them."""
    accounts = [party.account for party in parties if party.account is not None]
    if len(accounts) not in (0, len(parties)):
        without = [i for i, party in enumerate(parties) if party.account is None]
        raise ValueError(
            f"sources {without} have no account but others do. Give every source an account, or "
            "none."
        )
    by_name = {(id(account.ledger), account.name): account for account in accounts}
    sources_of = Counter((id(account.ledger), account.name) for account in accounts)
    charges: list[tuple[Account, DpEvent]] = []
    for name, count in sources_of.items():
        total = charge if count == 1 else SelfComposedDpEvent(charge, count)
        charges.append((by_name[name], total))
    return charges


def _seed(key: jax.Array) -> bytes:
    """Returns 16 secret bytes that are a function of a key."""
    kind = str(jax.random.key_impl(key))
    return bytes.fromhex(digest([kind, jax.random.key_data(key)]))[:16]


def _inputs(
    method: Method,
    parties: Sequence[Party],
    key: jax.Array,
    scale: Scale | None,
) -> tuple[Any, ...]:
    """Returns the arguments of `_play`."""
    logits = np.concatenate([party.logits for party in parties])
    labels = np.concatenate([party.labels for party in parties])
    # `jnp.asarray` would compile a program for each shape. Nothing else holds the two arrays.
    records = Records(*jax.device_put((logits, labels)))
    units = [party.units for party in parties]
    source = np.repeat(np.arange(len(parties), dtype=np.int32), units)
    inputs = (method, records, source, len(parties), key, scale)
    if all(party.group is None for party in parties):
        return inputs
    owners = []
    start = 0  # of the numbers of a source's owners among those of all sources
    for party in parties:
        own = party.group
        if own is None:  # each record is an owner
            own = np.arange(party.units, dtype=np.int32)
        owners.append(np.int32(start) + own)
        start += party.units
    return (*inputs, np.concatenate(owners))


def converse(
    method: Method,
    parties: Sequence[Party],
    key: jax.Array,
    *,
    epsilon: float,
    adjacency: Adjacency,
) -> Any:
    """Returns the parameters that `recalibrate` releases and audits attack. It charges nothing."""
    num_classes = parties[0].logits.shape[1]
    scale = noise_scale(method, epsilon=epsilon, adjacency=adjacency, num_classes=num_classes)
    return _play(*_inputs(method, parties, key, scale))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _play(
    method: Method,
    records: Records,
    source: jax.Array,
    sources: int,
    key: jax.Array,
    scale: Scale | None,
    owner: jax.Array | None = None,
) -> Any:
    drawn: dict[tuple[int, ...], jax.Array] = {}

    def noise_of(k: int, shape: tuple[int, ...], scale: Scale) -> jax.Array:
        """Returns the noise of round k. One sampler for all rounds compiles fastest."""
        of_round = functools.partial(round_noise, key, shape, scale)
        if method.rounds == 1:
            return of_round(k)
        if shape not in drawn:
            numbers = jnp.arange(method.rounds, dtype=jnp.int32)  # at most 32 bits under x64 too
            drawn[shape] = jax.vmap(of_round)(numbers)
        return drawn[shape][k]

    def ask(k: int, temperature: jax.Array) -> jax.Array:
        added = summands(method, k, records, temperature)
        exact = exact_sums(added, source, sources, scale, owner)
        if scale is None:
            return exact.sum(0)
        return in_units(exact + noise_of(k, exact.shape, scale), scale).sum(0)

    variance = 0.0 if scale is None else scale.variance * sources
    return play(method, ask, variance)


@functools.partial(jax.jit, static_argnums=0)
def _confidence(method: Method, parameters: Any, logits: jax.Array) -> jax.Array:
    finite = jnp.isfinite(logits).all(1)
    return jnp.where(finite, method.confidence(parameters, logits), jnp.nan)


# --- By name ------------------------------------------------------------------------------------

# Each function is the flat form of `recalibrate(method, sources, ...)`: the options of the method
# and the terms of the release are its keywords. That is why some have more than eight parameters.


def acc_t(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    iterations: int = 5,
    bracket: tuple[float, float] = (0.5, 3.0),
    spacing: Spacing = "log",
    search: Search = "golden",
    split: bool | None = None,
    adjacency: Adjacency = "add_remove",
    workdir: Workdir = None,
) -> Recalibration:
    """Runs Acc-T: the temperature at which mean confidence equals accuracy (Section 4).

    Args:
      sources, epsilon, key, adjacency, workdir: As in `recalibrate`.
      iterations: K, reductions of the bracket: K + 1 releases with golden-section search, K with
          bisection.
      bracket: Public range of temperatures. Very over-confident models need more than the published
          (0.5, 3).
      spacing: "log" searches over log T, "linear" over T as published.
      search: "golden" is Algorithm 1. "bisection" needs less noise for a finer answer
          (`AccBisection`). "grid" asks about K + 1 fixed temperatures, as a baseline.
      split: Whether to ask for accuracy once and for confidence in the other rounds. The default is
        True under "replace_one", where that needs much less noise (`AccT`).
    """
    check_choice("search", search, Search)
    kind = AccBisection if search == "bisection" else AccT
    if split is None:
        # Under "add_remove" this would be less noise with two classes only.
        split = adjacency == "replace_one"
    method = kind(
        bracket=Bracket.of(bracket, spacing), iterations=iterations, search=search, split=split
    )
    return recalibrate(
        method, sources, epsilon=epsilon, key=key, adjacency=adjacency, workdir=workdir
    )


def nll_t(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    iterations: int = 5,
    bracket: tuple[float, float] = (0.5, 3.0),
    spacing: Spacing = "log",
    search: Literal["golden", "grid"] = "golden",
    bound: float = 10.0,
    adjacency: Adjacency = "add_remove",
    workdir: Workdir = None,
) -> Recalibration:
    """Runs NLL-T: the temperature of least negative log likelihood (Section 3.3, C.2.1).

    The loss of each record is clipped to `bound`, in nats, which must not depend on the sources.
    Other arguments are as in `acc_t`.
    """
    method = NllT(
        bracket=Bracket.of(bracket, spacing), iterations=iterations, search=search, bound=bound
    )
    return recalibrate(
        method, sources, epsilon=epsilon, key=key, adjacency=adjacency, workdir=workdir
    )


def ece_t(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    iterations: int = 5,
    bracket: tuple[float, float] = (0.5, 3.0),
    spacing: Spacing = "log",
    search: Literal["golden", "grid"] = "golden",
    bins: int = 15,
    adjacency: Adjacency = "add_remove",
    workdir: Workdir = None,
) -> Recalibration:
    """Runs ECE-T: the temperature of least error in bins of equal width (Section 3.3, C.2.2).

    Arguments are as in `acc_t`.
    """
    method = EceT(
        bracket=Bracket.of(bracket, spacing), iterations=iterations, search=search, bins=bins
    )
    return recalibrate(
        method, sources, epsilon=epsilon, key=key, adjacency=adjacency, workdir=workdir
    )


def histogram_binning(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    bins: int = 15,
    form: Form = "split",
    monotone: bool = False,
    adjacency: Adjacency = "add_remove",
    workdir: Workdir = None,
) -> Recalibration:
    """Runs `HistogramBinning`: each bin's confidence becomes its accuracy (Section 3.3, C.2.3).

    Other arguments are as in `recalibrate`.
    """
    method = HistogramBinning(bins=bins, form=form, monotone=monotone)
    return recalibrate(
        method, sources, epsilon=epsilon, key=key, adjacency=adjacency, workdir=workdir
    )


def logistic_binning(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    edges: Sequence[float] = LogisticBinning.edges,
    adjacency: Adjacency = "add_remove",
    workdir: Workdir = None,
) -> Recalibration:
    """Fits two numbers to all noisy bins at once, beyond the paper. See `LogisticBinning`.

    Other arguments are as in `recalibrate`.
    """
    method = LogisticBinning(edges=tuple(edges))
    return recalibrate(
        method, sources, epsilon=epsilon, key=key, adjacency=adjacency, workdir=workdir
    )


def none() -> Recalibration:
    """Returns the baseline without recalibration: T = 1, no question."""
    unchanged = FoundTemperature(jnp.float32(1), jnp.bool_(False), jnp.bool_(False))
    return Recalibration(AccT(), jax.tree.map(np.asarray, unchanged), NoOpDpEvent())


def one_source(
    source: Party | tuple[Any, Any],
    *,
    method: Method | None = None,
    adjacency: Adjacency = "add_remove",
    workdir: Workdir = None,
) -> Recalibration:
    """Runs the baseline of one source that recalibrates for itself (Guo et al. 2017).

    The default is temperature scaling, `NllT()`. NOT private: without noise, its event makes the
    epsilon of the source's account infinite.
    """
    method = method or NllT()
    return recalibrate(method, [source], epsilon=math.inf, adjacency=adjacency, workdir=workdir)
