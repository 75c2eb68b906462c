"""Checks a released model: python -m launch.serve_check FOLDER.

It compares the checksums, loads the model without its code, answers the stored inputs again, and
compares the answers.
"""

from collections.abc import Sequence

from jaxdp.files import shown
from jaxdp.models import check_released

from . import frame

__all__ = ["main"]


def main(argv: Sequence[str]) -> None:
    """Prints how far the answers are from those of the release."""
    if len(argv) != 2:
        raise ValueError("give the folder of a release: python -m launch.serve_check FOLDER.")
    difference = check_released(argv[1])
    words = (
        f"differ by at most {difference:.2g} of the largest output" if difference else "are equal"
    )
    print(f"{shown(argv[1])}: the files are those of the release, and the answers {words}.")


if __name__ == "__main__":
    frame.start(main)
