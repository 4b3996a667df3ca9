"""Programs: models as protobufs, and the way from them to graphs and functions."""
