"""The host bridge: owns kernels, the harness and every credential."""
