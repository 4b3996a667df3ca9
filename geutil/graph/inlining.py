from dataclasses import dataclass, field


@dataclass
class Inlined:
    graph_def: object
    kept: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)
    origins: dict = field(default_factory=dict)


def inline_calls(graph_def, *, protected_names=()):
    return Inlined(graph_def)
