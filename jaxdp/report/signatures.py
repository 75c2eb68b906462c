"""Signatures of pages with `ssh-keygen` of OpenSSH, which keeps the keys and asks for passphrases.

The namespace of the signatures is "jaxdp-report". A check by hand needs no jaxdp:

    ssh-keygen -Y verify -f SIGNERS -I NAME -n jaxdp-report -s report.html.sig < report.html
"""

import os
import pathlib
import subprocess

from jaxdp.files import shown, shown_lines, write_durably

NAMESPACE = "jaxdp-report"
_TOOL = "ssh-keygen"


def sign(page: str | os.PathLike[str], key: str | os.PathLike[str]) -> pathlib.Path:
    """Signs a page. An older signature is replaced.

    Args:
      page: The file.
      key: The private SSH key, or the public key of one that an agent or a security token has.

    Returns:
      The path of the signature, PAGE.sig.

    Raises:
      FileNotFoundError: There is no such page or key, or no ssh-keygen.
      ValueError: ssh-keygen did not sign. Its own message is on stderr.
    """
    _check_file(key, "--sign", "Give a key, or make one with `ssh-keygen -t ed25519 -f KEY`.")
    # Its questions, for a passphrase or a touch, are for the user's terminal.
    answer = _run(page, "sign", "-f", os.fspath(key), stderr=None)
    if answer.returncode:
        raise ValueError(
            f"ssh-keygen did not sign {shown(page)} with {shown(key)}. Its message is above. Give "
            "a private SSH key that you can read, or the public key of one in your agent."
        )
    path = pathlib.Path(f"{os.fspath(page)}.sig")
    write_durably(path, answer.stdout)
    return path


def verify(
    page: str | os.PathLike[str], signers: str | os.PathLike[str], identity: str
) -> tuple[bool, str]:
    """Returns whether PAGE.sig is the signature of a page by an allowed signer, and a sentence.

    Args:
      page: The file.
      signers: The file of allowed signers, a line "NAME KEYTYPE KEY" each, as `man ssh-keygen` has
        it.
      identity: The name of who must have signed.

    Raises:
      FileNotFoundError: The page, its signature or `signers` is missing, or ssh-keygen.
    """
    signature = f"{os.fspath(page)}.sig"
    _check_file(signature, "the signature", "Sign with `jaxdp report RUN --sign KEY`.")
    _check_file(signers, "--signers", "Give a file with a line 'NAME KEYTYPE KEY' a signer.")
    options = ["-f", os.fspath(signers), "-I", identity, "-s", signature]
    answer = _run(page, "verify", *options, stderr=subprocess.PIPE)
    if answer.returncode == 0:
        return True, shown_lines(answer.stdout.decode(errors="replace").strip())
    said = (answer.stdout + answer.stderr).decode(errors="replace")
    return False, (
        f"{shown(signature)} is NOT a signature of {shown(identity)} for this page, by a key in "
        f"{shown(signers)}. ssh-keygen says: {shown(' '.join(said.split()))}"
    )


def _check_file(path: str | os.PathLike[str], name: str, remedy: str) -> None:
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"{name} {shown(path)} is not a file. {remedy}")


def _run(
    page: str | os.PathLike[str], action: str, *options: str, stderr: int | None
) -> subprocess.CompletedProcess[bytes]:
    command = [_TOOL, "-Y", action, "-n", NAMESPACE, *options]
    with open(page, "rb") as content:
        try:
            return subprocess.run(
                command, stdin=content, stdout=subprocess.PIPE, stderr=stderr, check=False
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(
                "ssh-keygen is not installed. Install the client of OpenSSH 8.1 or later, for "
                "example with `apt install openssh-client`."
            ) from error
