"""What is checked, and what `auto` is replaced by, before a run begins."""

from pathlib import Path

import pytest
from support import check_job, tiny

from gptattn.errors import ConfigError

FLAGS = Path("/proc/cpuinfo")


def test_auto_precision_is_half_for_wide_models_where_the_processor_has_it(tmp_path: Path) -> None:
    flags = FLAGS.read_text().split() if FLAGS.exists() else []
    has = not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
    for width, expected in ((16, "32-true"), (384, "bf16-mixed" if has else "32-true")):
        cfg = check_job(tiny(tmp_path, "trainer.precision=auto", f"model.d_model={width}"))
        assert cfg.trainer.precision == expected


def test_the_processes_are_those_that_torchrun_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert check_job(tiny(tmp_path, "trainer.devices=auto")).trainer.processes == 2
    with pytest.raises(ConfigError, match="2 processes have been started on this machine"):
        check_job(tiny(tmp_path, "trainer.devices=1"))
