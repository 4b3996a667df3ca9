"""The asset files that a MetaGraph names."""

from __future__ import annotations

from typing import Any

from geutil.graph._tf import AssetFileDef

_COLLECTION = "saved_model_assets"


def asset_files(meta_graph: Any) -> dict[str, str]:
    """Return the file in `assets/` for each constant node that names one.

    Version 1 keeps the definitions in a collection.
    """
    definitions = list(meta_graph.asset_file_def)
    if _COLLECTION in meta_graph.collection_def:
        for packed in meta_graph.collection_def[_COLLECTION].any_list.value:
            definition = AssetFileDef()
            if packed.Unpack(definition):
                definitions.append(definition)
    return {d.tensor_info.name.partition(":")[0]: d.filename for d in definitions}
