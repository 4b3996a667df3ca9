"""Bodies of functions: opened as graphs, edited, written back, put in place of calls.

`function_bodies` makes a graph of a function and a function of the edited graph;
`inlining` replaces calls by the bodies that they call. Ops that call functions, and
the nodes of a `FunctionDef`, are read in `geutil.graph` (`function_calls`,
`flat_body`), since looks and the memory model need them, too. Models open their
functions in `geutil.model.functions`.
"""
