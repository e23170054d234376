"""Every file in conf/ composes and builds."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from docs_commands import OF_SHAKESPEARE
from support import TEXT, bpe

from gptattn.errors import ConfigError
from gptattn.machine.device import resolve_device
from gptattn.settings.build import build_data, build_model
from gptattn.settings.compose import CONF, settings
from gptattn.training.module import LanguageModel

FILES = {
    group.name: sorted(
        file.relative_to(group).with_suffix("").as_posix() for file in group.rglob("*.yaml")
    )
    for group in CONF.iterdir()
    if group.is_dir() and group.name != "hydra"
}
CHOICES = [(group, name) for group, names in FILES.items() for name in names]


def needs(group: str, name: str, folder: Path) -> list[str]:
    """The overrides that this option needs in order to work."""
    if (group, name) == ("data", "shakespeare"):
        path = os.environ.get("GPTATTN_SHAKESPEARE")
        if path is None:
            pytest.skip("GPTATTN_SHAKESPEARE does not name the file")
        return [f"data.path={path}"]
    if f"{group}={name}" in (*OF_SHAKESPEARE, "data=text"):
        (folder / "book.txt").write_text(TEXT)
        return ["data=text", f"data.path={folder / 'book.txt'}"]
    if (group, name) == ("data", "hf"):
        rows = [json.dumps({"text": f"{i} {TEXT[:100]}"}) for i in range(99)]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        return [f"data.path={folder / 'rows.jsonl'}", "validation.fraction=0.2"]
    if (group, name) == ("data", "bin"):
        (np.arange(2000, dtype="<u2") % 100).tofile(folder / "ids.bin")
        return [f"data.path={folder / 'ids.bin'}"]
    if (group, name) == ("data", "mixture"):
        return ["data.sources={a:{data:pydocs,weight:1},b:{data:stdlib,weight:1}}"]
    if (group, name) == ("launcher", "ray"):
        pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    if (group, name) == ("tokenizer", "none"):
        return ["data=copy"]
    if (group, name) == ("tokenizer", "gpt2"):
        return [f"tokenizer.path={bpe(folder / 'bpe')}"]
    return []


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_file_in_conf_composes_and_builds(group, name, cache, tmp_path):
    overrides = [f"{group}={name}", f"cache_dir={cache}", *needs(group, name, tmp_path)]
    cfg = settings(overrides)
    data = build_data(cfg)
    with torch.device("meta"):
        model = build_model(cfg, data.tokenizer.vocab_size)
    module = LanguageModel(model, cfg, lambda step: 0.0, val_bytes=1)
    assert module.configure_optimizers().param_groups
    if cfg.trainer.accelerator != "gpu" or torch.cuda.is_available():
        assert resolve_device(cfg.trainer.accelerator).type in ("cpu", "cuda")
    else:
        with pytest.raises(ConfigError, match=r"^trainer: no GPU"):
            resolve_device("gpu")
