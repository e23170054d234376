"""The GPU's parts `train` and `decode`: what steps and tokens cost, without the run around them."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from gptattn.attention import Rule, attend
from gptattn.decode.generate import stream
from gptattn.decode.sampling import Sampling
from gptattn.machine.device import synchronize
from gptattn.model.cost import measure_cost
from gptattn.model.gpt import GPT
from measuring.gpu_lab import Cell, Lab, PlainGPT, Step, training_step

T, VOCABULARIES, ROWS = 1024, (50257, 50304), (16, 32, 64)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CONTEXT = 32_768  # keys, in the cells of decode attention


def tokens_per_s(lab: Lab, step: Step, rows: int, vocab: int) -> Cell:
    """Time steps on rows of T tokens."""
    rows, tokens = lab.size(rows, 2), lab.size(T, 16)
    batch = lab.batch(rows, tokens, vocab)
    step(*batch)  # compiles, and makes the optimizer's averages
    peak = lab.peak_bytes(lambda: step(*batch))
    seconds = lab.seconds(lambda: step(*batch), warm_up=5)
    return {"tokens_per_s": rows * tokens / seconds, "ms": 1e3 * seconds, "step_mb": peak / 1e6}


def ours(lab: Lab, compiled: bool, vocab: int, rows: int, attn: str = "mha") -> Cell:
    """Our model in a bare loop; `of_rate` is the share of the measured rate of products."""
    rate = lab.rate(lab.half)
    torch._dynamo.reset()
    model = lab.model(f"attn={attn}", vocab_size=vocab)
    flops = measure_cost(model).flops_per_token
    for block in model.layers() if compiled else []:
        lab.compile(block)
    cell = tokens_per_s(lab, training_step(lab, model, model.loss), rows, vocab)
    return cell | {"of_rate": cell["tokens_per_s"] * flops / rate}


def plain(lab: Lab, compiled: bool, rows: int) -> Cell:
    """A plain GPT-2 with nanoGPT's settings, at the vocabulary of 50,304."""
    torch._dynamo.reset()
    cfg, vocab = lab.settings().model, 50304
    sizes = lab.size(vocab, 64), cfg.d_model, cfg.num_heads, cfg.num_layers, cfg.context_length
    model = PlainGPT(*sizes).to(lab.device)
    if compiled:
        lab.compile(model)
    return tokens_per_s(lab, training_step(lab, model, model), rows, vocab)


def loss_alone(lab: Lab, vocab: int) -> Cell:
    """The head and the loss, with their gradients, of 16 rows."""
    model = lab.model(vocab_size=vocab)
    rows, tokens = lab.size(16, 2), lab.size(T, 16)
    hidden = torch.randn(rows, tokens, model.head.weight.shape[1], device=lab.device)
    _, targets = lab.batch(rows, tokens, vocab)
    model.hidden = lambda *_: hidden.requires_grad_()  # type: ignore[method-assign]

    def both() -> None:
        with torch.autocast(lab.device.type, torch.bfloat16, enabled=lab.on_gpu):
            model.loss(targets, targets).backward()

    return {"ms": 1e3 * lab.seconds(both)}


def kernel(lab: Lab, backend: str, groups: int) -> Cell:
    """Causal attention of 16 rows by one of torch's kernels, forward and backward."""
    rows, tokens = lab.size(16, 2), lab.size(T, 16)
    q, k, v = (
        torch.randn(rows, n, tokens, 64, device=lab.device, dtype=lab.half, requires_grad=True)
        for n in (12, groups, groups)
    )

    def both() -> None:
        with sdpa_kernel(BACKENDS[backend] if lab.on_gpu else SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups != 12)
        y.backward(torch.ones_like(y))

    return {"ms": 1e3 * lab.seconds(both)}


def profiled(lab: Lab) -> Cell:
    """The operations that take most of three eager steps, with their share of all."""
    model = lab.model()
    step = training_step(lab, model, model.loss)
    batch = lab.batch(lab.size(16, 2), lab.size(T, 16))
    step(*batch)
    kinds = [ProfilerActivity.CUDA] if lab.on_gpu else [ProfilerActivity.CPU]
    with profile(activities=kinds) as found:
        for _ in range(3):
            step(*batch)
        synchronize(lab.device)

    def micros(event: object) -> float:
        return getattr(event, "self_device_time_total" if lab.on_gpu else "self_cpu_time_total")

    events = sorted(found.key_averages(), key=micros, reverse=True)
    whole = sum(map(micros, events)) or 1.0
    return {event.key[:70]: round(micros(event) / whole, 4) for event in events[:15]}


def train_cells() -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of the part `train` by name, those of the goals first."""
    grid = [(c, v, rows) for rows in ROWS for c in (True, False) for v in VOCABULARIES]
    found: dict[str, Callable[[Lab], Cell]] = {}
    for compiled, vocab, rows in grid:
        how = "compiled" if compiled else "eager"
        name = f"{how}, V = {vocab:,}, {rows} rows"
        found[name] = partial(ours, compiled=compiled, vocab=vocab, rows=rows)
        if vocab == VOCABULARIES[-1]:
            found[f"nanoGPT's settings, {how}, {rows} rows"] = partial(
                plain, compiled=compiled, rows=rows
            )
    for attn in ("gqa", "mqa"):
        found[f"{attn}, compiled, V = 50,304, 16 rows"] = partial(
            ours, compiled=True, vocab=50304, rows=16, attn=attn
        )
    for vocab in VOCABULARIES:
        found[f"the loss alone, V = {vocab:,}"] = partial(loss_alone, vocab=vocab)
    for groups in (12, 2, 1):
        # The memory-efficient kernel takes no shared keys.
        for backend in BACKENDS if groups == 12 else ("flash", "cudnn"):
            name = f"attention by {backend}, {groups} key heads"
            found[name] = partial(kernel, backend=backend, groups=groups)
    return found | {"shares of an eager step": profiled}


def decode(lab: Lab, batch: int) -> Cell:
    """Tokens after a prompt of 512, one by one, and the slowest of them."""
    model = lab.model().to(lab.half).eval()
    ids, _ = lab.batch(batch, lab.size(512, 8))
    steps = stream(model, ids, lab.size(200, 6), Sampling(temperature=0))
    next(steps)
    times = [lab.seconds(lambda: next(steps), 0, 1) for _ in range(lab.size(150, 2))]
    times = sorted(times[lab.size(10, 0) :])
    middle = times[len(times) // 2]
    return {
        "tokens_per_s": batch / middle,
        "slowest_of_median": times[-1] / middle,
        "ok": times[-1] < 5 * middle or lab.tiny,
    }


@torch.inference_mode()
def graph_floor(lab: Lab, batch: int) -> Cell:
    """One token's kernels from a CUDA graph: what decoding would take without launches."""
    model = lab.model().to(lab.half).eval()
    ids, _ = lab.batch(batch, lab.size(512, 8))
    cache = model.new_cache(batch)
    model.prepare(batch)
    model.next_logits(ids, cache)
    for _ in range(3):
        model.next_logits(ids[:, :1], cache)
    if not lab.on_gpu:
        return {"tokens_per_s": batch / lab.seconds(lambda: model.next_logits(ids[:, :1]))}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.next_logits(ids[:, :1], cache)
    return {"tokens_per_s": batch / lab.seconds(graph.replay, 10, 50)}


def same_text(lab: Lab) -> Cell:
    """Greedy ids in float32: with a cache, without, and beside a longer prompt."""
    model: GPT = lab.model().eval()
    new = lab.size(24, 4)
    ids, _ = lab.batch(1, lab.size(64, 6))
    greedy = Sampling(temperature=0)
    cached = torch.cat([ids, *stream(model, ids, new, greedy)], dim=1)
    plainly = ids
    with torch.inference_mode():
        for _ in range(new):
            plainly = torch.cat([plainly, model(plainly)[:, -1:].argmax(-1)], dim=1)
    longer, _ = lab.batch(1, ids.shape[1] + 3)
    padded = torch.cat([ids[:, :1].expand(-1, 3), ids], dim=1)
    both, pads = torch.cat([padded, longer]), torch.tensor([3, 0], device=lab.device)
    beside = torch.cat([both, *stream(model, both, new, greedy, padding=pads)], dim=1)[:1, 3:]
    uncached, alone = torch.equal(cached, plainly), torch.equal(cached, beside)
    return {"as_without_a_cache": uncached, "as_padded": alone, "ok": uncached and alone}


@torch.inference_mode()
def attention_step(lab: Lab, groups: int) -> Cell:
    """One layer's attention of one token to a long cache, at batch 32."""
    rows, S = lab.size(32, 2), lab.size(CONTEXT, 32)
    q = torch.randn(rows, 12, 1, 64, device=lab.device, dtype=lab.half)
    k, v = (torch.randn(rows, groups, S, 64, device=lab.device, dtype=lab.half) for _ in range(2))
    newest, held = range(S - 1, S), range(S)
    seconds = lab.seconds(lambda: attend(q, k, v, Rule(0.125), q_pos=newest, k_pos=held))
    return {"us": 1e6 * seconds, "gb_per_s": 2 * k.nbytes / seconds / 1e9}


def decode_cells() -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of the part `decode` by name."""
    found: dict[str, Callable[[Lab], Cell]] = {"the same text by every way": same_text}
    for batch in (1, 8, 64):
        found[f"batch {batch}, eager"] = partial(decode, batch=batch)
        found[f"batch {batch}, one step as a graph"] = partial(graph_floor, batch=batch)
    for groups in (12, 2, 1):
        name = f"attention to {CONTEXT:,} keys, {groups} key heads"
        found[name] = partial(attention_step, groups=groups)
    return found
