"""The managed kernel's process: ``python -m kernel_ext -f CONNECTION_FILE``."""

from .guard import die_with_owner, start_guard

__all__ = ("main",)


def main() -> None:
    """Run the kernel until it is shut down or its owner ends.

    Raises:
        SystemExit: Its owner has ended already, or its connection has no key.
    """
    die_with_owner()
    start_guard()
    # Not before: the guard is a copy of this process.
    from .application import ManagedKernelApp

    ManagedKernelApp.launch_instance()


if __name__ == "__main__":
    main()
