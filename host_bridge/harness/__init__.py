"""The harness: the only thing that runs model loops, seen through one port."""
