"""What a person is told about a mistake in a configuration: always the place and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.config.load import load_config, parse_config
from rollmill.errors import ConfigError

MINIMAL = "model: {path: m}\ndata: {path: d.jsonl}\n"


def mistake_in(tmp_path: Path, text: str, *overrides: str) -> ConfigError:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


FIELDS = {
    "misspelled": ("rollout: {n_sample_per_prompt: 4}", "rollout.n_sample_per", "`n_samples_"),
    "in a section above its own": ("trainer: {lr: 1e-5}", "trainer.lr", "`trainer.optimizer.lr`"),
    "in the wrong section": ("rollout: {lr: 1e-5}", "rollout.lr", "`trainer.optimizer.lr`"),
    "unlike any": ("rollout: {zzzz: 1}", "rollout.zzzz", "rollmill config"),
    "a text for a number": ("rollout: {batch_size: many}", "rollout.batch_size", "default is 8"),
    "out of bounds": ("rollout: {batch_size: 0}", "rollout.batch_size", "default is 8"),
    "a misspelled choice": ("weights: {transport: dsk}", "weights.transport", "`disk`"),
    "a decimal comma": ("trainer: {optimizer: {lr: 1,0e-4}}", "trainer.optimizer", "1.0e-5"),
    "a text for a section": ("reward: math", "reward", "write `reward: {type: math}`"),
    "one for a list of them": ("eval: {datasets: e.jsonl}", "eval.datasets", "write `datasets: [{"),
    "none of several types": ("trainer: {lora: {target_modules: 5}}", "trainer.lora.t", "default"),
    "two that disagree": ("trainer: {global_batch_size: 3}", "trainer.global_batch", "divide"),
    "in an evaluation set": (
        "eval: {datasets: [{name: a, data: {path: e, pth: 2}}]}",
        "eval.datasets.0.data.pth",
        "`path`",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_mistake_names_its_field_and_what_to_do(tmp_path: Path, case: str) -> None:
    text, place, fix = FIELDS[case]
    error = mistake_in(tmp_path, MINIMAL + text + "\n")
    assert error.where is not None
    assert error.where.startswith(place)
    assert str(tmp_path / "mine.yaml") in error.where
    assert error.fix is not None
    assert fix in error.fix
    assert "instance of" not in str(error)


def test_a_required_section_that_is_missing_is_shown_as_it_would_be_written(tmp_path: Path) -> None:
    error = mistake_in(tmp_path, "data: {path: d.jsonl}\n")
    assert error.fix == "add `model: {path: …}`"


def test_a_value_of_none_of_the_types_of_a_field_is_one_mistake(tmp_path: Path) -> None:
    error = mistake_in(tmp_path, "model: {path: m}\ndata: {path: 5}\n")
    assert error.what == "the value cannot be used"
    assert error.where == f"data.path in {tmp_path / 'mine.yaml'}"
    assert error.found == "5"


def test_a_section_with_nothing_below_it_has_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL + "run:\nrollout:\n  sampling:\n", encoding="utf-8")
    plain = parse_config({"model": {"path": "m"}, "data": {"path": "d.jsonl"}})
    assert load_config(path) == plain


YAML = {
    "a tab": ("model:\n\tpath: m\n", 2, "spaces"),
    "a bracket that stays open": ("model: {path: m\ndata: d\n", 2, "brackets"),
    "a section given twice": ("model: {path: m}\nmodel: {path: n}\n", 2, "one of them"),
}


@pytest.mark.parametrize("case", YAML)
def test_what_is_no_yaml_is_named_by_line_with_what_to_do(tmp_path: Path, case: str) -> None:
    text, line, fix = YAML[case]
    error = mistake_in(tmp_path, text)
    assert error.where == f"{tmp_path / 'mine.yaml'}:{line}"
    assert error.found
    assert "unicode string" not in error.found
    assert fix in str(error.fix)


@pytest.mark.parametrize(
    "override", ["lr", "=3", "run.dir.x=1", "eval.datasets.3.name=x", "engine.urls=[a"]
)
def test_an_override_that_cannot_be_applied_says_what_to_do(tmp_path: Path, override: str) -> None:
    error = mistake_in(tmp_path, MINIMAL + "run: {dir: runs/x}\neval: {datasets: []}\n", override)
    assert error.where == override
    assert error.found or error.expected
    assert error.fix
