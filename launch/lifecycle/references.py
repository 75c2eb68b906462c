"""The stage of references: what fine-tuning and adaptation reach without privacy. NOT private.

It runs only with `config.references.show`, and only where everybody has the records. No ledger
charges it. The terminal shows its accuracies, and the report does not.
"""

from typing import Any

from jaxdp import finetune, tta

from .. import models
from .adapt import batches_of, optimizer_of
from .finetune import beginning
from .networks import network, tuned
from .stage import Job, Stage


def check(config: Any, *, is_public: bool) -> None:
    """Raises ValueError if references would publish what private records say."""
    if _is_shown(config) and not is_public:
        raise ValueError(
            f"config.references.show trains without privacy on {config.data.name}, whose records "
            "are private, and prints the accuracy. Set --config.references.show=False."
        )


def _is_shown(config: Any) -> bool:
    return "references" in config and config.references.show


def train(job: Job) -> dict[str, Any]:
    """Trains and adapts the same network without privacy."""
    if not _is_shown(job.config):
        return {}
    model = network(job.config, job.data.private.num_classes)
    params = models.train(
        model,
        beginning(job, model),
        job.data.private,
        job.config.references,
        seed=job.config.finetune.seed,
        label="without privacy",
    )
    judge = finetune.accuracy
    _, start = tuned(job)
    adapter = tta.Adapter(model.apply_fn, start, tta.Tent(), optimizer_of(job.config.adapt))
    served = tta.serve(adapter, batches_of(job.config, job.data), account=None)
    adapted = served.state.params
    tests = job.data.stream_test
    return {
        "finetune": judge(model.apply_fn, params, job.data.test),
        "adapt": {shift: judge(model.apply_fn, adapted, test) for shift, test in tests.items()},
    }


STAGE = Stage(
    "references",
    train,
    after=("pretrain", "finetune"),
    data=("public", "private", "test", "stream", "stream_test"),
    config=("model", "finetune", "adapt", "references"),
    shape={"finetune": float, "adapt": {str: float}},
)
