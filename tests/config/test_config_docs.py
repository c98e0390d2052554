"""The configurations that the documentation shows are ones that work."""

import re
from pathlib import Path

import pytest
import yaml

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
    parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), where=str(path))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def _yaml_blocks(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_piece_of_configuration_in_the_documentation_is_accepted(page: Path) -> None:
    for block in _yaml_blocks(page):
        values = yaml.safe_load(block)
        parse_config(REQUIRED | values, where=f"{page.name}: {block}")


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
