"""Parameters that are sharded over ranks: how they are gathered and used."""
