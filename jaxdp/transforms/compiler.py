"""Options of XLA under which no guarantee of jaxdp holds.

Clipping leaves out a gradient that is NaN or infinite. XLA's CPU backend can be told that neither
exists. It then removes the test, and one NaN in one record enters the sum.

| `XLA_FLAGS` | guarantee |
|---|---|
| none, and everything that flushes subnormal numbers to zero | holds |
| `--xla_cpu_enable_fast_math=true` | holds |
| `--xla_cpu_fast_math_honor_division=false`, `..._honor_functions=false` | holds |
| fast math with `..._honor_nans=false` or `..._honor_infs=false` | refused |

XLA reads the variable once, when JAX first compiles. Options that a caller gives to
`jax.jit(compiler_options=...)` are not seen here. The caller must not give these.
"""

import os
import pathlib

# XLA honours NaN and infinities, unless fast math is on and one of the others is off.
_FAST = "xla_cpu_enable_fast_math"
_HONORED = ("xla_cpu_fast_math_honor_nans", "xla_cpu_fast_math_honor_infs")


def check_options() -> None:
    """Raises RuntimeError if `XLA_FLAGS` lets XLA assume that there is no NaN or no infinity."""
    options = _options(os.environ.get("XLA_FLAGS", ""))
    broken = [name for name in _HONORED if not options.get(name, True)]
    if options.get(_FAST, False) and broken:
        raise RuntimeError(
            f"XLA_FLAGS has --{_FAST}=true and --{broken[0]}=false. XLA then assumes that no value "
            "is NaN or infinite, and a record that is adds an unbounded gradient. Remove "
            f"--{broken[0]}=false and start Python again."
        )


def _options(text: str) -> dict[str, bool]:
    """Parses boolean options as XLA does, which counts the last one of each name.

    A text without a dash is the name of a file with options.
    """
    if text.strip() and not text.lstrip().startswith("-"):
        file = pathlib.Path(text.strip())
        text = file.read_text() if file.is_file() else ""
    without_quotes = text.replace("'", " ").replace('"', " ")
    options = {}  # a later option replaces an earlier one
    for word in without_quotes.split():
        name, _, value = word.lstrip("-").partition("=")
        # XLA takes an option without a value as true.
        options[name] = value.lower() in ("", "true", "1")
    return options
