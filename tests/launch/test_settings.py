"""Numbers of configs: mistakes are refused. Every config passes in test_configs."""

import math

import pytest
from ml_collections import ConfigDict

from launch.settings import check_numbers


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("private.clip_norm", 0, "between 1e-08 and 1e+08"),
        ("private.clip_norm", 1e-300, "between 1e-08 and 1e+08"),
        ("private.learning_rate", math.nan, "positive"),
        ("private.learning_rate", math.inf, "positive"),
        ("private.learning_rate", -0.1, "positive"),
        ("private.checkpoint_every", 0, "an integer of at least 1"),
        ("private.steps", 0, "an integer of at least 1"),
        ("method.dpadapter.gamma", -1.0, "at least 0 and at most 1e+30"),
        ("sweep.trials", 0, "an integer of at least 1"),
        ("sweep.sources.values", (0, 4), "an integer of at least 1"),
        ("private.batch_size", 1.5, "an integer of at least 1"),
        ("private.epsilon", math.nan, "positive"),
        ("private.epsilon", math.inf, "positive"),
        ("private.delta", math.nan, r"in \[0, 1\)"),
        ("private.delta", 1, r"in \[0, 1\)"),
        ("private.momentum", 1.0, r"in \[0, 1\)"),
        ("data.pretrain_fraction", 1.5, r"in \[0, 1\]"),
        ("data.std", 0, "positive"),
        ("sweep.epsilon.values", (1.0, 0.0), "positive"),
        ("tuning.learning_rates", (1e-3, math.nan), "positive"),
        ("audit_adapt.trials", 0, "an integer of at least 1"),
        ("method_options.bins", 0, "an integer of at least 1"),
        ("temperature", 0, "positive"),
        ("method_options.DeYO.something", math.nan, "finite"),
        ("protocol.seeds", 0, "an integer of at least 1"),
        ("data.severity", 6, r"an integer in 1\.\.5"),
        ("data.split_seed", None, "an integer of at least 0"),
    ],
)
def test_mistakes_are_refused_with_field_value_and_remedy(field, value, message):
    config = ConfigDict()
    node = config
    *parts, last = field.split(".")
    for part in parts:
        node[part] = ConfigDict()
        node = node[part]
    node[last] = value
    must = rf"config\.{field} must be {message.replace('+', '[+]')}.*, got .*. "
    must += rf"Change it with --config\.{field}="
    with pytest.raises(ValueError, match=must):
        check_numbers(config)


@pytest.mark.slow
def test_what_is_no_mistake_passes():
    check_numbers(
        ConfigDict(
            {
                "pretrain": {"steps": 0},
                "delta": 0.0,
                "ema_decay": 0.0,
                "seeds": (0, 1),
                "references": False,
                "budget": {"epsilon": None},
                "unknown": -3.5,
                "name": "nan",
            }
        )
    )
