"""What must hold on a GPU before figures mean anything."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.attention import Attention, Rule, attend
from gptattn.build.model import build_layer
from gptattn.errors import ConfigError
from gptattn.machine.device import device_name, missing_compiler
from gptattn.model.loss import linear_cross_entropy
from gptattn.settings.compose import CONF
from measuring.gpu_lab import Cell, Lab, error_of, training_step

MAX_ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # of the loss's gradients
LAYER_ERROR = {torch.bfloat16: 3e-2, torch.float32: 1e-3}  # float32 may run its products in TF32
DROPOUT = 0.2


def versions(lab: Lab) -> Cell:
    """Of what this ran on; `missing`: the compiler that torch.compile lacks."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda}
    return found | {"device": device_name(lab.device), "missing": missing_compiler(lab.device)}


def loss_gradients(lab: Lab, dtype: torch.dtype) -> Cell:
    """The chunked loss's gradients against torch's cross-entropy in float64."""
    tokens, width, vocab = lab.size(4096, 40), lab.size(768, 16), lab.size(50257, 67)
    given = (
        torch.randn(tokens, width, device=lab.device),
        torch.randn(vocab, width, device=lab.device),
    )
    targets = torch.randint(vocab, (tokens,), device=lab.device)
    exact = [(x.to(dtype).double() / width**0.5).requires_grad_() for x in given]
    F.cross_entropy(exact[0] @ exact[1].T, targets).backward()
    ours = [x.detach().to(dtype).requires_grad_() for x in exact]
    linear_cross_entropy(ours[0], ours[1], targets, tokens // 3).backward()
    worst = 0.0
    for one, right in zip(ours, exact, strict=True):
        assert one.grad is not None
        assert right.grad is not None
        worst = max(worst, error_of(one.grad, right.grad))
    return {"error": worst, "ok": worst < MAX_ERROR[dtype]}


def variant(lab: Lab, name: str, backends: tuple[str, str], dtype: torch.dtype) -> Cell:
    """One layer: a fast backend against a plain one, and its memory against T x T scores."""
    T, rows = lab.size(1024, 16), 2
    layers: dict[str, Attention] = {}
    fast, plain = backends
    for backend in (fast, plain):
        torch.manual_seed(0)
        try:
            cfg = lab.settings(f"attn={name}", f"attn.backend={backend}")
            layers[backend] = build_layer(cfg, {}, {}, 0).to(lab.device, dtype)
        except ConfigError:
            return {"backends": 1}
    layers[plain].load_state_dict(layers[fast].state_dict())
    x = torch.randn(rows, T, cfg.model.d_model, device=lab.device, dtype=dtype)
    upstream = torch.randn_like(x)
    results: dict[str, list[Tensor]] = {}
    added: dict[str, int] = {}
    for backend, layer in layers.items():
        held: list[Tensor] = []

        def both(layer: Attention = layer, held: list[Tensor] = held) -> None:
            given = x.clone().requires_grad_()
            y = layer(given)
            held[:] = [y, *torch.autograd.grad(y, given, upstream)]

        both()
        added[backend], results[backend] = lab.peak_bytes(both), held
    worst = max(error_of(*pair) for pair in zip(results[fast], results[plain], strict=True))
    scores = rows * cfg.model.num_heads * T * T * dtype.itemsize
    ok = worst < LAYER_ERROR[dtype]
    if lab.on_gpu and fast == "sdpa" and name != "single_head":  # one head has few scores
        ok = ok and added[fast] < added[plain] / 2
    return {"error": worst, "ok": ok, "scores_mb": scores / 1e6} | {
        f"{backend}_mb": size / 1e6 for backend, size in added.items()
    }


def dropped(lab: Lab) -> Cell:
    """The share of weights that attention dropout drops, seen through values that show them."""
    n = lab.size(64, 16)
    q = torch.zeros(lab.size(64, 32), 12, n, n, device=lab.device, dtype=lab.half)
    shown = torch.eye(n, device=lab.device, dtype=lab.half).expand_as(q)
    w_BHTS = attend(q, q, shown, Rule(1.0), dropout=DROPOUT)
    seen = torch.ones(n, n, dtype=torch.bool, device=lab.device).tril()
    share = (w_BHTS[..., seen] == 0).double().mean().item()
    return {"share": share, "ok": abs(share - DROPOUT) < 0.005}


def no_waiting(lab: Lab) -> Cell:
    """Steps 3 to 5 with every wait for the device forbidden."""
    model = lab.model()
    step_once = training_step(lab, model, model.loss)
    batch = lab.batch(lab.size(4, 2), lab.size(1024, 16))
    for step in range(1, 7):
        if lab.on_gpu:
            torch.cuda.set_sync_debug_mode("error" if 3 <= step <= 5 else "default")
        step_once(*batch)
    return {"ok": True}


def compiled_losses(lab: Lab) -> Cell:
    """The losses of compiled blocks against eager ones, and how many graphs they took."""
    batch = lab.batch(lab.size(8, 2), lab.size(1024, 16))
    found: list[Tensor] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        model = lab.model()
        losses: list[Tensor] = []
        step = training_step(lab, model, model.loss, losses)
        for block in model.layers() if compiled else []:
            lab.compile(block)
        for _ in range(lab.size(20, 3)):
            step(*batch)
        found.append(torch.stack(losses))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    worst = ((found[1] - found[0]) / found[0]).abs().max().item()
    return {"error": worst, "graphs": graphs, "ok": worst < 5e-3 and graphs <= 4}


def check_cells() -> dict[str, Callable[[Lab], Cell]]:
    """Return the checks by name, in their order."""
    found: dict[str, Callable[[Lab], Cell]] = {"versions": versions}
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        found[f"loss gradients, {kind}"] = partial(loss_gradients, dtype=dtype)
        for file in sorted((CONF / "attn").glob("*.yaml")):
            has_state = "| chunked | fla" in file.read_text("utf-8")
            both = ("fla", "chunked") if has_state else ("sdpa", "reference")
            cell = partial(variant, name=file.stem, backends=both, dtype=dtype)
            found[f"{file.stem}, {kind}: {' = '.join(both)}"] = cell
    return found | {
        "dropped share at 0.2": dropped,
        "steps 3 to 5 wait for nothing": no_waiting,
        "compiled = eager": compiled_losses,
    }
