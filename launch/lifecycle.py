"""A model's whole life: python -m launch.lifecycle --config configs/lifecycle_digits.py --workdir workdir/lifecycle."""

from typing import Any

from launch import frame


def experiment(config: Any, workdir: str) -> None:
    """Runs what is not done yet; exits with 1 if a stage failed, with 130 after Ctrl-C."""
    import sys

    from jaxdp.lifecycle import experiment
    from jaxdp.privacy import BudgetExceeded

    try:
        states = experiment.run(config, workdir)
    except (ValueError, OSError, ImportError, BudgetExceeded) as error:
        sys.exit(
            f"{type(error).__name__}: {error}\nWhat is finished is kept, and the ledger counts all that was reserved. "
            "Once this is mended the same command goes on and pays nothing twice."
        )
    if any(state["status"] != "done" for state in states.values()):
        sys.exit(1)


if __name__ == "__main__":
    frame.main(experiment)
