"""Writes its process id to the file named, then hangs."""
import os
import sys
import time
from pathlib import Path

Path(sys.argv[1]).write_text(str(os.getpid()))
print("now waiting", flush=True)
time.sleep(600)
