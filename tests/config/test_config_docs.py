"""The configurations that the documentation shows are ones that work."""

import re
from pathlib import Path

import pytest
import yaml

from rollmill.config import Config
from rollmill.config.fields import deepest_field
from rollmill.config.load import parse_config

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/**/config.yaml"))
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/**/README.md")])
REQUIRED = {"model": {"path": "model"}, "data": {"path": "train.jsonl"}}


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
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = parse_config(values, where=str(path))
    assert config.model_fields_set == set(values), "nothing that stands there is left out"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def _yaml_blocks(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_piece_of_configuration_in_the_documentation_is_accepted(page: Path) -> None:
    for block in _yaml_blocks(page):
        values = yaml.safe_load(block)
        config = parse_config(REQUIRED | values, where=f"{page.name}: {block}")
        assert config.model_fields_set == set(REQUIRED | values)


def test_the_documentation_shows_configuration() -> None:
    assert sum(len(_yaml_blocks(page)) for page in PAGES) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_in_the_documentation_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(file), f"{page.name} links to {target}"


def _anchors(page: Path) -> set[str]:
    """The names of a page's headings, as Markdown pages are shown with."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


FIELD = re.compile(r"((?:\w+\.)+\w+)(?:$|[:=])")
FREE = ("params", "chat_template_kwargs", "reasoning_gym_params")
"""Mappings with keys of the user's own."""


def _named_fields(page: Path) -> set[str]:
    """What stands between backticks, begins with a section's name and goes on with dots.

    In tables of another project's settings, the last cell is ours.
    """
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if page.name == "coming_from.md":
        text = "\n".join(line.rstrip("| ").rpartition("|")[2] for line in text.splitlines())
    spans = [FIELD.match(span) for span in re.findall(r"`([^`\n]+)`", text)]
    names = {span[1] for span in spans if span}
    return {name for name in names if name.partition(".")[0] in Config.model_fields}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_that_the_documentation_names_exists(page: Path) -> None:
    for name in _named_fields(page):
        steps = name.split(".")
        depth, _, _ = deepest_field(Config, steps)
        is_file = steps[-1] in ("md", "yaml", "py", "sqlite", "json", "jsonl")
        assert is_file or depth == len(steps) or steps[depth - 1] in FREE, f"{page.name}: {name}"


def test_the_documentation_names_settings() -> None:
    assert sum(len(_named_fields(page)) for page in PAGES) >= 100
