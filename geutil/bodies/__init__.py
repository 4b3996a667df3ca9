"""Bodies of functions: opened as graphs, edited, written back, put in place of calls.

`OpenedFunctions` makes graphs of the functions that a graph calls, and functions of the
edited graphs; `inline_calls` replaces calls by the bodies that they call. Ops that call
functions, and the nodes of a `FunctionDef`, are read in `geutil.graph`
(`function_calls`, `call_graph`), since looks and the memory model need them. Models
open their functions in `geutil.model.function_library`.
"""

import typing

from geutil import lazy

__all__ = ["Inlined", "Kept", "OpenedFunctions", "inline_calls"]

if typing.TYPE_CHECKING:
    from geutil.bodies.function_bodies import OpenedFunctions
    from geutil.bodies.inlining import Inlined, Kept, inline_calls
else:
    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            "function_bodies": ("OpenedFunctions",),
            "inlining": ("Inlined", "Kept", "inline_calls"),
        },
    )
