"""The report's page in headless Chromium."""

from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from reporting import LOSSES, report
from runfolders import write_sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not installed; apt-get install chromium"
    ),
]


@pytest.mark.parametrize("width", [360, 1300])
def test_the_page_fits_a_phone_and_a_desktop_and_shows_every_figure(
    width: int, tmp_path: Path
) -> None:
    sweep = write_sweep(tmp_path / "runs", LOSSES)
    report(sweep)
    with Browser(tmp_path / "profile", f"--window-size={width},900") as browser:
        browser.open((sweep / "comparison" / "comparison.html").as_uri())
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
        sizes = browser.js("[...document.querySelectorAll('figure svg')].map((s) => s.clientWidth)")
    assert len(sizes) == 7
    assert all(size > 200 for size in sizes)
