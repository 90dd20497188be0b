"""The runbook's restore from a bucket and a dump, followed on an empty host: another folder, another PostgreSQL."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.flows.kill_driver import make_toy_repository
from tests.flows.runbook import PAGE, Block, read_blocks
from tests.flows.test_operations import follow_in_shell, shell_script
from tests.loopback import free_port
from tests.postgres import POSTGRES, postgres_server

CHAPTER = "## Restore from a bucket and a dump"


@pytest.mark.nightly
@pytest.mark.skipif(not POSTGRES, reason="Debian's package postgresql is not installed")
def test_an_empty_host_has_all_versions_again(s3: str, tmp_path: Path) -> None:
    project = make_toy_repository(tmp_path / "first/mergeflow", steps=20)
    (tmp_path / "chapter.md").write_text(PAGE.read_text().split(CHAPTER)[1])
    names = {"REPOSITORY": str(tmp_path / "repository"), "BUCKET": "bucket"}
    server, save, database, restore = read_blocks(names, tmp_path / "chapter.md")
    remote = replace(save, how="run", text="dvc remote modify storage url s3://bucket/dvc\n")
    restore = replace(restore, text=restore.text.replace("registry history", "registry history --json"))
    new = replace(save, how="run", text="createdb mlflow\n")
    saved = on_a_host(project, [new, server, remote, save], s3)
    shutil.copytree(project / ".git", tmp_path / "repository")
    (tmp_path / "second").mkdir()
    shutil.move(tmp_path / "first/mlflow.dump", tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    restored = on_a_host(tmp_path / "second", [database, server, restore], s3)
    assert "as @champion" in saved
    assert restored.count('"action": "promote"') == 1
    assert "Nothing changed: every stage is up to date" in restored
    assert "bit-identical" in restored


def on_a_host(folder: Path, blocks: list[Block], s3: str) -> str:
    """Follow blocks in a shell with a PostgreSQL server of its own; return what they printed."""
    port = str(free_port())
    with postgres_server() as address:
        login = {"PGHOST": address.partition("host=")[2], "PGUSER": "mergeflow", "AWS_ENDPOINT_URL": s3}
        login |= {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}", "MLFLOW_S3_ENDPOINT_URL": s3}
        ready = [replace(block, how="background" if "mlflow server" in block.text else "run") for block in blocks]
        script = shell_script(ready).replace("5000", port)
        return follow_in_shell(f"PATH={POSTGRES[0]}:$PATH\n{script}", folder, login)
