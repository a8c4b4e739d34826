"""The module ``time`` with the functions that it has when a rank starts.

Scripts replace functions of ``time``, in this module and in all that have imported them, such as freezegun does. The
recorder's times must not stand still then.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import time as time
else:
    import time as _time

    time = SimpleNamespace(**vars(_time))
