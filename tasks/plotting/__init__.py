"""How the project's figures look and are written; the stage `figures` draws with it."""
