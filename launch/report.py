"""Writes the report of a lifecycle again, from its workdir alone: python -m launch.report WORKDIR."""

from collections.abc import Sequence

from . import frame


def main(argv: Sequence[str]) -> None:
    """Writes WORKDIR/report.html."""
    from .lifecycle import document

    if len(argv) != 2:
        raise ValueError("give the workdir of one lifecycle: python -m launch.report WORKDIR.")
    print(document.write(argv[1]))


if __name__ == "__main__":
    frame.start(main)
