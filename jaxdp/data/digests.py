"""Short keyed hashes of single records, by which equal records of two sets are recognised."""

import hashlib

import jax
import numpy as np

from jaxdp.data.protocol import Source

_AT_A_TIME = 1024  # rows in memory at once


def record_digests(source: Source, *, key: bytes) -> np.ndarray:
    """Returns a hash of each record, sorted and without repetition: uint64 [m], m <= n.

    Equal records have equal hashes in any order, in any part of a set and under any name. A record
    whose bytes differ has another hash, for example after another resizing or in another dtype.

    Formal guarantee: none. Whoever has the key and a hash can tell whether a known record is in the
    set. Without the key the hashes are those of a pseudorandom function (keyed BLAKE2b, 64 bits)
    and tell the number of different records.

    Args:
      source: The records, n of them. All are read once.
      key: The secret key, 16 to 64 bytes.

    Raises:
      ValueError: The key has another length.
    """
    if not 16 <= len(key) <= 64:
        raise ValueError(f"key must have 16 to 64 bytes, got {len(key)}.")
    digests = np.empty(len(source), np.uint64)
    for start in range(0, len(source), _AT_A_TIME):
        rows = np.arange(start, min(start + _AT_A_TIME, len(source)))
        columns = [np.asarray(leaf) for leaf in jax.tree.leaves(source.gather(rows))]
        columns = [column.astype(column.dtype.newbyteorder("<")) for column in columns]
        # Records of one batch share dtypes and shapes, so one header serves them all.
        header = repr([(column.dtype.str, column.shape[1:]) for column in columns]).encode()
        for row in range(len(rows)):
            record = hashlib.blake2b(header, digest_size=8, key=key)
            for column in columns:
                record.update(np.ascontiguousarray(column[row]).tobytes())
            digests[start + row] = int.from_bytes(record.digest(), "little")
    return np.unique(digests)
