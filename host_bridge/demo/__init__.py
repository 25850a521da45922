"""The demonstration: a scripted model on loopback, so that nothing else is needed."""
