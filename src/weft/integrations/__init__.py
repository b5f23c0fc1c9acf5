"""weft under other projects' engines."""
