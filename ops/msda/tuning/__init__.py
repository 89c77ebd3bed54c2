"""Which launch shapes, and which backend under `auto`, run a problem: by shape class, from a table."""
