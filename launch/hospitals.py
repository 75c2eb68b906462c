"""The parties of private recalibration, one per process: `launch.recalibrate_server` and
`launch.recalibrate_client`.

The calibrator asks all hospitals in every round, and each answers with its noisy sum. All agree on
a config such as `configs/recalibration/hospitals.py`. A question with other terms is refused. The
questions are

    question   a temperature, with the number of the round and the terms
      answer     the noisy sum
    end        nothing
      end        nothing

A hospital pays before its first answer. It answers each round once and repeats the answer to a
repeated question (`jaxdp.recalibration.Conversation`). So questions may be repeated, may come late,
and may come after a crash. The calibrator keeps the answers of a round before it asks the next one.
After a crash it would otherwise ask those that are left, whose sum leads to another question, and
nobody answers two questions of a round.
"""

import contextlib
import dataclasses
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import recalibration
from jaxdp.data import from_arrays, from_csv
from jaxdp.data.selection import everything
from jaxdp.data.tables import read_table
from jaxdp.files import Limits, pack, read_json, read_npz, shown, unpack, write_durably, write_json
from jaxdp.privacy import Ledger
from jaxdp.release import alone, notes, settle

from . import frame, links, plans, recalibrate
from .settings import check_values
from .study import Fields

_Path = str | os.PathLike[str]
_LIMITS = Limits(bytes=2**20, arrays=1)  # of a question or an answer
_FAREWELL_SECONDS = 30.0


class _Agreed(NamedTuple):
    """What a config says to all parties.

    Attributes:
      method: The method.
      guarantee: Epsilon and adjacency, by the names of the arguments of `noise_scale`.
      scale: The scale of the noise, or None without privacy.
      width: How many numbers an answer has.
      terms: All of it as text, which everybody may know.
    """

    method: Any
    guarantee: Fields
    scale: Any
    width: int
    terms: str


def _agreed(config: Any) -> _Agreed:
    """Returns what a config says to all. Raises ValueError if the method has no noise scale."""
    check_values(config)
    method = recalibrate.method("method", config.method)
    classes = config.num_classes
    guarantee = {"epsilon": config.epsilon, "adjacency": config.adjacency}
    scale = recalibration.noise_scale(method, num_classes=classes, **guarantee)
    record = recalibration.Records(jnp.zeros((1, classes)), jnp.zeros(1, jnp.int32))
    _, width = jax.eval_shape(lambda: method.summand(0, record, jnp.float32(1))).shape
    terms = f"{method!r}, epsilon={config.epsilon!r}, {config.adjacency}, {classes} classes"
    return _Agreed(method, guarantee, scale, width, terms)


# --- The calibrator -----------------------------------------------------------------------------


def run_server(
    config: Any, workdir: _Path, hospitals: links.Parties, *, timeout: float = 3600.0
) -> recalibration.Recalibration:
    """Recalibrates with the hospitals that answer the first round.

    A hospital that does not answer a round within `timeout` seconds has left, and is not asked
    again. The run goes on while `config.server.fewest` hospitals answer (0 is all of `hospitals`).
    Their sum then counts for all that began, as a mean does. The workdir gets result.json and
    recalibration.npz, for `load`.

    Raises:
      TimeoutError: Too few hospitals answer. The same command goes on from here: the workdir
          keeps answered rounds.
      ValueError: The workdir belongs to another run, there are fewer hospitals than must answer, or
          an answer is of no use.
    """
    root = pathlib.Path(workdir)
    with alone(root):
        agreed = _agreed(config)
        frame.check_same_config("recalibrate server", config, root)
        known = len(hospitals.names)
        fewest = config.server.fewest or known
        if fewest > known:
            raise ValueError(
                f"config.server.fewest must be at most {known}, the number of hospitals, got "
                f"{fewest}."
            )
        path = root / "answers.json"
        calibrator = _Calibrator(agreed, hospitals, list(hospitals.names), fewest, timeout, path)
        with frame.bind("recalibrate server", config, root):
            result = calibrator.recalibrate(root / "recalibration.npz")
            write_json(root / "result.json", result)
            calibrator.end()
            count = len(calibrator.asked)
            print(
                f"calibrator: {count} hospitals answered {agreed.method.rounds} rounds. "
                f"{shown(root)} has the result."
            )
            return load(config, root)


@dataclasses.dataclass
class _Calibrator:
    """The calibrator's questions.

    Attributes:
      agreed: What the config says.
      hospitals, timeout: The arguments of `run_server`.
      asked: The hospitals that have answered every round until now.
      fewest: How many hospitals have to answer a round.
      path: The file of the rounds that were answered. It holds the question and the noisy sums.
    """

    agreed: _Agreed
    hospitals: links.Parties
    asked: list[str]
    fewest: int
    timeout: float
    path: pathlib.Path

    def ask(self, k: int, temperature: jax.Array) -> list[np.ndarray]:
        """Returns the noisy sums of round k, of the hospitals that answered it, also before a
        crash.
        """
        rounds = read_json(self.path, kind=list) if self.path.exists() else []
        question = float(temperature)
        if k == len(rounds):
            sums = self._answers(k, temperature)
            kept = {name: vector.tolist() for name, vector in sums.items()}
            rounds.append({"temperature": question, "answers": kept})
            write_json(self.path, rounds)
        elif rounds[k]["temperature"] != question:
            raise ValueError(
                f"{shown(self.path)} has answers to the temperature {rounds[k]['temperature']} in "
                f"round {k}, not to {question}. Use the release of jaxdp that asked for them."
            )
        answers = rounds[k]["answers"]
        self.asked = sorted(answers)
        return [np.asarray(answers[name], np.float32) for name in self.asked]

    def _answers(self, k: int, temperature: jax.Array) -> dict[str, np.ndarray]:
        """Asks the hospitals, and returns the noisy sums of those that answer."""
        fields = {"round": k, "terms": self.agreed.terms}
        question = pack("question", fields=fields, arrays={"temperature": temperature})
        answers = self.hospitals.ask(dict.fromkeys(self.asked, question), timeout=self.timeout)
        if len(answers) < self.fewest:
            silent = sorted(set(self.asked) - set(answers))
            names = ", ".join(map(shown, silent))
            raise TimeoutError(
                f"{names} gave no answer to round {k} within {self.timeout:g} seconds, or refused, "
                "as its own output says. Start again as before, when they are back. Answered "
                "rounds are kept and not paid again."
            )
        return {name: self._sum(data, name, k) for name, data in answers.items()}

    def _sum(self, data: bytes, name: str, k: int) -> np.ndarray:
        """Returns the noisy sum in an answer. One of another width would broadcast."""
        package = unpack(
            data, "answer", fields=["round"], limits=_LIMITS, name=f"the answer of {name}"
        )
        answer = package.arrays.get("answer", np.zeros(0))
        number = package.fields["round"]
        is_round = type(number) is int and number == k
        if not is_round or answer.dtype != np.float32 or answer.shape != (self.agreed.width,):
            raise ValueError(
                f"the answer of {shown(name)} must be a float32 vector for round {k}, of "
                f"{self.agreed.width} numbers. Use the same release of jaxdp."
            )
        return answer

    def recalibrate(self, path: pathlib.Path) -> Fields:
        """Plays all rounds and writes the parameters. Returns the content of result.json."""
        method, scale = self.agreed.method, self.agreed.scale
        # The first question depends on no noise and no answer.
        first_question = method.question(0, method.init(0.0))
        first = self.ask(0, first_question)
        began = len(first)

        def total(k: int, temperature: jax.Array) -> jax.Array:
            sums = first if k == 0 else self.ask(k, temperature)
            share = np.float32(began / len(sums))
            return jnp.asarray(sum(sums) * share)

        variance = 0.0 if scale is None else scale.variance * began
        leaves = jax.tree.leaves(recalibration.play(method, total, variance))
        arrays: Fields = {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}
        write_durably(path, lambda file: np.savez(file, **arrays))
        parameters = {name: array.tolist() for name, array in arrays.items()}
        result = {"terms": self.agreed.terms, "began": began, "ended": self.asked}
        return result | {"parameters": parameters}

    def end(self) -> None:
        """Tells the hospitals that the run has ended."""
        end = pack("end", fields={"terms": self.agreed.terms}, arrays={})
        self.hospitals.ask(dict.fromkeys(self.asked, end), timeout=_FAREWELL_SECONDS)


def load(config: Any, workdir: _Path) -> recalibration.Recalibration:
    """Returns the recalibration of a finished calibrator, whose `apply` gives confidences."""
    method = _agreed(config).method
    shapes = jax.eval_shape(lambda: method.finish(method.init(0.0)))
    arrays = read_npz(pathlib.Path(workdir) / "recalibration.npz")
    leaves = [arrays[str(i)] for i in range(len(arrays))]
    parameters = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return recalibration.Recalibration(method, parameters, recalibration.event(config.epsilon))


# --- A hospital ---------------------------------------------------------------------------------


def _records(path: str, num_classes: int) -> Fields:
    """Returns logits, labels and possibly group, from an .npz file or a table.

    A table has the columns label and possibly group. Its other columns are the logits of the
    classes, in their order.
    """
    if pathlib.Path(path).suffix != ".csv":
        return read_npz(path, ["logits", "labels"], optional=["group"])
    group = "group" if "group" in read_table(path).columns else ""
    table = from_csv(path, label="label", num_classes=num_classes, group=group)
    columns = everything(table)
    records: Fields = {"logits": columns["features"], "labels": columns["label"]}
    if group:
        records["group"] = table.text(group)
    return records


class Hospital(contextlib.AbstractContextManager["Hospital"]):
    """The answers of a hospital.

    Attributes:
      done: Whether the calibrator has ended the run.
    """

    def __init__(self, config: Any, workdir: _Path, *, choice: frame.Choice = frame.DEFAULT):
        """Reads the records and registers them at the ledger, unless their owner has. It pays
        nothing yet.

        Args:
          config: The config that all agreed on. `config.client` is this hospital's own part.
          workdir: The folder of this conversation.
          choice: What the user says about the ledger that pays (`launch.frame.ledgers`).

        Raises:
          ValueError: The workdir belongs to another run, or the records do not fit. Or another
            ledger counts them. Nothing is written then.
        """
        root = pathlib.Path(workdir)
        mine = config.client
        self.done = False
        self._talk: recalibration.Conversation | None = None
        self._agreed = _agreed(config)
        frame.check_same_config("recalibrate client", config, root)
        records = _records(mine.records, config.num_classes)
        party = recalibration.Party(**records)
        if party.logits.shape[1] != config.num_classes:
            raise ValueError(
                f"logits in {shown(mine.records)} must have {config.num_classes} columns, the "
                "agreed classes."
            )
        path = frame.settled(choice, config, root, [_private_set(mine, records)])
        with contextlib.ExitStack() as opened:
            root.mkdir(parents=True, exist_ok=True)
            opened.enter_context(frame.bind("recalibrate client", config, root, path))
            ledger = opened.enter_context(Ledger(path, run=frame.run_of(root)))
            terms = _terms(config) | frame.people(mine, "client")
            account = frame.own_account(ledger, _name(mine), **terms)
            self._party = dataclasses.replace(party, account=account)
            self._party.check_adjacency(config.adjacency)
            # The calibrator of a finished run asks nothing that would settle it.
            for folder in frame.noted(root):
                settle(notes(folder), lambda name: account)
            self._workdir = root
            self._opened = opened.pop_all()

    def answer(self, question: bytes) -> bytes:
        """Answers a question of the calibrator, a repeated one as before.

        Raises:
          ValueError: The question is of no use, or has other terms than the config. Nothing is
              spent.
          BudgetExceeded: Nothing is spent.
        """
        kind, fields, arrays = unpack(
            question, ["question", "end"], limits=_LIMITS, name="the calibrator's question"
        )
        terms = fields.get("terms")
        if terms != self._agreed.terms:
            raise ValueError(
                f"the calibrator's terms are {terms!r}, not the agreed ones: {self._agreed.terms}."
            )
        if kind == "end":
            self.done = True
            return pack("end", fields={}, arrays={})
        k = fields.get("round")
        temperature = arrays.get("temperature", np.zeros(0))
        if type(k) is not int or temperature.shape != () or temperature.dtype != np.float32:
            raise ValueError(
                "the calibrator's question must have a round and a temperature, float32 []."
            )
        if self._talk is None:
            self._talk = self._opened.enter_context(self._begin())
        answer = self._talk.answer(temperature, round=k)
        return pack("answer", fields={"round": k}, arrays={"answer": answer})

    def _begin(self) -> recalibration.Conversation:
        folder = self._workdir / "conversation"
        method, guarantee = self._agreed.method, self._agreed.guarantee
        return self._party.begin(method, workdir=folder, **guarantee)

    def write(self) -> None:
        """Writes result.json at the end of the run."""
        terms = self._agreed.terms
        write_json(self._workdir / "result.json", {"terms": terms})
        print(f"hospital: answered under {terms}.")

    def __exit__(self, *error: object) -> None:
        self._opened.close()


def run_client(
    config: Any, workdir: _Path, serve: links.Serve, *, choice: frame.Choice = frame.DEFAULT
) -> None:
    """Runs a hospital until the calibrator ends the run, and writes result.json. Arguments and
    errors are as in `Hospital`.
    """
    root = pathlib.Path(workdir)
    with alone(root), Hospital(config, root, choice=choice) as hospital:
        serve(hospital.answer, until=lambda: hospital.done)
        hospital.write()


def _name(mine: Any) -> str:
    """Returns the name of a hospital's records in its ledger."""
    return mine.dataset or pathlib.Path(mine.records).stem


def _terms(config: Any) -> Fields:
    """Returns the terms of a hospital's records in its ledger, with their budget."""
    terms = {"adjacency": config.adjacency, "unit": config.client.unit}
    return terms | {"epsilon": config.epsilon, "delta": 0.0}


def _private_set(mine: Any, records: Fields) -> frame.PrivateSet:
    """Returns the records by which the registry knows them: without the group, which is no part of
    a record.
    """
    columns = {name: records[name] for name in ("logits", "labels")}
    return frame.PrivateSet(_name(mine), from_arrays(**columns), is_public=False)


def charges(
    config: Any, workdir: _Path | None, *, choice: frame.Choice = frame.DEFAULT
) -> list[plans.Item]:
    """Returns what a hospital would charge."""
    method = _agreed(config).method
    mine = config.client
    root = None if workdir is None else pathlib.Path(workdir)
    private = []
    if mine.records:
        records = _records(mine.records, config.num_classes)
        private.append(_private_set(mine, records))
    path = frame.asked(choice, config, root, private)
    ledger = frame.LEDGER if path is None else os.fspath(path.absolute())
    what = f"{method.rounds} answers to the calibrator"
    event = recalibration.event(config.epsilon)
    return [plans.Item(what, _name(mine), event, _terms(config), ledger=ledger)]
