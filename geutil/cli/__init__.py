"""L5, the `geutil` command."""
