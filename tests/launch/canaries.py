"""Looks for secrets in messages, as raw bytes, as numbers of another precision, and as text."""

import numpy as np


def forms(secret):
    """Returns byte strings, one of which is in whatever holds a secret plainly: bytes, or an array
    of numbers."""
    if isinstance(secret, bytes):
        return [secret, secret.hex().encode()]
    array = np.asarray(secret).ravel()
    assert array.size >= 3 and len(set(array.tolist())) > 1, "a canary must be unlikely by chance"
    dtypes = [array.dtype, np.float64, np.float32, *([np.int32] if array.dtype.kind == "i" else [])]
    values = [array.astype(dtype).tobytes() for dtype in dtypes]
    texts = [
        ", ".join(map(repr, array[:3].astype(dtype).tolist())).encode()
        for dtype in (np.float64, np.float32)
    ]
    return list(dict.fromkeys([*values, *texts]))  # an array of float32 gives some of them twice


def leaks(messages, secrets):
    """Returns the names of the secrets of which any form is in any message."""
    data = b"\0".join(messages)
    return {
        name
        for name, many in secrets.items()
        if any(form in data for one in many for form in forms(one))
    }
