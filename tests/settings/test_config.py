"""Every file in conf/ composes and builds; every bad value is an error that names its field."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from building import WITH_PROBES
from docs_commands import OF_SHAKESPEARE
from support import TEXT, bpe, check_job, tiny

from gptattn.errors import ConfigError, UserError
from gptattn.machine.device import resolve_device
from gptattn.machine.ending import as_user_error
from gptattn.settings.build import build_data, build_model
from gptattn.settings.compose import CONF
from gptattn.settings.compose import settings as composed_settings
from gptattn.settings.config import TrainConfig
from gptattn.settings.values import suggest
from gptattn.training.module import LanguageModel

FILES = {
    group.name: sorted(
        file.relative_to(group).with_suffix("").as_posix() for file in group.rglob("*.yaml")
    )
    for group in CONF.iterdir()
    if group.is_dir() and group.name != "hydra"
}
CHOICES = [(group, name) for group, names in FILES.items() for name in names]


def settings(*overrides: str) -> TrainConfig:
    return composed_settings(overrides)


def needs(group: str, name: str, folder: Path) -> list[str]:
    """The overrides that this option needs in order to work."""
    if (group, name) == ("data", "text"):
        (folder / "book.txt").write_text(TEXT)
        return [f"data.path={folder / 'book.txt'}"]
    if (group, name) == ("data", "shakespeare"):
        path = os.environ.get("GPTATTN_SHAKESPEARE")
        if path is None:
            pytest.skip("GPTATTN_SHAKESPEARE does not name the file")
        return [f"data.path={path}"]
    if f"{group}={name}" in OF_SHAKESPEARE:
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
    if (group, name) == ("tokenizer", "none"):
        return ["data=copy"]
    if (group, name) == ("tokenizer", "gpt2"):
        return [f"tokenizer.path={bpe(folder / 'bpe')}"]
    return []


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_file_in_conf_composes_and_builds(group: str, name: str, tmp_path: Path) -> None:
    overrides = [f"{group}={name}", f"cache_dir={tmp_path}", *needs(group, name, tmp_path)]
    cfg = settings(*overrides)
    data = build_data(cfg)
    with torch.device("meta"):
        model = build_model(cfg, data.tokenizer.vocab_size)
    module = LanguageModel(
        model, cfg.optim, lambda step: 0.0, accumulate=1, loss_chunk_tokens=512, val_bytes=1
    )
    assert module.configure_optimizers().param_groups
    if cfg.trainer.accelerator != "gpu" or torch.cuda.is_available():
        assert resolve_device(cfg.trainer.accelerator).type in ("cpu", "cuda")
    else:
        with pytest.raises(ConfigError, match=r"^trainer: no GPU"):
            resolve_device("gpu")


def test_every_group_has_files_and_every_choice_is_recorded() -> None:
    assert {"attn", "data", "model", "optim", "position", "tokenizer", "trainer"} <= FILES.keys()
    cfg = settings("attn=mqa", "model=nano")
    assert (cfg.variant, cfg.choices["model"], cfg.choices["data"]) == ("mqa", "nano", "pydocs")


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_no_file_is_abstract_or_waits_for_a_value(group: str, name: str) -> None:
    content = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
    assert not Path(name).name.startswith("_")
    assert "???" not in content
    assert isinstance(yaml.safe_load(content), dict)
    assert content.startswith("# "), "a file opens with what it is"


@pytest.mark.parametrize("name", FILES["attn"])
def test_every_variant_opens_with_its_source(name: str) -> None:
    lines = (CONF / "attn" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    opening = " ".join(lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")])
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|\b(19|20)\d\d\b", opening)


@pytest.mark.parametrize("model", FILES["model"])
def test_at_every_size_gqa_is_neither_mha_nor_mqa(model: str) -> None:
    cfg = settings("attn=gqa", f"model={model}")
    groups = cfg.attn["num_kv_heads"]
    assert 1 < groups < cfg.model.num_heads
    assert cfg.model.num_heads % groups == 0


def test_settings_have_the_declared_types() -> None:
    cfg = settings("optim.lr=1", "budget.seconds=3", "trainer.threads=2", "allow_targets=[a,b]")
    assert type(cfg.optim.lr) is float
    assert type(cfg.budget.seconds) is float
    assert type(cfg.trainer.threads) is int
    assert type(cfg.allow_targets) is list
    assert type(cfg.attn) is dict
    assert cfg.model.d_mlp is None
    assert cfg.seed == 1
    assert settings("seed=0").seed == 0


def no_attention(out_proj: bool, scale: float | None, window: float | None, backend: str) -> None:
    """A target that builds no attention."""


BAD_VALUES = [
    ("attn=nonesuch", "attn"),
    ("experiment=nonesuch", "experiment"),
    ("model.num_layers=0", "model.num_layers"),
    ("model.num_heads=-1", "model.num_heads"),
    ("model.d_model=0", "model.d_model"),
    ("model.context_length=0", "model.context_length"),
    ("model.d_mlp=0", "model.d_mlp"),
    ("model.vocab_size=0", "model.vocab_size"),
    ("model.vocab_size=255", "model.vocab_size"),
    ("batch_size=0", "batch_size"),
    ("accumulate=0", "accumulate"),
    ("accumulate=3", "accumulate"),
    ("loss_chunk_tokens=0", "loss_chunk_tokens"),
    ("log_every=0", "log_every"),
    ("optim.lr=0", "optim.lr"),
    ("optim.lr=nan", "optim.lr"),
    ("optim.lr=inf", "optim.lr"),
    ("optim.eps=0", "optim.eps"),
    ("optim.grad_clip=0", "optim.grad_clip"),
    ("optim.weight_decay=-0.1", "optim.weight_decay"),
    ("optim.beta1=1", "optim.beta1"),
    ("optim.beta2=-0.1", "optim.beta2"),
    ("optim.warmup_fraction=1", "optim.warmup_fraction"),
    ("optim.final_lr_fraction=1.1", "optim.final_lr_fraction"),
    ("optim.decay=step", "optim.decay"),
    ("optim.decay_fraction=0", "optim.decay_fraction"),
    ("optim.decay_fraction=0.96", "optim.decay_fraction"),
    ("optim=muon optim.matrices.steps=0", "optim.matrices.steps"),
    ("optim=muon optim.matrices.iteration=qr", "optim.matrices.iteration"),
    (
        "optim.matrices={_target_:gptattn.optim.polar.quintics,iteration:newton_schulz,steps:2}",
        "optim.matrices._target_",
    ),
    ("budget.steps=0", "budget.steps"),
    ("budget.tokens=-1", "budget.tokens"),
    ("budget.seconds=0", "budget.seconds"),
    ("budget.seconds=nan", "budget.seconds"),
    ("budget.default_steps=0", "budget.default_steps"),
    ("budget.tokens=5", "budget"),
    ("validation.fraction=0", "validation.fraction"),
    ("validation.fraction=1", "validation.fraction"),
    ("validation.count=0", "validation.count"),
    ("sample.tokens=-1", "sample.tokens"),
    ("sample.temperature=0", "sample.temperature"),
    ("sample.top_k=0", "sample.top_k"),
    ("trainer.threads=0", "trainer.threads"),
    ("trainer.precision=8-true", "trainer.precision"),
    ("trainer.precision=16-mixed", "trainer.precision"),
    ("optim.lr=" + "9" * 309, "optim.lr"),
    ("budget.steps=null budget.seconds=" + "9" * 309, "budget.seconds"),
    ("trainer.accelerator=tpu", "trainer.accelerator"),
    ("seed=-1", "seed"),
    ("seed=4294967296", "seed"),
    ("experiment_name=''", "experiment_name"),
    ("experiment_name=..", "experiment_name"),
    ("experiment_name=a/../b", "experiment_name"),
    ("experiment_name=/tmp", "experiment_name"),
    ("model.dropout=1", "model.dropout"),
    ("model.dropout=nan", "model.dropout"),
    # Wrong types
    ("seed=one", "seed"),
    ("batch_size=1.5", "batch_size"),
    ("compile=maybe", "compile"),
    ("budget.seconds=[1]", "budget.seconds"),
    ("model=5", "model"),
    ("attn=null", "attn"),
    ("attn.scale=wide", "attn.scale"),
    ("attn.out_proj=3", "attn.out_proj"),
    ("attn.backend=cuda", "attn.backend"),
    ("tokenizer.characters=5 tokenizer=char", "tokenizer.characters"),
    ("data.pattern=7", "data.pattern"),
    # Unknown keys
    ("batchsize=4", "batchsize"),
    ("model.d_modl=4", "model.d_modl"),
    ("+model.d_modl=4", "model.d_modl"),
    ("+attn.num_kv_head=2", "attn.num_kv_head"),
    ("+no_such_setting=1", "no_such_setting"),
    ("~seed", "seed"),
    # What cannot be built
    ("model.num_heads=3", "model.num_heads"),
    ("attn=gqa attn.num_kv_heads=3", "attn.num_kv_heads"),
    ("attn=gqa attn.num_kv_heads=0", "attn.num_kv_heads"),
    ("model.num_heads=16 position=rope", "model.num_heads"),
    ("attn._target_=gptattn.attention.Nonesuch", "attn._target_"),
    ("attn._target_=gptattn.model.gpt.MLP", "attn._target_"),
    ("attn._target_=gptattn.attention.capabilities.HeadWeights", "attn.out_proj"),
    (f"attn=probe_windowed +attn.window=0 {' '.join(WITH_PROBES)}", "attn.window"),
    (f"attn._target_={__name__}.no_attention allow_targets=[{__name__}]", "attn._target_"),
    ("attn._target_=null", "attn._target_"),
    ("position._target_=gptattn.data.tokenizer.ByteTokenizer", "position._target_"),
    ("tokenizer._target_=gptattn.data.text.pydocs", "tokenizer._target_"),
    ("data._target_=gptattn.data.text", "data._target_"),
]


def mistake(overrides: list[str]) -> UserError | None:
    """The error that the command line reports for these overrides; None without one."""
    try:
        check_job(overrides)
    except Exception as error:
        return as_user_error(error)
    return None


@pytest.mark.parametrize(("overrides", "field"), BAD_VALUES)
def test_a_value_that_cannot_work_is_a_mistake_of_the_named_field(
    overrides: str, field: str, tmp_path: Path
) -> None:
    error = mistake(tiny(tmp_path, *overrides.split(" ")))
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    assert error.field == field


@pytest.mark.parametrize(
    "overrides",
    [
        "model.dropout=0.999",
        "optim.weight_decay=0",
        "optim.final_lr_fraction=0",
        "optim.warmup_fraction=0",
        "sample.tokens=0",
        "seed=4294967295",
        "accumulate=4",
        "model.d_mlp=1 model.vocab_size=256",
        "experiment_name=mine/again",
        "budget.steps=null budget.tokens=1",
        "budget.steps=null budget.seconds=0.1",
        "attn.scale=0.5",
        "attn.scale=1",
    ],
)
def test_a_value_at_its_limit_is_accepted(overrides: str, tmp_path: Path) -> None:
    check_job(tiny(tmp_path, *overrides.split(" ")))


def test_the_error_of_a_misspelt_name_suggests_the_nearest() -> None:
    assert suggest("gqq", ["mha", "gqa", "mqa"]) == "did you mean gqa? one of gqa, mha, mqa"
    assert suggest("zzz", ["mha", "gqa"]) == "one of gqa, mha"
