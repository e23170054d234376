"""Which settings change a result, and what beside the settings does: code, text and weights."""

from dataclasses import asdict, replace

import pytest
from building import settings

from gptattn.runs.folder import RunFolder
from gptattn.settings.config import Effect
from gptattn.settings.identity import (
    Provenance,
    differences,
    effect_of,
    hash_code_for,
    resume_provenance,
    settings_key,
)

MADE = Provenance("text", "cpu", {"a": "1", "b": "2"})


def test_a_default_budget_and_rows_written_more_often_are_no_other_result():
    cfg = settings()
    assert cfg.budget.default_steps == 1000
    asked = replace(cfg, budget=replace(cfg.budget, steps=1000))
    more = replace(cfg, log_every=3, validation=replace(cfg.validation, count=7))
    longer = replace(cfg, budget=replace(cfg.budget, steps=1001))
    key = settings_key(asdict(cfg))
    assert settings_key(asdict(asked)) == settings_key(asdict(more)) == key
    assert settings_key(asdict(longer)) != key
    until = [replace(cfg.budget, accuracy=0.9, default_steps=steps) for steps in (1000, 2000)]
    assert len({settings_key(asdict(replace(cfg, budget=one))) for one in until} | {key}) == 3


MEANINGS = {
    Effect.FIXED: "seed init_from trainer.threads choices.attn hydra.run.dir attn part trainer",
    Effect.LENGTH: "budget budget.steps budget.tokens",
    Effect.PLACE: "data.path data.val_path tokenizer.path",
    Effect.VIEW: "log_every model.activation_checkpointing sample.tokens sweep.until logger.x.y",
    Effect.RESULT: "attn.scale part.gate.granularity pattern[0] model data.mask_documents",
}


@pytest.mark.parametrize("expected", MEANINGS)
def test_a_setting_has_the_meaning_of_its_field_or_of_one_above(expected):
    assert {effect_of(name) for name in MEANINGS[expected].split()} == {expected}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"code": {"a": "1", "b": "3"}}, ["different code in b"]),
        ({"code": {"a": "1"}}, ["different code in b"]),
        ({"text": "t2"}, ["different text"]),
        ({"weights": "w"}, ["different weights in init_from"]),
        ({"device": "cuda"}, ["on cpu, not cuda"]),
    ],
)
def test_what_differs_is_named(change, said):
    assert differences(MADE, replace(MADE, **change)) == said


def test_a_run_without_a_record_is_unknown_and_one_of_two_codes_is_neither(tmp_path):
    assert RunFolder(tmp_path).read_provenance() is None
    assert differences(None, MADE) == ["its code is unknown"]
    other = replace(MADE, code={"a": "1", "b": "3"})
    mixed, unknown = resume_provenance(MADE, other, 7), resume_provenance(None, MADE, 7)
    assert differences(mixed, other) == ["it was resumed with different code or a different budget"]
    assert len({one.digest for one in (mixed, MADE, other, unknown)}) == 4
    assert resume_provenance(MADE, MADE, 7) == MADE
    RunFolder(tmp_path).write_provenance(mixed)
    assert RunFolder(tmp_path).read_provenance() == mixed
    (tmp_path / "identity.json").write_text('{"text": 1')
    assert RunFolder(tmp_path).read_provenance() is None


def test_an_extended_run_lists_its_budgets_and_its_first_can_be_recovered():
    other = replace(MADE, code={"a": "1", "b": "3"})
    longer = resume_provenance(MADE, MADE, 7, "7 steps")
    assert (MADE.budgets, longer.budgets) == ([], ["7 steps"])
    assert differences(longer, MADE) == ["it was resumed with different code or a different budget"]
    assert longer.digest != MADE.digest
    assert resume_provenance(longer, MADE, 8) == longer  # it was stopped, and goes on
    assert resume_provenance(longer, MADE, 7, "7 steps") == longer
    # Other code came before the first budget ended, with the second one, and after that.
    early = resume_provenance(resume_provenance(MADE, other, 3), other, 7, "7 steps")
    late = resume_provenance(MADE, other, 7, "7 steps")
    later = resume_provenance(longer, other, 8)
    for one in (longer, late, later):
        assert one.at_first_budget() == MADE
    assert early.at_first_budget() == resume_provenance(MADE, other, 3)
    assert MADE.at_first_budget() == MADE


def test_code_of_parts_and_pattern_layers_counts_and_unused_attn_does_not():
    cfg = settings("pattern=[mha_wrapper,single_head]", "part=[gate,sink]", "model.num_layers=2")
    modules = hash_code_for(cfg)
    assert "gptattn.attention.parts.gate" in modules
    assert "gptattn.attention.variants.single_head" in modules
    assert "gptattn.attention.variants.mla" not in modules
    turned = replace(cfg, part=dict(reversed(cfg.part.items())))
    assert settings_key(asdict(turned)) != settings_key(asdict(cfg))
    headwise = cfg.part["gate"] | {"granularity": "headwise"}
    other = replace(cfg, part=cfg.part | {"gate": headwise})
    assert settings_key(asdict(other)) != settings_key(asdict(cfg))
