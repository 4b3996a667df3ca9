"""L6, the `geutil` command."""
