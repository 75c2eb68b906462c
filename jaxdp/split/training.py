"""`Training`, the options of `fit_in_memory` that every training of split adaptation takes."""

import dataclasses

from jaxdp.models.training import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The options of a training by Adam.

    Attributes:
      learning_rate: The constant learning rate.
      epochs: Passes over the images, or over all copies of them.
      batch_size: Images of a step.

    Raises:
      ValueError: A number is not positive.
    """

    learning_rate: float = 1e-5
    epochs: int = 100
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_positive(
            learning_rate=self.learning_rate, epochs=self.epochs, batch_size=self.batch_size
        )
