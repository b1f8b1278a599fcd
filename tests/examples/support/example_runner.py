"""Examples are run as a person runs them: in a process and a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
TRAINED = EXAMPLES / "trained_a"
MODEL = TRAINED / "trained_a.onnx"


class Runner:
    """`run("census.py", "model.onnx")` -> the finished process, whose output is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = dict(os.environ)

    def __call__(self, script: str, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        assert code == 0 or done.stderr.strip(), "an error says what it is"
        assert "Traceback" not in done.stderr
        return done
