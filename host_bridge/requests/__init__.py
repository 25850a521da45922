"""Host requests: one module per family, one dispatcher before them all."""
