"""Variants with parameters and buffers that are laid out or typed in unusual ways."""

import shutil
from pathlib import Path

import pytest
import torch
from support import command, tiny
from torch import nn
from tortures.bench import fingerprint

from gptattn.attention import MultiHeadAttention
from gptattn.runs.load import load_run


class Transposed(MultiHeadAttention):
    """Has a parameter whose memory is not in the order of its elements."""

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__(d_in, d_out, context_length, num_heads)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, d_in * 3).view(d_in, 3).T)

    def forward(self, x_BTE, cache=None, carried=None):  # type: ignore[no-untyped-def]
        return super().forward(x_BTE * self.gain.square().sum(0), cache, carried)


class Masked(MultiHeadAttention):
    """Has persistent buffers: a mask, a mask of -inf, numbers."""

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__(d_in, d_out, context_length, num_heads)
        mask = torch.ones(context_length, context_length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask)
        self.register_buffer("minus", torch.zeros(mask.shape).masked_fill(mask, -torch.inf))
        self.register_buffer("order", torch.arange(context_length))


class Complex(MultiHeadAttention):
    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__(d_in, d_out, context_length, num_heads)
        self.register_buffer("turns", torch.zeros(4, dtype=torch.complex64))


class Expanded(MultiHeadAttention):
    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__(d_in, d_out, context_length, num_heads)
        self.gain = nn.Parameter(torch.ones(1).expand(d_in))


class Extra(MultiHeadAttention):
    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__(d_in, d_out, context_length, num_heads)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


ALLOWED = f"allow_targets=[{__name__}]"


def settings(folder: Path, variant: type) -> list[str]:
    (folder / "conf" / "attn").mkdir(parents=True)
    file = folder / "conf" / "attn" / "unusual.yaml"
    file.write_text(f"_target_: {__name__}.{variant.__name__}\n", encoding="utf-8")
    own = [f"hydra.searchpath=[file://{folder / 'conf'}]", "attn=unusual", ALLOWED]
    more = ["hydra.run.dir=run", "budget.steps=6", "validation.count=3", "optim.lr=0.01"]
    return tiny(folder, *own, *more)


@pytest.mark.parametrize("variant", [Transposed, Masked])
def test_it_resumes_bit_for_bit(variant: type, tmp_path: Path) -> None:
    assert command(tmp_path, *settings(tmp_path, variant)) == 0
    run, cut = tmp_path / "run", tmp_path / "cut"
    shutil.copytree(run, cut)
    for file in [*(cut / "checkpoints").glob("step=6*"), cut / "summary.json"]:
        file.unlink()
    assert command(tmp_path, "resume=cut", ALLOWED) == 0
    assert fingerprint(cut) == fingerprint(run)
    assert torch.equal(
        load_run(cut, [__name__]).model.state_dict()["norm.bias"],
        load_run(run, [__name__]).model.state_dict()["norm.bias"],
    )


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        (Complex, "attention.turns is torch.complex64, which a checkpoint cannot hold"),
        (Expanded, "attention.gain is expanded: its elements share memory"),
        (Extra, "attention._extra_state is a dict, which a checkpoint cannot hold"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_said_before_anything_is_trained(
    variant: type, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *settings(tmp_path, variant)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: attn: ")
    assert said in line
    assert not (tmp_path / "run").exists()


def test_a_file_of_the_users_own_is_no_checkpoint_and_stays(tmp_path: Path) -> None:
    assert command(tmp_path, *tiny(tmp_path, "hydra.run.dir=run")) == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = max(checkpoints.glob("*.safetensors"))
    shutil.copy(newest, checkpoints / "best.safetensors")
    assert command(tmp_path, "resume=run", "budget.steps=6") == 0
    assert (checkpoints / "best.safetensors").exists()


def test_a_finished_run_without_its_checkpoints_is_not_made_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, "hydra.run.dir=run")) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    assert command(tmp_path, "resume=run", "budget.steps=6") == 4
    assert "its checkpoints are gone" in capfd.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows
