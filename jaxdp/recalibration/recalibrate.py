"""Recalibration over many private sources in one process: a function per method, a payment per source."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.privacy import DpEvent, Ledger, NonPrivateDpEvent, NoOpDpEvent, PureDpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.recalibration.methods import (
    AccBisection,
    AccT,
    Bracket,
    EceT,
    Found,
    HistogramBinning,
    LogisticBinning,
    NllT,
)
from jaxdp.recalibration.protocol import (
    Method,
    Records,
    Scale,
    Source,
    exact_sums,
    noise_scale,
    play,
    release,
    summands,
)
from jaxdp.transforms import noise

Sources = Sequence[Source | tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Recalibration:
    """What the calibrator found; made of noisy answers alone, so free to publish unless `event` is not private.

    Attributes:
      method: the algorithm with its public constants.
      parameters: what it found, a pytree of NumPy arrays.
      event: what every source paid for one of its records.
    """

    method: Method
    parameters: Any
    event: DpEvent

    def apply(self, logits: Any) -> np.ndarray:
        """The recalibrated confidence that the largest logit is that of the right class.

        Args:
          logits: floating point [n, m].

        Returns:
          float32 [n] in [0, 1]; NaN where a logit is not finite.
        """
        logits = jnp.asarray(logits, jnp.float32)
        if logits.ndim != 2:
            raise ValueError(f"logits must have shape [n, m], got {logits.shape}.")
        return np.asarray(_confidence(self.method, self.parameters, logits))

    @property
    def temperature(self) -> float:
        """T, of the methods that look for a temperature; AttributeError for the others."""
        return float(self._found.temperature)

    @property
    def at_end(self) -> Literal["low", "high"] | None:
        """The end of the bracket that a search for T has not left: the best T may be beyond it."""
        return "low" if self._found.low else "high" if self._found.high else None

    @property
    def _found(self) -> Found:
        if not isinstance(self.parameters, Found):
            raise AttributeError(f"{type(self.method).__name__} has {self.parameters!r}, no temperature.")
        return self.parameters

    @property
    def bins(self) -> np.ndarray:
        """The confidence in each bin, float32 [bins], of histogram binning; AttributeError for the others."""
        if not isinstance(self.method, HistogramBinning):
            raise AttributeError(f"{type(self.method).__name__} has {self.parameters!r}, no confidences of bins.")
        return self.parameters


def recalibrate(
    method: Method,
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    adjacency: Adjacency = "add_remove",
    ledger: Ledger | None = None,
) -> Recalibration:
    """Runs a method over private sources; `acc_t` and its siblings say the same by name.

    Args:
      method: of `jaxdp.recalibration.methods`, or one of your own.
      sources: of each source (logits floating point [n_i, m], labels integer [n_i]), or a `Source`. They may differ in
        size, be empty or miss classes. A record with a logit that is not finite, or a label outside [0, m), adds zero
        to every answer.
      epsilon: of each source, pure; `math.inf` is the algorithm without noise.
      key: typed key of the noise; drawn from the operating system's entropy if None. Who knows it can subtract the
        noise, and two calls with one key and no ledger share it: for tests, and for secrets of your own.
      adjacency: which data sets of a source are neighbours. Under "replace_one" the sizes of the sources are public.
      ledger: where each source has an account, under its `Source.account` or else "source 0", "source 1", ...; all pay,
        or none and nothing is computed.

    Returns:
      A `Recalibration`.

    Formal guarantees:
      A source's answers together are epsilon-DP for one of its records, whoever sees them and however the calibrator
      chooses its questions; the calibrator and the other sources may collude. Sources with disjoint people compose in
      parallel: each person loses epsilon, not epsilon times the number of sources. Sums are exact integers with
      discrete Laplace noise, so that the guarantee holds in floating point. Without a ledger nothing is recorded. The
      running time is not protected.

    Raises:
      ValueError, TypeError: for arguments that are impossible, before anything is spent.
      BudgetExceeded: a source cannot pay; nothing was computed or charged anywhere.
    """
    parties = _parties(sources)
    num_classes = parties[0].logits.shape[1]
    scale = noise_scale(method, epsilon=epsilon, adjacency=adjacency, num_classes=num_classes)
    event = NonPrivateDpEvent() if scale is None else PureDpEvent(epsilon)
    key = noise.stream(noise.new_seed(), "recalibration") if key is None else key
    noise.check_key(key)
    if ledger is None:
        return Recalibration(method, _converse(method, parties, key, scale), event)
    for party in parties:
        party.check_account(ledger, adjacency)
    with ledger.spend_all([(str(party.account), event) for party in parties], label=type(method).__name__) as spends:
        # The number of the spend, so that two payments to one ledger never share noise.
        fresh = jax.random.fold_in(key, spends[0].id)
        return Recalibration(method, _converse(method, parties, fresh, scale), event)


def _parties(sources: Sources) -> list[Source]:
    parties = []
    for i, source in enumerate(sources):
        if not isinstance(source, Source) and not (isinstance(source, (tuple, list)) and len(source) == 2):
            raise TypeError(f"sources[{i}] must be a pair (logits, labels) or a Source, got {type(source).__name__}.")
        parties.append(source if isinstance(source, Source) else Source(*source, account=f"source {i}"))
    if not parties:
        raise ValueError("sources is empty; give at least one pair (logits, labels).")
    classes = {party.logits.shape[1] for party in parties}
    if len(classes) > 1:
        raise ValueError(f"sources must have the same number of classes, got logits with {sorted(classes)} columns.")
    return parties


def _converse(method: Method, parties: Sequence[Source], key: jax.Array, scale: Scale | None) -> Any:
    logits, labels = (np.concatenate([getattr(p, name) for p in parties]) for name in ("logits", "labels"))
    records = Records(jnp.asarray(logits), jnp.asarray(labels))
    owner = np.repeat(np.arange(len(parties), dtype=np.int32), [len(p.labels) for p in parties])
    found = _play(method, records, owner, len(parties), key, scale)
    return jax.tree.map(np.asarray, found)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _play(method: Method, records: Records, owner: jax.Array, sources: int, key: jax.Array, scale: Scale | None) -> Any:
    def ask(k: int, temperature: jax.Array) -> jax.Array:
        exact = exact_sums(summands(method, k, records, temperature), owner, sources, scale)
        return release(jax.random.fold_in(key, k), exact, scale).sum(0)

    return play(method, ask, 0.0 if scale is None else scale.variance * sources)


@functools.partial(jax.jit, static_argnums=0)
def _confidence(method: Method, parameters: Any, logits: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(logits).all(1), method.confidence(parameters, logits), jnp.nan)


# --- By name --------------------------------------------------------------------------------------------------------


def acc_t(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    iterations: int = 5,
    bracket: tuple[float, float] = (0.5, 3.0),
    spacing: Literal["log", "linear"] = "log",
    search: Literal["golden", "bisection"] = "golden",
    split: bool | None = None,
    adjacency: Adjacency = "add_remove",
    ledger: Ledger | None = None,
) -> Recalibration:
    """Acc-T: the temperature at which mean confidence equals accuracy (Section 4, Algorithm 1).

    Args:
      sources, epsilon, key, adjacency, ledger: as in `recalibrate`.
      iterations: K, reductions of the bracket; K + 1 releases with golden-section search, K with bisection.
      bracket: public range of temperatures. Badly over-confident models need one beyond the published (0.5, 3).
      spacing: search over log T, or over T as published.
      search: "golden" is Algorithm 1; "bisection" needs less noise for a finer answer, see `AccBisection`.
      split: ask for the accuracy once and for the confidence in the other rounds; by default under "replace_one", where
        that needs much less noise (see `AccT`).
    """
    if search not in ("golden", "bisection"):
        raise ValueError(f"search must be 'golden' or 'bisection', got {search!r}.")
    kind = AccT if search == "golden" else AccBisection
    split = adjacency == "replace_one" if split is None else split
    method = kind(bracket=Bracket.of(bracket, spacing), iterations=iterations, split=split)
    return recalibrate(method, sources, epsilon=epsilon, key=key, adjacency=adjacency, ledger=ledger)


def nll_t(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    iterations: int = 5,
    bracket: tuple[float, float] = (0.5, 3.0),
    spacing: Literal["log", "linear"] = "log",
    bound: float = 10.0,
    adjacency: Adjacency = "add_remove",
    ledger: Ledger | None = None,
) -> Recalibration:
    """NLL-T: the temperature of least negative log likelihood, each record's clipped to `bound` (Section 3.3, C.2.1).

    Args are those of `acc_t`; `bound`, in nats, must be chosen without looking at the sources.
    """
    method = NllT(bracket=Bracket.of(bracket, spacing), iterations=iterations, bound=bound)
    return recalibrate(method, sources, epsilon=epsilon, key=key, adjacency=adjacency, ledger=ledger)


def ece_t(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    iterations: int = 5,
    bracket: tuple[float, float] = (0.5, 3.0),
    spacing: Literal["log", "linear"] = "log",
    bins: int = 15,
    adjacency: Adjacency = "add_remove",
    ledger: Ledger | None = None,
) -> Recalibration:
    """ECE-T: the temperature of least calibration error in `bins` equally wide bins (Section 3.3, C.2.2).

    Args are those of `acc_t`.
    """
    method = EceT(bracket=Bracket.of(bracket, spacing), iterations=iterations, bins=bins)
    return recalibrate(method, sources, epsilon=epsilon, key=key, adjacency=adjacency, ledger=ledger)


def histogram_binning(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    bins: int = 15,
    form: Literal["split", "published"] = "split",
    adjacency: Adjacency = "add_remove",
    ledger: Ledger | None = None,
) -> Recalibration:
    """Histogram binning: the confidence of each bin becomes the accuracy in it (Section 3.3, C.2.3).

    Args are those of `acc_t`; `form` is "split" (correct and incorrect counts) or "published" (correct and all), which
    needs twice the noise for the same information.
    """
    method = HistogramBinning(bins=bins, form=form)
    return recalibrate(method, sources, epsilon=epsilon, key=key, adjacency=adjacency, ledger=ledger)


def logistic_binning(
    sources: Sources,
    *,
    epsilon: float,
    key: jax.Array | None = None,
    edges: Sequence[float] = (-1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 8.0),
    adjacency: Adjacency = "add_remove",
    ledger: Ledger | None = None,
) -> Recalibration:
    """Beyond the paper: two numbers fitted to all noisy bins at once, see `LogisticBinning`.

    Args are those of `acc_t`; `edges` are those between the bins of log-odds.
    """
    method = LogisticBinning(edges=tuple(edges))
    return recalibrate(method, sources, epsilon=epsilon, key=key, adjacency=adjacency, ledger=ledger)


def none() -> Recalibration:
    """The baseline without recalibration: T = 1, nothing is asked."""
    unchanged = Found(jnp.float32(1), jnp.bool_(False), jnp.bool_(False))
    return Recalibration(AccT(), jax.tree.map(np.asarray, unchanged), NoOpDpEvent())


def one_source(
    source: Source | tuple[Any, Any],
    *,
    method: Method | None = None,
    adjacency: Adjacency = "add_remove",
    ledger: Ledger | None = None,
) -> Recalibration:
    """The baseline of one source that recalibrates for itself, without noise.

    NOT private: its event makes the epsilon of the source's account infinite. It is for the source's own use.

    Args:
      source: one source.
      method: by default `NllT()`, temperature scaling as usual (Guo et al. 2017).
      adjacency, ledger: as in `recalibrate`.
    """
    return recalibrate(method or NllT(), [source], epsilon=math.inf, adjacency=adjacency, ledger=ledger)
