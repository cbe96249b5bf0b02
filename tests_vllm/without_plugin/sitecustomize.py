"""Keeps kvkeep's entry points from vLLM where KVKEEP_HIDE_PLUGIN is set: on the path of one test's processes only."""

import importlib.metadata
import os

if os.environ.get("KVKEEP_HIDE_PLUGIN"):
    _entry_points = importlib.metadata.entry_points

    def _without(**parameters):
        found = _entry_points(**parameters)
        return type(found)(point for point in found if point.name != "kvkeep") if parameters else found

    importlib.metadata.entry_points = _without
