"""The contract between a kernel and its host bridge; standard library only."""
