"""The launcher with `stub_shard.py` as its server: all of its process handling, none of a model's weight."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from deepseek_tgi.launcher import main as launcher

STUB = str(Path(__file__).with_name("stub_shard.py"))
make_plan = launcher.make_plan


if __name__ == "__main__":
    launcher.make_plan = lambda config, model, environ: dataclasses.replace(
        make_plan(config, model, environ), server_argv=(sys.executable, STUB)
    )
    sys.exit(launcher.main())
