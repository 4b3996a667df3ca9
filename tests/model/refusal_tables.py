"""Tables of calls that are refused."""

import re


def not_refused(error, cases, unchanged=None):
    """Return what came of the calls that did not raise an error with their message.

    A case is a name, a call without arguments, and a regular expression. If there is a
    model that no call may change, those that do are returned, too.
    """
    wrong = {}
    before = _ends_and_graph(unchanged)
    for name, call, message in cases:
        try:
            wrong[str(name)] = f"it returned {call()!r}"
        except error as caught:
            if not re.search(message, str(caught)):
                wrong[str(name)] = str(caught)
        if _ends_and_graph(unchanged) != before:
            wrong[str(name)] = "the model changed"
    return wrong


def _ends_and_graph(model):
    if model is None:
        return None
    graph_def = model.graph.as_graph_def(add_shapes=True)
    return list(model.inputs), list(model.outputs), graph_def
