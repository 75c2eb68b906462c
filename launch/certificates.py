"""Keys for parties over a network: python -m launch.certificates keys --host calibrator.example
--party clinic-1.

It makes a folder for the SuperLink and one for each party. Give every party its own folder and no
other.

    keys/superlink    ca.crt, server.crt and server.key for TLS, secret for its server program, the public keys of all
                      parties in parties/
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
from typing import Any

from absl import flags

from jaxdp.files import optional, shown, write_durably

from . import frame

SUPERLINK, PARTIES = "superlink", "parties"
_HOST = flags.DEFINE_list(
    "host", ["localhost", "127.0.0.1"], "Names and addresses of the SuperLink for its parties."
)
_PARTY = flags.DEFINE_multi_string("party", [], "The name of a party. Repeat it for several.")
_DAYS = flags.DEFINE_integer(
    "days", 365, "Days until the certificate of the SuperLink ends.", lower_bound=1
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
      ValueError: A name of a party is impossible.
    """
    for name in parties:
        if name == SUPERLINK or frame.file_name(name) != name or name.startswith("."):
            raise ValueError(
                f"--party must be letters, digits, '-' and '_', not {SUPERLINK!r}, got {name!r}."
            )
    link = folder / SUPERLINK
    if not (link / "server.key").exists():
        authority, certificate, key = _certificates(hosts, days)
        for name, data in (("ca.crt", authority), ("server.crt", certificate)):
            _write(link / name, data, 0o644)
        _write(link / "secret", secrets.token_bytes(32))
        _write(link / "server.key", key)
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


def _key_pair() -> tuple[bytes, bytes]:
    ec = optional("cryptography.hazmat.primitives.asymmetric.ec", "flower")
    form = optional("cryptography.hazmat.primitives.serialization", "flower")
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return public, key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()
    )


def _certificates(hosts: Sequence[str], days: int) -> tuple[bytes, bytes, bytes]:
    """Returns a certificate authority, a certificate that it signed, and the private key of the
    latter, in PEM.
    """
    x509 = optional("cryptography.x509", "flower")
    ec = optional("cryptography.hazmat.primitives.asymmetric.ec", "flower")
    form = optional("cryptography.hazmat.primitives.serialization", "flower")
    sha256 = optional("cryptography.hazmat.primitives.hashes", "flower").SHA256()
    root, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)  # clocks differ
    uses = {
        name: False
        for name in ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    }
    uses |= {name: False for name in ("crl_sign", "encipher_only", "decipher_only")}
    above = x509.SubjectKeyIdentifier.from_public_key(root.public_key())

    def signed(name: str, public: Any, authority: bool, *extensions: Any) -> bytes:
        issuer, subject = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)])
            for one in ("jaxdp parties", name)
        )
        builder = (
            x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(public)
        )
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(start)
        builder = builder.not_valid_after(start + datetime.timedelta(days=days))
        builder = builder.add_extension(
            x509.BasicConstraints(authority, 0 if authority else None), critical=True
        )
        allowed = x509.KeyUsage(**uses, digital_signature=not authority, key_cert_sign=authority)
        builder = builder.add_extension(allowed, critical=True)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(root, sha256).public_bytes(form.Encoding.PEM)

    server = signed(
        hosts[0],
        key.public_key(),
        False,
        x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_alternative(x509, host) for host in hosts]),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(above),
    )
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return signed("jaxdp parties", root.public_key(), True, above), server, private


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
