"""Earlier results of launchers (tests/golden/results.json), as far as they contain no noise.

They were made with the configs of `tiny`. Another processor may classify a few images differently.
"""

import json
import math
import pathlib
from typing import Any

_RESULTS = pathlib.Path(__file__).resolve().parents[1] / "golden" / "results.json"


def differences(study: str, found: Any, *, tolerance: float = 0.02) -> list[str]:
    """Returns where a result differs from the golden one, by more than `tolerance` absolutely and
    relatively."""
    return list(
        _compared(
            json.loads(_RESULTS.read_text())[study], json.loads(json.dumps(found)), study, tolerance
        )
    )


def _compared(golden: Any, found: Any, place: str, tolerance: float) -> Any:
    if isinstance(golden, dict):
        for name, value in golden.items():
            if not isinstance(found, dict) or name not in found:
                yield f"{place} has no {name!r}"
            else:
                yield from _compared(value, found[name], f"{place}.{name}", tolerance)
    elif isinstance(golden, list):
        if not isinstance(found, list) or len(found) != len(golden):
            yield f"{place} is {found!r}, not a list of {len(golden)}"
        else:
            for k, pair in enumerate(zip(golden, found, strict=True)):
                yield from _compared(*pair, f"{place}[{k}]", tolerance)
    elif isinstance(golden, float) and isinstance(found, int | float):
        if not math.isclose(golden, found, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{place} was {golden}, is {found}"
    elif golden != found:
        yield f"{place} was {golden!r}, is {found!r}"
