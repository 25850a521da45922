"""Entry of the command ``rlm-kernel``."""

from .cli.main import app

__all__ = ("main",)


def main() -> None:
    """Run the command line."""
    app(prog_name="rlm-kernel")


if __name__ == "__main__":
    main()
