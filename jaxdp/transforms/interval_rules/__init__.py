"""The rules of `jaxdp.interval`, one per primitive.

===============  ===================================================================
module           rules of
===============  ===================================================================
`exact`          movement of entries, monotone selections, signs, comparisons
`indexing`       gather, scatter, where, argmax, sort, top_k
`conversions`    conversions between dtypes
`elementwise`    monotone functions, powers, trigonometry, arithmetic
`reductions`     sums and products over axes, max pooling
`products`       matrix products and convolutions
`softmax`        softmax and its logarithms
`losses`         losses of `jaxdp.losses` and their gradients
`control`        calls, loops, branches
===============  ===================================================================

`endpoints` has formulas that several of them share.

A new rule is one function with the decorator `register_rule("name of the primitive")` in the module
of its kind, and one row of `CASES` in tests/transforms/test_interval_rules.py. The table of all
rules is `jaxdp.transforms.boxes.RULES`.

Every rule is inclusion-isotonic, because endpoints come from monotone formulas. The choice of a
formula depends on shapes and on the structure of the function, never on endpoints.
docs/design/prediction.md has the derivations T1 to T3.
"""

from jaxdp.transforms.interval_rules import (
    control,
    conversions,
    elementwise,
    exact,
    indexing,
    losses,
    products,
    reductions,
    softmax,
)
from jaxdp.transforms.interval_rules.conversions import WRAPPING, as_real, whole_if_wrapping
from jaxdp.transforms.interval_rules.endpoints import NoRuleError, without_nan
from jaxdp.transforms.interval_rules.exact import EXACT
from jaxdp.transforms.interval_rules.products import (
    dot_product,
    is_outer,
    outer_parts,
    use_zero_sum,
)
from jaxdp.transforms.interval_rules.softmax import certain_argmax, pairwise_gaps, probabilities

__all__ = [
    "EXACT",
    "WRAPPING",
    "NoRuleError",
    "as_real",
    "certain_argmax",
    "control",
    "conversions",
    "dot_product",
    "elementwise",
    "exact",
    "indexing",
    "is_outer",
    "losses",
    "outer_parts",
    "pairwise_gaps",
    "probabilities",
    "products",
    "reductions",
    "softmax",
    "use_zero_sum",
    "whole_if_wrapping",
    "without_nan",
]
