"""Small graphs and SavedModels for tests; `testdata/README.md` lists them."""
