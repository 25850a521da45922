"""What a cell calls: thin objects over one `HostClient`."""
