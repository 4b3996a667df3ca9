"""Parts taken out, joined, renamed and replaced."""
