"""The former name of `jaxdp.privacy.privacy_warnings`."""

from jaxdp.privacy.privacy_warnings import LARGE_EPSILON, PrivacyWarning, warn_if_weak

__all__ = ["LARGE_EPSILON", "PrivacyWarning", "warn_if_weak"]
