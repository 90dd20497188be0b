"""The runbook, docs/operations.md, followed on the small project: its blocks in order, each command as it stands there.

Blocks that need Prefect's and MLflow's servers are followed when MERGEFLOW_RUNBOOK=servers is set (minutes); their
commands are parsed here always, and tests/flows/test_deployments.py and test_mlflow_server.py run what they do.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from cyclopts import CycloptsError
from typer.testing import CliRunner

from mergeflow.cli import add_all_commands, app
from tests.flows.runbook import PAGE, Block, read_blocks
from tests.flows.small_project import ROOT, environment, run_in
from tests.guard import guarded
from tests.loopback import free_port
from tests.postgres import POSTGRES, postgres_server
from tests.project_folder import change_params

pytestmark = pytest.mark.slow
SERVERS = os.environ.get("MERGEFLOW_RUNBOOK") == "servers"
PEOPLE = {f"GIT_{who}_{what}": "runbook@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
def stand(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    """The finished project as git holds it, with gates that a handful of images can pass."""
    project = Path(shutil.copytree(finished[0], tmp_path / "mergeflow", symlinks=True))
    change_params(project, {"registry.tolerance": 1.0, "registry.confidence": None})
    shutil.copy(ROOT / "prefect.yaml", project)
    shutil.copytree(ROOT / "deploy", project / "deploy")
    shutil.copytree(ROOT / "studies", project / "studies")  # whose outputs only who ran them has
    assert run_in(project, "dvc", "commit", "--force", "--quiet", "register").returncode == 0
    return project


def page(project: Path) -> list[Block]:
    remote = project.parent / "mergeflow-remote"
    return read_blocks({"REPOSITORY": str(project), "REMOTE": str(remote), "textures": "red"})


def test_without_servers(stand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stand)
    for block in page(stand):
        if block.how != "run":
            continue
        if block.language == "python":
            exec(compile(block.text, "docs/operations.md", "exec"), {})
            continue
        for words in block.commands:
            if words[0] == "cd":
                monkeypatch.chdir(words[1])
            else:
                status, output = follow(Path.cwd(), words)
                assert status == 0, f"{' '.join(words)}\n{output}"
    assert Path.cwd() == stand.parent / "again/mergeflow"
    status, output = follow(Path.cwd(), ["mergeflow", "registry", "list"])
    assert "@champion" in output
    assert run_in(stand, "git", "log", "--oneline").stdout.count("\n") == 1
    assert (stand / "lineage.svg").read_text().startswith("<")
    history = follow(stand, ["mergeflow", "registry", "history", "--json"])[1]
    assert [history.count(f'"action": "{what}"') for what in ("rollback", "force")] == [1, 1]


def follow(folder: Path, words: list[str]) -> tuple[int, str]:
    """Run one command; mergeflow's own in this process, but for `run`: each start of it costs seconds."""
    if words[0] == "mergeflow" and words[1] != "run":
        add_all_commands(folder)
        done = CliRunner().invoke(app, words[1:])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output
    result = run_in(folder, *words, timeout=900, **PEOPLE)
    return result.returncode, result.stdout + result.stderr


def test_the_other_commands_are_parsed_by_their_programs(stand: Path) -> None:
    """Blocks that were not run: each program takes its words, and the deployments that are named exist."""
    from dvc.cli.parser import get_main_parser
    from prefect.cli._app import _app as prefect

    add_all_commands(stand)
    parsers: dict[str, Callable[[list[str]], Any]] = {
        "dvc": get_main_parser().parse_args,
        "mergeflow": lambda words: parse(typer.main.get_command(app), words),
        "prefect": lambda words: prefect.parse_args(words, exit_on_error=False, print_error=False),
    }
    seen = set()
    for block in page(stand):
        for words in block.commands if block.language == "console" else []:
            while "=" in words[0]:  # variables before the command
                words = words[1:]
            seen.add(words[0])
            if words[0] in parsers:
                parsers[words[0]]([word for word in words[1:] if word != "--no-prompt"])
            else:
                # mlflow's server: tests/loopback.py starts it with these options
                others = "git cd make source export mlflow pg_dump createdb pg_restore"
                assert words[0] in others.split(), words
    assert seen >= set(parsers)
    deployed = {deployment["name"] for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    assert (
        set(re.findall(r"deployment run [\w-]+/([\w-]+)", PAGE.read_text()))
        == {"mergeflow-nightly", "mergeflow-add-task"}
        <= deployed
    )
    with pytest.raises(CycloptsError):
        parsers["prefect"](["worker", "start", "--pol", "mergeflow"])


def parse(command: Any, words: list[str]) -> None:
    context = command.make_context(command.name, list(words))
    if hasattr(command, "resolve_command"):
        name, below, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert below is not None, name
        parse(below, rest)


@pytest.mark.skipif(not SERVERS, reason="minutes; set MERGEFLOW_RUNBOOK=servers to follow the runbook with its servers")
def test_with_servers(stand: Path) -> None:
    """All but the installation, in one shell; the page's servers on free ports and a PostgreSQL of the test's own."""
    assert POSTGRES, "Debian's package postgresql is not installed"
    ports = {"127.0.0.1:5000": free_port(), "127.0.0.1:4200": free_port()}
    with postgres_server() as database:
        for name in ("mlflow", "prefect"):
            make = ["psql", "-q", "-h", database.partition("host=")[2], "-U", "mergeflow", "postgres", "-c"]
            subprocess.run([*make, f"CREATE DATABASE {name}"], check=True)
        script = shell_script(page(stand))
        for name in ("mlflow", "prefect"):
            script = script.replace(f"mergeflow@/{name}", f"mergeflow@/{name}?{database.partition('?')[2]}")
        for address, port in ports.items():
            host, _, old = address.partition(":")
            script = script.replace(address, f"{host}:{port}").replace(f"--port {old}", f"--port {port}")
        follow_in_shell(script, stand)


def follow_in_shell(script: str, folder: Path, variables: dict[str, str] | None = None) -> str:
    log = folder.parent / f"{folder.name}.log"
    with log.open("w") as sink:
        shell = guarded(["bash", "-eu", "-c", script])
        env = environment() | PEOPLE | (variables or {})
        process = subprocess.Popen(shell, cwd=folder, env=env, stdout=sink, stderr=sink, start_new_session=True)
        try:
            status = process.wait(3000)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, log.read_text()[-4000:]
    return log.read_text()


def shell_script(blocks: list[Block]) -> str:
    """Return one script: servers in the background, each waited for; every command announced."""
    lines = []
    for block in blocks:
        if block.language == "python":
            lines.append(f"python - <<'END'\n{block.text}END")
        elif block.how == "background":
            lines.append(f"({block.text.strip()}) &")
            port = re.search(r"--port (\d+)", block.text)
            lines.append(
                f"until curl -sf http://127.0.0.1:{port[1]}/api/health -o /dev/null || "
                f"curl -sf http://127.0.0.1:{port[1]}/health -o /dev/null; do sleep 1; done"
                if port
                else ""
            )
        elif block.how != "never":
            lines += [f"echo; echo {shlex.quote('$ ' + line)}\n{line}" for line in block.text.splitlines()]
    return "\n".join(lines)
