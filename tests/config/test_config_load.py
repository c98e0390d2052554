from pathlib import Path

import pytest

from rollmill.config import Config
from rollmill.config.describe import describe_config
from rollmill.config.fields import walk_fields
from rollmill.config.load import apply_override, load_config, parse_config, to_plain
from rollmill.config.trainer import AlgorithmConfig
from rollmill.errors import ConfigError

MINIMAL = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_overrides_are_yaml_and_reach_into_lists(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: {path: m}\ndata: {path: d.jsonl}\n"
        "eval: {datasets: [{name: a, data: {path: e.jsonl}}]}\n",
    )
    config = load_config(
        path,
        [
            "trainer.optimizer.lr=1e-5",
            "rollout.sampling.stop=['\\n', end]",
            "eval.datasets.0.n_samples_per_prompt=4",
            "engine.port=null",
        ],
    )
    assert config.trainer.optimizer.lr == 1e-5
    assert config.rollout.sampling.stop == ("\\n", "end")
    assert config.eval.datasets[0].n_samples_per_prompt == 4


def test_numbers_with_an_exponent_are_numbers_in_the_file_too(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: {path: m}\ndata: {path: d}\ntrainer: {optimizer: {lr: 3e-5, eps: 1E-8}}\n",
    )
    optimizer = load_config(path).trainer.optimizer
    assert (optimizer.lr, optimizer.eps) == (3e-5, 1e-8)


def test_a_key_given_twice_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m}\ndata: {path: d}\nmodel: {path: other}\n")
    with pytest.raises(ConfigError, match="'model' is given twice"):
        load_config(path)


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": {"path": "d"}, "rollout": {"batch_size": 0}, "trianer": {}})
    text = str(caught.value)
    assert "3 mistakes" in text
    assert "model: a required field is missing" in text
    assert "rollout.batch_size" in text
    assert "did you mean `trainer`?" in text


@pytest.mark.parametrize("override", ["novalue", "=3", "a..b=3", "run.dir.x=1"])
def test_an_override_that_cannot_be_applied_is_named(override: str) -> None:
    values = {"run": {"dir": "runs/x"}}
    with pytest.raises(ConfigError) as caught:
        apply_override(values, override)
    assert caught.value.where == override


def test_the_plain_form_gives_the_same_configuration_again() -> None:
    config = parse_config(MINIMAL)
    assert parse_config(to_plain(config)) == config


def test_sections_are_immutable() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.sampling.temperature = 0.5


def test_greedy_training_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected more than 0 for training"):
        parse_config({**MINIMAL, "rollout": {"sampling": {"temperature": 0}}})


def test_every_field_is_described_with_a_meaning() -> None:
    missing = [path for path, info in walk_fields(Config) if not info.description]
    assert missing == []
    listing = describe_config()
    assert "lr: 1e-06  # [float, > 0]" in listing
    assert "path: (required)" in listing


def test_a_bare_off_is_the_choice_and_not_false(tmp_path: Path) -> None:
    text = "model: {path: x}\ndata: {path: y}\nopd: {mode: off}\ntelemetry: {wandb: {mode: off}}\n"
    (tmp_path / "config.yaml").write_text(text)
    config = load_config(tmp_path / "config.yaml", ["opd.mode=off"])
    assert (config.opd.mode, config.telemetry.wandb.mode) == ("off", "off")
    with pytest.raises(ConfigError, match="mode"):
        load_config(tmp_path / "config.yaml", ["opd.mode=yes"])


@pytest.mark.parametrize("loss", ["cispo", "policy_gradient", "sft"])
def test_a_bound_that_a_loss_does_not_look_at_is_refused(loss: str) -> None:
    with pytest.raises(ValueError, match=f"dual_clip.*found 3.0 with loss: {loss}"):
        AlgorithmConfig(loss=loss, dual_clip=3.0)
    for clipped in ("ppo_clip", "gspo", "mine.py:loss"):
        assert AlgorithmConfig(loss=clipped, dual_clip=3.0).dual_clip == 3.0
