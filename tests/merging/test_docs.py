"""The page of methods is the catalog's, and says of every method what a reader needs."""

from pathlib import Path

import pytest

from mergeflow.commands.methods_page import method_section, methods_page
from mergeflow.errors import MergeflowError
from mergeflow.merging import load_recipe, methods
from mergeflow.merging.compression.compressor import compressors

ROOT = Path(__file__).parents[2]


def test_the_page_lists_and_explains_every_method_and_compressor():
    page = methods_page()
    for name in (*methods(), *compressors()):
        assert f"| [`{name}`](#{name}) |" in page
        assert method_section(name) in page


@pytest.mark.parametrize("name", [*methods(), *compressors()])
def test_every_method_tells_formula_arguments_property_and_source(name):
    section = method_section(name)
    for part in ("```\n", "*Property.* ", "*Source.* "):
        assert len(section.split(part)[1].strip()) > 10
    args = (compressors() if name in compressors() else methods())[name].args
    for key, field in args.model_fields.items():
        assert f"`{key}`" in section
        assert field.description


def test_unknown_method():
    with pytest.raises(MergeflowError, match="did you mean 'cart'"):
        method_section("crat")


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_recipes_are_valid(path):
    load_recipe(path)
