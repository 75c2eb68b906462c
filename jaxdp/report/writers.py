"""Writers of the metrics of a run for TensorBoard and for Weights & Biases, as callbacks of `fit`.

    with TensorBoardWriter("run/tensorboard") as writer:
        jaxdp.finetune.fit(..., callbacks=[writer])

The libraries are optional. The extras `tensorboard` and `wandb` install them.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxdp.files.extras import optional

Callback = Callable[[int, Mapping[str, float], Any], None]
"""A function `callback(step, metrics, params)` that is called after each step.

It gets the number of finished steps, the numbers of the step's row, and the parameters.
"""


class _Writer(contextlib.AbstractContextManager["_Writer"]):
    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class TensorBoardWriter(_Writer):
    """Writes each metric as a curve of TensorBoard event files, with tensorboardX.

    A resumed run hides the steps that it repeats.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Chooses the folder of the event files. The first call makes it.

        Raises:
          ImportError: The extra `tensorboard` is not installed.
        """
        self._library = optional("tensorboardX", "tensorboard")
        self._folder = folder
        self._writer: Any = None

    def __call__(
        self,
        step: int,
        metrics: Mapping[str, float],
        params: Any = None,
    ) -> None:
        """Writes the metrics of a step, which are in the file a second later.

        `params` are not written.
        """
        if self._writer is None:
            self._writer = self._library.SummaryWriter(
                os.fspath(self._folder),
                purge_step=step,
                filename_suffix=f".{time.time_ns()}",
                flush_secs=1,
            )
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


class WandbWriter(_Writer):
    """Logs the metrics of each step to a run of Weights & Biases.

    Weights & Biases also collects the host name, the hardware, the command and the state of the Git
    repository, and sends all to its server, except with mode="offline". Steps that the run has
    already are ignored.
    """

    def __init__(self, **options: Any):
        """Starts or resumes a run.

        Args:
          **options: Arguments of `wandb.init`, such as project, id, resume, mode and dir.

        Raises:
          ImportError: The extra `wandb` is not installed.
        """
        self._run = optional("wandb", "wandb").init(**options)

    def __call__(
        self,
        step: int,
        metrics: Mapping[str, float],
        params: Any = None,
    ) -> None:
        """Logs the metrics of a step. `params` are not sent."""
        self._run.log(dict(metrics), step=step, commit=True)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
