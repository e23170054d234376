"""`gptattn-compare --watch`: what is open of a sweep, and a page that is written as runs end."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from reporting import Page, report
from runfolders import write_curve, write_run

from gptattn.cli.commands import compare as command
from gptattn.compare.watch import last_look, looks, sweeps_in
from gptattn.errors import ConfigError
from gptattn.machine.lock import hold_lock, is_locked
from gptattn.runs.folder import RunFolder
from gptattn.runs.sweep_states import SWEEP_LOCK, write_planned

# In the place of the page's clock: it stands until `later`, and `tick` is what would come round.
CLOCK = "var later = 0, tick; Date.now = () => later; setInterval = (round) => (tick = round);"
RUNS = {"mha_s1_aaaaaa": 2.0, "mha_s2_bbbbbb": 2.1, "gqa_s1_cccccc": 2.2, "gqa_s2_dddddd": 2.3}


class Sweep:
    """A sweep that holds its lock, and has planned RUNS."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self._held = folder, ExitStack()
        self._held.enter_context(hold_lock(folder / SWEEP_LOCK, "sweep", "busy"))
        write_planned(folder, list(RUNS))

    def start(self, run: str) -> None:
        (self.folder / run).mkdir()
        self._held.enter_context(hold_lock(self.folder / run / ".lock", "run", "busy"))

    def fail(self, run: str, error: str) -> None:
        (self.folder / run).mkdir(exist_ok=True)
        RunFolder(self.folder / run).write_failure(4, error)

    def end(self) -> None:
        self._held.close()


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    sweep = Sweep(tmp_path / "sweep")
    yield sweep
    sweep.end()


def finish(sweep: Sweep, run: str) -> None:
    variant, seed = run.split("_")[:2]
    folder = write_run(sweep.folder / run, variant, int(seed[1:]), RUNS[run])
    write_curve(folder, RUNS[run])


def steps(*events: Callable[[], object]) -> Callable[[float], object]:
    """In the place of a wait: each time, the next thing happens, and in the end nothing more."""
    following = iter(events)
    return lambda seconds: next(following, lambda: None)()


def test_each_change_is_told_once_until_the_sweep_ends(sweep: Sweep) -> None:
    first, second, third, fourth = RUNS
    wait = steps(
        lambda: sweep.start(first),
        lambda: None,
        lambda: finish(sweep, first),
        lambda: sweep.fail(third, "memory: too little"),
        lambda: [finish(sweep, run) for run in (second, fourth)],
        lambda: sweep.end(),
    )
    told = [(look.lines, look.seconds) for look in looks([sweep.folder], wait, 7.0)]
    name = sweep.folder
    assert told[0] == ([f"{name}: 0 of 4 runs are done; 4 planned (mha 2, gqa 2)"], 7.0)
    assert told[1][0] == [
        f"{name}: 0 of 4 runs are done; 1 running (mha 1); 3 planned (mha 1, gqa 2)"
    ]
    assert told[2][0] == [f"{name}: 1 of 4 runs are done; 3 planned (mha 1, gqa 2)"]
    assert told[3][0] == [
        f"{name}: 1 of 4 runs are done; 2 planned (mha 1, gqa 1); 1 failed (gqa 1)",
        f"{third} failed: memory: too little",
    ]
    assert told[-1] == ([f"{name}: 3 of 4 runs are done; 1 failed (gqa 1)", told[3][0][1]], None)
    assert len(told) == 6


def test_a_sweep_that_was_stopped_has_runs_that_never_ended(sweep: Sweep) -> None:
    finish(sweep, "mha_s1_aaaaaa")
    sweep.start("mha_s2_bbbbbb")
    sweep.end()
    (line,) = last_look([sweep.folder]).lines
    assert line.endswith(
        "1 of 4 runs are done; 3 never ended, as the sweep was stopped (mha 1, gqa 2)"
    )


def test_sweeps_are_found_in_a_folder_of_sweeps(sweep: Sweep, tmp_path: Path) -> None:
    assert sweeps_in([tmp_path]) == sweeps_in([sweep.folder, tmp_path]) == [sweep.folder]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--watch: no sweep in .*empty; give the folder of a"):
        sweeps_in([tmp_path / "empty"])


def test_a_lock_is_seen_only_while_it_is_held(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_locked(file)
    with hold_lock(file, "run", "busy"):
        assert is_locked(file)
    assert not is_locked(file)
    file.write_text("1234\n")  # of a process that was killed
    assert not is_locked(file)
    with file.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # and looking at it has left nothing behind
    assert not is_locked(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_the_page_is_written_as_runs_end_and_refreshes_only_meanwhile(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = sweep.folder / "comparison" / "comparison.html"
    pages: list[str] = []

    def then(event: Callable[[], object]) -> Callable[[], None]:
        def happens() -> None:
            pages.append(file.read_text("utf-8") if file.exists() else "")
            event()

        return happens

    wait = steps(
        then(lambda: finish(sweep, "mha_s1_aaaaaa")),
        then(lambda: [finish(sweep, run) for run in list(RUNS)[1:]]),
        then(lambda: sweep.end()),
    )
    monkeypatch.setattr(command.time, "sleep", wait)
    report(sweep.folder, "--watch", "--every", 5)
    none, one, all_done = pages
    assert none == ""
    assert "1 of 4 runs are done; 3 planned (mha 1, gqa 2)." in one
    assert 'data-refresh="5.0"' in one
    assert "4 of 4 runs are done" not in all_done
    page = Page(file)
    assert "data-refresh" not in page.markup
    assert 'http-equiv="refresh"' not in page.markup
    assert "Still running" not in page.text
    out = capsys.readouterr().out
    assert "no page yet: no run is done" in out
    assert "no difference between gqa and mha" in " ".join(out.split())


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_leaves_a_page_of_what_is_there(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(sweep, "mha_s1_aaaaaa")

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupted)
    report(sweep.folder, "--watch", code=130)
    page = Page(sweep.folder / "comparison" / "comparison.html")
    assert "1 of 4 runs are done; 3 planned (mha 1, gqa 2)" in page.text
    assert "As it was when the watch ended" in page.text
    assert "data-refresh" not in page.markup


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--watch", "--no-files"], "error: --watch: writes the page"),
        (["--watch", "--every", "0"], "error: --every: 0 seconds; give 1 to 3600"),
        (["--watch", "--every", "nan"], "error: --every: nan seconds; give 1 to 3600"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, sweep: Sweep, capsys: pytest.CaptureFixture
) -> None:
    report(sweep.folder, *arguments, code=2)
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium")
def test_an_open_page_shows_the_next_one_by_itself(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = sweep.folder / "comparison" / "comparison.html"
    finish(sweep, "mha_s1_aaaaaa")
    with Browser(tmp_path / "profile") as browser:
        browser.ask("Page.addScriptToEvaluateOnNewDocument", source=CLOCK)

        def first() -> None:
            browser.open(file.as_uri())
            assert "1 of 4 runs are done" in browser.js("document.body.textContent")
            finish(sweep, "mha_s2_bbbbbb")

        def second() -> None:
            browser.js("(tick(), 1)")  # too soon after the reader's last move
            assert "1 of 4 runs are done" in browser.js("document.body.textContent")
            browser.events.clear()
            browser.js("(later = 5000, setTimeout(tick), 1)")
            browser.wait_for_load()
            assert "2 of 4 runs are done" in browser.js("document.body.textContent")
            sweep.end()

        monkeypatch.setattr(command.time, "sleep", steps(first, second))
        report(sweep.folder, "--watch", "--every", 5)
