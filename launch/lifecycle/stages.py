"""The stages of a model's life, in the order in which they are run.

    pretrain      public images             a backbone on which noise hurts less (DPAdapter)
    finetune      the private training set  a model, by DP-SGD or one of its relatives
    recalibrate   several private sources   confidences that fit their images
    adapt         a private stream          a model that follows the drift of the stream
    split         a client's images         noisy representations and labels (Split Adaptation)
    deploy        no data                   the adapted model with recalibrated confidences
    predict       the private training set  certified, private answers to some queries
    certificates  the private training set  how far the data may change before answers do,
                                            NOT private
    audit_*       canaries                  what attackers can prove about each of these releases

Each study names the module that has its stages (`launch.study.Program.life`): what they compute,
charge and release, their accounts, and their audit. A private stage touches private data through
the function that a user would call, with an account and a workdir. A second function says what the
stage will spend, so a lifecycle can reserve everything before it spends anything. Quality is
measured on the public held-out test images with released parameters, which costs nothing. The one
exception is `certificates`, which is optional.
"""

from .. import studies
from .stage import Stage


def known() -> tuple[Stage, ...]:
    """Returns the stages of all studies in the order of the list, audits last."""
    stages: list[Stage] = []
    for study in studies.known():
        if study.life:
            stages += studies.module(study.life).STAGES
    return tuple(sorted(stages, key=lambda stage: stage.is_audit))
