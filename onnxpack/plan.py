"""The plan: how each site runs and how each weight is stored. Pure data, made by a pure function.

`build` executes exactly a plan; what it decides is here for everybody to read before anything is written. How it is
decided: the room `planning`.
"""

from __future__ import annotations

from onnxpack.planning.make import make_plan
from onnxpack.planning.records import OWN_CODES, Plan, PlannedWeight
from onnxpack.planning.weights import weights_of

__all__ = ["OWN_CODES", "Plan", "PlannedWeight", "make_plan", "weights_of"]
