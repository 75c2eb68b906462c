"""The Renyi DP of a sampled Gaussian is that of dp_accounting, which computes it term by term."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant

from jaxdp.privacy.renyi_conversions import RDP_ORDERS
from jaxdp.privacy.sampled_gaussian import sampled_gaussian_rdp

ORDERS = (*RDP_ORDERS[::5], 3.7)


def by_dp_accounting(q, sigma):
    accountant = RdpAccountant(ORDERS)
    with np.errstate(all="ignore"):
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        )
    return np.asarray(accountant.rdp)


@pytest.mark.slow
@pytest.mark.parametrize("q", [1e-12, 1e-3, 0.1, 0.5, 0.9, 1 - 2.0**-53])
def test_it_has_the_bits_of_dp_accounting(q):
    """At small noise the series of some orders do not converge, and count as infinite."""
    multipliers = (1e-3, 0.3, 0.8, 1.1, 5.0, 1e6)
    found = [sampled_gaussian_rdp(q, sigma, ORDERS) for sigma in multipliers]
    np.testing.assert_array_equal(found, [by_dp_accounting(q, sigma) for sigma in multipliers])


def test_another_noise_is_noticed():
    """The twin, whose noise is a millionth larger."""
    twin, right = sampled_gaussian_rdp(0.1, 1.1 * (1 + 1e-6), ORDERS), by_dp_accounting(0.1, 1.1)
    converged = np.isfinite(right)
    assert converged.sum() > 10 and (twin[converged] != right[converged]).all()
