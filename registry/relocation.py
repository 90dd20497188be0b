"""A project folder that was moved or copied: MLflow's absolute paths of files, brought to where the files are."""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

# Where MLflow's database keeps addresses of files.
_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def follow_files(database: Path, experiment_id: str, folder: Path) -> None:
    """Replace the former folder of the project's files by the present one, everywhere and in one transaction.

    Nothing is done when the database alone was copied and its files are still at the former place.

    Args:
        database: the project's own SQLite file, migrated.
        experiment_id: of the experiment whose files are meant.
        folder: where the project's files are now, absolute.

    Raises:
        sqlite3.Error: the database cannot be read or written.
    """
    with closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        question = "SELECT artifact_location FROM experiments WHERE experiment_id = ?"
        former = str(connection.execute(question, (int(experiment_id),)).fetchone()[0])
        now = folder.as_uri()
        if former == now or not former.startswith("file:"):
            return
        if Path(url2pathname(urlsplit(former).path)).is_dir() and not folder.is_dir():
            return
        for table, column in _COLUMNS:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                (now, len(former) + 1, former, len(former) + 1, f"{former}/"),
            )
