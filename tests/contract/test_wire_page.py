"""The page that people read is the one that the dataclasses make."""

from pathlib import Path

from kernel_ext.wire.page import wire_page

PAGE = Path(__file__).parents[2] / "docs/wire.md"


def test_the_page_is_what_the_wire_says():
    # Make it again with: python -m kernel_ext.wire > docs/wire.md
    assert PAGE.read_text("utf-8") == wire_page()
