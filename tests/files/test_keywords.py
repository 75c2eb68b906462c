"""Options of a `TypedDict` are in the signature, and a misspelt one is refused by name."""

import inspect

import pytest

import jaxdp
from jaxdp import finetune, pretrain

PRETRAIN = [pretrain.dpadapter, pretrain.sam, pretrain.amp, pretrain.fit]
SHOWN = [*finetune.METHODS.values(), finetune.fit, *PRETRAIN]


@pytest.mark.parametrize("function", SHOWN)
def test_a_signature_names_every_keyword(function):
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_defaults_are_those_of_the_trainer():
    parameters = inspect.signature(finetune.dp_sgd).parameters
    fields = finetune.PrivateTrainer.__dataclass_fields__
    clipping = inspect.signature(jaxdp.clipped_grad).parameters
    compared = 0
    for name, parameter in parameters.items():
        for defaults in (fields, clipping):
            if name in defaults and name not in ("loss_fn", "optimizer", "sampler", "clip_norm"):
                assert parameter.default == defaults[name].default, name
                compared += 1
    assert compared >= 13


def test_a_misspelt_argument_is_refused_with_the_nearest_name():
    with pytest.raises(
        TypeError, match=r"no argument 'physical_batchsize'. Did you mean physical_"
    ):
        finetune.dp_sgd(None, None, clip_norm=1.0, sampler=None, physical_batchsize=3)
    with pytest.raises(TypeError, match=r"fit has no argument 'zzz'. It has trainer, params"):
        finetune.fit(None, None, None, steps=1, account=None, zzz=3)
