"""The reference page shows every field, and is the one in the documentation."""

from pathlib import Path

from rollmill.config.fields import walk_fields
from rollmill.config.reference import config_reference
from rollmill.config.root import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_in_the_documentation_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == config_reference(), (
        "write it again: rollmill config --markdown > docs/configuration.md"
    )


def test_every_field_is_on_the_page() -> None:
    text = config_reference()
    for path, _ in walk_fields(Config):
        assert f"| `{path.rpartition('.')[2]}` |" in text, path


def test_every_row_has_four_cells_and_a_meaning() -> None:
    rows = [line for line in config_reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    for row in rows:
        cells = row.replace("\\|", "/").strip("| ").split(" | ")
        assert len(cells) == 4, row
        assert len(cells[3]) > 5, row


def test_a_section_is_shown_once() -> None:
    headings = [line for line in config_reference().splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))
    assert "## `trainer.algorithm`" in headings
    assert "## `eval.datasets[]`" in headings
