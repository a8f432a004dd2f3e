"""python -m tvm_fusion.bench SUITE: as python -m tvm_fusion bench --suite SUITE."""

from ..cli import bench_main

if __name__ == "__main__":
    raise SystemExit(bench_main())
