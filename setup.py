"""Packaging of tvm_fusion."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PINS = runpy.run_path(str(HERE / "tvm_fusion" / "_pins.py"))
VERSION = runpy.run_path(str(HERE / "tvm_fusion" / "_version.py"))["__version__"]

EXTRAS = {
    # The oldest that CI ran beside. With 2.9 the backend of torch.compile fails, with 2.6 importing
    # models of transformers, too.
    "torch": ["torch>=2.13"],
    "onnx": ["onnx>=1.17"],
    "report": ["rich", "matplotlib"],
    "bound": ["scipy"],
    "docs": ["mkdocs-material", "mkdocs-jupyter"],
    "profile": ["nvtx"],
    "models": ["transformers", "timm"],  # whose architectures `python -m tests.zoo` compiles
}
EXTRAS["test"] = [
    *EXTRAS["torch"],
    "onnx==1.23.*",  # the list of conformance tests is that of one release
    *EXTRAS["report"],
    *EXTRAS["docs"],
    "expecttest",  # PyTorch's operator database imports it
    *EXTRAS["models"],
    "pytest",
    "pytest-xdist",
    "nbclient",
    "jupytext",
    "playwright",  # drives the Chromium that is installed
    "mypy",
    "ipykernel",
    "setuptools",
    "wheel",
]

setup(
    name="tvm_fusion",
    version=VERSION,
    description="Cost-driven operator fusion for Apache TVM Relax",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["tvm_fusion", "tvm_fusion.*"]), "tvm_fusion.configs"],
    package_dir={"tvm_fusion.configs": "configs"},
    package_data={
        "tvm_fusion": ["py.typed"],
        "tvm_fusion.configs": ["*.toml", "*.json"],
        "tvm_fusion.report.html": ["page/*", "vendor/*"],
    },
    install_requires=[
        *PINS["TVM_REQUIREMENTS"],
        "numpy",
        "scipy",
        "filelock",
        # The module that MetaSchedule imports, in 6 MB. The distribution "xgboost", which the extra
        # apache-tvm[meta-schedule] asks for, is 132 MB and pulls in NCCL with another 352 MB.
        "xgboost-cpu",
    ],
    extras_require=EXTRAS,
    # No entry point in the group "tvm.backends": TVM would load it, and with it this package, in
    # every process that imports TVM. `import tvm_fusion` registers the pipeline.
    entry_points={
        "console_scripts": ["tvm-fusion = tvm_fusion.__main__:main"],
        "torch_dynamo_backends": ["tvm_fusion = tvm_fusion.torch_backend:backend"],
    },
    zip_safe=False,
)
