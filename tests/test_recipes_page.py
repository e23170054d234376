"""docs/recipes.md has every recipe with its release, and its counts match today's models."""

import re

import pytest
import recipes_page
from building import menu

TEXT = recipes_page.PAGE.read_text(encoding="utf-8")


def test_the_page_has_each_recipe_with_its_release_oldest_first():
    rows = re.findall(r"^\| (\w+) \| (.*?) \| (\d{4}) \| ", TEXT, re.MULTILINE)
    names = [name for name, *_ in rows]
    assert names == recipes_page.oldest_first()
    assert sorted(names) == sorted(menu("recipe"))
    assert {name: (year, title) for name, title, year in rows} == {
        name: recipes_page.release(name) for name in names
    }


@pytest.mark.slow
@pytest.mark.page
@pytest.mark.parametrize("name", menu("recipe"))
def test_the_page_has_each_recipe_with_todays_counts(name):
    assert f"\n{recipes_page.row(name)} " in TEXT
