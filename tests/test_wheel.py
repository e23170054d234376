"""The wheel holds all that a run needs: the command trains from a fresh environment."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from support import TINY

from gptattn.settings.compose import CONF

ROOT = CONF.parent


def call(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command without PYTHON* variables; return its output. It must end well."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**inherited, **environment},
    )
    assert (done.returncode, "Exception ignored" in done.stderr) == (0, False), done.stderr
    assert "GPU available" not in done.stderr  # Lightning's words
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (file,) = folder.glob("*.whl")
    return file


@pytest.mark.slow
def test_the_wheel_holds_only_the_package_its_configs_and_shipped_entries(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [*ROOT.glob("gptattn/**/*.*"), *ROOT.glob("hydra_plugins/*.py")]
    kinds = (".py", ".j2", ".js", ".txt")
    sources = {f.relative_to(ROOT).as_posix() for f in files if f.suffix in kinds}
    beside = [*CONF.rglob("*.yaml"), *ROOT.glob("benchmarks/*/*.json")]
    assert names == sources | {f"gptattn/{f.relative_to(ROOT).as_posix()}" for f in beside}


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_environment_and_folder(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    scripts = tmp_path / "env" / "bin"
    python = scripts / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    call(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)

    # Take the dependencies from this environment. Python does not read .pth files in a folder that
    # a .pth file adds, so an editable gptattn in this environment stays out.
    (site,) = (tmp_path / "env").rglob("site-packages")
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(folders))

    folder = tmp_path / "empty"
    folder.mkdir()
    cache = str(tmp_path / "cache")
    call(scripts / "gptattn-train", "attn=mqa", *TINY, cwd=folder, XDG_CACHE_HOME=cache)
    assert [path.name for path in folder.iterdir()] == ["outputs"]
    (file,) = folder.rglob("summary.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert (record["status"], record["variant"]) == ("done", "mqa")
    # An installed package must not record the commit of a repository around it.
    assert record["environment"]["git_commit"] is None
    assert "| mqa " in call(scripts / "gptattn-compare", "outputs", "markdown=true", cwd=folder)

    # Each command says how it is called itself.
    names = "check compare evaluate generate convert attention-map prepare new"
    for name in names.split():
        assert f"gptattn-{name} " in call(scripts / f"gptattn-{name}", "--help", cwd=folder)
