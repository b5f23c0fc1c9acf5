"""Choose the plan of a call. Importing this package imports `weft.ops`, so that the registry holds every op."""

from .. import ops as ops
