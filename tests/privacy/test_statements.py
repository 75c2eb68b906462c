"""`Ledger.renyi`: Renyi DP and zCDP for other accountants, against integrals in float64."""

import json
import math

import numpy as np
import pytest

from jaxdp.privacy import Ledger
from jaxdp.privacy.events import (
    DiscreteLaplaceDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    ZCDpEvent,
    unproven,
)

Q, SIGMA, STEPS = 0.1, 0.8, 30
STEP = PoissonSampledDpEvent(Q, GaussianDpEvent(SIGMA))


def statement_of(*events, **terms):
    defaults = {"adjacency": "add_remove", "unit": "example"}
    with Ledger.in_memory() as ledger:
        ledger.register("data", **defaults | terms)
        for event in events:
            ledger.spend("data", event)
        return ledger.renyi("data")


def divergence(log_p, log_q, step, order):
    """The Renyi divergence of two densities on a grid, in the worse direction."""
    sums = []
    for upper, lower in ((log_p, log_q), (log_q, log_p)):
        exponent = order * upper + (1 - order) * lower
        largest = exponent.max()
        total = math.log(np.exp(exponent - largest).sum() * step) + largest
        sums.append(total / (order - 1))
    return max(sums)


def sampled_pair():
    x = np.arange(-60, 61, 1e-3)
    base = -((x / SIGMA) ** 2) / 2 - math.log(SIGMA * math.sqrt(2 * math.pi))
    shifted = base + (x - 0.5) / SIGMA**2
    return np.logaddexp(math.log1p(-Q) + base, math.log(Q) + shifted), base, 1e-3


@pytest.fixture(scope="module")
def exact():
    """The divergence of STEPS sampled Gaussians at some orders."""
    pair = sampled_pair()
    return {order: STEPS * divergence(*pair, order) for order in (2.0, 5.0, 32.0)}


def check_rdp(statement, exact):
    at = dict(zip(statement.orders, statement.rdp, strict=True))
    for order, value in exact.items():
        assert at[order] == pytest.approx(value, rel=1e-4)


def check_rho(rho, exact):
    """Fails if the divergence is above the line of zCDP."""
    assert all(value <= rho * order * (1 + 1e-9) for order, value in exact.items())


def test_renyi_dp_of_sampled_gaussians_is_the_integral(exact):
    statement = statement_of(SelfComposedDpEvent(STEP, STEPS))
    check_rdp(statement, exact)
    check_rho(statement.rho, exact)
    assert statement.rho == pytest.approx(STEPS / (2 * SIGMA**2))
    # Other orders are bounds. The series diverges at small ones, which are left out.
    order, rdp = statement.orders[2], statement.rdp[2]
    assert rdp >= STEPS * divergence(*sampled_pair(), order)
    assert min(statement.orders) > 1.1 and max(statement.rdp) < math.inf
    fewer = statement_of(SelfComposedDpEvent(STEP, STEPS - 1))
    with pytest.raises(AssertionError):
        check_rdp(fewer, exact)
    with pytest.raises(AssertionError):  # rho is not amplified by sampling
        check_rho(Q * Q * statement.rho, exact)


def test_replacing_a_record_moves_a_sum_twice_as_far():
    gaussian = statement_of(GaussianDpEvent(3.0), adjacency="replace_one")
    assert gaussian.rho == pytest.approx(2 / 9)
    assert gaussian.rdp == pytest.approx([order * 2 / 9 for order in gaussian.orders], rel=1e-9)


def test_rho_of_pure_releases_bounds_their_divergence():
    loss = 0.7
    for event in (PureDpEvent(loss), LaplaceDpEvent(1 / loss), DiscreteLaplaceDpEvent(loss, 1)):
        statement = statement_of(event)
        assert statement.rho == pytest.approx(loss**2 / 2)
        check_rho(statement.rho, dict(zip(statement.orders, statement.rdp, strict=True)))
    mixed = statement_of(PureDpEvent(loss), ZCDpEvent(0.25), GaussianDpEvent(2.0))
    assert mixed.rho == pytest.approx(loss**2 / 2 + 0.25 + 0.125)
    assert statement_of(ZCDpEvent(0.25, xi=0.1)).rho is None


def test_what_has_no_rule_is_said():
    truncated = statement_of(TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 1.0))
    assert (
        truncated.rho is None and truncated.orders == truncated.rdp == () and truncated.rows() == []
    )
    assert "no rule for Renyi DP" in truncated.text() and "rho none" in truncated.text()
    none = statement_of(unproven("no proof"))
    assert none.rho == math.inf and set(none.rdp) == {math.inf}
    assert json.loads(json.dumps(none.as_dict(), allow_nan=False))["rho"] is None
    assert statement_of().rho == 0.0 and set(statement_of().rdp) == {0.0}


def test_a_filter_has_one_order_and_parts_their_maximum():
    terms = {"accounting": "renyi_filter", "epsilon": 2.0, "delta": 1e-5, "renyi_order": 16.0}
    filtered = statement_of(GaussianDpEvent(9.0), **terms)
    assert filtered.orders == (16.0,) and filtered.rho is None
    assert filtered.rdp[0] > 16 / (2 * 81)  # events may follow from outputs
    assert statement_of(**terms).rdp == (0.0,)
    with Ledger.in_memory() as ledger:
        ledger.register("data", adjacency="add_remove", unit="example")
        for part, sigma in (("a", 3.0), ("b", 2.0)):
            ledger.spend("data", GaussianDpEvent(sigma), partition=part)
        assert ledger.renyi("data").rho == pytest.approx(1 / 8)
        assert ledger.renyi("data", partition="a").rho == pytest.approx(1 / 18)
