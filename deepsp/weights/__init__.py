"""Parameters that every rank holds a part of; how they are gathered and used."""
