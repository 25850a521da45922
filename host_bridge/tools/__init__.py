"""Tools that models see: one module per family."""
