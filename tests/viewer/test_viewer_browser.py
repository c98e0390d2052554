"""The page in a real browser: every page is opened and its numbers compared with the files."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from support.hostile_run import ROWS, SCRIPTS
from support.made_run import Shape, make_run
from support.tiny_run import rollmill, write_tiny_run

pytestmark = pytest.mark.timeout(240)
WAIT_S = 30
DROP_SOME = '''"""Every third group is turned down."""


def drop_some(group):
    return group.group_index % 3 != 2, "an odd group"
'''


class Page:
    """What a person can see and do."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, where: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#/{where}")

    def wait(self, script: str, *arguments: Any) -> Any:
        """Wait until the script's value is true; returns it."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(
            lambda driver: driver.execute_script(f"return {script}", *arguments), script
        )

    def text(self, selector: str) -> str:
        """The text of the first such element, once it is there."""
        self.wait("document.querySelector(arguments[0])?.innerText", selector)
        return self.run("document.querySelector(arguments[0]).innerText", selector).strip()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def click(self, selector: str) -> None:
        from selenium.webdriver.common.by import By

        self.wait("document.querySelector(arguments[0])", selector)
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def press(self, key: str) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.TAG_NAME, "body").send_keys(key)

    def complaints(self) -> list[str]:
        """Errors of scripts and breaches of the content policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def hosts(self) -> set[str]:
        """Every host that the page asked for anything since the last look."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if url.startswith(("http:", "https:", "ws:", "wss:")):
                    found.add(url.split("/")[2])
        return found


@pytest.fixture
def look(driver: Any, serve: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`look(run, …)` serves the runs and gives the page; nothing may complain until the end."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        pages = []

        def open_page(*folders: Path) -> Page:
            page = Page(driver, stack.enter_context(serve(*folders)))
            driver.get(f"{page.address}static/icon.svg")
            driver.execute_script("localStorage.clear()")
            page.open("overview")
            page.complaints()
            page.hosts()
            pages.append(page)
            return page

        yield open_page
        for page in pages:
            assert page.complaints() == []
            assert page.hosts() <= {page.address.split("/")[2]}


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def shown(value: float) -> str:
    """A figure as the page writes it (four significant digits)."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{round(value):,}" if abs(value) >= 1000 else f"{float(f'{value:.4g}'):g}"


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run / "samples" / f"step_{step:06d}.parquet").to_pylist()


def test_the_overview_shows_the_newest_figures(look: Callable[..., Page], made_run: Path) -> None:
    page = look(made_run)
    last = [r for r in records(made_run) if r["kind"] == "train"][-1]
    evaluation = [r for r in records(made_run) if r["kind"] == "eval"][-1]
    tile = "[data-tile={}] .tile-value"
    assert page.text(tile.format("step")) == "12 of 12"
    assert page.text(tile.format("reward")) == shown(last["reward/mean"])
    assert page.text(tile.format("eval")) == shown(evaluation["eval/held_out/reward"])
    length = shown(last["rollout/response_length_mean"])
    assert page.text(tile.format("length")) == f"{length} tokens"
    page.wait("document.querySelectorAll('.chart-card canvas').length >= 18")
    entropy = shown(last["train/policy/entropy"])
    assert page.text("[data-panel=entropy]") == entropy


def test_hovering_a_chart_tells_the_value_at_the_step(
    look: Callable[..., Page], made_run: Path
) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    page = look(made_run)
    page.wait("document.querySelector('[aria-label=Reward].chart-card .u-over')")
    over = page.driver.find_element(By.CSS_SELECTOR, "[aria-label=Reward].chart-card .u-over")
    ActionChains(page.driver).move_to_element_with_offset(
        over, over.size["width"] // 2 - 2, 0
    ).perform()
    tip = page.text("[aria-label=Reward].chart-card .chart-tip")
    last = [r for r in records(made_run) if r["kind"] == "train"][-1]
    assert tip.split() == ["step", "12", "reward", shown(last["reward/mean"])]


def test_any_figure_can_be_drawn_and_is_remembered(
    look: Callable[..., Page], made_run: Path
) -> None:
    page = look(made_run)
    name = "train/tokens/padding_share"
    page.click(f"[data-name='{name}']")
    page.wait("document.querySelector(arguments[0])", f"[aria-label='{name}'] canvas")
    page.open("overview")
    page.wait("document.querySelector(arguments[0])", f"[aria-label='{name}'] canvas")


def test_runs_are_drawn_over_one_another(
    look: Callable[..., Page], made_run: Path, other_run: Path
) -> None:
    page = look(made_run, other_run)
    page.wait("document.querySelectorAll('.compare tbody tr').length === 2")
    table = page.text(".compare tbody")
    for run in (made_run, other_run):
        last = [r for r in records(run) if r["kind"] == "train"][-1]
        (row,) = [line for line in table.splitlines() if line.startswith(run.name)]
        assert shown(last["reward/mean"]) in row.split()
    page.wait("document.querySelector('[aria-label=Reward].chart-card')")
    keys = page.text("[aria-label=Reward].chart-card .chart-keys")
    assert keys.split() == ["made", "other"]
    page.press("r")
    page.wait("document.querySelector('.run.is-selected').innerText.includes('other')")
    assert page.text("[data-tile=step] .tile-value") == "6 of 6"


def test_a_sample_is_shown_as_the_file_has_it(look: Callable[..., Page], made_run: Path) -> None:
    page = look(made_run)
    page.open("samples?run=0&step=7&row=5")
    row = rows_of(made_run, 7)[5]
    assert page.text(".sample h2") == f"Sample {row['index']}"
    page.click("[aria-label=Response] details summary")
    assert page.run("document.querySelector('[data-part=response]').textContent") == row["response"]
    assert page.text("[data-part=label]") == json.loads(row["label_json"])
    assert page.text("[data-fact=reward]") == shown(row["score"])
    assert page.text("[data-fact=filter]") == "kept, trained at step 7"
    texts = page.run("[...document.querySelectorAll('.segment [data-at]')].map(s => s.textContent)")
    assert len(texts) == len(row["response_tokens"])
    # The environment's words are in the tokens, and the special token is there to be seen.
    joined = "".join(texts).replace("⏎\n", "\n").removesuffix("<|im_end|>")
    assert joined == row["response"]


def test_tokens_change_colour_with_the_figure(look: Callable[..., Page], made_run: Path) -> None:
    rows = rows_of(made_run, 7)
    number = next(n for n, r in enumerate(rows) if len(r["segments"]) == 3)
    page = look(made_run)
    page.open(f"samples?run=0&step=7&row={number}")
    inside = sum(s["length"] for s in rows[number]["segments"] if s["trainable"])
    count = "document.querySelectorAll(arguments[0]).length"
    page.click("[data-mode=mask]")
    assert page.run(count, ".segment .m-in") == inside
    assert page.run(count, ".segment .m-out") == len(rows[number]["response_tokens"]) - inside
    page.click("[data-mode=version]")
    version = rows[number]["segments"][0]["weight_version"]
    assert page.run(count, f".segment .v{version % 8}") > 0
    page.click("[data-mode=gap]")
    # The trainer scored exactly the tokens in the loss.
    assert page.run(count, ".segment .no-figure") == len(rows[number]["response_tokens"]) - inside
    assert page.run("document.querySelector('[data-mode=teacher]').disabled") is True


def test_the_group_is_shown_side_by_side(look: Callable[..., Page], made_run: Path) -> None:
    page = look(made_run)
    page.open("samples?run=0&step=3&row=0")
    page.click("[data-action=group]")
    page.wait("document.querySelectorAll('.group-card').length === 4")
    group = [
        r
        for r in rows_of(made_run, 3)
        if r["group_index"] == rows_of(made_run, 3)[0]["group_index"]
    ]
    rewards = page.run(
        "[...document.querySelectorAll('.group-card .reward')].map(e => e.innerText)"
    )
    assert rewards == [shown(row["score"]) for row in group]
    page.press("g")
    page.wait("document.querySelector('[data-action=group]')")


def test_samples_are_found_by_reward_status_and_text(
    look: Callable[..., Page], made_run: Path
) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    page = look(made_run)
    page.open("samples?run=0&step=2")
    rows = rows_of(made_run, 2)
    page.wait("document.querySelectorAll('.row').length === arguments[0]", len(rows))
    cut = [row for row in rows if row["status"] == "truncated"]
    Select(page.driver.find_element(By.CSS_SELECTOR, "[aria-label=Status]")).select_by_value(
        "truncated"
    )
    assert page.run("document.querySelectorAll('.row').length") == len(cut)
    Select(page.driver.find_element(By.CSS_SELECTOR, "[aria-label=Status]")).select_by_value("")
    page.driver.find_element(By.CSS_SELECTOR, ".sample-list input[type=search]").send_keys(
        "shelves"
    )
    found = [row for row in rows if "shelves" in row["prompt_json"]]
    assert page.run("document.querySelectorAll('.row').length") == len(found)
    page.click(".sample-list input[type=checkbox]")
    everywhere = sum(
        "shelves" in r["prompt_json"] for step in range(1, 13) for r in rows_of(made_run, step)
    )
    page.wait("document.querySelectorAll('.row').length === arguments[0]", min(everywhere, 1000))


def test_the_keyboard_walks_through_samples_steps_and_pages(
    look: Callable[..., Page], made_run: Path
) -> None:
    page = look(made_run)
    page.open("samples?run=0&step=5&row=0")
    first = rows_of(made_run, 5)[0]["index"]
    assert page.text(".sample h2") == f"Sample {first}"
    page.press("j")
    page.wait(f"document.querySelector('.sample h2').innerText === 'Sample {first + 1}'")
    page.press("k")
    page.wait(f"document.querySelector('.sample h2').innerText === 'Sample {first}'")
    page.press("]")
    page.wait("location.hash.includes('step=6')")
    page.press("?")
    assert "next or previous sample" in page.text("dialog[open]")
    page.press("\ue00c")
    for key, name in zip("4321", ("ledger", "timeline", "samples", "overview"), strict=True):
        page.press(key)
        page.wait("document.title === arguments[0]", f"{name} · rollmill")


def test_the_timeline_shows_the_trace(look: Callable[..., Page], made_run: Path) -> None:
    page = look(made_run)
    page.open("timeline?run=0&step=4")
    record = next(r for r in records(made_run) if r["step"] == 4 and r["kind"] == "train")
    part = round(100 * record["time/rollout_s"] / record["time/step_s"])
    assert page.text("[data-tile=Rollout] .tile-value") == f"{part} %"
    assert "From the run's trace" in page.text("main")
    lanes = page.run(
        "[...document.querySelectorAll('main table tbody tr')].map(r => r.cells[0].innerText)"
    )
    assert lanes == ["loop", "engine 0", "engine 1", "trainer", "rewards", "groups"]
    spans = page.run(
        "[...document.querySelectorAll('main table tbody tr')].map(r => r.cells[3].innerText)"
    )
    assert spans == ["3", "18", "18", "1", "36", "9"]
    page.press("]")
    page.wait("location.hash.includes('step=5')")


def test_the_ledger_balances_as_the_file_does(look: Callable[..., Page], made_run: Path) -> None:
    page = look(made_run)
    page.open("ledger?run=0&group=8")
    with closing(sqlite3.connect(made_run / "ledger.sqlite")) as db:
        states = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY 1").fetchall())
        (events,) = db.execute("SELECT COUNT(*) FROM events WHERE group_index = 8").fetchone()
    assert page.text("[data-fact=issued]") == f"{sum(states.values())} groups issued"
    cell = "document.querySelector(arguments[0]).cells[1].innerText"
    for state, count in states.items():
        assert page.run(cell, f"[data-state={state}]") == str(count)
    generated = sum(r.get("rollout/generated_tokens", 0) for r in records(made_run))
    assert page.run(cell, "[data-tokens=generated]") == f"{round(generated):,}"
    page.wait("document.querySelectorAll('.swatch').length > 20")
    history = "[...document.querySelectorAll('table')].find(t => t.innerText.startsWith('when'))"
    page.wait(f"{history}?.tBodies[0].rows.length === arguments[0]", events)


def test_the_ledger_leads_to_answers_that_were_rejected(
    look: Callable[..., Page], made_run: Path
) -> None:
    page = look(made_run)
    page.open("ledger?run=0&group=26")
    page.wait("document.querySelector('[data-fact=\"length bias\"]')")
    assert "3.0 % shorter" in page.text("[data-fact='length bias']")
    page.run("document.querySelector('a[href*=dropped]').click()")
    page.wait("location.hash.includes('kind=dropped')")
    page.wait("document.querySelector('[data-decision=rejected]')")
    assert page.text("[data-fact=filter]") == "rejected: no spread"
    assert page.run("document.querySelectorAll('.row').length") == 4
    page.open("samples?run=0&kind=dropped&step=3&group=5")
    page.wait("document.body.innerText.includes('group 5 were not kept')")


def test_a_run_that_was_really_trained_is_shown(look: Callable[..., Page], tmp_path: Path) -> None:
    """Engine, rewards, trainer and ledger wrote this one; only the model is tiny."""
    config = write_tiny_run(
        tmp_path,
        run__num_steps=2,
        rollout__batch_size=4,
        rollout__filters={"dynamic": "drop.py:drop_some"},
        reward={"type": "random"},
        eval__datasets=[],
        telemetry__console=False,
    )
    (tmp_path / "drop.py").write_text(DROP_SOME)
    done = rollmill("train", config)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "model")
    run = (tmp_path / "run").rename(tmp_path / "moved")
    page = look(run)
    last = [r for r in records(run) if r["kind"] == "train"][-1]
    assert page.text("[data-tile=step] .tile-value") == "2 of 2"
    rate = shown(last["rollout/tokens_per_second"])
    assert page.text("[data-tile=rate] .tile-value") == f"{rate} tokens/s"
    page.open("samples?run=0&step=2&row=3")
    row = rows_of(run, 2)[3]
    assert page.text(".sample h2") == f"Sample {row['index']}"
    texts = page.run(
        "[...document.querySelectorAll('.segment [data-at]:not(.special)')].map(s => s.textContent)"
    )
    assert "".join(texts).replace("⏎\n", "\n") == row["response"]
    assert not page.run("document.querySelector('[data-mode=gap]').disabled")
    page.open("samples?run=0&kind=dropped&step=1")
    page.wait("document.querySelector('[data-decision=rejected]')")
    assert page.text("[data-fact=filter]") == "rejected: an odd group"
    page.open("timeline?run=0&step=2")
    assert page.text("[data-tile=Step] .tile-value")
    assert "groups" in page.text("main table")
    page.open("ledger?run=0")
    page.wait("document.querySelector('[data-state=consumed]')?.cells[1].innerText === '8'")


def test_a_live_run_is_followed(look: Callable[..., Page], tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", Shape(num_steps=2, num_groups=2))
    page = look(run)
    assert page.text("[data-tile=step] .tile-value") == "2 of 2"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 3, "kind": "train", "time": 1.8e9, "reward/mean": 0.125}) + "\n"
        )
    page.wait("document.querySelector('[data-tile=reward] .tile-value').innerText === '0.125'")
    assert page.text("[data-tile=step] .tile-value") == "3 of 2"
    page.wait("document.querySelector('[data-panel=reward]').innerText === '0.125'")


def test_smoothing_redraws_the_charts_in_place(look: Callable[..., Page], made_run: Path) -> None:
    page = look(made_run)
    count = "document.querySelectorAll('main .chart-card canvas').length"
    drawn = page.wait(f"{count} >= 18 && {count}")
    pixels = "document.querySelector('[aria-label=Reward].chart-card canvas').toDataURL()"
    before = page.run(pixels)
    page.click(".overview-bar .choice button:last-child")
    page.wait(f"{pixels} !== arguments[0]", before)
    assert page.run(count) == drawn


def test_hostile_output_is_text_and_never_runs(
    look: Callable[..., Page], hostile_run: Path
) -> None:
    page = look(hostile_run)
    for row, text in enumerate(ROWS):
        page.open(f"samples?run=0&step=1&row={row}")
        page.wait("document.querySelector('.sample h2')?.innerText.startsWith('Sample')")
        page.wait("document.querySelectorAll('.segment [data-at]').length >= 7")
        whole = page.run("document.querySelector('[data-part=response]').textContent")
        if text in SCRIPTS:
            assert whole == text
        if "\x1b" in text:
            assert "bell␇ null␀ escape␛[31m right-to-left⟨U+202E⟩evil" in whole
        if len(text) > 1_000_000:
            assert whole.endswith("(2,800,000 more characters)")
        page.press("g")
        page.wait("document.querySelector('.group-card')")
    for where in ("overview", "timeline?run=0&step=1", "ledger?run=0&group=3"):
        page.open(where)
        page.wait("document.querySelector('main table, main canvas')")
    assert SCRIPTS[0] in page.text("main")
    assert page.run("window.pwned === undefined")
    assert "pwned" not in page.driver.title
    assert page.run("document.querySelectorAll('main script, main img, main svg').length") == 0


def test_the_content_policy_stops_inline_script_and_foreign_requests(
    driver: Any, serve: Callable[..., Any], made_run: Path
) -> None:
    """What would happen if a text ever did become markup."""
    with serve(made_run) as address:
        driver.get(address)
        done = driver.execute_async_script(
            """
            const done = arguments[0], out = [];
            const attempt = (name, work) => { try { work(); out.push(name); } catch { } };
            attempt("markup", () => { document.body.innerHTML += "<b>x</b>"; });
            attempt("handler", () => { document.body.setAttribute("onclick", "window.pwned=1"); });
            attempt("script", () => {
              const script = document.createElement("script");
              script.textContent = "window.pwned = 1";
              document.body.append(script);
            });
            const style = document.createElement("style");
            style.textContent = "body { outline: 7px solid red }";
            document.head.append(style);
            if (getComputedStyle(document.body).outlineWidth === "7px") out.push("style");
            const frame = document.createElement("iframe");
            frame.src = "javascript:parent.pwned=1";
            attempt("frame", () => { document.body.append(frame); throw 0; });
            fetch("http://127.0.0.1:9/").catch(() => {}).then(() => setTimeout(done, 200, out));
            """
        )
        assert done in ([], ["script"])  # a script that is refused when it would run
        assert driver.execute_script("return window.pwned === undefined")
        messages = " ".join(entry["message"] for entry in driver.get_log("browser"))
        assert "Content Security Policy" in messages


@contextmanager
def narrow(driver: Any) -> Iterator[None]:
    """A telephone's screen, 400 pixels wide (a window cannot be made as narrow)."""
    screen = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_is_wider_than_a_narrow_screen(
    look: Callable[..., Page], made_run: Path, hostile_run: Path, theme: str
) -> None:
    page = look(made_run, hostile_run)
    with narrow(page.driver):
        page.run(f"localStorage.setItem('rollmill.theme', '{theme}')")
        for where in ("overview", "samples?step=3", "samples?step=3&row=2", "timeline", "ledger"):
            page.open(where)
            page.wait("document.querySelector('main .card')")
            page.wait(
                "document.documentElement.scrollWidth <= 400 && "
                "document.documentElement.dataset.theme === arguments[0]",
                theme,
            )


def test_a_run_that_has_only_begun_has_no_ledger_and_that_is_no_fault(
    look: Callable[..., Page], made_run: Path, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(made_run / "config.yaml", begun)
    page = look(begun)
    page.open("ledger")
    assert page.text("main .card .note:not(.is-error)") == "the run has no ledger (yet)"
    assert page.run("document.querySelector('.is-error')") is None
    page.complaints()  # the browser notes the 404


def test_a_viewer_that_stopped_is_said_so(
    driver: Any, serve: Callable[..., Any], made_run: Path
) -> None:
    with serve(made_run) as address:
        page = Page(driver, address)
        page.open("overview")
        page.wait("document.querySelector('[data-tile=step]')")
    page.wait("document.querySelector('#pulse').classList.contains('is-lost')")
    driver.get("about:blank")
