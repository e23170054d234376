"""The report's page in headless Chromium: real mouse and keyboard events, answers from the DOM."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from reporting import report
from runfolders import FLOPS, TOKENS, write_curve, write_run

from gptattn.compare.statistics import t_interval

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed; apt-get install chromium"
)

LOSSES = {"mha": [2.00, 2.01, 2.03], "gqa": [2.21, 2.23, 2.25], "mqa": [2.51, 2.53, 2.58]}
PARAMS = {"mha": 130_000, "gqa": 120_000, "mqa": 110_000}
CURVES, COSTS = "#chart-loss_tokens", "#chart-pareto_params"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sweep = tmp_path_factory.mktemp("sweep")
    for variant, losses in LOSSES.items():
        for seed, loss in enumerate(losses, start=1):
            costs = {"cost/params": PARAMS[variant], "cost/kv_bytes_per_token": 1024.0}
            run = write_run(sweep / f"{variant}{seed}", variant, seed, loss, metrics=costs)
            write_curve(run, loss)
    report(sweep)
    return sweep / "comparison" / "comparison.html"


class Reader:
    """Points and types at one figure of the page, and reads what it says."""

    def __init__(self, browser: Browser, figure: str) -> None:
        self.browser, self.figure = browser, figure
        self.js(f"$('{figure}').scrollIntoView({{block: 'center'}})")

    def js(self, expression: str) -> Any:
        return self.browser.js(expression.replace("$(", "document.querySelector("))

    @property
    def readout(self) -> str:
        return self.js(f"$('{self.figure} .readout').textContent")

    @property
    def values(self) -> dict[str, str]:
        """What stands beside each variant that is drawn."""
        rows = f"[...document.querySelectorAll('{self.figure} .names li:not(.off)')]"
        cells = "[row.querySelector('label').textContent, row.querySelector('.value').textContent]"
        return dict(self.js(f"{rows}.map((row) => {cells})"))

    @property
    def view(self) -> dict[str, list[float]]:
        return json.loads(self.js(f"$('{self.figure} .chart').dataset.view"))

    def box(self, selector: str) -> tuple[float, float, float, float]:
        rect = f"$('{self.figure} {selector}').getBoundingClientRect()"
        return tuple(self.js(f"((r) => [r.x, r.y, r.width, r.height])({rect})"))

    def place(self, x: float, y: float, log: bool = False) -> tuple[float, float]:
        """Where the window shows these values."""
        left, top, width, height = self.box(".u-over")
        view, at = self.view, x
        ends = np.log(view["x"]) if log else view["x"]
        across = ((np.log(at) if log else at) - ends[0]) / (ends[1] - ends[0])
        down = (view["y"][1] - y) / (view["y"][1] - view["y"][0])
        return float(left + across * width), float(top + down * height)

    def point(self, x: float, y: float, log: bool = False) -> None:
        self.browser.mouse("moved", *self.place(x, y, log))

    def click(self, selector: str) -> None:
        left, top, width, height = self.box(selector)
        self.browser.click(left + width / 2, top + height / 2)

    def choose(self, choice: str) -> None:
        labels = f"[...document.querySelectorAll('{self.figure} .choices label')]"
        number = self.js(f"{labels}.findIndex((label) => label.textContent === '{choice}')")
        self.click(f".choices label:nth-child({number + 1})")

    def pixels(self, color: str) -> int:
        """How many pixels of the chart have just this colour."""
        red, green, blue = bytes.fromhex(color[1:])
        return self.js(
            f"((c) => {{ const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            f"let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i] === {red} &&"
            f"d[i + 1] === {green} && d[i + 2] === {blue}; return n; }})($('{self.figure} canvas'))"
        )


@pytest.fixture
def curves(browser: Browser, file: Path) -> Reader:
    window = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.ask("Emulation.setDeviceMetricsOverride", **window)
    browser.open("about:blank")  # forgets what the last test chose
    browser.open(file.as_uri())
    return Reader(browser, CURVES)


@pytest.fixture
def costs(curves: Reader) -> Reader:
    return Reader(curves.browser, COSTS)


def validation(variant: str, step: int) -> tuple[float, float, float]:
    """Mean and interval of the losses that `write_curve` gives a variant at a step."""
    losses = [loss + (100 - step) / 100 for loss in LOSSES[variant]]
    interval = t_interval(losses)
    assert interval is not None
    return float(np.mean(losses)), *interval


def told(variant: str, step: int, where: str) -> str:
    mean, low, high = validation(variant, step)
    interval = f"95% interval {low:.4f} to {high:.4f}"
    return f"{variant}: {mean:.4f} ({interval}, n = 3) at {where}"


def test_hovering_a_curve_shows_the_numbers_of_its_runs(curves: Reader) -> None:
    curves.point(60 * TOKENS * 1.02, validation("gqa", 60)[0])
    assert curves.readout == told("gqa", 60, "122,880 training tokens")
    for variant, shown in curves.values.items():
        mean, low, high = validation(variant, 60)
        assert shown == f"{mean:.4f} ± {(high - low) / 2:.4f}"
    # Beside the chart, the values are those at the end of the training.
    curves.browser.mouse("moved", 5, 5)
    assert curves.values["mqa"].startswith(f"{np.mean(LOSSES['mqa']):.4f} ±")


def test_hovering_a_point_shows_its_loss_and_cost(costs: Reader) -> None:
    costs.point(PARAMS["mqa"] * 1.005, float(np.mean(LOSSES["mqa"])))
    assert costs.readout == told("mqa", 100, "110,000 parameters")
    costs.choose("cache bytes")
    # Now all are at one place, and the height decides.
    costs.point(1024.0, float(np.mean(LOSSES["gqa"])) + 0.01)
    assert costs.readout == told("gqa", 100, "1,024 cache bytes per token")


def test_a_variant_is_switched_off_and_on(curves: Reader) -> None:
    orange = "#e69f00"
    assert curves.pixels(orange) > 100
    curves.click(".names li:nth-child(2) label")
    assert list(curves.values) == ["mha", "mqa"]
    assert curves.pixels(orange) == 0
    curves.point(60 * TOKENS, validation("gqa", 60)[0])
    assert not curves.readout.startswith("gqa")
    curves.click(".names li:nth-child(2) label")
    assert curves.pixels(orange) > 100


@pytest.mark.parametrize(
    ("choice", "per_step", "where"),
    [
        ("FLOPs", TOKENS * FLOPS, "90.691G training FLOPs"),
        ("seconds", 0.5, "30 seconds of training"),
    ],
)
def test_the_x_axis_is_chosen(choice: str, per_step: float, where: str, curves: Reader) -> None:
    curves.choose(choice)
    assert curves.view["x"] == pytest.approx([20 * per_step, 100 * per_step])
    curves.point(60 * per_step, validation("mha", 60)[0])
    assert curves.readout == told("mha", 60, where)
    assert "Loss against training" not in curves.js(f"$('{CURVES} figcaption').textContent") or (
        choice == "FLOPs"
    )


def test_a_log_scale_moves_the_points_and_keeps_their_numbers(curves: Reader) -> None:
    linear = curves.place(40 * TOKENS, 2.5)
    curves.click("[name=log-x]")
    assert curves.place(40 * TOKENS, 2.5, log=True)[0] > linear[0] + 50
    curves.point(40 * TOKENS, validation("mha", 40)[0], log=True)
    assert curves.readout == told("mha", 40, "81,920 training tokens")
    curves.click("[name=log-y]")
    curves.click("[name=log-x]")
    assert curves.js(f"$('{CURVES} [name=log-y]').checked")
    curves.browser.key("Tab")  # no error on the way: the last test looks for those
    assert curves.view["y"][0] > 0


def test_dragging_zooms_and_a_double_click_resets(curves: Reader) -> None:
    whole = curves.view
    assert curves.js(f"$('{CURVES} [name=reset]').disabled")
    start, end = (100_000.0, 2.6), (150_000.0, 2.2)
    curves.browser.drag(curves.place(*start), curves.place(*end))
    assert curves.view["x"] == pytest.approx([100_000, 150_000], rel=0.01)
    assert curves.view["y"] == pytest.approx([2.2, 2.6], rel=0.01)
    curves.point(60 * TOKENS, validation("mha", 60)[0])
    assert curves.readout == told("mha", 60, "122,880 training tokens")
    left, top, width, height = curves.box(".u-over")
    curves.browser.click(left + width / 2, top + height / 2, times=2)
    assert curves.view == whole
    curves.click("[name=in]")
    assert np.diff(curves.view["x"]) == pytest.approx(np.diff(whole["x"]) / 2)
    curves.click("[name=reset]")
    assert curves.view == whole


def test_the_keyboard_reaches_every_number(curves: Reader) -> None:
    for _ in range(40):
        curves.browser.key("Tab")
        if curves.js(f"document.activeElement === $('{CURVES} .canvas')"):
            break
    press = curves.browser.key
    press("ArrowRight")
    assert curves.readout == told("mha", 20, "40,960 training tokens")
    press("ArrowRight")
    press("ArrowDown")
    assert curves.readout == told("gqa", 40, "81,920 training tokens")
    press("End")
    assert curves.readout == told("gqa", 100, "204,800 training tokens")
    whole = curves.view
    press("+")
    assert np.diff(curves.view["x"]) < np.diff(whole["x"])
    press("Home")  # lies outside: the view follows
    low, high = curves.view["x"]
    assert low <= 40_960 <= high
    press("0")
    assert curves.view == whole
    # The next stop is the first variant's checkbox.
    press("Tab")
    press(" ")
    assert list(curves.values) == ["gqa", "mqa"]


def test_a_reload_keeps_what_the_reader_chose(curves: Reader) -> None:
    curves.choose("seconds")
    curves.click(".names li:nth-child(3) label")
    curves.click("[name=in]")
    view = curves.view
    curves.browser.events.clear()
    curves.browser.ask("Page.reload")
    curves.browser.wait_for_load()
    assert curves.view == view
    assert list(curves.values) == ["mha", "gqa"]


def shown(browser: Browser, selector: str) -> int:
    """How many elements take up room."""
    found = f"[...document.querySelectorAll('{selector}')]"
    return browser.js(f"{found}.filter((one) => one.getBoundingClientRect().height > 0).length")


def test_in_print_and_without_scripts_the_pictures_stand_there(curves: Reader, file: Path) -> None:
    browser = curves.browser
    assert (shown(browser, ".chart"), shown(browser, "figure > svg")) == (2, 0)
    browser.ask("Emulation.setEmulatedMedia", media="print")
    assert (shown(browser, ".chart"), shown(browser, "figure > svg")) == (0, 7)
    browser.ask("Emulation.setEmulatedMedia", media="")
    browser.ask("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(file.as_uri())
    browser.ask("Emulation.setScriptExecutionDisabled", value=False)
    picture = browser.ask("Page.captureSnapshot")["data"]
    assert picture.count("<svg") == 7
    assert 'class=3D"figure live"' not in picture


def test_on_a_phone_nothing_is_wider_than_the_window(curves: Reader) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    curves.browser.ask("Emulation.setDeviceMetricsOverride", **phone)
    assert curves.js("document.documentElement.scrollWidth") == 390
    assert curves.box(".u-wrap")[2] == pytest.approx(390 - 32, abs=1)


def test_the_page_asks_for_no_other_file_and_reports_no_error(curves: Reader, file: Path) -> None:
    kinds = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
    curves.choose("FLOPs")
    curves.click("[name=log-y]")
    curves.js("1")
    seen = [event for event in curves.browser.events if event.get("method") in kinds]
    assert not seen
    asked = [
        event["params"]["request"]["url"]
        for event in curves.browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert set(asked) == {file.as_uri()}
