"""Print ``docs/wire.md``: ``python -m kernel_ext.wire > docs/wire.md``."""

import sys

from .page import wire_page

sys.stdout.write(wire_page())
