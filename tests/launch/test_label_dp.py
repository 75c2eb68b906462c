"""Training on noisy labels by the launcher."""

import json

import pytest

from configs.finetune import labels
from jaxdp.models import load_released
from jaxdp.privacy import LabelDpEvent, Ledger
from launch import finetune, models, release

_FAST = {"steps": 3, "batch_size": 16}


def _config(**chosen):
    config = labels.get_config()
    config.pretrain.update(_FAST)
    config.private.update(_FAST)
    config.labels.update(chosen)
    return config


@pytest.mark.slow
def test_a_run_pays_for_labels_only_and_resumes_without_paying_again(tmp_path, monkeypatch):
    root = tmp_path / "run"
    trained = models.train

    def crash(network, params, source, *rest, **options):
        if options["label"] == "training on noisy labels":
            raise KeyboardInterrupt
        return trained(network, params, source, *rest, **options)

    monkeypatch.setattr(models, "train", crash)
    with pytest.raises(KeyboardInterrupt):
        finetune.experiment(_config(), str(root))
    monkeypatch.setattr(models, "train", trained)
    finetune.experiment(_config(), str(root))
    result = json.loads((root / "result.json").read_text())
    assert result["epsilon"] == pytest.approx(2.0) and result["adjacency"] == "replace_label"
    assert 1 <= result["answers"] <= 10
    with Ledger(root / "ledger.sqlite", read_only=True) as ledger:
        (name,) = [row["name"] for row in ledger.report()["datasets"]]
        events = ledger.events(name)
        assert "labels only" in ledger.report_text()
    assert list(events.values()) == [LabelDpEvent(2.0)] * 2
    card = load_released(release.write(root)).card
    (guarantee,) = card["guarantees"]
    assert guarantee["adjacency"] == "replace_label" and guarantee["epsilon"] == "2"
    assert f"{100 * result['accuracy']:.1f} %" in card["measured"]["test accuracy"]


@pytest.mark.parametrize(
    ("part", "options", "words"),
    [
        ("data", {"adjacency": "add_remove"}, "adjacency must be 'replace_label'"),
        ("labels", {"prior": "secret"}, "labels.prior"),
        ("labels", {"histogram_share": 1.0}, "histogram_share"),
    ],
)
def test_a_config_that_cannot_work_is_refused(part, options, words, tmp_path):
    config = _config()
    config[part].update(options)
    with pytest.raises(ValueError, match=words):
        finetune.experiment(config, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "ledger.sqlite").exists()
