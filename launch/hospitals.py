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
and may come after a crash.
"""

import contextlib
import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import recalibration
from jaxdp.data import from_arrays, from_csv
from jaxdp.data.selection import everything
from jaxdp.data.tables import read_table
from jaxdp.files import Limits, pack, read_npz, shown, unpack, write_durably, write_json
from jaxdp.privacy import Ledger
from jaxdp.release import alone

from . import frame, links, plans, recalibrate
from .settings import check_numbers
from .study import Fields

_Path = str | os.PathLike[str]
_LIMITS = Limits(bytes=2**20, arrays=1)  # of a question or an answer
_FAREWELL_SECONDS = 30.0


def _agreed(config: Any) -> tuple[Any, Fields, str]:
    """Returns the method, the arguments of `noise_scale`, and the terms as text, which everybody
    may know.
    """
    check_numbers(config)
    method = recalibrate.method("method", config.method)
    guarantee = {"epsilon": config.epsilon, "adjacency": config.adjacency}
    # Raises if the method has no noise scale.
    recalibration.noise_scale(method, num_classes=config.num_classes, **guarantee)
    terms = f"epsilon={config.epsilon!r}, {config.adjacency}, {config.num_classes} classes"
    return method, guarantee, f"{method!r}, {terms}"


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
      TimeoutError: Too few hospitals answer. The same command goes on from here: answered rounds
          are repeated.
      ValueError: The workdir belongs to another run, or an answer is of no use.
    """
    root = pathlib.Path(workdir)
    with alone(root):
        method, how, terms = _agreed(config)
        frame.check_same_config("recalibrate server", config, root)
        scale = recalibration.noise_scale(method, num_classes=config.num_classes, **how)
        fewest, asked = config.server.fewest or len(hospitals.names), list(hospitals.names)

        def ask(k: int, temperature: jax.Array) -> list[np.ndarray]:
            question = pack(
                "question", fields={"round": k, "terms": terms}, arrays={"temperature": temperature}
            )
            answers = hospitals.ask(dict.fromkeys(asked, question), timeout=timeout)
            if len(answers) < fewest:
                lost = ", ".join(map(shown, sorted(set(asked) - set(answers))))
                raise TimeoutError(
                    f"{lost} gave no answer to round {k} within {timeout:g} seconds, or refused, "
                    "as its own output says. Start again as before, when they are back. Answered "
                    "rounds are repeated and not paid again."
                )
            asked[:] = sorted(answers)
            return [_sum(answers[name], name, k) for name in asked]

        with frame.bind("recalibrate server", config, root):
            # The first question depends on no noise and no answer.
            first = ask(0, method.question(0, method.init(0.0)))

            def total(k: int, temperature: jax.Array) -> jax.Array:
                answers = first if k == 0 else ask(k, temperature)
                return jnp.asarray(sum(answers) * np.float32(len(first) / len(answers)))

            variance = 0.0 if scale is None else scale.variance * len(first)
            leaves = jax.tree.leaves(recalibration.play(method, total, variance))
            arrays: Fields = {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}
            write_durably(root / "recalibration.npz", lambda file: np.savez(file, **arrays))
            result = {"terms": terms, "began": len(first), "ended": asked}
            write_json(
                root / "result.json",
                result | {"parameters": {k: x.tolist() for k, x in arrays.items()}},
            )
            end = pack("end", fields={"terms": terms}, arrays={})
            hospitals.ask(dict.fromkeys(asked, end), timeout=_FAREWELL_SECONDS)
            print(
                f"calibrator: {len(asked)} hospitals answered {method.rounds} rounds. "
                f"{shown(root)} has the result."
            )
            return load(config, root)


def _sum(data: bytes, name: str, k: int) -> np.ndarray:
    package = unpack(data, "answer", fields=["round"], limits=_LIMITS, name=f"the answer of {name}")
    answer, number = package.arrays.get("answer", np.zeros(0)), package.fields["round"]
    is_round = type(number) is int and number == k
    if not is_round or answer.dtype != np.float32 or answer.ndim != 1:
        raise ValueError(
            f"the answer of {shown(name)} must be a float32 vector for round {k}. Use the same "
            "release of jaxdp."
        )
    return answer


def load(config: Any, workdir: _Path) -> recalibration.Recalibration:
    """Returns the recalibration of a finished calibrator, whose `apply` gives confidences."""
    method, how, _ = _agreed(config)
    structure = jax.tree.structure(jax.eval_shape(lambda: method.finish(method.init(0.0))))
    leaves = read_npz(pathlib.Path(workdir) / "recalibration.npz")
    parameters = jax.tree.unflatten(structure, [leaves[str(i)] for i in range(len(leaves))])
    return recalibration.Recalibration(method, parameters, recalibration.event(how["epsilon"]))


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
        root, mine, self.done = pathlib.Path(workdir), config.client, False
        self._talk: recalibration.Conversation | None = None
        self._method, self._how, self._terms = _agreed(config)
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
            terms = {
                "adjacency": config.adjacency,
                "unit": mine.unit,
                "epsilon": config.epsilon,
                "delta": 0.0,
                **frame.people(mine, "client"),
            }
            account = frame.own_account(ledger, _name(mine), **terms)
            self._party = dataclasses.replace(party, account=account)
            self._party.check_adjacency(config.adjacency)
            self._workdir, self._opened = root, opened.pop_all()

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
        if fields.get("terms") != self._terms:
            raise ValueError(
                f"the calibrator's terms are {fields.get('terms')!r}, not the agreed ones: "
                f"{self._terms}."
            )
        if kind == "end":
            self.done = True
            return pack("end", fields={}, arrays={})
        k, temperature = fields.get("round"), arrays.get("temperature", np.zeros(0))
        if type(k) is not int or temperature.shape != () or temperature.dtype != np.float32:
            raise ValueError(
                "the calibrator's question must have a round and a temperature, float32 []."
            )
        if self._talk is None:
            self._talk = self._opened.enter_context(
                self._party.begin(self._method, workdir=self._workdir / "conversation", **self._how)
            )
        answer = self._talk.answer(temperature, round=k)
        return pack("answer", fields={"round": k}, arrays={"answer": answer})

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
        write_json(root / "result.json", {"terms": hospital._terms})
        print(f"hospital: answered under {hospital._terms}.")


def _name(mine: Any) -> str:
    """Returns the name of a hospital's records in its ledger."""
    return mine.dataset or pathlib.Path(mine.records).stem


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
    method, how, _ = _agreed(config)
    root, mine = None if workdir is None else pathlib.Path(workdir), config.client
    private = []
    if mine.records:
        private.append(_private_set(mine, _records(mine.records, config.num_classes)))
    path = frame.asked(choice, config, root, private)
    terms = {
        "adjacency": config.adjacency,
        "unit": config.client.unit,
        "epsilon": config.epsilon,
        "delta": 0.0,
    }
    charge = plans.Item(
        f"{method.rounds} answers to the calibrator",
        _name(mine),
        recalibration.event(how["epsilon"]),
        terms,
        ledger=frame.LEDGER if path is None else os.fspath(path.absolute()),
    )
    return [charge]
