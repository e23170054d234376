"""What is checked, and what `auto` is replaced by, before a run begins."""

from pathlib import Path

import pytest
from support import check_job, tiny

from gptattn.errors import ConfigError


def test_the_processes_are_those_that_torchrun_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert check_job(tiny(tmp_path, "trainer.devices=auto")).trainer.processes == 2
    with pytest.raises(ConfigError, match="2 processes have been started on this machine"):
        check_job(tiny(tmp_path, "trainer.devices=1"))
