"""The wordings of procedural documents, one a file: sentences, names and layouts, no two files sharing any.

``a`` is measured on; its words for things come into no other file (but "office", "results", "elm" into ``b``).
The others are trained on: ``c``, ``e`` and ``g`` are told in sentences, ``b``, ``d`` and ``f`` are formats of machines.
"""

from kvkeep.evaluation.wordings import a, b, c, d, e, f, g

ALL = {"a": a.WORDING, "b": b.WORDING, "c": c.WORDING, "d": d.WORDING, "e": e.WORDING, "f": f.WORDING, "g": g.WORDING}
