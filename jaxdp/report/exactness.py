"""What a report says of noise: whether it was exact, and what that means."""

_EXACT = (
    "is exact. Sums and noise are integers, so epsilon also holds for somebody who reads the last "
    "bits of what was released. It assumes that the last bits of what a record contributes do not "
    "depend on other records of its batch."
)
_ROUNDED = (
    "is rounded: it is added in floating point. Epsilon does not cover what the last bits of the "
    "released numbers may tell. Options named exact cover it, where a method has them."
)


def noise_of(exact: bool, releases: str = "the releases of this run") -> list[str]:
    """Returns what a report says of the noise of some releases, in a list."""
    return [f"The noise of {releases} {_EXACT if exact else _ROUNDED}"]
