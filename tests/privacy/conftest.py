"""Ledgers that the tests of this folder share."""

import pathlib
from collections.abc import Iterator

import pytest

from jaxdp.privacy import Ledger


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger in memory."""
    with Ledger.in_memory() as ledger:
        yield ledger


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """The path of a ledger that is not there yet."""
    return tmp_path / "ledger.sqlite"
