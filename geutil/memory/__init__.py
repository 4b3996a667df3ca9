"""What a step needs in memory: predicted from its graph, and measured."""
