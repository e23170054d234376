"""The report's page in headless Chromium."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from reporting import LOSSES, report
from runfolders import write_sweep

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
# What the page is asked for stands in its title afterwards.
ASK = """<script>
document.title = JSON.stringify([
  document.documentElement.scrollWidth <= innerWidth,
  [...document.querySelectorAll("figure svg")].map((svg) => svg.clientWidth),
])
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium")
@pytest.mark.parametrize("width", [360, 1300])
def test_the_page_fits_a_phone_and_a_desktop_and_shows_every_figure(
    width: int, tmp_path: Path
) -> None:
    sweep = write_sweep(tmp_path / "runs", LOSSES)
    report(sweep)
    page = (sweep / "comparison" / "comparison.html").read_text(encoding="utf-8")
    page = re.sub(r"<meta[^>]*Content-Security-Policy[^>]*>", "", page)  # it would stop the script
    (tmp_path / "page.html").write_text(page + ASK, encoding="utf-8")
    own = (f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900")
    address = (tmp_path / "page.html").as_uri()
    command = [str(CHROMIUM), *OPTIONS, *own, "--dump-dom", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", shown)
    assert title is not None
    fits, sizes = json.loads(html.unescape(title[1]))
    assert fits
    assert len(sizes) == 7
    assert all(size > 200 for size in sizes)
