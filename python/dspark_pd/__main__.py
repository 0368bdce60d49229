"""``python -m dspark_pd``: the same as the ``dspark-pd`` command."""

from __future__ import annotations

import sys

from dspark_pd.cli import main

if __name__ == "__main__":
    sys.exit(main())
