"""Which cell is asking: a task and a thread keep the cell that started them.

ipykernel answers "the latest cell" for a thread that it does not know. A request
that is charged to the wrong cell would run tools in a call that it does not
belong to, so we keep our own variable: tasks copy it, threads are given it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ("current", "forget", "track")

Header = dict[str, Any]

_NOBODY: Header = {}
_origin: ContextVar[Header] = ContextVar("rlm_kernel_origin", default=_NOBODY)
_stock_start: Callable[[threading.Thread], None] = threading.Thread.start
_stock_submit: Callable[..., "Future[Any]"] = ThreadPoolExecutor.submit


def current() -> Header:
    """The Jupyter message of the cell that this code belongs to; {} for none."""
    return _origin.get()


def track(shell: "InteractiveShell") -> Callable[[], None]:
    """Note the cell at each start of one in *shell*.

    Returns:
        The registered listener, to be given to `forget`.
    """

    def note_cell() -> None:
        _origin.set(shell.kernel.get_parent("shell"))  # type: ignore[attr-defined]  # a Jupyter shell has one

    shell.events.register("pre_execute", note_cell)
    threading.Thread.start = _start_with_origin  # type: ignore[assignment, method-assign]  # ipykernel wraps Thread.run likewise
    # A pool's threads outlive the cell that started them.
    ThreadPoolExecutor.submit = _submit_with_origin  # type: ignore[assignment, method-assign]  # likewise
    return note_cell


def forget(shell: "InteractiveShell", listener: Callable[[], None]) -> None:
    """Undo `track`."""
    shell.events.unregister("pre_execute", listener)
    threading.Thread.start = _stock_start  # type: ignore[assignment, method-assign]  # the original goes back
    ThreadPoolExecutor.submit = _stock_submit  # type: ignore[method-assign]  # likewise


def _start_with_origin(thread: threading.Thread) -> None:
    origin = _origin.get()
    run = thread.run

    def run_with_origin() -> None:
        _origin.set(origin)
        run()

    thread.run = run_with_origin  # type: ignore[method-assign]  # this one instance
    _stock_start(thread)


def _submit_with_origin(
    pool: ThreadPoolExecutor,
    function: Callable[..., Any],
    /,
    *args: Any,
    **options: Any,
) -> "Future[Any]":
    origin = _origin.get()

    def call_with_origin() -> Any:
        _origin.set(origin)
        return function(*args, **options)

    return _stock_submit(pool, call_with_origin)
