"""The real DeepSeek Harness behind the port (reference line 0.1.2a3, also 0.2.1rc2)."""
