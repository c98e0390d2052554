"""Entries of `data.path`: files, globs, slices, where they are looked for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.data.paths import RowSlice, find_entry, parse_entry
from rollmill.errors import DataError

bounds = st.none() | st.integers(-12, 12)


@pytest.mark.parametrize(
    ("text", "pattern", "rows"),
    [
        ("a.jsonl", "a.jsonl", RowSlice()),
        ("a.jsonl@[2:5]", "a.jsonl", RowSlice(2, 5)),
        ("a.jsonl@[-3:]", "a.jsonl", RowSlice(-3, None)),
        ("a.jsonl@[:-1]", "a.jsonl", RowSlice(None, -1)),
        ("b@home/a.jsonl@[:]", "b@home/a.jsonl", RowSlice()),
        ("runs[1]/a.jsonl", "runs[1]/a.jsonl", RowSlice()),
    ],
)
def test_an_entry_is_a_pattern_and_a_slice(text, pattern, rows):
    assert parse_entry(text) == (pattern, rows)


@pytest.mark.parametrize("text", ["a.jsonl@[5]", "a.jsonl@[a:b]", "a.jsonl@[1:2:3]", "a@[]"])
def test_a_slice_that_is_none_is_refused(text):
    with pytest.raises(DataError, match="slice") as caught:
        parse_entry(text)
    assert caught.value.found == text


@given(bounds, bounds, st.integers(0, 10))
def test_slices_mean_what_python_slices_mean(start, stop, num_rows):
    rows = list(range(num_rows))
    row_slice = RowSlice(start, stop)
    first, last = row_slice.bounds(num_rows if row_slice.needs_count else None)
    assert first >= 0
    assert rows[first:last] == rows[start:stop]
    assert row_slice.is_everything == (not start and stop is None)


def test_a_file_in_the_current_directory_comes_before_the_config_folder(tmp_path, monkeypatch):
    here, config = tmp_path / "here", tmp_path / "config"
    for folder in (here, config):
        folder.mkdir()
    (config / "a.jsonl").touch()
    monkeypatch.chdir(here)
    assert find_entry("a.jsonl", config).files == (config / "a.jsonl",)
    (here / "a.jsonl").touch()
    assert find_entry("a.jsonl", config).files == (Path("a.jsonl"),)


def test_a_glob_gives_its_files_in_name_order(tmp_path):
    for name in ("part-2.jsonl", "part-1.jsonl", "other.jsonl"):
        (tmp_path / name).touch()
    found = find_entry("part-*.jsonl@[0:1]", tmp_path)
    assert [file.name for file in found.files] == ["part-1.jsonl", "part-2.jsonl"]
    assert found.rows == RowSlice(0, 1)


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(tmp_path):
    (tmp_path / "a[1].jsonl").touch()
    assert [file.name for file in find_entry("a[1].jsonl", tmp_path).files] == ["a[1].jsonl"]


def test_a_missing_file_says_where_it_was_looked_for_and_what_is_near(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError) as caught:
        find_entry("trian.jsonl", tmp_path)
    assert str(here) in caught.value.found
    assert str(tmp_path) in caught.value.found
    assert "did you mean train.jsonl?" in caught.value.fix
