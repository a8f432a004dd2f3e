"""Entry point of ``python -m tvm_fusion``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
