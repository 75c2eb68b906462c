"""A private search among candidates that costs one event, however many runs it has.

    1. draw K, the number of runs, from a public distribution           `RandomRuns.draw`
    2. each run draws a candidate uniformly, trains it, and scores it   `fit`, `ChargedScore`
    3. release the model and the score of the best run, nothing else    `Tuned`

The event is RepeatAndSelect(OneOf(candidates) + score) of the distribution of K: Papernot and
Steinke 2022, arXiv:2110.03620, Theorems 2 and 6, for the base mechanism "draw a candidate, train
it, score it", whose output is (score, model). The order of outputs is that of the scores, and the
earlier of two equal ones is the better. Runs are independent and alike, so this is a random order
of equal scores.

The proof needs that K, the other runs and their scores stay secret. So nothing of a run is logged,
and the runs are in the folder `secret_search` of the workdir until the search ends.
"""

import copy
import dataclasses
import math
import os
import pathlib
import shutil
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import numpy as np
import optax

from jaxdp.data import Groups, Owners, Source, check_source
from jaxdp.files import check_count, shown, shows_keywords, unwatched
from jaxdp.finetune.dropped import check_dropped
from jaxdp.finetune.loop import Diverged, check_account, check_chunks, facts_of_steps, fit
from jaxdp.finetune.procedures import Procedure, spending
from jaxdp.finetune.programs import lowered, settings_text, step_programs
from jaxdp.finetune.random_runs import RandomRuns
from jaxdp.finetune.scores import ChargedScore, Score, check_score
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import Account, ComposedDpEvent, DpEvent, OneOfDpEvent
from jaxdp.privacy.events import composition, describe, to_json
from jaxdp.privacy.rules import is_boundless
from jaxdp.release import Release, Till, derive
from jaxdp.release.identity import deterministic
from jaxdp.release.kept_arrays import FILE as KEPT
from jaxdp.release.kept_arrays import load_arrays, save_arrays
from jaxdp.transforms.parameters import check_finite, not_finite

SECRET = "secret_search"
_PROGRESS = "best.safetensors"
_BITS = 128  # of the secret from which a candidate is drawn


class Tuned(NamedTuple):
    """What a search releases.

    Attributes:
      name: The name of the best candidate, or None if the number of runs was 0.
      params: Its parameters, or their moving average if its trainer keeps one. Without a run these
        are the first ones.
      score: Its score. It is minus infinity if no run ended with finite parameters, and NaN without
        a run.
    """

    name: str | None
    params: Any
    score: float


class SearchKeywords(TypedDict, total=False):
    """The keywords of `tune` that say how a search is kept. `tune` documents them."""

    workdir: str | os.PathLike[str] | None
    checkpoint_every: int
    allow_nonfinite: bool
    seed: bytes | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """The defaults of `SearchKeywords`."""

    workdir: str | os.PathLike[str] | None = None
    checkpoint_every: int = 100
    allow_nonfinite: bool = False
    seed: bytes | None = None


@shows_keywords(SearchKeywords, vars(_Options()))
def tune(
    trainers: Mapping[str, PrivateTrainer | Procedure],
    account: Account,
    params: Any,
    source: Source | None,
    *,
    steps: int | Mapping[str, int] = 0,
    runs: RandomRuns,
    score: Score,
    **keywords: Unpack[SearchKeywords],
) -> Tuned:
    """Searches among candidates, and releases the best model and its score at the cost of one
    event.

        runs = jaxdp.finetune.RandomRuns(mean=10)
        noise = jaxdp.privacy.calibrate_noise(
            lambda noise: runs.event(jaxdp.finetune.event(noise, sampler, steps)),
            epsilon=2.0, delta=1e-5,
        )
        trainers = {f"rate {rate}": trainer(rate, noise) for rate in (0.1, 0.3, 1.0)}
        best = jaxdp.tune(
            trainers, account, params, source, steps=steps, runs=runs, workdir="search",
            score=jaxdp.finetune.PublicScore(accuracy_on_public_data, facts=["accuracy, 1"]),
        )

    Args:
      trainers: {name: trainer} of one process, from `dp_sgd` or another method. The names and all
        settings are public. `with_hyperparams` makes candidates that share their programs.
        `Procedure` is a candidate of any other private release.
      account: The account of the records, which is charged once, before the first run.
      params, source: As in `fit`, for all candidates. Procedures read no source, which may be None
        without trainers.
      steps: The number of steps of all trainers, or that of each by its name.
      runs: The distribution of the secret number of runs.
      score: `PublicScore(function)` or `ChargedScore(...)`. The largest score wins.
      keywords: Fields of `SearchKeywords`. workdir is a folder for this search only, which can then
        be resumed if `facts` say what a public score and each procedure compute. None keeps
        nothing. checkpoint_every and allow_nonfinite are as in `fit`. seed is 16 secret bytes for
        tests.

    Returns:
      The best model. The file "released.safetensors" of the workdir has it too, beside a check that
        can confirm a guess of the records. Publish the model, not that file.

    Raises:
      BudgetExceeded: The search does not fit. Nothing is computed or charged.
      TypeError, ValueError: As in `fit`. The score does not say whether its data is public. runs is
        no `RandomRuns`. A candidate has no proven event, or one without a rule in Renyi DP: that of
        truncated batches, or of sampling under "replace_one". A score is charged for records, and
        source or a candidate has groups of them, or its account has another unit. A chunk of
        checkpoint_every steps ends inside a cycle of a sampler. The workdir keeps another search,
        or one whose score or procedure has no facts. Nothing is charged.
      ValueError: A procedure returned another structure than that of params. RuntimeError: It spent
        something else than its event. Only its run can tell, so the search is charged.

    Formal guarantees:
      `runs.event(OneOfDpEvent(events))` of the candidates' events, each composed with the event of
      the score. An account of other records, which `ChargedScore` may name, is charged
      `runs.event` of the score alone. The result is a function of the best run. The number of runs
      and all candidates come from one secret of the till, by HMAC-SHA256. A search that is killed
      and called again goes on with the same ones, repeats no finished run and pays once, if it is
      the same search: the token has source, params, trainers, the program of `predict`, and the
      facts of a public score and of procedures. It pays again, with a new secret and from the first
      run, if anything of these differs, if a score or procedure has no facts, if `predict` or a
      loss calls back to Python, or on a GPU without `--xla_gpu_deterministic_ops=true`. Parameters
      that are not finite have the score minus infinity, so they raise no error. The guarantee is
      for the result. The DURATION of a search, its terminal and `secret_search` tell the number of
      runs. Show nobody any of them.
    """
    options = _Options(**keywords)
    search = Search(
        trainers=trainers,
        account=account,
        params=params,
        source=source,
        steps=steps,
        runs=runs,
        score=score,
        workdir=None if options.workdir is None else pathlib.Path(options.workdir),
        checkpoint_every=options.checkpoint_every,
    )
    search.check()
    with Till(options.workdir, seed=options.seed) as till:
        what = search.release()
        # A kept answer is given again without a look at private records.
        if till.kept(what) is None:
            search.check_programs()
            search.check_examples(allow_nonfinite=options.allow_nonfinite)
        arrays = till.once(what)
    search.forget()
    return search.result(arrays)


def with_hyperparams(trainer: PrivateTrainer, values: Mapping[str, float]) -> PrivateTrainer:
    """Returns a trainer that starts with other hyperparameters, and shares all compiled programs.

        trainer = dp_sgd(loss_fn, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), ...)
        rates = (0.1, 0.3, 1.0)
        trainers = {f"{r:g}": with_hyperparams(trainer, {"learning_rate": r}) for r in rates}

    Args:
      trainer: A trainer whose optimizer has its hyperparameters in its state.
      values: The hyperparameters by name.

    Raises:
      ValueError: The optimizer's state has no hyperparameter of a name, or a schedule sets it.
    """
    optimizer = trainer.optimizer

    def init(params: Any) -> Any:
        state = optimizer.init(params)
        known = getattr(state, "hyperparams", {})
        for name in values:
            if name not in known or name in getattr(state, "hyperparams_states", {}):
                raise ValueError(
                    f"{name} is no hyperparameter of the optimizer's state, which has "
                    f"{sorted(known)}. Make it with optax.inject_hyperparams and a number."
                )
        numbers = {name: np.asarray(value, known[name].dtype) for name, value in values.items()}
        changed = {name: jax.numpy.asarray(number) for name, number in numbers.items()}
        return state._replace(hyperparams={**known, **changed})

    # The programs hold `optimizer.update` only, and a copy keeps them.
    other = copy.copy(trainer)
    object.__setattr__(other, "optimizer", optax.GradientTransformation(init, optimizer.update))
    object.__setattr__(other, "_plans", {})  # they hold the other optimizer
    return other


class _Best(NamedTuple):
    """The best of the finished runs. Secret until the search ends.

    Attributes:
      runs: The number of finished runs.
      candidate: The number of the candidate, or -1 without a run.
      score: Its score, NaN without a run.
      leaves: The leaves of its parameters.
    """

    runs: int
    candidate: int
    score: float
    leaves: list[Any]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the best as NumPy arrays by name, without the number of runs."""
        arrays = {f"leaf {number}": np.asarray(leaf) for number, leaf in enumerate(self.leaves)}
        arrays["candidate"] = np.asarray(self.candidate, np.int64)
        arrays["score"] = np.asarray(self.score, np.float64)
        return arrays

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "_Best":
        """Returns the best of `arrays`, and the number of runs if it is there."""
        count = sum(name.startswith("leaf ") for name in arrays)
        leaves = [arrays[f"leaf {number}"] for number in range(count)]
        runs = int(arrays.get("runs", np.int64(0)))
        return cls(runs, int(arrays["candidate"]), float(arrays["score"]), leaves)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Search:
    """A search, before and while it runs. `tune` documents the attributes."""

    trainers: Mapping[str, PrivateTrainer | Procedure]
    account: Account
    params: Any
    source: Source | None
    steps: int | Mapping[str, int]
    runs: RandomRuns
    score: Score
    workdir: pathlib.Path | None
    checkpoint_every: int

    # --- Before anything is charged -------------------------------------------------------------

    def check(self) -> None:
        """Raises the errors of `tune` that do not depend on the records."""
        if not isinstance(self.trainers, Mapping) or not self.trainers:
            raise TypeError(
                "trainers must be a dict {name: trainer} with at least one, got "
                f"{type(self.trainers).__name__} {self.trainers!r}."
            )
        if not isinstance(self.runs, RandomRuns):
            raise TypeError(
                f"runs must be jaxdp.finetune.RandomRuns(mean), got {self.runs!r}. The best of a "
                "fixed number of runs costs nearly as much as all of them: a secret, random number "
                "has a smaller bound."
            )
        check_score(self.score)
        if self._fitted:
            check_source(self.source)
        if isinstance(self.source, Owners):
            raise ValueError(
                "source must have one owner for each record, got jaxdp.data.Owners. The bound of a "
                "search needs the Renyi divergence of a run, and owners of several records have "
                "none yet. Use jaxdp.data.by_group."
            )
        check_finite(self.params)
        check_count("checkpoint_every", self.checkpoint_every, 1)
        self._check_known()
        for name, candidate in self.trainers.items():
            known = isinstance(candidate, Procedure) or hasattr(candidate, "privatizer")
            if not isinstance(name, str) or not known:
                raise TypeError(
                    "trainers must have trainers of jaxdp.finetune.dp_sgd or another method, or "
                    f"jaxdp.finetune.Procedure, by their names, got {name!r}: {candidate!r}."
                )
            if isinstance(candidate, Procedure):
                event = candidate.event
            else:
                check_count(f"steps of {name!r}", self._steps(name), 1)
                self._check_trainer(name, candidate)
                event = candidate.event(0, self._steps(name))
            self._check_score(name, candidate)
            if is_boundless(composition(event)):
                raise ValueError(
                    f"trainers[{name!r}] has the event {describe(event)}, which has no bound. The "
                    "best of its runs has none either. Give it noise."
                )

    @property
    def _unknown(self) -> list[str]:
        """The arguments with a function of Python that no fact describes."""
        names = [] if self.score.is_known else ["score"]
        for name, candidate in self.trainers.items():
            if isinstance(candidate, Procedure) and candidate.facts is None:
                names.append(f"trainers[{name!r}]")
        return names

    def _check_known(self) -> None:
        """Raises or warns if the workdir is of no use for a search that nothing identifies."""
        if self.workdir is None or not self._unknown:
            return
        names = ", ".join(self._unknown)
        if (self.workdir / KEPT).exists():
            raise ValueError(
                f"workdir={shown(self.workdir)} keeps the result of a search in {KEPT}. Nothing "
                f"tells whether it is this one: facts are None for {names}. Use a new workdir."
            )
        warnings.warn(
            f"facts are None for {names}. A search in a workdir that is killed then pays again and "
            "begins anew. With facts=[...] that say what the function computes, it goes on for "
            "free.",
            stacklevel=3,
        )

    @property
    def _fitted(self) -> dict[str, PrivateTrainer]:
        """The candidates that `fit` trains."""
        return {
            name: candidate
            for name, candidate in self.trainers.items()
            if not isinstance(candidate, Procedure)
        }

    def _check_trainer(self, name: str, trainer: PrivateTrainer) -> None:
        """Raises for a candidate that cannot be trained or scored."""
        assert self.source is not None
        trainer.check(self.source)
        check_chunks(trainer, self._steps(name), self.checkpoint_every)
        check_account(trainer, self.account, None, self.source)
        if trainer.mesh is not None and trainer.mesh.is_multi_process:
            raise ValueError(f"trainers[{name!r}] must have a mesh of one process.")

    def _check_score(self, name: str, candidate: PrivateTrainer | Procedure) -> None:
        """Raises for a charged score of records whose owners have several of them.

        A trainer without `group` has such owners too, if its loss takes `jaxdp.data.Records`.
        """
        is_grouped = isinstance(self.source, Groups) or getattr(candidate, "group", False)
        if is_grouped and isinstance(self.score, ChargedScore):
            raise ValueError(
                f"score must be a PublicScore, because trainers[{name!r}] protects one "
                f"{self.account.unit} with several records, and a charged count of right answers "
                "protects one record."
            )
        self.score.charges(self.account)  # for its errors

    def check_programs(self) -> None:
        """Raises the errors of tracing, which would otherwise come when the search is paid."""
        for name in self._fitted:
            assert self.source is not None
            trainer = self._planned(name)
            state = trainer.init(self.params)
            programs = step_programs(trainer, state, self.source, self._steps(name))
            for function, args in programs.values():
                function.trace(*args)  # kept by JAX for the runs

    def check_examples(self, *, allow_nonfinite: bool) -> None:
        """Raises or warns as `fit` does, if the first examples have no gradient, or if the first
        parameters have no score.

        One trainer stands for all, because the candidates have one loss as a rule.
        """
        self.score.check(self.params)
        name = next(iter(self._fitted), None)
        if name is None or self.source is None:
            return
        trainer = self._planned(name)
        state = trainer.init(self.params)
        check_dropped(trainer, state, self.source, allow_nonfinite=allow_nonfinite)

    def _steps(self, name: str) -> int:
        if not isinstance(self.steps, Mapping):
            return self.steps
        if name not in self.steps:
            raise ValueError(f"steps must have a number for {name!r}, got {dict(self.steps)!r}.")
        return self.steps[name]

    def _planned(self, name: str) -> PrivateTrainer:
        return self._fitted[name].planned(self._steps(name))

    def _event(self, name: str) -> DpEvent:
        """Returns the event of one run of a candidate, without its score."""
        candidate = self.trainers[name]
        if isinstance(candidate, Procedure):
            return candidate.event
        return self._planned(name).event(0, self._steps(name))

    # --- The release ----------------------------------------------------------------------------

    def release(self) -> Release[dict[str, Any]]:
        """Returns the one release of the search."""
        return Release(
            label=f"search of {len(self.trainers)} candidates, {self.runs.mean:g} runs expected",
            charges=self.charges(),
            facts=self._facts,
            programs=self._programs,
            # Only what is known and repeatable ends with equal bits in two copies of a workdir.
            deterministic=not self._unknown and deterministic(),
            compute=self.compute,
        )

    def charges(self) -> list[tuple[Account, DpEvent]]:
        """Returns the account of the search and that of the score, each with its event."""
        own: list[DpEvent] = []
        other: list[tuple[Account, DpEvent]] = []
        for account, event in self.score.charges(self.account):
            # A record of this account is in training and score of each run. A record of another one
            # is in the scores only, which are a search of their own for it.
            if account.name == self.account.name and account.ledger is self.account.ledger:
                own.append(event)
            else:
                other.append((account, self.runs.event(event)))
        candidates: list[DpEvent] = []
        for name in self.trainers:
            candidates.append(ComposedDpEvent([self._event(name), *own]))
        return [(self.account, self.runs.event(OneOfDpEvent(tuple(candidates)))), *other]

    def _facts(self) -> list[Any]:
        facts: list[Any] = [self.params, repr(self.runs), self.checkpoint_every]
        facts.append(self.score.identity())
        for name, candidate in self.trainers.items():
            facts.append([name, to_json(self._event(name))])
            if isinstance(candidate, Procedure):
                # A run reads these two of the account, and may take its noise from them.
                facts.append([self.account.adjacency, self.account.unit, candidate.facts])
                continue
            assert self.source is not None
            trainer = self._planned(name)
            start = trainer.init(self.params)
            facts.append([self._steps(name), facts_of_steps(trainer, self.source, start)])
        return facts

    def _programs(self) -> list[str]:
        texts = self.score.programs(self.params)
        for name in self._fitted:
            assert self.source is not None
            trainer = self._planned(name)
            state = trainer.init(self.params)
            texts.append(settings_text(trainer, state, self.source))
            for _, program in lowered(trainer, state, self.source, self._steps(name)):
                texts.append(program.as_text())
        return texts

    # --- The runs -------------------------------------------------------------------------------

    def compute(self, secret: bytes) -> dict[str, np.ndarray]:
        """Takes all runs, or the rest of them, and returns the best."""
        count = self.runs.draw(derive(secret, "number of runs"))
        folder = self._folder(secret)
        if folder is not None:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # for the owner only
            folder.mkdir(exist_ok=True)
        best = self._restored(folder)
        # The number of events would tell the number of runs.
        with unwatched():
            for number in range(best.runs, count):
                best = self._after_run(best, folder, derive(secret, f"run {number}"))
        return best.arrays()

    def _folder(self, secret: bytes) -> pathlib.Path | None:
        """Returns the folder of this search. One with another secret has another folder."""
        if self.workdir is None:
            return None
        return self.workdir / SECRET / derive(secret, "folder").hex()

    def _restored(self, folder: pathlib.Path | None) -> _Best:
        """Returns the best of the runs that finished before a crash."""
        if folder is not None and (folder / _PROGRESS).exists():
            return _Best.of(load_arrays(folder / _PROGRESS))
        return _Best(0, -1, math.nan, jax.device_get(jax.tree.leaves(self.params)))

    def _after_run(self, best: _Best, folder: pathlib.Path | None, secret: bytes) -> _Best:
        """Takes one run, and returns the best of it and the earlier ones, which is kept."""
        candidate = drawn(derive(secret, "candidate"), len(self.trainers))
        run = None if folder is None else folder / "run"
        leaves = self.trained(list(self.trainers)[candidate], run, derive(secret, "training"))
        score = -math.inf  # a diverged run loses, and still counts
        if leaves is not None:
            params = jax.tree.unflatten(jax.tree.structure(self.params), leaves)
            score = self.score.of(params, derive(secret, "score"))
        best = best._replace(runs=best.runs + 1)
        # The first run counts with any score, so that a search with runs has a candidate.
        if best.candidate < 0 or score > best.score:
            finite_leaves = best.leaves if leaves is None else leaves
            best = best._replace(candidate=candidate, score=score, leaves=finite_leaves)
        if folder is not None:
            arrays = {**best.arrays(), "runs": np.asarray(best.runs)}
            save_arrays(folder / _PROGRESS, arrays, {})
            shutil.rmtree(folder / "run", ignore_errors=True)
        return best

    def trained(
        self, name: str, workdir: pathlib.Path | None, secret: bytes
    ) -> list[np.ndarray] | None:
        """Returns the leaves of the parameters of a run, or None if they are not finite."""
        candidate = self.trainers[name]
        if isinstance(candidate, Procedure):
            params = candidate.release(self.account, secret)
            self._check_structure(name, params)
        else:
            params = self._fit(name, workdir, secret)
            if params is None:
                return None
        leaves: list[np.ndarray] = jax.device_get(jax.tree.leaves(params))
        return None if not_finite(params) else leaves

    def _check_structure(self, name: str, params: Any) -> None:
        """Raises ValueError for what a procedure returned if it is no tree like the first one."""
        expected: Any = jax.tree.structure(self.params)
        returned: Any = jax.tree.structure(params)
        if returned != expected:
            raise ValueError(
                f"trainers[{name!r}] must return arrays in the structure of params, {expected}, "
                f"got {returned}. Only a run can tell, so the search is charged. A search in a "
                "workdir goes on with the same facts once `run` is mended."
            )

    def _fit(self, name: str, workdir: pathlib.Path | None, secret: bytes) -> Any:
        """Returns the parameters of a training, or None if they are not finite."""
        assert self.source is not None
        try:
            with spending(self._event(name), self.account) as account:
                state = fit(
                    self._fitted[name],
                    self.params,
                    self.source,
                    steps=self._steps(name),
                    account=account,
                    workdir=workdir,
                    checkpoint_every=self.checkpoint_every,
                    delta=self.account.delta,
                    seed=secret,
                    progress=False,
                    allow_nonfinite=True,  # `check_examples` has looked
                )
        except Diverged:
            return None
        return state.params if state.ema is None else state.ema

    # --- The result -----------------------------------------------------------------------------

    def forget(self) -> None:
        """Deletes what tells about other runs than the best."""
        if self.workdir is not None:
            shutil.rmtree(self.workdir / SECRET, ignore_errors=True)

    def result(self, arrays: Mapping[str, np.ndarray]) -> Tuned:
        """Returns the result of kept or computed arrays."""
        best = _Best.of(arrays)
        name = None if best.candidate < 0 else list(self.trainers)[best.candidate]
        params = jax.tree.unflatten(jax.tree.structure(self.params), best.leaves)
        return Tuned(name, params, best.score)


def drawn(secret: bytes, count: int) -> int:
    """Returns a number in [0, count), uniform up to count / 2^128, from 16 secret bytes."""
    return int.from_bytes(secret, "little") * count >> _BITS
