"""L4, models: opens, inspects, edits and saves them."""
