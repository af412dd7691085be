"""What dry_run/ takes from tools/, where that folder lies beside it."""
import runpy
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def of_tools(file, function):
    """A function of a file of tools/; one that does nothing where that folder is missing."""
    return runpy.run_path(str(TOOLS / file))[function] if TOOLS.is_dir() else lambda *_, **__: None
