"""L5, capabilities: the ops and layers of an untrusted file that do more than compute.

They read or write files, run Python, keep state, or call out. `powers` reports them
from the file alone, with the triggers of each; nothing of the file is loaded or
executed. Harm that lies in the weights is not detected.
"""

import typing

from geutil import lazy

__all__ = [
    "Power",
    "Powers",
    "powers",
]

if typing.TYPE_CHECKING:
    from geutil.capabilities.capability_kinds import Power, Powers
    from geutil.capabilities.scan import powers
else:
    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            "capability_kinds": ("Power", "Powers"),
            "scan": ("powers",),
        },
    )
