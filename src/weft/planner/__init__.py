"""Which plan serves a call. It reads the registry, which is to have all operators."""

from .. import ops as ops
