"""Latent attention: the form that it takes, and its parts; test_recipes.py has it as released."""

from building import build_gpt
from support import refuses

from gptattn.attention.variants.mla import MultiHeadLatentAttention


def test_the_form_with_fewer_multiplications_is_taken_and_training_makes_keys():
    mine = MultiHeadLatentAttention(60, 60, 11, 6)
    mine.head_dim, mine.kv_rank = 64, 256
    # Per head: t C D + t s C over the latents, s C D + t s D with keys: level near t = 85.
    assert mine.absorbs(80, 8192)
    assert not mine.absorbs(90, 8192)
    assert not mine.absorbs(1, 1)
    mine.kv_rank = 8  # narrower than a head
    assert not mine.absorbs(11, 11)


def test_a_part_that_changes_heads_goes_to_the_layers_that_keep_them():
    parts = "part=[qk_norm,gate]"
    model = build_gpt("pattern=[mla,gqa]", parts, "position=none")
    taken = [{*dict(block.attention.parts.named_children())} for block in model.layers()]
    assert taken == [{"gate"}, {"qk_norm", "gate"}]
    with refuses("part: qk_norm"):
        build_gpt("pattern=[mla,gated_deltanet]", parts, "position=none")
