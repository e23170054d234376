"""Writes a small variant that trains at once, with its settings and its test, for you to change."""

import argparse
import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import NoReturn

from gptattn.errors import ConfigError
from gptattn.machine.ending import run_command
from gptattn.settings.config import CONF

MODULE = '''"""$title: multi-head attention with smeared keys."""

import torch.nn.functional as F
from torch import Tensor, nn


class $title(nn.Module):
    """Causal multi-head attention in which each key takes a share of the key before it.

    x [B, T, d_in] -> y [B, T, d_out]. Source: Olsson et al. 2022, arXiv:2209.11895.
    """

    # By their names, d_in, d_out, num_heads and dropout get the values of the model; context_length
    # would too. Everything else is a setting in attn/$name.yaml.
    def __init__(self, d_in: int, d_out: int, num_heads: int, dropout: float, smear: float) -> None:
        super().__init__()
        if d_out % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide d_out={d_out}")
        self.num_heads, self.dropout, self.smear = num_heads, dropout, smear
        self.W_qkv = nn.Linear(d_in, 3 * d_out, bias=False)
        self.out_proj = nn.Linear(d_out, d_out)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        # [B, T, 3 * d_out] -> three tensors of [B, num_heads, T, head_dim]
        q, k, v = self.W_qkv(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        before = F.pad(k, (0, 0, 1, 0))[:, :, :T]  # the key of token t - 1 at t; zeros at the start
        k = (1 - self.smear) * k + self.smear * before
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))
'''

SETTINGS = """# $title: multi-head attention in which each key takes a share of the key before it.
# Olsson et al. 2022, arXiv:2209.11895.
# Use it as a start: say here what yours is, where it comes from and when to use it.
_target_: $name.$title
smear: 0.25 # share of each key that is the key before; 0: plain multi-head attention
"""

TEST = '''"""What $name must keep: `pytest test_$name.py`."""

import torch

from $name import $title


def make() -> $title:
    torch.manual_seed(0)
    return $title(d_in=12, d_out=12, num_heads=3, dropout=0.0, smear=0.25)


def test_a_token_changes_nothing_before_it() -> None:
    attention, x = make(), torch.randn(2, 7, 12)
    for t in range(1, 7):
        changed = x.clone()
        changed[:, t] += 1
        before, after = attention(x), attention(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t], before[:, t])


def test_every_parameter_gets_a_finite_gradient() -> None:
    attention = make()
    attention(torch.randn(2, 7, 12)).square().mean().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
'''


def main() -> NoReturn:
    """Run `gptattn-new NAME`. Exits with the codes of `gptattn.errors`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the module and of attn=NAME, such as mine")
    name = parser.parse_args().name
    sys.exit(run_command(lambda: print(_describe(write_variant(name), name))))


def write_variant(name: str) -> list[Path]:
    """Write the three files into the working directory; return their paths.

    Raises ConfigError, naming `name`, before any is written, if it cannot name a new variant.
    """
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    texts = {f"{name}.py": MODULE, f"attn/{name}.yaml": SETTINGS, f"test_{name}.py": TEST}
    there = [file for file in texts if Path(file).exists()]
    wrong = None
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or {name, title} & {*keyword.kwlist}:
        wrong = "cannot name a Python module; give letters, digits and _, such as my_attention"
    elif (CONF / "attn" / f"{name}.yaml").exists():
        wrong = f"is on the menu, as attn={name}; give another"
    elif there:
        wrong = f"would overwrite {', '.join(there)}; give another, or move them"
    elif find_spec(name) is not None:
        wrong = "is the name of an installed Python module; give another"
    if wrong is not None:
        raise ConfigError("name", f"{name!r} {wrong}")
    Path("attn").mkdir(exist_ok=True)
    for file, text in texts.items():
        Path(file).write_text(Template(text).substitute(name=name, title=title), encoding="utf-8")
    return [Path(file) for file in texts]


def _describe(files: list[Path], name: str) -> str:
    """Return what was written and the commands to type next."""
    steps = {
        f"gptattn-train attn={name}": "train it",
        f"gptattn-check attn={name}": "causal? finite? trained by its gradients?",
        f"pytest test_{name}.py": "its own test",
        f"gptattn-train -m attn=mha,{name} seed=1,2,3": "compare it",
    }
    width = max(map(len, steps))
    rows = [f"  {step:<{width}}  # {what}" for step, what in steps.items()]
    return "\n".join([f"wrote {', '.join(map(str, files))}", "next:", *rows])
