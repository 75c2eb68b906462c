"""Writes the report of a lifecycle again, from its workdir alone: python -m launch.report WORKDIR."""

from collections.abc import Sequence

from absl import app


def main(argv: Sequence[str]) -> None:
    """Writes WORKDIR/report.html."""
    from .lifecycle import document

    if len(argv) != 2:
        raise app.UsageError("give the workdir of one lifecycle: python -m launch.report WORKDIR.")
    try:
        print(document.write(argv[1]))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    app.run(main)
