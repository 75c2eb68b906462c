"""The simulated event of a run, which a resumed run reads again.

A simulation draws from OS entropy. A new process would draw another event, of another charge, and
the till would take the run for another one. So the workdir keeps the first event.
"""

import dataclasses
import pathlib

from jaxdp.files import read_json, write_json
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy.events import describe, from_json, to_json
from jaxdp.release import Hosts

FILE = "event.json"


def of_run(trainer: PrivateTrainer, workdir: pathlib.Path | None, hosts: Hosts) -> PrivateTrainer:
    """Returns the trainer with the event of its run, which all processes share.

    Raises:
      ValueError: The workdir has the event of other noise, steps or sampling.
    """
    if not trainer.is_whole:
        return trainer
    event = from_json(hosts.first(lambda: _text(trainer, workdir)))
    if event == trainer.event(0, trainer.whole_steps):
        return trainer
    return dataclasses.replace(trainer, simulated_event=event)


def _text(trainer: PrivateTrainer, workdir: pathlib.Path | None) -> str:
    """Returns the JSON of the event in the workdir, which is written if there is none."""
    new = trainer.event(0, trainer.whole_steps)
    path = None if workdir is None else workdir / FILE
    if path is None or not path.exists():
        if path is not None:
            write_json(path, {"event": to_json(new)})
        return to_json(new)
    text: str = read_json(path)["event"]
    event = from_json(text)
    if getattr(event, "mechanism", event) != getattr(new, "mechanism", new):
        raise ValueError(
            f"workdir holds the run {describe(event)}, not {describe(new)}. Use a new workdir for "
            "a run with other noise, steps or sampling."
        )
    return text
