"""`mergeflow --help`: every command is in a group and has an example that its own parser takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mergeflow.cli import EXAMPLES, GROUPS, add_all_commands, app
from mergeflow.commands.pages import every_command

add_all_commands(Path(__file__).parents[2])
COMMANDS = every_command(typer.main.get_command(app))


def test_every_command_has_an_example_and_a_group() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    assert {name for names in GROUPS.values() for name in names.split()} == {words.split()[0] for words in COMMANDS}


@pytest.mark.parametrize("words", sorted(EXAMPLES))
def test_the_example_is_taken_by_the_commands_parser(words: str) -> None:
    line = EXAMPLES[words]
    assert line.startswith(f"mergeflow {words}")
    COMMANDS[words].make_context(words, shlex.split(line)[1 + len(words.split()) :])


SEEDED = [words for words, command in COMMANDS.items() if any(param.name == "seed" for param in command.params)]


@pytest.mark.parametrize("words", SEEDED)
@pytest.mark.parametrize("seed", ["-1", str(2**63)])
def test_a_seed_that_some_generator_lacks_is_refused(words: str, seed: str) -> None:
    line = shlex.split(EXAMPLES[words])[1:]
    shown = CliRunner().invoke(app, [*line, f"--seed={seed}"], env={"COLUMNS": "120"}).output
    assert "Invalid value for '--seed'" in shown
    assert "9223372036854775807" not in CliRunner().invoke(app, [*line[: len(words.split())], "--help"]).output


def test_help_shows_groups_and_examples() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert all(f"─ {title} ─" in shown for title in GROUPS)
    shown = CliRunner().invoke(app, ["registry", "promote", "--help"]).output
    assert f"Example: {EXAMPLES['registry promote']}" in shown


@pytest.mark.parametrize("words", ["", *sorted(COMMANDS)])
def test_help_names_values_in_words_and_not_by_types_of_python(words: str) -> None:
    shown = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "160"}).output
    assert re.findall(r"<.*?>|\blist\[|Usage: .*(?:\{|\[\[)", shown) == []
    for parameter in COMMANDS[words].params if words else ():
        if parameter.param_type_name == "argument" and not parameter.hidden:
            assert re.search(rf"\b{parameter.name.upper()}\b", shown) or parameter.metavar in shown, parameter.name


def test_help_says_what_an_option_takes_and_whether_it_repeats() -> None:
    shown = CliRunner().invoke(app, ["linearity", "--help"], env={"COLUMNS": "160"}).output
    assert "mergeflow linearity [OPTIONS] [EXPERTS]..." in shown
    for option, value in (("--alpha", "FLOAT …"), ("--out", "PATH"), ("--data", "SOURCE …"), ("--samples", "INTEGER")):
        assert re.search(rf"{option} +{value} ", shown), option
