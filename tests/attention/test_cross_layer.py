"""Cross-layer attention in whole models, against its formula written as a loop."""

from pathlib import Path

import pytest
import torch
from building import build_attention, build_gpt, through_cache
from contract import assert_same
from support import command
from torch import Tensor

from gptattn.attention.variants.cross_layer import CrossLayerAttention
from gptattn.decode.generate import pad_left
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT

T = 7
ORDER = "share=2 needs 2 such layers in a row, the first of them layer 0, 2, 4, ..."
PARTS = "part=[qk_norm,gate,sink,softcap,value_residual,forget]"


def attentions(model: GPT) -> list[CrossLayerAttention]:
    """The attention of each layer."""
    found = [block.attention for block in model.layers()]
    ours = [layer for layer in found if isinstance(layer, CrossLayerAttention)]
    assert len(ours) == len(found)
    return ours


def by_loop(model: GPT, ids: Tensor, share: int) -> tuple[Tensor, list[Tensor]]:
    """The hidden states [B, T, E], and each layer's weights, one query head and token at a time."""
    x, maps = model.token_embedding(ids), []
    k = v = torch.empty(0)
    for layer, (block, attention) in enumerate(zip(model.layers(), attentions(model), strict=True)):
        size, heads = attention.head_dim, attention.num_heads
        normed = block.norm_attention(x)
        q = attention.W_query(normed).unflatten(-1, (heads, size))
        if layer % share == 0:
            assert attention.W_key is not None
            assert attention.W_value is not None
            k = attention.W_key(normed).unflatten(-1, (-1, size))
            v = attention.W_value(normed).unflatten(-1, (-1, size))
        w_BHTS = x.new_zeros(len(ids), heads, ids.shape[1], ids.shape[1])
        rows = []
        for t in range(ids.shape[1]):
            mixed = []
            for h in range(heads):
                g = h * k.shape[2] // heads
                score = torch.einsum("bd,bsd->bs", q[:, t, h], k[:, : t + 1, g]) / size**0.5
                w_BHTS[:, h, t, : t + 1] = score.softmax(-1).detach()
                mixed.append(torch.einsum("bs,bsd->bd", score.softmax(-1), v[:, : t + 1, g]))
            rows.append(torch.cat(mixed, dim=-1))
        maps.append(w_BHTS)
        x = x + attention.out_proj(torch.stack(rows, dim=1))
        assert block.mlp is not None
        assert block.norm_mlp is not None
        x = x + block.mlp(block.norm_mlp(x))
    return model.norm(x), maps


@pytest.mark.parametrize(("share", "kv_heads"), [(2, 1), (3, 2)])
def test_layers_reuse_keys_and_values_as_a_loop_does(share, kv_heads):
    chosen_ = (f"attn.share={share}", f"attn.num_kv_heads={kv_heads}", "model.num_layers=4")
    model = build_gpt("attn=cross_layer", *chosen_, "position=none", std=0.3).double()
    ids = torch.randint(13, (2, T))
    upstream = torch.randn(2, T, 30, dtype=torch.float64)
    expected, maps = by_loop(model, ids, share)
    results = []
    for y in (model.hidden(ids), expected):
        results.append([y, *torch.autograd.grad(y, [*model.parameters()], upstream)])
    assert_same(results[0], results[1], atol=1e-11)
    assert_same(model.attention_weights(ids), maps, atol=1e-11)


@pytest.mark.parametrize(
    ("parts", "window", "position"),
    [(PARTS, "null", "none"), (PARTS, 3, "rope"), ("part=gate", "null", "none")],
)
def test_every_part_acts_in_layers_that_reuse_with_caches_windows_and_padding(
    parts, window, position
):
    given = [parts, f"attn.window={window}", f"position={position}", "model.d_model=36"]
    given += ["attn=cross_layer", "model.num_layers=4"]
    model = build_gpt(*given, std=0.3).double().eval()
    reference = build_gpt(*given, "attn.backend=reference").double().eval()
    reference.load_state_dict(model.state_dict())
    ids = torch.randint(13, (2, 11))
    with torch.no_grad():
        read = model(ids)
        assert_same(reference(ids), read)
        for chunks in ([1] * 11, [5, 1, 3, 2]):
            assert_same(through_cache(model, ids, model.new_cache(2), chunks), read)
        prompts = [torch.randint(13, (length,)) for length in (8, 1, 5)]
        padded, padding = pad_left(prompts)
        y = through_cache(model, padded, model.new_cache(3, padding_B=padding), [2, 5, 1])
        for row, (prompt, pad) in enumerate(zip(prompts, padding, strict=True)):
            assert_same(y[row, pad:], model(prompt[None])[0])


def test_what_a_layer_that_reuses_does_not_have_costs_nothing():
    def layer(number: int) -> CrossLayerAttention:
        return CrossLayerAttention(768, 768, 1024, 12, layer=number).half()

    counts = [sum(p.numel() for p in layer(number).parameters()) for number in (0, 1, 2)]
    assert counts == [1_278_720, 1_278_720 - 2 * 768 * 64, 1_278_720]
    assert [layer(number).new_cache(1, 1).nbytes for number in (0, 1, 2)] == [256, 0, 256]


def test_parts_have_no_parameters_for_keys_and_values_that_a_layer_does_not_have():
    model = build_gpt("attn=cross_layer", PARTS, "model.num_layers=4", "position=none")
    names = [
        {n.removeprefix("parts.") for n in a.state_dict() if n.startswith("parts.")}
        for a in attentions(model)
    ]
    of_keys, of_values = "qk_norm.k_gain_D", "value_residual.shares"
    assert [of_keys in found for found in names] == [True, False, True, False]
    assert [of_values in found for found in names] == [False, False, True, False]
    assert all("qk_norm.q_gain_D" in found for found in names)
    kept = [sorted(cache.tensors) for cache in (a.new_cache(1, 3) for a in attentions(model))]
    assert kept == [["k", "log_forget", "v"], ["log_forget"]] * 2


def test_a_layer_that_reuses_says_what_it_misses_on_its_own():
    attention = build_attention("cross_layer", layer=3)
    with pytest.raises(ValueError, match="the keys and values of layer 2 are missing"):
        attention(torch.randn(1, T, 30))


@pytest.mark.parametrize(
    ("overrides", "field", "said"),
    [
        (
            ["pattern=[gqa,cross_layer]"],
            "pattern",
            r"layer 1 needs keys and values of layer 0 \(num_kv_heads=1, head_dim=5, share=2\), "
            f"and no earlier layer provides them; {ORDER}$",
        ),
        (
            ["pattern=[cross_layer,gqa]"],
            "pattern",
            f"layer 0 provides keys and values of layer 0, and no later layer takes them; {ORDER}$",
        ),
        (
            # More layers are no help: each of these begins a group.
            ["pattern=[cross_layer,gqa]", "model.num_layers=4"],
            "pattern",
            f"no later layer takes them; {ORDER}$",
        ),
        (
            ["pattern=[cross_layer,cross_layer,gqa]", "model.num_layers=6"],
            "pattern",
            "layer 3 needs keys and values of layer 2 .*, and no earlier layer provides them; "
            f"{ORDER}$",
        ),
        (
            ["attn=cross_layer", "model.num_layers=1"],
            "model.num_layers",
            "layer 0 provides keys and values of layer 0, and no later layer takes them; give the "
            "model more layers$",
        ),
        (["attn=cross_layer", "attn.share=0"], "attn.share", "share=0 must be 2 or more"),
        (["attn=cross_layer", "attn.share=1"], "attn.share", "share=1 must be 2 or more"),
        (["attn=cross_layer", "attn.share=x"], "attn.share", "'x' is a str"),
        (["attn=cross_layer", "attn.num_kv_heads=4"], "attn.num_kv_heads", "must divide num_heads"),
    ],
)
def test_layers_that_cannot_share_are_refused_in_one_line(overrides, field, said):
    with pytest.raises(ConfigError, match=said) as caught:
        build_gpt(*overrides)
    assert caught.value.field == field


def test_a_group_may_be_longer_than_what_is_left_of_the_model():
    build_gpt("attn=cross_layer", "attn.share=3", "model.num_layers=2")
    build_gpt("attn=cross_layer", "model.num_layers=3")
    build_gpt("pattern=[cross_layer,cross_layer,gqa,gqa]", "model.num_layers=8")
    build_gpt("pattern=[gqa,gqa,cross_layer,cross_layer]", "model.num_layers=4")


@pytest.mark.parametrize("change", ["window: 4"])
def test_layers_of_two_files_that_differ_in_heads_or_window_are_refused(
    change: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "attn").mkdir()
    name = change.partition(":")[0]
    text = f"_target_: gptattn.attention.variants.cross_layer.CrossLayerAttention\n{change}\n"
    (tmp_path / "attn" / "mine.yaml").write_text(text)
    given = ["model=tiny", "pattern=[cross_layer,mine]", "model.num_layers=2"]
    assert command(tmp_path, f"--config-dir={tmp_path}", *given) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: pattern: layer 1 needs keys and values of layer 0 (num_kv_heads")
    assert f"{name}={change[-1]}" in line
    assert line.endswith("make these the same in both layers")
