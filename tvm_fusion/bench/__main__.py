"""python -m tvm_fusion.bench: see run.py."""

import sys

from .run import main

sys.exit(main())
