"""`kvkeep models`: the aliases that stand for a model."""

from __future__ import annotations

from rich.text import Text

from kvkeep.cli import common
from kvkeep.runtime import models


def run() -> None:
    """List the model aliases.

    Every other name is a local folder or a hub id.
    """
    console = common.output()
    for model in models.available():
        place = f"here: {model['path']}" if model["cached"] else "not on this machine yet: fetched at first use"
        console.print(model["alias"], style="bold")
        for line in (model["description"], model["architecture"], model["size"], place):
            console.print(Text(f"    {line}"), soft_wrap=True)
    console.print("\n--model also takes a local folder or a hub id.")
