"""Writes the report of a run, from its workdir alone: python -m launch.report WORKDIR.

    jaxdp report WORKDIR                            writes WORKDIR/report.html
    jaxdp report WORKDIR --sign KEY                 and signs it: report.html.sig
    jaxdp report --verify report.html               whether ledger and workdir make this page
    jaxdp report --verify report.html --signers FILE --identity NAME
                                                    and whether NAME signed it

The workdir is of a lifecycle, of one launcher, or of `jaxdp.finetune.fit`. A ledger's file is
reported too. Every launcher writes its report at its end. --verify exits with 0 if the page is
true, or was until more was spent. It exits with 1 if the page or its signature is not, and with 2
if that cannot be told.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxdp.files import read_json, shown
from jaxdp.models.released import CARD
from jaxdp.privacy import Ledger
from jaxdp.report import runs, signatures, verification
from jaxdp.report.books import Books
from jaxdp.report.past import Past

from . import frame, run_report

__all__ = ["main", "verify", "write"]


def write(workdir: str | os.PathLike[str], **options: Any) -> pathlib.Path:
    """Writes the report of a launcher's run, of a run of `fit`, or of a ledger.

    Args:
      workdir: The workdir, or the ledger's file.
      **options: As `jaxdp.report.write` or `launch.run_report.write` takes them.
    """
    if _is_of_library(pathlib.Path(workdir)):
        return runs.write(workdir, **options)
    return run_report.write(workdir, **options)


def verify(
    page: str | os.PathLike[str],
    workdir: str | os.PathLike[str] | None = None,
    *,
    ledger: str | os.PathLike[str] | None = None,
) -> verification.Answer:
    """Returns whether a page is the one that its ledger and workdir make. Both stay as they are.

    Args:
      page: The HTML file.
      workdir: The workdir or ledger's file, by default the folder of the page if a run is there,
        and otherwise `ledger`.
      ledger: The ledger's file, if it is not where the workdir says.

    Raises:
      FileNotFoundError: There is no such page.
      ValueError, OSError: It cannot be told. The message says why, and what to do.
    """
    if not pathlib.Path(page).is_file():
        raise FileNotFoundError(f"the page {shown(page)} is not a file. Give a report.html.")
    root = _root(pathlib.Path(page), workdir, ledger)
    card = pathlib.Path(page).parent / CARD

    def rewrite(output: pathlib.Path, past: Past) -> None:
        if card.exists():
            content = read_json(card, keys=("measured", "guarantees"))
            said = {"measured": [[*row] for row in content["measured"].items()]}
            names = [row["name"] for row in content["guarantees"]]
            if names:
                runs.rewrite(_payer(root), output, past, said, names)
            else:
                runs.write_page(output, root, Books.empty(), {}, said)
        elif _is_of_library(root):
            runs.rewrite(root, output, past)
        else:
            run_report.write(root, output=output, past=past)

    answer = verification.verify(page, rewrite, ledger=ledger)
    if answer.is_true and card.exists():
        # The card says which accounts and measurements the page shows, and is its writer's word.
        said = "Which accounts it shows, and what was measured, was compared with card.json alone."
        lines = [answer.text, said, *_left_out(root, card, ledger)]
        return dataclasses.replace(answer, text="\n".join(lines))
    if not answer.is_true and root.is_file():
        hint = (
            "It was compared with the page of the ledger alone. For that of a run give its "
            "workdir: jaxdp report WORKDIR --verify PAGE --ledger LEDGER."
        )
        return dataclasses.replace(answer, text=f"{answer.text}\n{hint}")
    return answer


def _left_out(
    root: pathlib.Path, card: pathlib.Path, ledger: str | os.PathLike[str] | None
) -> list[str]:
    """Returns a sentence if the run of a release has spent on accounts that its card leaves out.

    Of a ledger alone it is about all spends. A release may leave out what is no part of its model.
    """
    payer = _payer(root)
    runs_of_root = [frame.run_of(root)] if not root.is_file() else []
    named = payer
    if (payer / runs.FILE).exists():
        run = read_json(payer / runs.FILE, keys=("ledger", "runs"))
        runs_of_root += run["runs"]
        named = payer / (run["ledger"] or "")
    path = pathlib.Path(ledger or named)
    if not path.is_file():  # no account was ever opened
        return []
    with Ledger(path, read_only=True) as opened:
        history = opened.history()
    known = set(filter(None, runs_of_root))
    spent_on = {row["dataset"] for row in history if not known or row["run"] in known}
    names = {row["name"] for row in read_json(card, keys=("guarantees",))["guarantees"]}
    left_out = ", ".join(map(shown, sorted(spent_on - names)))
    if not left_out:
        return []
    whose = "this run" if known else "runs"
    return [f"It leaves out spends of {whose} in {shown(path)}, on {left_out}."]


def _payer(root: pathlib.Path) -> pathlib.Path:
    """Returns the workdir of `fit` or the ledger behind the model that a run has released."""
    for folder in (root, frame.cell_folder(root, ("private",))):
        if (folder / runs.FILE).exists():
            return folder
    return frame.of_workdir(root) or root


def _is_of_library(root: pathlib.Path) -> bool:
    return root.is_file() or (root / runs.FILE).exists()


def _root(
    page: pathlib.Path,
    workdir: str | os.PathLike[str] | None,
    ledger: str | os.PathLike[str] | None,
) -> pathlib.Path:
    folder = pathlib.Path(workdir or page.parent)
    if workdir is None and (folder / CARD).exists():
        folder = folder.parent  # of a release, which a run writes into its workdir
    has_run = any((folder / name).exists() for name in ("run.json", "config.json"))
    if workdir is not None or has_run:
        return folder
    if ledger is None:
        raise ValueError(
            f"cannot tell: {shown(page)} is not in the workdir of a run. Give the workdir too: "
            "jaxdp report WORKDIR --verify PAGE. For the page of a ledger alone give --ledger."
        )
    return pathlib.Path(ledger)


def main(argv: Sequence[str]) -> None:
    """Writes WORKDIR/report.html, or verifies a page. Exits with 1 if a page is not true."""
    options = _parser().parse_args(argv[1:])
    if options.verify is not None:
        _verify(options)
        return
    if options.workdir is None:
        raise ValueError("give the workdir of one run: python -m launch.report WORKDIR.")
    if options.ledger or options.signers or options.identity:
        raise ValueError("--ledger, --signers and --identity belong to --verify PAGE. Give it too.")
    path = write(options.workdir)
    print(path)
    if options.sign is not None:
        print(signatures.sign(path, options.sign))


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("jaxdp report", description=__doc__, formatter_class=form)
    parser.add_argument("workdir", nargs="?", help="the workdir, or a ledger's file")
    parser.add_argument("--sign", metavar="KEY", help="an SSH key, or the public key of an agent's")
    parser.add_argument("--verify", metavar="PAGE", help="the page to compare")
    parser.add_argument("--ledger", help="the ledger, if it is not where the workdir says")
    parser.add_argument("--signers", help="the file of allowed signers, for ssh-keygen")
    parser.add_argument("--identity", metavar="NAME", help="who must have signed")
    return parser


def _verify(options: argparse.Namespace) -> None:
    if options.sign is not None:
        raise ValueError("--sign signs a page that it writes. Leave out --verify, or --sign.")
    if (options.signers is None) != (options.identity is None):
        raise ValueError("--signers and --identity must be given together: the file, and a name.")
    is_signed = True
    if options.signers is not None:
        signed = signatures.verify(options.verify, options.signers, options.identity)
        is_signed, words = signed
        print(words)
    answer = verify(options.verify, options.workdir, ledger=options.ledger)
    print(answer.text)
    if not (answer.is_true and is_signed):
        sys.exit(1)


if __name__ == "__main__":
    frame.tell(main, sys.argv)
