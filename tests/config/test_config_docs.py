"""The configurations that the documentation shows are ones that work."""

import re
from pathlib import Path

import pytest
import yaml

from rollmill.config.load import parse_config

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/**/config.yaml"))


def test_the_whole_configuration_in_the_readme_is_accepted() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    whole = [block for block in blocks if "model:" in block]
    assert len(whole) == 1
    config = parse_config(yaml.safe_load(whole[0]), where="README.md")
    assert config.attempts_per_batch == 64
    assert config.eval.datasets[0].name == "held_out"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_every_example_configuration_is_accepted(path: Path) -> None:
    parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), where=str(path))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2
