"""Checks an attention with the tests that every built-in one passes.

Each kind of layer must be causal, give the same outputs through its cache, have correct gradients,
give the same outputs on the run's device and precision as on a CPU in float32, and be complete in a
checkpoint. Exits with 2 at the first check that fails, with 1 if your own code raises.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from gptattn.cli.arguments import option, run_script
from gptattn.position.base import Documents
from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig
from gptattn.training.contract import (
    TOKENS,
    TOLERANCE,
    BrokenLayer,
    Stack,
    check_device,
    check_layers,
    draw_layers,
    list_stacks,
    run,
)

DROPOUT = 0.4


@dataclass(frozen=True)
class Arguments:
    """attn=mine"""

    attn: str = option("the attention; you can also give any setting of train.py")


def check(overrides: Sequence[str]) -> None:
    """Print a line per check. Raises a UserError for the first that fails."""
    cfg = settings(overrides)
    print(cfg.variant)
    checks = {"contract": _check_contract, "saving": _check_saving, "documents": _check_documents}
    for name, run_check in checks.items():
        for line in run_check(cfg):
            print(f"  {name:<12} {line}", flush=True)
    print(f"{cfg.variant} passed every check")


def _check_contract(cfg: TrainConfig) -> Iterator[str]:
    notes = check_layers(replace(cfg, model=replace(cfg.model, dropout=DROPOUT)))
    yield f"outputs of {TOKENS} tokens do not depend on later tokens, other rows or other batches"
    yield "prefixes, and chunks through the cache, give the same outputs"
    yield "gradients are finite and, where checked, correct; evaluation is deterministic"
    check_device(cfg)
    yield f"{cfg.trainer.precision} on the run's device gives the same as float32 on a CPU"
    yield from (f"note: {note.partition(': ')[2]}" for note in notes)


def _check_saving(cfg: TrainConfig) -> Iterator[str]:
    one, two = _build_stacks(cfg), _build_stacks(cfg, seed=1)
    for first, second in zip(one, two, strict=True):
        nn.ModuleList(second.layers).load_state_dict(nn.ModuleList(first.layers).state_dict())
        x = first.draw_x()
        if not _same(run(first, x), run(second, x)):
            raise BrokenLayer(
                first.field,
                f"{first.title} is incomplete in a checkpoint: a copy from it gives different "
                "outputs; use nn.Parameter or register_buffer for learned or random tensors",
            )
    yield "a copy with the same state_dict() gives the same outputs"


def _check_documents(cfg: TrainConfig) -> Iterator[str]:
    for stack in _build_stacks(cfg):
        if not all(layer.keeps_documents for layer in stack.layers):
            yield f"{stack.title} cannot keep documents apart; don't use data.mask_documents"
            return
        x = stack.draw_x()
        number_BT = (torch.arange(x.shape[1]) >= 20).long().expand(len(x), -1)
        both = run(stack, x, documents=Documents.numbered(number_BT))
        if not _same(both, torch.cat([run(stack, x[:, :20]), run(stack, x[:, 20:])], 1)):
            raise BrokenLayer(
                stack.field,
                f"{stack.title} mixes the documents in a row; keep them apart, or set "
                "keeps_documents = False",
            )
    yield "documents in one row do not see each other"


def _build_stacks(cfg: TrainConfig, seed: int = 0) -> list[Stack]:
    layers = draw_layers(cfg, seed)
    nn.ModuleList(layers).eval()
    return list(list_stacks(layers, cfg))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= TOLERANCE[torch.float32] * a.abs().max())


main = partial(run_script, check, Arguments)
