"""``python -m pytest_aorta`` is the command ``aorta``."""

from __future__ import annotations

import sys

from pytest_aorta.cli import main

sys.exit(main())
