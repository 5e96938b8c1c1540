"""Entry point of every background process; started by runtime/local.py, not by users."""

import os
import sys

from prl_notebook.runtime.child import main

main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # engines leave threads behind that would keep the interpreter from ending
