"""The command ``rlm-kernel``: one module per family of verbs."""
