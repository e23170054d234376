"""docs/variants.md repeats the texts of the menu's files, and its counts match today's models."""

import re

import pytest
import variants_page
from building import settings

CHOICES = list(variants_page.choices())
TEXT = variants_page.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.key)
def test_the_page_has_each_choice_with_todays_counts(choice, monkeypatch):
    monkeypatch.setattr("measuring.menu.settings", lambda overrides: settings(*overrides))
    assert f"\n{variants_page.row(choice)}" in TEXT
    section = TEXT.partition(f"\n### {choice.name}\n")[2].partition("\n#")[0]
    assert choice.definition in section
    assert choice.paper in section
    assert choice.use in section


def test_every_picture_on_the_page_exists():
    places = re.findall(r"!\[.*?\]\((.*?)\)", TEXT)
    assert places
    assert all((variants_page.PAGE.parent / place).is_file() for place in places)
    assert {variants_page.PAGE.parent / place for place in places} == {
        *variants_page.PICTURES.glob("*.png")
    }
