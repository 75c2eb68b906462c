"""Keys for parties over a network: python -m launch.certificates keys --host calibrator.example
--party clinic-1.

It makes a folder for the SuperLink and one for each party. Give every party its own folder and no
other.

    keys/superlink    ca.crt, server.crt and server.key for TLS, secret for its server program, the
                      public keys of all parties in parties/
    keys/clinic-1     ca.crt, the private key of its SuperNode, secret for its client program

The key of the certificate authority is not kept, so nobody can make another certificate that the
parties trust. To add a party, repeat --party with the new name only: existing folders stay as they
are.
"""

import datetime
import ipaddress
import os
import pathlib
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from jaxdp.files import optional, shown, write_durably

from . import frame

SUPERLINK = "superlink"
PARTIES = "parties"
_ISSUER = "jaxdp parties"
_HOST = flags.DEFINE_list(
    "host", ["localhost", "127.0.0.1"], "Names and addresses of the SuperLink for its parties."
)
_PARTY = flags.DEFINE_multi_string("party", [], "The name of a party. Repeat it for several.")
_DAYS = flags.DEFINE_integer(
    "days",
    365,
    "Days until the certificate of the SuperLink ends, at most 100 years.",
    lower_bound=1,
    upper_bound=36500,
)


def make(
    folder: pathlib.Path, parties: Sequence[str], *, hosts: Sequence[str], days: int = 365
) -> None:
    """Makes the keys of the SuperLink, if there are none, and of new parties.

    Args:
      folder: The folder of all keys.
      parties: The names of the parties, of letters, digits, "-", "_" and ".".
      hosts: The names and addresses of the SuperLink.
      days: The validity of its certificate.

    Raises:
      ValueError: A name of a party is impossible, or a host has none.
    """
    for name in parties:
        if name == SUPERLINK or frame.file_name(name) != name or name.startswith("."):
            raise ValueError(
                f"--party must be letters, digits, '-' and '_', not {SUPERLINK!r}, got {name!r}."
            )
    if not all(hosts) or not hosts:
        raise ValueError(
            f"--host must be names or addresses, such as link.example.org, got {','.join(hosts)!r}."
        )
    link = folder / SUPERLINK
    # The private key is written last, so a folder that has it is complete.
    if not (link / "server.key").exists():
        certificates = _certificates(hosts, days)
        _write(link / "ca.crt", certificates.authority, 0o644)
        _write(link / "server.crt", certificates.server, 0o644)
        _write(link / "secret", secrets.token_bytes(32))
        _write(link / "server.key", certificates.key)
    for name in parties:
        if not (folder / name / "key").exists():
            public, private = _key_pair()
            _write(folder / name / "ca.crt", (link / "ca.crt").read_bytes(), 0o644)
            _write(folder / name / "secret", secrets.token_bytes(32))
            _write(link / PARTIES / f"{name}.pub", public, 0o644)
            _write(folder / name / "key", private)


def _write(path: pathlib.Path, data: bytes, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data, mode=mode)


def _cryptography(module: str) -> Any:
    return optional(f"cryptography.{module}", "flower")


def _key_pair() -> tuple[bytes, bytes]:
    ec = _cryptography("hazmat.primitives.asymmetric.ec")
    form = _cryptography("hazmat.primitives.serialization")
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return public, key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()
    )


class _Certificates(NamedTuple):
    """A certificate authority, a certificate that it signed, and the private key of the latter, in
    PEM.
    """

    authority: bytes
    server: bytes
    key: bytes


def _certificates(hosts: Sequence[str], days: int) -> _Certificates:
    x509 = _cryptography("x509")
    ec = _cryptography("hazmat.primitives.asymmetric.ec")
    form = _cryptography("hazmat.primitives.serialization")
    root_key = ec.generate_private_key(ec.SECP384R1())
    server_key = ec.generate_private_key(ec.SECP384R1())
    root_name = x509.SubjectKeyIdentifier.from_public_key(root_key.public_key())
    authority = _signed(_ISSUER, root_key.public_key(), root_key, days, [root_name], is_root=True)
    extensions = [
        x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_alternative(x509, host) for host in hosts]),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(root_name),
    ]
    server = _signed(hosts[0], server_key.public_key(), root_key, days, extensions)
    key = server_key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return _Certificates(authority, server, key)


def _signed(
    name: str,
    public_key: Any,
    root_key: Any,
    days: int,
    extensions: Sequence[Any],
    *,
    is_root: bool = False,
) -> bytes:
    """Returns the certificate of a public key, signed with the key of the authority, in PEM."""
    x509 = _cryptography("x509")
    form = _cryptography("hazmat.primitives.serialization")
    sha256 = _cryptography("hazmat.primitives.hashes").SHA256()
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)  # clocks differ
    usage = x509.KeyUsage(
        digital_signature=not is_root,
        key_cert_sign=is_root,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    # The authority signs certificates of servers, and no further authority.
    constraints = x509.BasicConstraints(is_root, 0 if is_root else None)
    builder = x509.CertificateBuilder()
    builder = builder.issuer_name(_common_name(x509, _ISSUER))
    builder = builder.subject_name(_common_name(x509, name))
    builder = builder.public_key(public_key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(start)
    builder = builder.not_valid_after(start + datetime.timedelta(days=days))
    builder = builder.add_extension(constraints, critical=True)
    builder = builder.add_extension(usage, critical=True)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate: bytes = builder.sign(root_key, sha256).public_bytes(form.Encoding.PEM)
    return certificate


def _common_name(x509: Any, name: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _alternative(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise ValueError(
            "give one folder for the keys: python -m launch.certificates keys --party clinic-1."
        )
    make(pathlib.Path(argv[1]), _PARTY.value, hosts=_HOST.value, days=_DAYS.value)
    names = ", ".join(map(shown, sorted(os.listdir(argv[1]))))
    print(f"{shown(argv[1])}: {names}. Give each party its own folder and no other.")


if __name__ == "__main__":
    frame.start(_main)
