"""Writing models to files, all or nothing."""
