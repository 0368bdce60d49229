"""Starts one fake engine in a bed, prints its group, then waits to be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from dspark_pd.bed import Bed, EngineSpec

if __name__ == "__main__":
    with Bed("owner", folder=Path(sys.argv[1])) as bed:
        (engine,) = bed.start([EngineSpec("e", "unified", Path("model"))])
        print(engine.pid, flush=True)
        time.sleep(60)
