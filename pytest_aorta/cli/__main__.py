"""Entry point of ``python -m pytest_aorta.cli``, which is the command ``aorta``."""

import sys

from pytest_aorta.cli.main import main

sys.exit(main())
