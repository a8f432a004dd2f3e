"""Tags of TVM's tensor expressions for each thread by itself.

TVM holds the tag that its operators are written under (`tvm.te.tag_scope`) once for a process: two
threads that legalize at once raise "nested op_tag is not allowed", or give each other's tensors
their tags.
"""

from __future__ import annotations

import threading
from typing import Any

from tvm.te import tag

_held = threading.local()


class _OfThread(type):
    @property
    def _current(cls) -> Any:
        return getattr(_held, "scope", None)

    @_current.setter
    def _current(cls, scope: Any) -> None:
        _held.scope = scope


def hold_tags_by_thread() -> None:
    """Puts the scope of each thread in the place of that of the process, once.

    The methods of scopes that were made before look their class up by its name.
    """
    if not isinstance(tag.TagScope, _OfThread):
        tag.TagScope = _OfThread("TagScope", (tag.TagScope,), {})
