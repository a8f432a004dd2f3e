"""Entry point of ``python -m tvm_fusion`` and of the script ``tvm-fusion``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
