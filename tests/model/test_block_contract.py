"""What every block must do, tested on every file in `conf/block`, with each MLP and head.

No block is named here.
"""

from typing import get_args

import pytest
import torch
from building import build_gpt, menu, slow_but

from gptattn.model.gpt import GPT
from gptattn.settings.config import MLP

B, T, V = 2, 11, 13
# Heads of 6: rotary positions need an even size.
SIZES = ("attn=gqa", "attn.num_kv_heads=3", "model.d_model=36")


# Each block with each MLP, every other one with a tied head.
CHOICES = [
    [f"block={block}", f"model.mlp={mlp}", f"block.tied_head={tied}"]
    for number, block in enumerate(menu("block"))
    for mlp, tied in zip(get_args(MLP), (number % 2 == 0, number % 2 == 1) * 2, strict=True)
]


@pytest.fixture(params=CHOICES, ids=",".join)
def model(request: pytest.FixtureRequest) -> GPT:
    return build_gpt(*SIZES, *request.param, std=0.3).eval()


@pytest.fixture(params=menu("block"))
def block(request: pytest.FixtureRequest) -> str:
    return f"block={request.param}"


def test_a_logit_depends_on_its_own_token_and_the_past_only(model):
    model = model.double()
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: object, y: torch.Tensor) -> torch.Tensor:
        embedded.append(y.detach().requires_grad_())
        return embedded[0]

    model.token_embedding.register_forward_hook(keep)
    logits = model(torch.randint(V, (1, T)))[0] @ torch.randn(V, dtype=torch.float64)
    rows = [torch.autograd.grad(y, embedded, retain_graph=True)[0][0].norm(dim=-1) for y in logits]
    assert torch.equal(torch.stack(rows) != 0, torch.ones(T, T).tril().bool())


def test_the_loss_trains_every_parameter(model):
    ids, targets = torch.randint(V, (2, B, T))
    model = model.double()
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss = model.loss(ids, targets, chunk_tokens=3)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # A key's bias adds the same to all scores of a query.
        assert parameter.grad.abs().max() > 1e-6 or name.endswith("W_key.bias"), name


def test_a_block_without_an_mlp_has_nothing_but_attention_and_its_norm(block):
    model = build_gpt(*SIZES, block, "model.mlp=none")
    inside = {name.split(".")[2] for name in model.state_dict() if name.startswith("blocks.")}
    assert inside == {"norm_attention", "attention"}
    # One layer of two that writes to the stream.
    model = build_gpt("attn=mha", block, "model.mlp=none", "model.d_model=120")
    stds = [layer.attention.residual_writer().weight.std().item() for layer in model.layers()]
    assert stds == pytest.approx([0.02 * 2**-0.5] * 2, rel=0.05)


@pytest.mark.parametrize("mlp", get_args(MLP))
def test_the_widths_are_those_with_as_many_parameters(mlp):
    model = build_gpt("attn=mha", f"model.mlp={mlp}", "model.d_model=96")
    found = [p.numel() for n, p in model.named_parameters() if ".mlp." in n and p.ndim == 2]
    assert sum(found) in (0, 2 * 8 * 96 * 96)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch reads it itself
@pytest.mark.parametrize("apart", slow_but({False}, [False, True]))
def test_compiled_blocks_train_as_eager_ones(block, apart):
    # tests/attention/test_menu.py trains whole runs with the real compiler.
    ids, targets = torch.randint(V, (2, B, T))
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * T]) if apart else None
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build_gpt(*SIZES, block, "model.num_layers=1", std=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for layer in model.layers() if compiled else []:
            layer.compile(backend="aot_eager")
        losses = []
        for _ in range(3):
            losses.append(model.loss(ids, targets, documents))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.stack(losses).detach())
    assert found[0][2] < found[0][0]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)
    torch._dynamo.reset()  # keep what was compiled here out of other tests
